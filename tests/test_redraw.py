"""Preselected candidates give the plain sort's tokens, bit for bit, or say that they may not.

In the batch a draw that may be wrong is repeated one step late; a wrong token is taken out of cache
and history. `Fickle` batches look at two candidates only, so that this happens at every step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlxlite.engine import backend, batch, sample  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.lanes import cache_arrays
from mlxlite.engine.row import Row
from mlxlite.engine.slots import is_trimmable
from mlxlite.types import Sampling, Tone
from tests.decoding import Fickle, Sorting, assert_close, prompt_of, row_of, run, tiny_model, twin
from tests.test_batch import FAMILIES

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.slow

# ------------------------------------------------------------------------ one draw, exactly


def mixtures(pick: random.Random) -> list[Sampling]:
    """Rows of every kind, whose filters end anywhere."""
    xtc: dict[str, Any] = {"xtc_probability": 0.8, "xtc_special_ids": (3, 11)}
    return [
        Sampling(),
        Sampling(1.1),
        *[Sampling(1.0, top_p=p) for p in (0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999)],
        *[Sampling(0.8, top_p=pick.random(), min_p=p) for p in (1e-6, 0.003, 0.1, 0.6)],
        *[Sampling(1.3, top_p=pick.random(), top_k=k) for k in (1, 7, 40)],
        Sampling(1.3, top_k=pick.choice([5, 40])),
        Sampling(1.0, min_p=pick.choice([1e-4, 0.02])),
        *[Sampling(1.0, xtc_threshold=t, **xtc) for t in (0.0, 0.001, 0.1)],
        Sampling(1.0, top_p=0.9, xtc_threshold=0.01, **xtc),
        Sampling(1.0, top_p=0.97, xtc_threshold=0.0, **xtc),
        Sampling(1.0, min_p=0.01, xtc_threshold=0.02, **xtc),
        Sampling(1.0, top_p=0.99, min_p=0.001, top_k=30, xtc_threshold=0.02, **xtc),
        Sampling(1.0, top_p=0.5, tone=Tone()),
        Sampling(1.0, top_p=0.5, transfer=((1.0, 0.5), (100.0, 100.0))),
    ]


def assert_exact(logits: mx.array, samplings: Sequence[Sampling], counts: Sequence[int]) -> float:
    """Certain rows keep and draw what sorting keeps and draws. Returns the share of certain ones.

    logits: (B, V). What is kept is compared too: most draws would not show a token too many.
    """
    rows = [row_of(how) for how in samplings]
    for position, row in enumerate(rows):
        row.sampled = position
    how, row_keys = sample.recipe(rows, logits.shape[-1]), sample.keys(rows)
    scores = logits.astype(mx.float32)
    logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    drawn, none = sample.draw(logits, how, row_keys, None)
    kept, also_none = sample._filtered(logprobs, how, row_keys, None)
    assert none is None and also_none is None
    known = 0.0
    for count in counts:
        few, is_certain = sample.draw(logits, how, row_keys, count)
        few_kept, _ = sample._filtered(logprobs, how, row_keys, count)
        certain = np.ones(len(rows), bool) if is_certain is None else np.array(is_certain)
        assert (np.array(few) == np.array(drawn))[certain].all()
        same = (np.array(few_kept) == np.array(kept)).all(axis=-1)
        is_greedy = np.array([s.is_greedy for s in samplings])
        assert same[certain & ~is_greedy].all(), [samplings[n] for n in np.flatnonzero(~same)]
        known += certain.mean() / len(counts)
    return known


def lines_of(count: int, vocab: int, spread: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (count, vocab)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("vocab", [50, 512, 4096 + 17])
def test_candidates_give_what_sorting_gives(vocab: int, spread: float) -> None:
    pick = random.Random(f"{vocab} {spread}")
    for seed in range(2 if vocab < 4000 else 1):
        samplings = mixtures(pick)
        lines = lines_of(len(samplings), vocab, spread, seed)
        for line in lines[seed::2]:  # a mask
            line[np.random.default_rng(seed).random(vocab) < 0.7] = -np.inf
        known = assert_exact(mx.array(lines), samplings, (8, 65, 1024))
        assert spread < 8 or known > 0.8, "peaked rows are certain"


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_candidates_of_a_real_vocabulary(spread: float) -> None:
    pick = random.Random(spread)
    samplings = pick.sample(mixtures(pick), 8)
    lines = lines_of(len(samplings), 49152, spread, 1)
    assert_exact(mx.array(lines), samplings, (64, 1024))


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_candidates_among_equal_values(steps: int) -> None:
    pick = random.Random(steps)
    for vocab in (50, 1000):
        samplings = mixtures(pick)
        lines = np.round(lines_of(len(samplings), vocab, 1.0, steps) * steps / 3) * (3 / steps)
        assert_exact(mx.array(lines), samplings, (8, 16, 100))
        assert_exact(mx.array(lines).astype(mx.bfloat16), samplings, (8, 100))
        assert_exact(mx.zeros(lines.shape), samplings, (8, 100))


def certainty(logits: Sequence[float], how: Sampling, count: int) -> bool | None:
    rows = [row_of(how)]
    recipe = sample.recipe(rows, len(logits))
    line = mx.array([list(logits)], dtype=mx.float32)
    _, is_certain = sample.draw(line, recipe, sample.keys(rows), count)
    return None if is_certain is None else bool(is_certain.item())


def test_a_draw_is_certain_only_if_the_candidates_hold_the_edge() -> None:
    flat = [0.0] * 20  # 5 % each
    assert certainty(flat, Sampling(1.0, top_p=0.33), 8) is True, "seven reach it, with all equals"
    assert certainty(flat, Sampling(1.0, top_p=0.38), 8) is False
    assert certainty(flat, Sampling(1.0, top_p=0.6), 8) is False
    assert certainty(flat, Sampling(1.0, top_p=0.6, min_p=1.0), 8) is True, "min-p keeps all equals"
    falling = [-float(n) for n in range(20)]
    assert certainty(falling, Sampling(1.0, top_p=0.99), 8) is True
    assert certainty(falling, Sampling(1.0, top_p=0.99999), 8) is False
    assert certainty(falling, Sampling(1.0, top_p=0.99999, min_p=0.01), 8) is True
    assert certainty(falling, Sampling(1.0, top_p=0.99999, min_p=1e-8), 8) is False
    assert certainty(falling, Sampling(1.0, top_k=12, top_p=0.99), 8) is True, "twelve candidates"
    for sure in (Sampling(1.0), Sampling(1.0, top_k=12), Sampling(1.0, min_p=0.1)):
        assert certainty(flat, sure, 8) is None
    assert certainty(flat, Sampling(1.0, top_p=0.6), 20) is None, "that is all of them"
    assert certainty([0.0] * 5000, Sampling(1.0, top_p=0.6), 1025) is None, "sorting is no dearer"


def test_what_is_uncertain_may_indeed_differ() -> None:
    samplings = [Sampling(1.0, top_p=0.9, seed=n) for n in range(20)]
    rows = [row_of(how) for how in samplings]
    how, row_keys = sample.recipe(rows, 4113), sample.keys(rows)
    lines = mx.array(lines_of(20, 4113, 0.01, 2))
    few, is_certain = sample.draw(lines, how, row_keys, 8)
    assert is_certain is not None and not any(is_certain.tolist())  # type: ignore[arg-type]
    assert few.tolist() != sample.draw(lines, how, row_keys, None)[0].tolist()


def test_neighbours_do_not_change_the_certain_and_a_large_k_sorts() -> None:
    lines = mx.array(lines_of(2, 4113, 3.0, 4))
    mine = Sampling(1.0, top_p=0.3, xtc_probability=1.0, xtc_threshold=0.01, seed=5)
    for neighbour in (Sampling(), Sampling(1.0, top_k=200), Sampling(1.0, top_k=1025)):
        rows = [row_of(mine), row_of(neighbour)]
        how, row_keys = sample.recipe(rows, 4113), sample.keys(rows)
        ids, is_certain = sample.draw(lines, how, row_keys, 64)
        alone, _ = sample.draw(lines[:1], sample.recipe(rows[:1], 4113), row_keys[:1], None)
        assert is_certain is None or is_certain[0].item()
        assert ids[:1].tolist() == alone.tolist()
        assert (is_certain is None) == (neighbour.top_k > 1024)


# --------------------------------------------------------------- through the batch, two at most

FLAT = [
    Sampling(2.0, top_p=0.95, seed=1),
    Sampling(3.0, top_p=0.9, seed=2),
    Sampling(2.0, top_p=0.99, min_p=1e-5, seed=3),
    Sampling(2.0, top_p=0.9, xtc_probability=0.7, xtc_threshold=0.01, seed=4),
    Sampling(
        2.0,
        top_p=0.95,
        seed=6,
        logit_bias=((40, 2.0),),
        repetition_penalty=1.4,
        repetition_context=3,
        presence_penalty=0.8,
        presence_context=0,
        frequency_penalty=0.7,
        frequency_context=5,
    ),
]
MIXED = [
    *FLAT,
    Sampling(1.2, top_p=0.97, top_k=9),
    Sampling(),
    Sampling(1.0),
    Sampling(0.9, top_k=5, seed=9),
    Sampling(1.0, top_p=0.2),
]


def assert_as_sorted(
    rows: Sequence[Row],
    pick: random.Random | None = None,
    *,
    after: Callable[[Row, list[int]], None] | None = None,
    prepare: Callable[[Row], None] = lambda row: None,
    cancel: float = 0.0,
) -> Fickle:
    """Run the rows together with two candidates, and each alone by sorting."""
    fickle = Fickle(tiny_model())
    for row in rows:
        prepare(row)
    told = run(fickle, rows, pick, after=after, cancel=cancel)
    for row, heard in zip(rows, told, strict=True):
        alone = twin(row)
        prepare(alone)
        sorting = Sorting(tiny_model())
        expected = run(sorting, [alone], after=after)[0]
        assert sorting.redraws == 0
        is_whole = len(heard.ids) == len(expected.ids)
        assert is_whole or cancel, "none was lost"
        assert heard.ids == expected.ids[: len(heard.ids)]
        assert_close(heard.logprobs, expected.logprobs[: len(heard.ids)])
    return fickle


@pytest.mark.parametrize("how", FLAT, ids=range(len(FLAT)))
@pytest.mark.parametrize("length", [1, 9])
def test_a_row_alone_says_what_sorting_says(how: Sampling, length: int) -> None:
    fickle = assert_as_sorted([row_of(how, prompt_of(length), 14)])
    assert fickle.redraws >= fickle.reruns >= 5, "at every other token; one drawn again is certain"


@pytest.mark.parametrize("seed", range(3))
def test_rows_join_and_leave_while_others_are_redrawn(seed: int) -> None:
    pick = random.Random(seed)
    rows = [
        row_of(
            replace(pick.choice(MIXED), seed=100 * seed + n),
            prompt_of(pick.randint(1, 20), n),
            pick.randint(1, 12),
            top_logprobs=pick.choice([None, None, 0, 2, 5, 20]),
        )
        for n in range(10)
    ]
    fickle = assert_as_sorted(rows, pick, cancel=0.1)
    assert fickle.reruns > 5


def test_all_rows_of_a_step_are_redrawn() -> None:
    rows = [row_of(how, prompt_of(5, n), 8, top_logprobs=n) for n, how in enumerate(FLAT * 2)]
    assert assert_as_sorted(rows).reruns > 30


@pytest.mark.parametrize("asks", [(0, 5), (2, 5), (None, 3), (20, None)])
def test_log_probabilities_of_a_redrawn_row_and_its_neighbour(asks: Sequence[int | None]) -> None:
    rows = [
        row_of(how, prompt_of(4), 8, top_logprobs=k) for how, k in zip(FLAT, asks, strict=False)
    ]
    assert assert_as_sorted(rows).reruns > 4


def test_a_neighbour_whose_k_makes_all_rows_sort() -> None:
    # Its draws are all certain, and the redrawn row's must be so too. A real vocabulary is needed
    # for a k that large, so the limit comes down instead.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "MOST_CANDIDATES", 128)
        for seed in range(3):
            rows = [
                row_of(replace(FLAT[0], seed=seed), max_tokens=12),
                row_of(Sampling(1.0, top_k=200, seed=seed), prompt_of(3), max_tokens=6),
            ]
            assert_as_sorted(rows, random.Random(seed))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_last_token_is_redrawn_too(max_tokens: int) -> None:
    redraws = reruns = 0
    for how in FLAT[:4]:
        fickle = assert_as_sorted([row_of(how, max_tokens=max_tokens, top_logprobs=3)])
        redraws, reruns = redraws + fickle.redraws, reruns + fickle.reruns
    assert redraws > 2 * max_tokens
    assert (reruns > 0) == (max_tokens > 1), "nothing comes after the last one"


def test_a_redrawn_token_may_be_the_end_and_a_wrong_one_is_not() -> None:
    # How an answer goes with sorting, then the same with each of its tokens as EOS; and with the
    # two likeliest tokens, which the wrong draws take, as EOS.
    for how in FLAT[:2]:
        plain = run(Sorting(tiny_model()), [row_of(how, max_tokens=7)])[0].ids
        fickle = Fickle(tiny_model())
        for token in dict.fromkeys(plain):
            told = run(
                fickle, [row_of(how, max_tokens=7, eos=(token,)), row_of(FLAT[4], max_tokens=4)]
            )
            assert told[0].ids == plain[: plain.index(token) + 1]
        assert fickle.reruns > 20
        others = set(range(512)) - set(plain)
        assert run(fickle, [row_of(how, max_tokens=7, eos=others)])[0].ids == plain


def test_a_steered_row_is_drawn_late_and_redrawn() -> None:
    forced = {3: (77, 78), 6: (5,)}
    allowed = sample.bound([0xFFFFFFFF] * 8, 512)  # the first half

    def steer(row: Row, ids: list[int]) -> None:
        if row.is_steered:
            row.forced.extend(forced.get(len(ids), ()))
            row.mask = allowed if 7 <= len(ids) < 10 else None

    def opening(row: Row) -> None:
        if row.is_steered:
            row.forced.append(9)

    for how, pick in ((FLAT[0], None), (FLAT[4], random.Random(1))):
        rows = [
            row_of(how, prompt_of(6), 14, is_steered=True, top_logprobs=4),
            row_of(FLAT[1], prompt_of(3), 9),
            row_of(FLAT[4], prompt_of(1), 12, is_steered=True),
        ]
        fickle = assert_as_sorted(rows, pick, after=steer, prepare=opening)
        assert fickle.reruns > 10


def test_a_row_cancelled_with_a_wrong_token_in_flight_leaves_the_others_alone() -> None:
    # Whoever is cancelled, whenever: the wrong token of an ended row is nobody's business.
    for seed in range(2):
        rows = [row_of(how, prompt_of(4, n), 8) for n, how in enumerate(FLAT)]
        assert_as_sorted(rows, random.Random(seed), cancel=0.5)


# ----------------------------------------------------------------------- which models can


@pytest.mark.parametrize("kind", FAMILIES)
def test_caches_that_cannot_give_a_token_back_are_sorted_at_once(kind: str) -> None:
    model = tiny_model(model_type=kind, **FAMILIES[kind])
    fickle = Fickle(model)
    rows = [row_of(FLAT[0], prompt_of(12), 8), row_of(FLAT[4], prompt_of(3), 8)]
    told = run(fickle, rows)
    assert [heard.ids for heard in told] == [
        run(Sorting(model), [twin(row)])[0].ids for row in rows
    ]
    assert (fickle.reruns > 5) == (fickle.redraws > 5) == (kind == "llama")


def test_only_caches_that_forget_for_good_are_trusted() -> None:
    from mlx_lm.models import cache as caches  # only after a model was built

    others = caches.RotatingKVCache(8), caches.ArraysCache(2), caches.ConcatenateKVCache()
    assert not any(map(is_trimmable, others))
    for name in ("KVCache", "QuantizedKVCache"):
        made = getattr(caches, name)()
        assert is_trimmable(made)
        feed = mx.arange(64, dtype=mx.float32).reshape(1, 1, 1, 64)
        for step in range(3):
            made.update_and_fetch(feed + step, feed)
        made.trim(1)
        made.update_and_fetch(feed + 9, feed)
        assert made.offset == 3
        state = [leaf for leaf in cache_arrays([made]) if leaf.ndim == 4]
        assert state and all(leaf.shape[2] >= 3 for leaf in state)
        keys = made.update_and_fetch(feed, feed)[0]
        assert (keys[0] if isinstance(keys, tuple) else keys).shape[2] == 4, name


# ------------------------------------------------------------------------ how many to look at


def test_the_number_of_candidates_grows_and_relaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_FEWEST_CANDIDATES", 2)
    monkeypatch.setattr(batch, "_RELAX_AFTER", 4)
    made = batch.Batch(tiny_model())
    made.vocab_size = 512
    seen: list[int] = []
    how = FLAT[0]
    expected = run(Sorting(tiny_model()), [row_of(how, max_tokens=30)])[0].ids
    row = row_of(how, max_tokens=30)
    told = run(made, [row], after=lambda row, ids: seen.append(made._candidates))
    assert told[0].ids == expected
    assert seen[0] == 2 and max(seen) >= 128
    ratios = {after / before for before, after in zip(seen, seen[1:], strict=False)}
    assert ratios >= {1, 4, 0.25}, "it grew, and fell again"
    run(made, [row_of(Sampling(), max_tokens=30)])
    assert made._candidates == 2, "back at the fewest, and never below"


def test_a_row_that_ends_does_not_make_the_others_sort() -> None:
    asked: list[int | None] = []
    real = sample.draw

    def spy(logits: mx.array, how: Any, keys: mx.array, candidates: int | None) -> Any:
        asked.append(candidates)
        return real(logits, how, keys, candidates)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "draw", spy)
        model = tiny_model()
        made = batch.Batch(model)
        made.vocab_size = 512
        peaked = Sampling(0.5, top_p=0.1)
        run(made, [row_of(peaked, max_tokens=9, is_steered=True), row_of(peaked, eos=range(512))])
    assert asked == [64] * len(asked)


# ---------------------------------------------------------------------------------------- cost


def fastest_ms(step: Callable[[], Any], times: int = 12) -> float:
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        mx.eval(step())
        best = min(best, time.perf_counter() - started)
    return best * 1000


@pytest.mark.bench
@pytest.mark.parametrize("count", [1, 16])
def test_what_sampling_costs(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    vocab = 49152
    numbers = np.random.default_rng(1)
    lines = numbers.normal(0, 3, (count, vocab))
    for line in lines:  # the few tokens that a trained model is sure of
        line[numbers.choice(vocab, 8, replace=False)] = 14 + numbers.normal(0, 2, 8)
    logits = mx.array(lines.astype(np.float32))
    everything = Sampling(
        0.8,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        xtc_probability=0.5,
        xtc_threshold=0.1,
        logit_bias=((5, 1.0),),
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
    )
    bare = Sampling(0.8)
    figures: dict[str, float] = {}
    for name, how, asks, candidates in (
        ("greedy", Sampling(), None, 64),
        ("temperature", bare, None, 64),
        ("top-p 0.9", replace(bare, top_p=0.9), None, 64),
        ("all filters", replace(everything, repetition_penalty=0, presence_penalty=0), None, 64),
        ("everything", everything, None, 64),
        ("everything, top 5 logprobs", everything, 5, 64),
        ("everything, sorted", everything, None, None),
    ):
        made = Fickle(tiny_model(), 64 if candidates else 1 << 20)
        made.vocab_size = vocab
        rows = [row_of(replace(how, seed=n), top_logprobs=asks) for n in range(count)]
        for row in rows:
            row.cache = []
            row.penalties = batch.penalties_of(row.spec.sampling, range(500), vocab)
        token = mx.array(7, dtype=mx.uint32)

        def step(made: Fickle = made, rows: list[Row] = rows, token: mx.array = token) -> Any:
            for row in rows:
                if row.penalties is not None:
                    row.penalties.push(token)
            inputs = mx.broadcast_to(token, (len(rows),))
            drawn = made._draw(logits, rows, *made._looked_at(rows, inputs, set()))
            return [drawn.arrays, made._arrays(rows)]

        figures[name] = fastest_ms(step)
    with capsys.disabled():
        listed = ", ".join(f"{name} {ms:.2f}" for name, ms in figures.items())
        print(f"\nsampling ({count}, {vocab}), ms: {listed}")
