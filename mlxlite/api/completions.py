"""OpenAI's text completions: raw prompts, no template, no channels, no calls (spec 70 section 4).

The body is read by `asks`; here are the shapes. Choices come in the order of the prompts, n for
each: index = prompt * n + answer.

    data: {"id":"cmpl-…","object":"text_completion","created":1,"model":"m",
           "choices":[{"index":0,"text":" Par","logprobs":null,"finish_reason":null}]}
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlite.api.openai_shapes import frames, render_usage, template
from mlxlite.asks import parse_completion
from mlxlite.constrain import warning_headers
from mlxlite.http.routing import (
    HOLE,
    EventStream,
    Request,
    Response,
    encode_json,
    json_response,
)
from mlxlite.prepare import Prepared
from mlxlite.service import Service
from mlxlite.stream import Answer
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.together import Indexed, fold_together, total
from mlxlite.types import Delta, TokenLogprob, Usage

# ---------------------------------------------------------------------------------- rendering


@dataclass(frozen=True, slots=True)
class Style:
    """What all choices of one answer share. n: choices a prompt."""

    id: str
    created: int
    model: str
    fingerprint: str
    wants_usage: bool
    n: int
    tokenizer: Tokenizer

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        frame = self.whole(choices)
        return {**frame, "usage": usage} if self.wants_usage else frame


class Offsets:
    """Where each token starts in the text, in characters.

    Token by token, since characters may be cut: a token starts where the whole characters before it
    end. limit: the length of the text if it is known, as of an echoed prompt, which a tokenizer may
    spell differently.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, limit: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = start
        self._limit = limit

    def next(self, token: int) -> int:
        start = self._at if self._limit is None else min(self._at, self._limit)
        # Control tokens are no part of an answer's text; of a prompt's they may be.
        if self._limit is not None or not self._tokenizer.is_special(token):
            self._at += len(self._decoder.decode(self._tokenizer.bytes_of(token)))
        return start


class Choice:
    """One choice on its way out: what was echoed, where its tokens start.

    With an echo the prompt comes first. If log-probabilities were asked for as well, it waits for
    those of its tokens, the first of which has none.
    """

    def __init__(self, style: Style, index: int, prepared: Prepared) -> None:
        self._style = style
        self._index = index
        self._echo = prepared.echo or ""
        self._ids = prepared.spec.prompt_ids
        self._wants_logprobs = prepared.spec.top_logprobs is not None
        self._due = len(self._ids) - 1 if prepared.spec.prompt_logprobs else 0
        self._prompt: list[TokenLogprob] = []
        self._offsets = Offsets(style.tokenizer, start=len(self._echo))
        self._is_echoed = prepared.echo is None
        self._blank = template(style.chunk([self._render(HOLE, None)]))

    def render_opening(self) -> list[dict[str, Any]]:
        """The echo, if nothing has to be waited for."""
        return [] if self._is_echoed or self._due else [self._render_echo()]

    def render_delta(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of one delta."""
        entries = list(delta.logprobs)
        found = []
        if not self._is_echoed:
            taken = self._due - len(self._prompt)
            self._prompt += entries[:taken]
            entries = entries[taken:]
            if len(self._prompt) == self._due:
                found.append(self._render_echo())
        if delta.text or entries:
            found.append(self._render(delta.text, self._render_entries(entries)))
        if delta.finish is not None:
            found.append(self._render("", None, delta.finish))
        return found

    def frame(self, delta: Delta) -> bytes | None:
        """The frame of a delta that is nothing but text; None: it is something else."""
        if not delta.text or delta.logprobs or delta.finish is not None or not self._is_echoed:
            return None
        return self._blank % encode_json(delta.text)

    def render_whole(self, answer: Answer) -> dict[str, Any]:
        """The choice of a plain answer: the same chunks, joined."""
        text: list[str] = []
        logprobs: dict[str, list[Any]] = {}
        delta = Delta(text=answer.text, logprobs=answer.logprobs)
        for chunk in [*self.render_opening(), *self.render_delta(delta)]:
            text.append(chunk["text"])
            for name, values in (chunk["logprobs"] or {}).items():
                logprobs.setdefault(name, []).extend(values)
        if self._wants_logprobs and not logprobs:
            logprobs = _legacy()
        return self._render("".join(text), logprobs or None, answer.finish)

    def _render(
        self, text: str, logprobs: dict[str, list[Any]] | None, finish: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
        }

    def _render_echo(self) -> dict[str, Any]:
        self._is_echoed = True
        if not self._wants_logprobs:
            return self._render(self._echo, None)
        offsets = Offsets(self._style.tokenizer, limit=len(self._echo))
        first = self._ids[0]
        logprobs = _legacy()
        logprobs["tokens"].append(_spelled(self._style.tokenizer, first))
        logprobs["token_logprobs"].append(None)
        logprobs["top_logprobs"].append(None)
        logprobs["text_offset"].append(offsets.next(first))
        for entry in self._prompt:
            self._add(logprobs, entry, offsets)
        return self._render(self._echo, logprobs)

    def _render_entries(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]] | None:
        if not entries:
            return None
        logprobs = _legacy()
        for entry in entries:
            self._add(logprobs, entry, self._offsets)
        return logprobs

    def _add(self, logprobs: dict[str, list[Any]], entry: TokenLogprob, offsets: Offsets) -> None:
        """One token in the legacy shape. The token itself is always among the likeliest ones, as
        OpenAI has it."""
        tokenizer = self._style.tokenizer
        top = {_spelled(tokenizer, token): _finite(value) for token, value in entry.top}
        name = _spelled(tokenizer, entry.id)
        top.setdefault(name, _finite(entry.logprob))
        logprobs["tokens"].append(name)
        logprobs["token_logprobs"].append(_finite(entry.logprob))
        logprobs["top_logprobs"].append(top)
        logprobs["text_offset"].append(offsets.next(entry.id))


def _legacy() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as a key of `top_logprobs`: parts of characters as OpenAI spells them, so that two of
    them are never the same key."""
    raw = tokenizer.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no minus infinity; OpenAI writes this


def render_whole(
    style: Style, choices: Sequence[Choice], answers: Sequence[Answer]
) -> dict[str, Any]:
    rendered = [c.render_whole(answer) for c, answer in zip(choices, answers, strict=True)]
    usage = total([answer.usage for answer in answers], style.n)
    return {**style.whole(rendered), "usage": render_usage(usage)}


# ------------------------------------------------------------------------------------ handler


async def complete(service: Service, request: Request) -> Response | EventStream:
    """POST /v1/completions"""
    asks = await service.in_pool(parse_completion, await request.json())
    rows: list[Prepared] = []
    for ask in asks:
        rows += await service.prepare_choices(ask)
    style = Style(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.model_id,
        fingerprint=await service.fingerprint(),
        wants_usage=asks[0].include_usage,
        n=asks[0].n,
        tokenizer=(await service.preparation()).tokenizer,
    )
    choices = [Choice(style, index, prepared) for index, prepared in enumerate(rows)]
    pieces = await service.run_together(rows, f"{request.request_id} completions")
    headers = warning_headers(rows[0].warnings)
    if asks[0].stream:
        chunks = _chunks(style, choices, pieces)
        return EventStream(
            frames(style.id, chunks), headers=headers, heartbeat_s=service.settings.heartbeat_s
        )
    whole = render_whole(style, choices, await fold_together(pieces, len(rows)))
    return json_response(whole, headers=headers)


async def _chunks(
    style: Style, choices: Sequence[Choice], pieces: Indexed
) -> AsyncGenerator[dict[str, Any] | bytes, None]:
    """The chunks of all choices; usage goes out once, alone and last, and only if asked (F20)."""
    usages: dict[int, Usage] = {}
    try:
        for choice in choices:
            for part in choice.render_opening():
                yield style.chunk([part])
        async for index, delta in pieces:
            if (ready := choices[index].frame(delta)) is not None:
                yield ready
                continue
            for part in choices[index].render_delta(delta):
                yield style.chunk([part])
            if delta.usage is not None:
                usages[index] = delta.usage
    finally:
        await pieces.aclose()
    if style.wants_usage:
        usage = total([usages[index] for index in range(len(choices))], style.n)
        yield style.chunk([], render_usage(usage))
