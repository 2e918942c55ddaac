"""Tools that the user always allows: a list for whoever runs tools (spec 70 section 9)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite import private_file
from mlxlite.approvals import FILE, MOST_TOOLS, Approvals
from tests import tiny
from tests.live import LiveApp

PATH = "/api/settings/tool-approvals"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveApp]:
    with LiveApp(tiny.make_model(tmp_path / "tiny")) as server:
        yield server


def names(reply: Any) -> list[str]:
    assert reply.status == 200, reply.body
    body = reply.json()
    assert body["ok"] is True and set(body) == {"ok", "alwaysAllow"}
    found: list[str] = body["alwaysAllow"]
    return found


def test_allow_and_ask_again(server: LiveApp, tmp_path: Path) -> None:
    assert names(server.ask("GET", PATH)) == []
    assert names(server.ask("POST", PATH, {"tool": "read_file"})) == ["read_file"]
    assert names(server.ask("POST", PATH, {"tool": " größe ü/?&"})) == ["größe ü/?&", "read_file"]
    assert names(server.ask("POST", PATH, {"tool": "read_file"})) == ["größe ü/?&", "read_file"]
    file = tmp_path / "home" / FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert names(server.ask("DELETE", PATH, {"tool": "none"})) == ["größe ü/?&", "read_file"]
    quoted = "gr%C3%B6%C3%9Fe%20%C3%BC%2F%3F%26"
    assert names(server.ask("DELETE", f"{PATH}?tool={quoted}")) == ["read_file"]
    assert names(server.ask("DELETE", PATH, {"tool": "read_file"})) == []
    assert json.loads(file.read_text()) == []


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("body", [{}, {"tool": ""}, {"tool": " "}, {"tool": 5}, {"tool": ["a"]}])
def test_a_tool_is_required(server: LiveApp, method: str, body: Any) -> None:
    reply = server.ask(method, PATH, body)
    assert (reply.status, reply.error["message"], reply.error["param"]) == (
        400, "tool required", "tool",
    )  # fmt: skip
    assert server.ask("DELETE", PATH).error["message"] == "tool required"


def test_limits(server: LiveApp, tmp_path: Path) -> None:
    assert server.ask("POST", PATH, {"tool": "x" * 257}).error["param"] == "tool"
    (tmp_path / "home" / FILE).write_text(json.dumps([f"t{n}" for n in range(MOST_TOOLS)]))
    assert server.ask("POST", PATH, {"tool": "one more"}).status == 409
    assert len(names(server.ask("POST", PATH, {"tool": "t7"}))) == MOST_TOOLS


@pytest.mark.parametrize("text", ["", "{", "{}", "[1, null]", "[" * 100_000])
def test_a_damaged_file_allows_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    approvals = Approvals(tmp_path)
    assert approvals.names() == []
    assert approvals.allow("a") == ["a"] == approvals.names()


def test_none_is_lost(tmp_path: Path) -> None:
    """Ten at once."""
    approvals = Approvals(tmp_path)
    threads = [threading.Thread(target=approvals.allow, args=(f"t{n}",)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert approvals.names() == [f"t{n}" for n in range(10)]


def test_what_is_kept_is_whole(tmp_path: Path) -> None:
    """Whoever writes, the file is one of theirs, readable by its owner alone; no draft is left."""
    path = tmp_path / "home" / "kept"
    texts = [str(n) * 10_000 for n in range(10)]
    failures: list[BaseException] = []

    def keep(text: str) -> None:
        try:
            for _ in range(20):
                private_file.write(path, text)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=keep, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert path.read_text() in texts and path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        private_file.write(path, "x")
    assert list(path.parent.iterdir()) == [path]


def test_no_room(server: LiveApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    names(server.ask("POST", PATH, {"tool": "kept"}))
    with monkeypatch.context() as patch:
        patch.setattr("mlxlite.private_file.write", full)
        assert server.ask("POST", PATH, {"tool": "lost"}).status == 507
    assert names(server.ask("GET", PATH)) == ["kept"]
