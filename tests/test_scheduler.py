"""The scheduler as a value machine: fuzzed with a fake forward, no MLX and no clock.

The fake takes a plan, pretends to run it at a random speed and gives back what a worker would. What
must hold whatever the schedule: rows are admitted in order, none is lost, each ends exactly once, a
step holds one chunk at most, a chunk keeps to its bounds and ends at marks, prompts take turns, who
has no room is not overtaken, and the scheduler says truthfully whether there is work.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable
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
    """One random schedule: rows come and go while a fake forward runs the plans.

    Memory is a number of tokens. Some rows are held for a while, some wait for what an earlier one
    computes, and some have lengths at which their state is to be kept.
    """

    seed: int
    events: dict[int, list[Event]] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # what happened in it

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        smallest = self.random.choice([1, 4, 32])
        sizer = ChunkSizer(
            smallest, smallest * self.random.choice([1, 4, 16]), self.random.uniform(1, 5000)
        )
        self.room = self.random.choice([10**9, self.random.randint(1, 600)])
        self.scheduler = Scheduler(self.random.randint(1, 6), sizer, self.has_room)
        self.scheduler.may_group = self.random.random() < 0.7
        self.rows = [self.new_row(n) for n in range(self.random.randint(1, 12))]
        self.speed = self.random.uniform(10, 5000)  # tokens a second of the fake forward
        self.is_turn_of_shortest = True

    def new_row(self, number: int) -> Row:
        draw = self.random
        prompt = draw.choice([1, 2, draw.randint(1, 40), draw.randint(1, 300)])
        spec = RowSpec((1,) * prompt, Sampling(), draw.randint(1, 8), frozenset())
        self.events[number] = []
        return Row(number, spec, self.events[number].append)

    def has_room(self, row: Row, running: Iterable[Row]) -> bool:
        taken = [len(other.spec.prompt_ids) for other in running]
        return not taken or sum(taken) + len(row.spec.prompt_ids) <= self.room

    def run(self) -> None:
        coming = list(self.rows)
        for _ in range(5000):
            while coming and self.random.random() < 0.4:
                self.scheduler.submit(coming.pop(0))
            if self.random.random() < 0.03 and self.scheduler.rows:
                self.end(self.random.choice(self.scheduler.rows), Finish.CANCELLED)
            for row in self.scheduler.live:
                if row.is_held and self.random.random() < 0.2:
                    row.is_held = False
            had_work = self.scheduler.has_work
            for row in self.scheduler.admit():
                self.begin(row)
            self.check_admission()
            step = self.scheduler.plan()
            self.check(step)
            assert had_work or step.is_idle, "it rests while there is work"
            assert not (step.is_idle and self.scheduler.has_work), "it never rests"
            if not self.scheduler.rows and not coming:
                return
            self.forward(step)
        pytest.fail(f"schedule {self.seed} does not end")

    def begin(self, row: Row) -> None:
        """What the prompt cache does with a row that is let in."""
        self.admitted.append(row.id)
        prompt = len(row.spec.prompt_ids) - 1
        earlier = self.scheduler.live[: self.scheduler.live.index(row)]
        donors = [other for other in earlier if other.prompt_left > 1 and other.fed < prompt]
        if donors and self.random.random() < 0.5:
            donor = self.random.choice(donors)
            most = min(len(donor.spec.prompt_ids) - 1, prompt)
            row.waits_for, row.waits_until = donor, self.random.randint(donor.fed + 1, most)
            donor.mark(row.waits_until)
            self.seen.add("waits")
        for _ in range(self.random.randint(0, 2)):
            if prompt > 0:
                row.mark(self.random.randint(1, prompt))

    def let_go(self, donor: Row, reached: int | None) -> None:
        for row in self.scheduler.live:
            if row.waits_for is donor and (reached is None or reached >= row.waits_until):
                row.waits_for = None
                row.fed = donor.fed if reached is None else row.waits_until
                row.fed = min(row.fed, len(row.spec.prompt_ids) - 1)

    def check_admission(self) -> None:
        live, waiting = self.scheduler.live, list(self.scheduler.waiting)
        running = [row for row in live if not row.is_held]
        assert all(row.phase is Phase.WAITING for row in waiting)
        if waiting:
            is_full = len(running) >= self.scheduler.max_rows
            assert is_full or not self.has_room(waiting[0], live), "a free place stays empty"
            self.seen.add("full" if is_full else "no room")
        if len(live) > self.scheduler.max_rows:
            self.seen.add("held and not in the way")

    def check(self, step: Step) -> None:
        free = [row for row in self.scheduler.live if not row.is_held]
        assert list(step.decode) == [row for row in free if row.phase is Phase.DECODE]
        assert all(row.prompt_left == 0 for row in step.decode)
        prompts = [row for row in free if row.phase is Phase.PREFILL and row.waits_for is None]
        assert (step.prefill is None) == (not prompts)
        if step.prefill is None:
            return
        shortest = min(prompts, key=lambda row: row.prompt_left)
        assert step.prefill is (shortest if self.is_turn_of_shortest else prompts[0])
        self.is_turn_of_shortest = len(prompts) == 1 or not self.is_turn_of_shortest
        if len(prompts) > 1:
            self.seen.add("several prompts")
        marks = [mark for mark in step.prefill.marks if mark > step.prefill.fed]
        left = min([step.prefill.prompt_left, *(mark - step.prefill.fed for mark in marks)])
        self.check_chunk(step.prefill_tokens, left, len(prompts) < len(step.decode))
        self.check_beside(step, prompts)

    def check_beside(self, step: Step, prompts: list[Row]) -> None:
        """Prompts that share a forward end in it, are of one length, about, and leave room."""
        if not step.beside:
            return
        first = step.prefill
        assert first is not None and self.scheduler.may_group
        assert step.prefill_tokens == first.chunk_left
        group = [first, *step.beside]
        assert len(set(group)) == len(group) and set(group) <= set(prompts)
        assert {row.fed for row in group} == {first.fed}
        lengths = [row.chunk_left for row in group]
        padded = max(lengths) * len(lengths)
        assert padded <= self.scheduler.sizer.room(CHUNK_BUDGET_S)
        assert sum(lengths) >= 0.75 * padded
        self.seen.add("together")

    def check_chunk(self, tokens: int, left: int, is_shared: bool) -> None:
        sizer = self.scheduler.sizer
        budget_s = SHARED_CHUNK_BUDGET_S if is_shared else CHUNK_BUDGET_S
        if tokens == left:  # the last of a prompt may take longer: two chunks cost more than one
            budget_s = min(1.5 * budget_s, CHUNK_BUDGET_S)
        assert 0 < tokens <= left, "a chunk ends at the prompt's end, and at each mark"
        assert tokens <= sizer.largest
        assert tokens >= min(sizer.smallest // 2, left)  # two even halves at the least
        if tokens > sizer.smallest:
            assert tokens / sizer.tokens_per_s <= budget_s

    def forward(self, step: Step) -> None:
        if (row := step.prefill) is not None:
            seconds = step.prefill_tokens / self.speed * self.random.uniform(0.5, 2) + 1e-3
            counts = [(row, step.prefill_tokens)]
            counts += [(other, other.chunk_left) for other in step.beside]
            for each, count in counts:
                self.scheduler.prefilled(each, count, seconds)
            for other in step.beside:
                self.let_go(other, other.fed)
            assert row.fed <= len(row.spec.prompt_ids) - 1
            self.let_go(row, row.fed)
        for row in step.decode:
            row.sampled += 1
            row.accepted += 1
            row.sink(Event(ids=(row.accepted,)))
            if row.accepted == row.spec.max_tokens:
                self.end(row, Finish.LENGTH)
            elif self.random.random() < 0.1:
                row.is_held = True
                self.seen.add("held")

    def end(self, row: Row, finish: Finish) -> None:
        self.scheduler.remove(row)
        self.let_go(row, None)
        row.end(finish)


@pytest.mark.slow
def test_no_row_is_lost_whatever_the_schedule() -> None:
    cancelled = set()
    seen = set[str]()
    for seed in range(2000):
        trial = Trial(seed)
        trial.run()
        seen |= trial.seen
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
    assert seen == {
        *("waits", "full", "no room", "held", "held and not in the way", "several prompts"),
        "together",
    }


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
    assert scheduler.admit() == [short, long]
    chunks = 0
    while (step := scheduler.plan()).prefill is not None:
        assert step.prefill is long and step.decode == (short,)
        scheduler.prefilled(long, step.prefill_tokens, 0.01)
        chunks += 1
    assert chunks == 10
    assert scheduler.plan().decode == (short, long)


def prompt(scheduler: Scheduler, length: int) -> Row:
    row = Row(length, RowSpec((1,) * length, Sampling(), 9, frozenset()), lambda event: None)
    scheduler.submit(row)
    return row


def test_prompts_take_turns_so_that_none_starves() -> None:
    scheduler = Scheduler(40, ChunkSizer(8, 8))
    long = prompt(scheduler, 801)
    chunks = []
    for _ in range(100):  # a short one comes at every step
        prompt(scheduler, 9)
        scheduler.admit()
        step = scheduler.plan()
        assert step.prefill is not None
        chunks.append(step.prefill is long)
        scheduler.prefilled(step.prefill, step.prefill_tokens, 0.01)
        for row in scheduler.live[:]:
            if row.phase is Phase.DECODE:
                scheduler.remove(row)
    assert chunks == [False, True] * 50


def test_who_comes_while_a_long_prompt_is_run_has_the_next_turn() -> None:
    scheduler = Scheduler(4, ChunkSizer(8, 8))
    long = prompt(scheduler, 801)
    for alone in range(1, 4):  # whatever number of chunks it has had
        for _ in range(alone):
            scheduler.admit()
            step = scheduler.plan()
            assert step.prefill is long
            scheduler.prefilled(long, step.prefill_tokens, 0.01)
        short = prompt(scheduler, 9)
        scheduler.admit()
        step = scheduler.plan()
        assert step.prefill is short
        scheduler.prefilled(short, step.prefill_tokens, 0.01)
        scheduler.remove(short)


def test_who_has_no_room_is_not_overtaken() -> None:
    taken = {"tokens": 0}

    def has_room(row: Row, running: Iterable[Row]) -> bool:
        taken["tokens"] = sum(len(other.spec.prompt_ids) for other in running)
        return taken["tokens"] + len(row.spec.prompt_ids) <= 100

    scheduler = Scheduler(4, ChunkSizer(8, 8), has_room)
    first, large, small = (prompt(scheduler, length) for length in (60, 50, 10))
    assert scheduler.admit() == [first] and scheduler.admit() == []
    scheduler.remove(first)
    assert scheduler.admit() == [large, small]


def test_a_held_row_gives_up_its_place_and_keeps_its_memory() -> None:
    room = {"rows": 2}
    scheduler = Scheduler(
        1, ChunkSizer(8, 8), lambda row, running: len(list(running)) < room["rows"]
    )
    one, two, three = (prompt(scheduler, 1) for _ in range(3))
    assert scheduler.admit() == [one]
    assert scheduler.plan().decode == (one,)
    one.is_held = True
    assert scheduler.has_work, "there is a place for the next one"
    assert scheduler.admit() == [two] and scheduler.plan().decode == (two,)
    two.is_held = True
    assert scheduler.admit() == [] and not scheduler.has_work, "no room: nothing to do but wait"
    one.is_held = False
    assert scheduler.has_work and scheduler.plan().decode == (one,)


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
