"""What the prompt cache keeps of a row: spans of keys and values, and checkpoints of other state.

Payloads are copies that nothing writes to (engine-notes section 4): a view would pin the whole
buffer that it is of, and make that buffer's next write copy it. A row that reuses a prefix copies
the spans into a buffer of its own; 13 ms for a thousand tokens of a 135M model that take 12 s to
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxlite.engine.lanes import Lanes
from mlxlite.engine.prefix import Match
from mlxlite.engine.row import Row
from mlxlite.engine.slots import SLAB, copied, is_cuttable, leaves

Pair = tuple[mx.array, mx.array]  # keys (1, H, T, D), values (1, H, T, D')


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Keys and values of a run of tokens, one pair a cuttable cache. A `prefix.Span`."""

    tokens: int
    pairs: tuple[Pair, ...]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.pairs)

    @property
    def buffers(self) -> int:
        return 2 * len(self.pairs)

    def split(self, at: int) -> tuple[KVSpan, KVSpan]:
        return self._part(0, at), self._part(at, self.tokens)

    def _part(self, start: int, stop: int) -> KVSpan:
        return _span(stop - start, [_cut(pair, 0, start, stop) for pair in self.pairs])


@dataclass(frozen=True, slots=True)
class State:
    """The state of the caches that cannot be cut, at one position. A `prefix.Checkpoint`."""

    states: tuple[Any, ...]  # as the caches' own `state` gives and takes it

    @property
    def _arrays(self) -> list[mx.array]:
        found: list[tuple[str, Any]] = tree_flatten(self.states)  # type: ignore[assignment]  # MLX: or a dict
        return [leaf for _, leaf in found if isinstance(leaf, mx.array)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    @property
    def buffers(self) -> int:
        return len(self._arrays)


def span_of(row: Row, lanes: Lanes, start: int, stop: int) -> KVSpan:
    """Copy what the row's caches hold of positions start..stop-1."""
    caches, slot = _place(row, lanes)
    pairs = [
        _cut((leaf.keys, leaf.values), slot, start, stop)
        for leaf in leaves(caches)
        if is_cuttable(leaf)
    ]
    return _span(stop - start, pairs)


def state_of(row: Row, lanes: Lanes) -> State:
    """Copy the row's state in the caches that cannot be cut, at its length."""
    caches, slot = _place(row, lanes)
    states = []
    for leaf in leaves(caches):
        if is_cuttable(leaf):
            continue
        own = leaf if lanes.pool_of(row) is None else leaf.extract(slot, row.length)
        states.append(tree_map(copied, own.state))
    found = State(tuple(states))
    mx.eval(found._arrays)
    return found


def restore(match: Match, caches: list[Any]) -> None:
    """Fill a row's fresh caches with what was kept."""
    count = match.length
    spans: list[tuple[KVSpan, int]] = match.pieces  # type: ignore[assignment]  # we put them there
    state: Any = match.checkpoint
    states = iter(() if state is None else state.states)
    place = 0
    every: list[mx.array] = []
    for leaf in leaves(caches):
        if not is_cuttable(leaf):
            leaf.state = tree_map(copied, next(states))  # a window is written in place
            continue
        columns = -(-(count + 1) // SLAB) * SLAB
        filled = []
        for which in (0, 1):
            first = spans[0][0].pairs[place][which]
            buffer = mx.zeros((1, first.shape[1], columns, first.shape[3]), dtype=first.dtype)
            at = 0
            for span, used in spans:
                buffer[:, :, at : at + used] = span.pairs[place][which][:, :, :used]
                at += used
            filled.append(buffer)
        leaf.state = (filled[0], filled[1], count)
        place += 1
        every += filled
    mx.eval(every)


def _place(row: Row, lanes: Lanes) -> tuple[Sequence[Any], int]:
    """The caches that hold a row, and where in them."""
    if (pool := lanes.pool_of(row)) is not None:
        return pool.slot(row)
    assert row.cache is not None
    return row.cache, 0


def _cut(pair: Pair, slot: int, start: int, stop: int) -> Pair:
    keys, values = (copied(each[slot : slot + 1, :, start:stop]) for each in pair)
    return keys, values


def _span(tokens: int, pairs: list[Pair]) -> KVSpan:
    mx.eval(pairs)
    return KVSpan(tokens, tuple(pairs))
