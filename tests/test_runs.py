"""Runs: what a guide expects next goes through the model at once, and the answer is the same.

Three kinds of cache (`pairs`). The fixture verifies that whatever is kept of a row is the state of
exactly its ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlxlite.engine import runs
from mlxlite.engine.batch import Batch
from mlxlite.errors import EngineFault
from mlxlite.types import Finish, RowSpec, Run, Sampling, Took, Verdict
from tests.pairs import (
    OTHERS,
    Pair,
    ask,
    family,  # noqa: F401  (a fixture)
    ids_of,
    pair,  # noqa: F401  (a fixture)
    start,
)
from tests.rows import PATIENCE_S, PROMPT, Heard, Scripted, mask_of

pytestmark = pytest.mark.slow

SAMPLED = Sampling(1.0, 0.9, top_k=20, seed=77)
BIASED = Sampling(1.0, seed=5, logit_bias=((7, 4.0), (9, -100.0)))


class Expecting(Scripted):
    """Proposes runs: `plan` gives the run that is expected after so many ids."""

    def __init__(
        self,
        plan: Callable[[list[int]], Run | None],
        stop_after: int | None = None,
    ) -> None:
        self._due = 0
        self._plan = plan
        self._stop_after = stop_after
        super().__init__(self._decide_now)

    def _decide_now(self, ids: list[int], new: Sequence[int]) -> Verdict | None:
        self._due = max(0, self._due - len(new))
        if self._stop_after is not None and len(ids) >= self._stop_after:
            return Verdict(keep=len(new), stop=True)
        run = None if self._due else self._plan(ids)
        return Verdict(keep=len(new), run=run)

    def took(self, what: Took) -> None:
        super().took(what)
        self._due = what.count


def expecting(said: Sequence[int], every: int, length: int, wrong_at: int | None = None) -> Any:
    """Expects, after each `every` ids, what comes next; one id of the run may be wrong."""

    def plan(ids: list[int]) -> Run | None:
        if len(ids) % every or len(said) - len(ids) < length:
            return None
        coming = list(said[len(ids) : len(ids) + length])
        if wrong_at is not None:
            coming[wrong_at] = (coming[wrong_at] + 1) % 60 + 3
        return Run(tuple(coming))

    return plan


# ------------------------------------------------------------------------------- runs in doubt


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, BIASED], ids=["greedy", "drawn", "bias"])
@pytest.mark.parametrize("wrong_at", [None, 0, 1, 3], ids=["right", "first", "second", "last"])
def test_a_run_in_doubt_changes_nothing(
    pair: Pair, sampling: Sampling, wrong_at: int | None
) -> None:
    prompt = ids_of(30)
    said = pair.plain(prompt, 24, sampling=sampling)
    guide = Expecting(expecting(said, 3, 4, wrong_at))
    before = pair.warm.stats()
    heard = ask(pair.warm, prompt, 24, sampling=sampling, guide=guide)
    assert heard.ids == said
    after = pair.warm.stats()
    expected = {None: 4, 0: 0, 1: 1, 3: 3}[wrong_at]
    assert guide.taken and set(guide.taken) == {expected}
    assert after["run_tokens"] - before["run_tokens"] == sum(guide.taken)
    steps = after["decode_steps"] - before["decode_steps"]
    assert steps <= 24 - sum(guide.taken) + 2
    assert [token for call in guide.calls for token in call] == heard.ids, "each id once"
    assert pair.cached((*prompt, *said[:20], 5)) >= 29


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "drawn"])
def test_rows_with_runs_and_without_share_their_steps(pair: Pair, sampling: Sampling) -> None:
    prompts = [ids_of(20 + 3 * n, n) for n in range(3)]
    said = [pair.plain(prompt, 30, sampling=sampling) for prompt in prompts]
    guides = [Expecting(expecting(said[n], 3, 8)) for n in range(2)]
    others = start(pair.warm, prompts[2], 30, sampling=sampling)
    heard = [start(pair.warm, prompts[n], 30, sampling=sampling, guide=guides[n]) for n in range(2)]
    assert [h.ids for h in heard if h.done] == said[:2]
    assert others.done and others.ids == said[2]
    for guide in guides:
        assert 8 in guide.taken and set(guide.taken) <= {8, 0}


def test_a_run_is_drawn_under_its_masks(pair: Pair) -> None:
    """The mask after each id of a run is that of the guide: the draws follow it."""
    prompt, allowed = ids_of(30), [[11], [12, 13], [14], [15, 16, 17]]

    def steps(ids: list[int]) -> list[int]:
        return allowed[len(ids) % 4]

    def one_by_one(ids: list[int], new: Sequence[int]) -> Verdict:
        return Verdict(keep=len(new), mask=mask_of(steps(ids)))

    said = pair.plain(prompt, 16, guide=Scripted(one_by_one))

    class Grammar(Expecting):
        def observe(self, ids: Sequence[int]) -> Verdict:
            verdict = super().observe(ids)
            so_far = [token for call in self.calls for token in call]
            mask = mask_of(steps(so_far))
            return Verdict(verdict.keep, mask=mask, run=verdict.run)

    def plan(ids: list[int]) -> Run | None:
        if len(ids) % 4:
            return None
        coming = (11, 12, 14)
        masks = [mask_of(allowed[n]) for n in (1, 2)]
        return Run(coming, masks=lambda count: masks[:count])

    guide = Grammar(plan)
    assert ask(pair.warm, prompt, 16, guide=guide).ids == said
    assert set(guide.taken) == ({3} if said[1] == 12 else {1})


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("wrong_at", [None, 3])
def test_all_kinds_of_cache_go_back(
    kind: str, wrong_at: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Alone and in a pool; a cache that cannot be cut goes again from where it was."""
    pair = Pair(tmp_path_factory.mktemp(kind), kind)
    said = [pair.plain(ids_of(30, n), 30) for n in range(2)]
    guides = [Expecting(expecting(said[n], 5, 6, wrong_at)) for n in (0, 0, 1)]
    assert ask(pair.warm, ids_of(30, 0), 30, guide=guides[0]).ids == said[0]
    both = [start(pair.warm, ids_of(30, n), 30, guide=guides[1 + n]) for n in range(2)]
    assert [heard.ids for heard in both if heard.done] == said
    assert all((wrong_at or 6) in guide.taken for guide in guides)
    assert all(what.checkpoint_s > 0 for guide in guides for what in guide.told if what.count)
    pair.verify()
    pair.stop()


# -------------------------------------------------------------------------------- runs for sure


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(repetition_penalty=1.7)])
def test_a_sure_run_is_what_forced_ids_are(pair: Pair, sampling: Sampling) -> None:
    prompt, forced = ids_of(30), (7, 9, 11, 13, 15)

    def force(ids: list[int], new: Sequence[int]) -> Verdict:
        return Verdict(keep=len(new), forced=forced if len(ids) == 2 else ())

    said = pair.plain(prompt, 14, sampling=sampling, guide=Scripted(force))
    guide = Expecting(lambda ids: Run(forced, is_sure=True) if len(ids) == 2 else None)
    heard = ask(pair.warm, prompt, 14, sampling=sampling, guide=guide)
    assert guide.taken == [5], "all kinds of cache can go forward"
    assert heard.ids == said and tuple(said[2:7]) == forced
    cached = pair.cached((*prompt, *said[:13], 5))
    assert cached == 30 + 13


def test_a_run_may_come_before_the_first_id(pair: Pair) -> None:
    guide = Expecting(lambda ids: None if ids else Run((7, 9, 11), is_sure=True))
    heard = ask(pair.warm, ids_of(30), 6, guide=guide)
    assert heard.ids[:3] == [7, 9, 11]
    assert heard.ids[3:] == pair.plain((*ids_of(30), 7, 9, 11), 3)


@pytest.mark.parametrize("stop_after", [3, 4, 6])
def test_a_row_that_ends_within_a_run_leaves_an_exact_key(pair: Pair, stop_after: int) -> None:
    prompt = ids_of(30)
    guide = Expecting(
        lambda ids: Run((7, 9, 11, 13, 15), is_sure=True) if len(ids) == 2 else None, stop_after
    )
    heard = ask(pair.warm, prompt, 14, guide=guide)
    assert heard.finish is Finish.GUIDE and len(heard.ids) == stop_after
    assert heard.done.generated_tokens == stop_after
    kept = pair.cached((*prompt, *heard.ids, 5, 6))
    assert kept == 30 + stop_after if pair.is_cuttable else kept >= 29


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 6, 7])
def test_a_run_ends_at_max_tokens(pair: Pair, max_tokens: int) -> None:
    guide = Expecting(lambda ids: Run((7, 9, 11, 13), is_sure=True) if len(ids) == 2 else None)
    heard = ask(pair.warm, ids_of(30), max_tokens, guide=guide)
    assert heard.finish is Finish.LENGTH and len(heard.ids) == max_tokens
    room = max_tokens - 2
    assert guide.taken == [min(room, 4) if room >= 2 else 0]
    pair.cached((*ids_of(30), *heard.ids, 5))


def test_one_run_may_follow_another(pair: Pair) -> None:
    parts = {2: (7, 9), 4: (11, 13), 6: (15, 17)}
    guide = Expecting(lambda ids: Run(parts[len(ids)], is_sure=True) if len(ids) in parts else None)
    heard = ask(pair.warm, ids_of(30), 9, guide=guide)
    assert heard.ids[2:8] == [7, 9, 11, 13, 15, 17] and guide.taken == [2, 2, 2]


def test_eos_within_a_run_ends_the_row(pair: Pair) -> None:
    guide = Expecting(lambda ids: Run((7, 9, 11), is_sure=True) if len(ids) == 1 else None)
    heard = ask(pair.warm, ids_of(30), 9, guide=guide, eos_ids=frozenset([9]))
    assert heard.finish is Finish.EOS and heard.ids[1:] == [7]


def test_a_held_row_takes_its_run_when_it_goes_on(pair: Pair) -> None:
    prompt, run = ids_of(30), Run((7, 9, 11, 13), is_sure=True)
    expected = ask(
        pair.cold, prompt, 9, guide=Expecting(lambda ids: run if len(ids) == 2 else None)
    ).ids

    class Slow:
        def __call__(self, event: Any) -> bool:
            heard(event)
            return len(heard.ids) == 2

    heard = Heard()
    guide = Expecting(lambda ids: run if len(ids) == 2 else None)
    row = pair.warm.submit(RowSpec(prompt, Sampling(), 9, frozenset(), guide), Slow())
    until = time.monotonic() + PATIENCE_S
    while not pair.warm.stats()["held_rows"]:
        assert time.monotonic() < until
    pair.warm.resume(row)
    assert heard.done and heard.ids == expected


# --------------------------------------------------------------------------- what is not taken


def test_a_row_that_reports_logprobs_takes_no_run(pair: Pair) -> None:
    guide = Expecting(lambda ids: Run((7, 9, 11), is_sure=True) if len(ids) == 2 else None)
    heard = ask(pair.warm, ids_of(30), 6, guide=guide, top_logprobs=0)
    assert guide.taken == [0] and heard.ids == pair.plain(ids_of(30), 6)
    assert sum(len(event.logprobs) for event in heard.events) == 6


@pytest.mark.parametrize("window", [20, 500])
def test_a_penalised_row_takes_no_run_in_doubt(pair: Pair, window: int) -> None:
    sampling = Sampling(presence_penalty=0.8, presence_context=window)
    said = pair.plain(ids_of(30), 12, sampling=sampling)
    guide = Expecting(expecting(said, 2, 4))
    assert ask(pair.warm, ids_of(30), 12, sampling=sampling, guide=guide).ids == said
    assert set(guide.taken) == {0} and not any(what.is_supported for what in guide.told)


def test_a_run_that_does_not_pay_is_not_tried(pair: Pair) -> None:
    said = pair.plain(ids_of(30), 12)
    others = [start(pair.warm, ids_of(30, n), 40) for n in (1, 2, 3)]
    guide = Expecting(expecting(said, 4, 3))
    assert ask(pair.warm, ids_of(30), 12, guide=guide).ids == said
    assert any(what == Took(0, is_tried=False) for what in guide.told)
    assert all(other.done for other in others)


@pytest.mark.parametrize(
    ("tokens", "rows", "share", "expected"),
    [(1, 1, 0.1, False), (2, 1, 1.25, True), (2, 2, 1.25, False), (5, 4, 1.25, False)]
    + [(6, 4, 1.25, True), (16, 16, 1.25, False), (7, 16, 0.4, True), (6, 16, 0.4, False)],
)
def test_a_run_has_to_pay(tokens: int, rows: int, share: float, expected: bool) -> None:
    assert runs.pays(tokens, rows, share) is expected


def test_a_guide_that_fails_at_a_run_ends_its_row_alone(pair: Pair) -> None:
    class Faulty(Expecting):
        def took(self, what: Took) -> None:
            raise ZeroDivisionError("the guide is broken")

    said = pair.plain(ids_of(20, 4), 25)
    other = start(pair.warm, ids_of(20, 4), 25)
    guide = Faulty(lambda ids: Run((7, 9, 11), is_sure=True) if len(ids) == 2 else None)
    heard = start(pair.warm, ids_of(30), 9, guide=guide)
    assert heard.finish is Finish.ERROR and isinstance(heard.error, EngineFault)
    assert other.done and other.ids == said


def test_an_id_outside_the_vocabulary_ends_the_row(pair: Pair) -> None:
    guide = Expecting(lambda ids: Run((7, 10**6), is_sure=True) if len(ids) == 2 else None)
    assert start(pair.warm, ids_of(30), 9, guide=guide).finish is Finish.ERROR


def test_the_model_sees_the_newest_token_then_the_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch: Any = pair.warm._loop.batch
    shapes: list[tuple[int, ...]] = []
    real_forward, real_run = batch.lanes.forward, batch.lanes.run
    monkeypatch.setattr(
        batch.lanes, "forward", lambda x: (shapes.append((x.shape[0], 1)), real_forward(x))[1]
    )
    monkeypatch.setattr(
        batch.lanes, "run", lambda r, i: (shapes.append((1, len(i))), real_run(r, i))[1]
    )
    guide = Expecting(lambda ids: Run((7, 9, 11), is_sure=True) if len(ids) == 2 else None)
    ask(pair.warm, PROMPT, 7, guide=guide)
    assert shapes == [(1, 1), (1, 1), (1, 1), (1, 3), (1, 1)]
    assert isinstance(batch, Batch)
