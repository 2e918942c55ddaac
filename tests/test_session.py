"""Sessions (spec 70 section 13): states, who ends a run and why, what is released.

The engine is played by hand (`Hand`), so each event stands at an exact place.
"""

import asyncio
from collections.abc import Callable

import pytest

from mlxlite.errors import Busy, Cancelled, EngineDown, EngineFault, MlxliteError
from mlxlite.session import Outcome, Reason, Session, State
from mlxlite.types import Finish
from tests.sessions import (
    SPEC,
    Hand,
    Release,
    all_of,
    made,
    opened,
    outcome_of,
    run,
    state_of,
    turn,
)

# ------------------------------------------------------------------------------------- states


def test_the_states_of_a_run_that_ends() -> None:
    async def go() -> None:
        engine = Hand()
        session = made(engine)
        assert state_of(session) is State.CREATED and session.outcome is None
        session.start()
        assert state_of(session) is State.RUNNING
        engine.put(7)
        await turn()
        assert state_of(session) is State.RUNNING and session.outcome is None
        what = engine.end(ids=(8,))
        await turn()
        assert state_of(session) is State.TERMINAL and outcome_of(session) == Outcome(done=what)
        assert [(await session.take()).ids for _ in range(2)] == [(7,), (8,)]
        with pytest.raises(EngineFault):
            await session.take()

    run(go())


def test_the_states_of_a_run_that_is_cancelled() -> None:
    """Settling lasts until the engine has let go of the row, and so does `settled`."""

    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        session.cancel()
        assert state_of(session) is State.SETTLING and engine.cancelled == [1]
        waits = [asyncio.ensure_future(session.settled()) for _ in range(2)]
        engine.put(7)  # it was under way
        await turn()
        assert state_of(session) is State.SETTLING and session.outcome is None
        waits[0].cancel()  # one who waits no longer takes nothing from the other
        await turn()
        assert not waits[1].done()
        engine.end(Finish.CANCELLED, Cancelled("of the engine"))
        assert await waits[1] == outcome_of(session) == Outcome(reason=Reason.REQUESTED)
        assert state_of(session) is State.TERMINAL

    run(go())


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.name.lower())
@pytest.mark.parametrize("is_started", [False, True], ids=["unstarted", "started"])
def test_the_first_reason_stands(reason: Reason, is_started: bool) -> None:
    async def go() -> None:
        engine = Hand()
        session = made(engine)
        if is_started:
            session.start()
        session.cancel(reason)
        for other in Reason:
            session.cancel(other)
        session.close()
        if is_started:
            assert engine.cancelled == [1], "the engine is told once"
            engine.end(Finish.CANCELLED, Cancelled("of the engine"))
        else:
            assert session.state is State.TERMINAL and engine.cancelled == []
        outcome = await session.settled()
        assert outcome == Outcome(reason=reason)
        kind = EngineDown if reason is Reason.ENGINE_CLOSED else Cancelled
        for raises in (outcome.raise_if_not_completed, session.start):
            with pytest.raises(kind, match=f"^{reason.value}$"):
                raises()
        assert len(engine.sinks) == is_started, "a cancelled session never starts"

    run(go())


@pytest.mark.parametrize("finish", [Finish.EOS, Finish.GUIDE, Finish.LENGTH])
@pytest.mark.parametrize("when", ["never", "before the end", "after the end"])
def test_finishes_pass(finish: Finish, when: str) -> None:
    """A run that reaches its end is completed, also if a cancel came too late for it."""

    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        if when == "before the end":
            session.cancel()
        what = engine.end(finish, ids=(9,))
        await turn()
        if when == "after the end":
            session.cancel()
            assert engine.cancelled == [] and session.state is State.TERMINAL
        outcome = await session.settled()
        assert outcome == Outcome(done=what) and outcome.done is what
        outcome.raise_if_not_completed()
        assert (await session.take()).done is what

    run(go())


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["alone", "cancelled before"])
@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (Finish.ERROR, EngineFault("it broke")),
        (Finish.ERROR, EngineDown("the engine failed")),
        (Finish.CANCELLED, EngineDown("the server is stopping")),
        (Finish.CANCELLED, Cancelled("the client left")),
    ],
    ids=["fault", "down", "stopping", "left"],
)
def test_errors_of_the_engine_are_the_very_objects(
    finish: Finish, error: MlxliteError, is_cancelled: bool
) -> None:
    """Only of a run that was cancelled, and ended so, the session's reason counts."""

    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        if is_cancelled:
            session.cancel()
        engine.end(finish, error)
        outcome = await session.settled()
        if is_cancelled and finish is Finish.CANCELLED:
            assert outcome == Outcome(reason=Reason.REQUESTED)
            return
        assert outcome == Outcome(error=error) and outcome.error is error
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                outcome.raise_if_not_completed()
            assert caught.value is error

    run(go())


def test_an_error_without_a_reason_is_still_one() -> None:
    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        engine.end(Finish.ERROR)
        assert isinstance((await session.settled()).error, EngineFault)

    run(go())


def test_a_session_starts_once() -> None:
    async def go() -> None:
        engine = Hand()
        session = opened(engine)
        with pytest.raises(EngineFault):
            session.start()
        assert session.state is State.RUNNING
        engine.end()
        await session.settled()
        with pytest.raises(EngineFault):
            session.start()
        assert len(engine.sinks) == 1

    run(go())


# ------------------------------------------------------------------------------------ release


def refused(error: BaseException, release: Release) -> tuple[BaseException, Outcome]:
    async def go() -> tuple[BaseException, Outcome]:
        session = made(Hand(error), release)
        with pytest.raises(type(error)) as caught:
            session.start()
        assert caught.value is error and session.state is State.TERMINAL
        session.cancel()
        session.close()
        return caught.value, await session.settled()

    return run(go())


def cancelled_before(release: Release) -> tuple[BaseException, Outcome]:
    async def go() -> tuple[BaseException, Outcome]:
        session = made(Hand(), release)
        session.cancel()
        with pytest.raises(Cancelled) as caught:
            session.start()
        session.close()
        return caught.value, await session.settled()

    return run(go())


def sessions_closed(release: Release) -> tuple[BaseException, Outcome]:
    async def go() -> tuple[BaseException, Outcome]:
        sessions = all_of(Hand())
        await sessions.close()
        with pytest.raises(EngineDown, match="^the inference engine is closed") as caught:
            sessions.open(SPEC, release)
        assert len(sessions) == 0
        return caught.value, Outcome(reason=Reason.ENGINE_CLOSED, cleanup_error=release.failure)

    return run(go())


UNSTARTED: dict[str, Callable[[Release], tuple[BaseException, Outcome]]] = {
    "cancelled": cancelled_before,
    "busy": lambda release: refused(Busy("admission queue is full"), release),
    "down": lambda release: refused(EngineDown("the engine is not running"), release),
    "bug": lambda release: refused(ZeroDivisionError("a bug"), release),
    "sessions closed": sessions_closed,
}


@pytest.mark.parametrize("how", UNSTARTED)
def test_what_never_started_is_released_once(how: str) -> None:
    release = Release()
    error, outcome = UNSTARTED[how](release)
    assert release.count == 1
    assert outcome.cleanup_error is None and not hasattr(error, "__notes__")


@pytest.mark.parametrize("how", UNSTARTED)
def test_a_release_that_fails_does_not_hide_why(how: str, caplog: pytest.LogCaptureFixture) -> None:
    release = Release(ValueError("still in use"))
    error, outcome = UNSTARTED[how](release)
    assert release.count == 1
    assert outcome.cleanup_error is release.failure
    (note,) = error.__notes__
    assert "still in use" in note
    assert "not released" in caplog.text


def ended(session: Session, engine: Hand) -> None:
    engine.end()


def failed(session: Session, engine: Hand) -> None:
    engine.end(Finish.ERROR, EngineFault("it broke"))


def cancelled(session: Session, engine: Hand) -> None:
    session.cancel()
    engine.end(Finish.CANCELLED)


def closed(session: Session, engine: Hand) -> None:
    session.close()
    engine.end(Finish.CANCELLED)


@pytest.mark.parametrize("end", [ended, failed, cancelled, closed])
def test_what_started_is_the_engines(end: Callable[[Session, Hand], None]) -> None:
    async def go() -> None:
        engine, release = Hand(), Release()
        session = opened(engine, release)
        end(session, engine)
        await session.settled()
        session.cancel()
        session.close()
        assert release.count == 0

    run(go())
