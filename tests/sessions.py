"""Sessions for tests: an engine that is played by hand, and a clock that is."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from mlxlite.errors import MlxliteError
from mlxlite.session import Outcome, Session, Sessions, State
from mlxlite.types import Done, Event, Finish, RowSpec, Sampling, Sink

T = TypeVar("T")
SPEC = RowSpec((5,), Sampling(), 1000, frozenset())


def done(finish: Finish = Finish.EOS, error: MlxliteError | None = None) -> Done:
    return Done(finish, 1, 0, 0, 0.0, 0.0, 0.0, error)


class Hand:
    """An engine that does what the test says. refusal: what `submit` raises."""

    def __init__(self, refusal: BaseException | None = None) -> None:
        self.refusal = refusal
        self.sinks: list[Sink] = []
        self.cancelled: list[int] = []
        self.resumed: list[int] = []

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.sinks.append(sink)
        return len(self.sinks)

    def cancel(self, row_id: int) -> None:
        self.cancelled.append(row_id)

    def resume(self, row_id: int) -> None:
        self.resumed.append(row_id)

    def put(self, *ids: int, row_id: int = 1) -> bool | None:
        return self.sinks[row_id - 1](Event(ids))

    def end(
        self,
        finish: Finish = Finish.EOS,
        error: MlxliteError | None = None,
        ids: tuple[int, ...] = (),
        row_id: int = 1,
    ) -> Done:
        what = done(finish, error)
        self.sinks[row_id - 1](Event(ids, what))
        return what


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time can be put forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(work)


async def turn() -> None:
    """Let everything that is due on the loop run."""
    for _ in range(4):
        await asyncio.sleep(0)


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    loop.skipped_s += seconds
    await turn()


class Release:
    """What a session is to release; counts. failure: what it raises."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.count = 0
        self.failure = failure

    def __call__(self) -> None:
        self.count += 1
        if self.failure is not None:
            raise self.failure


def made(engine: Any, release: Release | None = None) -> Session:
    return Session(engine, SPEC, release)


def opened(engine: Any, release: Release | None = None) -> Session:
    session = made(engine, release)
    session.start()
    return session


def all_of(engine: Any) -> Sessions:
    return Sessions(engine)


def outcome_of(session: Session) -> Outcome:
    assert session.outcome is not None
    return session.outcome


def state_of(session: Session) -> State:
    return session.state  # by a call, or mypy takes it for unchanged
