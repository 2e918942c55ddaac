"""Token ids -> vectors: pooled hidden states, or the logits of a few ids (a reranker's verdict).

Several inputs share a forward, sorted by length and padded on the right: attention is causal and
recurrences run forward, so what comes after an input does not reach it. An input that is too long
for one slice runs in chunks, through a cache.

mlx-lm's models return logits, and each names its parts in its own way. So the model runs as it is,
with a tap on the hidden states that leave its stack of layers: they are pooled there, and what the
head makes of them stays lazy and is never computed.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxlite.engine.jobs import Work
from mlxlite.engine.load import LoadedModel
from mlxlite.errors import BadRequest, EngineFault
from mlxlite.types import EmbedSpec

_FEWEST_TOKENS = 32  # a slice holds, padding counted, however slow the machine
_MOST_TOKENS = 8192  # its activations of a model 4,096 wide take some hundred megabytes
_FIRST_TOKENS = 256  # of the first slices at most: short ones say little about long ones
_MOST_PADDING = 0.25  # of a group

Pick = Callable[[mx.array], mx.array]  # hidden states (B, T, D) -> what is wanted of them


class Embedder:
    """Makes the jobs that embed; one a model, owned by the engine thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._kind = str(loaded.config.get("model_type"))
        self._tap: Tap | None = None
        self._tokens_per_s = 100.0  # a guess on the slow side: rows may wait beside the first slice
        self._ceiling = _FIRST_TOKENS

    def run(self, spec: EmbedSpec) -> Work:
        """The job of one spec; its result is a tuple of bytes, see `Engine.embed`."""
        budget_s = yield
        if self._tap is None:
            self._tap = Tap(self._model, self._kind)
        found: dict[int, bytes] = {}
        by_length = sorted(range(len(spec.inputs)), key=lambda index: len(spec.inputs[index]))
        at = 0
        while at < len(by_length):
            room = self._room(budget_s)
            lengths = [len(spec.inputs[index]) for index in by_length[at:]]
            group = by_length[at : at + group_size(lengths, room)]
            batch = _Batch([spec.inputs[index] for index in group], spec)
            chunk = batch.width if batch.width <= room else max(room // len(group), 1)
            cache = None if chunk == batch.width else self._new_cache()
            for start in range(0, batch.width, chunk):
                if start:
                    budget_s = yield
                began = time.perf_counter()
                size = min(chunk, batch.width - start)
                batch.add(self._tap, start, size, cache)
                self._measured(len(group) * size, time.perf_counter() - began)
            found.update(zip(group, batch.vectors(), strict=True))
            mx.clear_cache()  # temporaries of a size that decoding never asks for again
            at += len(group)
            if at < len(by_length):
                budget_s = yield
        return tuple(found[index] for index in range(len(spec.inputs)))

    def _room(self, budget_s: float) -> int:
        """Tokens that fit into a slice, padding counted."""
        fits = min(int(self._tokens_per_s * budget_s), self._ceiling)
        return max(fits, _FEWEST_TOKENS)

    def _measured(self, tokens: int, seconds: float) -> None:
        """A forward took so long. Short ones say little: their cost is fixed for the most part."""
        if tokens >= _FEWEST_TOKENS and seconds > 0:
            self._tokens_per_s += 0.5 * (tokens / seconds - self._tokens_per_s)
            self._ceiling = min(max(self._ceiling, 2 * tokens), _MOST_TOKENS)

    def _new_cache(self) -> Any:
        return importlib.import_module("mlx_lm.models.cache").make_prompt_cache(self._model)


def group_size(lengths: Sequence[int], room: int) -> int:
    """How many of the rising lengths share a forward: at most `room` tokens and a quarter of
    padding, but one at least. Those of the longest come in where they fit."""
    size, total = 1, lengths[0]
    for length in lengths[1:]:
        padded = (size + 1) * length
        total += length
        if padded > room or padded - total > max(_MOST_PADDING * padded, _FEWEST_TOKENS):
            break
        size += 1
    return size


class _Batch:
    """Inputs that run together, and what was gathered of their hidden states so far."""

    def __init__(self, inputs: Sequence[Sequence[int]], spec: EmbedSpec) -> None:
        self.width = max(len(ids) for ids in inputs)
        self._ids = [[*ids, *[0] * (self.width - len(ids))] for ids in inputs]
        self._lengths = mx.array([len(ids) for ids in inputs])
        self._spec = spec
        self._sum: mx.array | None = None  # (B, D), or (B, ids) of logits; float32

    def add(self, tap: Tap, start: int, size: int, cache: Any) -> None:
        """Run the columns from `start` on."""
        ids = mx.array([row[start : start + size] for row in self._ids], dtype=mx.uint32)
        positions = mx.arange(start, start + size)[None]  # (1, T)
        lengths = self._lengths[:, None]  # (B, 1)
        if self._spec.logit_ids:
            part = self._logits(tap, ids, start, size, cache)
        else:
            if self._spec.pooling == "mean":
                weights = mx.where(positions < lengths, 1 / lengths, 0.0)
            elif self._spec.pooling == "cls":
                weights = mx.where(positions == 0, 1.0, 0.0)
            else:
                weights = mx.where(positions == lengths - 1, 1.0, 0.0)
            part = tap(ids, cache, lambda hidden: _weighted(hidden, weights))[0][:, 0]
        self._sum = part if self._sum is None else self._sum + part
        mx.eval(self._sum, *([] if cache is None else [entry.state for entry in cache]))

    def _logits(self, tap: Tap, ids: mx.array, start: int, size: int, cache: Any) -> mx.array:
        """(B, ids): the logits after the inputs that end in these columns, 0 for the others."""
        ends = self._lengths[:, None] - 1 - start  # (B, 1)
        place = mx.clip(ends, 0, size - 1)[..., None]  # (B, 1, 1)
        _, logits = tap(ids, cache, lambda hidden: mx.take_along_axis(hidden, place, axis=1))
        wanted = logits[:, 0, mx.array(self._spec.logit_ids)].astype(mx.float32)
        return mx.where((ends >= 0) & (ends < size), wanted, 0.0)

    def vectors(self) -> list[bytes]:
        """One an input, in order. Raises EngineFault if a number is not finite."""
        assert self._sum is not None
        found = self._sum
        if not self._spec.logit_ids:
            found = found / mx.maximum(mx.linalg.norm(found, axis=-1, keepdims=True), 1e-12)
        if not mx.all(mx.isfinite(found)).item():
            raise EngineFault("the model gave numbers that are not finite; try --dtype float32")
        raw = bytes(memoryview(found))  # type: ignore[arg-type]  # mlx's stubs lack the protocol
        step = found.shape[-1] * 4
        return [raw[at : at + step] for at in range(0, len(raw), step)]


def _weighted(hidden: mx.array, weights: mx.array) -> mx.array:
    """(B, T, D), (B, T) -> (B, 1, D) in float32. No matmul: CUDA would round it to TF32. What has
    no weight does not count, be it infinite."""
    weights = weights[..., None]
    weighted = mx.where(weights == 0, 0.0, hidden.astype(mx.float32) * weights)
    return weighted.sum(axis=1, keepdims=True)


# ---------------------------------------------------------------------------------------- tap


class Tap:
    """Runs a model and picks from the hidden states that its head gets.

    The tapped module is the one that holds the stack of layers, if it returns hidden states; where
    it holds the head too (gpt_neox), the head.
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model = model
        self._module, self._is_head = _tap_point(model, kind)
        self._classes: dict[type, type] = {}

    def __call__(self, ids: mx.array, cache: Any, pick: Pick) -> tuple[mx.array, mx.array]:
        """ids (B, T) -> what was picked, and the logits of just that; both lazy."""
        picked: list[mx.array] = []

        def take(hidden: mx.array) -> mx.array:
            picked.append(pick(hidden))
            return picked[-1]

        with _tapped(self._module, take, self._is_head):
            logits = self._model(ids, cache=cache)
        return picked[-1], logits


@contextmanager
def _tapped(module: Any, take: Pick, before: bool) -> Iterator[None]:
    """While it lasts, `take` sits behind a module, or before it.

    By another class for the one object: Python looks `__call__` up there, and the model still finds
    everything else that it expects of its part.
    """
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            return kind.__call__(self, take(args[0]), *args[1:], **kwargs)
        return take(kind.__call__(self, *args, **kwargs))

    tapped = type(kind.__name__, (kind,), {"__call__": call})
    object.__setattr__(module, "__class__", tapped)
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", kind)


def _tap_point(model: Any, kind: str) -> tuple[Any, bool]:
    """The module to tap, and whether it is a head, to be tapped before it. Found by a trial."""
    ids = mx.zeros((1, 2), dtype=mx.uint32)
    vocab = model(ids, cache=None).shape[-1]
    shapes: list[tuple[int, ...]] = []

    def note(out: Any) -> Any:
        if isinstance(out, mx.array):
            shapes.append(out.shape)
        return out

    candidates = [(module, False) for module in _stacks(model)]
    candidates += [(module, True) for module in model.modules() if _is_head(module, vocab)]
    for module, before in candidates:
        if module is model:
            continue
        shapes.clear()
        with _tapped(module, note, before):
            model(ids, cache=None)
        if len(shapes) == 1 and shapes[0][:2] == (1, 2) and shapes[0][2] != vocab:
            return module, before
    raise BadRequest(f"embeddings of models of the type {kind} are not supported", param="model")


def _stacks(module: Any) -> Iterator[Any]:
    """The outermost modules that hold a list of modules, the layers, as their own."""
    children = module.children()
    if any(isinstance(c, list) and c and isinstance(c[0], nn.Module) for c in children.values()):
        yield module
        return
    for child in children.values():
        if isinstance(child, nn.Module):
            yield from _stacks(child)


def _is_head(module: Any, vocab: int) -> bool:
    return isinstance(module, nn.Linear | nn.QuantizedLinear) and module.weight.shape[0] == vocab
