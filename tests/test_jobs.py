"""Jobs: slices in turn, failures that stay where they are, an answer for every waiter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from mlxlite.engine.jobs import Jobs, Work
from mlxlite.errors import BadRequest, Busy, EngineDown, EngineFault

BUDGET_S = 0.25


def work(
    log: list[str], name: str, slices: int, end: Exception | None = None
) -> Callable[[], Work]:
    """A job that notes each slice and what it was told."""

    def run() -> Work:
        try:
            for n in range(slices):
                budget_s = yield
                log.append(f"{name}{n}:{budget_s}")
            if end is not None:
                raise end
            return name
        finally:
            log.append(f"{name} over")

    return run


def steps(jobs: Jobs, count: int) -> None:
    for _ in range(count):
        jobs.step(BUDGET_S)


def test_jobs_take_turns_and_give_their_results() -> None:
    jobs, log = Jobs(4), list[str]()
    big, small = jobs.add(work(log, "a", 3)), jobs.add(work(log, "b", 1))
    steps(jobs, 1)
    assert log == ["a0:0.25"], "one slice a step"
    steps(jobs, 1)
    assert small.result(0) == "b" and not big.done(), "the small one does not wait for the big one"
    steps(jobs, 2)
    assert big.result(0) == "a"
    assert log == ["a0:0.25", "b0:0.25", "b over", "a1:0.25", "a2:0.25", "a over"]
    assert jobs.stats() == {"open": 0, "done": 2, "failed": 0, "cancelled": 0}
    steps(jobs, 1)  # nothing to do is no fault


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        pytest.param(RuntimeError("no memory"), EngineFault, id="fault"),
        pytest.param(BadRequest("not this model"), BadRequest, id="refusal"),
    ],
)
@pytest.mark.parametrize("slices", [0, 2])
def test_a_failing_job_fails_alone(error: Exception, kind: type[Exception], slices: int) -> None:
    jobs, log = Jobs(4), list[str]()
    bad, good = jobs.add(work(log, "a", slices, error)), jobs.add(work(log, "b", 2))
    steps(jobs, 6)
    with pytest.raises(kind, match=str(error)):
        bad.result(0)
    assert good.result(0) == "b"
    assert (jobs.failed, jobs.done, jobs.count) == (1, 1, 0)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_cancelled_job_does_no_more_slices(after: int) -> None:
    jobs, log = Jobs(4), list[str]()
    given_up = jobs.add(work(log, "a", 9))
    steps(jobs, after)
    assert given_up.cancel()
    other = jobs.add(work(log, "b", 1))
    steps(jobs, 1)
    assert other.result(0) == "b", "a job that is given up costs the others no turn"
    begun = ["a0:0.25", "a1:0.25"][:after]
    assert log == [*begun, *(["a over"] if begun else []), "b0:0.25", "b over"]
    assert (jobs.cancelled, jobs.count) == (1, 0)


def test_one_that_is_cancelled_in_its_last_slice_is_not_answered() -> None:
    jobs = Jobs(1)
    waiting: list[Future[str]] = []

    def run() -> Work:
        yield
        assert waiting[0].cancel()
        return "late"

    waiting.append(jobs.add(run))
    steps(jobs, 1)
    assert waiting[0].cancelled() and jobs.count == 0


def test_one_whose_slice_ends_the_loop_is_answered_too() -> None:
    jobs = Jobs(2)

    def run() -> Work:
        yield
        raise KeyboardInterrupt

    waiting = jobs.add(run)
    with pytest.raises(KeyboardInterrupt):
        jobs.step(BUDGET_S)
    jobs.end_all(EngineDown("the engine failed"))
    with pytest.raises(EngineDown):
        waiting.result(0)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_slice_that_hangs_is_given_up(goes_on: bool) -> None:
    """The watchdog answers from its own thread; what the slice makes of it later is nothing."""
    jobs, log = Jobs(4), list[str]()

    def run() -> Work:
        yield
        watchdog = threading.Thread(target=jobs.end_all, args=(EngineFault("no progress"),))
        watchdog.start()
        watchdog.join()
        fresh.append(jobs.add(work(log, "fresh", 1)))
        if goes_on:
            yield
        return "late"

    fresh: list[Future[str]] = []
    waiting = [jobs.add(run), jobs.add(work(log, "a", 1))]
    steps(jobs, 1)
    for future in waiting:
        with pytest.raises(EngineFault, match="no progress"):
            future.result(0)
    steps(jobs, 2)
    assert fresh[0].result(0) == "fresh" and jobs.count == 0


def test_more_than_fit_are_refused() -> None:
    jobs, log = Jobs(1), list[str]()
    first = jobs.add(work(log, "a", 1))
    with pytest.raises(Busy):
        jobs.add(work(log, "b", 1))
    steps(jobs, 1)
    assert first.result(0) == "a"
    jobs.add(work(log, "c", 1))


def test_the_end_answers_everybody() -> None:
    jobs, log = Jobs(4), list[str]()
    waiting = [jobs.add(work(log, name, 5)) for name in "abc"]
    waiting[2].cancel()
    steps(jobs, 1)
    jobs.end_all(EngineDown("stopping"))
    for future in waiting[:2]:
        with pytest.raises(EngineDown):
            future.result(0)
    assert log == ["a0:0.25", "a over"] and jobs.count == 0
