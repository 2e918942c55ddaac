"""Chats as JSON lines, out and in (floor 1, column "side", spec 70 section 10, decision D16).

    {"type": "session_info", "name": "Capitals", "settings": {}, "created": 1790000000.5}
    {"type": "message", "id": "m1", "parent": null, "role": "user", "content": "..."}

Ours have `id` and `parent`, so that branches survive. In a file that has none, each message follows
the one before. Content may be a list of text parts, and a message may be an object inside its line,
as other programs write them. Other types of lines mean nothing here. Pure: bytes and values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxlite.types import JSON

ROLES = ("system", "user", "assistant", "tool")
MOST_TITLE = 80  # characters, from the spec


@dataclass(slots=True)
class Transcript:
    """What a file holds. messages: a parent comes before its children; ids are the file's own.
    skipped: lines that could not be read."""

    title: str | None = None
    settings: dict[str, JSON] = field(default_factory=dict)
    messages: list[dict[str, JSON]] = field(default_factory=list)
    leaf: str | None = None
    skipped: int = 0


def title_of(name: str | None, first: str | None) -> str:
    """Of a chat: its name, else its first user message, else a standing one; <= 80 characters."""
    for text in (name, first):
        if text is not None and (shown := " ".join(text.split())):
            return shown[:MOST_TITLE]
    return "New chat"


# -------------------------------------------------------------------------------------- out


def entries(session: Mapping[str, JSON]) -> Iterator[dict[str, JSON]]:
    """The lines of a whole session, as `Chats.read` gives it."""
    yield {
        "type": "session_info",
        "name": session["title"],
        "settings": session["settings"],
        "leaf": session["leaf"],
        "created": session["created"],
    }
    for message in session["messages"]:
        yield {"type": "message", **{k: v for k, v in message.items() if _is_kept(k, v)}}


def _is_kept(name: str, value: JSON) -> bool:
    return value is not None or name == "parent"


def render(session: Mapping[str, JSON]) -> bytes:
    """The same as JSON lines."""
    return b"".join(
        json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        for entry in entries(session)
    )


# --------------------------------------------------------------------------------------- in


def parse(body: bytes) -> Transcript:
    """Read JSON lines; what cannot be read is counted, and never an error."""
    found = Transcript()
    known: set[str] = set()
    last: str | None = None
    for number, line in enumerate(body.split(b"\n")):
        if not line.strip():
            continue
        try:
            entry = _object(line)
            if entry.get("type") == "session_info":
                _take_facts(found, entry)
            elif entry.get("type") == "message":
                message = _message(entry, f"line {number}", last, known)
                found.messages.append(message)
                last = message["id"]
                known.add(last)
        except (ValueError, RecursionError):
            found.skipped += 1
    if found.leaf not in known:
        found.leaf = last
    return found


def _object(line: bytes) -> dict[str, JSON]:
    """Raises ValueError. Half a surrogate pair becomes U+FFFD: no file of ours could hold it."""
    value = json.loads(line.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise ValueError("not an object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    mended: dict[str, JSON] = value if whole == text else json.loads(whole)
    return mended


def _take_facts(found: Transcript, entry: Mapping[str, JSON]) -> None:
    name, settings, leaf = entry.get("name"), entry.get("settings"), entry.get("leaf")
    if isinstance(name, str):  # the last one counts: a rename is a line of its own
        found.title = title_of(name, None) if name.strip() else None
    if isinstance(settings, dict):
        found.settings = settings
    if isinstance(leaf, str):
        found.leaf = leaf


def _message(
    entry: Mapping[str, JSON], place: str, last: str | None, known: set[str]
) -> dict[str, JSON]:
    """Raises ValueError for a message that a chat cannot hold."""
    inner = entry.get("message")
    parts = {**entry, **inner} if isinstance(inner, dict) else entry
    role, own_id = parts.get("role"), parts.get("id")
    if role not in ROLES:
        raise ValueError("no role")
    if not isinstance(own_id, str) or own_id in known:
        own_id = place
    parent = parts["parent"] if "parent" in parts else last
    if parent is not None and parent not in known:
        parent = last  # the line that it names is lost
    return {
        "id": own_id,
        "parent": parent,
        "role": role,
        "content": _text(parts.get("content")),
        "reasoning": _if(parts.get("reasoning"), str),
        "tool_calls": _if(parts.get("tool_calls"), list),
        "usage": _if(parts.get("usage"), dict),
        "created": _time(parts.get("created")),
    }


def _text(content: JSON) -> str:
    """Raises ValueError for what is neither a string, nor null, nor a list with text parts."""
    if content is None:  # as an answer has it that only calls
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("no content")
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    if content and not texts:
        raise ValueError("no text")
    return "\n".join(texts)


def _if(value: JSON, kind: type[Any]) -> JSON:
    return value if isinstance(value, kind) else None


def _time(value: JSON) -> float | None:
    is_time = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_time and 0 <= value < 1e11 else None
