"""OpenAI's chat completions (spec 70 section 3, clients.md).

Request fields come from the table in `fields`; a promise that is not built yet is a 400 that names
its field (decision D12), a hint is accepted.

    data: {"id":"chatcmpl-…","object":"chat.completion.chunk","created":1,"model":"m",
           "choices":[{"index":0,"delta":{"content":"Par"},"finish_reason":null}]}
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from mlxlite import fields
from mlxlite.errors import BadRequest, EngineFault, MlxliteError
from mlxlite.http.routing import EventStream, Request, Response, json_response, render_error
from mlxlite.service import Service
from mlxlite.stream import Answer, fold
from mlxlite.text.stops import normalise_stops
from mlxlite.types import JSON, Ask, Delta, Usage

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------ parsing


def parse_chat(body: Mapping[str, JSON]) -> Ask:
    """A chat body as an Ask. Raises BadRequest naming the field."""
    for field in fields.CHAT:
        fields.take(body, field)  # every field is checked, used or not
    messages = fields.take(body, fields.MESSAGES)
    if not messages:
        raise BadRequest("messages required", param="messages")
    _refuse_promises(body)
    options = fields.take(body, fields.STREAM_OPTIONS) or {}
    max_tokens = fields.take(body, fields.MAX_COMPLETION_TOKENS)
    if max_tokens is None:
        max_tokens = fields.take(body, fields.MAX_TOKENS)
    return Ask(
        messages=tuple(messages),
        max_tokens=max_tokens,
        temperature=fields.take(body, fields.TEMPERATURE),
        top_p=fields.take(body, fields.TOP_P),
        top_k=fields.take(body, fields.TOP_K),
        min_p=fields.take(body, fields.MIN_P),
        seed=fields.take(body, fields.SEED),
        stop=normalise_stops(body.get("stop")),
        stream=bool(fields.take(body, fields.STREAM)),
        include_usage=bool(fields.take(options, fields.INCLUDE_USAGE)),
        template_options=fields.take(body, fields.TEMPLATE_OPTIONS) or {},
    )


def _refuse_promises(body: Mapping[str, JSON]) -> None:
    """Refuse what would have to be kept and is not built yet; each names its field."""

    def refuse(name: str) -> None:
        raise BadRequest(f"{name} is not supported yet", param=name)

    if (fields.take(body, fields.N) or 1) > 1:
        refuse("n")
    if body.get("logprobs") not in (None, False):
        refuse("logprobs")
    if body.get("top_logprobs") not in (None, 0):
        refuse("top_logprobs")
    wanted_format = body.get("response_format")
    if wanted_format is not None and wanted_format != {"type": "text"}:
        refuse("response_format")
    if body.get("tool_choice") not in (None, "auto", "none"):
        refuse("tool_choice")
    if body.get("tool_choice") != "none":
        for name in ("tools", "functions"):
            if body.get(name) not in (None, []):
                refuse(name)
    for name in ("guided_json", "guided_regex", "guided_grammar", "guided_choice"):
        if body.get(name) is not None:
            refuse(name)
    for name in (
        "structured_outputs",
        "logit_bias",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "xtc_probability",
        "hlg",
        "adapter",
        "audio",
    ):
        if body.get(name) not in (None, 0, {}, False) and not (
            name == "repetition_penalty" and body[name] == 1
        ):
            refuse(name)


# ---------------------------------------------------------------------------------- rendering


@dataclass(frozen=True, slots=True)
class _Head:
    """What all frames of one answer share."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def render_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def render_whole(head: _Head, answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish}
    return {
        **head.fields("chat.completion"),
        "choices": [choice],
        "usage": render_usage(answer.usage),
    }


def render_delta(head: _Head, delta: Delta, wants_usage: bool) -> list[dict[str, Any]]:
    """The chunks of one delta. Usage goes out once, alone and last, and only if asked (F20)."""

    def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        frame = {**head.fields("chat.completion.chunk"), "choices": choices}
        return {**frame, "usage": usage} if wants_usage else frame

    chunks = []
    if delta.text:
        chunks.append(
            chunk([{"index": 0, "delta": {"content": delta.text}, "finish_reason": None}])
        )
    if delta.finish is not None:
        chunks.append(chunk([{"index": 0, "delta": {}, "finish_reason": delta.finish}]))
        if wants_usage and delta.usage is not None:
            chunks.append(chunk([], render_usage(delta.usage)))
    return chunks


def render_opening(head: _Head, wants_usage: bool) -> dict[str, Any]:
    opening = {"role": "assistant", "content": ""}
    frame = {
        **head.fields("chat.completion.chunk"),
        "choices": [{"index": 0, "delta": opening, "finish_reason": None}],
    }
    return {**frame, "usage": None} if wants_usage else frame


def _frame(value: JSON) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


# ------------------------------------------------------------------------------------ handler


async def chat(service: Service, request: Request) -> Response | EventStream:
    """POST /v1/chat/completions"""
    ask = parse_chat(await request.json())
    prepared = await service.prepare(ask)
    head = _Head(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), service.model_id)
    pieces = await service.run(prepared, f"{request.request_id} chat")
    if ask.stream:
        return EventStream(
            _frames(head, pieces, ask.include_usage), heartbeat_s=service.settings.heartbeat_s
        )
    return json_response(render_whole(head, await fold(pieces)))


async def _frames(
    head: _Head, pieces: AsyncGenerator[Delta, None], wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of one answer. An error after the opening is a frame, then the end."""
    try:
        yield _frame(render_opening(head, wants_usage))
        async for delta in pieces:
            for chunk in render_delta(head, delta, wants_usage):
                yield _frame(chunk)
    except MlxliteError as error:
        yield _frame(render_error(error))
        return
    except Exception:
        log.exception("%s failed in mid-stream", head.id)
        yield _frame(render_error(EngineFault("internal error")))
        return
    finally:
        await pieces.aclose()
    yield b"data: [DONE]\n\n"
