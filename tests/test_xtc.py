"""XTC, and every kind of sampler mixed in one batch, against NumPy (spec 20 sections 2 to 7).

XTC drops the likeliest tokens: all above the threshold but the least likely of these.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from mlxlite.engine import backend, sample  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.curves import Hlg
from mlxlite.types import Sampling, Tone
from tests import test_curves as numpy_curves
from tests.test_sample import FLAT, draw, draws, kept, logits_of, row_of, softmax

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.slow

V = 24


def left(logits: np.ndarray, how: Sampling, coin: bool) -> np.ndarray:
    """Which tokens all filters leave, bool (V,), if the coin of XTC says so or not."""
    alive = kept(logits, replace(how, top_k=0))
    if coin and how.xtc_probability > 0:
        q = np.where(alive, np.exp(logits - logits.max()), 0.0)
        q /= q.sum()
        above = q > how.xtc_threshold
        if above.any():
            out = above & (q > q[above].min())
            out[list(how.xtc_special_ids)] = False
            alive = alive & ~out
    if 0 < how.top_k < logits.size:
        order = np.argsort(np.where(alive, -logits, np.inf), kind="stable")
        alive = alive & np.isin(np.arange(logits.size), order[: how.top_k])
    return alive


def by_probability(*shares: float) -> np.ndarray:
    return np.log(np.array(shares) / sum(shares))


def seen(logits: np.ndarray, how: Sampling, count: int = 400) -> set[int]:
    return set(np.flatnonzero(draws(logits, replace(how, temperature=FLAT), count)).tolist())


def xtc(threshold: float, probability: float = 1.0, **more: object) -> Sampling:
    how = Sampling(1.0, xtc_probability=probability, xtc_threshold=threshold)
    return replace(how, **more)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- which tokens go


def test_by_hand() -> None:
    logits = by_probability(0.4, 0.3, 0.15, 0.1, 0.05)
    assert seen(logits, xtc(0.12)) == {2, 3, 4}, "the least likely one above the threshold stays"
    assert seen(logits, xtc(0.35)) == {0, 1, 2, 3, 4}, "a single one above it stays"
    assert seen(logits, xtc(0.45)) == {0, 1, 2, 3, 4}, "none above it"
    assert seen(logits, xtc(0.0)) == {4}, "all are above zero"
    assert seen(logits, xtc(0.5)) == {0, 1, 2, 3, 4}, "two halves are impossible"
    assert seen(by_probability(0.51, 0.49), xtc(0.5)) == {0, 1}


def test_special_tokens_are_spared_and_still_count() -> None:
    logits = by_probability(0.4, 0.3, 0.15, 0.1, 0.05)
    assert seen(logits, xtc(0.12, xtc_special_ids=(0,))) == {0, 2, 3, 4}
    assert seen(logits, xtc(0.12, xtc_special_ids=(2,))) == {2, 3, 4}, "the least, spared or not"
    assert seen(logits, xtc(0.0, xtc_special_ids=(0, 1, 99, 10**6))) == {0, 1, 4}


def test_equal_tokens_stay_or_go_together() -> None:
    assert seen(by_probability(0.3, 0.2, 0.2, 0.2, 0.1), xtc(0.15)) == {1, 2, 3, 4}
    assert seen(by_probability(0.3, 0.3, 0.3, 0.1), xtc(0.05)) == {3}
    assert seen(by_probability(0.25, 0.25, 0.25, 0.25), xtc(0.1)) == {0, 1, 2, 3}


def test_the_threshold_is_a_share_of_what_top_p_and_min_p_left() -> None:
    logits = by_probability(0.25, 0.2, 0.15, 0.1, 0.1, 0.1, 0.05, 0.05)
    assert seen(logits, xtc(0.22)) == set(range(8)), "of all: one above"
    assert seen(logits, xtc(0.22, top_p=0.55)) == {2}, "of 0.6: 0.42, 0.33 and 0.25 are above"
    assert seen(logits, xtc(0.22, min_p=0.59)) == {2}
    assert seen(logits, xtc(0.3, top_p=0.55)) == {1, 2}


def test_top_k_counts_what_is_left() -> None:
    logits = by_probability(0.4, 0.3, 0.15, 0.1, 0.05)
    assert seen(logits, xtc(0.12, top_k=2)) == {2, 3}
    assert seen(logits, xtc(0.12, top_k=2, top_p=0.86)) == {2, 3}
    assert seen(logits, xtc(0.12, top_k=1, xtc_special_ids=(1,))) == {1}
    assert seen(logits, xtc(0.12, 0.0, top_k=2)) == {0, 1}


def test_random_rows_keep_what_the_reference_keeps() -> None:
    pick = random.Random(3)
    for trial in range(30):
        logits = logits_of(V, trial, pick.choice([0.5, 1.5, 3.0]))
        how = xtc(
            pick.choice([0.0, 0.02, 0.05, 0.1, 0.3, 0.5]),
            top_p=pick.choice([0.0, 0.5, 0.9, 0.97]),
            min_p=pick.choice([0.0, 0.0, 0.02, 0.2]),
            top_k=pick.choice([0, 0, 1, 4, 23, 24, 99]),
            xtc_special_ids=tuple(pick.sample(range(V), pick.choice([0, 0, 2]))),
        )
        assert seen(logits, how) == set(np.flatnonzero(left(logits, how, True)).tolist())


# ---------------------------------------------------------------------------------- the coin


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_the_coin_falls_as_often_as_asked(probability: float) -> None:
    # Only with the coin is the last token ever alone.
    logits = by_probability(0.9, 0.1)
    share = draws(logits, xtc(0.05, probability), 3000)[1]
    expected = probability + (1 - probability) * 0.1
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / 3000) + 1e-12


def test_the_key_is_split_for_the_coin_and_the_draw() -> None:
    logits = mx.array(logits_of(V, 5).astype(np.float32))
    logprobs = logits - mx.logsumexp(logits)
    how = xtc(0.05, 0.5, temperature=0.8, seed=77)
    fallen = 0
    for position in range(60):
        row = row_of(how, position)
        coin_key, draw_key = mx.random.split(sample.keys([row])[0], 2)
        coin = mx.random.uniform(key=coin_key).item() <= 0.5
        noise = mx.random.gumbel((V,), key=draw_key)
        alive = mx.array(left(np.array(logits), how, coin))
        expected = mx.argmax(mx.where(alive, logprobs, -mx.inf) / 0.8 + noise).item()
        assert draw(logits[None], [row]) == [expected]
        fallen += coin
    assert 15 < fallen < 45


def test_probability_zero_takes_no_key() -> None:
    lines = mx.array(np.stack([logits_of(V, n) for n in range(50)]).astype(np.float32))
    plain = draw(lines, [row_of(Sampling(1.0), n) for n in range(50)])
    assert draw(lines, [row_of(xtc(0.0, 0.0), n) for n in range(50)]) == plain
    # Nor does it beside a row that does.
    beside = [*[row_of(xtc(0.0, 0.0), n) for n in range(50)], row_of(xtc(0.0, 1.0))]
    assert draw(mx.concatenate([lines, lines[:1]]), beside)[:50] == plain


def test_greedy_rows_and_curves_know_no_xtc() -> None:
    logits = by_probability(0.5, 0.3, 0.2)
    assert seen(logits, replace(xtc(0.1), tone=Tone())) == {0, 1, 2}
    assert seen(logits, replace(xtc(0.1), transfer=((1.0, 1.0), (100.0, 100.0)))) == {0, 1, 2}
    line = mx.array(logits.astype(np.float32))[None]
    assert draw(line, [row_of(replace(xtc(0.0), temperature=0.0))]) == [0]


def test_forbidden_tokens_stay_forbidden() -> None:
    logits = by_probability(0.4, 0.3, 0.15, 0.1, 0.05)
    logits[[0, 3]] = -np.inf
    assert seen(logits, xtc(0.0)) == {4}
    assert seen(logits, xtc(0.4)) == {1, 2, 4}
    assert seen(logits, xtc(0.25)) == {2, 4}, "0.6, 0.3 and 0.1 of what is allowed"


# ---------------------------------------------------------- all kinds of rows in one batch

CURVE = ((0.001, 0.00001), (1.0, 0.5), (20.0, 40.0), (100.0, 100.0))
KINDS = {
    "temperature": Sampling(0.7),
    "hot": Sampling(1.8),
    "top_p": Sampling(1.0, top_p=0.8),
    "top_k": Sampling(0.9, top_k=6),
    "min_p": Sampling(1.3, min_p=0.1),
    "xtc": xtc(0.08, 0.4, xtc_special_ids=(4, 9)),
    "xtc after all": xtc(0.05, 0.7, temperature=1.4, top_p=0.95, min_p=0.01),
    "all filters": xtc(0.06, 0.5, temperature=1.2, top_p=0.97, min_p=0.005, top_k=7),
    "tone": Sampling(0.9, tone=Tone()),
    "tight tone": Sampling(1.5, top_p=0.1, tone=Tone(1.0, 0.5, 0.25, 2.0)),
    "transfer": Sampling(0.0, transfer=CURVE),
    "transfer first": Sampling(2.0, top_k=1, tone=Tone(), transfer=CURVE),
    "greedy": Sampling(0.0, top_p=0.9, xtc_probability=1.0),
}


def expected_shares(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Probability (V,) of each token, by exactly one path (section 2)."""
    logprobs = np.log(softmax(logits))
    if how.transfer:
        return softmax(np.array([numpy_curves.hermite(how.transfer, u) for u in logprobs]))
    if how.temperature == 0:
        return (np.arange(logits.size) == logits.argmax()).astype(float)
    if how.tone is not None:
        t = how.tone
        hlg = Hlg(t.width, t.shoulder, t.toe, t.pivot_offset)
        return softmax(numpy_curves.toned(logprobs, hlg, how.temperature))
    sides = [
        softmax(np.where(left(logits, how, coin), logprobs / how.temperature, -np.inf))
        for coin in (False, True)
    ]
    return (1 - how.xtc_probability) * sides[0] + how.xtc_probability * sides[1]


def test_every_kind_follows_its_distribution_beside_all_others() -> None:
    count = 800
    logits = logits_of(V, seed=21, spread=1.5)
    kinds = [replace(how, seed=100 + n) for n, how in enumerate(KINDS.values())]
    rows = [row_of(how, position) for position in range(count) for how in kinds]
    lines = mx.broadcast_to(mx.array(logits.astype(np.float32)), (len(rows), V))
    how, row_keys = sample.recipe(rows, V), sample.keys(rows)
    ids, is_certain = sample.draw(lines, how, row_keys, None)
    assert is_certain is None
    drawn = np.array(ids).reshape(count, len(kinds))
    for n, name in enumerate(KINDS):
        share = np.bincount(drawn[:, n], minlength=V) / count
        expected = expected_shares(logits, kinds[n])
        assert (share[expected == 0] == 0).all(), name
        likely = expected > 5e-3  # a chi-square of rare cells has no limit
        chi_square = (count * (share - expected)[likely] ** 2 / expected[likely]).sum()
        freedom = max(likely.sum() - 1, 1)
        assert chi_square < freedom + 5 * math.sqrt(2 * freedom), name
        assert np.abs(share - expected).sum() / 2 < 0.1, f"{name}: total variation"
    # The best eight candidates give the very same draws, or say that they cannot know.
    few, is_certain = sample.draw(lines, how, row_keys, 8)
    assert is_certain is not None
    sure = np.array(is_certain)
    assert (np.array(few)[sure] == np.array(ids)[sure]).all()
    assert sure.reshape(count, -1).any(axis=0).sum() > len(kinds) // 2
