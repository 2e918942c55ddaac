"""Turned products: the same numbers the other way round, and only where that is quicker."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mlxlite.engine import backend, turned  # noqa: F401  (backend first: it picks the BLAS)
from tests import tiny

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip
from mlx.utils import tree_flatten  # isort: skip


def spread(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return float(mx.abs(a - b).max().item())


@pytest.mark.parametrize("lead", [(1,), (8,), (3, 5), (16,), (1, 17), (2, 2, 9), (64,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_turned_layer_says_the_same(lead: tuple[int, ...], has_bias: bool) -> None:
    layer = nn.Linear(48, 80, bias=has_bias)
    turn = turned.Turn()
    turn.is_on = True
    x = mx.random.normal((*lead, 48))
    assert spread(layer(x), turned.TurnedLinear(layer, turn)(x)) < 1e-5


def test_a_turned_head_says_the_same() -> None:
    layer = nn.Embedding(80, 48)
    turn = turned.Turn()
    turn.is_on = True
    new = turned.TurnedEmbedding(layer, turn)
    x = mx.random.normal((9, 1, 48))
    assert spread(layer.as_linear(x), new.as_linear(x)) < 1e-5
    ids = mx.array([[3, 5, 79]])
    assert mx.array_equal(layer(ids), new(ids))


@pytest.mark.parametrize(("rows", "may_differ"), [(1, False), (7, False), (8, True), (65, False)])
def test_only_a_few_rows_are_turned(rows: int, may_differ: bool) -> None:
    turn = turned.Turn()
    x = mx.zeros((rows, 1, 48))
    assert not turn.takes(x)
    turn.is_on = True
    assert turn.takes(x) is may_differ


def test_a_model_keeps_its_arrays_and_answers() -> None:
    model: Any = tiny.build({**tiny.CONFIG, "vocab_size": 300})
    names = dict(tree_flatten(model.parameters()))
    ids = mx.random.randint(0, 300, (6, 3))
    before = model(ids)
    turn = turned.install(model)
    after = dict(tree_flatten(model.parameters()))
    assert {name: id(array) for name, array in names.items()} == {
        name: id(array) for name, array in after.items()
    }
    assert mx.array_equal(before, model(ids)), "nothing is turned before it was measured"
    turn.is_on = True
    assert spread(before, model(ids)) < 1e-4


@pytest.mark.parametrize("slow", ["plain", "turned"])
def test_the_quicker_way_is_taken(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = getattr(turned, slow)

    def late(x: mx.array, weight: mx.array) -> mx.array:
        time.sleep(0.002)  # what makes it the slow one
        out: mx.array = quick(x, weight)
        return out

    monkeypatch.setattr(turned, slow, late)
    model: Any = tiny.build({**tiny.CONFIG, "vocab_size": 300})
    turn = turned.install(model)
    slices = len(list(turn.measure()))
    assert slices == 10
    assert turn.is_on is (slow == "plain")
