"""Sessions: one run of one row, from the engine thread to one reader on the event loop (floor 2).

    created -> running -> settling -> terminal

A session owns three things and no more (spec 70 section 13): who may end the run and why, the
release of what was acquired for a run that never started, and how it came out. Tokens are not
queued without bound: a reader that falls behind has its row held by the engine, which costs nobody
else anything, and one that takes nothing for `IDLE_S` is given up.

One event carries one token in most steps, so the limit is in tokens alone; the spec's second limit,
on events, would hold rows for every short stall of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from mlxlite.errors import Cancelled, EngineDown, EngineFault, MlxliteError
from mlxlite.types import Done, Engine, Event, Finish, RowSpec

log = logging.getLogger(__name__)

QUEUED_TOKENS = 256  # unread tokens at which a row is held; it goes on at half of them
IDLE_S = 30.0  # a held row whose reader takes nothing for so long is cancelled


class State(Enum):
    CREATED = "created"
    RUNNING = "running"
    SETTLING = "settling"  # cancelled; the engine has not yet said that the row is gone
    TERMINAL = "terminal"


class Reason(Enum):
    """Why a session was cancelled; the value is what a client is told."""

    REQUESTED = "the request was cancelled"
    CONSUMER_CLOSED = "the client left"
    CONSUMER_IDLE = "the client stopped reading"
    ENGINE_CLOSED = "the inference engine is closed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a session came out: exactly one of `done`, `reason` and `error` says it.

    done: of a run that reached its own end. reason: it was cancelled. error: it failed; the very
    object that was raised. cleanup_error: what releasing an unstarted run's inputs raised besides.
    """

    done: Done | None = None
    reason: Reason | None = None
    error: BaseException | None = None
    cleanup_error: BaseException | None = None

    def raise_if_not_completed(self) -> None:
        """Raises the original error; or Cancelled with the reason's text, EngineDown if the engine
        was closed.
        """
        if self.error is not None:
            raise self.error
        if self.reason is not None:
            kind = EngineDown if self.reason is Reason.ENGINE_CLOSED else Cancelled
            cancelled = kind(self.reason.value)
            _attach(cancelled, self.cleanup_error)
            raise cancelled


class Session:
    """release: lets go of what belongs to a run that never started; called at most once, and never
    after the engine took the row, which owns its inputs from then on.

    Made and used on the event loop; only `_put` runs on the engine thread, and never waits.
    """

    def __init__(
        self,
        engine: Engine,
        spec: RowSpec,
        release: Callable[[], None] | None = None,
        idle_s: float = IDLE_S,
        ended: Callable[[Session], None] | None = None,
    ) -> None:
        self.state = State.CREATED
        self._engine = engine
        self._spec = spec
        self._release = release
        self._idle_s = idle_s
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._row_id: int | None = None
        self._reason: Reason | None = None
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._events: deque[Event] = deque()
        self._woken = asyncio.Event()
        self._wake_is_due = False
        # Back pressure. Each count has one writer, so neither needs a lock.
        self._put_tokens = 0  # engine thread
        self._taken_tokens = 0  # event loop
        self._is_held = False
        self._taken_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None  # runs while the row is held
        self._is_closed = False

    # --------------------------------------------------------------------------------- the run

    def start(self) -> None:
        """Give the row to the engine, once. Raises what the engine refuses it with, Busy or
        EngineDown, or what it was cancelled with before; the unstarted inputs are released then.
        """
        if self.outcome is not None:
            self.outcome.raise_if_not_completed()
        if self.state is not State.CREATED:
            raise EngineFault("the session was started before")
        try:
            self._row_id = self._engine.submit(self._spec, self._put)
        except BaseException as error:
            outcome = Outcome(error=error, cleanup_error=self._release_once())
            _attach(error, outcome.cleanup_error)
            self._settle(outcome)
            raise
        self.state = State.RUNNING

    async def take(self) -> Event:
        """The next event; the one with `done` is the last. Raises EngineFault after that."""
        while not self._events:
            if self.state is State.TERMINAL:
                raise EngineFault("the session is over")
            self._woken.clear()
            await self._woken.wait()
        event = self._events.popleft()
        self._taken_tokens += _tokens(event)
        self._taken_at = self._loop.time()
        if self._is_held and self._unread <= QUEUED_TOKENS // 2:
            self._is_held = False
            self._stop_idle_timer()
            if self._row_id is not None:
                self._engine.resume(self._row_id)
        return event

    def cancel(self, reason: Reason = Reason.REQUESTED) -> None:
        """End the run within a step; the first reason stands. Does nothing once it is over."""
        if self._reason is not None or self.state is State.TERMINAL:
            return
        self._reason = reason
        if self.state is State.CREATED:
            self._settle(Outcome(reason=reason, cleanup_error=self._release_once()))
            return
        self.state = State.SETTLING
        if self._row_id is not None:
            self._engine.cancel(self._row_id)

    def close(self) -> None:
        """The reader leaves: what still runs is cancelled, what was not read is dropped."""
        self._is_closed = True
        self.cancel(Reason.CONSUMER_CLOSED)
        self._events.clear()

    @property
    def outcome(self) -> Outcome | None:
        """None until the run is over and the engine has let go of it."""
        return self._outcome.result() if self._outcome.done() else None

    async def settled(self) -> Outcome:
        """Wait until the engine has let go of the run."""
        return await asyncio.shield(self._outcome)

    # ----------------------------------------------------------------------------------- within

    @property
    def _unread(self) -> int:
        return self._put_tokens - self._taken_tokens

    def _put(self, event: Event) -> bool:
        """Engine thread: take an event. True asks the engine to hold the row.

        The flag is set before the event can be read, so whoever reads it finds the flag. A row that
        is held may still bring the token that was in flight: it stays held then.
        """
        self._put_tokens += _tokens(event)
        if event.done is None and self._unread >= QUEUED_TOKENS:
            self._is_held = True
        self._events.append(event)
        try:
            if not self._wake_is_due:  # one wake-up in flight, however many events a step brings
                self._wake_is_due = True
                self._loop.call_soon_threadsafe(self._wake, event.done)
            elif event.done is not None:
                self._loop.call_soon_threadsafe(self._settle_done, event.done)
        except RuntimeError:  # the loop is closed: nobody will read or resume this row
            self._wake_is_due = False
            if event.done is None and self._row_id is not None:
                self._engine.cancel(self._row_id)
        return self._is_held

    def _wake(self, done: Done | None) -> None:
        self._wake_is_due = False  # before the reader looks: a later event wakes again
        self._woken.set()
        if done is not None:
            self._settle_done(done)
        elif self._is_held and self._idle_timer is None:
            self._taken_at = self._loop.time()
            self._idle_timer = self._loop.call_later(self._idle_s, self._check_idle)

    def _check_idle(self) -> None:
        self._idle_timer = None
        if self.state is not State.RUNNING:
            return
        left_s = self._taken_at + self._idle_s - self._loop.time()
        if left_s > 0:  # slow, but reading
            self._idle_timer = self._loop.call_later(left_s, self._check_idle)
            return
        log.info("a reader took nothing for %g s; its row is cancelled", self._idle_s)
        self.cancel(Reason.CONSUMER_IDLE)

    def _stop_idle_timer(self) -> None:
        timer, self._idle_timer = self._idle_timer, None
        if timer is not None:
            timer.cancel()

    def _settle_done(self, done: Done) -> None:
        if self._is_closed:
            self._events.clear()
        if done.finish is Finish.CANCELLED and self._reason is not None:
            self._settle(Outcome(reason=self._reason))
        elif done.finish in (Finish.CANCELLED, Finish.ERROR):
            error: MlxliteError = done.error or EngineFault("the engine gave no reason")
            self._settle(Outcome(error=error))
        else:
            self._settle(Outcome(done=done))

    def _settle(self, outcome: Outcome) -> None:
        self.state = State.TERMINAL
        self._stop_idle_timer()
        self._woken.set()
        if not self._outcome.done():
            self._outcome.set_result(outcome)
            if self._ended is not None:
                self._ended(self)

    def _release_once(self) -> Exception | None:
        """Let go of the inputs of a run that never started. Returns what that raises, which must
        not hide why the run did not start."""
        release, self._release = self._release, None
        if release is None:
            return None
        try:
            release()
        except Exception as failed:
            log.exception("the inputs of a run that never started were not released")
            return failed
        return None


def _attach(error: BaseException, cleanup_error: BaseException | None) -> None:
    if cleanup_error is not None:
        error.add_note(f"and its inputs were not released: {cleanup_error!r}")


def _tokens(event: Event) -> int:
    return max(len(event.ids), len(event.logprobs))


class Sessions:
    """All sessions of one engine, so that they can be ended together. Owned by the event loop."""

    def __init__(self, engine: Engine, idle_s: float = IDLE_S) -> None:
        self.engine = engine
        self._idle_s = idle_s
        self._live: set[Session] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._live)

    def open(self, spec: RowSpec, release: Callable[[], None] | None = None) -> Session:
        """A session that runs. Raises Busy or EngineDown; `release` was called then."""
        session = Session(self.engine, spec, release, self._idle_s, self._live.discard)
        if self._is_closed:
            session.cancel(Reason.ENGINE_CLOSED)  # starting it raises that
        session.start()
        self._live.add(session)  # it cannot have ended: that is told on this loop
        return session

    async def close(self, timeout_s: float | None = None) -> None:
        """Cancel all and wait until the engine has let go of them; later opens fail."""
        self._is_closed = True
        for session in list(self._live):
            session.cancel(Reason.ENGINE_CLOSED)
        waits = [asyncio.ensure_future(session.settled()) for session in self._live]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()
