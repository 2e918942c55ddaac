"""Replayed layers: on a CPU, a layer's operations for one token of some rows, recorded once.

Python takes 0.15 ms to write a layer's seventy operations down, and MLX some microseconds to begin
each: of a step of four rows of a 135M model that is a tenth. `mx.compile` records them, joins those
that go number by number into one, and writes them down again in a fifth of the time. The numbers
that come out are the same.

    model.layers[7](h, mask, cache=slots)          a step of a pool, h (B, 1, D)
      -> recording(h, mask, positions, sines, buffers, weights of layer 7)
      -> h', buffers'

Layers that are alike share a recording: their weights are among what it is given. So is all that a
layer looks up elsewhere, the plan's positions and the tables of `rotary`. A recording is of one
shape and takes a millisecond or two to make; the newest are kept.

Rows alone have positions that are numbers, not arrays: they go the usual way, as prompts do.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxlite.engine.rotary import Table, Turn
from mlxlite.engine.slots import Full, States, leaves

log = logging.getLogger(__name__)

_FEWEST_KEPT = 64  # recordings
_SHAPES = 4  # of each kind of layer are kept at least
_PLAIN = (type(None), bool, int, float, str)


class Kind:
    """Layers that are alike but for their weights. sample: one of them, which is recorded."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample
        self.names = [name for name, _ in weights_of(sample)]
        found = (getattr(each, "table", None) for each in sample.modules())
        self.tables = list({id(table): table for table in found if type(table) is Table}.values())
        self.is_recordable = True  # until it is found not to be

    def take(self, weights: Sequence[mx.array]) -> None:
        self.sample.update(tree_unflatten(list(zip(self.names, weights, strict=True))))


@dataclass(slots=True)
class Own:
    """What a layer knows. weights: in the order of its kind's names."""

    replay: Replay
    kind: Kind
    weights: list[mx.array]


@dataclass(slots=True)
class Call:
    """A layer's call, taken apart. parts: its slots, one by one. given: the arrays among its
    arguments."""

    args: Sequence[Any]
    named: Mapping[str, Any]
    slots: Any
    parts: list[Any]
    given: list[mx.array]

    @property
    def plan(self) -> Any:
        return next((part.plan for part in self.parts if isinstance(part, Full)), None)

    @property
    def shape(self) -> Any:
        """All that a recording depends on, but for the layer."""
        plan, values = self.plan, [*self.args, *self.named.values()]
        arrays = [*self.given, *self.slots.arrays]
        return (
            len(self.args),
            tuple(self.named),
            tuple((v,) if isinstance(v, _PLAIN) else v is self.slots for v in values),
            None if plan is None else (plan.low, plan.high, plan.columns),
            tuple((type(part), getattr(part, "window", None)) for part in self.parts),
            tuple((array.shape, array.dtype) for array in arrays),
        )

    def with_arrays(self, arrays: Sequence[mx.array]) -> tuple[list[Any], dict[str, Any]]:
        rest = iter(arrays)
        args = [next(rest) if isinstance(value, mx.array) else value for value in self.args]
        named = {
            name: next(rest) if isinstance(value, mx.array) else value
            for name, value in self.named.items()
        }
        return args, named

    def put(self, buffers: Sequence[mx.array]) -> None:
        """Give the slots these buffers."""
        rest = iter(buffers)
        for part in self.parts:
            if isinstance(part, Full):
                part.keys, part.values = next(rest), next(rest)
            else:
                part.cache = [None if each is None else next(rest) for each in part.cache]

    def release(self) -> None:
        """Let go of what is written in place: with a second owner, all of it would be copied."""
        for part in self.parts:
            if isinstance(part, Full):
                part.keys = part.values = None


def call_of(args: Sequence[Any], named: Mapping[str, Any]) -> Call | None:
    """A layer's call if it is one token of some rows in slots, else None."""
    slots, given = None, []
    for value in (*args, *named.values()):
        if isinstance(value, mx.array):
            given.append(value)
        elif hasattr(value, "arrays") and slots is None:
            slots = value
        elif not isinstance(value, _PLAIN):
            return None
    if slots is None or not given or given[0].ndim < 3 or given[0].shape[-2] != 1:
        return None
    parts = list(leaves([slots]))
    for part in parts:
        if isinstance(part, Full):
            if part.keys is None or part.plan.count != 1:
                return None
        elif not isinstance(part, States) or any(each is None for each in part.cache):
            return None
    return Call(args, named, slots, parts, given)


class Recording:
    """A kind's forward for calls of one shape. The first one makes it."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._call: Call | None = None  # while it runs: a recording outlives the slots
        self._recorded = mx.compile(self._forward)

    def run(self, call: Call, *arrays: Any) -> tuple[Any, list[mx.array]]:
        """arrays: what `_forward` is given besides the call's own."""
        self._call = call
        try:
            found: tuple[Any, list[mx.array]] = self._recorded(call.given, *arrays)
            return found
        finally:
            self._call = None

    def _forward(
        self,
        given: list[mx.array],
        weights: list[mx.array],
        places: list[mx.array],
        turns: list[Turn],
        buffers: list[mx.array],
    ) -> tuple[Any, list[mx.array]]:
        kind, call = self._kind, self._call
        assert call is not None
        plan, sample = call.plan, kind.sample
        before = [table.known for table in kind.tables]
        try:
            kind.take(weights)
            call.put(buffers)
            if plan is not None:
                kept = plan.offsets, plan.slots, plan.places, plan.masks
                plan.offsets, plan.slots, plan.places, plan.masks = *places, {}
                for table, turn in zip(kind.tables, turns, strict=True):
                    table.known = plan.offsets, 1, turn
            args, named = call.with_arrays(given)
            return sample.in_the_usual_way(*args, **named), call.slots.arrays
        finally:
            kind.take(sample.replayed.weights)
            if plan is not None:
                plan.offsets, plan.slots, plan.places, plan.masks = kept
            for table, known in zip(kind.tables, before, strict=True):
                table.known = known


class Replay:
    """Whether the layers of a model are replayed, and what was recorded; shared by all of them.

    is_on: for whoever found out that it pays and changes nothing (`findings`).
    """

    def __init__(self) -> None:
        self.is_on = False
        self.kinds: list[Kind] = []
        self.recordings: OrderedDict[Any, Recording] = OrderedDict()

    def stop(self) -> None:
        """Go the usual way from now on."""
        self.is_on = False
        self.recordings.clear()

    def run(self, own: Own, call: Call) -> Any:
        """What the layer's own forward returns; the slots have one token more of each row.

        Raises what the layer raises when it is recorded; the slots are then as they were.
        """
        kind, plan = own.kind, call.plan
        key = kind, call.shape
        recording = self.recordings.get(key)
        if recording is None:
            recording = self.recordings[key] = Recording(kind)
            if len(self.recordings) > max(_FEWEST_KEPT, _SHAPES * len(self.kinds)):
                self.recordings.popitem(last=False)
        else:
            self.recordings.move_to_end(key)
        places, turns = [], []
        if plan is not None:
            places = [plan.offsets, plan.slots, plan.places]
            turns = [table(plan.offsets, 1) for table in kind.tables]
        buffers = call.slots.arrays
        call.release()
        try:
            mx.enable_compile()
            out, after = recording.run(call, own.weights, places, turns, buffers)
        except BaseException:
            del self.recordings[key]
            call.put(buffers)
            raise
        finally:
            mx.disable_compile()
        call.put(after)
        return out


class Replayed(nn.Module):
    """What a layer's class becomes, as one derived from its own."""

    replayed: Own

    def __call__(self, *args: Any, **named: Any) -> Any:
        own = self.replayed
        if own.replay.is_on and own.kind.is_recordable:
            call = call_of(args, named)
            if call is not None:
                try:
                    return own.replay.run(own, call)
                except Exception:
                    log.debug("layers of this kind go the usual way", exc_info=True)
                    own.kind.is_recordable = False
        return self.in_the_usual_way(*args, **named)

    def in_the_usual_way(self, *args: Any, **named: Any) -> Any:
        return super().__call__(*args, **named)


def weights_of(layer: nn.Module) -> list[tuple[str, mx.array]]:
    return list(tree_flatten(layer.parameters()))  # type: ignore[arg-type]  # MLX: or a dict


def install(model: Any) -> Replay:
    """Let a model's layers be replayed; they go the usual way until that is on."""
    replay = Replay()
    kinds: dict[Any, Kind] = {}
    classes: dict[type, Any] = {}
    for layer in getattr(model, "layers", ()):
        cls = type(layer)
        if not isinstance(layer, nn.Module) or isinstance(layer, Replayed):
            continue
        kind = kinds.setdefault(tuple(_description(layer)), Kind(layer))
        weights = [value for _, value in weights_of(layer)]
        layer.replayed = Own(replay, kind, weights)
        layer.__class__ = classes.setdefault(
            cls, type(f"Replayed{cls.__name__}", (Replayed, cls), {})
        )
    replay.kinds = list(kinds.values())
    return replay


def _description(value: Any) -> Iterator[Any]:
    """All that tells a layer from others but the numbers of its weights."""
    yield type(value)
    if isinstance(value, nn.Module):
        for name, own in sorted({**vars(value), **value}.items()):
            yield name
            if isinstance(own, mx.array) and name.startswith("_"):  # no weight, so it is recorded
                yield str(own.tolist())
            yield from _description(own)
    elif isinstance(value, mx.array):
        yield value.shape, value.dtype
    elif isinstance(value, dict):
        for name, own in value.items():
            yield name
            yield from _description(own)
    elif isinstance(value, set):  # names of frozen weights
        yield tuple(sorted(map(str, value)))
    elif isinstance(value, list | tuple):
        yield len(value)
        for own in value:
            yield from _description(own)
    else:
        yield value if isinstance(value, _PLAIN) else id(value)
