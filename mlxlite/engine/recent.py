"""Bias and penalties that look at few tokens, for all rows of a step at once (spec 20 section 5).

A penalty changes the logits of the ids in its window and no others, so a window of twenty needs
twenty values, not all V. The window's tokens are on the host but for the newest, which is the
step's own input and may still be in flight; so there is no state to keep, and nothing to undo when
a token turns out wrong. Rows that look further back have counts of their own (`penalties`).

Order: bias, repetition, presence, frequency; each reads what the one before left. An id that occurs
twice is computed twice, to the same value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxlite.engine.row import Row
from mlxlite.types import Sampling

MOST_RECENT = 64  # tokens of the longest window that is looked at in this way
LARGEST = 1e30  # of a logit; float32 ends at 3e38. An infinite one makes every probability NaN


def windows_of(sampling: Sampling) -> tuple[int, int, int]:
    """How many tokens repetition, presence and frequency look at; 0 where one is off, and minus
    one for all tokens."""

    def one(is_on: bool, context: int) -> int:
        return (context or -1) if is_on else 0

    return (
        one(sampling.penalises_repetition, sampling.repetition_context),
        one(bool(sampling.presence_penalty), sampling.presence_context),
        one(bool(sampling.frequency_penalty), sampling.frequency_context),
    )


def looks_at_few(sampling: Sampling) -> bool:
    """Whether all that the sampling penalises is among the newest tokens, or it only has a bias."""
    return all(0 <= window <= MOST_RECENT for window in windows_of(sampling))


@dataclass(frozen=True, slots=True)
class Strengths:
    """Of the rows of a step, in their order; neutral for rows without. All (B, 1)."""

    width: int  # tokens of the longest window
    windows: tuple[mx.array, mx.array, mx.array]
    repetition: mx.array
    presence: mx.array
    frequency: mx.array
    bias: tuple[mx.array, mx.array, mx.array] | None  # rows (N,), ids (N,), amounts (N,)


def strengths_of(rows: Sequence[Row]) -> Strengths | None:
    """None if no row is adjusted here."""
    samplings = [row.spec.sampling if row.penalties is None else Sampling() for row in rows]
    windows = [windows_of(s) for s in samplings]
    biased = [(i, *pair) for i, s in enumerate(samplings) for pair in s.logit_bias]
    width = max(max(each) for each in windows)
    if width == 0 and not biased:
        return None

    def column(values: list[float] | list[int], dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(values, dtype=dtype)[:, None]

    def window(kind: int) -> mx.array:
        return column([each[kind] for each in windows], mx.int32)

    bias = None
    if biased:
        places, ids, amounts = zip(*biased, strict=True)
        bias = mx.array(places), mx.array(ids), mx.array(amounts, dtype=mx.float32)
    return Strengths(
        width=width,
        windows=(window(0), window(1), window(2)),
        repetition=column(
            [s.repetition_penalty if s.penalises_repetition else 1 for s in samplings]
        ),
        presence=column([s.presence_penalty for s in samplings]),
        frequency=column([s.frequency_penalty for s in samplings]),
        bias=bias,
    )


@dataclass(frozen=True, slots=True)
class Recent:
    """The newest tokens of each row, its input last. ids: (B, W) uint32. counts: (B, 1) int32, how
    many of them there are; what stands before them means nothing."""

    ids: mx.array
    counts: mx.array


def recent_of(
    rows: Sequence[Row], inputs: mx.array, on_host: Collection[Row], width: int, vocab_size: int
) -> Recent:
    """inputs: (B,) uint32. on_host: rows whose input is the last of their known tokens; those of
    the others are still in flight. width: W, at least 1."""
    tails, counts = [], []
    for row in rows:
        tail = row.newest(width if row in on_host else width - 1)
        if row in on_host:
            tail = tail[:-1]
        known = [token for token in tail if token < vocab_size]  # MLX does not check bounds
        counts.append(len(known) + 1)
        tails.append([0] * (width - 1 - len(known)) + known)
    last = inputs[:, None].astype(mx.uint32)
    ids = last if width == 1 else mx.concatenate([mx.array(tails, dtype=mx.uint32), last], axis=1)
    return Recent(ids, mx.array(counts, dtype=mx.int32)[:, None])


def adjusted(logits: mx.array, how: Strengths, recent: Recent | None) -> mx.array:
    """Logits (B, V) with bias and penalties applied, in their own dtype."""
    if how.bias is not None:
        places, ids, amounts = how.bias
        logits = logits.at[places, ids].add(amounts.astype(logits.dtype))
    if recent is None:
        return logits
    width = recent.ids.shape[1]
    age = mx.arange(width - 1, -1, -1, dtype=mx.int32)[None]
    same = recent.ids[:, :, None] == recent.ids[:, None, :]

    def times(kind: int) -> mx.array:
        """How often each of the ids is in the window of a penalty, (B, W)."""
        inside = (age < how.windows[kind]) & (age < recent.counts)
        return mx.sum(same & inside[:, None, :], axis=-1)

    ids = recent.ids.astype(mx.int32)
    values = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32)
    weaker = mx.where(values < 0, values * how.repetition, values / how.repetition)
    values = mx.where(times(0) > 0, weaker, values)
    values = values - how.presence * (times(1) > 0)
    values = values - how.frequency * times(2)
    values = mx.minimum(values, LARGEST)
    return mx.put_along_axis(logits, ids, values.astype(logits.dtype), axis=-1)
