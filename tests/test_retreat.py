"""Rows that outgrow memory (D18): the youngest goes back to the queue, and still says the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from mlxlite.engine import loop as loop_module
from mlxlite.engine import memory
from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.kvplan import Full, KVPlan, Room
from mlxlite.types import Finish, Sampling
from tests.rows import PATIENCE_S, Scripted, ask, start

pytestmark = pytest.mark.slow

PLAN = KVPlan(((Full(1),),))  # a byte a token; a slab of 256 is the least
ROOM = 2 * 2 * 256 + 100  # two rows of a slab, with a pool's spare slots; not three slabs
TOKENS = 300


@pytest.fixture
def worker(engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setenv("MLXLITE_CHECK", "1")
    monkeypatch.setattr(memory, "AHEAD_TOKENS", 8)
    monkeypatch.setattr(loop_module, "_COUNT_EVERY_STEPS", 4)
    room = Room(usable_bytes=1 << 40, plan=PLAN, room_bytes=ROOM, max_context=1024)
    options = dataclasses.replace(
        engine_options, room=lambda kind, memory_bytes: room, prompt_cache_bytes=1 << 20
    )
    made = Worker(options)
    made.start()
    made.wait_ready(PATIENCE_S)
    yield made
    made.stop()


@pytest.mark.parametrize(
    "how",
    [
        Sampling(),
        Sampling(0.9, 0.95, seed=4),
        Sampling(1.0, seed=9, repetition_penalty=1.2, presence_penalty=0.3, presence_context=0),
    ],
    ids=["greedy", "sampled", "penalised"],
)
def test_a_row_that_had_to_wait_says_what_it_would_have_said(worker: Worker, how: Sampling) -> None:
    prompts = [tuple(range(3, 43)), tuple(range(90, 50, -1))]
    alone = [ask(worker, prompt, TOKENS, sampling=how) for prompt in prompts]
    assert worker.stats()["retreats"] == 0
    rows = [start(worker, prompt, TOKENS, sampling=how) for prompt in prompts]
    assert [row.done.finish for row in rows] == [Finish.LENGTH] * 2
    assert [row.ids for row in rows] == [row.ids for row in alone]
    assert all(row.done.generated_tokens == TOKENS for row in rows)
    stats = worker.stats()
    assert stats["retreats"] >= 1 and stats["active_rows"] == stats["pending_rows"] == 0


def test_a_steered_row_goes_on_where_its_guide_was(worker: Worker) -> None:
    def guide() -> Scripted:
        return Scripted(lambda so_far, ids: None)

    prompts = [tuple(range(3, 43)), tuple(range(90, 50, -1))]
    alone = [ask(worker, prompt, TOKENS, guide=guide()).ids for prompt in prompts]
    rows = [start(worker, prompt, TOKENS, guide=guide()) for prompt in prompts]
    assert all(row.done for row in rows)
    assert [row.ids for row in rows] == alone
    assert worker.stats()["retreats"] >= 1


def test_a_row_that_waits_again_can_be_cancelled(worker: Worker) -> None:
    prompts = [tuple(range(3, 43)), tuple(range(90, 50, -1))]
    first = start(worker, prompts[0], 600)
    second = start(worker, prompts[1], 600)
    while worker.stats()["retreats"] == 0:
        assert not first._ended.wait(0.01)
    worker.cancel(second.row_id)
    assert second.finish is Finish.CANCELLED
    assert first.finish is Finish.LENGTH and len(first.ids) == 600
