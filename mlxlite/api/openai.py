"""OpenAI's chat completions (spec 70 section 3, clients.md).

Request fields come from the table in `fields`; a promise that is not built yet is a 400 that names
its field (decision D12), a hint is accepted.

    data: {"id":"chatcmpl-…","object":"chat.completion.chunk","created":1,"model":"m",
           "choices":[{"index":0,"delta":{"content":"Par"},"finish_reason":null}]}
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlite import fields
from mlxlite.errors import BadRequest, EngineFault, MlxliteError
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
from mlxlite.text.stops import normalise_stops
from mlxlite.types import JSON, Ask, CallPiece, Delta, TokenLogprob, Usage

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
    template = fields.take(body, fields.TEMPLATE_OPTIONS) or {}
    thinking = fields.take(body, fields.THINKING) or {}
    tools = fields.take_tools(body)
    return Ask(
        messages=tuple(messages),
        stream=bool(fields.take(body, fields.STREAM)),
        include_usage=bool(fields.take(options, fields.INCLUDE_USAGE, "stream_options.")),
        max_tokens=max_tokens,
        stop=normalise_stops(body.get("stop")),
        **{field.name: fields.take(body, field) for field in fields.SAMPLING},
        logit_bias=fields.take_logit_bias(body),
        hlg=_hlg(body),
        top_logprobs=_top_logprobs(body),
        tools=() if body.get("tool_choice") == "none" else tools,
        parallel_tool_calls=fields.take(body, fields.PARALLEL_TOOL_CALLS) is not False,
        enable_thinking=_flag(template, "enable_thinking"),
        preserve_thinking=_flag(template, "preserve_thinking"),
        thinking={"enabled": True, "disabled": False}.get(
            fields.take(thinking, fields.THINKING_TYPE, "thinking.")
        ),
        reasoning_effort=fields.take(body, fields.REASONING_EFFORT),
        thinking_budget=_thinking_budget(body, thinking),
    )


def _flag(options: Mapping[str, JSON], name: str) -> bool | None:
    """A boolean of the template options; any other type is ignored (spec 10 section 1)."""
    value = options.get(name)
    return value if isinstance(value, bool) else None


def _thinking_budget(body: Mapping[str, JSON], thinking: Mapping[str, JSON]) -> int | None:
    most = fields.take(body, fields.MAX_THINKING_TOKENS)
    budget = fields.take(thinking, fields.BUDGET_TOKENS, "thinking.")
    found: int | None = most if most is not None else budget
    return found


def _hlg(body: Mapping[str, JSON]) -> Mapping[str, JSON]:
    curve: Mapping[str, JSON] = fields.take(body, fields.HLG) or {}
    return {part.name: fields.take(curve, part, "hlg.") for part in fields.HLG_PARTS}


def _top_logprobs(body: Mapping[str, JSON]) -> int | None:
    """None without log-probabilities; -1 means that the client did not set a number."""
    wants = fields.take(body, fields.LOGPROBS)
    count: int = max(fields.take(body, fields.TOP_LOGPROBS) or 0, 0)
    if not wants and count and wants is not None:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return count if wants or count else None


def _refuse_promises(body: Mapping[str, JSON]) -> None:
    """Refuse what would have to be kept and is not built yet; each names its field."""

    def refuse(name: str, why: str = "is not supported yet") -> None:
        raise BadRequest(f"{name} {why}", param=name)

    if (fields.take(body, fields.N) or 1) > 1:
        refuse("n")
    wanted_format = body.get("response_format")
    if wanted_format is not None and wanted_format != {"type": "text"}:
        refuse("response_format")
    if body.get("tool_choice") not in (None, "auto", "none"):
        refuse("tool_choice", "must be auto or none; forced calls are not supported yet")
    if body.get("functions"):
        refuse("functions", "is not supported; use tools")
    for name in ("guided_json", "guided_regex", "guided_grammar", "guided_choice"):
        if body.get(name) is not None:
            refuse(name)
    for name in ("structured_outputs", "audio"):
        if body.get(name):
            refuse(name)
    if (adapter := body.get("adapter")) is not None and adapter.lower() != "none":
        raise BadRequest(f"adapter {adapter!r} is not mounted; none is", param="adapter")


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
