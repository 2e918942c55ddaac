"""OpenAI's chat completions (spec 70 section 3, clients.md).

The body is read by `asks`; here are the shapes of answers, chunks and log-probabilities.

    data: {"id":"chatcmpl-…","object":"chat.completion.chunk","created":1,"model":"m",
           "choices":[{"index":0,"delta":{"content":"Par"},"finish_reason":null}]}
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlite.asks import parse_chat
from mlxlite.errors import EngineFault, MlxliteError
from mlxlite.http.routing import (
    EventStream,
    Request,
    Response,
    encode_json,
    json_response,
    render_error,
)
from mlxlite.service import Service
from mlxlite.stream import Answer, fold
from mlxlite.types import JSON, CallPiece, Delta, TokenLogprob, Usage

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------- rendering


@dataclass(frozen=True, slots=True)
class Style:
    """What all frames of one answer share.

    reasoning: the names that reasoning goes out under (decision D10). decode: ids -> text and
    bytes, for log-probabilities.
    """

    id: str
    created: int
    model: str
    wants_usage: bool
    reasoning: tuple[str, ...]
    spell: Callable[[int], bytes]

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        frame = {**self.fields("chat.completion.chunk"), "choices": choices}
        return {**frame, "usage": usage} if self.wants_usage else frame


def render_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def render_logprobs(style: Style, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's shape with the id beside it (decision D9)."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = style.spell(token)
        text = raw.decode("utf-8", "replace")
        # JSON has no minus infinity; OpenAI writes -9999 for what cannot come.
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw), "id": token}

    content = [
        {**one(entry.id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def render_call(call: CallPiece) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def render_whole(style: Style, answer: Answer) -> dict[str, Any]:
    is_silent = answer.calls and not answer.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if is_silent else answer.text,
    }
    if answer.reasoning:
        message.update(dict.fromkeys(style.reasoning, answer.reasoning))
    if answer.calls:  # absent where there are none (fault F16)
        message["tool_calls"] = [render_call(call) for call in answer.calls]
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": answer.finish}
    if answer.logprobs:
        choice["logprobs"] = render_logprobs(style, answer.logprobs)
    return {
        **style.fields("chat.completion"),
        "choices": [choice],
        "usage": render_usage(answer.usage),
    }


def render_delta(style: Style, delta: Delta, seen: set[int]) -> list[dict[str, Any]]:
    """The chunks of one delta. Usage goes out once, alone and last, and only if asked (F20).

    seen: indexes of the calls that were announced; the first piece of a call brings id and name.
    """
    content: dict[str, Any] = {}
    if delta.text:
        content["content"] = delta.text
    if delta.reasoning:
        content.update(dict.fromkeys(style.reasoning, delta.reasoning))
    if (call := delta.call) is not None:
        if call.index in seen:
            content["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
            ]
        else:
            seen.add(call.index)
            content["tool_calls"] = [{"index": call.index, **render_call(call)}]
    chunks = []
    if content or delta.logprobs:
        choice: dict[str, Any] = {"index": 0, "delta": content, "finish_reason": None}
        if delta.logprobs:
            choice["logprobs"] = render_logprobs(style, delta.logprobs)
        chunks.append(style.chunk([choice]))
    if delta.finish is not None:
        chunks.append(style.chunk([{"index": 0, "delta": {}, "finish_reason": delta.finish}]))
        if style.wants_usage and delta.usage is not None:
            chunks.append(style.chunk([], render_usage(delta.usage)))
    return chunks


def render_opening(style: Style) -> dict[str, Any]:
    opening = {"role": "assistant", "content": ""}
    return style.chunk([{"index": 0, "delta": opening, "finish_reason": None}])


def _frame(value: JSON) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


# ------------------------------------------------------------------------------------ handler


_REASONING_FIELDS = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}


async def chat(service: Service, request: Request) -> Response | EventStream:
    """POST /v1/chat/completions"""
    ask = parse_chat(await request.json())
    prepared = await service.prepare(ask)
    tokenizer = (await service.preparation()).tokenizer
    style = Style(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.model_id,
        wants_usage=ask.include_usage,
        reasoning=_REASONING_FIELDS[service.settings.reasoning_field],
        spell=tokenizer.bytes_of,
    )
    pieces = await service.run(prepared, f"{request.request_id} chat")
    if ask.stream:
        return EventStream(_frames(style, pieces), heartbeat_s=service.settings.heartbeat_s)
    return json_response(render_whole(style, await fold(pieces)))


async def _frames(style: Style, pieces: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
    """Server-sent events of one answer. An error after the opening is a frame, then the end."""
    seen: set[int] = set()
    try:
        yield _frame(render_opening(style))
        async for delta in pieces:
            for chunk in render_delta(style, delta, seen):
                yield _frame(chunk)
    except MlxliteError as error:
        yield _frame(render_error(error))
        return
    except Exception:
        log.exception("%s failed in mid-stream", style.id)
        yield _frame(render_error(EngineFault("internal error")))
        return
    finally:
        await pieces.aclose()
    yield b"data: [DONE]\n\n"
