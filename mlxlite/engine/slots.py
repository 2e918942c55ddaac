"""Slots: the caches of several rows in one set of buffers, so that one forward serves them all.

A model's own cache holds one sequence. Here each layer's buffer has a slot a row, (R, H, S, D), and
the rows of a forward are always slots 0..B-1, one new token each. A row's position is a number of
its own, so rows of any length stand side by side: no padding, and a row joins or leaves at the cost
of its own tokens alone (engine-notes sections 1 to 4).

    KVCache          -> Full    a column a position
    RotatingKVCache  -> Ring    position p in column p mod window
    ArraysCache      -> States  whole arrays, a row each
    CacheList        -> Several

Anything else has no slots, and its rows run alone. Prompts are run in the model's own caches,
before their rows come here. MLX does not check the bounds of such writes: `Plan` does.

Letters: R slots, B rows of a forward, H heads, S columns, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlxlite.engine.load import bare_package

bare_package()  # or mlx-lm's own package would import transformers
from mlx_lm.models.cache import (  # noqa: E402  (after the bare package)
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

SLAB = 256  # columns that a buffer grows by, at least; an eighth of its width if that is more


class Plan:
    """One forward, as all layers see it: which slots, at which positions, how many columns.

    Slots low..high-1 each run `count` tokens from their `positions` on, which are host numbers;
    more than one only in slots that are all `Full`. columns: what attention looks at. in_groups:
    see `make_mask`.
    """

    def __init__(self, in_groups: bool = False) -> None:
        self.in_groups = in_groups
        self.low = 0
        self.high = 0
        self.count = 1
        self.first = 0  # position of slot `low`
        self.columns = 0
        self.offsets = mx.zeros((0,), dtype=mx.int32)
        self.masks: dict[tuple[int, int | None, int | None], mx.array] = {}

    def set(self, low: int, positions: Sequence[int], columns: int, count: int = 1) -> None:
        if not positions or min(positions) < 0 or max(positions) + count > columns:
            raise IndexError(f"positions {list(positions)} do not fit {columns} columns")
        self.low, self.high = low, low + len(positions)
        self.columns, self.count, self.first = columns, count, positions[0]
        self.offsets = mx.array(list(positions), dtype=mx.int32)
        # As all layers index by: made once, of the type that MLX would else cast each to.
        self.slots = mx.arange(low, low + len(positions), dtype=mx.uint32)
        self.places = mx.array(list(positions), dtype=mx.uint32)
        self.masks.clear()

    def mask(self, columns: int, window: int | None, turn: int | None) -> mx.array:
        """Which columns each token sees, bool (B, 1, T, columns) with T of `count`.

        window: only so many of the newest positions. turn: the columns are a ring of so many.
        """
        key = columns, window, turn
        if key not in self.masks:
            places = self.offsets[:, None] + mx.arange(self.count, dtype=mx.int32)
            places = places[:, :, None]
            age = places - mx.arange(columns, dtype=mx.int32)
            if turn is not None:
                age = mx.remainder(age, turn)  # of a sign with the divisor: never negative
            seen = (age >= 0) & (age <= places)
            if window is not None:
                seen = seen & (age < window)
            self.masks[key] = seen[:, None]
        return self.masks[key]


class Full:
    """Attention over all positions. Takes a KVCache's place in a model's forward."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    # ------------------------------------------------------------------------ for the model

    @property
    def offset(self) -> mx.array:
        return self.plan.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write one position a row, or several of a single row; keys and values (B, H, T, D).
        Returns what to attend to."""
        assert self.keys is not None and self.values is not None
        plan = self.plan
        if keys.shape[2] != plan.count or keys.shape[0] != plan.high - plan.low:
            raise ValueError(f"slots take {plan.count} token(s) of each row, not {keys.shape}")
        if plan.count > 1:
            self._write_run(keys, values)
            return self.keys_and_values()
        column = self._column()
        self.keys[plan.slots, :, column] = keys[:, :, 0]
        self.values[plan.slots, :, column] = values[:, :, 0]
        return self.keys_and_values()

    def _write_run(self, keys: mx.array, values: mx.array) -> None:
        assert self.keys is not None and self.values is not None
        if type(self) is not Full or keys.shape[0] != 1:
            raise ValueError("only a single row of full attention takes several tokens at once")
        low, start = self.plan.low, self.plan.first
        where = (slice(low, low + 1), slice(None), slice(start, start + keys.shape[2]))
        self.keys[where] = keys
        self.values[where] = values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What to attend to; a layer that shares another one's cache asks for it alone."""
        assert self.keys is not None and self.values is not None
        wide = min(self.plan.columns, self.keys.shape[2])
        view = (slice(self.plan.low, self.plan.high), slice(None), slice(0, wide))
        return self.keys[view], self.values[view]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """return_array: an attention of the model's own will apply it. Gemma 2's keeps the heads
        that share a key apart, so that its scores have an axis more."""
        assert self.keys is not None
        mask = self.plan.mask(min(self.plan.columns, self.keys.shape[2]), window_size, None)
        return mask[:, :, None] if return_array and self.plan.in_groups else mask

    def _column(self) -> mx.array:
        return self.plan.places

    # ------------------------------------------------------------------------ for the pool

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    def resize(self, slots: int, columns: int) -> None:
        """Buffers of so many slots and columns; what fits of the old ones is kept."""
        if self.keys is None or self.values is None:
            return
        self.keys = _resized(self.keys, slots, self._columns(columns))
        mx.eval(self.keys)  # one at a time, so that the old and the new one are not all there
        self.values = _resized(self.values, slots, self._columns(columns))
        mx.eval(self.values)

    def load(self, slot: int, cache: Any, slots: int, columns: int) -> None:
        """Copy a row's own cache into its slot. slots, columns: of the pool, for the first one."""
        keys, values = self._read(cache)
        if self.keys is None or self.values is None:
            _, heads, _, size = keys.shape
            columns = self._columns(columns)
            self.keys = mx.zeros((slots, heads, columns, size), dtype=keys.dtype)
            self.values = mx.zeros((slots, heads, columns, values.shape[3]), dtype=values.dtype)
        self._fill(slot, keys, values)

    def extract(self, slot: int, count: int) -> Any:
        """A cache of the row's own, of its first `count` positions."""
        assert self.keys is not None and self.values is not None
        cache = KVCache()
        cache.state = (
            mx.contiguous(self.keys[slot : slot + 1, :, :count]),
            mx.contiguous(self.values[slot : slot + 1, :, :count]),
            count,
        )
        return cache

    def aside(self, slot: int, count: int) -> Any:
        """What takes this layer's place in a forward of several tokens of one row; `back` follows,
        or nothing was done. Full attention writes where it stands: what is behind a row's end is
        nobody's."""
        return self

    def back(self, slot: int, cache: Any) -> None:
        """What `aside` gave has the row's state now."""

    def move(self, source: int, target: int, count: int) -> None:
        """Copy a slot over another: out, evaluated, and in. Copied within the buffer at once, the
        whole buffer would be copied (engine-notes section 4)."""
        assert self.keys is not None and self.values is not None
        wide = min(count, self.keys.shape[2])
        out = [mx.contiguous(each[source : source + 1, :, :wide]) for each in self.arrays]
        mx.eval(out)
        self._fill(target, out[0], out[1])

    def _fill(self, slot: int, keys: mx.array, values: mx.array) -> None:
        """Write a slot's first columns (1, H, n, D), and zeros behind them: what was there may be
        NaN, which attention sums up though it is masked (engine-notes section 2)."""
        assert self.keys is not None and self.values is not None
        wide = keys.shape[2]
        self.keys[slot : slot + 1, :, :wide] = keys
        self.values[slot : slot + 1, :, :wide] = values
        if wide < self.keys.shape[2]:
            self.keys[slot : slot + 1, :, wide:] = 0
            self.values[slot : slot + 1, :, wide:] = 0

    def drop(self, slot: int) -> None:
        """A slot past the last row needs no emptying: whoever comes writes before it reads."""

    def _columns(self, columns: int) -> int:
        return columns

    def _read(self, cache: Any) -> tuple[mx.array, mx.array]:
        """Keys and values (1, H, n, D) of a row's own cache, in the columns they have here."""
        keys, values = cache.keys_and_values()
        return keys, values


class Ring(Full):
    """Attention over the newest `window` positions. Takes a RotatingKVCache's place."""

    def __init__(self, plan: Plan, window: int) -> None:
        super().__init__(plan)
        self.window = window

    @property
    def max_size(self) -> int:
        return self.window

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        assert self.keys is not None
        wide = min(self.plan.columns, self.keys.shape[2])
        return self.plan.mask(wide, min(window_size or self.window, self.window), self.window)

    def _column(self) -> mx.array:
        return mx.remainder(self.plan.places, self.window)

    def _columns(self, columns: int) -> int:
        return min(columns, self.window)

    def extract(self, slot: int, count: int) -> Any:
        assert self.keys is not None and self.values is not None
        held = min(count, self.window)
        start = count % self.window if count > self.window else 0  # column of the oldest
        parts = []
        for buffer in self.arrays:
            mine = buffer[slot : slot + 1, :, :held]
            if start:
                mine = mx.concatenate([mine[:, :, start:], mine[:, :, :start]], axis=2)
            parts.append(mx.contiguous(mine))
        cache = RotatingKVCache(max_size=self.window)
        cache.state = (parts[0], parts[1], count, 0, self.window, held)
        return cache

    def aside(self, slot: int, count: int) -> Any:
        return self.extract(slot, count)

    def back(self, slot: int, cache: Any) -> None:
        self._fill(slot, *self._read(cache))

    def move(self, source: int, target: int, count: int) -> None:
        super().move(source, target, min(count, self.window))

    def _read(self, cache: Any) -> tuple[mx.array, mx.array]:
        count = cache.offset
        held = min(count, self.window)
        start = count % self.window if count > self.window else 0
        found = []
        for buffer in (cache.keys, cache.values):
            ordered = cache._temporal_order(buffer)[:, :, -held:]
            if start:
                ordered = mx.concatenate([ordered[:, :, -start:], ordered[:, :, :-start]], axis=2)
            found.append(ordered)
        return found[0], found[1]


class States(ArraysCache):  # type: ignore[misc]  # mlx-lm is untyped; some models ask for its class
    """States of fixed size, such as recurrent ones. Takes an ArraysCache's place.

    The model replaces the arrays whole, so there is never a slot without a row.
    """

    cache: list[mx.array | None]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]

    def advance(self, N: int) -> None:
        """Rows all run one token, and none is padded."""

    def make_mask(self, N: int) -> None:
        return None

    def resize(self, slots: int, columns: int) -> None:
        """It always has as many as there are rows."""

    def load(self, slot: int, cache: Any, slots: int, columns: int) -> None:
        for index, theirs in enumerate(cache.cache):
            mine = self.cache[index]
            if mine is None:
                self.cache[index] = theirs
            else:
                assert slot == mine.shape[0], "rows join at the end"
                self.cache[index] = mx.concatenate([mine, theirs], axis=0)

    def extract(self, slot: int, count: int) -> Any:
        cache = ArraysCache(len(self.cache))
        cache.cache = [
            None if mine is None else mx.contiguous(mine[slot : slot + 1]) for mine in self.cache
        ]
        return cache

    def aside(self, slot: int, count: int) -> Any:
        return self.extract(slot, count)

    def back(self, slot: int, cache: Any) -> None:
        for index, (mine, theirs) in enumerate(zip(self.cache, cache.cache, strict=True)):
            if mine is not None and theirs is not None:
                self.cache[index] = mx.concatenate([mine[:slot], theirs, mine[slot + 1 :]], axis=0)

    def move(self, source: int, target: int, count: int) -> None:
        for index, mine in enumerate(self.cache):
            if mine is not None:
                order = list(range(mine.shape[0]))
                order[target] = source
                self.cache[index] = mine[mx.array(order)]

    def drop(self, slot: int) -> None:
        self.cache = [None if mine is None else mine[:slot] for mine in self.cache]
        if slot == 0:
            self.cache = [None] * len(self.cache)


class Several(CacheList):  # type: ignore[misc]  # mlx-lm is untyped
    """Several kinds in one layer. Takes a CacheList's place."""

    caches: tuple[Any, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for each in self.caches for array in each.arrays]

    def resize(self, slots: int, columns: int) -> None:
        for each in self.caches:
            each.resize(slots, columns)

    def load(self, slot: int, cache: Any, slots: int, columns: int) -> None:
        for mine, theirs in zip(self.caches, cache.caches, strict=True):
            mine.load(slot, theirs, slots, columns)

    def extract(self, slot: int, count: int) -> Any:
        return CacheList(*(each.extract(slot, count) for each in self.caches))

    def aside(self, slot: int, count: int) -> Any:
        return CacheList(*(each.aside(slot, count) for each in self.caches))

    def back(self, slot: int, cache: Any) -> None:
        for mine, theirs in zip(self.caches, cache.caches, strict=True):
            mine.back(slot, theirs)

    def move(self, source: int, target: int, count: int) -> None:
        for each in self.caches:
            each.move(source, target, count)

    def drop(self, slot: int) -> None:
        for each in self.caches:
            each.drop(slot)


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches themselves, lists of several kinds in one layer taken apart."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from leaves(cache.caches)
        else:
            yield cache


def copied(value: Any) -> Any:
    """A copy in memory of its own. mx.contiguous would keep a view of what already lies in one
    piece, such as the keys of a model with a single head."""
    return value * 1 if isinstance(value, mx.array) else value


def is_cuttable(leaf: Any) -> bool:
    """Whether a cache's state at any earlier position is a part of its state now."""
    return type(leaf) in (KVCache, Full)


def is_trimmable(leaf: Any) -> bool:
    """Whether a cache can always drop its newest tokens, in place. A window that has wrapped and a
    recurrent state cannot, and ConcatenateKVCache says that it can and does not (mlx-lm 0.32.2).
    """
    return is_cuttable(leaf) or type(leaf) is QuantizedKVCache


def merge(caches: Sequence[Any], parts: Sequence[Sequence[Any]], count: int) -> None:
    """Fill KVCaches, one a layer, with those of several rows, each with `count` tokens."""
    for place, cache in enumerate(caches):
        ours = [part[place] for part in parts]
        keys = mx.concatenate([each.keys[:, :, :count] for each in ours], axis=0)
        values = mx.concatenate([each.values[:, :, :count] for each in ours], axis=0)
        cache.state = (keys, values, count)


def split(caches: Sequence[Any], index: int, parts: Sequence[Any], count: int) -> None:
    """Fill a row's KVCaches with its `count` tokens of a merged one."""
    for cache, part in zip(caches, parts, strict=True):
        columns = -(-(count + 1) // SLAB) * SLAB
        filled = []
        for buffer in (cache.keys, cache.values):
            _, heads, _, size = buffer.shape
            own = mx.zeros((1, heads, columns, size), dtype=buffer.dtype)
            own[:, :, :count] = buffer[index : index + 1, :, :count]
            filled.append(own)
        part.state = (filled[0], filled[1], count)
        mx.eval(filled)


def is_plain(caches: Sequence[Any]) -> bool:
    """Whether every layer has one KVCache."""
    return all(type(cache) is KVCache for cache in caches)


def slots_for(cache: Any, plan: Plan) -> Any:
    """Slots that take the place of a cache in the model, or None: by its exact class, since a class
    derived from a known one may keep its positions in another way."""
    kind = type(cache)
    if kind is KVCache:
        return Full(plan)
    if kind is RotatingKVCache and cache.keep == 0:
        return Ring(plan, cache.max_size)
    if kind is ArraysCache and cache.left_padding is None:
        return States(len(cache.cache))
    if kind is CacheList:
        parts = [slots_for(each, plan) for each in cache.caches]
        return None if None in parts else Several(*parts)
    return None


def _resized(buffer: mx.array, slots: int, columns: int) -> mx.array:
    rows, heads, wide, size = buffer.shape
    if (rows, wide) == (slots, columns):
        return buffer
    new = mx.zeros((slots, heads, columns, size), dtype=buffer.dtype)
    keep = min(rows, slots), min(wide, columns)
    new[: keep[0], :, : keep[1]] = buffer[: keep[0], :, : keep[1]]
    return new
