"""Bias and penalties that look at many tokens, or all (spec 20 section 5).

Order: logit bias, repetition, presence, frequency; each reads what the one before left. A penalty
looks at a window of the row's history, which is its prompt followed by every token of its answer,
the one in flight included. That token is not on the host yet, so the history lives on the device:
counts of each id, kept up to date by one addition and, once the window is full, one subtraction a
token.

Owned by its row; runs on the engine thread. Rows that look at few tokens have no such object: they
are adjusted all at once (`recent`).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxlite.engine.recent import LARGEST, looks_at_few
from mlxlite.types import Sampling


class History:
    """How often each id occurs in the last `window` tokens; 0 means in all of them.

    counts: (V,) int32.
    """

    def __init__(self, ids: Sequence[int], window: int, vocab_size: int) -> None:
        known = [token for token in ids if token < vocab_size]  # MLX does not check bounds
        recent = known[-window:] if window else known
        self.counts = mx.zeros(vocab_size, dtype=mx.int32)
        if recent:
            self.counts = self.counts.at[mx.array(recent)].add(1)
        self._window = window
        self._length = len(recent)
        self._next = self._length % window if window else 0
        # The tokens of the window in a ring, so that the one that leaves it is known.
        padded = [*recent, *[0] * (window - len(recent))]
        self._ring = mx.array(padded, dtype=mx.uint32) if window else None
        self._before = (self.counts, self._ring, self._length, self._next)

    def push(self, token: mx.array) -> None:
        """Take in one token, a scalar array that need not be evaluated yet."""
        self._before = (self.counts, self._ring, self._length, self._next)
        counts = self.counts
        if self._ring is not None:
            if self._length == self._window:
                counts = counts.at[self._ring[self._next]].add(-1)
            else:
                self._length += 1
            place = mx.arange(self._window) == self._next
            self._ring = mx.where(place, token, self._ring)
            self._next = (self._next + 1) % self._window
        self.counts = counts.at[token].add(1)

    def undo(self) -> None:
        """Take the newest token out again; once after each push at most."""
        self.counts, self._ring, self._length, self._next = self._before

    @property
    def arrays(self) -> list[mx.array]:
        return [self.counts] if self._ring is None else [self.counts, self._ring]


class Penalties:
    """The bias and penalties of one row, with the histories they read."""

    def __init__(self, sampling: Sampling, ids: Sequence[int], vocab_size: int) -> None:
        """ids: the row's prompt, without the token that is its next input."""
        self._sampling = sampling
        self._bias: mx.array | None = None
        if sampling.logit_bias:
            places = mx.array([token for token, _ in sampling.logit_bias])
            amounts = mx.array([amount for _, amount in sampling.logit_bias], dtype=mx.float32)
            self._bias = mx.zeros(vocab_size, dtype=mx.float32).at[places].add(amounts)
        windows = []
        if sampling.penalises_repetition:
            windows.append(sampling.repetition_context)
        if sampling.presence_penalty:
            windows.append(sampling.presence_context)
        if sampling.frequency_penalty:
            windows.append(sampling.frequency_context)
        self._histories = {w: History(ids, w, vocab_size) for w in set(windows)}

    def push(self, token: mx.array) -> None:
        """Take in the row's newest token, before its successor is drawn."""
        for history in self._histories.values():
            history.push(token)

    def undo(self) -> None:
        """Take the newest token out again."""
        for history in self._histories.values():
            history.undo()

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits (V,) of one row, adjusted, float32."""
        sampling = self._sampling
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = logits + self._bias
        if sampling.penalises_repetition:
            strength = sampling.repetition_penalty
            seen = self._histories[sampling.repetition_context].counts > 0
            weaker = mx.where(logits < 0, logits * strength, logits / strength)
            logits = mx.where(seen, weaker, logits)
        if sampling.presence_penalty:
            seen = self._histories[sampling.presence_context].counts > 0
            logits = logits - sampling.presence_penalty * seen
        if sampling.frequency_penalty:
            counts = self._histories[sampling.frequency_context].counts
            logits = logits - sampling.frequency_penalty * counts
        return mx.minimum(logits, LARGEST)

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated with every step, or its graph would grow."""
        return [array for history in self._histories.values() for array in history.arrays]


def penalties_of(sampling: Sampling, ids: Sequence[int], vocab_size: int) -> Penalties | None:
    """The object of a row, or None where it looks at few tokens or none: `recent` does that."""
    return None if looks_at_few(sampling) else Penalties(sampling, ids, vocab_size)
