"""Packed checkpoints: what configs say, what shapes say, and that unpacking is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxlite.engine import backend, quantised  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.errors import ModelError

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FLOATS = [("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32)]


def packed(name: str, matrix: mx.array, mode: str, bits: int, group: int) -> quantised.Weights:
    parts = mx.quantize(matrix, group, bits, mode)
    return dict(zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts, strict=False))


# ------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({}, None),
        ({"quantization": {"bits": 4, "group_size": 64}}, (4, 64, "affine")),
        ({"quantization": {"bits": 8, "group_size": 32, "mode": "mxfp8"}}, (8, 32, "mxfp8")),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, (4, 64, "affine")),
        (
            {
                "quantization": {"bits": 4, "group_size": 64},
                "quantization_config": {"quant_method": "mxfp4"},
            },
            (4, 64, "affine"),
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, (4, 32, "mxfp4")),
        ({"quantization_config": {"quant_method": "mxfp8"}}, (8, 32, "mxfp8")),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, (4, 32, "mxfp4")),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "scale_fmt": "ue8m0",
                    "weight_block_size": [32, 32],
                }
            },
            (8, 32, "mxfp8"),
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, None),
        ({"quantization_config": {"quant_method": "bitnet"}}, None),
        ({"quantization_config": {"quant_method": "awq"}}, (4, 128, "affine")),
        ({"quantization_config": {"quant_method": "gptq", "group_size": 32}}, (4, 32, "affine")),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            (4, 16, "nvfp4"),
        ),
    ],
)
def test_schemes(config: dict[str, Any], scheme: tuple[int, int, str] | None) -> None:
    found = quantised.scheme_of(config, None)
    told = None if found is None else (found["bits"], found["group_size"], found["mode"])
    assert told == scheme


def test_modelopt_keeps_its_settings_in_a_file_of_its_own() -> None:
    file = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    assert quantised.scheme_of({}, file) == {"group_size": 16, "bits": 4, "mode": "nvfp4"}


@pytest.mark.parametrize(
    ("told", "word"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "awq", "bits": 8}, "8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
    ],
)
def test_what_cannot_run_is_refused_by_name(told: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        quantised.scheme_of({"quantization_config": told}, None)


# --------------------------------------------------------------------------- what shapes say


@pytest.mark.parametrize(("mode", "bits", "group"), AFFINE + FLOATS)
def test_a_packing_is_seen_in_its_shapes_and_unpacked(mode: str, bits: int, group: int) -> None:
    matrix = mx.random.normal((64, 256), key=mx.random.key(bits * group))
    weights = packed("a.b", matrix, mode, bits, group)
    scheme = {"mode": mode, "bits": bits, "group_size": group}
    assert quantised.layer_scheme("a.b", 256, weights, {}) == scheme
    weights |= {"a.b.bias": mx.ones(64), "norm.weight": mx.ones(256)}
    dense = quantised.unpack(weights, {"a.b.weight": (64, 256)}, {}, mx.float32)
    assert set(dense) == {"a.b.weight", "a.b.bias", "norm.weight"}
    expected = mx.dequantize(
        weights["a.b.weight"],
        weights["a.b.scales"],
        weights.get("a.b.biases"),
        group_size=group,
        bits=bits,
        mode=mode,
    )
    assert mx.array_equal(dense["a.b.weight"], expected.astype(mx.float32))
    assert dense["a.b.weight"].dtype == mx.float32
    step = 8 / 2**bits if mode == "affine" else 1.2  # a group spans about eight deviations
    assert mx.abs(dense["a.b.weight"] - matrix).max().item() < step


def test_a_layers_own_entry_wins_over_its_shapes() -> None:
    weights = packed("p", mx.ones((8, 64)), "affine", 4, 32)
    entry = {"bits": 4, "group_size": 32}
    config = {"quantization": {"bits": 8, "group_size": 64, "p": entry}}
    assert quantised.layer_scheme("p", 64, weights, config) == {"mode": "affine", **entry}


def test_an_unknown_packing_is_named() -> None:
    weights = {"p.weight": mx.zeros((8, 16), mx.uint32), "p.scales": mx.zeros((8, 2), mx.uint8)}
    with pytest.raises(ModelError, match="p: 8 bits with group size 32|p: .* no known packing"):
        quantised.layer_scheme("p", 128, weights, {})


def test_weights_with_a_global_scale_stay_packed() -> None:
    weights = packed("p", mx.ones((8, 64)), "nvfp4", 4, 16)
    assert quantised.can_unpack(weights)
    assert not quantised.can_unpack({**weights, "p.global_scale": mx.array(1.0)})


def test_only_packed_layers_become_quantised_modules() -> None:
    def new() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    weights: quantised.Weights = {}
    for number, (mode, bits, group) in enumerate([("affine", 4, 32), ("mxfp8", 8, 32)]):
        weights |= packed(f"layers.{number}", new().layers[number].weight, mode, bits, group)
    weights |= {f"layers.{number}.weight": mx.zeros((64, 64)) for number in (2, 3)}
    model = new()
    config = {"quantization": {"bits": 4, "group_size": 64, "layers.3": False}}
    scheme = quantised.scheme_of(config, None)
    assert scheme is not None
    quantised.quantise(model, scheme, weights, config)
    assert [type(layer).__name__ for layer in model.layers] == (
        ["QuantizedLinear"] * 2 + ["Linear"] * 2
    )
    told = [(layer.mode, layer.bits, layer.group_size) for layer in model.layers[:2]]
    assert told == [("affine", 4, 32), ("mxfp8", 8, 32)]
    model.load_weights(list(weights.items()), strict=True)


def test_dense_bytes_counts_every_parameter() -> None:
    assert quantised.dense_bytes(nn.Linear(10, 20), 2) == 2 * (10 * 20 + 20)


# ------------------------------------------------------------------------------ AWQ and GPTQ


def awq_words(values: np.ndarray) -> mx.array:
    """(R, C) four-bit values as AutoAWQ packs them: eight a word, in the order 0 2 4 6 1 3 5 7."""
    grouped = values.reshape(values.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    shifted = grouped.astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))
    return mx.array(shifted.sum(axis=-1).astype(np.uint32))


@pytest.mark.parametrize("has_zeros", [True, False])
def test_awq_weights_mean_the_same_after_repacking(has_zeros: bool) -> None:
    numbers = np.random.default_rng(1)
    values = numbers.integers(0, 16, (128, 32))  # (in, out)
    scales = numbers.normal(0, 1, (2, 32)).astype(np.float32)  # (in / 64, out)
    zeros = numbers.integers(0, 16, (2, 32)) if has_zeros else np.full((2, 32), 8)
    expected = (values - zeros.repeat(64, axis=0)) * scales.repeat(64, axis=0)
    weights = {
        "p.qweight": awq_words(values),
        "p.scales": mx.array(scales),
        "norm.weight": mx.ones(8, dtype=mx.float16),
        "step": mx.array([3]),
    }
    if has_zeros:
        weights["p.qzeros"] = awq_words(zeros)
    repacked = quantised.repack_awq(weights)
    assert set(repacked) == {"p.weight", "p.scales", "p.biases", "norm.weight", "step"}
    assert repacked["norm.weight"].dtype == mx.float32, "the scales' dtype is the model's"
    assert repacked["step"].dtype == weights["step"].dtype
    dense = quantised.unpack(repacked, {"p.weight": (32, 128)}, {}, mx.float32)["p.weight"]
    assert np.abs(np.array(dense) - expected.T).max() < 1e-4


def test_reordered_groups_are_refused() -> None:
    with pytest.raises(ModelError, match="p.g_idx"):
        quantised.repack_awq({"p.g_idx": mx.zeros(8)})


def test_weights_without_awq_are_left_alone() -> None:
    weights = {"p.weight": mx.ones(3, dtype=mx.float16), "p.scales": mx.ones(2)}
    assert quantised.repack_awq(weights) == weights
