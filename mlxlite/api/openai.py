"""OpenAI's chat completions (spec 70 section 3, clients.md).

The body is read by `asks`; here are the shapes of answers, chunks and log-probabilities.

    data: {"id":"chatcmpl-…","object":"chat.completion.chunk","created":1,"model":"m",
           "choices":[{"index":0,"delta":{"content":"Par"},"finish_reason":null}]}
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlite.api.openai_shapes import frames, render_usage, template
from mlxlite.asks import parse_chat
from mlxlite.constrain import warning_headers
from mlxlite.http.routing import (
    HOLE,
    EventStream,
    Request,
    Response,
    encode_json,
    json_response,
)
from mlxlite.service import Service
from mlxlite.stream import Answer
from mlxlite.together import Indexed, fold_together, total
from mlxlite.types import CallPiece, Delta, TokenLogprob, Usage

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
    fingerprint: str
    wants_usage: bool
    reasoning: tuple[str, ...]
    spell: Callable[[int], bytes]

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        frame = {**self.fields("chat.completion.chunk"), "choices": choices}
        return {**frame, "usage": usage} if self.wants_usage else frame


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


def render_choice(style: Style, index: int, answer: Answer) -> dict[str, Any]:
    is_silent = answer.calls and not answer.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if is_silent else answer.text,
    }
    if answer.reasoning:
        message.update(dict.fromkeys(style.reasoning, answer.reasoning))
    if answer.calls:  # absent where there are none (fault F16)
        message["tool_calls"] = [render_call(call) for call in answer.calls]
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": answer.finish}
    if answer.logprobs:
        choice["logprobs"] = render_logprobs(style, answer.logprobs)
    return choice


def render_whole(style: Style, answers: Sequence[Answer]) -> dict[str, Any]:
    """n answers to one conversation."""
    usage = total([answer.usage for answer in answers], len(answers))
    return {
        **style.fields("chat.completion"),
        "choices": [render_choice(style, i, answer) for i, answer in enumerate(answers)],
        "usage": render_usage(usage),
    }


def render_delta(style: Style, index: int, delta: Delta, seen: set[int]) -> list[dict[str, Any]]:
    """The chunks of one delta of the answer with this index.

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
        choice: dict[str, Any] = {"index": index, "delta": content, "finish_reason": None}
        if delta.logprobs:
            choice["logprobs"] = render_logprobs(style, delta.logprobs)
        chunks.append(style.chunk([choice]))
    if delta.finish is not None:
        chunks.append(style.chunk([{"index": index, "delta": {}, "finish_reason": delta.finish}]))
    return chunks


class Texts:
    """Frames of the deltas that are nothing but text or reasoning: the same bytes as those of
    `render_delta`, of which they are made."""

    def __init__(self, style: Style, index: int) -> None:
        def blank(delta: Delta) -> bytes:
            return template(render_delta(style, index, delta, set())[0])

        self._text = blank(Delta(text=HOLE))
        self._reasoning = blank(Delta(reasoning=HOLE))
        self._names = len(style.reasoning)

    def frame(self, delta: Delta) -> bytes | None:
        """None: it is something else."""
        if delta.call is not None or delta.logprobs or delta.finish is not None:
            return None
        if not delta.reasoning:
            return self._text % encode_json(delta.text) if delta.text else None
        return self._reasoning % ((encode_json(delta.reasoning),) * self._names)


def render_opening(style: Style, index: int) -> dict[str, Any]:
    opening = {"role": "assistant", "content": ""}
    return style.chunk([{"index": index, "delta": opening, "finish_reason": None}])


# ------------------------------------------------------------------------------------ handler


_REASONING_FIELDS = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}


async def chat(service: Service, request: Request) -> Response | EventStream:
    """POST /v1/chat/completions"""
    ask = await service.in_pool(parse_chat, await request.json())
    rows = await service.prepare_choices(ask)
    tokenizer = (await service.preparation()).tokenizer
    style = Style(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.model_id,
        fingerprint=await service.fingerprint(),
        wants_usage=ask.include_usage,
        reasoning=_REASONING_FIELDS[service.settings.reasoning_field],
        spell=tokenizer.bytes_of,
    )
    pieces = await service.run_together(rows, f"{request.request_id} chat")
    headers = warning_headers(rows[0].warnings)
    if ask.stream:
        chunks = _chunks(style, pieces, len(rows))
        return EventStream(
            frames(style.id, chunks), headers=headers, heartbeat_s=service.settings.heartbeat_s
        )
    whole = render_whole(style, await fold_together(pieces, len(rows)))
    return json_response(whole, headers=headers)


async def _chunks(
    style: Style, pieces: Indexed, n: int
) -> AsyncGenerator[dict[str, Any] | bytes, None]:
    """The chunks of all answers, each with its index; usage goes out once, alone and last, and
    only if asked (F20)."""
    seen: list[set[int]] = [set() for _ in range(n)]
    usages: dict[int, Usage] = {}
    try:
        texts = [Texts(style, index) for index in range(n)]
        for index in range(n):
            yield render_opening(style, index)
        async for index, delta in pieces:
            if (ready := texts[index].frame(delta)) is not None:
                yield ready
                continue
            for chunk in render_delta(style, index, delta, seen[index]):
                yield chunk
            if delta.usage is not None:
                usages[index] = delta.usage
    finally:
        await pieces.aclose()
    if style.wants_usage:
        yield style.chunk([], render_usage(total([usages[i] for i in range(n)], n)))
