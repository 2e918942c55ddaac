"""Anthropic's Messages (spec 70 section 5, clients.md).

A body is translated into the shape of a chat request and read by `asks`, so that a field means the
same on every surface. Whatever has another name or form here is checked first: a refusal names the
field that this client sent.

    event: content_block_delta
    data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Par"}}

An answer is a row of blocks in the order in which the model wrote them: thinking, text, tool_use.
`render_delta` makes the events of a stream; a plain answer is the fold of the same events (F73).
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlite import fields
from mlxlite.asks import parse_chat
from mlxlite.errors import BadRequest, EngineFault, MlxliteError
from mlxlite.fields import Field
from mlxlite.http.routing import (
    HOLE,
    EventStream,
    Request,
    Response,
    encode_json,
    json_response,
    json_template,
)
from mlxlite.service import Service
from mlxlite.text.stops import normalise_stops
from mlxlite.types import JSON, Ask, Delta, Usage

log = logging.getLogger(__name__)

request_id_field = "request-id"  # a second name for x-request-id (decision D13)

Block = Mapping[str, JSON]
Turn = dict[str, Any]

# ------------------------------------------------------------------------------------ request

TOOL_CHOICE = Field("tool_choice", dict, "type: auto or none", "auto")
CHOICE_TYPE = Field("type", str, "of the choice", choices=("auto", "any", "tool", "none"))
ONE_CALL = Field("disable_parallel_tool_use", bool, "true: end after one call", "false")
IS_ERROR = Field("is_error", bool, "the result says what went wrong", "false")
DESCRIPTION = Field("description", str, "what a tool is for", "none")

_PASSED = (fields.MODEL, fields.STREAM, fields.MAX_TOKENS, fields.THINKING, *fields.SAMPLING)

# Differs from chat to chat ahead of thousands of constant tokens (clients.md, Requests 4).
_BILLING = "x-anthropic-billing-header:"
# `thread` asks to keep the conversation, and the package's tool runner then sends only what is new.
# At this code it goes on without (anthropic 2.14, lib/threads).
_UNTHREADED = "thread_unsupported_request"
# Blocks that are words, by the key that holds them.
_WORDS = {"text": "text", "tool_reference": "tool_name"}
_MEDIA = ("image", "document", "audio", "video", "file", "upload")
# What Anthropic's own servers did in an earlier turn; it says nothing to another model.
_OPAQUE = ("redacted_thinking", "server_tool_use", "mcp_tool_use")


def parse_messages(body: Mapping[str, JSON], is_count: bool = False) -> Ask:
    """A Messages body as an Ask. Raises BadRequest naming the field.

    is_count: only the prompt is wanted, so no limit is needed and nothing is promised.
    """
    chat = {field.name: body.get(field.name) for field in _PASSED}
    if chat["max_tokens"] is None and not is_count:
        raise BadRequest("max_tokens required: most tokens to generate", param="max_tokens")
    if body.get("thread") is not None:
        why = "thread: chats are not kept here; send all messages"
        raise BadRequest(why, param="thread", code=_UNTHREADED)
    chat["messages"] = _turns(body)
    chat["tools"] = _tools(body)
    chat["stop"] = list(normalise_stops(body.get("stop_sequences"), "stop_sequences"))
    return parse_chat({**chat, **_tool_choice(body, is_count)})


def _turns(body: Mapping[str, JSON]) -> list[Turn]:
    """The messages of a chat request, the system prompt first.

    Neighbouring user messages are one turn, as Anthropic has it. System messages that come before
    any turn join the system prompt, later ones the user's turn where they stand: a prompt then only
    grows at its end from turn to turn, whatever the template thinks of roles (clients.md,
    Requests 3; F102).
    """
    given = fields.take(body, fields.MESSAGES)
    if not given:
        raise BadRequest("messages required", param="messages")
    system = _system(body["system"], "system") if body.get("system") is not None else []
    turns: list[Turn] = []
    for n, message in enumerate(given):
        at = f"messages[{n}]"
        if not isinstance(message, dict):
            raise _wrong(at, "object")
        role, content, path = message.get("role"), message.get("content"), f"{at}.content"
        if role == "assistant":
            turns.append(_assistant(content, path))
        elif role == "user":
            _hear(turns, content, path)
        elif role != "system":
            raise BadRequest(
                f"{at}.role must be one of user, assistant, system", param=f"{at}.role"
            )
        elif turns:
            _say(turns, _system(content, path))
        else:
            system += _system(content, path)
    if any(system):
        turns.insert(0, {"role": "system", "content": system})
    return [{**turn, "content": "\n".join(turn["content"])} for turn in turns]


def _system(content: JSON, at: str) -> list[str]:
    """The texts of a system prompt, without the block that is for Anthropic's accounts."""
    texts = [_words(block, here) for here, block in _blocks(content, at)]
    is_list = isinstance(content, list)
    return texts[1:] if is_list and texts and texts[0].startswith(_BILLING) else texts


def _say(turns: list[Turn], texts: Sequence[str]) -> None:
    """Words of the user's side, joined to its turn if that is still the last one."""
    if turns and turns[-1]["role"] == "user":
        turns[-1]["content"] += texts
    else:
        turns.append({"role": "user", "content": list(texts)})


def _hear(turns: list[Turn], content: JSON, at: str) -> None:
    """A user message: results of calls first, as templates want them beside the calls."""
    texts: list[str] = []
    has_results = False
    for here, block in _blocks(content, at):
        if block["type"] == "tool_result":
            has_results = True
            last = len(turns) - 1
            is_spoken = last > 0 and turns[last]["role"] == "user"  # a system message came between
            turns.insert(last if is_spoken else last + 1, _result(block, here))
        else:
            texts.append(_text(block, here))
    if texts or not has_results:
        _say(turns, texts)


def _result(block: Block, at: str) -> Turn:
    content = block.get("content")
    inner = [] if content is None else _blocks(content, f"{at}.content")
    texts = [_text(part, here) for here, part in inner]
    says_so = "".join(texts[:1]).lower().startswith("error")
    if fields.take(block, IS_ERROR, f"{at}.") and not says_so:
        texts = ["Error:", *texts]  # templates know no such flag
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": texts}


def _assistant(content: JSON, at: str) -> Turn:
    """An answer as we, or another server, once gave it; any signature will do (F101)."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Turn] = []
    for here, block in _blocks([] if content is None else content, at):
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", here))
        elif kind == "tool_use":
            calls.append(_call(block, here))
        elif kind not in _OPAQUE and not kind.endswith("_tool_result"):
            texts.append(_text(block, here))
    turn: Turn = {"role": "assistant", "content": texts}
    if thoughts:
        turn["reasoning"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: Block, at: str) -> Turn:
    given = block.get("input")
    if not isinstance(given, dict | None):
        raise _wrong(f"{at}.input", "object")
    function = {"name": _string(block, "name", at), "arguments": given or {}}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _blocks(content: JSON, at: str) -> list[tuple[str, Block]]:
    """(path, block) of each block; a string is one text block, also inside a list."""
    if isinstance(content, str):
        return [(at, {"type": "text", "text": content})]
    if content is None:
        raise BadRequest(f"{at} is missing", param=at)
    if not isinstance(content, list):
        raise BadRequest(f"{at} must be a string or a list of blocks", param=at)
    found: list[tuple[str, Block]] = []
    for n, block in enumerate(content):
        here = f"{at}[{n}]"
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        if not isinstance(block, dict):
            raise _wrong(here, "object")
        _string(block, "type", here)
        found.append((here, block))
    return found


def _text(block: Block, at: str) -> str:
    """What a block says; a search result is its texts."""
    if block["type"] != "search_result":
        return _words(block, at)
    inner = _blocks(block.get("content"), f"{at}.content")
    return "\n".join(_words(part, here) for here, part in inner)


def _words(block: Block, at: str) -> str:
    kind = block["type"]
    if kind in _WORDS:
        return _string(block, _WORDS[kind], at)
    if any(word in kind for word in _MEDIA):
        raise BadRequest(f"{at}: this model reads text only, not {kind[:40]} blocks", param=at)
    at = f"{at}.type"
    raise BadRequest(f"{at}: blocks of type {kind[:40]!r} cannot stand here", param=at)


def _string(block: Block, name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{at}.{name}", "string")
    return value


def _wrong(at: str, kind: str) -> BadRequest:
    return BadRequest(f"{at} must be of type {kind}", param=at)


def _tools(body: Mapping[str, JSON]) -> list[Turn]:
    """The client's own tools as functions. Those that Anthropic's servers run are skipped, and so
    is `strict`, a hint here (clients.md, Requests 6 and 7)."""
    found = []
    for n, tool in enumerate(fields.take(body, fields.TOOLS) or []):
        at = f"tools[{n}]"
        if not isinstance(tool, dict):
            raise _wrong(at, "object")
        schema = tool.get("input_schema")
        if schema is None and tool.get("type") not in (None, "custom"):
            continue
        if not _string(tool, "name", at).strip():
            raise BadRequest(f"{at}.name must not be empty", param=f"{at}.name")
        if not isinstance(schema, dict):
            raise _wrong(f"{at}.input_schema", "object")
        about = fields.take(tool, DESCRIPTION, f"{at}.")
        described = {} if about is None else {"description": about}
        function = {"name": tool["name"], **described, "parameters": schema}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(body: Mapping[str, JSON], is_count: bool) -> dict[str, JSON]:
    choice = fields.take(body, TOOL_CHOICE)
    if choice is None:
        return {}
    kind = fields.take(choice, CHOICE_TYPE, "tool_choice.")
    if kind is None:
        raise BadRequest("tool_choice.type is missing", param="tool_choice.type")
    found: dict[str, JSON] = {
        "parallel_tool_calls": fields.take(choice, ONE_CALL, "tool_choice.") is not True
    }
    if kind == "none":
        found["tool_choice"] = "none"
    elif kind == "any" and not is_count:
        found["tool_choice"] = "required"
    elif kind == "tool" and not is_count:
        named = {"name": _string(choice, "name", "tool_choice")}
        found["tool_choice"] = {"type": "function", "function": named}
    return found


# ---------------------------------------------------------------------------------- rendering

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

# For each type of block: its deltas' type, and the key that holds a piece.
_PIECES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class Blocks:
    """How far the row of blocks is. count: blocks begun. kind: of the open one, or empty.

    call: the index of the call that the open block is.
    """

    count: int = 0
    kind: str = ""
    call: int | None = None

    def add(self, block: Turn, piece: str, call: int | None = None) -> list[Turn]:
        """A piece of a block; `block` is how a new one is announced, if it does not go on."""
        events: list[Turn] = []
        if (self.kind, self.call) != (block["type"], call):
            events = self.end()
            self.kind, self.call = block["type"], call
            events.append(self._event("start", content_block=block))
            self.count += 1
        kind, key = _PIECES[self.kind]
        if piece:
            events.append(self._event("delta", delta={"type": kind, key: piece}))
        return events

    def end(self) -> list[Turn]:
        """Close the open block, if there is one."""
        events: list[Turn] = []
        if self.kind == "thinking":  # nobody checks our signatures, but the clients' types have one
            events.append(self._event("delta", delta={"type": "signature_delta", "signature": ""}))
        if self.kind:
            events.append(self._event("stop"))
        self.kind = ""
        return events

    def _event(self, what: str, **rest: JSON) -> Turn:
        index = self.count if what == "start" else self.count - 1
        return {"type": f"content_block_{what}", "index": index, **rest}


def render_opening(message_id: str, model: str, prompt_tokens: int) -> Turn:
    """The first event. How much of the prompt was cached is only known at the end."""
    return {
        "type": "message_start",
        "message": {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": render_usage(Usage(prompt_tokens, 0, 0, 0, 0.0, 0.0, 0.0)),
        },
    }


def render_usage(usage: Usage) -> Turn:
    """The prompt is the sum of the three input figures, as Anthropic counts."""
    found: Turn = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        found["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return found


def render_delta(blocks: Blocks, delta: Delta) -> list[Turn]:
    """The events of one delta; the last one closes the message. An answer has a block at least."""
    events: list[Turn] = []
    if (call := delta.call) is not None:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        events = blocks.add(block, call.arguments, call.index)
    elif delta.reasoning:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        events = blocks.add(block, delta.reasoning)
    elif delta.text or (delta.finish is not None and not blocks.count):
        events = blocks.add({"type": "text", "text": ""}, delta.text)
    if delta.finish is None or delta.usage is None:
        return events
    is_stopped = delta.finish == "stop" and delta.stop is not None
    reason = "stop_sequence" if is_stopped else _STOP_REASONS[delta.finish]
    end = {"stop_reason": reason, "stop_sequence": delta.stop if is_stopped else None}
    return [
        *events,
        *blocks.end(),
        {"type": "message_delta", "delta": end, "usage": render_usage(delta.usage)},
        {"type": "message_stop"},
    ]


async def fold(opening: Turn, pieces: AsyncIterator[Delta]) -> Turn:
    """The message that the events of a stream amount to."""
    message, blocks = opening["message"], Blocks()
    begun: list[tuple[Turn, list[str]]] = []
    async for delta in pieces:
        for event in render_delta(blocks, delta):
            match event:
                case {"content_block": block}:
                    begun.append((block, []))
                case {"delta": piece, "usage": usage}:
                    message = {**message, **piece, "usage": usage}
                case {"delta": piece}:
                    block, texts = begun[-1]
                    texts.append(piece.get(_PIECES[block["type"]][1], ""))  # a signature has none
    if message["stop_reason"] is None:
        raise EngineFault("the stream ended without a finish")
    content = []
    for block, texts in begun:
        kind, whole = block["type"], "".join(texts)
        value = {"input": parse_input(whole)} if kind == "tool_use" else {kind: whole}
        content.append({**block, **value})
    return {**message, "content": content}


def parse_input(arguments: str) -> Turn:
    """The input of a call; what is no JSON object goes out as it is (spec 70 section 5)."""
    try:
        value = json.loads(arguments)
        encode_json(value)  # 1e999 is read as infinity, which JSON does not have
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_raw": arguments}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def render_error(error: MlxliteError) -> Turn:
    """Anthropic's shape. `param` has no place in it; our messages name the field."""
    default = "invalid_request_error" if error.status < 499 else "api_error"
    message = error.message
    if error.code == "context_length_exceeded" and "prompt is too long" not in message:
        message = f"prompt is too long: {message}"  # agents compact their history at these words
    found: Turn = {"type": _ERROR_TYPES.get(error.status, default), "message": message}
    if error.code == _UNTHREADED:
        found["details"] = {"error_code": error.code}
    return {"type": "error", "error": found}


def _framed(kind: str, data: bytes) -> bytes:
    """One event. Without its `event:` line the packages see nothing (clients.md, Streams 1)."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


_DELTA: Turn = {"type": "content_block_delta", "index": HOLE}
_BLANKS = {  # of nearly all events of a stream
    kind: _framed(_DELTA["type"], json_template({**_DELTA, "delta": {"type": kind, key: HOLE}}))
    for kind, key in _PIECES.values()
}


def _frame(event: Turn) -> bytes:
    if event["type"] == _DELTA["type"] and event["delta"]["type"] in _BLANKS:
        kind, piece = event["delta"].values()
        return _BLANKS[kind] % (encode_json(event["index"]), encode_json(piece))
    return _framed(event["type"], encode_json(event))


# ----------------------------------------------------------------------------------- handlers


async def messages(service: Service, request: Request) -> Response | EventStream:
    """POST /v1/messages"""
    ask = await service.in_pool(parse_messages, await request.json())
    prepared = await service.prepare(ask)
    message_id = f"msg_{secrets.token_hex(12)}"
    opening = render_opening(message_id, service.model_id, len(prepared.spec.prompt_ids))
    pieces = await service.run(prepared, f"{request.request_id} messages")
    if ask.stream:
        return EventStream(_frames(opening, pieces), heartbeat_s=service.settings.heartbeat_s)
    return json_response(await fold(opening, pieces))


async def count_tokens(service: Service, request: Request) -> Response:
    """POST /v1/messages/count_tokens: the prompt of the same message, even of one too long (F99)"""
    ask = await service.in_pool(parse_messages, await request.json(), True)
    return json_response({"input_tokens": await service.count(ask)})


async def _frames(
    opening: Turn, pieces: AsyncGenerator[Delta, None]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of one answer. An error after the opening is a frame, then the end."""
    blocks = Blocks()
    try:
        yield _frame(opening)
        async for delta in pieces:
            if events := render_delta(blocks, delta):
                yield b"".join(map(_frame, events))
    except MlxliteError as error:
        yield _frame(render_error(error))
    except Exception:
        log.exception("%s failed in mid-stream", opening["message"]["id"])
        yield _frame(render_error(EngineFault("internal error")))
    finally:
        await pieces.aclose()
