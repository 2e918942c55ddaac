"""Rows that are held because their reader is behind: they cost nothing, and lose nothing.

On the real engine. A held row's ids must be those of the same row that nobody held. Where it is
held is decided by its sink, so nothing depends on time.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

from mlxlite.engine.scheduler import ChunkSizer
from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.errors import Cancelled, EngineDown
from mlxlite.types import Event, Finish, RowSpec, Sampling, Verdict
from tests.rows import PATIENCE_S, PROMPT, Heard, Scripted, ask

OTHER = (8, 9)
TOKENS = 12
LONG = 600


class Held(Heard):
    """A sink that asks for a hold at the events of these numbers, the first is 1.

    Like a session it says so again for the token that was in flight, unless `is_firm` is false.
    """

    def __init__(self, at: Collection[int], is_firm: bool = True) -> None:
        super().__init__()
        self._at = at
        self._is_firm = is_firm
        self._is_held = False
        self._holds = threading.Semaphore(0)

    def __call__(self, event: Event) -> bool:  # type: ignore[override]  # Heard never holds
        super().__call__(event)
        if event.done is None and len(self.events) in self._at:
            self._is_held = self._is_firm
            self._holds.release()
            return True
        return self._is_held

    def wait(self) -> None:
        """Until the next hold."""
        assert self._holds.acquire(timeout=PATIENCE_S), "the row was never held"

    def go_on(self, engine: Worker) -> None:
        self._is_held = False
        engine.resume(self.row_id)


def begin(
    engine: Worker,
    at: Collection[int],
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = TOKENS,
    sampling: Sampling | None = None,
    is_firm: bool = True,
    **more: Any,
) -> Held:
    heard = Held(at, is_firm)
    spec = RowSpec(tuple(prompt), sampling or Sampling(), max_tokens, frozenset(), **more)
    heard.row_id = engine.submit(spec, heard)
    return heard


def unheld(engine: Worker, **how: Any) -> Held:
    heard = begin(engine, (), **how)
    assert heard.done
    return heard


@pytest.fixture
def narrow(engine_options: WorkerOptions) -> Iterator[Worker]:
    """An engine where one row runs at a time."""
    worker = Worker(dataclasses.replace(engine_options, max_rows=1))
    worker.start()
    worker.wait_ready(PATIENCE_S)
    yield worker
    worker.stop()


# ------------------------------------------------------------------------------------ the same ids


def wave() -> Scripted:
    """A guide that steers: it forces an id at every fourth token."""
    return Scripted(
        lambda so_far, ids: Verdict(len(ids), forced=(77,)) if len(so_far) % 4 == 3 else None
    )


HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "seeded": lambda: {"sampling": Sampling(1.0, 0.9, 20, seed=5)},
    "plain draw": lambda: {"sampling": Sampling(1.0, seed=9)},
    "penalties": lambda: {
        "sampling": Sampling(0.8, seed=3, repetition_penalty=1.3, frequency_penalty=0.5)
    },
    "logprobs": lambda: {"top_logprobs": 3},
    "steered": lambda: {"guide": wave()},
}
HOLDS = {"in a row": (4, 5, 6), "last": (TOKENS - 1,), "all": range(1, TOKENS)}


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside others"])
@pytest.mark.parametrize("holds", HOLDS)
@pytest.mark.parametrize("how", HOW)
def test_a_row_that_was_held_says_the_same(
    engine: Worker, how: str, holds: str, is_alone: bool
) -> None:
    plain = unheld(engine, **HOW[how]())
    other = ask(engine, OTHER).ids
    row = begin(engine, HOLDS[holds], **HOW[how]())
    for _ in HOLDS[holds]:
        row.wait()
        if not is_alone:
            assert ask(engine, OTHER).ids == other, "neighbours do not notice"
        row.go_on(engine)
    assert (row.finish, row.ids) == (Finish.LENGTH, plain.ids)
    tops = [
        [(entry.id, len(entry.top)) for e in r.events for entry in e.logprobs] for r in (row, plain)
    ]
    assert tops[0] == tops[1]


def test_two_held_rows_keep_apart(engine: Worker) -> None:
    prompts = [PROMPT, OTHER]
    plain = [unheld(engine, prompt=prompt).ids for prompt in prompts]
    rows = [begin(engine, (3, 7), prompt) for prompt in prompts]
    for _ in range(2):
        for row in rows:
            row.wait()
        for row in reversed(rows):
            row.go_on(engine)
    assert [row.finish for row in rows] == [Finish.LENGTH] * 2
    assert [row.ids for row in rows] == plain


def test_going_on_may_be_asked_for_before_the_hold_counts(engine: Worker) -> None:
    """The reader is on another thread: it may have read all before the sink has returned."""

    class Hasty(Held):
        def __call__(self, event: Event) -> bool:  # type: ignore[override]
            is_held = super().__call__(event)
            if is_held:
                self.go_on(engine)
            return is_held

    heard = Hasty(range(2, TOKENS))  # the first event may come before `submit` has returned
    spec = RowSpec(PROMPT, Sampling(), TOKENS, frozenset())
    heard.row_id = engine.submit(spec, heard)
    assert heard.finish is Finish.LENGTH and len(heard.ids) == TOKENS


def test_resuming_what_is_not_held_is_nothing(engine: Worker) -> None:
    heard = unheld(engine)
    for row_id in (heard.row_id, 0, -1, 10**9):
        engine.resume(row_id)
    row = begin(engine, (6,))
    engine.resume(row.row_id)
    row.wait()
    row.go_on(engine)
    engine.resume(row.row_id)
    assert row.finish is Finish.LENGTH and row.ids == heard.ids


def test_only_a_resume_ends_a_hold(engine: Worker) -> None:
    """The token that was in flight comes too, whatever its sink says; no other."""
    row = begin(engine, (3,), is_firm=False)
    row.wait()
    for _ in range(3):
        ask(engine, OTHER)
    seen = len(row.ids)
    row.go_on(engine)
    assert row.finish is Finish.LENGTH
    assert seen in (3, 4)


# ------------------------------------------------------------------------------------ what it costs


class Watch:
    """Counts the plans of an engine that should have nothing to do."""

    def __init__(self, engine: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._plans = 0
        self._plan = engine._loop.scheduler.plan
        monkeypatch.setattr(engine._loop.scheduler, "plan", self._counted)

    def _counted(self) -> Any:
        self._plans += 1
        return self._plan()

    def work(self) -> tuple[int, int]:
        return self._engine.stats()["decode_steps"], self._plans

    def is_at_rest(self) -> bool:
        """Whether, a few steps from now at most, it makes no step, no plan and takes no processor
        time."""
        window = threading.Event()
        for _ in range(20):
            before, cpu_s = self.work(), cpu_seconds(self._engine)
            window.wait(0.05)  # a window to measure in; nothing is waited for
            if self.work() == before:
                return cpu_seconds(self._engine) - cpu_s < 0.01
        return False


def test_an_engine_whose_rows_are_all_held_rests(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(engine, monkeypatch)
    rows = [begin(engine, (3,)), begin(engine, (5,), OTHER)]
    for row in rows:
        row.wait()
    is_at_rest = watch.is_at_rest()
    assert engine.stats()["active_rows"] == 2
    for row in rows:
        row.go_on(engine)
    assert [row.finish for row in rows] == [Finish.LENGTH] * 2
    assert is_at_rest


def test_waiting_for_the_memory_of_a_held_row_is_rest_too(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until the held row goes on or ends, and takes no processor time for it."""
    scheduler = engine._loop.scheduler
    monkeypatch.setattr(scheduler, "has_room", lambda row, running: not list(running))
    watch = Watch(engine, monkeypatch)
    row = begin(engine, (3,))
    row.wait()
    waiting = begin(engine, (), OTHER)
    is_at_rest = watch.is_at_rest()
    assert waiting.events == []
    row.go_on(engine)
    assert row.finish is waiting.finish is Finish.LENGTH
    assert is_at_rest


def cpu_seconds(engine: Worker) -> float:
    """Processor time of the engine thread; 0 where the system does not tell (macOS)."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    assert engine._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(engine._thread.ident))


def test_a_held_row_takes_no_place(narrow: Worker) -> None:
    """Where one row runs at a time, others run while it is held, and it goes on beside them."""
    plain = unheld(narrow).ids
    others = [ask(narrow, (8, n)).ids for n in range(3, 8)]
    row = begin(narrow, (2, 8))
    row.wait()
    assert [ask(narrow, (8, n)).ids for n in range(3, 8)] == others
    second = begin(narrow, (2,), OTHER)
    second.wait()
    assert ask(narrow, (8, 3)).ids == others[0]
    for held in (row, second):
        held.go_on(narrow)
    row.wait()
    assert ask(narrow, (8, 4)).ids == others[1]
    row.go_on(narrow)
    assert row.finish is second.finish is Finish.LENGTH
    assert row.ids == plain and second.ids == unheld(narrow, prompt=OTHER).ids


# ------------------------------------------------------------------------------------ how it ends


def test_cancel_while_held(engine: Worker) -> None:
    row, neighbour = begin(engine, (3,)), begin(engine, (4,), OTHER)
    row.wait()
    neighbour.wait()
    engine.cancel(row.row_id)
    assert row.finish is Finish.CANCELLED and isinstance(row.error, Cancelled)
    assert len(row.ids) in (3, 4)
    row.go_on(engine)
    neighbour.go_on(engine)
    assert neighbour.finish is Finish.LENGTH
    assert neighbour.ids == unheld(engine, prompt=OTHER).ids


def test_stop_while_held(engine_options: WorkerOptions) -> None:
    worker = Worker(engine_options)
    worker.start()
    rows = [begin(worker, (1,)), begin(worker, (3,), OTHER)]
    for row in rows:
        row.wait()
    worker.stop()
    assert [row.finish for row in rows] == [Finish.CANCELLED] * 2
    assert all(isinstance(row.error, EngineDown) for row in rows)


@pytest.mark.parametrize("prompt", [(8,), (8, 9)], ids=["of decoding", "beside a prefill"])
def test_a_step_that_fails_does_not_spoil_a_held_row(
    engine: Worker, monkeypatch: pytest.MonkeyPatch, prompt: Sequence[int]
) -> None:
    """Its token was in flight and is lost with the step: it ends as well, or it loses nothing."""
    plain = unheld(engine).ids
    batch: Any = engine._loop.batch
    row = begin(engine, (3,))
    row.wait()
    step, is_failed = batch.step, threading.Event()

    def fails_once(*args: Any) -> None:
        if not is_failed.is_set():
            is_failed.set()
            raise RuntimeError("out of memory")
        step(*args)

    monkeypatch.setattr(batch, "step", fails_once)
    assert ask(engine, prompt).done and is_failed.is_set()
    row.go_on(engine)
    assert row.finish is Finish.ERROR or row.ids == plain


# ----------------------------------------------------------------------------------- in the prompt


def test_held_while_its_prompt_is_scored(engine: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk more, others are served, and the log-probabilities are the same."""
    monkeypatch.setattr(engine._loop.scheduler, "sizer", ChunkSizer(4, 4))
    prompt = range(3, 33)
    how: dict[str, Any] = {"prompt": prompt, "prompt_logprobs": True, "top_logprobs": 1}
    plain = unheld(engine, **how)
    row = begin(engine, (1, 3, 7, 9), **how)
    for seen in (1, 3, 7, 9):
        row.wait()
        assert ask(engine, OTHER).finish is Finish.LENGTH
        assert seen <= len(row.events) <= seen + 1
        row.go_on(engine)
    assert row.finish is Finish.LENGTH and row.ids == plain.ids
    scored = [[e.id for event in r.events for e in event.logprobs] for r in (row, plain)]
    assert scored[0] == scored[1] == [*prompt][1:] + plain.ids


def test_cancel_while_held_in_the_prompt(engine: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._loop.scheduler, "sizer", ChunkSizer(4, 4))
    row = begin(engine, (2,), range(3, 33), prompt_logprobs=True, top_logprobs=0)
    row.wait()
    engine.cancel(row.row_id)
    assert row.finish is Finish.CANCELLED and len(row.events) == 3
