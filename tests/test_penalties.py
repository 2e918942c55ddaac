"""Bias and penalties against a history that is a plain list, alone and through the real batch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from mlxlite.engine import backend  # noqa: F401  (first: it picks the BLAS)
from mlxlite.engine.penalties import History, Penalties, penalties_of
from mlxlite.engine.recent import adjusted, recent_of, strengths_of
from mlxlite.engine.row import Row
from mlxlite.types import Sampling
from tests.decoding import (
    Sorting,
    assert_close,
    logits_after,
    penalised,
    prompt_of,
    row_of,
    run,
    tiny_model,
    twin,
)

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.slow

V = 40
BIAS = ((3, 2.5), (7, -100.0), (39, 0.125), (0, 100.0))


def applied(sampling: Sampling, history: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """What the device makes of it: all but the last id are the prompt, the last one is pushed."""
    penalties = penalties_of(sampling, history[:-1], logits.size)
    if penalties is None:
        row = row_of(sampling, history)
        how = strengths_of([row])
        if how is None:
            return logits
        inputs = mx.array(history[-1:])
        recent = recent_of([row], inputs, [row], how.width, logits.size) if how.width else None
        return np.array(adjusted(mx.array(logits)[None], how, recent)[0])
    for token in history[-1:]:
        penalties.push(mx.array(token, dtype=mx.uint32))
    return np.array(penalties(mx.array(logits)))


def logits_of(seed: int, vocab: int = V) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


def penalty(kind: str, strength: float, context: int) -> Sampling:
    return Sampling(**{f"{kind}_penalty": strength, f"{kind}_context": context})


KINDS = ("repetition", "presence", "frequency")
WINDOWS = (1, 2, 20, 100, 0)  # 100 is more than any history here
TOGETHER = Sampling(
    logit_bias=BIAS,
    repetition_penalty=1.3,
    repetition_context=2,
    presence_penalty=0.7,
    presence_context=20,
    frequency_penalty=-0.4,
    frequency_context=0,
)


# ------------------------------------------------------------------------ the rules, one by one


@pytest.mark.parametrize("strength", [1.3, 0.5, 4.0, -0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_is_the_reference(kind: str, strength: float) -> None:
    if kind == "repetition":
        strength = abs(strength)
    pick = random.Random(kind + str(strength))
    for window in WINDOWS:
        sampling = penalty(kind, strength, window)
        for length in (1, 2, 3, 19, 20, 21, 60):
            history = pick.choices(range(V // 2), k=length)  # repeats are certain
            logits = logits_of(length)
            found = applied(sampling, history, logits)
            assert found.tolist() == penalised(logits, history, sampling).tolist()
            assert (found[V // 2 :] == logits[V // 2 :]).all()


def test_by_hand() -> None:
    logits = np.float32([2, -2, 0, 1, 5])
    history = [0, 1, 1, 2, 1]

    def after(**how: float) -> list[float]:
        return applied(Sampling(**how), history, logits).tolist()  # type: ignore[arg-type]

    assert after(repetition_penalty=2.0) == [1, -4, 0, 1, 5], "once an id, however often"
    assert after(presence_penalty=0.5) == [1.5, -2.5, -0.5, 1, 5]
    assert after(frequency_penalty=0.5) == [1.5, -3.5, -0.5, 1, 5]
    assert after(frequency_penalty=-1.0) == [3, 1, 1, 1, 5], "a reward"
    assert after(presence_penalty=1.0, presence_context=1) == [2, -3, 0, 1, 5]
    assert after(frequency_penalty=1.0, frequency_context=2) == [2, -3, -1, 1, 5]
    assert after(repetition_penalty=2.0, repetition_context=3) == [2, -4, 0, 1, 5]


def test_each_reads_what_the_one_before_left() -> None:
    sampling = Sampling(
        logit_bias=((0, -3.0), (1, 3.0), (3, 0.5)),  # over zero and back: before repetition
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    found = applied(sampling, [0, 1, 1, 2], np.float32([2, -2, 0, 1]))
    assert found.tolist() == [-2 - 0.75, 0.5 - 0.5 - 0.5, -0.75, 1.5]


def test_all_together_with_windows_of_their_own() -> None:
    pick = random.Random(1)
    for trial in range(60):
        windows = [pick.choice(WINDOWS) for _ in KINDS]
        sampling = Sampling(
            logit_bias=BIAS if trial % 2 else (),
            repetition_penalty=pick.choice([0.0, 0.8, 1.0, 1.1, 2.0]),
            repetition_context=windows[0],
            presence_penalty=pick.uniform(-2, 2),
            presence_context=windows[1],
            frequency_penalty=pick.uniform(-2, 2),
            frequency_context=windows[2],
        )
        history = pick.choices(range(V), k=pick.randint(1, 70))
        logits = logits_of(trial)
        expected = penalised(logits, history, sampling)
        assert applied(sampling, history, logits).tolist() == expected.tolist()


def test_an_empty_history_changes_nothing_but_the_bias() -> None:
    logits = logits_of(0)
    for window in WINDOWS:
        for kind in KINDS:
            sampling = penalty(kind, 1.7, window)
            assert Penalties(sampling, (), V)(mx.array(logits)).tolist() == logits.tolist()
    found = applied(TOGETHER, [], logits)
    assert found.tolist() == penalised(logits, [], TOGETHER).tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0, top_p=0.5, repetition_penalty=1.0),
        Sampling(repetition_penalty=0.0, repetition_context=0),
        Sampling(presence_penalty=0.0, frequency_penalty=0.0, presence_context=0),
    ],
)
def test_neutral_values_cost_no_object(sampling: Sampling) -> None:
    assert penalties_of(sampling, (1, 2, 3), V) is None


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_a_neutral_repetition_beside_others_is_neutral(strength: float) -> None:
    sampling = Sampling(repetition_penalty=strength, presence_penalty=1.0)
    found = applied(sampling, [1, 2], np.float32([1, 1, -1, 1]))
    assert found.tolist() == [1, 0, -2, 1]


def test_forbidden_tokens_stay_forbidden_and_dtypes_are_taken() -> None:
    logits = logits_of(3)
    logits[::3] = -np.inf
    found = applied(TOGETHER, list(range(V)), logits)
    assert np.isneginf(found[::3]).all() and np.isfinite(found).sum() == np.isfinite(logits).sum()
    half = mx.array(logits).astype(mx.bfloat16)
    penalties = Penalties(TOGETHER, list(range(V)), V)
    expected = penalised(np.array(half.astype(mx.float32)), list(range(V)), TOGETHER)
    assert penalties(half).tolist() == expected.tolist()


def test_prompt_ids_outside_the_vocabulary_are_no_history() -> None:
    for window in WINDOWS:
        strange = [V, 1, 10**6, 2, V + 1, 2, V]
        history = History(strange, window, V)
        same = History([1, 2, 2], window, V)
        assert history.counts.tolist() == same.counts.tolist()
        for token in range(30):
            history.push(mx.array(token, dtype=mx.uint32))
            same.push(mx.array(token, dtype=mx.uint32))
            assert history.counts.tolist() == same.counts.tolist()


# ---------------------------------------------------------------------------------- history


@pytest.mark.parametrize("window", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 19, 20, 21, 50])
def test_a_history_counts_and_takes_back_at_every_point(window: int, length: int) -> None:
    pick = random.Random(100 * window + length)
    ids = pick.choices(range(6), k=length)
    history = History(ids, window, 6)

    def counted() -> list[int]:
        count = Counter(ids[-window:] if window else ids)
        return [count[token] for token in range(6)]

    history.undo()  # nothing to undo yet
    assert history.counts.tolist() == counted()
    for _ in range(2 * window + 5):
        if pick.random() < 0.5:  # a wrong one first
            history.push(mx.array(pick.randrange(6), dtype=mx.uint32))
            history.undo()
            assert history.counts.tolist() == counted()
        ids.append(pick.randrange(6))
        history.push(mx.array(ids[-1], dtype=mx.uint32))
        assert history.counts.tolist() == counted()


def test_a_history_may_stay_lazy_for_a_while() -> None:
    ids = random.Random(2).choices(range(V), k=50)
    history = History(ids[:5], 20, V)
    for token in ids[5:]:
        history.push(mx.array(token, dtype=mx.uint32))
    mx.eval(history.arrays)
    assert history.counts.tolist() == [ids[-20:].count(token) for token in range(V)]


# ------------------------------------------------------------------------- through the batch

HOW = [
    Sampling(repetition_penalty=1.6),
    Sampling(repetition_penalty=2.5, repetition_context=1),
    Sampling(presence_penalty=2.0, presence_context=2),
    Sampling(presence_penalty=-9.0, presence_context=0),
    Sampling(frequency_penalty=1.5, frequency_context=0),
    Sampling(frequency_penalty=-6.0, frequency_context=5),
    Sampling(logit_bias=((17, 6.0), (400, 5.0))),
    Sampling(
        logit_bias=((17, 6.0), (3, -100.0)),
        repetition_penalty=1.3,
        repetition_context=3,
        presence_penalty=0.9,
        presence_context=7,
        frequency_penalty=0.6,
        frequency_context=0,
    ),
]


def greedy_oracle(row: Row, forced: dict[int, int] | None = None) -> list[int]:
    """The answer from the whole sequence at each token. forced: ids by their place."""
    ids = list(row.spec.prompt_ids)
    for place in range(row.spec.max_tokens):
        z = penalised(logits_after(tiny_model(), ids), ids, row.spec.sampling)
        ids.append((forced or {}).get(place, int(z.argmax())))
    return ids[len(row.spec.prompt_ids) :]


@pytest.mark.parametrize("length", [1, 9])
def test_the_prompt_and_the_token_in_flight_count(length: int) -> None:
    prompt = prompt_of(length)
    rows = [row_of(sampling, prompt, 10) for sampling in HOW]
    expected = [greedy_oracle(row) for row in rows]
    assert [told.ids for told in run(Sorting(tiny_model()), rows)] == expected
    plain = run(Sorting(tiny_model()), [row_of(Sampling(), prompt, 10)])[0].ids
    changed = [ids for ids in expected if ids != plain]
    assert len(changed) > 2, "penalties show"


def test_a_window_of_one_sees_the_last_token_only() -> None:
    # A reward so large that the last token must come again, and from then on only it.
    reward = Sampling(presence_penalty=-100.0, presence_context=1)
    assert run(Sorting(tiny_model()), [row_of(reward, (5, 9, 31), 6)])[0].ids == [31] * 6
    # And a penalty so large that it cannot: two tokens never follow each other.
    ids = run(
        Sorting(tiny_model()),
        [row_of(Sampling(1.0, top_k=2, presence_penalty=100.0, presence_context=1), max_tokens=40)],
    )[0].ids
    assert all(a != b for a, b in zip(ids, ids[1:], strict=False))


def test_forced_tokens_count_in_their_order() -> None:
    for sampling in (HOW[1], HOW[5], HOW[-1]):
        for is_alone in (True, False):
            row = row_of(sampling, prompt_of(4), 12, is_steered=True)
            forced = {0: 77, 3: 78, 4: 77, 5: 11, 9: 400}
            row.forced.append(77)

            def steer(row: Row, ids: list[int], forced: dict[int, int] = forced) -> None:
                if row.is_steered and len(ids) == 3:
                    row.forced.extend((78, 77, 11))
                elif row.is_steered and len(ids) == 9:
                    row.forced.append(400)

            rows = [row] if is_alone else [row, row_of(HOW[-1]), row_of(Sampling(1.0))]
            told = run(Sorting(tiny_model()), rows, after=steer)
            assert told[0].ids == greedy_oracle(row, forced)


def random_row(pick: random.Random, seed: int) -> Row:
    sampling = Sampling(
        pick.choice([0.0, 0.8, 1.2]),
        top_p=pick.choice([0.0, 0.9]),
        seed=seed,
        logit_bias=pick.choice([(), ((40, 3.0), (41, 3.0))]),
        repetition_penalty=pick.choice([0.0, 1.0, 1.4]),
        repetition_context=pick.choice(WINDOWS),
        presence_penalty=pick.choice([0.0, 1.1]),
        presence_context=pick.choice(WINDOWS),
        frequency_penalty=pick.choice([0.0, -0.3, 0.5]),
        frequency_context=pick.choice(WINDOWS),
    )
    prompt = prompt_of(pick.randint(1, 25), seed)
    return row_of(sampling, prompt, pick.randint(1, 25), top_logprobs=5)


@pytest.mark.parametrize("may_pool", [False, True])
def test_a_row_is_the_same_alone_and_among_others(may_pool: bool) -> None:
    """To the bit, if its forward is its own."""
    pick = random.Random(8)
    rows = [random_row(pick, seed) for seed in range(14)]
    assert sum(row.spec.sampling.penalises_repetition for row in rows) > 3
    batch = Sorting(tiny_model())
    batch.lanes.may_pool = may_pool
    told = run(batch, rows, pick, cancel=0.1)
    whole = 0
    for row, heard in zip(rows, told, strict=True):
        expected = run(Sorting(tiny_model()), [twin(row)])[0]
        count = len(heard.ids)
        whole += count == row.spec.max_tokens
        assert heard.ids == expected.ids[:count]
        assert_close(heard.logprobs, expected.logprobs[:count])
        assert may_pool or heard.logprobs == expected.logprobs[:count], "floats and all"
    assert len(rows) // 2 < whole < len(rows), "some were cancelled"


def test_an_ended_row_lets_go_of_its_penalties() -> None:
    row = row_of(HOW[-1], max_tokens=2)
    run(Sorting(tiny_model()), [row])
    assert row.penalties is None
