"""From what the engine produced to what a client sees: Events -> Deltas (floor 2).

The only place where ids become text on the way out. A whole answer is a fold over the streamed one;
there is no second code path.

Text is exact (decision D11): the concatenated deltas are the plain answer, byte for byte.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace

from mlxlite.errors import EngineFault
from mlxlite.metrics import Metrics
from mlxlite.prepare import Prepared
from mlxlite.recent import Running, decode_rate
from mlxlite.session import Sessions
from mlxlite.text.fill.guide import FillGuide
from mlxlite.text.sink import Sink
from mlxlite.types import CallPiece, Delta, Done, Event, Finish, TokenLogprob, Usage

log = logging.getLogger(__name__)

_FINISH = {Finish.EOS: "stop", Finish.GUIDE: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. finish: stop | length | tool_calls. calls: whole, in order."""

    text: str
    finish: str
    usage: Usage
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


async def deltas(
    sessions: Sessions, prepared: Prepared, label: str, metrics: Metrics | None = None
) -> AsyncGenerator[Delta, None]:
    """Run a prepared request and yield what its client sees; the last delta has finish and usage.

    The first delta is empty and says that the engine took the row, so that a surface can wait for
    it before it opens a stream: a refusal still is a plain error then.

    label: names the request in the log, as `<request id> <surface>`. metrics: told what the log
    line says. Closing the generator early cancels the row within a step.
    Raises what the row ended with: EngineFault, EngineDown, Cancelled; Busy before anything ran.
    """
    if prepared.limit == 0 and not prepared.spec.prompt_logprobs:
        yield Delta()
        usage = Usage(len(prepared.spec.prompt_ids), 0, 0, 0, 0.0, 0.0, 0.0)
        yield Delta(finish="length", usage=usage)
        return
    began_s = time.time()
    session = sessions.open(prepared.spec)
    sink = prepared.make_sink()
    running = Running(label, began_s, len(prepared.spec.prompt_ids))
    if metrics is not None:
        metrics.recent.began(running)
    done: Done | None = None
    try:
        yield Delta()
        while done is None:
            event = await session.take()
            done = event.done
            if event.ids:
                running.came(len(event.ids))
            # Without a limit the prompt's log-probabilities are all that was asked for.
            pieces = _pushed(sink, event) if prepared.limit or not event.ids else []
            if done is not None and done.finish in _FINISH:
                pieces += sink.finish()
            for piece in pieces:
                yield piece
    finally:
        if done is None:
            session.close()
        _record_end(running, done, metrics)
    (await session.settled()).raise_if_not_completed()
    usage = _usage(done, sink)
    guide = prepared.spec.guide
    if isinstance(guide, FillGuide):
        guide.ended(sink.calls)
        usage = replace(usage, fill=guide.counters.render())
    if prepared.limit == 0:
        yield Delta(finish="length", usage=replace(usage, completion_tokens=0))
    else:
        yield Delta(finish=_finish(done, sink), usage=usage, stop=sink.stopped)


def _pushed(sink: Sink, event: Event) -> list[Delta]:
    """What an event's ids settle. Log-probabilities go token by token, so that each comes with the
    text, the reasoning or the call that its token belongs to."""
    if not event.logprobs:
        return sink.push(event.ids)
    if not event.ids:  # of the prompt
        return [Delta(logprobs=event.logprobs)]
    pieces: list[Delta] = []
    for token_id, logprob in zip(event.ids, event.logprobs, strict=True):
        first, *rest = sink.push((token_id,)) or [Delta()]  # its text may come later
        pieces += [replace(first, logprobs=(logprob,)), *rest]
    return pieces


def _finish(done: Done, sink: Sink) -> str:
    """Calls, then stops, then the limit (spec 30 section 1)."""
    if sink.calls:
        return "tool_calls"
    return "stop" if sink.stopped is not None else _FINISH[done.finish]


class Fold:
    """Grows into the whole answer that a stream of deltas amounts to."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, CallPiece] = {}
        self._logprobs: list[TokenLogprob] = []
        self._last: Delta | None = None

    def push(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._logprobs += delta.logprobs
        if (piece := delta.call) is not None:
            known = self._calls.get(piece.index)
            before = known.arguments if known is not None else ""
            self._calls[piece.index] = replace(piece, arguments=before + piece.arguments)
        if delta.finish is not None:
            self._last = delta

    def answer(self) -> Answer:
        """Once the last delta was pushed. Raises EngineFault before."""
        last = self._last
        if last is None or last.finish is None or last.usage is None:
            raise EngineFault("the stream ended without a finish")
        return Answer(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls.values()),
            logprobs=tuple(self._logprobs),
            finish=last.finish,
            usage=last.usage,
        )


async def fold(pieces: AsyncIterator[Delta]) -> Answer:
    """The whole answer that a stream of deltas amounts to."""
    whole = Fold()
    async for delta in pieces:
        whole.push(delta)
    return whole.answer()


def _usage(done: Done, sink: Sink) -> Usage:
    return Usage(
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.generated_tokens,
        reasoning_tokens=sink.reasoning_tokens,
        cached_tokens=done.cached_tokens,
        queued_s=done.queued_s,
        prefill_s=done.prefill_s,
        decode_s=done.decode_s,
        lane=done.lane,
    )


def _record_end(running: Running, done: Done | None, metrics: Metrics | None) -> None:
    """One record a row, at its end, never its text: for the log, `/metrics` and `/api/requests`.

    done: None if its client left before.
    """
    label = running.label
    if metrics is not None:
        metrics.ended(label.partition(" ")[2], done)
        metrics.recent.ended(running, done)
    if done is None:
        log.info("%s: client left", label)
        return
    computed = done.prompt_tokens - done.cached_tokens
    decoded = decode_rate(done)
    rate = f"{decoded:.1f}" if decoded is not None else "-"
    log.info(
        "%s: in %d (%d cached) out %d, queued %.0f ms, first token %.0f ms, "
        "prefill %.0f tok/s, decode %s tok/s, %s",
        label,
        done.prompt_tokens,
        done.cached_tokens,
        done.generated_tokens,
        done.queued_s * 1000,
        (done.queued_s + done.prefill_s) * 1000,
        computed / done.prefill_s if done.prefill_s else 0.0,
        rate,
        "stop" if done.finish is Finish.GUIDE else done.finish.value,
    )
