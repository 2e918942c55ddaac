"""Rotary embeddings on a CPU: the sines of a forward once, not twice a layer.

MLX has no kernel of its own for them there: each of the two calls a layer is some forty operations,
of which nine tenths find the same angles anew. A model of 30 layers spends a tenth of a decode step
on that. Here layers that rotate alike share a table, and what is left of a call is

    x cos + swapped(x) sin        with (x2, x1) for (x1, x2) and (-sin, sin) for sin

which gives the same bits as `mx.fast.rope` (RoFormer, arXiv 2104.09864; Su et al.).

    forward of 4 rows:  layer 1  q -> table(offsets) new;  k -> known;  layer 2  q -> known; ...

Float32 and halves that are rotated against each other only; anything else goes the usual way.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

Turn = tuple[mx.array, mx.array]  # cos and (-sin, sin)


class Table:
    """Sines and cosines of the newest positions. inverse: (D / 2,) angles per position, float32."""

    def __init__(self, inverse: mx.array, scale: float) -> None:
        self._inverse = inverse
        self._scale = scale
        self.known: tuple[int | mx.array | None, int, Turn | None] = (None, 0, None)
        """Of which offset and count, and what was found."""

    def __call__(self, offset: int | mx.array, count: int) -> Turn:
        """cos and (-sin, sin), each (count, D), or (B, 1, count, D) with an offset a row (B,).

        An array is known by being the same object: slots make a new one for each forward, and
        nobody writes to it.
        """
        before, so_many, found = self.known
        is_known = offset is before or (
            type(offset) is int and type(before) is int and offset == before
        )
        if found is None or not is_known or count != so_many:
            found = self._made(offset, count)
            self.known = offset, count, found
        return found

    def _made(self, offset: int | mx.array, count: int) -> Turn:
        if isinstance(offset, mx.array) and offset.size > 1:
            offset = offset[:, None, None]
        places = (mx.arange(count, dtype=mx.float32) + offset) * self._scale
        angles = places[..., None] * self._inverse
        cos, sin = mx.cos(angles), mx.sin(angles)
        return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


class _Shared(nn.Module):
    """What takes the place of a rotary module, as a class derived from the module's own."""

    dims: int
    table: Table

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x: (B, H, T, D or more)."""
        if x.dtype != mx.float32 or x.ndim != 4:
            out: mx.array = super().__call__(x, offset)
            return out
        cos, sin = self.table(offset, x.shape[2])
        half, size = self.dims // 2, self.dims
        swapped = mx.concatenate([x[..., half:size], x[..., :half]], axis=-1)
        if x.shape[3] == size:
            return x * cos + swapped * sin
        turned = x[..., :size] * cos + swapped * sin
        return mx.concatenate([turned, x[..., size:]], axis=-1)


def install(model: Any) -> int:
    """Let a model's rotary modules share their tables. Returns how many do."""
    tables: dict[Any, Table] = {}
    classes: dict[type, Any] = {}
    count = 0

    def replaced(_: str, layer: Any) -> Any:
        nonlocal count
        if (found := _angles(layer)) is None:
            return layer
        inverse, scale = found
        kind = type(layer)
        shared = classes.setdefault(kind, type(f"Shared{kind.__name__}", (_Shared, kind), {}))
        new: Any = shared.__new__(shared)
        nn.Module.__init__(new)
        vars(new).update(vars(layer))
        for name, value in layer.items():
            new[name] = value
        key = (str(inverse.tolist()), scale)
        new.table = tables.setdefault(key, Table(inverse, scale))
        count += 1
        return new

    model.update_modules(
        tree_map_with_path(replaced, model.leaf_modules(), is_leaf=nn.Module.is_module)
    )
    return count


def _angles(layer: Any) -> tuple[mx.array, float] | None:
    """Angles per position (D / 2,) and the positions' scale of a rotary module; None for others.

    By the exact class, as in `turned`; mlx-lm's two are those that only have frequencies of their
    own.
    """
    name = type(layer).__name__
    theirs = type(layer).__module__ == "mlx_lm.models.rope_utils"
    if type(layer) is nn.RoPE:
        half = layer.dims // 2
        steps = mx.arange(0, -half, -1, dtype=mx.float32)
        inverse = mx.exp(steps * (math.log(layer.base) / half))
        scale = layer.scale
    elif theirs and name in ("Llama3RoPE", "ProportionalRoPE"):
        inverse, scale = mx.reciprocal(layer._freqs.astype(mx.float32)), 1.0
    else:
        return None
    if layer.traditional or inverse.size * 2 != layer.dims:
        return None
    mx.eval(inverse)
    return inverse, scale
