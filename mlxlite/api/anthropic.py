"""Anthropic's Messages (spec 70 section 5, clients.md).

The body is read by `anthropic_request`.

    event: content_block_delta
    data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Par"}}

An answer is a row of blocks in the order in which the model wrote them: thinking, text, tool_use.
`render_delta` makes the events of a stream; a plain answer is the fold of the same events (F73).
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace

from mlxlite.api.anthropic_request import UNTHREADED, Turn, parse_messages
from mlxlite.constrain import warning_headers, without_strict
from mlxlite.errors import BadRequest, EngineFault, MlxliteError
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
from mlxlite.types import JSON, Delta, Usage

log = logging.getLogger(__name__)

request_id_field = "request-id"  # a second name for x-request-id (decision D13)

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
    if usage.fill is not None:
        found["fill"] = usage.fill
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
    if error.code == UNTHREADED:
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
    try:
        prepared = await service.prepare(ask)
    except BadRequest as error:
        if (loose := without_strict(ask, error)) is None:
            raise
        prepared = await service.prepare(loose[0])
        prepared = replace(prepared, warnings=(*prepared.warnings, loose[1]))
    message_id = f"msg_{secrets.token_hex(12)}"
    opening = render_opening(message_id, service.model_id, len(prepared.spec.prompt_ids))
    pieces = await service.run(prepared, f"{request.request_id} messages")
    headers = warning_headers(prepared.warnings)
    if ask.stream:
        beat_s = service.settings.heartbeat_s
        return EventStream(_frames(opening, pieces), headers=headers, heartbeat_s=beat_s)
    return json_response(await fold(opening, pieces), headers=headers)


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
