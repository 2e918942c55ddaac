"""Rotary modules that share a table give the bits of MLX's own."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlite.engine import backend, rotary  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.engine.load import bare_package
from tests import tiny

bare_package()
import mlx.core as mx  # noqa: E402  (after the bare package)
import mlx.nn as nn  # noqa: E402  (after the bare package)
from mlx_lm.models import rope_utils  # noqa: E402  (which needs the bare package)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


class Block(nn.Module):
    """Two layers' worth of rotation."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first = made(**how)
        self.second = made(**how)


def made(
    dims: int = 16,
    base: float = 10_000.0,
    traditional: bool = False,
    scaling: dict[str, Any] | None = None,
) -> Any:
    return rope_utils.initialize_rope(dims, base, traditional, scaling, 4096)


def inputs(count: int, dtype: mx.Dtype = mx.float32, size: int = 16) -> mx.array:
    return mx.random.normal((3, 2, count, size)).astype(dtype)


@pytest.fixture(autouse=True)
def cpu() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.mark.parametrize("offset", [0, 9, 4000, [0, 7, 300]])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(
    "how",
    [{}, {"base": 500_000.0}, {"scaling": {"type": "linear", "factor": 4.0}}, {"scaling": LLAMA3}]
    + [{"scaling": PROPORTIONAL}, {"dims": 8}],
    ids=str,
)
def test_the_bits_are_the_same(how: dict[str, Any], count: int, offset: Any) -> None:
    block, plain = Block(**how), made(**how)
    assert rotary.install(block) == 2
    assert type(block.first) is not type(plain) and isinstance(block.first, type(plain))
    assert block.first.table is block.second.table
    at = mx.array(offset) if isinstance(offset, list) else offset
    for layer in (block.first, block.second, block.first):
        x = inputs(count)
        assert mx.array_equal(layer(x, offset=at), plain(x, offset=at))


@pytest.mark.parametrize("how", [{"traditional": True}, {"scaling": YARN}, {"scaling": DYNAMIC}])
def test_other_kinds_stay_as_they_are(how: dict[str, Any]) -> None:
    block = Block(**how)
    assert rotary.install(block) == 0 and type(block.first) is type(made(**how))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_dtypes_go_the_usual_way(dtype: mx.Dtype) -> None:
    block = Block()
    rotary.install(block)
    x = inputs(4, dtype)
    found = block.first(x, offset=3)
    assert found.dtype == dtype and mx.array_equal(found, made()(x, offset=3))


def test_a_table_is_made_once_a_forward() -> None:
    block = Block()
    rotary.install(block)
    table = block.first.table
    seen = []
    real = table._made
    table._made = lambda offset, count: (seen.append((offset, count)), real(offset, count))[1]
    at, later = mx.array([3, 4, 5]), mx.array([3, 4, 5])
    for offset, count in ((at, 1), (at, 1), (later, 1), (7, 1), (7, 1), (7, 2), (8, 2)):
        block.first(inputs(count), offset=offset)
        block.second(inputs(count), offset=offset)
    assert [count for _, count in seen] == [1, 1, 1, 2, 2]
    assert seen[1][0] is later, "as long, but of another forward"


def test_a_model_says_the_same() -> None:
    model: Any = tiny.build({**tiny.CONFIG, "vocab_size": 300})
    ids = mx.random.randint(0, 300, (4, 9))
    before = model(ids)
    assert rotary.install(model) == len(model.layers)
    assert mx.array_equal(before, model(ids))
