"""Turned products: on a CPU, the linear layers of a few rows the other way round.

A layer computes x W^T, with x (n, K) of n rows and W (N, K). The BLAS may be quicker at W x^T,
whose transpose is the same, and at more rows than there are, of zeros: MKL on an AVX2 machine takes
54 ms instead of 69 for all products of a step of 4 rows of a 135M model, 60 instead of 92 for 16,
and also 60 for 5, filled up to 16; on an AVX-512 machine next to nothing is gained. So the times of
each shape of the model's weights are measured once an engine has started, and layers go by them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

log = logging.getLogger(__name__)

SIZES = (2, 3, 4, 8, 16, 32, 48, 64)  # rows that are measured; fewer are filled up to one of them
MOST_ROWS = SIZES[-1]
_ROUNDS = 5
_GAIN = 0.93  # of the time at most, or it stays as it is
# Of a shape, as many weights are measured as have this size together: more than stays in a cache
# while the other shapes have their turn. The rest of a single larger one is left out.
_MEASURED_BYTES = 24 * 2**20
_LARGEST_BYTES = 64 * 2**20
_SMALLEST_BYTES = 256 * 2**10  # of a weight; the product of a smaller one is no time to save


class Shape:
    """The weights (N, K) of one shape. sizes: for each number of rows up to MOST_ROWS, with how
    many a product is turned, 0 if it is not."""

    def __init__(self) -> None:
        self.weights: list[mx.array] = []
        self.sizes = [0] * (MOST_ROWS + 1)

    def size(self, x: mx.array) -> int:
        """With how many rows the product of x (..., K) is turned, 0 if it is not."""
        rows = x.size // max(x.shape[-1], 1)
        return self.sizes[rows] if rows <= MOST_ROWS else 0


class Turn:
    """Which products this process turns. One object, shared by all layers of a model."""

    def __init__(self) -> None:
        self._shapes: dict[str, Shape] = {}

    def add(self, weight: mx.array) -> Shape:
        """Know a layer's weight; what is found out about its shape will be there."""
        shape = self._shapes.setdefault("x".join(map(str, weight.shape)), Shape())
        shape.weights.append(weight)
        return shape

    @property
    def sizes(self) -> dict[str, list[int]]:
        """What was found out, for `take`."""
        return {name: shape.sizes for name, shape in self._shapes.items()}

    def take(self, sizes: Any) -> bool:
        """Go by what was found out before; False if that is not what it would be here."""
        if not isinstance(sizes, dict) or sizes.keys() != self._shapes.keys():
            return False
        for found in sizes.values():
            if not isinstance(found, list) or len(found) != MOST_ROWS + 1:
                return False
            if any(size and (size not in SIZES or size < rows) for rows, size in enumerate(found)):
                return False
        for name, shape in self._shapes.items():
            shape.sizes = sizes[name]
        return True

    def measure(self) -> Iterator[None]:
        """Find out what pays, on the model's own weights; a few products between yields."""
        ways = (plain, turned)
        shapes = [s for s in self._shapes.values() if s.weights[0].nbytes >= _SMALLEST_BYTES]
        best: dict[tuple[Any, Shape, int], float] = {}
        for _ in range(_ROUNDS):
            for size, way in itertools.product(SIZES, ways):
                for shape in shapes:
                    weights = _sample(shape.weights)
                    x = mx.ones((size, weights[0].shape[1]), dtype=weights[0].dtype)
                    started = time.perf_counter()
                    mx.eval([way(x, weight) for weight in weights])
                    spent_s = time.perf_counter() - started
                    key = way, shape, size
                    best[key] = min(best.get(key, spent_s), spent_s)
                    yield
        for shape in shapes:
            shape.sizes = chosen(
                *({size: best[way, shape, size] for size in SIZES} for way in ways)
            )
        log.debug("with so many rows products are turned: %s", self.sizes)


def _sample(weights: list[mx.array]) -> list[mx.array]:
    """Some of the weights of a shape."""
    first = weights[0]
    if first.nbytes > _LARGEST_BYTES:
        return [first[: max(1, first.shape[0] * _LARGEST_BYTES // first.nbytes)]]
    return weights[: -(-_MEASURED_BYTES // max(first.nbytes, 1))]


def chosen(as_it_is: Mapping[int, float], other: Mapping[int, float]) -> list[int]:
    """For 0 to MOST_ROWS rows, how many to turn with, from the times of SIZES rows as it is and
    turned. What lies between two sizes takes as long as the larger one, as it is."""
    found = [0, 0]
    for rows in range(2, MOST_ROWS + 1):
        sizes = [size for size in SIZES if size >= rows]
        best = min(sizes, key=lambda size: other[size])
        found.append(best if other[best] < _GAIN * as_it_is[sizes[0]] else 0)
    return found


def plain(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., K), weight (N, K) -> (..., N)."""
    return x @ weight.T


def turned(x: mx.array, weight: mx.array, size: int = 0) -> mx.array:
    """The same, as the transpose of weight times x transposed, with rows of zeros up to `size`."""
    *lead, width = x.shape
    flat = x.reshape(-1, width)
    rows = flat.shape[0]
    missing = size - rows
    if missing > 0:
        flat = mx.concatenate([flat, mx.zeros((missing, width), dtype=x.dtype)], axis=0)
    out = (weight @ flat.T).T
    return (out[:rows] if missing > 0 else out).reshape(*lead, -1)


def _take_over(new: Any, layer: nn.Module, turn: Turn) -> None:
    """What a layer's __init__ does, without drawing weights first."""
    nn.Module.__init__(new)
    for name, array in layer.items():
        new[name] = array
    new._shape = turn.add(new["weight"])


class TurnedLinear(nn.Linear):
    """A linear layer that may be turned; takes over the arrays of another one."""

    def __init__(self, layer: nn.Linear, turn: Turn) -> None:
        _take_over(self, layer, turn)

    def __call__(self, x: mx.array) -> mx.array:
        size = self._shape.size(x)
        if not size:
            out: mx.array = super().__call__(x)
            return out
        out = turned(x, self["weight"], size)
        return out + self["bias"] if "bias" in self else out


class TurnedEmbedding(nn.Embedding):
    """An embedding that is also the head."""

    def __init__(self, layer: nn.Embedding, turn: Turn) -> None:
        _take_over(self, layer, turn)

    def as_linear(self, x: mx.array) -> mx.array:
        size = self._shape.size(x)
        return turned(x, self["weight"], size) if size else plain(x, self["weight"])


_KINDS: dict[type, Callable[[Any, Turn], nn.Module]] = {
    nn.Linear: TurnedLinear,
    nn.Embedding: TurnedEmbedding,
}


def install(model: Any) -> Turn:
    """Let a model's dense layers be turned; they stay as they are until `Turn.measure` was run."""
    turn = Turn()

    def replaced(_: str, layer: Any) -> Any:
        make = _KINDS.get(type(layer))  # by the exact class: a derived one may compute otherwise
        return layer if make is None else make(layer, turn)

    model.update_modules(
        tree_map_with_path(replaced, model.leaf_modules(), is_leaf=nn.Module.is_module)
    )
    return turn
