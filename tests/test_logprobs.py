"""Log-probabilities: those of the model after penalties and masks, whatever the sampler did.

The oracle runs the whole sequence without a cache and takes NumPy's log-softmax of it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from mlxlite.engine import backend, sample  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.drawn import Drawn, add_logprobs, most_logprobs
from mlxlite.engine.row import Row
from mlxlite.engine.worker import Worker
from mlxlite.types import Event, Finish, Guide, RowSpec, Sampling, TokenLogprob, Tone, Verdict
from tests.decoding import (
    Fickle,
    Sorting,
    logits_after,
    penalised,
    prompt_of,
    row_of,
    run,
    tiny_model,
)
from tests.rows import PROMPT, Heard, Scripted, mask_of

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.slow

NEAR = 2e-4  # float32 with a cache against float32 without


def log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64)
    top = z.max()
    return z - top - np.log(np.exp(z - top).sum())


def assert_entry(entry: TokenLogprob | None, token: int, logprobs: np.ndarray, count: int) -> None:
    """An entry is what logprobs (V,) say of this token and of the best `count`."""
    assert entry is not None and entry.id == token
    assert entry.logprob == pytest.approx(logprobs[token], abs=NEAR)
    ids, values = [token for token, _ in entry.top], [value for _, value in entry.top]
    possible = int(np.isfinite(logprobs).sum())
    assert len(ids) == len(set(ids)) == min(count, possible)
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(np.sort(logprobs)[::-1][: len(values)], abs=NEAR)
    assert values == pytest.approx(logprobs[ids], abs=NEAR)
    if token in ids:
        assert values[ids.index(token)] == entry.logprob, "one number, not two"


def assert_answer(
    row: Row, ids: Sequence[int], entries: Sequence[TokenLogprob | None], **mask: np.ndarray
) -> None:
    """Every token of a row has its entry. mask: what was allowed, bool (V,), or all."""
    spec = row.spec
    assert spec.top_logprobs is not None and len(entries) == len(ids)
    so_far = list(spec.prompt_ids)
    for token, entry in zip(ids, entries, strict=True):
        logits = penalised(logits_after(tiny_model(), so_far), so_far, spec.sampling)
        logits = np.where(mask.get("mask", np.True_), logits, -np.inf)
        with np.errstate(divide="ignore"):
            assert_entry(entry, token, log_softmax(logits), spec.top_logprobs)
        so_far.append(token)


HOW = [
    Sampling(),
    Sampling(1.5, seed=1),
    Sampling(0.3, top_p=0.2, top_k=3, seed=2),
    Sampling(2.0, min_p=0.3, seed=3),
    Sampling(1.2, xtc_probability=1.0, xtc_threshold=0.01, seed=4),
    Sampling(1.0, tone=Tone(), seed=5),
    Sampling(1.0, transfer=((1.0, 0.2), (100.0, 100.0)), seed=6),
    Sampling(
        0.9,
        seed=7,
        logit_bias=((40, 4.0), (41, -100.0)),
        repetition_penalty=1.5,
        presence_penalty=1.0,
        presence_context=2,
        frequency_penalty=-0.7,
        frequency_context=0,
    ),
]


# --------------------------------------------------------------------- what they are


@pytest.mark.parametrize("how", HOW, ids=range(len(HOW)))
def test_they_come_before_temperature_and_filters_and_after_penalties(how: Sampling) -> None:
    row = row_of(how, max_tokens=6, top_logprobs=4)
    told = run(Sorting(tiny_model()), [row])[0]
    assert_answer(row, told.ids, told.logprobs)


@pytest.mark.parametrize("count", range(21))
def test_as_many_of_the_best_as_asked(count: int) -> None:
    row = row_of(HOW[1], max_tokens=2, top_logprobs=count)
    told = run(Sorting(tiny_model()), [row])[0]
    assert_answer(row, told.ids, told.logprobs)


def test_each_row_of_a_batch_gets_what_it_asked_for() -> None:
    pick = random.Random(4)
    asks = [None, 0, 1, 5, 20, None, 2, 3]
    rows = [
        row_of(how, prompt_of(pick.randint(1, 9), n), pick.randint(2, 7), top_logprobs=count)
        for n, (how, count) in enumerate(zip(HOW, asks, strict=True))
    ]
    told = run(Sorting(tiny_model()), rows, pick)
    for row, heard in zip(rows, told, strict=True):
        if row.spec.top_logprobs is None:
            assert heard.logprobs == [None] * len(heard.ids)
        else:
            assert_answer(row, heard.ids, heard.logprobs)


def test_nothing_is_worked_out_if_no_row_asks() -> None:
    rows = [row_of(Sampling()), row_of(Sampling(1.0))]
    assert most_logprobs(rows) is None
    assert most_logprobs([*rows, row_of(Sampling(), top_logprobs=0)]) == 0
    assert most_logprobs([*rows, row_of(Sampling(), top_logprobs=3)]) == 3


def test_redrawn_tokens_have_the_right_ones() -> None:
    flat = [dataclasses.replace(how, temperature=2.0, top_p=0.95) for how in (*HOW[:5], HOW[7])]
    rows = [
        row_of(how, prompt_of(3, n), 6, top_logprobs=(0, 5, 2)[n % 3]) for n, how in enumerate(flat)
    ]
    fickle = Fickle(tiny_model())
    told = run(fickle, rows)
    assert fickle.redraws > 12
    for row, heard in zip(rows, told, strict=True):
        assert_answer(row, heard.ids, heard.logprobs)


def test_forced_tokens_have_theirs() -> None:
    for is_alone in (True, False):
        row = row_of(HOW[1], max_tokens=8, is_steered=True, top_logprobs=3)
        row.forced.append(300)
        others = [] if is_alone else [row_of(HOW[7], top_logprobs=1), row_of(HOW[2])]

        def steer(row: Row, ids: list[int]) -> None:
            if row.is_steered and len(ids) == 4:
                row.forced.extend((7, 8))

        told = run(Sorting(tiny_model()), [row, *others], after=steer)[0]
        assert (told.ids[0], told.ids[4:6]) == (300, [7, 8])
        assert_answer(row, told.ids, told.logprobs)


@pytest.mark.parametrize("allowed", [(5, 77, 300), range(0, 512, 2)])
def test_a_mask_comes_first_and_what_it_forbids_is_never_listed(allowed: Sequence[int]) -> None:
    row = row_of(HOW[1], max_tokens=5, is_steered=True, top_logprobs=20)
    row.mask = sample.bound(mask_of(allowed), 512)
    told = run(Sorting(tiny_model()), [row])[0]
    assert set(told.ids) <= set(allowed)
    assert_answer(row, told.ids, told.logprobs, mask=np.isin(np.arange(512), allowed))


@pytest.mark.parametrize("vocab", [3, 50, 1000, 4113])
def test_all_that_is_listed_is_in_the_vocabulary(vocab: int) -> None:
    logits = np.full((2, vocab), -np.inf, dtype=np.float32)
    logits[0, -1], logits[1, [0, 2]] = 1.0, (2.0, 1.0)
    rows = [row_of(Sampling(), top_logprobs=20), row_of(Sampling(), top_logprobs=1)]
    drawn = Drawn(rows, mx.array([vocab - 1, 2], dtype=mx.uint32))
    add_logprobs(drawn, mx.array(logits), 20)
    first, second = drawn.read_logprobs()
    assert first == TokenLogprob(vocab - 1, 0.0, ((vocab - 1, 0.0),))
    assert_entry(second, 2, log_softmax(logits[1]), 1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("vocab", [50, 512, 4113])
def test_large_and_small_logits_in_all_dtypes(vocab: int, dtype: mx.Dtype) -> None:
    lines = np.random.default_rng(vocab).normal(0, 3, (6, vocab))
    lines *= np.array([[1e-3], [1], [1], [30], [100], [1000]])
    logits = mx.array(lines.astype(np.float32)).astype(dtype)
    rows = [row_of(Sampling(), top_logprobs=count) for count in (20, 1, 0, 7, 20, 20)]
    ids = list(range(6))
    drawn = Drawn(rows, mx.array(ids, dtype=mx.uint32))
    add_logprobs(drawn, logits, 20)
    for n, entry in enumerate(drawn.read_logprobs()):
        assert entry is not None
        expected = log_softmax(np.array(logits[n].astype(mx.float32)))
        count = rows[n].spec.top_logprobs
        values = [value for _, value in entry.top]
        assert entry.logprob == pytest.approx(expected[n], rel=1e-5, abs=1e-5)
        assert values == pytest.approx(np.sort(expected)[::-1][:count], rel=1e-5, abs=1e-5)
        assert [expected[token] for token, _ in entry.top] == pytest.approx(values, abs=1e-2)


# --------------------------------------------------------------- one for each token delivered


def ask(
    engine: Worker,
    count: int | None,
    max_tokens: int = 6,
    *,
    sampling: Sampling | None = None,
    eos: Sequence[int] = (),
    guide: Guide | None = None,
) -> Heard:
    heard = Heard()
    how = sampling or Sampling()
    engine.submit(RowSpec(PROMPT, how, max_tokens, frozenset(eos), guide, count), heard)
    assert heard.done
    return heard


def listed(events: Sequence[Event]) -> list[TokenLogprob]:
    for event in events:
        assert [entry.id for entry in event.logprobs] == list(event.ids)
    return [entry for event in events for entry in event.logprobs]


@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_every_event_has_one_a_token(engine: Worker, max_tokens: int) -> None:
    for count in (0, 3):
        heard = ask(engine, count, max_tokens)
        assert len(heard.ids) == max_tokens
        assert [len(entry.top) for entry in listed(heard.events)] == [count] * max_tokens
    assert all(event.logprobs == () for event in ask(engine, None, max_tokens).events)


def test_a_greedy_token_is_its_own_best(engine: Worker) -> None:
    for entry in listed(ask(engine, 2).events):
        assert entry.top[0] == (entry.id, entry.logprob)


def test_an_end_of_sequence_has_none(engine: Worker) -> None:
    plain = ask(engine, 2)
    assert len(set(plain.ids[:4])) == 4
    heard = ask(engine, 2, eos=plain.ids[3:4])
    assert (heard.finish, heard.ids) == (Finish.EOS, plain.ids[:3])
    assert listed(heard.events) == listed(plain.events)[:3]
    assert heard.events[-1].logprobs == ()
    first = ask(engine, 2, eos=plain.ids[:1])
    assert (first.finish, listed(first.events)) == (Finish.EOS, [])


@pytest.mark.parametrize("may_steer", [True, False])
def test_dropped_tokens_have_none(engine: Worker, may_steer: bool) -> None:
    plain = ask(engine, 1)

    def drop(so_far: list[int], ids: Sequence[int]) -> Verdict | None:
        return Verdict(keep=0) if len(so_far) in (2, 3) and ids else None

    heard = ask(engine, 1, guide=Scripted(drop, may_steer))
    assert heard.ids == plain.ids[:1] + plain.ids[3:]
    entries = listed(plain.events)
    assert listed(heard.events) == entries[:1] + entries[3:]

    for at in (3, 4):  # the fourth goes, the third stays

        def stop(so_far: list[int], ids: Sequence[int], at: int = at) -> Verdict | None:
            return Verdict(keep=at % 2, stop=True) if len(so_far) == at else None

        heard = ask(engine, 1, guide=Scripted(stop, may_steer))
        assert (heard.finish, heard.ids) == (Finish.GUIDE, plain.ids[:3])
        assert listed(heard.events) == entries[:3]


def test_forced_and_masked_tokens_through_the_border(engine: Worker) -> None:
    def steer(so_far: list[int], ids: Sequence[int]) -> Verdict | None:
        if not so_far:
            return Verdict(keep=0, forced=(300, 7))
        return Verdict(keep=1, mask=mask_of([4, 6]) if len(so_far) == 3 else None)

    heard = ask(engine, 5, guide=Scripted(steer))
    entries = listed(heard.events)
    assert heard.ids[:2] == [300, 7] and set(heard.ids[3:]) <= {4, 6}
    assert [len(entry.top) for entry in entries] == [5, 5, 5, 2, 2, 2]
    for entry in entries[3:]:
        assert np.exp([value for _, value in entry.top]).sum() == pytest.approx(1, abs=1e-5)
