"""Sessions (spec 70 section 13): back pressure, readers that are slow, idle or gone, races.

The clock is moved by hand; races have an engine with a thread of its own (`Racer`).
"""

import asyncio
import itertools
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from mlxlite.errors import Busy, Cancelled, EngineDown, EngineFault
from mlxlite.session import IDLE_S, QUEUED_TOKENS, Outcome, Reason, Session, Sessions, State
from mlxlite.types import Done, Event, Finish, RowSpec, Sink, TokenLogprob
from tests.rows import PATIENCE_S
from tests.sessions import (
    SPEC,
    Hand,
    all_of,
    done,
    made,
    opened,
    outcome_of,
    pass_time,
    run,
    state_of,
    turn,
)

# ------------------------------------------------------------------------------- back pressure


@pytest.mark.parametrize("size", [1, 3, 100, 300])
@pytest.mark.parametrize("of_prompt", [False, True], ids=["ids", "prompt logprobs"])
def test_a_row_is_held_at_the_limit_and_goes_on_at_half(size: int, of_prompt: bool) -> None:
    logprobs = (TokenLogprob(1, -1.0),) * size
    event = Event(() if of_prompt else (1,) * size, logprobs=logprobs)

    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        for _ in range(3):  # the limit is the same every time
            unread = 0
            while unread < QUEUED_TOKENS:
                unread += size
                assert engine.sinks[0](event) is (unread >= QUEUED_TOKENS)
            before = len(engine.resumed)
            while unread > QUEUED_TOKENS // 2:
                assert len(engine.resumed) == before
                await session.take()
                unread -= size
            assert len(engine.resumed) == before + 1, "told once, at half"
            while unread:
                await session.take()
                unread -= size
            assert len(engine.resumed) == before + 1

    run(go())


def test_a_token_that_was_in_flight_does_not_free_its_row() -> None:
    """The engine is one step ahead: one more comes after the hold, when some were read since."""

    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        assert [engine.put(n) for n in range(QUEUED_TOKENS)][-1] is True
        for _ in range(10):
            await session.take()
        assert engine.put(QUEUED_TOKENS) is True and engine.resumed == []
        taken = [await session.take() for _ in range(QUEUED_TOKENS // 2 - 9)]
        assert taken[0].ids == (10,) and engine.resumed == [1]
        assert engine.put(0) is False

    run(go())


def test_an_end_is_delivered_whatever_is_unread() -> None:
    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        for n in range(QUEUED_TOKENS + 1):
            engine.put(n)
        what = engine.end(Finish.LENGTH, ids=(999,))
        assert (await session.settled()).done is what
        await pass_time(2 * IDLE_S)  # whoever reads what is over may take their time
        events = [await session.take() for _ in range(QUEUED_TOKENS + 2)]
        assert [token for event in events for token in event.ids] == [*range(257), 999]
        assert events[-1].done is what and outcome_of(session).done is what

    run(go())


async def held(engine: Hand, count: int = QUEUED_TOKENS) -> Session:
    session = opened(engine)
    for n in range(count):
        engine.put(n)
    await turn()
    return session


def test_an_idle_reader_is_given_up() -> None:
    async def go() -> None:
        engine = Hand()
        session = await held(engine)
        await pass_time(IDLE_S - 0.5)
        assert state_of(session) is State.RUNNING and engine.cancelled == []
        await pass_time(1.0)
        assert state_of(session) is State.SETTLING and engine.cancelled == [1]
        engine.end(Finish.CANCELLED, Cancelled("of the engine"))
        outcome = await session.settled()
        assert outcome == Outcome(reason=Reason.CONSUMER_IDLE)
        # Should it come back after all, it gets what there is, and then why it ended.
        events = [await session.take() for _ in range(QUEUED_TOKENS + 1)]
        assert [event.ids for event in events[:-1]] == [(n,) for n in range(QUEUED_TOKENS)]
        with pytest.raises(Cancelled, match="stopped reading"):
            outcome.raise_if_not_completed()

    run(go())


def test_the_idle_time_is_the_callers() -> None:
    async def go() -> None:
        engine: Any = Hand()
        Sessions(engine, idle_s=0.001).open(SPEC)
        engine.put(*range(QUEUED_TOKENS))
        await pass_time(0.0)
        await pass_time(0.002)
        assert engine.cancelled == [1]

    run(go())


def test_a_slow_reader_is_not_idle() -> None:
    async def go() -> None:
        engine = Hand()
        session = await held(engine)
        for _ in range(100):
            await pass_time(IDLE_S - 0.5)
            await session.take()
        assert session.state is State.RUNNING and engine.cancelled == engine.resumed == []
        await pass_time(IDLE_S + 0.5)
        assert engine.cancelled == [1]

    run(go())


def test_a_row_that_is_not_held_has_all_the_time() -> None:
    """A reader that takes nothing costs nothing yet; nor does an engine that says nothing."""

    async def go() -> None:
        engine = Hand()
        session = await held(engine, QUEUED_TOKENS - 1)
        await pass_time(10 * IDLE_S)
        for _ in range(QUEUED_TOKENS - 1):
            await session.take()
        await pass_time(10 * IDLE_S)
        assert session.state is State.RUNNING and engine.cancelled == []

    run(go())


def test_each_hold_has_its_own_time() -> None:
    """The timer of a hold that is over does not strike the next one, whose reader just began."""

    async def go() -> None:
        engine = Hand()
        session = await held(engine)
        for _ in range(QUEUED_TOKENS):
            await session.take()
        await pass_time(IDLE_S - 0.5)
        for n in range(QUEUED_TOKENS):
            engine.put(n)
        await pass_time(1.0)
        assert session.state is State.RUNNING and engine.cancelled == []
        await pass_time(IDLE_S)
        assert engine.cancelled == [1]

    run(go())


def test_a_cancelled_session_is_not_called_idle(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        engine = Hand()
        session = await held(engine)
        session.cancel()
        with caplog.at_level("INFO", "mlxlite"):
            await pass_time(2 * IDLE_S)
        assert engine.cancelled == [1] and caplog.text == ""
        engine.end(Finish.CANCELLED)
        assert await session.settled() == Outcome(reason=Reason.REQUESTED)

    run(go())


# ------------------------------------------------------------------------------ readers that go


class Mark:
    """A log-probability that can be watched."""


def marked(what: Done | None = None) -> tuple[Event, weakref.ref[Mark]]:
    mark: Any = Mark()
    return Event((7,), what, (mark,)), weakref.ref(mark)


@pytest.mark.parametrize(
    "reason", [None, Reason.REQUESTED, Reason.ENGINE_CLOSED], ids=["closed", "asked", "all closed"]
)
@pytest.mark.parametrize("when", ["unread", "later", "ended"])
def test_a_closed_session_keeps_no_event(when: str, reason: Reason | None) -> None:
    """Whatever it was cancelled for before; the end counts as well."""

    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        refs = []

        def put(what: Done | None = None) -> None:
            event, ref = marked(what)
            engine.sinks[0](event)
            refs.append(ref)

        put()
        await turn()
        if when == "ended":
            put(done())
            await turn()
        if reason is not None:
            session.cancel(reason)
        session.close()
        if when != "ended":
            if when == "later":
                put()
            put(done(Finish.CANCELLED))
        await session.settled()
        assert len(refs) > 1 and [ref() for ref in refs] == [None] * len(refs)
        with pytest.raises(EngineFault):
            await session.take()

    run(go())


@pytest.mark.parametrize("is_started", [False, True], ids=["unstarted", "started"])
def test_closing_wakes_whoever_still_waits(is_started: bool) -> None:
    async def go() -> None:
        engine = Hand()
        session = opened(engine) if is_started else made(engine)
        waiting = asyncio.ensure_future(session.take())
        await turn()
        session.close()
        if is_started:
            await turn()
            engine.end(Finish.CANCELLED)
        with pytest.raises(EngineFault, match="over"):
            await asyncio.wait_for(waiting, PATIENCE_S)

    run(go())


@pytest.mark.parametrize("is_wake_due", [False, True])
def test_a_loop_that_closed_early_does_not_harm_the_engine(is_wake_due: bool) -> None:
    """Nobody will read or resume such a row, so it is given up; the sink never raises."""
    engine = Hand()

    async def go() -> Session:
        session = opened(engine)
        engine.put(1)
        await turn()
        return session

    loop = asyncio.new_event_loop()
    session = loop.run_until_complete(go())
    if is_wake_due:
        engine.put(2)
    loop.close()
    assert engine.put(3) is False
    if not is_wake_due:
        assert engine.cancelled == [1]
    engine.end(Finish.CANCELLED)
    assert session.outcome is None


# ----------------------------------------------------------------------------------- all of them


def test_closing_all() -> None:
    async def go() -> None:
        engine = Hand()
        sessions = all_of(engine)
        mine = [sessions.open(SPEC) for _ in range(4)]
        engine.end(row_id=1)
        await turn()
        assert len(sessions) == 3
        mine[1].cancel(Reason.REQUESTED)
        closing = asyncio.ensure_future(sessions.close())
        await turn()
        assert sorted(engine.cancelled) == [2, 3, 4] and not closing.done()
        with pytest.raises(EngineDown):
            sessions.open(SPEC)
        for row_id in (2, 3):
            engine.end(Finish.CANCELLED, row_id=row_id)
        await turn()
        assert not closing.done(), "one is left"
        engine.end(Finish.LENGTH, row_id=4)  # it came to its end meanwhile
        await asyncio.wait_for(closing, PATIENCE_S)
        reasons = [outcome_of(session).reason for session in mine]
        assert reasons == [None, Reason.REQUESTED, Reason.ENGINE_CLOSED, None]
        assert len(sessions) == 0 and len(engine.sinks) == 4
        await sessions.close()

    run(go())


def test_closing_does_not_wait_for_ever() -> None:
    async def go() -> None:
        engine = Hand()
        sessions = all_of(engine)
        session = sessions.open(SPEC)
        await sessions.close(timeout_s=0)
        assert session.state is State.SETTLING and len(sessions) == 1
        engine.end(Finish.CANCELLED)
        await turn()
        assert len(sessions) == 0

    run(go())


def test_a_refused_session_is_not_counted() -> None:
    async def go() -> None:
        sessions = all_of(Hand(Busy("full")))
        with pytest.raises(Busy):
            sessions.open(SPEC)
        assert len(sessions) == 0

    run(go())


# --------------------------------------------------------------------------------------- races


class Racer:
    """An engine on a thread of its own that is as fast as it can be: numbers 0..count-1 for each
    row, a few at a time, sometimes one more after the hold, as if it had been in flight."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.holds = 0
        self._rng = random.Random(seed)
        self._lock = threading.Condition()
        self._rows: dict[int, tuple[Sink, Iterator[int]]] = {}
        self._held: set[int] = set()  # its thread's alone
        self._resumes: set[int] = set()
        self._cancels: set[int] = set()
        self._stopping = False
        self._ids = itertools.count(1)
        self.thread = threading.Thread(target=self._live)
        self.thread.start()

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        with self._lock:
            row_id = next(self._ids)
            self._rows[row_id] = sink, iter(range(self.count))
            self._lock.notify()
            return row_id

    def cancel(self, row_id: int) -> None:
        with self._lock:
            self._cancels.add(row_id)
            self._lock.notify()

    def resume(self, row_id: int) -> None:
        with self._lock:
            self._resumes.add(row_id)
            self._lock.notify()

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def _live(self) -> None:
        while True:
            with self._lock:
                while not (
                    self._stopping
                    or self._resumes
                    or self._cancels
                    or self._rows.keys() - self._held
                ):
                    self._lock.wait()
                if self._stopping:
                    return
                resumes, self._resumes = self._resumes, set()
                cancels, self._cancels = self._cancels, set()
                rows = list(self._rows.items())
            self._held -= resumes
            for row_id, (sink, numbers) in rows:
                if row_id in cancels:
                    self._end(row_id, sink, Finish.CANCELLED)
                elif row_id not in self._held or self._rng.random() < 0.05:
                    self._put(row_id, sink, numbers)

    def _put(self, row_id: int, sink: Sink, numbers: Iterator[int]) -> None:
        size = 1 if row_id in self._held else self._rng.choice((1, 1, 1, 2, 5, 60))
        ids = tuple(itertools.islice(numbers, size))
        if not ids:
            self._end(row_id, sink, Finish.LENGTH)
        elif sink(Event(ids)):
            self._held.add(row_id)
            self.holds += 1
        else:
            self._held.discard(row_id)

    def _end(self, row_id: int, sink: Sink, finish: Finish) -> None:
        with self._lock:
            del self._rows[row_id]
        self._held.discard(row_id)
        sink(Event(done=done(finish)))


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads change places a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(4))
def test_no_event_is_lost_or_out_of_order(hasty_threads: None, seed: int) -> None:
    """Many readers, fast and slow, and one engine that never waits for them."""
    engine = Racer(1500, seed)
    rng = random.Random(seed)

    async def read(sessions: Sessions, pause: float, leaves_at: int | None) -> list[int]:
        session = sessions.open(SPEC)
        ids: list[int] = []
        while True:
            event = await session.take()
            ids += event.ids
            if event.done is not None:
                assert (await session.settled()).done is event.done
                return ids
            if leaves_at is not None and len(ids) >= leaves_at:
                session.close()
                outcome = await session.settled()
                assert outcome.done or outcome.reason is Reason.CONSUMER_CLOSED
                return ids
            if rng.random() < pause:
                await asyncio.sleep(0)

    async def go() -> list[tuple[int | None, list[int]]]:
        sessions = all_of(engine)
        leaving = [rng.randrange(1500) if n % 4 == 0 else None for n in range(16)]
        reads = [read(sessions, rng.choice((0.0, 0.1, 1.0)), leaves_at) for leaves_at in leaving]
        found = await asyncio.wait_for(asyncio.gather(*reads), 4 * PATIENCE_S)
        assert len(sessions) == 0
        return list(zip(leaving, found, strict=True))

    try:
        for leaves_at, ids in asyncio.run(go()):
            assert ids == list(range(len(ids)))
            assert len(ids) == 1500 if leaves_at is None else len(ids) >= leaves_at
    finally:
        engine.stop()
    assert engine.holds > 0, "the limit was never reached"


def test_a_reader_that_takes_nothing_stops_the_row(hasty_threads: None) -> None:
    """What waits for it is bounded, and the whole of it comes once it reads."""
    engine = Racer(5000, 1)

    async def go() -> list[int]:
        session = all_of(engine).open(SPEC)
        while not engine.holds:
            await asyncio.sleep(0)
        ids = list((await session.take()).ids)
        assert session._unread < QUEUED_TOKENS + 64
        while len(ids) < 5000:
            ids += (await session.take()).ids
        return ids

    try:
        assert asyncio.run(go()) == list(range(5000))
    finally:
        engine.stop()
