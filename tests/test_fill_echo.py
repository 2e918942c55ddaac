"""Echo: the index and its policies, beside the plainest way to do the same (spec 50 section 7)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mlxlite.text.fill.echo import EchoSource, PromptIndex
from mlxlite.text.fill.plan import UNLIMITED, EchoConfig, Origin, Policy, Proposal


class Whole:
    """A view of a whole sequence."""

    budget = UNLIMITED

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self.length = len(ids)

    def tail(self, count: int) -> tuple[int, ...]:
        return self.ids[max(len(self.ids) - count, 0) :]


def proposed(
    ids: Sequence[int],
    k: int = 2,
    delimiters: Sequence[int] = (),
    max_span: int = 32,
    candidates: int = 24,
    index_max: int = 131_072,
    prompt: int = 0,
) -> Proposal | None:
    """What is proposed after a sequence whose first `prompt` ids were there from the start."""
    config = EchoConfig(k, candidates, index_max)
    indexed = PromptIndex(ids[:prompt], k, index_max)
    source = EchoSource(config, frozenset(delimiters), max_span, indexed)
    for token in ids[prompt:]:
        source.observe((token,))
    return source.propose(Whole(ids))


def brute(
    ids: Sequence[int],
    k: int,
    delimiters: Sequence[int],
    max_span: int,
    candidates: int,
    index_max: int,
) -> Proposal | None:
    if len(ids) < k:
        return None
    kept = list(ids[:index_max])
    gram = list(ids[-k:])
    live = [p + k for p in range(len(kept) - k) if kept[p : p + k] == gram][::-1][:candidates]
    out: list[int] = []
    agreed, forked = 0, False
    while live and len(out) < max_span:
        tokens = {kept[at] for at in live}
        if len(tokens) > 1:
            forked = True
            break
        out.append(tokens.pop())
        agreed = len(live)
        if out[-1] in delimiters:
            break
        live = [at + 1 for at in live if at + 1 < len(kept)]
    if len(out) < 2:
        return None
    is_sure = not forked and out[-1] in delimiters and agreed > 1
    return Proposal(tuple(out), Policy.ASSERT if is_sure else Policy.VERIFY, Origin.ECHO, forked)


def test_it_equals_brute_force_on_random_sequences() -> None:
    draws = random.Random(5)
    sure = forked = found = 0
    for _ in range(3000):
        size = draws.randint(2, 4)
        ids = draws.choices(range(size), k=draws.randint(0, 60))
        if draws.random() < 0.5:  # a phrase that comes back
            phrase = draws.choices(range(10, 30), k=8)
            ids = [*ids, *phrase, *ids[:9], *phrase, *ids[3:7], *phrase[: draws.randint(1, 8)]]
        rest = {
            "k": draws.randint(2, 5),
            "delimiters": draws.choice([(), (1,), (15, 20, 1)]),
            "max_span": draws.choice([2, 5, 32]),
            "candidates": draws.choice([1, 2, 24]),
            "index_max": draws.choice([5, 30, 1000]),
        }
        made = proposed(ids, prompt=draws.randint(0, len(ids)), **rest)  # type: ignore[arg-type]  # of a helper
        assert made == brute(ids, **rest), (ids, rest)  # type: ignore[arg-type]  # of a helper
        if made is not None:
            found += 1
            sure += made.policy is Policy.ASSERT
            forked += made.branch_stop
    assert found > 500 and sure > 15 and forked > 50, "the draws have to reach all branches"


def ids_of(proposal: Proposal | None) -> tuple[int, ...] | None:
    return None if proposal is None else proposal.ids


def test_the_nearest_places_vote() -> None:
    ids = [1, 2, 7, 8, 9, 1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2]
    assert ids_of(proposed(ids)) is None, "they part at once: a fork, nothing to offer"
    assert ids_of(proposed(ids, candidates=2)) == (3, 4, 9, 1, 2) * 2, "one ran out, one went on"


def test_a_place_without_a_next_token_does_not_vote() -> None:
    assert proposed([1, 2]) is None
    assert ids_of(proposed([5, 6, 7, 8, 5, 6])) == (7, 8, 5, 6)


def test_running_out_is_no_fork() -> None:
    made = proposed([1, 2, 3, 4, 1, 2, 3, 1, 2], max_span=2)
    assert made is None or not made.branch_stop
    same = proposed([3, 3, 3, 3, 3, 3])
    assert same is not None and set(same.ids) == {3} and not same.branch_stop


def test_a_frozen_index_still_finds_what_it_holds() -> None:
    ids = [1, 2, 3, 4, *range(10, 30), 1, 2]
    assert ids_of(proposed(ids, index_max=6)) == (3, 4, 10, 11)
    source = EchoSource(EchoConfig(2, 24, 6), frozenset(), 32, PromptIndex(ids[:4], 2, 6))
    assert not source.index.is_frozen
    source.observe(ids[4:])
    assert source.index.is_frozen and list(source.index) == ids[:6]
    source.observe((7,))
    assert list(source.index) == ids[:6]
    whole = EchoSource(EchoConfig(2, 24, 6), frozenset(), 32, PromptIndex(ids, 2, 6))
    assert whole.index.is_frozen and list(whole.index) == ids[:6]


def test_rows_share_a_prompt_and_nothing_else() -> None:
    prompt = PromptIndex([1, 2, 3, 4], 2, 100)
    first, second = (EchoSource(EchoConfig(2), frozenset(), 32, prompt) for _ in range(2))
    first.observe([1, 2, 9, 9, 1, 2])
    second.observe([1, 2])
    assert ids_of(first.propose(Whole([1, 2]))) is None, "3 and 9"
    assert ids_of(second.propose(Whole([1, 2]))) == (3, 4, 1, 2)
    assert list(second.index) == [1, 2, 3, 4, 1, 2] and prompt.ids == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("ids", "policy"),
    [
        ([1, 2, 5, 34, 1, 2, 5, 34, 1, 2], Policy.ASSERT),
        ([1, 2, 5, 34, 1, 2], Policy.VERIFY),  # one place alone
        ([1, 2, 5, 6, 1, 2, 5, 6, 1, 2], Policy.VERIFY),  # no delimiter
        ([1, 2, 5, 6, 34, 1, 2, 5, 6, 7, 1, 2], Policy.VERIFY),  # a fork
    ],
)
def test_what_is_sure(ids: list[int], policy: Policy) -> None:
    made = proposed(ids, delimiters=(34,))
    assert made is not None and made.policy is policy
    assert made.ids[:1] == (5,) and (34 not in made.ids or made.ids[-1] == 34)
    without = proposed(ids)
    assert without is None or without.policy is Policy.VERIFY, "no delimiters, nothing is sure"


def test_the_window_is_the_anchor() -> None:
    assert EchoSource(EchoConfig(k=5), frozenset(), 32, PromptIndex((), 5, 9)).window_needed == 5
