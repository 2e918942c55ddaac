"""The response store: what is kept, for how long, and what a broken file does to it."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlxlite import database, store
from mlxlite.database import StoreFault
from mlxlite.store import Entry, ResponseStore
from tests.live import ROOT, WAIT_S


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "responses.sqlite3"


@pytest.fixture
def kept(path: Path, clock: Clock) -> Iterator[ResponseStore]:
    found = ResponseStore(path, ttl_s=3600, max_bytes=1000, clock=clock)
    yield found
    found.close()


def entry(response_id: str, text: str = "", size_bytes: int | None = None) -> Entry:
    """An entry; of so many bytes of JSON if that is said."""
    item = {"id": f"msg_{response_id}", "type": "message", "text": text}
    if size_bytes is not None:
        item["text"] = "x" * (size_bytes - size_of(entry(response_id)))
    return Entry(response_id, [], {"id": response_id, "output": [item], "instructions": None})


def size_of(kept: Entry) -> int:
    return len(store._encoded(kept.input)) + len(store._encoded(kept.response["output"]))


def statistics(kept: ResponseStore) -> dict[str, int]:
    return kept.statistics().result(WAIT_S)


def ids(kept: ResponseStore) -> list[str]:
    """Ids of the entries, in the order of their use; looking does not count as use."""
    with sqlite3.connect(kept.path) as connection:
        rows = connection.execute("SELECT id FROM responses ORDER BY used").fetchall()
    connection.close()
    return [response_id for (response_id,) in rows]


# ------------------------------------------------------------------------------ what is kept


def test_an_entry_comes_back_as_it_was(kept: ResponseStore) -> None:
    given = [{"id": "msg_1", "text": "a\u2028\U0001f642\ud83d", "n": [1, 2.5, None, True]}]
    response = {"id": "resp_1", "output": [{"id": "m", "x": "\udc00"}], "usage": {"a": 1}}
    assert kept.keep(Entry("resp_1", given, response)).result(WAIT_S) is True
    assert kept.find("resp_1").result(WAIT_S) == Entry("resp_1", given, response)
    assert kept.find("resp_2").result(WAIT_S) is None
    assert statistics(kept) == {
        "entries": 1,
        "bytes": size_of(Entry("resp_1", given, response)),
        "max_bytes": 1000,
        "ttl_ms": 3_600_000,
    }


def test_delete(kept: ResponseStore) -> None:
    kept.keep(entry("a"))
    kept.keep(entry("b"))
    assert kept.delete("a").result(WAIT_S) is True
    assert kept.delete("a").result(WAIT_S) is False
    assert kept.find("a").result(WAIT_S) is None
    assert kept.find_items(["msg_a", "msg_b"]).result(WAIT_S).keys() == {"msg_b"}
    assert statistics(kept)["entries"] == 1


def test_an_entry_replaces_its_elder(kept: ResponseStore) -> None:
    kept.keep(entry("a", "old"))
    kept.keep(entry("a", "new"))
    assert kept.find("a").result(WAIT_S) == entry("a", "new")
    assert statistics(kept)["bytes"] == size_of(entry("a", "new"))


def test_find_items(kept: ResponseStore) -> None:
    output = [{"id": f"m{n}", "n": n} for n in range(3)]
    kept.keep(Entry("a", [{"id": "given"}], {"id": "a", "output": output}))
    found = kept.find_items(["m2", "m0", "given", "unknown", "m2"]).result(WAIT_S)
    assert found == {"m2": output[2], "m0": output[0]}
    assert kept.find_items([]).result(WAIT_S) == {}


# ---------------------------------------------------------------------------- for how long


def test_time_counts_from_creation(kept: ResponseStore, clock: Clock) -> None:
    kept.keep(entry("a")).result(WAIT_S)
    clock.now_s += 3599
    kept.keep(entry("b")).result(WAIT_S)
    assert kept.find("a").result(WAIT_S) is not None  # a read does not extend it
    clock.now_s += 1
    assert kept.find("a").result(WAIT_S) is None
    assert ids(kept) == ["b"]
    clock.now_s += 3599
    assert statistics(kept)["entries"] == 0  # any access purges
    assert ids(kept) == []


@pytest.mark.parametrize("access", ["find", "delete", "find_items", "statistics", "keep"])
def test_every_access_purges(kept: ResponseStore, clock: Clock, access: str) -> None:
    kept.keep(entry("a")).result(WAIT_S)
    clock.now_s += 3600
    given: dict[str, Any] = {"find_items": ["x"], "keep": entry("b"), "statistics": None}
    argument = given.get(access, "x")
    getattr(kept, access)(*([argument] if argument is not None else [])).result(WAIT_S)
    assert ids(kept) == (["b"] if access == "keep" else [])


def test_who_was_read_longest_ago_goes_first(kept: ResponseStore) -> None:
    for name in "abc":
        kept.keep(entry(name, size_bytes=300))
    kept.find("a").result(WAIT_S)
    assert ids(kept) == ["b", "c", "a"]
    kept.keep(entry("d", size_bytes=300)).result(WAIT_S)
    assert ids(kept) == ["c", "a", "d"]
    kept.keep(entry("e", size_bytes=700)).result(WAIT_S)
    assert ids(kept) == ["d", "e"]
    assert statistics(kept)["bytes"] == 1000
    assert kept.find_items(["msg_a", "msg_d"]).result(WAIT_S).keys() == {"msg_d"}


def test_an_entry_above_the_cap_evicts_itself_alone(kept: ResponseStore) -> None:
    kept.keep(entry("a"))
    assert kept.keep(entry("b", size_bytes=1001)).result(WAIT_S) is False
    assert kept.find("b").result(WAIT_S) is None
    assert ids(kept) == ["a"]
    assert kept.keep(entry("c", size_bytes=1000)).result(WAIT_S) is True
    assert ids(kept) == ["c"]


def test_the_cap_holds_whatever_comes(kept: ResponseStore) -> None:
    for n in range(60):
        kept.keep(entry(f"r{n}", size_bytes=70 + n * 37 % 500))
        assert 0 < statistics(kept)["bytes"] <= 1000


# ------------------------------------------------------------------------------- restarts


def test_it_survives_a_restart(path: Path, clock: Clock) -> None:
    for n in range(3):
        kept = ResponseStore(path, clock=clock)
        assert kept.find(f"r{n - 1}").result(WAIT_S) == (entry(f"r{n - 1}", "é") if n else None)
        kept.keep(entry(f"r{n}", "é"))
        kept.close()
        kept.close()


def test_it_survives_a_kill(path: Path) -> None:
    """As soon as the Future is done, with no chance to close anything."""
    code = (
        "import os, signal, sys; from pathlib import Path; from mlxlite.store import *\n"
        "kept = ResponseStore(Path(sys.argv[1]))\n"
        "for n in range(20): done = kept.keep(Entry(f'r{n}', [], {'output': []}))\n"
        "done.result(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=30)
    assert done.returncode == -signal.SIGKILL
    kept = ResponseStore(path)
    assert all(kept.find(f"r{n}").result(WAIT_S) is not None for n in range(20))
    kept.close()


def test_two_servers_share_a_file(path: Path, clock: Clock) -> None:
    first, second = (ResponseStore(path, max_bytes=1000, clock=clock) for _ in range(2))
    outcomes = [kept.keep(entry(f"r{n}", size_bytes=100))
                for n in range(20) for kept in (first, second)]  # fmt: skip
    assert all(outcome.result(WAIT_S) for outcome in outcomes)
    assert statistics(first) == statistics(second)
    assert statistics(first)["bytes"] == 1000
    first.keep(entry("mine")).result(WAIT_S)
    assert second.find("mine").result(WAIT_S) == entry("mine")
    first.close()
    second.close()


def test_only_its_user_reads_it(kept: ResponseStore) -> None:
    kept.keep(entry("a")).result(WAIT_S)
    for file in kept.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name


# ------------------------------------------------------------------------------ broken files


def test_a_file_that_is_no_database(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 500)
    kept = ResponseStore(path)
    assert kept.keep(entry("a")).result(WAIT_S) is True
    assert kept.find("a").result(WAIT_S) is not None
    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.read_bytes().startswith(b"this is no database")
    assert "is damaged" in caplog.text and aside.name in caplog.text
    kept.close()


def test_an_empty_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.touch()
    kept = ResponseStore(path)
    assert kept.keep(entry("a")).result(WAIT_S) is True
    kept.close()
    assert caplog.text == "" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("is_running", [False, True], ids=["at start", "while it runs"])
def test_a_damaged_database(path: Path, is_running: bool, caplog: pytest.LogCaptureFixture) -> None:
    kept = ResponseStore(path)
    for n in range(40):
        kept.keep(entry(f"r{n}", "x" * 3000))
    assert statistics(kept)["entries"] == 40
    if is_running:  # its own pages, so that the cache does not hide the damage
        kept._writer.submit(lambda: kept._connection.execute("PRAGMA cache_size = 0")).result()
        kept._writer.submit(
            lambda: kept._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        ).result()
    else:
        kept.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    if not is_running:
        kept = ResponseStore(path)
    assert kept.find("r7").result(WAIT_S) is None
    assert kept.keep(entry("new")).result(WAIT_S) is True
    assert kept.find("new").result(WAIT_S) == entry("new")
    assert len(list(path.parent.glob("*.damaged-*"))) == 1 and "is damaged" in caplog.text
    kept.close()


def test_a_folder_that_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "home").touch()  # a file where the folder should be
    kept = ResponseStore(tmp_path / "home" / "responses.sqlite3")
    assert kept.keep(entry("a")).result(WAIT_S) is True
    assert kept.find("a").result(WAIT_S) == entry("a")
    assert "responses live in memory" in caplog.text
    kept.close()


# -------------------------------------------------------------------------------- the thread


def test_a_fault_comes_back_to_who_asked(kept: ResponseStore) -> None:
    """And the next task is served."""
    kept.keep(entry("a")).result(WAIT_S)
    kept._writer.submit(lambda: kept._connection.execute("PRAGMA query_only = ON")).result()
    with pytest.raises(StoreFault, match="the response store failed: .*readonly"):
        kept.keep(entry("b")).result(WAIT_S)
    kept._writer.submit(lambda: kept._connection.execute("PRAGMA query_only = OFF")).result()
    assert kept.find("a").result(WAIT_S) == entry("a")
    with pytest.raises(TypeError):
        kept.keep(Entry("c", [object()], {"output": []})).result(WAIT_S)
    assert kept.find("c").result(WAIT_S) is None


def test_after_the_close(path: Path) -> None:
    kept = ResponseStore(path)
    late = kept.keep(entry("a"))
    kept.close()
    assert late.result(0) is True  # what was asked for is done
    with pytest.raises(StoreFault, match="closed"):
        kept.find("a")
    assert not any(thread.is_alive() for thread in kept._writer._threads)


def test_nobody_waits_for_the_disk(path: Path) -> None:
    """Asking returns at once, also while another process holds the file."""
    kept = ResponseStore(path)
    statistics(kept)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    outcome = kept.keep(entry("a"))
    assert not outcome.done()
    other.execute("ROLLBACK")
    other.close()
    assert outcome.result(WAIT_S) is True
    kept.close()


def test_many_threads(kept: ResponseStore) -> None:
    def one(n: int) -> bool:
        kept.keep(entry(f"r{n}")).result(WAIT_S)
        return kept.find(f"r{n}").result(WAIT_S) == entry(f"r{n}")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(10)))


# -------------------------------------------------------------------------------- migrations


def test_migrations_are_applied_once_and_in_order(path: Path) -> None:
    names = [step.__name__ for step in store.MIGRATIONS]
    assert names == sorted(names) and len(set(names)) == len(names)
    kept = ResponseStore(path)
    kept.keep(entry("a")).result(WAIT_S)
    kept.close()
    connection = sqlite3.connect(path, isolation_level=None)
    ran = []

    def m003_more(connection: sqlite3.Connection) -> None:
        ran.append("m003")
        connection.execute("ALTER TABLE responses ADD COLUMN more TEXT")

    for _ in range(2):
        database.migrate(connection, [*store.MIGRATIONS, m003_more])
    applied = [name for (name,) in connection.execute("SELECT name FROM migrations")]
    assert (applied, ran) == ([*names, "m003_more"], ["m003"])
    assert connection.execute("SELECT id, more FROM responses").fetchall() == [("a", None)]
    connection.close()


def test_a_migration_that_fails_leaves_nothing(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path, isolation_level=None)

    def m009_bad(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE half (a)")
        raise sqlite3.OperationalError("no")

    with pytest.raises(sqlite3.OperationalError):
        database.migrate(connection, [*store.MIGRATIONS, m009_bad])
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()
