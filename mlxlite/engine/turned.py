"""Turned products: on a CPU, the linear layers of a few rows the other way round.

A layer computes x W^T, with x (n, K) of n rows and W (N, K). The BLAS may be quicker at W x^T,
whose transpose is the same: MKL on an AVX2 machine takes 75 ms instead of 112 for all products of a
step of 16 rows of a 135M model, if n is a multiple of 16 (zeros are added). Fewer than eight rows
and long prompts gain nothing. Whether it is so here is measured once an engine has started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

log = logging.getLogger(__name__)

FEWEST_ROWS, MOST_ROWS = 8, 64
WHOLE = 16  # rows are filled up to a multiple of this
_MEASURED_BYTES = 64 * 2**20  # of weights: more than a cache holds
_ROUNDS = 5
_GAIN = 0.93  # of the time at most, or it stays as it is


class Turn:
    """Whether this process turns products. One object, shared by all layers of a model."""

    def __init__(self) -> None:
        self.is_on = False
        self.weights: list[mx.array] = []

    def takes(self, x: mx.array) -> bool:
        return self.is_on and FEWEST_ROWS <= x.size // max(x.shape[-1], 1) <= MOST_ROWS

    def measure(self) -> Iterator[None]:
        """Find out whether it pays, on the model's own weights; a product between yields."""
        chosen, nbytes = [], 0
        for weight in self.weights:
            if nbytes < _MEASURED_BYTES and nbytes + weight.nbytes < 2 * _MEASURED_BYTES:
                chosen.append(weight)
                nbytes += weight.nbytes
        if not chosen:
            return
        inputs = {w.shape[1]: mx.ones((WHOLE, w.shape[1]), dtype=w.dtype) for w in chosen}
        best = {plain: float("inf"), turned: float("inf")}
        for _ in range(_ROUNDS):
            for way in best:
                started = time.perf_counter()
                mx.eval([way(inputs[weight.shape[1]], weight) for weight in chosen])
                best[way] = min(best[way], time.perf_counter() - started)
                yield
        self.is_on = best[turned] < _GAIN * best[plain]
        log.debug(
            "products of 16 rows: %.1f ms, turned %.1f ms", best[plain] * 1e3, best[turned] * 1e3
        )


def plain(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., K), weight (N, K) -> (..., N)."""
    return x @ weight.T


def turned(x: mx.array, weight: mx.array) -> mx.array:
    """The same, as the transpose of weight times x transposed."""
    *lead, size = x.shape
    flat = x.reshape(-1, size)
    rows = flat.shape[0]
    if missing := -rows % WHOLE:
        flat = mx.concatenate([flat, mx.zeros((missing, size), dtype=x.dtype)], axis=0)
    out = (weight @ flat.T).T
    return (out[:rows] if missing else out).reshape(*lead, -1)


def _take_over(new: Any, layer: nn.Module, turn: Turn) -> None:
    """What a layer's __init__ does, without drawing weights first."""
    nn.Module.__init__(new)
    for name, array in layer.items():
        new[name] = array
    new._turn = turn


class TurnedLinear(nn.Linear):
    """A linear layer that may be turned; takes over the arrays of another one."""

    def __init__(self, layer: nn.Linear, turn: Turn) -> None:
        _take_over(self, layer, turn)

    def __call__(self, x: mx.array) -> mx.array:
        if not self._turn.takes(x):
            out: mx.array = super().__call__(x)
            return out
        out = turned(x, self["weight"])
        return out + self["bias"] if "bias" in self else out


class TurnedEmbedding(nn.Embedding):
    """An embedding that is also the head."""

    def __init__(self, layer: nn.Embedding, turn: Turn) -> None:
        _take_over(self, layer, turn)

    def as_linear(self, x: mx.array) -> mx.array:
        if not self._turn.takes(x):
            return plain(x, self["weight"])
        return turned(x, self["weight"])


_KINDS: dict[type, Callable[[Any, Turn], nn.Module]] = {
    nn.Linear: TurnedLinear,
    nn.Embedding: TurnedEmbedding,
}


def install(model: Any) -> Turn:
    """Let a model's dense layers be turned; they stay as they are until `Turn.measure` was run."""
    turn = Turn()

    def replaced(_: str, layer: Any) -> Any:
        make = _KINDS.get(type(layer))  # by the exact class: a derived one may compute otherwise
        if make is None:
            return layer
        turn.weights.append(layer["weight"])
        return make(layer, turn)

    model.update_modules(
        tree_map_with_path(replaced, model.leaf_modules(), is_leaf=nn.Module.is_module)
    )
    return turn
