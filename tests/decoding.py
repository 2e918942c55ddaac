"""Rows driven through real batches of the tiny model, with NumPy and no cache as the oracle.

A run joins, shuffles and cancels rows at random steps; what a row says must not depend on that.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxlite.engine import backend, load  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.batch import Batch
from mlxlite.engine.row import Phase, Row
from mlxlite.types import Finish, RowSpec, Sampling, TokenLogprob, Took, Verdict
from tests import tiny

import mlx.core as mx  # isort: skip

VOCAB = 512
_ids = itertools.count(1)


@functools.cache
def tiny_model(**config: Any) -> load.LoadedModel:
    entries = {**tiny.CONFIG, "vocab_size": VOCAB, **config}
    return load.LoadedModel(tiny.build(entries), entries, "float32", 0, 1024)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(1000 * seed + length).choices(range(3, VOCAB), k=length))


class Watching:
    """A guide that may steer; what it wants the test puts into the row itself."""

    may_steer = True

    def observe(self, ids: Sequence[int]) -> Verdict:
        return Verdict(keep=len(ids))

    def took(self, what: Took) -> None:
        raise AssertionError("no run was proposed")


def row_of(
    sampling: Sampling,
    prompt: Sequence[int] = (5, 9, 200, 31),
    max_tokens: int = 12,
    *,
    eos: Iterable[int] = (),
    is_steered: bool = False,
    top_logprobs: int | None = None,
) -> Row:
    guide = Watching() if is_steered else None
    spec = RowSpec(tuple(prompt), sampling, max_tokens, frozenset(eos), guide, top_logprobs)
    return Row(next(_ids), spec, lambda event: None)


def twin(row: Row) -> Row:
    """A fresh row that asks for the same."""
    return Row(next(_ids), row.spec, lambda event: None)


@dataclass
class Told:
    """What a row was told."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)


class Fickle(Batch):
    """A batch that looks at two candidates for ever, so that flat rows are redrawn at each step."""

    def __init__(self, model: load.LoadedModel, candidates: int = 2) -> None:
        super().__init__(model)
        self.lanes.may_pool = True
        self.vocab_size = VOCAB
        self._candidates = candidates
        self.redraws = self.reruns = 0

    def _adapt(self, sufficed: bool) -> None:
        pass

    def _redraw(self, *args: Any) -> int:
        self.redraws += 1
        return super()._redraw(*args)

    def _rerun(self, *args: Any) -> mx.array:
        self.reruns += 1
        return super()._rerun(*args)


class Sorting(Fickle):
    """A batch that sorts at each draw."""

    def __init__(self, model: load.LoadedModel) -> None:
        super().__init__(model, candidates=1 << 20)


def run(
    batch: Batch,
    rows: Sequence[Row],
    pick: random.Random | None = None,
    *,
    after: Callable[[Row, list[int]], None] | None = None,
    cancel: float = 0.0,
) -> list[Told]:
    """Prefill and decode rows to their ends.

    pick: rows join and trade places at random; without it all start at once. after: called at each
    token of a row that goes on, with all of its ids. cancel: chance a step that a row is given up.
    """
    told = {row: Told() for row in rows}

    def accept(row: Row, token: int, logprob: TokenLogprob | None) -> None:
        heard, spec = told[row], row.spec
        heard.ids.append(token)
        row.ids.append(token)
        heard.logprobs.append(logprob)
        fed = len(spec.prompt_ids) + len(heard.ids) - (len(heard.ids) == spec.max_tokens)
        assert row.length == fed
        own = row.cache or []  # None in a pool
        assert {part.offset for part in own if hasattr(part, "offset")} <= {fed}
        if token in spec.eos_ids:
            row.end(Finish.EOS)
        elif len(heard.ids) == spec.max_tokens:
            row.end(Finish.LENGTH)
        elif after is not None:
            after(row, heard.ids)

    coming, live = list(rows), list[Row]()
    while coming or live:
        while coming and (pick is None or pick.random() < 0.4):
            row = coming.pop(0)
            if row.prompt_left:
                batch.prefill(row, row.prompt_left)
                row.fed += row.prompt_left
            row.phase = Phase.DECODE
            live.append(row)
        if pick is not None and live:
            pick.shuffle(live)
            if pick.random() < cancel:
                live[0].end(Finish.CANCELLED)
        live = [row for row in live if row.phase is Phase.DECODE]
        batch.step(live, accept)
        live = [row for row in live if row.phase is Phase.DECODE]
    if batch.is_busy:
        batch.step([], accept)
    return [told[row] for row in rows]


def assert_close(
    found: Sequence[TokenLogprob | None], expected: Sequence[TokenLogprob | None]
) -> None:
    """The same log-probabilities, but for the rounding of a forward with other rows in it."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert one.id == other.id and len(one.top) == len(other.top)
        pairs = [(one.logprob, other.logprob)]
        pairs += [(a, b) for (_, a), (_, b) in zip(one.top, other.top, strict=True)]
        assert all(abs(a - b) < 1e-4 for a, b in pairs)


# ------------------------------------------------------------------------------- the oracle


def logits_after(model: load.LoadedModel, ids: Sequence[int]) -> np.ndarray:
    """The model's logits (V,) of the token after these, without a cache."""
    return np.array(model.model(mx.array([list(ids)]))[0, -1])


def penalised(logits: np.ndarray, history: Sequence[int], sampling: Sampling) -> np.ndarray:
    """Spec 20 section 5, with the history as a list; float32."""
    z = logits.astype(np.float32)
    known = [token for token in history if token < z.size]

    def window(size: int) -> list[int]:
        return known[-size:] if size else known

    for token, amount in sampling.logit_bias:
        z[token] += np.float32(amount)
    if sampling.repetition_penalty not in (0, 1):
        strength = np.float32(sampling.repetition_penalty)
        for token in set(window(sampling.repetition_context)):
            z[token] = z[token] * strength if z[token] < 0 else z[token] / strength
    for token in set(window(sampling.presence_context)):
        z[token] -= np.float32(sampling.presence_penalty)
    for token, count in Counter(window(sampling.frequency_context)).items():
        z[token] -= np.float32(sampling.frequency_penalty) * np.float32(count)
    return z
