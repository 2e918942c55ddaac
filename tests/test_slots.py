"""Slots give the logits that each row gets by itself, for every kind of cache that mlx-lm makes.

The oracle is the model with its own cache, one sequence, one token a step. Rows are fed tokens that
were drawn beforehand, so one wrong step cannot hide behind another. Windows are 8 wide: they wrap.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest

from mlxlite.engine import backend, slots  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.judge import judge
from mlxlite.engine.lanes import Lanes, Pool, cache_arrays
from mlxlite.engine.row import Row
from mlxlite.engine.slots import Full, Plan, Ring, States, leaves
from tests.fed import (
    POOLED,
    VOCAB,
    WINDOW,
    come_and_go,
    fed,
    forward,
    model_of,
    new_pool,
    step_alone,
)

import mlx.core as mx  # isort: skip

ALONE = ("afm7", "gpt_bigcode", "llama4", "deepseek_v41")


# -------------------------------------------------------------------- the same logits, always


@pytest.mark.slow
@pytest.mark.parametrize("kind", POOLED)
def test_rows_that_come_and_go_get_what_they_get_alone(kind: str) -> None:
    come_and_go(model_of(kind))


KINDS = ("llama", "gemma3_text", "mamba", "falcon_h1", "qwen3_next", "deepseek_v32")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1, WINDOW + 2])
def test_a_row_taken_out_of_a_pool_goes_on_by_itself(kind: str, steps: int) -> None:
    model, draw = model_of(kind), random.Random(4)
    rows = [fed(model, draw, length, steps + 3) for length in (3, WINDOW, 11)]
    pool = new_pool(model)
    for each in rows:
        pool.join(each.row)
    for _ in range(steps):
        forward(pool, rows)
    for each in rows:
        cache = pool.extract(each.row)
        kinds = [type(leaf) for leaf in leaves(cache)]
        assert kinds == [type(leaf) for leaf in leaves(Lanes(model).new_cache())]
        for token in each.ids[each.row.length :]:
            each.row.stepped += 1
            each.compare(step_alone(model, token, cache))
        each.assert_close()


def windowed(window: int) -> Any:
    return model_of("gemma3_text", sliding_window=window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 255, 256, 300])
def test_a_ring_of_any_width_grows_fills_and_wraps(window: int) -> None:
    model, draw = windowed(window), random.Random(5)
    lengths = sorted({1, 250, max(window - 3, 1), window, window + 1, 2 * window + 1})
    rows = [fed(model, draw, length, 9) for length in lengths]
    pool = new_pool(model)
    for each in rows:  # the first ones are short: the ring has to grow beside them
        pool.join(each.row)
        if not each.is_over:
            forward(pool, rows[: len(pool.rows)])
    for _ in range(9 - len(rows)):
        forward(pool, rows)
    for each in rows:
        each.assert_close()


@pytest.mark.parametrize("chunk", [1, 3, WINDOW, WINDOW + 1, 30])
def test_a_ring_takes_a_window_however_its_prompt_was_cut(chunk: int) -> None:
    """mlx-lm's own cache lies in memory in another way after each of these."""
    model, draw = windowed(WINDOW), random.Random(chunk)
    rows = [fed(model, draw, 30, 4), fed(model, draw, 5, 4)]
    for each in rows:
        each.row.cache = Lanes(model).new_cache()
        prompt = each.ids[: each.row.fed]
        for at in range(0, len(prompt), chunk):
            model(mx.array([prompt[at : at + chunk]]), cache=each.row.cache)
            mx.eval(cache_arrays(each.row.cache))
    pool = new_pool(model)
    for each in rows:
        pool.join(each.row)
    for _ in range(4):
        forward(pool, rows)
    for each in rows:
        each.assert_close()


# ------------------------------------------------------------------------------- neighbours


def contents(pool: Pool) -> dict[Row, list[np.ndarray]]:
    """Everything that the pool holds of each row."""
    found = {}
    for row in pool.rows:
        arrays = cache_arrays(pool.extract(row))
        found[row] = [np.array(array) for array in arrays]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_the_same_to_the_bit_after_a_row_left_or_joined(kind: str) -> None:
    model, draw = model_of(kind), random.Random(6)
    rows = [fed(model, draw, length, 7) for length in (3, WINDOW, 11, 4, 40)]
    pool = new_pool(model)
    for each in rows[:4]:
        pool.join(each.row)
    forward(pool, rows)
    for change in ("first", "join", "middle", "last", "resize", "alone"):
        before = contents(pool)
        if change == "join":
            pool.join(rows[4].row)
        elif change == "resize":
            pool._resize(9, 1024)
        else:
            index = {"middle": 1, "last": len(pool.rows) - 1}.get(change, 0)
            pool.leave(pool.rows[index], keeps_cache=False)
        after = contents(pool)
        both = before.keys() & after.keys()
        assert len(both) >= len(before) - 1 and both
        for row in both:
            for one, other in zip(before[row], after[row], strict=True):
                assert np.array_equal(one, other), change
        forward(pool, rows)
    for each in rows:
        each.assert_close()


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gemma3_text"])
def test_a_row_full_of_nan_hurts_nobody_who_comes_after_it(kind: str) -> None:
    """A NaN that is masked still poisons what attention sums up (engine-notes section 2), so what a
    slot keeps of an earlier row must not be looked at, or be gone."""
    model, draw = model_of(kind), random.Random(7)
    bad, moved, good = (fed(model, draw, length, 3) for length in (40, 3, 3))
    for leaf in leaves(bad.row.cache or []):
        leaf.keys, leaf.values = (each * float("nan") for each in (leaf.keys, leaf.values))
    pool = new_pool(model)
    pool.join(bad.row)
    pool.join(moved.row)
    pool.leave(bad.row, keeps_cache=False)  # the other one moves into its slot
    forward(pool, [moved])
    pool.leave(moved.row, keeps_cache=True)
    pool.join(good.row)
    pool.join(moved.row)
    forward(pool, [moved, good])
    for each in (moved, good):
        each.assert_close()


# -------------------------------------------------------------------------------- the judge


def judged(model: Any) -> bool:
    lanes = Lanes(model)
    for _ in judge(model, lanes, "float32", VOCAB):
        assert not lanes.may_pool, "not before it is sure"
    return lanes.may_pool


@pytest.mark.slow
@pytest.mark.parametrize("kind", POOLED)
def test_models_that_give_the_same_logits_share_a_forward(kind: str) -> None:
    assert judged(model_of(kind))


@pytest.mark.parametrize("kind", ALONE)
def test_models_that_would_not_run_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    assert not judged(model_of(kind))


def late(self: Full) -> mx.array:
    return mx.maximum(self.plan.offsets - 1, 0)


def unmasked(self: Full, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
    assert self.keys is not None
    return mx.ones((1, 1, 1, min(self.plan.columns, self.keys.shape[2])), dtype=mx.bool_)


@pytest.mark.parametrize(
    ("where", "name", "fault", "kind"),
    [
        (Full, "_column", late, "llama"),
        (Full, "make_mask", unmasked, "llama"),
        (Ring, "_column", late, "gemma3_text"),
        (Ring, "make_mask", unmasked, "gemma3_text"),
        (States, "load", lambda self, slot, cache, *room: None, "mamba"),
    ],
    ids=["write", "mask", "ring-write", "ring-mask", "states"],
)
def test_the_judge_sees_a_wrong_slot(
    where: Any,
    name: str,
    fault: Any,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(where, name, fault)
    assert not judged(model_of(kind))


# ------------------------------------------------------------------------------- their bounds


@pytest.mark.parametrize(
    "positions", [[], [-1], [0, 256], [256], [3, -1, 4]], ids=["none", "-1", "256", "one", "mid"]
)
def test_a_plan_that_leaves_the_buffers_is_refused(positions: list[int]) -> None:
    with pytest.raises(IndexError):
        Plan().set(0, positions, 256)


@pytest.mark.parametrize("shape", [(2, 2, 2, 16), (1, 2, 1, 16), (3, 2, 1, 16)])
def test_slots_take_one_token_of_each_row(shape: tuple[int, ...]) -> None:
    plan = Plan()
    plan.set(0, [3, 4], 256)
    full = Full(plan)
    full.keys, full.values = mx.zeros((4, 2, 256, 16)), mx.zeros((4, 2, 256, 16))
    with pytest.raises(ValueError, match=r"1 token.s. of each row"):
        full.update_and_fetch(mx.ones(shape), mx.ones(shape))
    assert not mx.any(full.keys).item()


@pytest.mark.parametrize(
    ("positions", "window", "turn", "seen"),
    [
        ([0, 2], None, None, [[0], [0, 1, 2]]),
        ([4, 5], 2, None, [[3, 4], [4, 5]]),
        ([1, 3], 4, 4, [[0, 1], [0, 1, 2, 3]]),
        ([4, 9], 4, 4, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ([5, 6], 2, 4, [[0, 1], [1, 2]]),  # 5 is in column 1, 4 in column 0
    ],
)
def test_a_mask_shows_what_each_row_may_see(
    positions: list[int], window: int | None, turn: int | None, seen: list[list[int]]
) -> None:
    plan = Plan()
    plan.set(0, positions, 16)
    mask = np.array(plan.mask(4 if turn else 8, window, turn))[:, 0, 0]
    assert [np.flatnonzero(row).tolist() for row in mask] == seen


def test_no_stale_mask_is_shown_at_the_next_position() -> None:
    plan = Plan()
    plan.set(0, [2], 16)
    assert np.array(plan.mask(16, None, None)).sum() == 3
    plan.set(0, [5], 16)
    assert np.array(plan.mask(16, None, None)).sum() == 6
