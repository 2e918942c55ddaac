"""Sampling against references: NumPy for what is kept, the spec for keys, itself for batching.

At a huge temperature every token that the filters keep is equally likely, so thousands of draws
show exactly which tokens were kept; no private function is needed to look inside.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mlxlite.engine import backend, sample  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.row import Row
from mlxlite.types import RowSpec, Sampling

import mlx.core as mx  # isort: skip

FLAT = 1e30  # a temperature at which the kept tokens are equally likely
DRAWS = 10_000


def row_of(sampling: Sampling, position: int = 0) -> Row:
    spec = RowSpec((1,), sampling, 1 << 30, frozenset())
    return Row(0, spec, lambda event: None, sampled=position)


def draw(logits: mx.array, rows: Sequence[Row]) -> list[int]:
    """What each of the rows draws from its own line of logits (B, V)."""
    how = sample.recipe(rows, logits.shape[-1])
    return sample.sample(logits, how, rows).tolist()  # type: ignore[return-value]


def draws(logits: np.ndarray, sampling: Sampling, count: int = DRAWS) -> np.ndarray:
    """Share (V,) of each token in `count` draws at different positions."""
    rows = [row_of(sampling, position) for position in range(count)]
    lines = mx.broadcast_to(mx.array(logits.astype(np.float32)), (count, logits.size))
    return np.bincount(draw(lines, rows), minlength=logits.size) / count


def logits_of(vocab: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab)


# --------------------------------------------------------------------- the NumPy reference


def softmax(values: np.ndarray) -> np.ndarray:
    grown = np.exp(values - values[np.isfinite(values)].max())
    return grown / grown.sum()


def kept(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Which tokens the filters of spec 20 section 4 keep, one filter after the other."""
    probs = softmax(logits)
    alive = probs.copy()
    if 0 < sampling.top_p < 1:
        order = np.argsort(probs)
        cut = order[np.cumsum(probs[order]) <= 1 - sampling.top_p]
        alive[cut[cut != probs.argmax()]] = 0
    if sampling.min_p:
        alive[np.log(np.maximum(alive, 1e-300)) < np.log(probs.max()) + np.log(sampling.min_p)] = 0
    if 0 < sampling.top_k < logits.size:
        alive[np.argsort(-alive)[sampling.top_k :]] = 0
    return alive > 0


FILTERS = [
    Sampling(FLAT, top_p=0.9),
    Sampling(FLAT, top_p=0.3),
    Sampling(FLAT, top_p=1e-9),
    Sampling(FLAT, top_k=1),
    Sampling(FLAT, top_k=7),
    Sampling(FLAT, top_k=39),
    Sampling(FLAT, min_p=0.05),
    Sampling(FLAT, min_p=1.0),
    Sampling(FLAT, top_p=0.95, min_p=0.01),
    Sampling(FLAT, top_p=0.8, top_k=3),
    Sampling(FLAT, top_p=0.5, top_k=30),
    Sampling(FLAT, top_k=5, min_p=0.2),
    Sampling(FLAT, top_p=0.9, top_k=9, min_p=0.02),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_keep_what_the_reference_keeps(sampling: Sampling) -> None:
    for seed in range(3):
        logits = logits_of(40, seed)
        assert ((draws(logits, sampling, 1000) > 0) == kept(logits, sampling)).all()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=3),
        Sampling(0.5, seed=2**63 + 5),
        Sampling(1.7, seed=4),
        Sampling(1.0, top_p=0.8, seed=5),
        Sampling(0.8, top_k=6, seed=6),
        Sampling(1.3, min_p=0.1, seed=7),
        Sampling(0.9, top_p=0.95, top_k=12, min_p=0.02, seed=8),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = logits_of(24, seed=11, spread=1.5)
    expected = softmax(
        np.where(kept(logits, sampling), np.log(softmax(logits)) / sampling.temperature, -np.inf)
    )
    share = draws(logits, sampling)
    assert (share[expected == 0] == 0).all()
    seen = expected > 0
    chi_square = (DRAWS * (share - expected)[seen] ** 2 / expected[seen]).sum()
    freedom = seen.sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom), "five standard deviations"


# ------------------------------------------------------------------------------------- greedy


def test_greedy_is_argmax() -> None:
    logits = mx.array(np.stack([logits_of(777, seed) for seed in range(9)]).astype(np.float32))
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        lines = logits.astype(dtype)
        greedy = draw(lines, [row_of(Sampling(seed=n)) for n in range(9)])
        assert greedy == mx.argmax(lines, axis=-1).tolist()
        mixed = [row_of(Sampling(top_p=0.5, top_k=3))] * 8 + [row_of(Sampling(1.0))]
        assert draw(lines, mixed)[:8] == greedy[:8]


# ------------------------------------------------------------------------------- independence


SAMPLINGS: list[Callable[[random.Random], Sampling]] = [
    lambda r: Sampling(),
    lambda r: Sampling(r.uniform(0.1, 3)),
    lambda r: Sampling(r.uniform(0.1, 3), top_p=r.uniform(0.1, 1)),
    lambda r: Sampling(r.uniform(0.1, 3), top_k=r.choice([1, 5, 64, 65, 200])),
    lambda r: Sampling(r.uniform(0.1, 3), min_p=r.uniform(0, 0.3)),
    lambda r: Sampling(r.uniform(0.1, 3), top_p=r.random(), top_k=20, min_p=0.01),
    lambda r: Sampling(1e6),
]


@pytest.mark.parametrize("vocab", [50, 512, 5000])
def test_a_row_draws_the_same_alone_in_a_batch_and_in_any_order(vocab: int) -> None:
    pick = random.Random(vocab)
    for trial in range(8):
        chosen = [pick.choice(SAMPLINGS)(pick) for _ in range(pick.randint(2, 9))]
        rows = [
            row_of(
                Sampling(s.temperature, s.top_p, s.top_k, s.min_p, pick.getrandbits(64)),
                pick.randint(0, 999),
            )
            for s in chosen
        ]
        lines = [logits_of(vocab, seed=100 * trial + n) for n in range(len(rows))]
        logits = mx.array(np.stack(lines).astype(np.float32))
        alone = [draw(logits[n : n + 1], [row])[0] for n, row in enumerate(rows)]
        assert draw(logits, rows) == alone
        order = pick.sample(range(len(rows)), len(rows))
        assert draw(logits[mx.array(order)], [rows[n] for n in order]) == [alone[n] for n in order]


@pytest.mark.parametrize(
    "neighbour",
    [
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, top_k=3),
        Sampling(1.0, top_k=99),
        Sampling(1, 0, 0, 0.5),
    ],
    ids=str,
)
def test_a_neighbours_filter_does_not_cut_the_tail_of_a_row_without_one(
    neighbour: Sampling,
) -> None:
    logits = -30 - np.arange(200) / 1000
    logits[3] = 0.0  # all others have 1e-13 each: cumulative sums reach 1 at once
    rows = [row_of(Sampling(FLAT), position) for position in range(64)]
    lines = mx.broadcast_to(mx.array(logits.astype(np.float32)), (65, 200))
    alone = draw(lines[:64], rows)
    assert len(set(alone)) > 30
    assert draw(lines, [*rows, row_of(neighbour)])[:64] == alone


NEUTRAL = [
    Sampling(1.0, top_p=1.0),
    Sampling(1.0, top_p=-1.0),
    Sampling(1.0, top_k=0),
    Sampling(1.0, top_k=300),
    Sampling(1.0, top_k=2**31 - 1),
    Sampling(1.0, min_p=0.0),
]


@pytest.mark.parametrize("sampling", NEUTRAL, ids=str)
def test_neutral_values_change_nothing(sampling: Sampling) -> None:
    lines = mx.array(np.stack([logits_of(300, seed) for seed in range(50)]).astype(np.float32))
    plain = draw(lines, [row_of(Sampling(1.0), n) for n in range(50)])
    assert draw(lines, [row_of(sampling, n) for n in range(50)]) == plain


# --------------------------------------------------------------------------------------- keys


def test_keys_are_those_of_the_specification() -> None:
    cases = [(seed, step) for seed in (0, 1, 77, 2**63, 2**64 - 1) for step in (0, 1, 2, 5000)]
    rows = [row_of(Sampling(1.0, seed=seed), step) for seed, step in cases]
    expected = [
        mx.random.key((seed ^ (((step + 1) * 0x9E3779B97F4A7C15) % 2**64)) % 2**64).tolist()
        for seed, step in cases
    ]
    assert sample.keys(rows).tolist() == expected
    assert len({tuple(key) for key in expected}) == len(cases)


def test_the_draw_is_gumbel_noise_of_that_key() -> None:
    logits = mx.array(logits_of(400).astype(np.float32))
    row = row_of(Sampling(0.7, seed=12), position=9)
    noise = mx.random.gumbel((400,), key=sample.keys([row])[0])
    logprobs = logits - mx.logsumexp(logits)
    assert draw(logits[None], [row]) == [mx.argmax(logprobs / 0.7 + noise).item()]


# ----------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    lines = mx.array(np.stack([logits_of(300, seed) for seed in range(20)]).astype(np.float32))
    cold = draw(lines, [row_of(Sampling(temperature, top_p=0.9), n) for n in range(20)])
    assert cold == mx.argmax(lines, axis=-1).tolist()
    sure = mx.where(mx.arange(300) == 7, 0.0, -200.0)[None]  # log-probability exactly 0
    assert draw(sure, [row_of(Sampling(temperature))]) == [7]


@pytest.mark.parametrize("temperature", [1e10, 1e39, 1e300, 1.7e308])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature: float) -> None:
    logits = logits_of(16)
    logits[:6] = -np.inf
    share = draws(logits, Sampling(temperature), 4000)
    assert (share[:6] == 0).all()
    assert np.abs(share[6:] - 0.1).max() < 0.03
    assert (draws(logits, Sampling(temperature, top_k=1), 50) > 0).sum() == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0),
        Sampling(1.0, top_p=0.9),
        Sampling(1.0, top_k=5),
        Sampling(1.0, min_p=0.1),
        Sampling(1.0, top_p=0.9, top_k=99, min_p=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30, 3e38])
def test_forbidden_tokens_are_never_drawn(sampling: Sampling, scale: float) -> None:
    logits = np.clip(logits_of(130) / 10, -1, 1) * scale
    logits[1::2] = -np.inf
    lines = mx.broadcast_to(mx.array(logits.astype(np.float32)), (200, 130))
    drawn = draw(lines, [row_of(sampling, n) for n in range(200)])
    assert all(token % 2 == 0 for token in drawn)
    if scale > 1:
        assert set(drawn) == {int(np.argmax(logits))}


def test_one_allowed_token_is_drawn() -> None:
    lines = mx.where(mx.arange(70) == 33, 1.5, -mx.inf)[None]
    for sampling in [Sampling(), Sampling(2.0), Sampling(1.0, 0.5), Sampling(1.0, 0.5, 64, 0.5)]:
        assert draw(lines, [row_of(sampling)]) == [33]


# ------------------------------------------------------------------------------------ largest


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 128, 1000, 4096, 4160, 9999])
@pytest.mark.parametrize("count", [1, 2, 40, 64, 65, 300, 1024])
def test_largest_equals_sorting(width: int, count: int) -> None:
    numbers = np.random.default_rng(width * count)
    for case in ("random", "forbidden", "ties", "sorted"):
        values = numbers.normal(0, 1, (3, width)).astype(np.float32)
        if case == "forbidden":
            values[numbers.random((3, width)) < 0.95] = -np.inf
        elif case == "ties":
            values = np.round(values)
        elif case == "sorted":
            values.sort(axis=-1)  # all of the answer lies in the last blocks
        expected = -np.sort(-values, axis=-1)[:, :count]
        assert np.array(sample.largest(mx.array(values), count)).tolist() == expected.tolist()


# -------------------------------------------------------------------------------------- masks


def test_a_mask_is_one_bit_a_token_little_end_first() -> None:
    for vocab in (1, 31, 32, 33, 64, 100):
        ids = {0, vocab - 1, vocab // 2}
        words = [0] * -(-vocab // 32)
        for token in ids:
            words[token // 32] |= 1 << token % 32
        for given in (words, tuple(words), memoryview(array("I", words))):
            bound = sample.bound(given, vocab)
            assert bound.dtype == mx.float32 and bound.shape == (vocab,)
            assert {n for n, most in enumerate(bound.tolist()) if most == math.inf} == ids
            assert sum(most == -math.inf for most in bound.tolist()) == vocab - len(ids)


def test_tokens_beyond_a_short_mask_are_forbidden_and_a_long_one_is_cut() -> None:
    most = math.inf
    assert sample.bound([0xFFFFFFFF], 40).tolist() == [most] * 32 + [-most] * 8
    assert sample.bound([0xFFFFFFFF] * 3, 40).tolist() == [most] * 40


def test_masks_touch_their_own_rows_only() -> None:
    logits = mx.array(np.stack([logits_of(70, seed) for seed in range(3)]).astype(np.float32))
    rows = [row_of(Sampling()) for _ in range(3)]
    assert sample.masked(logits, rows) is logits
    rows[1].mask = sample.bound([1 << 5, 1 << 3], 70)  # ids 5 and 35
    lines = np.array(sample.masked(logits, rows))
    assert (lines[[0, 2]] == np.array(logits)[[0, 2]]).all()
    assert set(np.flatnonzero(np.isfinite(lines[1]))) == {5, 35}
    assert lines[1][[5, 35]].tolist() == np.array(logits)[1][[5, 35]].tolist()
    half = sample.masked(logits.astype(mx.bfloat16), rows)
    assert (
        half.dtype == mx.bfloat16 and np.isfinite(np.array(half[1].astype(mx.float32))).sum() == 2
    )
