"""Lanes: who shares a forward and in whose buffers, and what those cost.

The policy is tested with rows of a tiny model; a place is right if the row is in exactly one, its
logits are those that it gets alone, and the buffers are as wide as their rows need.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlxlite.engine.lanes import SHORT_COLUMNS, SPREAD, Lanes, Pool, cache_arrays
from mlxlite.engine.memory import Budget
from mlxlite.engine.row import Phase, Row
from mlxlite.engine.slots import SLAB
from mlxlite.engine.spans import span_of
from mlxlite.kvplan import Full, KVPlan
from mlxlite.types import Finish, RowSpec, Sampling
from tests import decoding

import mlx.core as mx  # isort: skip

# Short models: what is tested here is which buffers there are, not what is in them.
MODEL: Any = decoding.tiny_model(num_hidden_layers=1, max_position_embeddings=100_000).model
TOKEN_BYTES = 2 * 2 * 16 * 4  # keys and values, of two heads of 16 float32
LONG = SHORT_COLUMNS + 500


def row_of(length: int, seed: int = 0) -> Row:
    """A decoding row of so many tokens, whose keys and values are noise."""
    spec = RowSpec((3,) * (length + 1), Sampling(), 9, frozenset())
    row = Row(length + seed, spec, lambda event: None, phase=Phase.DECODE)
    if length:
        row.fed, row.cache = length, Lanes(MODEL).new_cache()
        shape = (1, 2, length, 16)
        noise = [mx.random.normal(shape, key=mx.random.key(2 * row.id + n)) for n in range(2)]
        row.cache[0].update_and_fetch(*noise)
        mx.eval(cache_arrays(row.cache))
    return row


def new_lanes(may_pool: bool = True) -> Lanes:
    lanes = Lanes(MODEL)
    lanes.may_pool = may_pool
    return lanes


def step(lanes: Lanes, rows: Sequence[Row]) -> mx.array:
    """One forward of all rows; the logits in their order."""
    order = lanes.arrange(rows)
    assert len(order) == len(rows) == len(set(order)) and set(order) == set(rows)
    logits = lanes.forward(mx.array([row.id % 500 for row in order], dtype=mx.uint32))
    mx.async_eval(logits, *lanes.arrays)
    return mx.stack([logits[order.index(row)] for row in rows])


def places(lanes: Lanes) -> tuple[list[list[int]], list[int]]:
    """Prompt lengths of the rows of each pool, and of those alone."""
    pools = [sorted(row.fed for row in pool.rows) for pool in lanes.pools]
    return sorted(pools), sorted(row.fed for row in lanes.alone)


# --------------------------------------------------------------------------------- the policy


def test_a_row_is_alone_until_a_second_one_comes() -> None:
    lanes, one, two = new_lanes(), row_of(5), row_of(9)
    step(lanes, [one])
    assert places(lanes) == ([], [5])
    step(lanes, [one, two])
    assert places(lanes) == ([[5, 9]], [])
    assert one.cache is None and two.cache is None, "what is in the pool is nowhere else"
    step(lanes, [two])
    assert places(lanes) in (([[9]], []), ([], [9]))
    lanes.arrange([])
    assert places(lanes) == ([], []) and not lanes.arrays


def test_no_pool_is_made_unless_the_model_allows_it() -> None:
    lanes, rows = new_lanes(may_pool=False), [row_of(5), row_of(9)]
    step(lanes, rows)
    assert places(lanes) == ([], [5, 9])
    lanes.may_pool = True  # the judge has spoken
    step(lanes, rows)
    assert places(lanes) == ([[5, 9]], [])


@pytest.mark.parametrize(
    ("lengths", "pools", "alone"),
    [
        ((1, SHORT_COLUMNS - 1), [[1, SHORT_COLUMNS - 1]], []),
        ((1, SHORT_COLUMNS), [], [1, SHORT_COLUMNS]),
        ((700, SPREAD * 700 - 1), [[700, SPREAD * 700 - 1]], []),
        ((700, SPREAD * 700), [], [700, SPREAD * 700]),
        ((5, LONG, 6, LONG + 1), [[5, 6], [LONG, LONG + 1]], []),
        ((5, LONG, 700), [[5, 700]], [LONG]),
        ((0, 0), [], [0, 0]),
        ((0, 5, 6), [[5, 6]], [0]),
    ],
)
def test_rows_of_very_different_length_are_kept_apart(
    lengths: Sequence[int], pools: list[list[int]], alone: list[int]
) -> None:
    lanes = new_lanes()
    lanes.arrange([row_of(length, seed=7 * n) for n, length in enumerate(lengths)])
    found, by_themselves = places(lanes)
    together = sorted([*found, *([length] for length in by_themselves)])
    assert together == sorted([*pools, *([length] for length in alone)])


def test_pools_merge_when_nothing_keeps_them_apart() -> None:
    lanes = new_lanes()
    short = row_of(5)
    near = [row_of(1000, seed=1), row_of(1001, seed=2)]
    far = [row_of(LONG, seed=3), row_of(LONG + 1, seed=4)]
    step(lanes, [short, *near, *far])
    assert places(lanes) == ([[5, 1000, 1001], [LONG, LONG + 1]], [])
    step(lanes, [*near, *far])
    assert places(lanes) == ([[1000, 1001, LONG, LONG + 1]], [])
    assert lanes.arrange([*near, *far]) == lanes.pools[0].rows


def test_a_prompt_of_one_token_joins_after_its_first_step() -> None:
    lanes, rows = new_lanes(), [row_of(0), row_of(5)]
    step(lanes, rows)
    assert places(lanes) == ([], [0, 5])
    step(lanes, rows)
    assert places(lanes) == ([[0, 5]], [])


def test_a_row_that_outgrows_its_pool_moves_to_one_of_its_own() -> None:
    lanes, rows = new_lanes(), [row_of(5), row_of(6), row_of(SHORT_COLUMNS - 2)]
    step(lanes, rows)
    assert places(lanes) == ([[5, 6, SHORT_COLUMNS - 2]], [])
    for _ in range(2):
        step(lanes, rows)
    assert places(lanes) == ([[5, 6]], [SHORT_COLUMNS - 2])
    assert rows[2].cache is not None and rows[2].cache[0].offset == rows[2].length


def test_a_held_row_takes_its_cache_along_and_comes_back() -> None:
    lanes, rows = new_lanes(), [row_of(5), row_of(9), row_of(7)]
    expected = alone(rows, 3)
    found = [step(lanes, rows)]
    step_of_two = step(lanes, [rows[0], rows[2]])
    assert rows[1].cache is not None and rows[1].cache[0].offset == 10
    assert lanes.pool_of(rows[1]) is None and rows[1] not in lanes.rows
    assert np.allclose(step_of_two, expected[1][mx.array([0, 2])], atol=1e-4)
    found.append(step(lanes, [rows[1]]))
    assert np.allclose(found[-1][0], expected[1][1], atol=1e-4)
    assert np.allclose(step(lanes, rows), expected[2], atol=1e-4)
    assert np.allclose(found[0], expected[0], atol=1e-4)


def test_an_ended_row_leaves_nothing() -> None:
    lanes, rows = new_lanes(), [row_of(5), row_of(9)]
    step(lanes, rows)
    rows[0].end(Finish.CANCELLED)
    lanes.arrange(rows[1:])
    assert rows[0].cache is None and lanes.pool_of(rows[0]) is None


def alone(rows: Sequence[Row], steps: int) -> list[mx.array]:
    """The logits (B, V) of each step, of rows that run by themselves; they stay as they are."""
    lanes = new_lanes(may_pool=False)
    twins = [row_of(row.length, row.id - row.length) for row in rows]
    for twin, row in zip(twins, rows, strict=True):
        assert twin.id == row.id and twin.length == row.length
    return [step(lanes, twins) for _ in range(steps)]


# ------------------------------------------------------------------------------- a wrong token


@pytest.mark.parametrize("may_pool", [True, False], ids=["pool", "alone"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_wrong_token_is_replaced_and_no_neighbour_notices(index: int, may_pool: bool) -> None:
    rows = [row_of(length) for length in (5, SLAB - 1, 9)]
    expected = alone(rows, 2)
    lanes = new_lanes(may_pool)
    order = lanes.arrange(rows)
    tokens = [row.id % 500 for row in order]
    wrong = [17 if row is rows[index] else token for row, token in zip(order, tokens, strict=True)]
    mx.eval(lanes.forward(mx.array(wrong, dtype=mx.uint32)), lanes.arrays)
    length = rows[index].length
    again = lanes.forward_again(rows[index], rows[index].id % 500)
    mx.eval(again, lanes.arrays)
    assert rows[index].length == length
    assert np.allclose(again[0], expected[0][index], atol=1e-4)
    assert np.allclose(step(lanes, rows), expected[1], atol=1e-4)


# ------------------------------------------------------------------------------------- memory


def held_bytes(lanes: Lanes) -> int:
    return sum(array.nbytes for array in lanes.arrays)


@pytest.mark.slow
def test_buffers_are_as_wide_as_rows_need() -> None:
    """Whatever comes and goes: no pool has more than half as many slots again as it had rows at its
    fullest, nor twice those it has; and no column that its longest row does not need, but for
    the steps that buffers grow by."""
    draw, lanes = random.Random(4), new_lanes()
    live: list[Row] = []
    seen = set()
    for number in range(120):
        while live and draw.random() < 0.35:
            live.pop(draw.randrange(len(live)))
        if len(live) < 9 and draw.random() < 0.7:
            length = draw.choice([3, 200, SLAB - 1, SLAB, 1000, SHORT_COLUMNS, LONG, 9000])
            live.append(row_of(length, seed=10_000 * number))
        lanes.arrange(live)
        for pool in lanes.pools:
            lengths = [row.length for row in pool.rows]
            longest, shortest = max(lengths) + 1, min(lengths)
            assert longest <= max(SHORT_COLUMNS, SPREAD * shortest)
            seen.add(len(lengths))
            slots, _, columns, _ = pool.arrays[0].shape
            assert len(lengths) <= slots <= 2 * len(lengths)
            assert max(lengths) <= columns, "a forward makes room for one more"
        if live:
            step(lanes, live)
    assert max(seen) >= 4 and 1 in seen
    lanes.arrange([])
    assert held_bytes(lanes) == 0


@pytest.mark.parametrize(
    "lengths",
    [
        [250] * 8,
        [SHORT_COLUMNS - 48] * 8,
        [600, *[LONG] * 3],
        [5] * 7 + [SHORT_COLUMNS - 58],
        [600] * 7 + [4 * 600 - 10],
    ],
    ids=["short", "long", "apart", "mixed", "spread"],
)
def test_rows_take_no_more_than_admission_bills_them(lengths: Sequence[int]) -> None:
    budget = Budget(KVPlan(((Full(TOKEN_BYTES),),)), 0, lambda: 0, lambda needed: 0)
    lanes = new_lanes()
    rows = [row_of(length, seed=10_000 * n) for n, length in enumerate(lengths)]
    step(lanes, rows)
    assert held_bytes(lanes) <= budget.total(rows)


def test_a_pool_shrinks_when_most_rows_have_left() -> None:
    lanes, rows = new_lanes(), [row_of(50, seed=100 * n) for n in range(12)]
    expected = alone(rows[:2], 2)
    step(lanes, rows)
    full = held_bytes(lanes)
    assert full <= 1.5 * 12 * SLAB * TOKEN_BYTES
    logits = step(lanes, rows[:2])
    assert held_bytes(lanes) <= 0.4 * full
    assert np.allclose(logits, expected[1], atol=1e-4)


def test_a_forgotten_pool_is_let_go_of() -> None:
    lanes, rows = new_lanes(), [row_of(1000), row_of(1001)]
    step(lanes, rows)
    mx.synchronize()
    before = mx.get_active_memory()
    kept = held_bytes(lanes)
    lanes.forget()
    assert before - mx.get_active_memory() >= kept


def peak_of(lanes: Lanes, rows: Sequence[Row], steps: int) -> int:
    """Bytes beyond those there are that so many steps need."""
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(steps):
        step(lanes, rows)
    mx.synchronize()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("event", ["steady", "join", "leave", "hold", "again", "extract", "keep"])
def test_steps_write_in_place_whatever_happened_before(event: str) -> None:
    """A view that is still alive, or a buffer that stays lazy, would make each step copy the pool
    (engine-notes section 4)."""
    lanes = new_lanes()
    rows = [row_of(1500, seed=10_000 * n) for n in range(8)]
    late = row_of(1500, seed=90_000)
    for _ in range(2):
        step(lanes, rows)
    if event == "join":
        rows.append(late)
    elif event == "leave":
        rows.pop(2)
    elif event == "hold":
        step(lanes, rows[1:])
    elif event == "again":
        mx.eval(lanes.forward_again(rows[3], 9), lanes.arrays)
    elif event == "extract":
        pool = lanes.pools[0]
        assert pool.extract(rows[3])
    elif event == "keep":  # what the prompt cache does; the span stays there
        span = span_of(rows[3], lanes, 100, 1400)
        assert span.nbytes == 1300 * TOKEN_BYTES
    step(lanes, rows)
    smallest = min(array.nbytes for array in lanes.arrays)
    assert smallest >= 8 * 1500 * TOKEN_BYTES // 2
    assert peak_of(lanes, rows, 6) < smallest // 2


def test_joining_and_leaving_copy_one_row_and_not_the_pool() -> None:
    lanes = new_lanes()
    rows = [row_of(1500, seed=10_000 * n) for n in range(8)]
    late = row_of(1500, seed=90_000)
    step(lanes, rows)
    pool: Pool = lanes.pools[0]
    smallest = min(array.nbytes for array in lanes.arrays)
    mx.synchronize()
    for change in (lambda: pool.join(late), lambda: pool.leave(rows[1], keeps_cache=False)):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        change()
        mx.synchronize()
        assert mx.get_peak_memory() - before < smallest
