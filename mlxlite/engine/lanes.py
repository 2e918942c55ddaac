"""Lanes: which rows share a forward, and in whose buffers.

A row on its own runs in the model's own cache, exactly as mlx-lm would. As soon as two rows decode,
they share a pool of slots and one forward. Rows of very different length do not: a pool is as wide
as its longest row, so a short row beside a long one would cost the long one's memory and attention.
Such rows get a pool each (engine-notes section 10, point 25).

Everything here runs on the engine thread; positions are host numbers (`Row.length`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxlite.engine.memory import POOL_FACTOR, SHORT_COLUMNS, SPREAD
from mlxlite.engine.row import Phase, Row
from mlxlite.engine.slots import SLAB, Plan, copied, is_trimmable, leaves, slots_for

_CPU_VIEW = 32  # columns


@dataclass(slots=True)
class Trial:
    """A run that may be gone back on. kept: copies of what cannot be trimmed of a row of its own,
    as it was before. caches: the row's, after it."""

    row: Row
    ids: Sequence[int]
    kept: Sequence[Any] | None = None
    caches: Sequence[Any] = ()


class Pool:
    """Slots for rows that decode together. Row i of `rows` is in slot i, always."""

    def __init__(self, model: Any, kinds: Sequence[Any]) -> None:
        self._model = model
        attentions = [getattr(layer, "self_attn", None) for layer in getattr(model, "layers", ())]
        self._plan = Plan(any(getattr(each, "repeats", 1) > 1 for each in attentions))
        self._slots = [slots_for(kind, self._plan) for kind in kinds]
        self.rows: list[Row] = []
        self._capacity = 0
        self._columns = 0

    @property
    def arrays(self) -> list[mx.array]:
        return [array for slots in self._slots for array in slots.arrays]

    def takes(self, row: Row) -> bool:
        """Whether the row is of the others' length, about."""
        lengths = [other.length for other in self.rows] + [row.length]
        return _go_together(lengths)

    def longest_misfit(self) -> Row | None:
        """A row that has grown too long for the others."""
        if _go_together([row.length for row in self.rows]):
            return None
        return max(self.rows, key=lambda row: row.length)

    def join(self, row: Row) -> None:
        """Copy a row's own cache into the next slot."""
        assert row.cache is not None
        count = len(self.rows) + 1
        self._make_room(count, row.length + 1)
        for slots, cache in zip(self._slots, row.cache, strict=True):
            slots.load(count - 1, cache, self._capacity, self._columns)
        mx.eval(self.arrays)
        row.cache = None
        row.was_pooled = True
        self.rows.append(row)

    def leave(self, row: Row, keeps_cache: bool) -> None:
        """Free a row's slot; the last row moves there. keeps_cache: it goes on elsewhere."""
        index, last = self.rows.index(row), len(self.rows) - 1
        if keeps_cache:
            row.cache = self.extract(row)
        if index != last:
            for slots in self._slots:
                slots.move(last, index, self.rows[last].length)
            self.rows[index] = self.rows[last]
        self.rows.pop()
        for slots in self._slots:
            slots.drop(last)
        if 0 < last and POOL_FACTOR * last < self._capacity:
            self._resize(last + last // 2, self._columns)
        mx.eval(self.arrays)

    def extract(self, row: Row) -> list[Any]:
        """A copy of a row's state, as caches of the model's own kinds."""
        index = self.rows.index(row)
        found = [slots.extract(index, row.length) for slots in self._slots]
        mx.eval(cache_arrays(found))
        return found

    def slot(self, row: Row) -> tuple[list[Any], int]:
        """All layers' slots and the row's index in them."""
        return self._slots, self.rows.index(row)

    def forward(self, inputs: mx.array) -> mx.array:
        """Logits (B, V) after one more token (B,) of every row."""
        longest = max(row.length for row in self.rows) + 1
        self._make_room(len(self.rows), longest)
        self._plan.set(0, [row.length for row in self.rows], self._view(longest))
        logits: mx.array = self._model(inputs[:, None], cache=self._slots)
        for row in self.rows:
            row.stepped += 1
        return logits[:, -1, :]

    def forward_again(self, row: Row, token: int) -> mx.array:
        """Logits (1, V) of a row whose newest token was wrong and is replaced."""
        row.stepped -= 1
        index = self.rows.index(row)
        self._plan.set(index, [row.length], self._view(row.length + 1))
        logits: mx.array = self._model(mx.array([[token]], dtype=mx.uint32), cache=self._slots)
        row.stepped += 1
        return logits[:, -1, :]

    def run(self, row: Row, ids: Sequence[int]) -> tuple[mx.array, list[Any]]:
        """Logits (T, V) after each of several more tokens of one row, and its layers' caches then,
        which `take_back` puts in their place."""
        index, longest = self.rows.index(row), row.length + len(ids)
        self._make_room(len(self.rows), longest)
        self._plan.set(index, [row.length], self._view(longest), len(ids))
        caches = [slots.aside(index, row.length) for slots in self._slots]
        logits: mx.array = self._model(mx.array([list(ids)], dtype=mx.uint32), cache=caches)
        return logits[0], caches

    def take_back(self, row: Row, caches: Sequence[Any]) -> None:
        index = self.rows.index(row)
        for slots, cache in zip(self._slots, caches, strict=True):
            slots.back(index, cache)

    def _view(self, longest: int) -> int:
        """Columns that attention looks at. A GPU wants shapes that seldom change (decision D23), a
        CPU as few columns as possible: 256 instead of 64 cost it a fifth of a step of 16 rows."""
        if mx.default_device() == mx.Device(mx.cpu):
            step = _CPU_VIEW
        else:
            step = max(SLAB, 1 << max((longest - 1).bit_length() - 2, 0))
        return min(-(-longest // step) * step, self._columns)

    def _make_room(self, count: int, columns: int) -> None:
        capacity, wide = self._capacity, self._columns
        if count > capacity:
            capacity = count + count // 2
        if columns > wide:
            step = max(SLAB, columns // 8 // SLAB * SLAB)
            wide = -(-columns // step) * step
        self._resize(capacity, wide)

    def _resize(self, capacity: int, columns: int) -> None:
        if (capacity, columns) == (self._capacity, self._columns):
            return
        self._capacity, self._columns = capacity, columns
        for slots in self._slots:
            slots.resize(capacity, columns)


def _go_together(lengths: Sequence[int]) -> bool:
    return max(lengths) + 1 <= max(SHORT_COLUMNS, SPREAD * min(lengths))


class Lanes:
    """Where each decoding row is. may_pool: whether the model's caches have slots that give the
    same answers; until that is known, every row runs alone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.may_pool = False
        self.pools: list[Pool] = []
        self.alone: list[Row] = []

    def new_cache(self) -> list[Any]:
        """The model's own caches, empty, one a layer."""
        if hasattr(self._model, "make_cache"):
            return list(self._model.make_cache())
        from mlx_lm.models.cache import KVCache  # `slots` put the bare package in place

        return [KVCache() for _ in self._model.layers]

    def has_slots(self) -> bool:
        """Whether every layer's cache is of a kind that slots can stand for."""
        return all(slots_for(kind, Plan()) is not None for kind in self.new_cache())

    def arrange(self, rows: Sequence[Row]) -> list[Row]:
        """Give each of these rows its place; whoever is not among them loses it.

        Returns them in the order of `forward`: pool by pool, then those alone.
        """
        wanted = set(rows)
        for pool in list(self.pools):
            for row in [row for row in pool.rows if row not in wanted]:
                self.release(row)
            while (misfit := pool.longest_misfit() if pool.rows else None) is not None:
                pool.leave(misfit, keeps_cache=True)
                self.alone.append(misfit)
        placed = {row for pool in self.pools for row in pool.rows}
        self.alone = [row for row in self.alone if row in wanted]
        placed.update(self.alone)
        for row in rows:
            if row not in placed:
                if row.cache is None:  # a prompt of one token has no prefill
                    row.cache = self.new_cache()
                self.alone.append(row)
        if self.may_pool and len(rows) > 1:
            if len(self.pools) > 1:
                self._merge_pools()
            self._bring_together()
        return self.rows

    def _merge_pools(self) -> None:
        """Two pools whose rows have come to be of one length, about, need one forward."""
        for small in sorted(self.pools, key=lambda pool: len(pool.rows)):
            mine = [row.length for row in small.rows]
            for large in self.pools:
                if large is small or not _go_together([*mine, *(r.length for r in large.rows)]):
                    continue
                for row in list(small.rows):
                    small.leave(row, keeps_cache=True)
                    large.join(row)
                self.pools.remove(small)
                return

    def _bring_together(self) -> None:
        loose, self.alone = self.alone, []
        while loose:
            row = loose.pop(0)
            if row.length == 0:  # its caches are empty still, and of no known shape
                self.alone.append(row)
                continue
            pool = next((pool for pool in self.pools if pool.takes(row)), None)
            if pool is None:
                lengths = (other.length for other in loose if other.length)
                partner = next((n for n in lengths if _go_together([n, row.length])), None)
                if partner is None:
                    self.alone.append(row)
                    continue
                pool = Pool(self._model, self.new_cache())
                self.pools.append(pool)
            pool.join(row)

    def release(self, row: Row) -> None:
        """Take a row out of its place: one that still decodes keeps its cache."""
        if row in self.alone:
            self.alone.remove(row)
        if (pool := self.pool_of(row)) is not None:
            pool.leave(row, keeps_cache=row.phase is Phase.DECODE)
            if not pool.rows:
                self.pools.remove(pool)

    def forget(self) -> None:
        """Drop every row, after a failed step or when all have ended."""
        self.pools, self.alone = [], []

    def pool_of(self, row: Row) -> Pool | None:
        return next((pool for pool in self.pools if row in pool.rows), None)

    def forward(self, inputs: mx.array) -> mx.array:
        """Logits (B, V) after one more token (B,) of every row, in the order of `arrange`."""
        logits: list[mx.array] = []
        start = 0
        for pool in self.pools:
            stop = start + len(pool.rows)
            logits.append(pool.forward(inputs[start:stop]))
            start = stop
        for index, row in enumerate(self.alone, start):
            logits.append(self._model(inputs[index : index + 1][None], cache=row.cache)[:, -1, :])
            row.stepped += 1
        return logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=0)

    def forward_again(self, row: Row, token: int) -> mx.array:
        """Logits (1, V) of a row whose newest token was wrong and is replaced. Only for caches that
        can always drop their newest token."""
        if (pool := self.pool_of(row)) is not None:
            return pool.forward_again(row, token)
        assert row.cache is not None
        for part in row.cache:
            part.trim(1)
        logits: mx.array = self._model(mx.array([[token]], dtype=mx.uint32), cache=row.cache)
        return logits[:, -1, :]

    def run(self, row: Row, ids: Sequence[int]) -> mx.array:
        """Logits (T, V) after each of several more tokens of one row, in a forward of its own."""
        logits, caches = self._run(row, ids)
        self._settle(row, caches, len(ids))
        return logits

    def begin_trial(self, row: Row, ids: Sequence[int]) -> Trial:
        """A `run` that may be gone back on, not run yet."""
        if self.pool_of(row) is not None:
            return Trial(row, ids)  # its slots stay as they are until the end
        rest = [leaf for leaf in leaves(row.cache or []) if not is_trimmable(leaf)]
        return Trial(row, ids, [tree_map(copied, leaf.state) for leaf in rest])

    def run_trial(self, trial: Trial) -> mx.array:
        """Logits (T, V) after each of its ids; `end_trial` has to follow."""
        logits, trial.caches = self._run(trial.row, trial.ids)
        return logits

    def end_trial(self, trial: Trial, count: int) -> None:
        """The row has the first `count` of the ids, one at least. Full attention forgets the rest;
        with any other state the row goes again from where it was (spec 50 section 8.5)."""
        row, caches, surplus = trial.row, trial.caches, len(trial.ids) - count
        if surplus:
            is_redone = not all(is_trimmable(leaf) for leaf in leaves(caches))
            if trial.kept is not None:
                states = iter(trial.kept)
                for leaf in leaves(caches):
                    if not is_trimmable(leaf):
                        leaf.state = next(states)
                    else:
                        leaf.trim(len(trial.ids) if is_redone else surplus)
            if is_redone:
                _, caches = self._run(row, trial.ids[:count])
        self._settle(row, caches, count)

    def _run(self, row: Row, ids: Sequence[int]) -> tuple[mx.array, list[Any]]:
        if (pool := self.pool_of(row)) is not None:
            return pool.run(row, ids)
        assert row.cache is not None
        logits: mx.array = self._model(mx.array([list(ids)], dtype=mx.uint32), cache=row.cache)
        return logits[0], row.cache

    def _settle(self, row: Row, caches: Sequence[Any], count: int) -> None:
        row.stepped += count
        if (pool := self.pool_of(row)) is not None:
            pool.take_back(row, caches)

    @property
    def rows(self) -> list[Row]:
        return [row for pool in self.pools for row in pool.rows] + self.alone

    @property
    def arrays(self) -> list[mx.array]:
        """Every buffer. They are evaluated with each step: one that stays lazy is copied whole at
        its next write, and so is one of which a view is alive (engine-notes section 4)."""
        found = [array for pool in self.pools for array in pool.arrays]
        for row in self.alone:
            found += cache_arrays(row.cache or [])
        return found


def cache_arrays(cache: list[Any]) -> list[mx.array]:
    """The buffers of a cache themselves, not views of them."""
    found: list[mx.array] = []
    for part in cache:
        if hasattr(part, "caches"):  # several kinds in one layer (CacheList)
            found.extend(cache_arrays(list(part.caches)))
            continue
        leaves: list[tuple[str, Any]] = tree_flatten(vars(part))  # type: ignore[assignment]  # MLX: or a dict
        found.extend(leaf for _, leaf in leaves if isinstance(leaf, mx.array))
    return found
