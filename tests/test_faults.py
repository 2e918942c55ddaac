"""Faults stay where they are (decision D19): what breaks, who is told, who goes on.

Exceptions are injected into every place that a row's life goes through, and a hang into a step;
each time everybody gets an answer, neighbours are not hurt, nothing is left over.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxlite.engine import batch as batch_module
from mlxlite.engine import reuse as reuse_module
from mlxlite.engine import worker as worker_module
from mlxlite.engine.scheduler import ChunkSizer
from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.errors import EngineDown, EngineFault
from mlxlite.types import EmbedSpec, EngineState, Finish, Sampling
from tests.live import Brake
from tests.rows import PATIENCE_S, Gate, ask, start

pytestmark = pytest.mark.slow

PENALISED = Sampling(repetition_penalty=1.3)
LONG = tuple(range(3, 90))


@pytest.fixture
def worker(engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker of the test's own that verifies itself, keeps prefixes and gives up quickly."""
    monkeypatch.setenv("MLXLITE_CHECK", "1")
    options = dataclasses.replace(engine_options, prompt_cache_bytes=1 << 24)
    made = Worker(options, hang_s=1.0)
    made.start()
    made.wait_ready(PATIENCE_S)
    yield made
    made.stop()


def fail(*args: Any, **named: Any) -> Any:
    raise MemoryError("no memory left")


def is_clean(worker: Worker) -> bool:
    stats = worker.stats()
    return (stats["active_rows"], stats["pending_rows"]) == (0, 0)


# --------------------------------------------------------------------------- one row, one step


def test_a_fault_in_a_rows_penalties_ends_that_row(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = batch_module.penalties_of

    def penalties_of(sampling: Sampling, *rest: Any) -> Any:
        return fail() if sampling == PENALISED else real(sampling, *rest)

    monkeypatch.setattr(batch_module, "penalties_of", penalties_of)
    gate = Gate(worker)
    row = start(worker, sampling=PENALISED)
    gate.open()
    assert isinstance(row.error, EngineFault)
    assert gate.heard.finish is Finish.LENGTH
    monkeypatch.undo()
    assert ask(worker, sampling=PENALISED).finish is Finish.LENGTH and is_clean(worker)


@pytest.mark.parametrize("place", ["draw", "forward", "arrange"])
def test_a_fault_in_the_step_ends_its_rows_and_nothing_else(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    expected = ask(worker, (8, 9), 8).ids
    gate = Gate(worker)
    neighbour = start(worker, (8, 9), 8)
    batch: Any = worker._loop.batch
    with monkeypatch.context() as patch:
        if place == "draw":
            patch.setattr(batch_module.sample, "draw", fail)
        else:
            patch.setattr(batch.lanes, place, fail)
        gate.open()
        for row in (gate.heard, neighbour):
            assert row.finish is Finish.ERROR and isinstance(row.error, EngineFault)
    assert ask(worker, (8, 9), 8).ids == expected
    assert worker.state is EngineState.READY and is_clean(worker)


def test_a_fault_of_the_prompt_cache_costs_the_reuse_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLXLITE_CHECK")
    prompts: Any = worker._loop.prompts
    prompts._checks = False
    monkeypatch.setattr(prompts.tree, "insert", fail)
    first, second = ask(worker, LONG, 5), ask(worker, LONG, 5)
    assert first.ids == second.ids and second.done.cached_tokens == 0
    monkeypatch.undo()
    third, fourth = ask(worker, LONG, 5), ask(worker, LONG, 5)
    assert third.ids == fourth.ids == first.ids and fourth.done.cached_tokens > 0


@pytest.mark.parametrize("is_waiting", [False, True], ids=["at its start", "after waiting"])
def test_a_prefix_that_cannot_be_restored_is_computed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, is_waiting: bool
) -> None:
    monkeypatch.setattr(reuse_module, "restore", fail)
    expected = ask(worker, (*LONG, 7), 5).ids
    worker._loop.prompts.tree.clear()  # type: ignore[union-attr]  # it is loaded
    if is_waiting:
        worker._loop.scheduler.sizer = ChunkSizer(32, 32)
        brake = Brake(worker._loop.batch, "prefill")
        donor = start(worker, (*LONG, 6))
        brake.wait()
        row = start(worker, (*LONG, 7), 5)
        brake.free()
        assert donor.finish is Finish.LENGTH
    else:
        ask(worker, (*LONG, 6))
        row = start(worker, (*LONG, 7), 5)
    assert row.finish is Finish.LENGTH and row.ids == expected
    assert row.done.cached_tokens == 0 and worker.stats()["restarts"] == 0


# ----------------------------------------------------------------------------- begin again


def test_two_failed_steps_in_a_row_begin_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(worker, LONG, 8).ids
    old = worker._loop
    batch: Any = old.batch
    monkeypatch.setattr(batch, "step", fail)
    assert isinstance(ask(worker).error, EngineFault)
    assert worker.stats()["restarts"] == 0
    assert isinstance(ask(worker).error, EngineFault)
    again = ask(worker, LONG, 8)
    assert again.ids == expected and worker._loop is not old
    assert worker.stats()["restarts"] == 1 and is_clean(worker)


def test_a_step_that_works_forgives_the_one_before(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch: Any = worker._loop.batch
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(batch, "step", fail)
            assert isinstance(ask(worker).error, EngineFault)
        assert ask(worker).finish is Finish.LENGTH
    assert worker.stats()["restarts"] == 0


def test_rows_that_wait_for_a_new_life_are_served_by_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(worker, LONG, 8).ids
    gate = Gate(worker)

    def plan() -> Any:
        queued.append(start(worker, LONG, 8))  # comes while the loop is failing
        raise SystemError("a bug of ours")

    queued: list[Any] = []
    monkeypatch.setattr(worker._loop.scheduler, "plan", plan)
    gate.open()
    assert isinstance(gate.heard.error, EngineFault)
    assert queued[0].done and queued[0].ids == expected


def test_an_engine_that_fails_too_often_is_down_and_says_so(
    engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module.Loop, "advance", fail)
    worker = Worker(engine_options)
    worker.start()
    errors = []
    for _ in range(worker_module.MOST_RESTARTS + 1):
        try:
            errors.append(ask(worker).error)
        except EngineDown as error:
            errors.append(error)
    assert all(isinstance(error, EngineFault | EngineDown) for error in errors)
    with pytest.raises(EngineDown):
        start(worker)
    assert worker.state is EngineState.DOWN
    worker.stop()


# -------------------------------------------------------------------------------- a hang


class Hang:
    """A call that does not come back until it is let go."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.reached.set()
        assert self.let_go.wait(PATIENCE_S)
        return self._real(*args, **named)


@pytest.mark.parametrize("place", ["step", "prefill"])
def test_a_hanging_step_is_given_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    expected = ask(worker, LONG, 8).ids
    old = worker._loop
    thread = worker._thread
    batch: Any = old.batch
    hang = Hang(getattr(batch, place))
    monkeypatch.setattr(batch, place, hang)
    stuck = start(worker, tuple(reversed(LONG)), 8)
    assert hang.reached.wait(PATIENCE_S)
    waiting = start(worker, LONG, 8)
    assert isinstance(stuck.error, EngineFault) and "no progress" in str(stuck.error)
    again = ask(worker, LONG, 8)
    assert again.ids == expected
    assert waiting.done.finish in (Finish.ERROR, Finish.LENGTH), "everybody is answered"
    hang.let_go.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the old life ends when it can"
    assert ask(worker, LONG, 8).ids == expected, "and has not touched the new one"
    assert worker.stats()["restarts"] == 1 and is_clean(worker)


def test_a_job_in_a_life_that_ends_is_answered(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(worker)
    spec = EmbedSpec(inputs=((5, 6, 7),), pooling="mean")
    monkeypatch.setattr(worker._loop.scheduler, "plan", fail)
    with monkeypatch.context() as patch:
        patch.setattr(worker._jobs, "step", lambda budget_s: None)  # or it is done in this step
        future = worker.embed(spec)
        gate.open()
        with pytest.raises((EngineFault, EngineDown)):
            future.result(PATIENCE_S)
    assert len(worker.embed(spec).result(PATIENCE_S)) == 1
