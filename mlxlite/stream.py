"""From what the engine produced to what a client sees: Events -> Deltas (floor 2).

The bridge from the engine thread to the event loop, and the only place where ids become text on the
way out. A whole answer is a fold over the streamed one; there is no second code path.

Text is exact (decision D11): the concatenated deltas are the plain answer, byte for byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace

from mlxlite.errors import EngineFault
from mlxlite.prepare import Prepared
from mlxlite.text.sink import Sink
from mlxlite.types import CallPiece, Delta, Done, Engine, Event, Finish, TokenLogprob, Usage

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


class Mailbox:
    """Events of one row, from the engine thread to one reader on the event loop.

    `put` never waits. One wake-up is in flight at most, however many events a step brings.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Event] = deque()
        self._woken = asyncio.Event()
        self._wake_is_due = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        if not self._wake_is_due:
            self._wake_is_due = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._wake_is_due = False  # before the reader looks: a later event wakes again
        self._woken.set()

    async def take(self) -> list[Event]:
        """All events that have come, at least one."""
        while not self._events:
            self._woken.clear()
            await self._woken.wait()
        return [self._events.popleft() for _ in range(len(self._events))]


async def deltas(engine: Engine, prepared: Prepared, label: str) -> AsyncGenerator[Delta, None]:
    """Run a prepared request and yield what its client sees; the last delta has finish and usage.

    The first delta is empty and says that the engine took the row, so that a surface can wait for
    it before it opens a stream: a refusal still is a plain error then.

    label: names the request in the log. Closing the generator early cancels the row within a step.
    Raises what the row ended with: EngineFault, EngineDown, Cancelled; Busy before anything ran.
    """
    if prepared.limit == 0:
        yield Delta()
        usage = Usage(len(prepared.spec.prompt_ids), 0, 0, 0, 0.0, 0.0, 0.0)
        yield Delta(finish="length", usage=usage)
        return
    mailbox = Mailbox(asyncio.get_running_loop())
    row_id = engine.submit(prepared.spec, mailbox.put)
    sink = prepared.make_sink()
    done: Done | None = None
    try:
        yield Delta()
        while done is None:
            pieces: list[Delta] = []
            logprobs: list[TokenLogprob] = []
            for event in await mailbox.take():
                pieces += sink.push(event.ids)
                logprobs += event.logprobs
                done = event.done or done
            if done is not None and done.finish in _FINISH:
                pieces += sink.finish()
            for piece in _with_logprobs(pieces, logprobs):
                yield piece
    finally:
        if done is None:
            engine.cancel(row_id)
            log.info("%s: client left", label)
    _log_end(label, done)
    if done.finish not in _FINISH:
        raise done.error or EngineFault("the engine gave no reason")
    yield Delta(finish=_finish(done, sink), usage=_usage(done, sink), stop=sink.stopped)


def _with_logprobs(pieces: list[Delta], logprobs: list[TokenLogprob]) -> list[Delta]:
    """The pieces of a step with its log-probabilities on the first; alone if there is no piece."""
    if not logprobs:
        return pieces
    first = pieces[0] if pieces else Delta()
    return [replace(first, logprobs=tuple(logprobs)), *pieces[1:]]


def _finish(done: Done, sink: Sink) -> str:
    """Calls, then stops, then the limit (spec 30 section 1)."""
    if sink.calls:
        return "tool_calls"
    return "stop" if sink.stopped is not None else _FINISH[done.finish]


async def fold(pieces: AsyncIterator[Delta]) -> Answer:
    """The whole answer that a stream of deltas amounts to."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, CallPiece] = {}
    logprobs: list[TokenLogprob] = []
    async for delta in pieces:
        text.append(delta.text)
        reasoning.append(delta.reasoning)
        logprobs += delta.logprobs
        if (piece := delta.call) is not None:
            before = calls[piece.index].arguments if piece.index in calls else ""
            calls[piece.index] = replace(piece, arguments=before + piece.arguments)
        if delta.finish is not None and delta.usage is not None:
            return Answer(
                text="".join(text),
                reasoning="".join(reasoning),
                calls=tuple(calls.values()),
                logprobs=tuple(logprobs),
                finish=delta.finish,
                usage=delta.usage,
            )
    raise EngineFault("the stream ended without a finish")


def _usage(done: Done, sink: Sink) -> Usage:
    return Usage(
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.generated_tokens,
        reasoning_tokens=sink.reasoning_tokens,
        cached_tokens=done.cached_tokens,
        queued_s=done.queued_s,
        prefill_s=done.prefill_s,
        decode_s=done.decode_s,
    )


def _log_end(label: str, done: Done) -> None:
    """One line a request, at its end; never its text."""
    computed = done.prompt_tokens - done.cached_tokens
    log.info(
        "%s: in %d (%d cached) out %d, queued %.0f ms, first token %.0f ms, "
        "prefill %.0f tok/s, decode %.1f tok/s, %s",
        label,
        done.prompt_tokens,
        done.cached_tokens,
        done.generated_tokens,
        done.queued_s * 1000,
        (done.queued_s + done.prefill_s) * 1000,
        computed / done.prefill_s if done.prefill_s else 0.0,
        (done.generated_tokens - 1) / done.decode_s if done.decode_s else 0.0,
        done.finish.value,
    )
