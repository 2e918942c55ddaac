"""Chats kept for the web page: sessions, messages, search, files (spec 70 section 10, D16).

    POST /api/sessions                {"title": "…"}              -> {"ok": true, "session": {…}}
    POST /api/sessions/{id}/messages  {"parent": null, "role": "user", "content": "Hi"}
    GET  /api/sessions/search?q=hi                                -> {"ok": true, "results": […]}

Shapes are those of `chats`; null means absent, in a change as well: an empty title is what brings
the title by the first message back.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxlite import transcript
from mlxlite.errors import BadRequest, Forbidden
from mlxlite.fields import Field, take
from mlxlite.http.routing import Request, Response, encode_json, json_response
from mlxlite.service import Service
from mlxlite.transcript import MOST_TITLE, ROLES, title_of
from mlxlite.types import JSON

MOST_QUERY = 200  # characters
_LISTED, _MOST_LISTED = 100, 1000
_MOST_CHARS = 2 << 20  # of a text
_MOST_JSON = {"settings": 256 << 10, "usage": 256 << 10, "tool_calls": 2 << 20}  # characters

TITLE = Field("title", str, "what the list shows")
SETTINGS = Field("settings", dict, "the chat's own settings, which only the page reads")
LEAF = Field("leaf", str, "last message of the branch that is shown")
PARENT = Field("parent", str, "message that it follows")
ROLE = Field("role", str, "who speaks", choices=ROLES)
CONTENT = Field("content", str, "what is said")
REASONING = Field("reasoning", str, "what was thought before")
TOOL_CALLS = Field("tool_calls", list, "calls as a chat completion has them")
USAGE = Field("usage", dict, "tokens and times of an answer")
_OF_SESSION = (TITLE, SETTINGS, LEAF)
_OF_MESSAGE = (CONTENT, REASONING, TOOL_CALLS, USAGE)


# ------------------------------------------------------------------------------------ sessions


async def show_all(service: Service, request: Request) -> Response:
    """GET /api/sessions: the last changed first; `before` is the `updated` of the last one seen."""
    limit = _number(request, "limit", _LISTED)
    if not 1 <= limit <= _MOST_LISTED or limit != int(limit):
        raise BadRequest(f"limit must be 1 to {_MOST_LISTED}", param="limit")
    before = _number(request, "before", math.inf)
    rows = await service.stored(
        service.chats.newest(int(limit), None if math.isinf(before) else before)
    )
    return json_response({"ok": True, "sessions": rows})


def _number(request: Request, name: str, absent: float) -> float:
    text = request.query.get(name, "")
    if not text:
        return absent
    if not re.fullmatch(r"[0-9]{1,16}(\.[0-9]{1,16})?", text):
        raise BadRequest(f"{name} must be a number, not {text!r}", param=name)
    return float(text)


async def create(service: Service, request: Request) -> Response:
    """POST /api/sessions"""
    body = await request.json()
    given = await service.in_pool(_take, body, (TITLE, SETTINGS))
    session = service.chats.create(given.get("title"), given.get("settings", {}))
    return json_response({"ok": True, "session": await service.stored(session)})


async def show(service: Service, request: Request) -> Response:
    """GET /api/sessions/{id}"""
    session = await service.stored(service.chats.read(request.params["id"]))
    return await service.in_pool(_render, session)


def _render(session: Mapping[str, JSON]) -> Response:
    """Message by message: JSON's encoder would hold the GIL, and so all streams, for all of it."""
    head = encode_json({**session, "messages": []}).removesuffix(b"]}")
    return _listed(b'{"ok":true,"session":' + head, session["messages"], b"]}}")


def _listed(begin: bytes, items: Iterable[JSON], end: bytes) -> Response:
    parts = [begin]
    for item in items:
        parts += (encode_json(item), b",")
    if len(parts) > 1:
        parts.pop()
    parts.append(end)
    return Response(200, b"".join(parts), {"content-type": "application/json"})


async def change(service: Service, request: Request) -> Response:
    """PATCH /api/sessions/{id}"""
    changes = await service.in_pool(_some, await request.json(), _OF_SESSION)
    session = await service.stored(service.chats.change(request.params["id"], changes))
    return json_response({"ok": True, "session": session})


async def delete(service: Service, request: Request) -> Response:
    """DELETE /api/sessions/{id}"""
    await service.stored(service.chats.delete(request.params["id"]))
    return json_response({"ok": True})


# ------------------------------------------------------------------------------------ messages


async def add(service: Service, request: Request) -> Response:
    """POST /api/sessions/{id}/messages"""
    body = await request.json()
    message = {name: None for name in ("parent", "reasoning", "tool_calls", "usage")}
    message |= await service.in_pool(_take, body, (PARENT, ROLE, *_OF_MESSAGE))
    for field in (ROLE, CONTENT):
        if message.get(field.name) is None:
            raise BadRequest(f"{field.name} required", param=field.name)
    added = await service.stored(service.chats.add(request.params["id"], message))
    return await service.in_pool(json_response, {"ok": True, "message": added})


async def edit(service: Service, request: Request) -> Response:
    """PATCH /api/sessions/{id}/messages/{message}: an answer is saved while it still grows."""
    changes = await service.in_pool(_some, await request.json(), _OF_MESSAGE)
    session_id, message_id = request.params["id"], request.params["message"]
    edited = await service.stored(service.chats.edit(session_id, message_id, changes))
    return await service.in_pool(json_response, {"ok": True, "message": edited})


def _some(body: Mapping[str, JSON], allowed: Sequence[Field]) -> dict[str, Any]:
    changes = _take(body, allowed)
    if not changes:
        names = ", ".join(field.name for field in allowed)
        raise BadRequest(f"nothing to change; it may have {names}", param=allowed[0].name)
    return changes


def _take(body: Mapping[str, JSON], allowed: Sequence[Field]) -> dict[str, Any]:
    """The fields that a body has, checked. An empty title is None: the chat has none of its own."""
    found = {f.name: value for f in allowed if (value := take(body, f)) is not None}
    title = found.get("title")
    if title is not None:
        if len(title) > MOST_TITLE:
            raise BadRequest(f"title must be at most {MOST_TITLE} characters", param="title")
        found["title"] = title_of(title, None) if title.strip() else None
    if not all(isinstance(call, dict) for call in found.get("tool_calls", ())):
        raise BadRequest("tool_calls must be a list of objects", param="tool_calls")
    for name in ("content", "reasoning"):
        if len(found.get(name, "")) > _MOST_CHARS:
            raise BadRequest(f"{name} must be at most {_MOST_CHARS} characters", param=name)
    for name, most in _MOST_JSON.items():
        try:
            is_small = name not in found or _is_within(found[name], most)
        except ValueError:  # 1e999 is read as infinity
            raise BadRequest(f"{name} holds a number that is too large", param=name) from None
        if not is_small:
            raise BadRequest(f"{name} must be at most {most} characters of JSON", param=name)
    return found


def _is_within(value: JSON, most: int) -> bool:
    """Whether its JSON is no longer; looks no further than that. Raises ValueError for what JSON
    cannot hold."""
    for part in json.JSONEncoder(allow_nan=False).iterencode(value):
        most -= len(part)
        if most < 0:
            return False
    return True


# -------------------------------------------------------------------------------------- search


async def search(service: Service, request: Request) -> Response:
    """GET /api/sessions/search?q=: at most 10 matches a session, 50 in all."""
    query = request.query.get("q", "").strip()
    if not query:
        raise BadRequest("q is required", param="q")
    if len(query) > MOST_QUERY:
        raise BadRequest(f"q must be at most {MOST_QUERY} characters", param="q")
    results = await service.stored(service.chats.search(query))
    return json_response({"ok": True, "results": results})


# --------------------------------------------------------------------------------------- files


async def export(service: Service, request: Request) -> Response:
    """GET /api/sessions/export?path=ID: the lines of a transcript as a list.

    What would be the path of a file elsewhere is an id here; one that is made like a way out of a
    folder is refused as such.
    """
    path = request.query.get("path", "")
    if not path:
        raise BadRequest("path is required", param="path")
    if re.search(r"[/\\\0]|^\.", path):
        raise Forbidden("path is outside the sessions: it is the id of one", param="path")
    session = await service.stored(service.chats.read(path))
    return await service.in_pool(_render_entries, path, session)


def _render_entries(path: str, session: Mapping[str, JSON]) -> Response:
    begin = b'{"ok":true,"path":' + encode_json(path) + b',"entries":['
    return _listed(begin, transcript.entries(session), b"]}")


async def download(service: Service, request: Request) -> Response:
    """GET /api/sessions/{id}/export: the same as a file of JSON lines."""
    session = await service.stored(service.chats.read(request.params["id"]))
    body = await service.in_pool(transcript.render, session)
    name = re.sub(r"[^A-Za-z0-9]+", "-", session["title"]).strip("-") or session["id"]
    fields = {
        "content-type": "application/jsonl",
        "content-disposition": f'attachment; filename="{name}.jsonl"',
        "x-content-type-options": "nosniff",
    }
    return Response(200, body, fields)


async def take_in(service: Service, request: Request) -> Response:
    """POST /api/sessions/import: a new session from JSON lines; broken ones are counted."""
    found = await service.in_pool(transcript.parse, request.body)
    if not found.messages:
        broken = f" ({found.skipped} broken lines)" if found.skipped else ""
        raise BadRequest(
            'no message in this file: each line must be JSON such as {"type": "message", "role": '
            f'"user", "content": "…"}}{broken}'
        )
    session = await service.stored(service.chats.take_in(found))
    return json_response({"ok": True, "session": session, "skipped": found.skipped})
