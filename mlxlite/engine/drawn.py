"""Drawn: the tokens of one step, still on the device, with what is needed to check and report them.

A step's tokens are drawn before the host has seen the last ones, so everything that the host will
want to know of them travels along and is read at once: the ids, whether the candidates sufficed
(`sample`), and log-probabilities where a row asked for them (spec 20 section 8).

Runs on the engine thread. MLX types `tolist` as any nesting of any number; the ignored types below
say which one the array's dtype and shape give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxlite.engine import sample
from mlxlite.engine.row import Row
from mlxlite.types import TokenLogprob


@dataclass(slots=True)
class Drawn:
    """ids: (B,) uint32, in the order of rows.

    is_certain: bool (B,), or None if all are. keys: (B, 2). logits: (B, V) after penalties and
    masks, kept only while a draw may have to be repeated. logprob: (B,), top_ids and top_logprobs:
    (B, K), descending, or None if no row asked.
    """

    rows: list[Row]
    ids: mx.array
    is_certain: mx.array | None = None
    keys: mx.array | None = None
    logits: mx.array | None = None
    logprob: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        found = (self.ids, self.is_certain, self.logprob, self.top_ids, self.top_logprobs)
        return [array for array in found if array is not None]

    def read(self) -> tuple[list[int], list[bool]]:
        """Ids and certainty of each row, on the host; waits for the device."""
        ids: list[int] = self.ids.tolist()  # type: ignore[assignment]
        if self.is_certain is None:
            return ids, [True] * len(ids)
        certain: list[bool] = self.is_certain.tolist()  # type: ignore[assignment]
        return ids, certain

    def read_logprobs(self) -> list[TokenLogprob | None]:
        """One entry a row, None for rows that did not ask."""
        if self.logprob is None:
            return [None] * len(self.rows)
        chosen: list[float] = self.logprob.tolist()  # type: ignore[assignment]
        ids: list[int] = self.ids.tolist()  # type: ignore[assignment]
        tops: list[list[int]] = [[] for _ in ids]
        values: list[list[float]] = [[] for _ in ids]
        if self.top_ids is not None and self.top_logprobs is not None:
            tops = self.top_ids.tolist()  # type: ignore[assignment]
            values = self.top_logprobs.tolist()  # type: ignore[assignment]
        found: list[TokenLogprob | None] = []
        for i, row in enumerate(self.rows):
            count = row.spec.top_logprobs
            if count is None:
                found.append(None)
            else:
                best = zip(tops[i][:count], values[i][:count], strict=True)
                # What a mask forbids is no candidate; and its id may be of the padding in `top`.
                possible = tuple((token, value) for token, value in best if value > -math.inf)
                found.append(TokenLogprob(ids[i], chosen[i], possible))
        return found

    def replace(self, index: int, other: Drawn) -> None:
        """Put the single row of another draw in the place of one of ours."""

        def put(mine: mx.array | None, theirs: mx.array | None) -> mx.array | None:
            if mine is None or theirs is None:
                return mine
            return mx.concatenate([mine[:index], theirs, mine[index + 1 :]], axis=0)

        certain = other.is_certain
        if certain is None and self.is_certain is not None:
            certain = mx.array([True])
        ids = put(self.ids, other.ids)
        assert ids is not None
        self.ids = ids
        self.is_certain = put(self.is_certain, certain)
        self.keys = put(self.keys, other.keys)
        self.logits = put(self.logits, other.logits)
        self.logprob = put(self.logprob, other.logprob)
        self.top_ids = put(self.top_ids, other.top_ids)
        self.top_logprobs = put(self.top_logprobs, other.top_logprobs)


def add_logprobs(drawn: Drawn, logits: mx.array, most: int) -> None:
    """Queue the log-probabilities of a draw. logits: (B, V). most: how many of the best to give."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, drawn.ids[:, None].astype(mx.int32), axis=-1)
    drawn.logprob = (chosen - total)[:, 0]
    if most:
        best, drawn.top_ids = sample.top(logits, most)
        drawn.top_logprobs = best - total


def score(logits: mx.array, row: Row, ids: Sequence[int]) -> Drawn:
    """Tokens of a row that are given, as if they had been drawn. logits: (T, V). ids: T."""
    given = Drawn([row] * len(ids), mx.array(list(ids), dtype=mx.uint32))
    add_logprobs(given, logits, row.spec.top_logprobs or 0)
    return given


def most_logprobs(rows: Sequence[Row]) -> int | None:
    """The most that any of these rows wants of the best; None if none wants log-probabilities."""
    return max((r.spec.top_logprobs for r in rows if r.spec.top_logprobs is not None), default=None)
