"""Sessions and rendering over HTTP: shapes, wrong values, files, and what fails under them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.api import markup
from mlxlite.chats import Chats
from tests.live import LiveApp, Reply

SESSIONS = "/api/sessions"


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApp]:
    home = tmp_path_factory.mktemp("home")
    with LiveApp(tiny_folder, home=str(home)) as running:
        yield running


def begin(server: LiveApp, **body: Any) -> dict[str, Any]:
    reply = server.ask("POST", SESSIONS, body)
    assert reply.status == 200, reply.body
    return reply.json()["session"]


def say(server: LiveApp, session: str, content: str, parent: Any = None, **more: Any) -> Any:
    body = {"parent": parent, "role": "user", "content": content, **more}
    reply = server.ask("POST", f"{SESSIONS}/{session}/messages", body)
    assert reply.status == 200, reply.body
    return reply.json()["message"]


def read(server: LiveApp, session: str) -> dict[str, Any]:
    reply = server.ask("GET", f"{SESSIONS}/{session}")
    assert reply.json()["ok"] is True
    return reply.json()["session"]


def test_a_chat(server: LiveApp) -> None:
    session = begin(server, title="  My   chat ", settings={"temperature": 0.5})
    assert session == {
        "id": session["id"], "title": "My chat", "created": session["created"],
        "updated": session["updated"], "settings": {"temperature": 0.5}, "leaf": None,
        "messages": [],
    }  # fmt: skip
    question = say(server, session["id"], "Why?\u2028🙂")
    answer = say(server, session["id"], "", question["id"], role="assistant")
    at = f"{SESSIONS}/{session['id']}/messages/{answer['id']}"
    changes = {"content": "Because.", "reasoning": "Hm.", "usage": {"completion_tokens": 2}}
    edited = server.ask("PATCH", at, changes).json()
    assert edited == {"ok": True, "message": {**answer, **changes}}
    whole = read(server, session["id"])
    assert whole["messages"] == [question, edited["message"]] and whole["leaf"] == answer["id"]
    changed = server.ask("PATCH", f"{SESSIONS}/{session['id']}", {"title": "", "settings": {"a": 1},
                         "leaf": question["id"]}).json()["session"]  # fmt: skip
    assert changed["title"] == "Why? 🙂" and changed["settings"] == {"a": 1}
    assert changed["leaf"] == question["id"]
    (row, *_) = server.ask("GET", SESSIONS).json()["sessions"]
    assert row == {"id": session["id"], "title": "Why? 🙂", "created": session["created"],
                   "updated": changed["updated"], "messages": 2}  # fmt: skip
    assert server.ask("DELETE", f"{SESSIONS}/{session['id']}").json() == {"ok": True}
    for method, path, body in (
        ("GET", f"{SESSIONS}/{session['id']}", None),
        ("DELETE", f"{SESSIONS}/{session['id']}", None),
        ("PATCH", f"{SESSIONS}/{session['id']}", {"title": "x"}),
        ("GET", f"{SESSIONS}/{session['id']}/export", None),
        ("POST", f"{SESSIONS}/{session['id']}/messages", {"role": "user", "content": "x"}),
        ("PATCH", at, {"content": "x"}),
    ):
        reply = server.ask(method, path, body)
        assert (reply.status, reply.error["message"]) == (404, "session not found"), path


def test_pages_of_the_list(server: LiveApp) -> None:
    ids = [begin(server)["id"] for _ in range(5)]
    first = server.ask("GET", f"{SESSIONS}?limit=2").json()["sessions"]
    then = server.ask("GET", f"{SESSIONS}?limit=2&before={first[-1]['updated']}").json()["sessions"]
    assert [row["id"] for row in first + then] == ids[:0:-1]


def test_a_long_chat(server: LiveApp) -> None:
    """As long as the page must stay smooth with; encoded message by message, and whole."""
    lines = [{"type": "message", "role": "user", "content": f"{n} ßx " * 40} for n in range(2000)]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    session = server.ask("POST", f"{SESSIONS}/import", body).json()["session"]
    whole = read(server, session["id"])
    assert [m["content"] for m in whole["messages"]] == [line["content"] for line in lines]
    parents = [m["parent"] for m in whole["messages"]]
    assert parents == [None, *(m["id"] for m in whole["messages"][:-1])]


LONG = "x" * 81
WRONG = [
    ("GET", "?limit=0", None, "limit"),
    ("GET", "?limit=1001", None, "limit"),
    ("GET", "?limit=1.5", None, "limit"),
    ("GET", "?limit=x", None, "limit"),
    ("GET", "?before=yesterday", None, "before"),
    ("GET", "?before=1e400", None, "before"),
    ("POST", "", {"title": 5}, "title"),
    ("POST", "", {"title": LONG}, "title"),
    ("POST", "", {"settings": []}, "settings"),
    ("POST", "", {"settings": {"a": "x" * 300_000}}, "settings"),
    ("POST", "", b'{"settings": {"temperature": 1e999}}', "settings"),  # read as infinity
    ("PATCH", "/ID", b'{"settings": {"a": [-1e999]}}', "settings"),
    ("PATCH", "/ID/messages/MID", b'{"usage": {"a": 1e999}}', "usage"),
    ("PATCH", "/ID", {}, "title"),
    ("PATCH", "/ID", {"title": None}, "title"),
    ("PATCH", "/ID", {"leaf": 5}, "leaf"),
    ("PATCH", "/ID", {"leaf": "m_none"}, "leaf"),
    ("POST", "/ID/messages", {"content": "x"}, "role"),
    ("POST", "/ID/messages", {"role": "user"}, "content"),
    ("POST", "/ID/messages", {"role": "robot", "content": "x"}, "role"),
    ("POST", "/ID/messages", {"role": "user", "content": ["x"]}, "content"),
    ("POST", "/ID/messages", {"role": "user", "content": "x", "parent": "m_none"}, "parent"),
    ("POST", "/ID/messages", {"role": "user", "content": "x", "parent": 5}, "parent"),
    ("POST", "/ID/messages", {"role": "user", "content": "x", "tool_calls": {}}, "tool_calls"),
    ("POST", "/ID/messages", {"role": "user", "content": "x", "tool_calls": [1]}, "tool_calls"),
    ("POST", "/ID/messages", {"role": "user", "content": "x", "usage": []}, "usage"),
    ("POST", "/ID/messages", {"role": "user", "content": "x", "reasoning": 1}, "reasoning"),
    ("POST", "/ID/messages", {"role": "user", "content": "x" * 2_100_000}, "content"),
    ("PATCH", "/ID/messages/MID", {"usage": {"a": [1] * 100_000}}, "usage"),
    ("PATCH", "/ID/messages/MID", {"tool_calls": [{"a": "x" * 2_100_000}]}, "tool_calls"),
    ("PATCH", "/ID/messages/MID", {}, "content"),
    ("PATCH", "/ID/messages/MID", {"content": 5}, "content"),
    ("PATCH", "/ID/messages/MID", {"role": "system"}, "content"),
    ("GET", "/search", None, "q"),
    ("GET", "/search?q=%20", None, "q"),
    ("GET", f"/search?q={'x' * 201}", None, "q"),
    ("GET", "/export", None, "path"),
    ("GET", "/export?path=", None, "path"),
    ("POST", "/import", b"", None),
    ("POST", "/import", b"{broken\nlines", None),
]


@pytest.mark.parametrize(("method", "path", "body", "param"), WRONG, ids=range(len(WRONG)))
def test_wrong_values(server: LiveApp, method: str, path: str, body: Any, param: Any) -> None:
    session = begin(server)["id"]
    message = say(server, session, "kept")["id"]
    before = read(server, session)
    path = path.replace("MID", message).replace("ID", session)
    reply = server.ask(method, SESSIONS + path, body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert reply.error["type"] == "invalid_request_error"
    assert read(server, session) == before


def test_bodies_that_are_none(server: LiveApp) -> None:
    session = begin(server)["id"]
    for path in (SESSIONS, f"{SESSIONS}/{session}/messages", "/api/render"):
        for body in (b"{", b"[]", b"\xff"):
            assert server.ask("POST", path, body).status == 400
    reply = server.ask("DELETE", SESSIONS)
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, OPTIONS, POST")


def test_messages_of_another_session(server: LiveApp) -> None:
    mine, other = begin(server)["id"], begin(server)["id"]
    message = say(server, other, "theirs")["id"]
    reply = server.ask("PATCH", f"{SESSIONS}/{mine}/messages/{message}", {"content": "x"})
    assert (reply.status, reply.error["message"]) == (404, "message not found")


# -------------------------------------------------------------------------------- search, files


def test_search(server: LiveApp) -> None:
    session = begin(server, title="Found")["id"]
    message = say(server, session, "🙂 Die GROẞE Zebrastraße")["id"]
    reply = server.ask("GET", f"{SESSIONS}/search?q=zebrastrasse")
    assert reply.json() == {
        "ok": True,
        "results": [
            {
                "id": session,
                "title": "Found",
                "matches": [
                    {
                        "role": "user",
                        "snippet": "🙂 Die GROẞE Zebrastraße",
                        "ranges": [[13, 24]],
                        "message": message,
                    }
                ],
            }
        ],
    }
    assert server.ask("GET", f"{SESSIONS}/search?q=no+such+words").json()["results"] == []


def test_files(server: LiveApp) -> None:
    session = begin(server, title="A/b: «ß»", settings={"s": 1})["id"]
    root = say(server, session, "root")["id"]
    say(server, session, "one", root, role="assistant", usage={"n": 1}, tool_calls=[{"id": "c"}])
    say(server, session, "two", root, role="assistant", reasoning="hm")
    listed = server.ask("GET", f"{SESSIONS}/export?path={session}").json()
    assert listed["ok"] is True and listed["path"] == session
    file = server.ask("GET", f"{SESSIONS}/{session}/export")
    assert file.headers["content-type"] == "application/jsonl"
    assert file.headers["content-disposition"] == 'attachment; filename="A-b.jsonl"'
    lines = [json.loads(line) for line in file.body.splitlines()]
    assert lines == listed["entries"]
    assert [line["type"] for line in lines] == ["session_info", *["message"] * 3]
    again = server.ask("POST", f"{SESSIONS}/import", file.body + b"{broken\n")
    assert again.status == 200 and again.json()["skipped"] == 1
    before, after = read(server, session), read(server, again.json()["session"]["id"])
    assert after["title"] == before["title"] and after["settings"] == before["settings"]
    assert tree(after) == tree(before) and after["id"] != before["id"]
    untitled = begin(server)["id"]
    shown = server.ask("GET", f"{SESSIONS}/{untitled}/export").headers["content-disposition"]
    assert shown == 'attachment; filename="New-chat.jsonl"'


def tree(session: dict[str, Any]) -> list[Any]:
    """Everything but ids, which become places."""
    places = {m["id"]: place for place, m in enumerate(session["messages"])}
    return [
        places[session["leaf"]],
        *({**m, "id": None, "parent": places.get(m["parent"])} for m in session["messages"]),
    ]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "a%5cb", "a%00b"])
def test_paths_out_of_the_sessions(server: LiveApp, path: str) -> None:
    reply = server.ask("GET", f"{SESSIONS}/export?path={path}")
    assert (reply.status, reply.error["param"]) == (403, "path")
    assert server.ask("GET", f"{SESSIONS}/export?path=s_none").status == 404


# ------------------------------------------------------------------------------------- faults


def test_faults_are_told(server: LiveApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the server goes on: chat needs no store."""

    def fails(code: int) -> Any:
        def task(*_: Any) -> Any:
            error = sqlite3.OperationalError("from the disk")
            error.sqlite_errorcode = code
            raise error

        return task

    for code, status, message in (
        (sqlite3.SQLITE_FULL, 507, "the disk is full: the chat store has changed nothing"),
        (sqlite3.SQLITE_BUSY, 503, "another program holds the chat store; try again later"),
        (sqlite3.SQLITE_IOERR, 500, "the chat store failed: from the disk"),
        (sqlite3.SQLITE_CORRUPT, 500, "is damaged (from the disk). It is left as it is"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Chats, "_begin", fails(code))
            reply = server.ask("POST", SESSIONS, {})
            assert reply.status == status and message in reply.error["message"]
            assert reply.error["type"] == "server_error"
        assert begin(server)
    assert server.chat().status == 200


def test_it_is_there_after_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    with LiveApp(tiny_folder, home=str(tmp_path)) as server:
        session = begin(server)["id"]
        message = say(server, session, "kept")
    with LiveApp(tiny_folder, home=str(tmp_path)) as server:
        assert read(server, session)["messages"] == [message]


# --------------------------------------------------------------------------------------- render


def render(server: LiveApp, text: Any) -> Reply:
    return server.ask("POST", "/api/render", {"text": text})


def test_render(server: LiveApp) -> None:
    assert render(server, "**a** <script>").json() == {
        "html": "<p><strong>a</strong> &lt;script&gt;</p>\n"
    }
    assert render(server, "").json() == {"html": ""}
    for text, status in ((None, 400), (5, 400), ("x" * (markup.MOST_CHARS + 1), 413)):
        reply = render(server, text)
        assert (reply.status, reply.error["param"]) == (status, "text")
    assert len(render(server, "é" * markup.MOST_CHARS).json()["html"]) > markup.MOST_CHARS
