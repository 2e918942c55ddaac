"""The engine thread, driven through its border: every row is told its end, whatever happens.

Guides and the faults of single rows have a file of their own, `test_guides.py`.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine import load
from mlxlite.engine.scheduler import ChunkSizer
from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.errors import Busy, Cancelled, EngineDown, EngineFault, ModelError
from mlxlite.types import EngineState, Event, Finish, RowSpec, Sampling
from tests.rows import PATIENCE_S, PROMPT, Gate, Heard, ask, start

# ---------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_a_row_gets_exactly_what_it_asked_for(
    engine: Worker, prompt: Sequence[int], max_tokens: int
) -> None:
    heard = ask(engine, prompt, max_tokens)
    assert len(heard.ids) == max_tokens
    assert heard.ids == ask(engine, prompt, 9).ids[:max_tokens]
    assert heard.finish is Finish.LENGTH and heard.error is None
    assert (heard.done.prompt_tokens, heard.done.generated_tokens) == (len(prompt), max_tokens)
    assert min(heard.done.queued_s, heard.done.prefill_s, heard.done.decode_s) >= 0


def test_tokens_come_one_by_one(engine: Worker) -> None:
    heard = ask(engine, max_tokens=5)
    assert [len(event.ids) for event in heard.events] == [1] * 5
    assert [event.done is not None for event in heard.events] == [False] * 4 + [True]


def test_tokens_are_counted_as_they_come(engine: Worker) -> None:
    """Whoever looks at the counter sees an answer grow, and not all of it at its end."""
    before = engine.stats()["generated_tokens"]
    seen: list[int] = []
    heard = start(
        engine, PROMPT, 5, at_event=lambda _: seen.append(engine.stats()["generated_tokens"])
    )
    assert heard.done
    assert seen == [before + n for n in range(1, 6)]


def test_a_first_token_does_not_wait_for_a_chunk_of_another_prompt(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(engine, PROMPT, 4).ids
    monkeypatch.setattr(engine._loop.scheduler, "sizer", ChunkSizer(4, 4))
    gate = Gate(engine)
    long = start(engine, range(3, 103), 5)
    chunks: list[int] = []
    short = start(
        engine,
        PROMPT,
        4,
        at_event=lambda heard: chunks.append(engine.stats()["prefill_chunks"]),
    )
    gate.open()
    assert short.done and long.done
    before = engine.stats()["prefill_chunks"]
    assert short.ids == expected
    assert before - chunks[0] > 20, "the long prompt has most of its chunks before it"


def test_eos_is_counted_and_not_delivered(engine: Worker) -> None:
    plain = ask(engine, max_tokens=8).ids
    assert len(set(plain[:4])) == 4
    heard = ask(engine, max_tokens=8, eos=plain[3:4])
    assert heard.ids == plain[:3]
    assert (heard.finish, heard.done.generated_tokens) == (Finish.EOS, 4)
    heard = ask(engine, max_tokens=1, eos=plain[:1])
    assert (heard.ids, heard.finish, heard.done.generated_tokens) == ([], Finish.EOS, 1)


def test_more_rows_than_places_all_get_their_own_answer(engine: Worker) -> None:
    how = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, 0.9, seed=2), Sampling(1.0, 0, 5)]
    prompts = [tuple(range(3, 3 + n)) for n in (1, 30, 4, 70)]
    alone = [ask(engine, p, 9, sampling=s).ids for p, s in zip(prompts, how, strict=True)]
    rows = [start(engine, p, 9, sampling=s) for p, s in zip(prompts, how, strict=True)]
    assert [row.done.generated_tokens for row in rows] == [9] * 4
    assert [row.ids for row in rows] == alone


def test_stats_and_facts_are_plain_and_true(engine: Worker) -> None:
    engine.take_step_times()
    before = engine.stats()
    ask(engine, max_tokens=5)
    after = engine.stats()
    assert after["generated_tokens"] - before["generated_tokens"] == 5
    assert after["completed_rows"] - before["completed_rows"] == 1
    assert after["prefill_chunks"] - before["prefill_chunks"] == 1
    assert after["decode_step_ms"] > 0
    assert len(engine.take_step_times()) >= 4 and engine.take_step_times() == []
    facts = engine.facts
    assert (facts.model_type, facts.dtype, facts.max_context) == ("llama", "float32", 1024)
    assert facts.vocab_size == 512 and facts.weight_bytes > 4 * 2 * 512 * 64


# ----------------------------------------------------------------------------------- cancel


def test_cancel_while_decoding(engine: Worker) -> None:
    neighbour = start(engine, (8, 9), 12)

    def at_third(heard: Heard) -> None:
        if len(heard.ids) == 3:
            engine.cancel(heard.row_id)

    heard = ask(engine, max_tokens=500, at_event=at_third)
    assert heard.finish is Finish.CANCELLED and isinstance(heard.error, Cancelled)
    assert len(heard.ids) == 3, "it ends within one step"
    assert neighbour.done and neighbour.ids == ask(engine, (8, 9), 12).ids


def test_cancel_between_two_chunks_of_a_prompt(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(engine)
    batch: Any = engine._loop.batch
    chunks: list[int] = []
    real = batch.prefill

    def prefill(row: Any, tokens: int) -> None:
        real(row, tokens)
        chunks.append(tokens)
        if len(chunks) == 2:
            engine.cancel(row.id)

    monkeypatch.setattr(engine._loop.scheduler, "sizer", ChunkSizer(4, 4))
    monkeypatch.setattr(batch, "prefill", prefill)
    long = start(engine, range(3, 103), 5)
    gate.open()
    assert long.finish is Finish.CANCELLED and long.ids == []
    assert chunks == [4, 4]


def test_cancel_while_queued(engine: Worker) -> None:
    gate = Gate(engine)
    running, queued = start(engine, max_tokens=9), start(engine)
    engine.cancel(queued.row_id)
    gate.open()
    assert queued.finish is Finish.CANCELLED and queued.ids == []
    assert queued.done.prefill_s == 0
    assert running.finish is Finish.LENGTH


def test_cancelling_what_is_not_there_is_nothing(engine: Worker) -> None:
    heard = ask(engine)
    for row_id in (heard.row_id, 0, -1, 10**9):
        engine.cancel(row_id)
    assert ask(engine).ids == heard.ids


# -------------------------------------------------------------------------- queue and memory


def test_a_full_queue_is_busy_and_recovers(engine: Worker) -> None:
    gate = Gate(engine)
    rows = [start(engine, max_tokens=2) for _ in range(3)]
    rejected = engine.stats()["rejected_rows"]
    with pytest.raises(Busy) as caught:
        start(engine)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    stats = engine.stats()
    assert stats["active_rows"] == 1 and stats["pending_rows"] == 3
    gate.open()
    assert all(row.finish is Finish.LENGTH for row in rows)
    assert ask(engine).finish is Finish.LENGTH
    assert engine.stats()["rejected_rows"] == rejected + 1


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_idle_engine_keeps_nothing_of_the_rows_it_served(
    engine: Worker, is_cancelled: bool
) -> None:
    heard = Heard((lambda heard: engine.cancel(heard.row_id)) if is_cancelled else None)
    caches: list[weakref.ref[Any]] = []

    def sink(event: Event, heard: Heard = heard) -> None:
        batch: Any = engine._loop.batch
        caches.extend(weakref.ref(part) for row in batch._inflight.rows for part in row.cache or ())
        heard(event)

    is_released = threading.Event()
    weakref.finalize(sink, is_released.set)
    heard.row_id = engine.submit(RowSpec(PROMPT, Sampling(), 4, frozenset()), sink)
    del sink
    assert heard.done
    assert is_released.wait(PATIENCE_S)
    assert caches and not any(ref() for ref in caches)


# --------------------------------------------------------------------------- start and stop


def started(options: WorkerOptions) -> Worker:
    worker = Worker(options)
    worker.start()
    worker.wait_ready(PATIENCE_S)
    return worker


class HeldLoad:
    """Holds the loading of a model until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real, self.reached, self.open = load.load, threading.Event(), threading.Event()
        monkeypatch.setattr(load, "load", self._load)

    def _load(self, *args: Any) -> load.LoadedModel:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)
        return self._real(*args)


def test_rows_may_come_before_the_model_is_there(
    engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldLoad(monkeypatch)
    worker = Worker(engine_options)
    early = start(worker, max_tokens=3)
    worker.start()
    given_up = start(worker)
    worker.cancel(given_up.row_id)
    assert held.reached.wait(PATIENCE_S)
    assert worker.state is EngineState.LOADING and worker.stats()["pending_rows"] == 2
    with pytest.raises(EngineDown):
        _ = worker.facts
    with pytest.raises(EngineDown):
        worker.wait_ready(0)
    held.open.set()
    worker.wait_ready(PATIENCE_S)
    assert early.finish is Finish.LENGTH and len(early.ids) == 3
    assert given_up.finish is Finish.CANCELLED
    worker.stop()


def test_stop_answers_every_waiter(engine_options: WorkerOptions) -> None:
    worker = started(engine_options)
    gate = Gate(worker)
    rows = [gate.heard, *(start(worker, max_tokens=500) for _ in range(3))]
    worker.stop(timeout_s=0)  # the engine is at the gate: asked, not yet obeyed
    gate.open()
    assert {row.finish for row in rows} == {Finish.CANCELLED}
    assert all(isinstance(row.error, EngineDown) for row in rows)
    worker.stop()
    worker.stop()
    assert worker.state is EngineState.STOPPED
    with pytest.raises(EngineDown):
        start(worker)


def test_stop_while_loading(engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldLoad(monkeypatch)
    worker = Worker(engine_options)
    worker.start()
    early = start(worker)
    worker.stop(timeout_s=0)
    held.open.set()
    assert early.finish is Finish.CANCELLED
    worker.stop()
    assert worker.state is EngineState.STOPPED


def test_a_model_that_cannot_be_loaded_fails_its_waiters(
    engine_options: WorkerOptions, tmp_path: Path
) -> None:
    worker = Worker(dataclasses.replace(engine_options, folder=tmp_path))
    early = start(worker)
    worker.start()
    with pytest.raises(ModelError, match="config.json"):
        worker.wait_ready(PATIENCE_S)
    assert isinstance(early.error, ModelError) and early.finish is Finish.ERROR
    assert worker.state is EngineState.DOWN
    with pytest.raises(EngineDown):
        start(worker)
    worker.stop()


def test_a_bug_in_loading_fails_its_waiters(
    engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load", lambda *args: 1 // 0)
    worker = Worker(engine_options)
    early = start(worker)
    worker.start()
    with pytest.raises(EngineDown, match="by zero"):
        worker.wait_ready(PATIENCE_S)
    assert isinstance(early.error, EngineDown)


LEAVE = """
import sys, threading
from pathlib import Path
from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.types import RowSpec, Sampling

folder, ending = Path(sys.argv[1]), sys.argv[2]
worker = Worker(WorkerOptions(folder, folder / "dense", folder / "kernels"))
worker.start()
is_running = threading.Event()
spec = RowSpec((5, 9), Sampling(), 1000, frozenset())
worker.submit(spec, lambda event: is_running.set())
assert is_running.wait(20)
if ending == "stopped":
    worker.stop()
print("left", ending)
"""


def test_a_process_leaves_without_a_crash(tiny_folder: Path) -> None:
    endings = ("stopped", "abandoned")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVE, str(tiny_folder), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for ending in endings
    ]
    said = [child.communicate(timeout=30)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert said == ["left stopped\n", "left abandoned\n"]


def test_a_failure_of_the_loop_itself_answers_every_waiter(
    engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started(engine_options)
    gate = Gate(worker)
    rows = [gate.heard, start(worker), start(worker)]

    def plan() -> None:
        raise SystemError("a bug of ours")

    monkeypatch.setattr(worker._loop.scheduler, "plan", plan)
    gate.open()
    assert [type(row.error) for row in rows] == [EngineFault] * 3
    assert ask(worker).finish is Finish.LENGTH, "another life has begun"
    assert worker.stats()["restarts"] == 1
    worker.stop()
    assert worker.state is EngineState.STOPPED
    with pytest.raises(EngineDown):
        start(worker)
