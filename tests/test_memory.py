"""Admission by memory: the arithmetic, who waits for whom, and that nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from mlxlite.engine.memory import AHEAD_TOKENS, Budget
from mlxlite.engine.row import Phase, Row
from mlxlite.engine.scheduler import ChunkSizer, Scheduler
from mlxlite.kvplan import SLAB_TOKENS, Const, Full, KVPlan, Window
from mlxlite.types import RowSpec, Sampling

PLAN = KVPlan(((Full(10),), (Full(6), Const(1000)), (Window(64, 5),)))


def allocated(tokens: int) -> int:
    """Bytes of a row, by hand: whole slabs of what grows, twice, for a pool's spare slots."""
    slabs = -(-tokens // SLAB_TOKENS) * SLAB_TOKENS
    return int(2 * (16 * slabs + 1000 + 5 * min(slabs, 64)))


def row_of(prompt: int, max_tokens: int = 10, ran: int = 0) -> Row:
    spec = RowSpec((1,) * prompt, Sampling(), max_tokens, frozenset())
    row = Row(prompt, spec, lambda event: None)
    row.fed = min(ran, prompt - 1)
    row.stepped = ran - row.fed
    return row


class Kept:
    """A prompt cache of entries of some bytes each, oldest first."""

    def __init__(self, *entries: int) -> None:
        self.entries = list(entries)

    @property
    def nbytes(self) -> int:
        return sum(self.entries)

    def evict(self, needed: int) -> int:
        before = self.nbytes
        while self.entries and before - self.nbytes < needed:
            self.entries.pop(0)
        return before - self.nbytes


def budget(room: int, kept: Kept | None = None) -> Budget:
    kept = kept or Kept()
    return Budget(PLAN, room, lambda: kept.nbytes, kept.evict)


def test_it_needs_no_mlx() -> None:
    code = (
        "import sys, mlxlite.engine.memory\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'numpy')]\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --------------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "ran", "tokens"),
    [
        (100, 10, 0, 110),
        (100, 30_000, 0, 100 + AHEAD_TOKENS),  # not what the client says it might use
        (100, 30_000, 99, 100 + AHEAD_TOKENS),
        (100, 30_000, 3000, 3000 + AHEAD_TOKENS // 2),  # it has grown past that
        (100, 3000, 3000, 3100),  # and can never be longer than this
        (1, 1, 0, 2),
        (256, 256, 0, 512),
        (256, 257, 0, 513),
    ],
)
def test_a_row_is_billed_for_what_it_has_and_some_more(
    prompt: int, max_tokens: int, ran: int, tokens: int
) -> None:
    row = row_of(prompt, max_tokens, ran)
    assert budget(0).tokens_of(row) == tokens
    assert budget(0).total([row]) == allocated(tokens)


def test_the_bill_never_falls_while_a_row_grows() -> None:
    bills = [budget(0).total([row_of(300, 2000, ran)]) for ran in range(0, 2299, 7)]
    assert bills == sorted(bills) and bills[0] < bills[-1]
    for ran, bill in zip(range(0, 2299, 7), bills, strict=True):
        assert bill >= PLAN.row_bytes_allocated(ran + 1), "what it holds is always paid for"


@pytest.mark.parametrize("spare", [-1, 0, 1])
@pytest.mark.parametrize("kept", [0, 5000])
def test_room_is_used_to_the_last_byte(spare: int, kept: int) -> None:
    running, row = [row_of(100), row_of(600)], row_of(40)
    need = budget(0).total((*running, row))
    store = Kept(kept) if kept else Kept()
    has_room = budget(need + kept + spare, store).admits(row, running)
    if kept and spare < 0:
        assert has_room and store.nbytes == 0, "a prefix goes before a row waits"
    else:
        assert has_room == (spare >= 0) and store.nbytes == kept


def test_only_as_many_prefixes_go_as_it_takes_and_none_in_vain() -> None:
    running, row = [row_of(100)], row_of(40)
    need = budget(0).total((*running, row))
    store = Kept(10, 10, 10, 10)
    assert budget(need + 15, store).admits(row, running)
    assert store.entries == [10]
    assert not budget(need - 1, store).admits(row, running)
    assert store.entries == [10], "all of them would not have been enough"


def test_the_first_row_always_runs_and_takes_the_prefixes_room() -> None:
    row, store = row_of(5000), Kept(100, 100, 100)
    assert budget(1, store).admits(row, []) and store.nbytes == 0
    store = Kept(100, 100, 100)
    assert budget(budget(0).total([row]) + 200, store).admits(row, []) and store.nbytes == 200
    assert budget(-(10**9), Kept()).admits(row, iter([]))


@pytest.mark.parametrize("over", [-5, 0, 1, 100, 101, 10**9])
def test_growing_rows_push_prefixes_out(over: int) -> None:
    running, store = [row_of(100, 9000, 4000), row_of(600)], Kept(100, 100, 100)
    need = budget(0).total(running)
    budget(need + 300 - over, store).keep_within(running)
    assert store.nbytes == max(300 - max(-(-over // 100), 0) * 100, 0)


# ------------------------------------------------------------------------- with the scheduler


def queue(room: int, lengths: Sequence[int], store: Kept | None = None) -> Scheduler:
    scheduler = Scheduler(8, ChunkSizer(32, 32), budget(room, store).admits)
    for length in lengths:
        scheduler.submit(row_of(length))
    return scheduler


def lengths_of(rows: Sequence[Row]) -> list[int]:
    return [len(row.spec.prompt_ids) for row in rows]


def test_who_does_not_fit_waits_and_is_not_overtaken() -> None:
    room = 2 * allocated(610)  # a short row pays for its neighbour's width
    scheduler = queue(room, [1000, 600, 5, 6])
    assert lengths_of(scheduler.admit()) == [1000]
    assert scheduler.admit() == [], "the small ones would fit, and stay behind the large one"
    scheduler.remove(scheduler.live[0])
    assert lengths_of(scheduler.admit()) == [600, 5]
    scheduler.remove(scheduler.live[0])
    assert lengths_of(scheduler.admit()) == [6]


def test_a_row_larger_than_all_memory_runs_by_itself() -> None:
    scheduler = queue(allocated(300), [5000, 10, 9000])
    for length in (5000, 10, 9000):
        assert lengths_of(scheduler.admit()) == [length]
        scheduler.remove(scheduler.live[0])


@pytest.mark.parametrize("leave", [lambda row: None, lambda row: setattr(row, "is_held", True)])
def test_a_held_row_still_takes_its_room(leave: Callable[[Row], None]) -> None:
    scheduler = queue(allocated(800), [700, 5])
    (row,) = scheduler.admit()
    row.phase = Phase.DECODE
    leave(row)
    assert scheduler.admit() == []


def test_waiting_rows_take_room_from_prefixes_first_come_first_served() -> None:
    store = Kept(*[allocated(200)] * 3)
    scheduler = queue(3 * allocated(200), [100, 101, 102, 103], store)
    assert lengths_of(scheduler.admit()) == [100, 101, 102]
    assert store.nbytes == 0 and lengths_of(list(scheduler.waiting)) == [103]
