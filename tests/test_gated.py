"""SwiGLU by a power: the same numbers, and only where that is quicker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlxlite.engine import backend, gated  # noqa: F401  (backend first: it picks the BLAS)
from tests import tiny

import mlx.core as mx  # isort: skip


@pytest.fixture
def model() -> Iterator[Any]:
    """A model of mlx-lm's, whose module is left as it was."""
    made = tiny.build({**tiny.CONFIG, "vocab_size": 300, "intermediate_size": 256})
    module: Any = sys.modules[type(made).__module__]
    before = module.swiglu
    if isinstance(before, gated.SwiGLU):  # another test's engine was here
        module.swiglu = before.usual
    yield made
    module.swiglu = before


def usual(gate: mx.array, x: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * x


def test_the_numbers_are_the_same() -> None:
    scale = mx.array([0.01, 1.0, 5.0, 20.0, 80.0])[:, None]
    gate = mx.random.normal((5, 2000), key=mx.random.key(1)) * scale
    x = mx.random.normal((5, 2000), key=mx.random.key(2))
    found, wanted = (np.array(f(gate, x)) for f in (gated.SwiGLU(usual), usual))
    exact = np.array(gate, dtype=np.float64)
    exact = exact / (1 + np.exp(-exact)) * np.array(x, dtype=np.float64)
    assert not np.array_equal(found, wanted), "it is another way"
    # The base is a float32, too, 3e-8 off: that grows with the exponent, where nothing is left.
    near = (1e-6 + 4e-8 * np.abs(np.array(gate))) * np.abs(exact) + 1e-30
    assert (np.abs(found - exact) <= near).all()
    told = np.abs(exact) > 1e-25
    away, theirs = (
        (np.abs(each - exact)[told] / np.abs(exact)[told]).max() for each in (found, wanted)
    )
    assert away <= theirs, "no less exact than it was"


def test_the_ends_of_the_range() -> None:
    gate = mx.concatenate([mx.array([-3e38, -1000.0, -100.0, 0.0, 100.0, 1000.0]), mx.ones(5000)])
    found = gated.SwiGLU(usual)(gate, mx.ones(gate.size))[:6].tolist()
    assert found == [0, 0, 0, 0, 100, 1000]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_dtypes_go_the_usual_way(dtype: mx.Dtype) -> None:
    gate = mx.random.normal((1, 9000)).astype(dtype)
    assert mx.array_equal(gated.SwiGLU(usual)(gate, gate), usual(gate, gate))


def test_a_row_is_the_same_alone_and_beside_others() -> None:
    gate, x = mx.random.normal((16, 1, 1536)), mx.random.normal((16, 1, 1536))
    together = gated.SwiGLU(usual)(gate, x)
    assert mx.array_equal(together[3:4], gated.SwiGLU(usual)(gate[3:4], x[3:4]))


def test_a_model_says_the_same(model: Any) -> None:
    ids = mx.random.randint(0, 300, (4, 40))
    before = model(ids)
    module: Any = sys.modules[type(model).__module__]
    assert gated.install() >= 1 and isinstance(module.swiglu, gated.SwiGLU)
    after = model(ids)
    assert not mx.array_equal(before, after)
    assert mx.abs(before - after).max().item() < 1e-4
    assert gated.install() == 0, "once is enough"
    assert sys.modules["mlx_lm.models.activations"].swiglu is module.swiglu.usual
