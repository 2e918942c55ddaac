"""The scheduler as a value machine: fuzzed with a fake forward, no MLX and no clock.

The fake takes a plan, pretends to run it at a random speed and gives back what a worker would. What
must hold whatever the schedule: rows are admitted in order, none is lost, each ends exactly once, a
step holds one chunk at most, and a chunk keeps to its bounds.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from mlxlite.engine.row import Phase, Row
from mlxlite.engine.scheduler import (
    CHUNK_BUDGET_S,
    SHARED_CHUNK_BUDGET_S,
    ChunkSizer,
    Scheduler,
    Step,
)
from mlxlite.types import Event, Finish, RowSpec, Sampling


def test_scheduler_needs_no_mlx() -> None:
    code = (
        "import sys, mlxlite.engine.scheduler, mlxlite.engine.row\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'numpy')]\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# ------------------------------------------------------------------------------ one schedule


@dataclass
class Trial:
    """One random schedule: rows come and go while a fake forward runs the plans."""

    seed: int
    events: dict[int, list[Event]] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        smallest = self.random.choice([1, 4, 32])
        sizer = ChunkSizer(
            smallest, smallest * self.random.choice([1, 4, 16]), self.random.uniform(1, 5000)
        )
        self.scheduler = Scheduler(self.random.randint(1, 4), sizer)
        self.rows = [self.new_row(n) for n in range(self.random.randint(1, 12))]
        self.speed = self.random.uniform(10, 5000)  # tokens a second of the fake forward

    def new_row(self, number: int) -> Row:
        draw = self.random
        prompt = draw.choice([1, 2, draw.randint(1, 40), draw.randint(1, 300)])
        spec = RowSpec((1,) * prompt, Sampling(), draw.randint(1, 8), frozenset())
        self.events[number] = []
        return Row(number, spec, self.events[number].append)

    def run(self) -> None:
        coming = list(self.rows)
        for _ in range(5000):
            while coming and self.random.random() < 0.4:
                self.scheduler.submit(coming.pop(0))
            if self.random.random() < 0.03 and self.scheduler.rows:
                self.end(self.random.choice(self.scheduler.rows), Finish.CANCELLED)
            step = self.scheduler.plan()
            self.check(step)
            if step.is_idle and not coming:
                return
            self.forward(step)
        pytest.fail(f"schedule {self.seed} does not end")

    def check(self, step: Step) -> None:
        live, waiting = self.scheduler.live, list(self.scheduler.waiting)
        assert len(live) <= self.scheduler.max_rows
        assert not waiting or len(live) == self.scheduler.max_rows, "a free place stays empty"
        assert all(row.phase is Phase.WAITING for row in waiting)
        for row in live:
            if row.id not in self.admitted:
                self.admitted.append(row.id)
        assert set(step.decode) == {row for row in live if row.phase is Phase.DECODE}
        assert all(row.prompt_left == 0 for row in step.decode)
        prefilling = [row for row in live if row.phase is Phase.PREFILL]
        assert step.prefill is (prefilling[0] if prefilling else None), "who waited longest goes on"
        if step.prefill is not None:
            self.check_chunk(step.prefill_tokens, step.prefill.prompt_left, bool(step.decode))

    def check_chunk(self, tokens: int, left: int, is_shared: bool) -> None:
        sizer = self.scheduler.sizer
        budget_s = SHARED_CHUNK_BUDGET_S if is_shared else CHUNK_BUDGET_S
        assert 0 < tokens <= left
        assert tokens <= sizer.largest
        assert tokens >= min(sizer.smallest // 2, left)  # two even halves at the least
        if tokens > sizer.smallest:
            assert tokens / sizer.tokens_per_s <= budget_s

    def forward(self, step: Step) -> None:
        if (row := step.prefill) is not None:
            seconds = step.prefill_tokens / self.speed * self.random.uniform(0.5, 2) + 1e-3
            self.scheduler.prefilled(row, step.prefill_tokens, seconds)
            assert row.fed <= len(row.spec.prompt_ids) - 1
        for row in step.decode:
            row.sampled += 1
            row.accepted += 1
            row.sink(Event(ids=(row.accepted,)))
            if row.accepted == row.spec.max_tokens:
                self.end(row, Finish.LENGTH)

    def end(self, row: Row, finish: Finish) -> None:
        self.scheduler.remove(row)
        row.end(finish)


@pytest.mark.slow
def test_no_row_is_lost_whatever_the_schedule() -> None:
    cancelled = set()
    for seed in range(2000):
        trial = Trial(seed)
        trial.run()
        assert not trial.scheduler.rows
        assert trial.admitted == sorted(trial.admitted), "first come, first served"
        for row in trial.rows:
            events = trial.events[row.id]
            ends = [event.done for event in events if event.done is not None]
            assert len(ends) == 1 and events[-1].done is ends[0], f"row {row.id} of {seed}"
            assert row.phase is Phase.ENDED
            tokens = [i for event in events for i in event.ids]
            assert tokens == list(range(1, len(tokens) + 1))
            if ends[0].finish is Finish.LENGTH:
                assert len(tokens) == row.spec.max_tokens
                assert row.id in trial.admitted
            else:
                was_prefilled = row.prompt_left == 0
                cancelled.add((row.id in trial.admitted, was_prefilled, bool(tokens)))
    assert cancelled >= {(False, False, False), (True, False, False), (True, True, True)}


def test_a_row_ends_once() -> None:
    heard: list[Event] = []
    row = Row(1, RowSpec((1, 2), Sampling(), 3, frozenset()), heard.append)
    row.end(Finish.CANCELLED)
    row.end(Finish.LENGTH, ids=(4,))
    assert [event.done.finish for event in heard if event.done] == [Finish.CANCELLED]


def test_removing_an_unknown_row_is_nothing() -> None:
    scheduler = Scheduler(1, ChunkSizer(1, 8))
    scheduler.remove(Row(1, RowSpec((1,), Sampling(), 1, frozenset()), lambda event: None))
    assert scheduler.plan().is_idle


def test_a_long_prompt_delays_a_running_row_by_one_chunk_a_step() -> None:
    scheduler = Scheduler(4, ChunkSizer(8, 8))
    short, long = (
        Row(n, RowSpec((1,) * n, Sampling(), 99, frozenset()), lambda event: None) for n in (1, 81)
    )
    scheduler.submit(short)
    scheduler.submit(long)
    chunks = 0
    while (step := scheduler.plan()).prefill is not None:
        assert step.prefill is long and step.decode == (short,)
        scheduler.prefilled(long, step.prefill_tokens, 0.01)
        chunks += 1
    assert chunks == 10
    assert scheduler.plan().decode == (short, long)


# -------------------------------------------------------------------------------- chunk sizes


def test_chunks_grow_to_twice_the_longest_at_most() -> None:
    draw = random.Random(1)
    for _ in range(3000):
        sizer = ChunkSizer(draw.randint(1, 64), draw.randint(64, 4096), draw.uniform(1, 1e6))
        longest = 128  # what an unmeasured sizer counts as seen
        for _ in range(4):
            left = draw.randint(1, 10_000)
            size = sizer.size(left, draw.choice([SHARED_CHUNK_BUDGET_S, CHUNK_BUDGET_S]))
            assert 0 < size <= min(left, sizer.largest)
            assert size <= max(2 * longest, sizer.smallest)
            sizer.measured(size, 10 ** draw.uniform(-6, 2))
            longest = max(longest, size)


def test_a_prompt_is_cut_without_a_crumb_at_its_end() -> None:
    for length in range(1, 400):
        sizer = ChunkSizer(32, 32)
        chunks = []
        left = length
        while left:
            chunks.append(sizer.size(left, CHUNK_BUDGET_S))
            left -= chunks[-1]
        assert len(chunks) == -(-length // 32), "no more chunks than it takes"
        assert max(chunks) - min(chunks) <= len(chunks)


def test_chunk_size_follows_the_measured_speed() -> None:
    sizer = ChunkSizer(32, 2048, tokens_per_s=100)
    for _ in range(30):  # a machine of 2000 tokens a second
        tokens = sizer.size(100_000, CHUNK_BUDGET_S)
        sizer.measured(tokens, tokens / 2000)
    assert 900 <= sizer.size(100_000, CHUNK_BUDGET_S) <= 1000
    assert sizer.size(100_000, CHUNK_BUDGET_S) % 32 == 0
    for _ in range(30):  # it is busy now: 50 tokens a second
        tokens = sizer.size(100_000, CHUNK_BUDGET_S)
        sizer.measured(tokens, tokens / 50)
    assert sizer.size(100_000, CHUNK_BUDGET_S) == 32, "never below the smallest"


@pytest.mark.parametrize(("tokens", "seconds"), [(3, 1.0), (64, 0.0), (64, -1.0)])
def test_what_says_nothing_of_the_speed_is_ignored(tokens: int, seconds: float) -> None:
    sizer = ChunkSizer(32, 2048, tokens_per_s=100)
    sizer.measured(tokens, seconds)
    assert sizer.tokens_per_s == 100
