"""Quantised checkpoints: what a config says about packed weights, and how to unpack them.

MLX packs a matrix as `weight` (uint32 words), `scales` and, for the affine mode, `biases`. Which
bits and group size a tensor has is told per layer by `config["quantization"]`, or is inferred from
the shapes; other tools' formats (`quantization_config`) are mapped to the same description. The
rules follow what mlx-lm 0.32 loads; `tests/test_load.py` compares the two in a subprocess.

Runs on the engine thread.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxlite.errors import ModelError

Weights = dict[str, mx.array]
Scheme = dict[str, Any]  # group_size, bits, mode


def parameters(model: nn.Module) -> Weights:
    """The arrays of a model by name, lazily."""
    return dict(tree_flatten(model.parameters()))


_MXFP4: Scheme = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
_MXFP8: Scheme = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
_COMPRESSED_TENSORS: dict[str, Scheme] = {
    "nvfp4-pack-quantized": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp4-pack-quantized": _MXFP4,
    "pack-quantized": {"group_size": 32, "bits": 4, "mode": "affine"},
}


def scheme_of(config: dict[str, Any], hf_quant_config: dict[str, Any] | None) -> Scheme | None:
    """The model-wide scheme of a checkpoint in MLX's terms, or None if it is not packed that way.

    config: the model's config. hf_quant_config: the content of `hf_quant_config.json`, where
    ModelOpt keeps it. Raises ModelError for a method that MLX cannot run.
    """
    if (own := config.get("quantization")) is not None:
        return {"mode": "affine", **own}
    told = (
        config.get("quantization_config")
        or (config.get("text_config") or {}).get("quantization_config")
        or hf_quant_config
    )
    if not told:
        return None
    if "quant_method" not in told and "bits" in told:  # an MLX config under its second name
        return {"mode": "affine", **told}
    method = told.get("quant_method") or ("modelopt" if "quantization" in told else None)
    if method == "mxfp4":
        return _MXFP4
    if method == "mxfp8":
        return _MXFP8
    if method == "fp8":
        # Power-of-two scales over 32 x 32 blocks are mxfp8; other fp8 checkpoints are unpacked by
        # the model's own sanitize.
        is_mx = told.get("scale_fmt") == "ue8m0" and list(told.get("weight_block_size", ())) == [
            32,
            32,
        ]
        return _MXFP8 if is_mx else None
    if method == "compressed-tensors":
        if told.get("format") in _COMPRESSED_TENSORS:
            return _COMPRESSED_TENSORS[told["format"]]
        raise ModelError(
            f"compressed-tensors format {told.get('format')!r} is not supported; "
            f"supported are {', '.join(_COMPRESSED_TENSORS)}"
        )
    if method == "modelopt":
        settings = told.get("quantization", told)
        if settings.get("quant_algo") != "NVFP4":
            raise ModelError(
                f"ModelOpt algorithm {settings.get('quant_algo')!r} is not supported; only NVFP4 is"
            )
        return {"group_size": settings.get("group_size", 16), "bits": 4, "mode": "nvfp4"}
    if method in ("awq", "gptq"):
        if told.get("bits", 4) != 4:
            raise ModelError(f"{method} with {told['bits']} bits is not supported; only 4 bits are")
        return {"group_size": told.get("group_size", 128), "bits": 4, "mode": "affine"}
    return None


def layer_scheme(path: str, in_dims: int, weights: Weights, config: dict[str, Any]) -> Scheme:
    """Bits, group size and mode of one packed layer.

    path: module path, such as `model.layers.0.mlp.up_proj`. in_dims: input width of the layer
    before packing. An explicit per-layer entry wins over the shapes.
    """
    told = (config.get("quantization") or {}).get(path)
    if isinstance(told, dict):
        return {"mode": "affine", **told}
    scales = weights[f"{path}.scales"]
    group_size = in_dims // scales.shape[-1]
    bits = weights[f"{path}.weight"].shape[-1] * 32 // in_dims
    if scales.dtype != mx.uint8:
        return {"group_size": group_size, "bits": bits, "mode": "affine"}
    for mode, shape in (("nvfp4", (4, 16)), ("mxfp4", (4, 32)), ("mxfp8", (8, 32))):
        if (bits, group_size) == shape:
            return {"group_size": group_size, "bits": bits, "mode": mode}
    raise ModelError(f"{path}: {bits} bits with group size {group_size} is no known packing")


def quantise(model: nn.Module, scheme: Scheme, weights: Weights, config: dict[str, Any]) -> None:
    """Turn the layers whose weights are packed into their quantised modules, in place."""
    entries = config.get("quantization") or {}

    def choose(path: str, module: nn.Module) -> bool | Scheme:
        if path in entries:  # False means: this layer stays dense
            entry: bool | Scheme = entries[path]
            return entry
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        found = layer_scheme(path, module.weight.shape[-1], weights, config)
        takes_global = "global_scale" in inspect.signature(module.to_quantized).parameters
        if f"{path}.global_scale" in weights and takes_global:
            found["global_scale"] = True
        return found

    nn.quantize(
        model,
        group_size=scheme["group_size"],
        bits=scheme["bits"],
        mode=scheme["mode"],
        class_predicate=choose,
    )


def dense_bytes(model: nn.Module, item_bytes: int) -> int:
    """Bytes of all parameters of an unquantised model at `item_bytes` each; evaluates nothing."""
    return sum(array.size for array in parameters(model).values()) * item_bytes


def can_unpack(weights: Weights) -> bool:
    """Whether every packed tensor can be dequantised from its own arrays alone."""
    return not any(name.endswith(".global_scale") for name in weights)


def unpack(
    weights: Weights, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], dtype: mx.Dtype
) -> Weights:
    """Dense weights of a packed checkpoint, lazily.

    shapes: parameter name -> shape of the unquantised model, from which packings are inferred.
    """
    dense: Weights = {}
    for name, array in weights.items():
        path, _, last = name.rpartition(".")
        if f"{path}.scales" not in weights:
            dense[name] = array
        elif last == "weight":
            found = layer_scheme(path, shapes[name][-1], weights, config)
            dense[name] = mx.dequantize(
                array,
                weights[f"{path}.scales"],
                weights.get(f"{path}.biases"),
                group_size=found["group_size"],
                bits=found["bits"],
                mode=found["mode"],
            ).astype(dtype)
        elif last not in ("scales", "biases"):
            dense[name] = array
    return dense


def repack_awq(weights: Weights, bits: int = 4) -> Weights:
    """AutoAWQ's and GPTQ's packed linears in MLX's affine form.

    They store `qweight` as (in, out / 8) words whose nibbles are interleaved 0 4 1 5 2 6 3 7, with
    `scales` (in / group, out) and optional `qzeros`; a value is (w - zero) * scale. MLX stores
    (out, in / 8) with nibbles in order and a value of w * scale + bias, so bias = -zero * scale.
    Raises ModelError for checkpoints with reordered groups (`g_idx`).
    """
    order = mx.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=mx.uint32) * bits
    straight = mx.arange(8, dtype=mx.uint32) * bits

    def nibbles(packed: mx.array) -> mx.array:  # (R, C) words -> (R, 8 C) values
        values = (packed.astype(mx.uint32)[..., None] >> order) & ((1 << bits) - 1)
        return values.reshape(packed.shape[0], -1)

    repacked: Weights = {}
    scale_dtype: mx.Dtype | None = None
    for name, array in weights.items():
        path, _, last = name.rpartition(".")
        if last == "g_idx":
            raise ModelError(
                f"{name}: AWQ and GPTQ weights with reordered groups are not supported"
            )
        if f"{path}.qweight" not in weights:
            repacked[name] = array
        elif last == "qweight":
            scales = weights[f"{path}.scales"]
            columns = nibbles(array).T
            words = columns.reshape(columns.shape[0], -1, 8) << straight
            if (zeros := weights.get(f"{path}.qzeros")) is not None:
                biases = -nibbles(zeros).T.astype(mx.float32) * scales.T
            else:
                biases = -float(1 << (bits - 1)) * scales.T.astype(mx.float32)
            repacked[f"{path}.weight"] = words.sum(axis=-1).astype(mx.uint32)
            repacked[f"{path}.scales"] = mx.contiguous(scales.T)
            repacked[f"{path}.biases"] = biases.astype(scales.dtype)
            scale_dtype = scales.dtype
        elif last not in ("scales", "qzeros"):
            repacked[name] = array
    if scale_dtype is None:
        return repacked
    return {
        name: array.astype(scale_dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in repacked.items()
    }
