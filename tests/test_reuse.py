"""The prompt cache in a running engine: what it gives back is what a cold run would have computed.

Every row is asked for again on an engine without a prompt cache, and must say the same; what the
cache holds must stay as it was to the bit. `MLXLITE_CHECK=1` lets the engine verify itself too.
One model a kind of cache: those that can be cut anywhere, windows, recurrent ones, and mixtures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlite.types import Finish, Sampling
from tests.pairs import (
    OTHERS,
    PENALISED,
    SEEDED,
    Chunks,
    Pair,
    ask,
    family,  # noqa: F401  (a fixture)
    ids_of,
    pair,  # noqa: F401  (a fixture)
    start,
)
from tests.rows import Heard

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_of_cache_gives_back_what_a_cold_run_computes(kind: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, kind)
    base = ids_of(40)
    said = pair.check(base, 12).ids
    rest = ids_of(9, 1)
    for prompt in (base, (*base, *said), (*base, *said), (*base, *rest), (*base[:20], *rest)):
        pair.check(prompt, 12)
    assert pair.cached((*base, *said)) == 51
    rows = [start(pair.warm, (*ids_of(200, 5), 3 + n), 5) for n in range(3)]
    assert sorted(row.done.cached_tokens for row in rows) == [0, 200, 200]
    for n, row in enumerate(rows):
        assert row.ids == pair.plain((*ids_of(200, 5), 3 + n), 5)
    pair.verify()
    pair.stop()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


# --------------------------------------------------------------------- cached equals cold


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED, PENALISED], ids=["greedy", "seed", "pen"])
def test_prompts_that_share_a_beginning_say_what_they_say_alone(
    pair: Pair, sampling: Sampling
) -> None:
    base = ids_of(60)
    first = pair.check(base, 6, sampling=sampling)
    assert first.done.cached_tokens == 0
    kept = (*base, *first.ids[:5])
    kinds = {
        "again": base,
        "once more": base,
        "longer": (*base, *ids_of(20, 1)),
        "shorter": base[:40],
        "diverging": (*base[:30], *ids_of(30, 2)),
        "longer by one": (*base, 3),
        "shorter by one": base[:-1],
        "other": ids_of(60, 3),
    }
    for name, prompt in kinds.items():
        cached = pair.cached(prompt, 6, sampling=sampling)
        if pair.is_cuttable:
            assert cached >= min(common(kept, prompt), len(prompt) - 1), name
        elif name in ("again", "once more", "longer", "longer by one"):
            assert cached >= 59, name
        assert name != "other" or cached <= common(kept, prompt)


def test_what_is_kept_does_not_change_when_it_is_used(pair: Pair) -> None:
    base = ids_of(40)
    said = pair.check(base, 12).ids
    kept = [(array, np.array(array, copy=True)) for array in pair.payloads()]
    assert kept
    rest = ids_of(9, 1)
    for prompt in (base, (*base, *said), (*base, *said), (*base, 5), (*base, *rest), base[:-9]):
        pair.check(prompt, 12)
    for array, copy in kept:
        assert np.array_equal(np.array(array), copy)


def test_two_rows_that_use_one_prefix_at_once_do_not_meet(pair: Pair) -> None:
    base = ids_of(40)
    pair.check(base)
    prompts = [base, base, (*base, 5, 6), (*base, 9)]
    rows = [start(pair.warm, prompt, 9) for prompt in prompts]
    assert [row.done.cached_tokens >= 39 for row in rows] == [True] * 4
    assert [row.ids for row in rows] == [pair.plain(prompt, 9) for prompt in prompts]


def test_the_turns_of_a_chat_compute_only_what_is_new(pair: Pair) -> None:
    prompt = ids_of(50)
    answered = 0
    for turn in range(4):
        heard = pair.check(prompt, 7)
        assert heard.done.cached_tokens == answered, turn
        answered = len(prompt) + 6  # the newest token was not run
        prompt = (*prompt, *heard.ids, *ids_of(8, turn + 1))


def test_a_turn_that_drops_its_primer_starts_from_the_boundary(pair: Pair) -> None:
    first = ids_of(300)
    pair.check(first, 3, snapshot_at=280)
    second = (*first[:280], *ids_of(40, 1))
    shared = common(first, second)
    assert pair.cached(second, 3, snapshot_at=310) == (shared if pair.is_cuttable else 280)
    third = (*second[:310], *ids_of(30, 2))
    assert pair.cached(third, 3) >= 310


@pytest.mark.parametrize("snapshot_at", [1, 299, 5000])
def test_odd_boundaries_do_no_harm(pair: Pair, snapshot_at: int) -> None:
    prompt = ids_of(300)
    pair.check(prompt, 2, snapshot_at=snapshot_at)
    assert pair.cached(prompt, 2, snapshot_at=snapshot_at) == 299


def test_a_namespace_sees_only_its_own(pair: Pair) -> None:
    prompt = ids_of(60)
    cached = [pair.cached(prompt, namespace=name) for name in ("", "a", "b", "a", "")]
    assert cached == [0, 0, 0, 59, 59]
    rows = [start(pair.warm, ids_of(200, 5), namespace=name) for name in ("", "a", "a")]
    assert [row.done.cached_tokens for row in rows] == [0, 0, 199], "nor waits for another's"


def test_scored_prompts_are_run_whole_and_not_kept(pair: Pair) -> None:
    prompt = ids_of(60)
    scored = {"prompt_logprobs": True, "top_logprobs": 0}
    assert pair.cached(prompt, 2, **scored) == 0
    assert not pair.paths()
    pair.check(prompt, 2)
    heard = pair.check(prompt, 2, **scored)
    assert heard.done.cached_tokens == 0
    assert sum(len(event.logprobs) for event in heard.events) == 59 + 2


# ---------------------------------------------------------------------------- work is shared


def test_the_same_long_prompt_is_computed_once(pair: Pair) -> None:
    pair.check(ids_of(5))
    before, prompt = pair.computed(), ids_of(300)
    rows = [start(pair.warm, prompt, 5) for _ in range(4)]
    assert sorted(row.done.cached_tokens for row in rows) == [0, 299, 299, 299]
    assert pair.computed() - before == 299
    assert [row.ids for row in rows] == [pair.plain(prompt, 5)] * 4


def test_conversations_share_their_system_prompt(pair: Pair) -> None:
    system = ids_of(290)
    prompts = [(*system, 3 + n, *ids_of(20, n)) for n in range(4)]
    rows = [start(pair.warm, prompt, 5) for prompt in prompts]
    assert sorted(row.done.cached_tokens for row in rows) == [0, 290, 290, 290]
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.ids == pair.plain(prompt, 5)


def test_conversations_one_after_the_other_share_it_by_its_boundary(pair: Pair) -> None:
    system = ids_of(290)
    prompts = [(*system, 3 + n, *ids_of(20, n)) for n in range(4)]
    cached = [pair.cached(prompt, 5, snapshot_at=290) for prompt in prompts]
    assert cached == [0, 290, 290, 290]


@pytest.mark.parametrize("count", [2, 4])
def test_who_waits_goes_on_when_the_other_is_given_up(
    pair: Pair, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids_of(300)
    rows: list[Heard] = []

    def after(row: Any, sizes: list[int]) -> None:
        if len(sizes) == 2 and row.id == rows[0].row_id:
            pair.warm.cancel(row.id)

    with monkeypatch.context() as patch:
        chunks = Chunks(patch, pair.warm, after)
        gate = [start(pair.warm, ids_of(3, 9), 1, at_event=lambda heard: submit())]

        def submit() -> None:
            rows.extend(start(pair.warm, prompt, 5) for _ in range(count))

        assert gate[0].done
        assert [row.finish for row in rows[:1]] == [Finish.CANCELLED]
        assert [row.finish for row in rows[1:]] == [Finish.LENGTH] * (count - 1)
    done = sum(size for number, size in chunks.run if number == rows[0].row_id)
    assert rows[1].done.cached_tokens == done
    assert sum(size for _, size in chunks.run) <= 299 + 2, "nothing is computed twice"
    assert [row.ids for row in rows[1:]] == [pair.plain(prompt, 5)] * (count - 1)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_crowd_with_shared_beginnings_survives_its_leavers(
    pair: Pair, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of rows that wait for each other; some leave or fail in their prompts, any of them."""
    draw = random.Random(seed)
    stem = ids_of(220)
    prompts = [
        (*stem[: draw.choice([80, 150, 220])], *ids_of(draw.randint(1, 60), draw.randint(1, 3)))
        for _ in range(8)
    ]
    rows: list[Heard] = []

    def after(row: Any, sizes: list[int]) -> None:
        chance = draw.random()
        if chance < 0.15:
            pair.warm.cancel(draw.choice(rows).row_id)
        elif chance < 0.2:
            raise MemoryError("no room")

    def submit(heard: Heard) -> None:
        rows.extend(start(pair.warm, prompt, 3) for prompt in prompts)

    with monkeypatch.context() as patch:
        Chunks(patch, pair.warm, after)
        assert start(pair.warm, (5,), 1, at_event=submit).done
        ends = [row.finish for row in rows]
    assert Finish.LENGTH in ends and len(set(ends)) > 1
    for row, prompt, end in zip(rows, prompts, ends, strict=True):
        if end is Finish.LENGTH:
            assert row.ids == pair.plain(prompt, 3)


def test_a_failed_prompt_does_not_stop_who_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, failed = ids_of(300), list[int]()

    def after(row: Any, sizes: list[int]) -> None:
        if len(sizes) == 2 and not failed:
            failed.append(row.id)
            raise MemoryError("no room")

    with monkeypatch.context() as patch:
        Chunks(patch, pair.warm, after)
        rows = [start(pair.warm, prompt, 5) for _ in range(3)]
        ends = {row.row_id: row.finish for row in rows}
    assert [number for number, end in ends.items() if end is Finish.ERROR] == failed
    for row in rows:
        if row.row_id not in failed:
            assert row.ids == pair.plain(prompt, 5)


def test_a_prompt_is_reused_while_its_first_row_still_decodes(pair: Pair) -> None:
    prompt = ids_of(60)
    late: list[Heard] = []

    def at_third(heard: Heard) -> None:
        if len(heard.ids) == 3:
            late.append(start(pair.warm, (*prompt[:-1], 3), 6))

    early = start(pair.warm, prompt, 30, at_event=at_third)
    assert early.done and late[0].done.cached_tokens == 59
    assert late[0].ids == pair.plain((*prompt[:-1], 3), 6)
    assert early.ids == pair.plain(prompt, 30)


# -------------------------------------------------------------------------------- its limits


def test_nothing_is_kept_without_room(pair: Pair) -> None:
    before = pair.cold.stats()
    for _ in range(2):
        assert ask(pair.cold, ids_of(300)).done.cached_tokens == 0
    cache = pair.cold.stats()["prompt_cache"]
    assert (cache["nodes"], cache["bytes"], cache["hits"], cache["misses"]) == (0, 0, 0, 0)
    assert pair.cold.stats()["cached_tokens"] == before["cached_tokens"] == 0


def test_a_small_cache_forgets_the_oldest_and_stays_right(pair: Pair) -> None:
    pair.check(ids_of(60))
    limit, used = pair.tree.max_bytes, pair.tree.nbytes
    pair.tree.max_bytes = int(used * 2.5)
    try:
        evicted = pair.tree.evictions
        for seed in (1, 2, 3, 1, 3, 4, 3):
            pair.check(ids_of(60, seed))
            assert 0 < pair.tree.nbytes <= pair.tree.max_bytes
        assert pair.tree.evictions > evicted
        assert pair.cached(ids_of(60, 3)) == 59 and pair.cached(ids_of(60, 2)) < 10
        pair.tree.max_bytes = 100  # nothing fits: whoever waited has waited in vain
        pair.tree.clear()
        rows = [start(pair.warm, ids_of(200, 8), 4) for _ in range(2)]
        assert [row.done.cached_tokens for row in rows] == [0, 0]
        assert [row.ids for row in rows] == [pair.plain(ids_of(200, 8), 4)] * 2
    finally:
        pair.tree.max_bytes = limit


def test_short_prompts_are_not_kept(pair: Pair) -> None:
    for length in (1, 2, 9):
        assert pair.cached(ids_of(length), 2) == 0
    assert not pair.paths()


# ------------------------------------------------------------------------------------ traffic


def test_random_traffic_says_what_cold_rows_say(pair: Pair) -> None:
    draw = random.Random(8)
    prompts = [ids_of(draw.randint(1, 90))]
    rows: list[tuple[Heard, tuple[int, ...], int, Sampling]] = []
    for number in range(20):
        known = draw.choice(prompts)
        prompt = (*known[: draw.randint(0, len(known))], *ids_of(draw.randint(1, 70), number))
        prompts.append(prompt)
        count = draw.randint(1, 14)
        sampling = draw.choice([Sampling(), SEEDED, PENALISED])
        leaves_at = draw.randint(1, 30)

        def at_event(heard: Heard, leaves_at: int = leaves_at) -> None:
            if len(heard.ids) == leaves_at:
                pair.warm.cancel(heard.row_id)

        how: dict[str, Any] = {"sampling": sampling, "snapshot_at": draw.randint(0, 80)}
        rows.append(
            (start(pair.warm, prompt, count, at_event=at_event, **how), prompt, count, sampling)
        )
        if draw.random() < 0.3:
            assert rows[-1][0].done
    for heard, prompt, count, sampling in rows:
        assert heard.done.finish in (Finish.LENGTH, Finish.CANCELLED)
        said = pair.plain(prompt, count, sampling=sampling)
        assert heard.ids == said[: len(heard.ids)]
        assert heard.finish is Finish.CANCELLED or len(heard.ids) == count
    assert pair.warm.stats()["prompt_cache"]["hits"]
