"""The prompt cache's keys: whatever ends a row, what is kept of it is the state of exactly its ids.

The fixture verifies all that is kept after each test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlxlite.types import Finish, RowSpec, Sampling, Verdict
from tests.pairs import (
    Chunks,
    Pair,
    ask,
    family,  # noqa: F401  (a fixture)
    ids_of,
    pair,  # noqa: F401  (a fixture)
    start,
)
from tests.rows import Heard, Scripted

pytestmark = pytest.mark.slow


# ---------------------------------------------------------------------- keys, however it ends


def stop_at(count: int, keep: int = 1, may_steer: bool = False) -> Scripted:
    def decide(ids: list[int], new: Sequence[int]) -> Verdict | None:
        return Verdict(keep=keep, stop=True) if len(ids) == count else None

    return Scripted(decide, may_steer)


@pytest.mark.parametrize("may_steer", [False, True], ids=["ahead", "steered"])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("at", [1, 4])
def test_a_guide_that_stops_leaves_an_exact_key(
    pair: Pair, at: int, keep: int, may_steer: bool
) -> None:
    prompt = ids_of(30)
    said = pair.plain(prompt, 9)
    heard = ask(pair.warm, prompt, 9, guide=stop_at(at, keep, may_steer))
    assert heard.finish is Finish.GUIDE and heard.ids == said[: at - 1 + keep]
    assert pair.cached((*prompt, *said[:8])) >= 30 + at - 1


def test_forced_tokens_are_part_of_the_key(pair: Pair) -> None:
    prompt, forced = ids_of(30), (7, 9, 11, 13)

    def decide(ids: list[int], new: Sequence[int]) -> Verdict | None:
        return Verdict(keep=len(new), forced=forced if len(ids) == 2 else ())

    heard = ask(pair.warm, prompt, 8, guide=Scripted(decide))
    assert tuple(heard.ids[2:6]) == forced
    assert pair.cached((*prompt, *heard.ids, 5)) == 30 + 7


@pytest.mark.parametrize("at", [0, 1, 4])
def test_eos_leaves_an_exact_key(pair: Pair, at: int) -> None:
    for seed in range(20):
        prompt = ids_of(30, seed)
        said = pair.plain(prompt, 9)
        if said[at] not in said[:at]:
            break
    heard = ask(pair.warm, prompt, 9, eos_ids=frozenset([said[at]]))
    assert heard.finish is Finish.EOS and heard.ids == said[:at]
    assert pair.cached((*prompt, *said[:8])) >= 30 + at


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_an_answer_cut_short_leaves_an_exact_key(pair: Pair, max_tokens: int) -> None:
    prompt = ids_of(30)
    said = pair.check(prompt, max_tokens).ids
    assert pair.cached((*prompt, *said, 5, 6)) == 29 + max_tokens


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_a_row_given_up_while_it_decodes_leaves_an_exact_key(
    pair: Pair, has_neighbour: bool
) -> None:
    prompt = ids_of(30)
    said = pair.plain(prompt, 30)

    def at_third(heard: Heard) -> None:
        if len(heard.ids) == 3:
            pair.warm.cancel(heard.row_id)

    other = start(pair.warm, ids_of(20, 4), 25) if has_neighbour else None
    heard = start(pair.warm, prompt, 30, at_event=at_third)
    assert heard.finish is Finish.CANCELLED and heard.ids == said[:3]
    if other is not None:
        assert other.done and other.ids == pair.plain(ids_of(20, 4), 25)
    assert 32 <= pair.cached((*prompt, *said[:20])) <= 34


def test_a_row_given_up_in_its_prompt_leaves_an_exact_key(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after(row: Any, sizes: list[int]) -> None:
        if len(sizes) == 2:
            pair.warm.cancel(row.id)

    prompt = ids_of(150)
    with monkeypatch.context() as patch:
        chunks = Chunks(patch, pair.warm, after)
        heard = start(pair.warm, prompt)
        assert heard.finish is Finish.CANCELLED and len(chunks.run) == 2
    assert pair.cached(prompt) == sum(size for _, size in chunks.run)


class Holding(Heard):
    """A sink whose reader falls behind at some events; `resume` is up to the test."""

    def __init__(self, at: Sequence[int], and_then: Any) -> None:
        super().__init__()
        self._at, self._and_then = at, and_then

    def __call__(self, event: Any) -> bool:  # type: ignore[override]
        super().__call__(event)
        if event.done is None and len(self.ids) in self._at:
            self._and_then(self)
            return True
        return False


@pytest.mark.parametrize("others", [0, 2])
def test_a_row_that_was_held_says_the_same_and_leaves_an_exact_key(pair: Pair, others: int) -> None:
    prompt = ids_of(30)
    beside = [start(pair.warm, ids_of(20 + n, 7 + n), 30) for n in range(others)]
    held = Holding([2, 5], lambda heard: pair.warm.resume(heard.row_id))
    held.row_id = pair.warm.submit(RowSpec(prompt, Sampling(), 12, frozenset()), held)
    assert held.finish is Finish.LENGTH
    said = pair.plain(prompt, 12)
    assert held.ids == said
    for n, row in enumerate(beside):
        assert row.done and row.ids == pair.plain(ids_of(20 + n, 7 + n), 30)
    assert pair.cached((*prompt, *said, 4)) == 30 + 11


@pytest.mark.parametrize("others", [0, 2])
def test_a_row_given_up_while_it_is_held_leaves_an_exact_key(pair: Pair, others: int) -> None:
    prompt = ids_of(30)
    beside = [start(pair.warm, ids_of(20 + n, 7 + n), 30) for n in range(others)]
    held = Holding([3], lambda heard: pair.warm.cancel(heard.row_id))
    held.row_id = pair.warm.submit(RowSpec(prompt, Sampling(), 12, frozenset()), held)
    assert held.finish is Finish.CANCELLED
    for n, row in enumerate(beside):
        assert row.done and row.ids == pair.plain(ids_of(20 + n, 7 + n), 30)
    assert pair.cached((*prompt, *held.ids, 4)) >= 32
