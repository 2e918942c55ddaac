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


# Every number of rows is turned, with the next size that is measured.
ALL = [0, 0, *(next(s for s in turned.SIZES if s >= n) for n in range(2, turned.MOST_ROWS + 1))]


def spread(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return float(mx.abs(a - b).max().item())


@pytest.mark.parametrize("lead", [(1,), (8,), (3, 5), (16,), (1, 17), (2, 2, 9), (64,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_turned_layer_says_the_same(lead: tuple[int, ...], has_bias: bool) -> None:
    layer = nn.Linear(48, 80, bias=has_bias)
    new = turned.TurnedLinear(layer, turn := turned.Turn())
    assert turn.take({"80x48": ALL})
    x = mx.random.normal((*lead, 48))
    assert spread(layer(x), new(x)) < 1e-5


def test_a_turned_head_says_the_same() -> None:
    layer = nn.Embedding(80, 48)
    new = turned.TurnedEmbedding(layer, turn := turned.Turn())
    assert turn.take({"80x48": ALL})
    x = mx.random.normal((9, 1, 48))
    assert spread(layer.as_linear(x), new.as_linear(x)) < 1e-5
    ids = mx.array([[3, 5, 79]])
    assert mx.array_equal(layer(ids), new(ids))


@pytest.mark.parametrize(("rows", "size"), [(1, 0), (2, 2), (5, 8), (33, 48), (64, 64), (65, 0)])
def test_only_a_few_rows_are_turned(rows: int, size: int) -> None:
    shape = (turn := turned.Turn()).add(mx.zeros((80, 48)))
    x = mx.zeros((rows, 1, 48))
    assert shape.size(x) == 0
    assert turn.take({"80x48": ALL})
    assert shape.size(x) == size


OFF = [0] * 65


@pytest.mark.parametrize(
    "found",
    [
        None, [], {}, {"80x48": ALL}, {"80x48": OFF, "48x80": OFF, "1x1": OFF},
        {"80x48": OFF, "48x80": OFF[1:]}, {"80x48": OFF, "48x80": "0" * 65},
        {"80x48": OFF, "48x80": [*OFF[:-1], 32]}, {"80x48": OFF, "48x80": [*OFF[:-1], 65]},
    ],
)  # fmt: skip
def test_what_was_kept_must_fit(found: Any) -> None:
    """A file of findings is read from disk: whatever is in it, no product is wrong."""
    turn = turned.Turn()
    shapes = [turn.add(mx.zeros(shape)) for shape in ((80, 48), (48, 80))]
    assert not turn.take(found)
    assert all(shape.sizes == OFF for shape in shapes)
    assert turn.take({"80x48": ALL, "48x80": OFF})
    assert turn.sizes == {"80x48": ALL, "48x80": OFF}


def test_rows_are_filled_up_where_that_is_quicker() -> None:
    """Times of MKL on an AVX2 machine, in ms, of all products of a 135M model."""
    sizes = (2, 3, 4, 8, 16, 32, 48, 64)
    as_it_is = dict(zip(sizes, (44, 75, 69, 67, 92, 107, 143, 176), strict=True))
    other = dict(zip(sizes, (34, 53, 54, 90, 60, 84, 114, 166), strict=True))
    found = turned.chosen(as_it_is, other)
    assert found[:5] == [0, 0, 2, 3, 4]
    assert found[5:17] == [16] * 12, "five rows as sixteen"
    assert found[17:33] == [32] * 16 and found[33:49] == [48] * 16
    assert found[49:] == [0] * 16, "six per cent are no gain"
    assert turned.chosen(as_it_is, {size: 200.0 for size in sizes}) == OFF


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
    assert turn.take({name: ALL for name in turn.sizes})
    assert spread(before, model(ids)) < 1e-4


@pytest.mark.parametrize("slow", ["plain", "turned"])
def test_the_quicker_way_is_taken(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = getattr(turned, slow)

    def late(x: mx.array, weight: mx.array) -> mx.array:
        time.sleep(0.002)  # what makes it the slow one
        out: mx.array = quick(x, weight)
        return out

    monkeypatch.setattr(turned, slow, late)
    monkeypatch.setattr(turned, "_SMALLEST_BYTES", 1)
    model: Any = tiny.build({**tiny.CONFIG, "vocab_size": 300})
    turn = turned.install(model)
    slices = len(list(turn.measure()))
    assert slices == turned._ROUNDS * len(turned.SIZES) * 2 * len(turn.sizes)
    assert len(turn.sizes) > 2
    is_turned = [any(sizes) for sizes in turn.sizes.values()]
    assert is_turned == [slow == "plain"] * len(is_turned)


def test_small_products_stay_as_they_are() -> None:
    turn = turned.install(tiny.build({**tiny.CONFIG, "vocab_size": 300}))
    assert list(turn.measure()) == []
    assert turn.sizes and all(sizes == OFF for sizes in turn.sizes.values())
