"""The chat store: trees of messages, search over many, and what a broken or full file does."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.chats import Chats
from mlxlite.database import StoreBusy, StoreFault, StoreFull
from mlxlite.errors import BadRequest, NotFound
from mlxlite.transcript import Transcript
from tests.live import WAIT_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "chats.sqlite3"


@pytest.fixture
def chats(path: Path) -> Iterator[Chats]:
    found = Chats(path)
    yield found
    found.close()


def message(content: str, parent: str | None = None, role: str = "user") -> dict[str, Any]:
    return {"parent": parent, "role": role, "content": content}


def begin(chats: Chats, *contents: str, title: str | None = None) -> str:
    """A session whose messages follow each other; users and assistants take turns."""
    session_id: str = chats.create(title, {}).result(WAIT_S)["id"]
    parent = None
    for place, content in enumerate(contents):
        role = ("user", "assistant")[place % 2]
        parent = chats.add(session_id, message(content, parent, role)).result(WAIT_S)["id"]
    return session_id


def texts(chats: Chats, session_id: str) -> list[str]:
    return [m["content"] for m in chats.read(session_id).result(WAIT_S)["messages"]]


def found(chats: Chats, query: str) -> list[dict[str, Any]]:
    return chats.search(query).result(WAIT_S)


# ------------------------------------------------------------------------------ what is kept


def test_nothing_is_made_before_it_is_asked(path: Path) -> None:
    chats = Chats(path)
    assert not path.parent.exists()
    assert chats.newest(10).result(WAIT_S) == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    chats.close()


def test_a_session_comes_back_as_it_was(path: Path) -> None:
    chats = Chats(path, clock=lambda: 1_000_000.25)
    made = chats.create("Title", {"temperature": 0.5, "système": "ß"}).result(WAIT_S)
    assert made == {
        "id": made["id"], "title": "Title", "created": 1_000_000.25, "updated": 1_000_000.25,
        "settings": {"temperature": 0.5, "système": "ß"}, "leaf": None, "messages": [],
    }  # fmt: skip
    given = {
        "parent": None, "role": "assistant", "content": "a\0\u2028🙂", "reasoning": "hm",
        "tool_calls": [{"id": "c", "function": {"name": "f"}}], "usage": {"tokens": 1},
    }  # fmt: skip
    added = chats.add(made["id"], given).result(WAIT_S)
    assert added == {"id": added["id"], "created": 1_000_000.25, **given}
    chats.close()
    again = Chats(path)
    session = again.read(made["id"]).result(WAIT_S)
    assert session["messages"] == [added] and session["leaf"] == added["id"]
    assert session["created"] < session["updated"]
    again.close()


def test_branches(chats: Chats) -> None:
    session_id = begin(chats, "root", "one")
    root, one = chats.read(session_id).result(WAIT_S)["messages"]
    two = chats.add(session_id, message("two", root["id"], "assistant")).result(WAIT_S)
    assert two["parent"] == one["parent"] == root["id"]
    assert chats.read(session_id).result(WAIT_S)["leaf"] == two["id"]
    changed = chats.change(session_id, {"leaf": one["id"]}).result(WAIT_S)
    assert changed["leaf"] == one["id"] and "messages" not in changed
    other = begin(chats, "elsewhere")
    stranger = chats.read(other).result(WAIT_S)["leaf"]
    for act in (
        lambda: chats.add(session_id, message("x", stranger)),
        lambda: chats.add(session_id, message("x", "m_none")),
        lambda: chats.change(session_id, {"title": "T", "leaf": stranger}),
    ):
        with pytest.raises(BadRequest, match="is no message of this session"):
            act().result(WAIT_S)
    assert texts(chats, session_id) == ["root", "one", "two"]
    assert chats.read(session_id).result(WAIT_S)["title"] == "root", "all of it or nothing"


def test_edit(chats: Chats) -> None:
    session_id = begin(chats, "question", "ans")
    answer = chats.read(session_id).result(WAIT_S)["messages"][1]
    changes = {"content": "answer", "reasoning": "r", "usage": {"n": 1}, "tool_calls": []}
    edited = chats.edit(session_id, answer["id"], changes).result(WAIT_S)
    assert edited == {**answer, **changes}
    assert chats.read(session_id).result(WAIT_S)["messages"][1] == edited
    assert len(found(chats, "answer")) == 1 and found(chats, "ans ") == []
    with pytest.raises(NotFound, match="message not found"):
        chats.edit(begin(chats, "x"), answer["id"], {"content": ""}).result(WAIT_S)


def test_unknown_sessions(chats: Chats) -> None:
    for act in (
        lambda: chats.read("s_none"),
        lambda: chats.change("s_none", {"title": "x"}),
        lambda: chats.delete("s_none"),
        lambda: chats.add("s_none", message("x")),
        lambda: chats.edit("s_none", "m_none", {"content": "x"}),
    ):
        with pytest.raises(NotFound, match="session not found"):
            act().result(WAIT_S)


def test_delete(chats: Chats, path: Path) -> None:
    gone, kept = begin(chats, "the secret plan", "yes"), begin(chats, "another plan")
    chats.delete(gone).result(WAIT_S)
    assert [row["id"] for row in chats.newest(10).result(WAIT_S)] == [kept]
    assert [row["id"] for row in found(chats, "plan")] == [kept]
    with pytest.raises(NotFound):
        chats.read(gone).result(WAIT_S)
    chats.close()
    for file in path.parent.iterdir():  # the index too, and the log
        assert b"secret" not in file.read_bytes() and b"sec" not in file.read_bytes(), file.name


def test_the_list(chats: Chats) -> None:
    ids = [begin(chats, f"question {n}", "answer") for n in range(5)]
    untouched = chats.newest(10).result(WAIT_S)
    assert [row["id"] for row in untouched] == ids[::-1]
    assert untouched[0]["title"] == "question 4" and untouched[0]["messages"] == 2
    assert untouched[0].keys() == {"id", "title", "created", "updated", "messages"}
    chats.change(ids[1], {"title": "renamed", "settings": {"a": 1}}).result(WAIT_S)
    order = [row["id"] for row in chats.newest(10).result(WAIT_S)]
    assert order == [ids[1], ids[4], ids[3], ids[2], ids[0]]
    pages, before = [], None
    while page := chats.newest(2, before).result(WAIT_S):
        pages.append([row["id"] for row in page])
        before = page[-1]["updated"]
    assert pages == [order[:2], order[2:4], order[4:]]


def test_times_never_stand_still(path: Path) -> None:
    """Nor run backwards: pages of a list would lose sessions."""
    now_s = [1000.0]
    chats = Chats(path, clock=lambda: now_s[0])
    for n in range(20):
        now_s[0] = 1000.0 - n
        begin(chats)
    rows = chats.newest(50).result(WAIT_S)
    times = [row["updated"] for row in rows]
    assert len(set(times)) == 20 and times == sorted(times, reverse=True)
    chats.close()


def test_titles(chats: Chats) -> None:
    session_id = begin(chats)
    assert chats.read(session_id).result(WAIT_S)["title"] == "New chat"
    system = chats.add(session_id, message("Be brief.", role="system")).result(WAIT_S)
    chats.add(session_id, message("  Why\nis the " + "x" * 99, system["id"])).result(WAIT_S)
    shown = chats.read(session_id).result(WAIT_S)["title"]
    assert shown == ("Why is the " + "x" * 99)[:80]
    assert chats.change(session_id, {"title": "Sky"}).result(WAIT_S)["title"] == "Sky"
    assert chats.change(session_id, {"title": None}).result(WAIT_S)["title"] == shown


def test_taking_in(chats: Chats) -> None:
    rows = [
        {"id": "1", "parent": None, "role": "user", "content": "Hi", "created": 5.0},
        {"id": "2", "parent": "1", "role": "assistant", "content": "a", "usage": {"n": 1}},
        {"id": "3", "parent": "1", "role": "assistant", "content": "b", "created": None},
    ]
    for _ in range(2):  # the ids are the file's, so twice is no clash
        made = chats.take_in(Transcript("Title", {"s": 1}, rows, "2")).result(WAIT_S)
        session = chats.read(made["id"]).result(WAIT_S)
        first, second, third = session["messages"]
        assert session["title"] == "Title" and session["settings"] == {"s": 1}
        assert second["parent"] == third["parent"] == first["id"] != "1"
        assert session["leaf"] == second["id"] and first["created"] == 5.0
        assert second["usage"] == {"n": 1} and third["created"] > 1e9


# ------------------------------------------------------------------------------------ search


def test_search(chats: Chats) -> None:
    old = begin(chats, "Die Straße ist lang", "Ja, die STRASSE")
    system = chats.add(old, message("strasse", None, "system")).result(WAIT_S)
    chats.add(old, message("strasse", system["id"], "tool")).result(WAIT_S)
    new = begin(chats, "strasse?", title="Named")
    rows = found(chats, "STRAßE")
    assert [(row["id"], row["title"]) for row in rows] == [
        (new, "Named"),
        (old, "Die Straße ist lang"),
    ]
    first, second = rows[1]["matches"]
    messages = chats.read(old).result(WAIT_S)["messages"]
    assert first == {"role": "user", "snippet": "Die Straße ist lang", "ranges": [[4, 10]],
                     "message": messages[0]["id"]}  # fmt: skip
    assert second["role"] == "assistant" and second["ranges"] == [[8, 15]]


@pytest.mark.parametrize(
    "query",
    ["a", "İ", "ab", "abc", 'a"b', '"""', "a*b", "a AND b", "NOT", "a:b", "(", "a\0b", "%", "__",
     "-a", "^abc", "{x}", "folded:abc", "NEAR(a b)", "'; DROP TABLE messages; --", "🙂",
     "🙂🙂🙂", "ß", "日本", "日本語", "  x", "\\", "a\nb", "\u0301\u0301\u0301"],
)  # fmt: skip
def test_no_query_is_special(chats: Chats, query: str) -> None:
    assert found(chats, query) == []
    mine = begin(chats, f"before {query} after")
    begin(chats, "nothing of the kind" if query not in ("a", "NOT") else "zzz")
    rows = found(chats, query)
    assert [row["id"] for row in rows] == [mine]
    (match,) = rows[0]["matches"]
    assert match["ranges"]


def test_the_index_follows_every_change(chats: Chats) -> None:
    session_id = begin(chats, "first words")
    message_id = chats.read(session_id).result(WAIT_S)["leaf"]
    for content, there, gone in (
        ("second words", "second", "first"),
        ("", "x" * 5, "second"),
        ("third", "third", "words"),
    ):
        chats.edit(session_id, message_id, {"content": content}).result(WAIT_S)
        assert len(found(chats, there)) == (1 if content else 0) and not found(chats, gone)
    chats.edit(session_id, message_id, {"usage": {"n": 1}}).result(WAIT_S)
    assert len(found(chats, "third")) == 1
    check(chats)


def check(chats: Chats) -> None:
    """SQLite's own: the index holds exactly what the messages do."""
    statement = "INSERT INTO texts (texts, rank) VALUES ('integrity-check', 1)"
    chats.ask(lambda connection: connection.execute(statement)).result(WAIT_S)


@pytest.mark.parametrize("query", ["match", "ma"])
def test_limits(chats: Chats, query: str) -> None:
    for n in range(8):
        begin(chats, *(f"match {n} {m}" for m in range(12)))
    rows = found(chats, query)
    assert [len(row["matches"]) for row in rows] == [10] * 5
    assert [row["title"] for row in rows] == [f"match {n} 0" for n in range(7, 2, -1)]
    assert rows[0]["matches"][9]["snippet"] == "match 7 9", "the first ten"


def test_many_matches_come_without_the_index(chats: Chats) -> None:
    """As well as with it: the same words in few and in many messages."""
    for n in range(10):
        rows = [{"id": str(m), "parent": None, "role": "user", "content": f"Common {m} x{n}"}
                for m in range(60)]  # fmt: skip
        chats.take_in(Transcript(None, {}, rows, "0")).result(WAIT_S)
    assert [len(row["matches"]) for row in found(chats, "common")] == [10] * 5
    (row,) = found(chats, "59 X3")
    assert row["matches"][0]["snippet"] == "Common 59 x3"


@pytest.mark.slow
def test_search_over_ten_thousand_messages(chats: Chats) -> None:
    """Under 30 ms on a machine of its own (the issue); judged ten times as generously."""
    words = "the time water größe model token stream answer capital France window".split()
    for n in range(100):
        rows = [
            {
                "id": str(m), "parent": None, "role": "user",
                "content": " ".join(words[(n * m + k * k) % 11] for k in range(90)) + f" rare{n}",
            }
            for m in range(100)
        ]  # fmt: skip
        chats.take_in(Transcript(None, {}, rows, "0")).result(WAIT_S)
    for query, count in (("the", 50), ("GRÖSSE", 50), ("rare77", 10), ("e ", 50), ("qq", 0)):
        taken = []
        for _ in range(5):
            began_s = time.perf_counter()
            rows = found(chats, query)
            taken.append(time.perf_counter() - began_s)
            assert sum(len(row["matches"]) for row in rows) == count, query
        assert sorted(taken)[2] < 0.3, (query, taken)


# -------------------------------------------------------------------------- broken and full


def pragma(chats: Chats, text: str) -> Any:
    """Run on the store's thread, outside of any transaction."""
    return chats._writer.submit(lambda: chats._connection.execute(text).fetchall()).result(WAIT_S)


def test_few_pages_of_a_database_are_kept_in_memory(chats: Chats) -> None:
    """SQLite's own bound is 2 MB a file, which a server then takes for good."""
    begin(chats, "opened")
    assert pragma(chats, "PRAGMA cache_size") == [(-512,)]  # KiB


def test_a_full_disk(chats: Chats) -> None:
    """A clear error; what was there is there, and the next message fits once there is room."""
    session_id = begin(chats, "kept")
    (pages,) = pragma(chats, "PRAGMA page_count")[0]
    pragma(chats, f"PRAGMA max_page_count = {pages}")
    leaf = chats.read(session_id).result(WAIT_S)["leaf"]
    for act in (
        lambda: chats.add(session_id, message("x" * 500_000)),
        lambda: chats.edit(session_id, leaf, {"content": "y" * 500_000}),
        lambda: chats.take_in(Transcript("t", {}, [{"id": "1", **message("z" * 500_000)}], "1")),
    ):
        with pytest.raises(StoreFull, match="the disk is full: the chat store has changed nothing"):
            act().result(WAIT_S)
    assert texts(chats, session_id) == ["kept"] and len(chats.newest(10).result(WAIT_S)) == 1
    check(chats)
    pragma(chats, f"PRAGMA max_page_count = {pages + 5000}")
    chats.add(session_id, message("x" * 500_000)).result(WAIT_S)
    assert len(texts(chats, session_id)) == 2


def test_a_file_that_another_program_holds(chats: Chats, path: Path) -> None:
    session_id = begin(chats, "kept")
    pragma(chats, "PRAGMA busy_timeout = 20")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="another program holds the chat store") as caught:
        chats.add(session_id, message("x")).result(WAIT_S)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    other.execute("ROLLBACK")
    other.close()
    chats.add(session_id, message("x")).result(WAIT_S)
    assert texts(chats, session_id) == ["kept", "x"]


def test_a_disk_that_cannot_be_written(chats: Chats) -> None:
    session_id = begin(chats, "kept")
    pragma(chats, "PRAGMA query_only = ON")
    with pytest.raises(StoreFault, match="the chat store failed: .*readonly"):
        chats.add(session_id, message("x")).result(WAIT_S)
    assert texts(chats, session_id) == ["kept"]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """Chats do not live in memory as responses do: who asks is told, and may try again."""
    (tmp_path / "home").touch()
    chats = Chats(tmp_path / "home" / "chats.sqlite3")
    with pytest.raises(StoreFault, match="the chat store cannot be opened"):
        chats.create(None, {}).result(WAIT_S)
    (tmp_path / "home").unlink()
    assert texts(chats, begin(chats, "now")) == ["now"]
    chats.close()


@pytest.mark.parametrize("damage", ["no database", "its pages"])
def test_a_damaged_file_stays_as_it_is(path: Path, damage: str) -> None:
    chats = Chats(path)
    begin(chats, *("x" * 3000 for _ in range(40)))
    chats.close()
    whole = path.read_bytes()
    broken = b"this is no database" * 500 if damage == "no database" else None
    path.write_bytes(broken or whole[:4096] + b"\x5a" * (len(whole) - 4096))
    broken = path.read_bytes()
    chats = Chats(path)
    for _ in range(2):
        with pytest.raises(StoreFault, match="is damaged .* left as it is"):
            chats.create(None, {}).result(WAIT_S)
    assert path.read_bytes() == broken
    path.rename(path.with_name("moved"))
    assert texts(chats, begin(chats, "new")) == ["new"], "without a restart"
    chats.close()
    path.write_bytes(whole)
    mended = Chats(path)
    (row,) = mended.newest(10).result(WAIT_S)
    assert row["messages"] == 40
    mended.close()


def test_a_damaged_index_is_made_anew(chats: Chats) -> None:
    begin(chats, "the capital of France", "Paris")
    pragma(chats, "UPDATE texts_data SET block = x'ffffffffffffffff' WHERE id > 10")
    (row,) = found(chats, "capital")
    assert row["matches"][0]["snippet"] == "the capital of France"
    check(chats)


def test_two_servers_share_a_file(path: Path) -> None:
    first, second = Chats(path), Chats(path)
    session_id = begin(first, "one")
    leaf = second.read(session_id).result(WAIT_S)["leaf"]
    second.add(session_id, message("two", leaf, "assistant")).result(WAIT_S)
    assert texts(first, session_id) == ["one", "two"] and len(found(first, "two")) == 1
    first.close()
    second.close()
    with pytest.raises(StoreFault, match="the chat store is closed"):
        first.newest(1)
