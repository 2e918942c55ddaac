"""transcript: chats as JSON lines; what is broken is counted and costs nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxlite.transcript import entries, parse, render, title_of


def lines(*values: Any) -> bytes:
    return b"\n".join(v if isinstance(v, bytes) else json.dumps(v).encode() for v in values)


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("name", "first", "shown"),
    [
        ("Name", "first", "Name"),
        (None, "first", "first"),
        ("  ", "first\n\n two ", "first two"),
        (None, None, "New chat"),
        (None, "   ", "New chat"),
        ("n" * 100, None, "n" * 80),
        (None, "f" * 100, "f" * 80),
    ],
)
def test_titles(name: str | None, first: str | None, shown: str) -> None:
    assert title_of(name, first) == shown


def test_lines_of_others() -> None:
    """A linear file: each follows the one before; parts of text; a message in an object."""
    found = parse(
        lines(
            {"type": "session", "version": 3},
            {"type": "session_info", "name": "old"},
            {"type": "session_info", "name": " The  name "},
            says("user", "Hi"),
            says("assistant", [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}]),
            {"type": "message", "message": {"role": "user", "content": "More"}},
            {"type": "model_change", "model": "x"},
            says("assistant", None, tool_calls=[{"id": "c"}]),
            says("tool", "42"),
        )
        + b"\n\n"
    )
    assert found.title == "The name" and found.skipped == 0
    assert [(m["role"], m["content"]) for m in found.messages] == [
        ("user", "Hi"), ("assistant", "a\nb"), ("user", "More"), ("assistant", ""), ("tool", "42")
    ]  # fmt: skip
    ids = [m["id"] for m in found.messages]
    assert [m["parent"] for m in found.messages] == [None, *ids[:-1]] and len(set(ids)) == 5
    assert found.messages[3]["tool_calls"] == [{"id": "c"}] and found.leaf == ids[-1]


BROKEN = [
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe{}",
    b'{"type": "message", "role": "user", "content": NaN}',
    b'{"type": "message", "role": "user", "content": "' + b"x" * 50,  # cut off
    b"[" * 100_000,
    says("robot", "x"),
    says("user", 5),
    says("user", {"text": "x"}),
    says("user", [{"type": "image"}]),
    {"type": "message"},
    {"type": "message", "message": "x"},
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line(broken: Any) -> None:
    found = parse(lines(says("user", "a"), broken, says("assistant", "b")))
    assert found.skipped == 1
    assert [m["content"] for m in found.messages] == ["a", "b"]
    assert found.messages[1]["parent"] == found.messages[0]["id"]


def test_no_lines() -> None:
    for body in (b"", b"\n\n", b"\xef\xbb\xbf\n", b"\0\0\0"):
        assert parse(body).messages == []


def test_wrong_extras_are_left_out() -> None:
    found = parse(lines(says("user", "a", reasoning=5, tool_calls={}, usage=[], created="now")))
    (message,) = found.messages
    extras = ("reasoning", "tool_calls", "usage", "created")
    assert [message[name] for name in extras] == [None] * 4
    for created in (True, -1, 1e300):
        assert parse(lines(says("user", "a", created=created))).messages[0]["created"] is None


def test_trees() -> None:
    found = parse(
        lines(
            {"type": "session_info", "name": "n", "leaf": "b", "settings": {"a": 1}},
            says("user", "root", id="r", parent=None),
            says("assistant", "one", id="a", parent="r"),
            says("assistant", "two", id="b", parent="r"),
            says("user", "of a lost one", id="c", parent="gone"),
            says("user", "again", id="a", parent=None),
        )
    )
    assert [m["parent"] for m in found.messages] == [None, "r", "r", "b", None]
    assert len({m["id"] for m in found.messages}) == 5 and found.leaf == "b"
    assert found.settings == {"a": 1} and found.skipped == 0


def test_half_surrogates() -> None:
    found = parse(b'{"type": "message", "role": "user", "content": "a\\ud83d \\ud83d\\ude42"}')
    assert found.messages[0]["content"] == "a\ufffd 🙂"


def test_there_and_back() -> None:
    message = {
        "id": "m1",
        "parent": None,
        "role": "user",
        "content": 'a\n\u2028"ß🙂',
        "usage": None,
    }
    answer = {"id": "m2", "parent": "m1", "role": "assistant", "content": "", "usage": {"n": 1},
              "tool_calls": [{"id": "c"}], "reasoning": "hm", "created": 5.25}  # fmt: skip
    session = {"title": "T", "settings": {"x": [1]}, "leaf": "m1", "created": 1.5,
               "messages": [message, answer]}  # fmt: skip
    body = render(session)
    assert body.count(b"\n") == 3 == len(list(entries(session)))
    found = parse(body)
    assert (found.title, found.settings, found.leaf) == ("T", {"x": [1]}, "m1")
    assert found.skipped == 0
    for before, after in zip((message, answer), found.messages, strict=True):
        assert {k: v for k, v in after.items() if v is not None} == {
            k: v for k, v in before.items() if v is not None
        }
