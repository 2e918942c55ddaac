"""What fits: weights as the loader holds them, budgets, contexts, rows and speeds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine import backend, load
from mlxlite.errors import ModelError
from mlxlite.kvplan import Const, Full, KVPlan, Window
from mlxlite.models import fit
from mlxlite.models.fit import Fit, Machine, Weights
from mlxlite.models.safetensors_file import TensorSpec
from tests import tiny

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip
from mlx.utils import tree_flatten, tree_map  # isort: skip

CPU = backend.start(Path("/nowhere"))  # the folder is for a GPU's kernels
GPU_LIKE = replace(CPU, kind="metal", prefers_dense=False)


def store(folder: Path, dtype: mx.Dtype, bits: int | None) -> None:
    """Keep the tiny model in a dtype, packed if bits are given, all but its head."""
    config = json.loads((folder / "config.json").read_text())
    model = tiny.build(config)
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    if bits is not None:
        entries: dict[str, Any] = {
            "model.embed_tokens": {"group_size": 64, "bits": 8},
            "lm_head": False,
        }

        def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
            found: bool | dict[str, Any] = entries.get(path, True)
            return found if hasattr(module, "to_quantized") else False

        nn.quantize(model, 32, bits, class_predicate=choose)
        config["quantization"] = {"group_size": 32, "bits": bits, **entries}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("on", ["cpu", "small cpu", "gpu"])
@pytest.mark.parametrize(
    ("kept", "bits"),
    [("float32", None), ("bfloat16", None), ("float16", 4), ("bfloat16", 8)],
    ids=lambda value: str(value),
)
def test_weights_are_what_the_loader_holds(
    kept: str, bits: int | None, on: str, dtype: str, tmp_path: Path
) -> None:
    folder = tiny.make_model(tmp_path / "model")
    store(folder, getattr(mx, kept), bits)
    machine = GPU_LIKE if on == "gpu" else CPU
    if on == "small cpu":
        machine = replace(machine, memory_bytes=100_000)
    loaded = load.load(folder, machine, dtype, tmp_path / "dense")
    counted = fit.measure(
        load.read_config(folder),
        [folder / "model.safetensors"],
        fit.machine(machine.kind, machine.memory_bytes, dtype),
    )
    assert counted.weights.n_bytes == loaded.weight_bytes
    assert counted.weights.dtype == loaded.dtype
    assert counted.weights.is_unpacked == (on == "cpu" and bits is not None)
    assert counted.max_context == loaded.max_context == 1024


F32 = TensorSpec("F32", (10, 10))
WORDS = TensorSpec("U32", (10, 4))
SCALES = TensorSpec("BF16", (10, 1))


@pytest.mark.parametrize(
    ("specs", "config", "n_bytes"),
    [
        ({"model.w": F32}, {}, 400),
        ({"model.w": TensorSpec("F8_E4M3", (10, 10))}, {}, 200),
        ({"model.w": F32, "lm_head.weight": F32}, {}, 800),
        ({"model.w": F32, "lm_head.weight": F32}, {"tie_word_embeddings": True}, 400),
        (
            {"a.lm_head.weight": F32, "b": F32},
            {"text_config": {"tie_word_embeddings": True}},
            400,
        ),
        ({"model.w": F32, "vision_tower.w": F32, "a.rotary_emb.inv_freq": F32}, {}, 400),
        ({"model.w": F32, "mtp.layers.0.w": F32, "model.visual.w": F32}, {}, 400),
        ({"a.weight": WORDS, "a.scales": SCALES, "a.biases": SCALES}, {}, 200),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_what_is_not_loaded_is_not_counted(
    specs: dict[str, TensorSpec], config: dict[str, Any], n_bytes: int
) -> None:
    assert fit.weights(specs, config, Machine("metal", 1 << 30, None)).n_bytes == n_bytes


@pytest.mark.parametrize(
    ("specs", "values"),
    [
        ({"a.weight": WORDS, "a.scales": SCALES, "a.biases": SCALES}, 10 * 32),
        (
            {"a.qweight": TensorSpec("I32", (8, 10)), "a.qzeros": TensorSpec("I32", (1, 10))},
            8 * 10 * 8,
        ),
        ({"a.w_blocks": TensorSpec("U8", (10, 16)), "a.w_scales": TensorSpec("U8", (10, 1))}, 320),
    ],
    ids=["mlx", "awq", "mxfp4"],
)
def test_packed_weights_are_unpacked_on_a_cpu_where_a_third_of_the_memory_takes_them(
    specs: dict[str, TensorSpec], values: int
) -> None:
    config = {"quantization": {"group_size": 32, "bits": 4}}
    dense = values * 4
    found = fit.weights(specs, config, Machine("cpu", 3 * dense, "float32"))
    assert found == Weights(dense, 0, "float32", True)
    assert not fit.weights(specs, config, Machine("cpu", 3 * dense - 1, "float32")).is_unpacked
    whole = {**specs, "a.global_scale": TensorSpec("F32", (1,))}
    assert not fit.weights(whole, config, Machine("cpu", 1 << 30, "float32")).is_unpacked


def test_experts_are_counted_apart() -> None:
    specs = {"model.layers.0.mlp.switch_mlp.up_proj.weight": F32, "model.w": F32}
    specs |= {"model.layers.0.mlp.experts.3.up_proj.weight": F32}
    assert fit.weights(specs, {}, Machine("metal", 1, None)).expert_bytes == 800


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"n_ctx": 7},
        {"max_position_embeddings": 9, "n_ctx": 7},
        {"text_config": {"max_position_embeddings": 5}},
        {"max_position_embeddings": 0, "seq_length": 3},
        {"max_position_embeddings": "long"},
    ],
    ids=str,
)
def test_the_context_is_the_engines(config: dict[str, Any]) -> None:
    assert fit.context_length(config) == load.context_length(config)


# ------------------------------------------------------------------------------- arithmetic

CHUNK = 2048 * 550_000  # bytes that a GPU's prefill takes for a moment


def made(
    plan: KVPlan,
    *,
    weights: int = 1_000_000_000,
    budget: int | None = None,
    kind: str = "metal",
    max_context: int = 1 << 20,
    **more: Any,
) -> Fit:
    values: dict[str, Any] = {
        "machine": Machine(kind, 16_000_000_000, None, 100.0),
        "weights": Weights(weights, 0, "bfloat16", False),
        "plan": plan,
        "max_context": max_context,
        "budget_bytes": budget,
        "read_share": 1.0,
        "widths": 0,
        "heads": 0,
    }
    return Fit(**{**values, **more})


FULL = KVPlan(((Full(1000),),))
MIXED = KVPlan(((Full(1000),), (Window(512, 3000),), (Const(5_000_000),)))


@pytest.mark.parametrize(
    ("plan", "room", "context"),
    [
        (FULL, 0, 0),
        (FULL, -1, 0),
        (FULL, 999, 0),
        (FULL, 1000, 1),
        (FULL, 7_000_999, 7000),
        (MIXED, 5_000_000 + 4000 * 511, 511),
        (MIXED, 5_000_000 + 4000 * 512, 512),
        (MIXED, 5_000_000 + 4000 * 512 + 999, 512),
        (MIXED, 5_000_000 + 4000 * 512 + 1000, 513),
        (MIXED, 5_000_000 + 3000 * 512 + 1000 * 9999, 9999),
        (MIXED, 4_999_999, 0),
    ],
    ids=str,
)
def test_the_longest_context_that_fits(plan: KVPlan, room: int, context: int) -> None:
    found = made(plan, budget=1_000_000_000 + CHUNK + room)
    assert found.max_safe_context == context
    assert replace(found, max_context=600).max_safe_context == min(context, 600)


def test_usable_and_total() -> None:
    found = made(FULL)
    assert found.usable_bytes == 12_000_000_000
    assert found.total_bytes(100) == 1_000_000_000 + 100 * 1000 + 100 * 550_000
    assert found.total_bytes(4096) == 1_000_000_000 + 4096 * 1000 + CHUNK
    assert found.fits(4096)
    tight = made(FULL, budget=1_000_000_000 + 100 * 551_000)
    assert tight.fits(100) and not tight.fits(101)


def test_rows_take_whole_slabs() -> None:
    room = 5 * 512 * 1000
    found = made(FULL, budget=1_000_000_000 + CHUNK + room)
    assert [found.rows(tokens) for tokens in (256, 257, 512, 513)] == [10, 5, 5, 3]
    assert made(FULL, budget=5).rows(1) == 0


def test_speed_is_the_bandwidths() -> None:
    dense = made(FULL)
    assert dense.decode_tps(0) == pytest.approx(100 * 0.82)
    assert dense.decode_tps(1_000_000) == pytest.approx(50 * 0.82)
    assert dense.decode_tps(0, bandwidth=200) == pytest.approx(200 * 0.82)
    counted = Weights(1_000_000_000, 800_000_000, "bfloat16", False)
    sparse = made(FULL, read_share=0.25)
    assert replace(sparse, weights=counted).decode_tps(0) == pytest.approx(100 / 0.4 * 0.76)
    assert made(FULL, machine=Machine("cpu", 1, "float32")).decode_tps(0) is None


@pytest.mark.parametrize(
    ("chip", "speed"),
    [
        ("Apple M1", 68),
        ("Apple M3 Max", 400),
        ("Apple M4 Pro", 273),
        ("Apple M9 Giga", 273),
        ("Intel(R) Xeon(R)", None),
        (None, None),
    ],
)
def test_bandwidths(chip: str | None, speed: float | None) -> None:
    assert fit.bandwidth(chip) == speed


def test_a_budget_without_room_is_refused() -> None:
    least = made(FULL).least_bytes
    assert least == 1_000_000_000 + 256 * 1000 + CHUNK
    fit.require_room(made(FULL, budget=least), "some-model")
    fit.require_room(made(FULL, machine=Machine("metal", 1, None)), "some-model")  # no budget
    with pytest.raises(ModelError, match=r"some-model: .* 1\.00 GB; .* of 2 GB .* 2\.13 GB"):
        fit.require_room(made(FULL, budget=2_000_000_000), "some-model")


# ---------------------------------------------------------------------------- a CPU's prefill


@pytest.mark.parametrize(
    ("config", "widths", "heads"),
    [
        ({"intermediate_size": 100}, 14 * 64 + 6 * 100, 4),
        ({"intermediate_size": [80, 300, 100]}, 14 * 64 + 6 * 300, 4),  # gemma3n's is by layer
        ({}, 14 * 64 + 6 * 256, 4),
        (
            {"intermediate_size": 50, "moe_intermediate_size": 40, "num_experts_per_tok": 3},
            14 * 64 + 6 * 120,
            4,
        ),
        (
            {"model_type": "mamba", "intermediate_size": 8} | {"state_size": 2, "conv_kernel": 4},
            14 * 64 + 6 * 8,
            0,
        ),
    ],
    ids=["dense", "by layer", "unstated", "experts", "no attention"],
)
def test_widths(config: dict[str, Any], widths: int, heads: int) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    found = fit.at_most({"model_type": "llama", **sizes, **config}, 1, fit.machine("cpu"))
    assert (found.widths, found.heads) == (widths, heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4},
        {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 12},
        {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
        | {"model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 128}
        | {"num_experts": 8, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
        | {"mlp_only_layers": [], "norm_topk_prob": True},
    ],
    ids=["llama", "llama with many heads", "qwen3_moe"],
)
@pytest.mark.parametrize(("chunk", "context"), [(512, 512), (256, 2048), (32, 1024)])
def test_a_prefill_takes_what_is_counted(
    shape: dict[str, Any], chunk: int, context: int, tmp_path: Path
) -> None:
    config = {**tiny.CONFIG, "vocab_size": 64, "max_position_embeddings": 4096, **shape}
    model = tiny.build(config)
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    machine = fit.machine("cpu", 1 << 34)
    found = fit.measure(config, [tmp_path / "model.safetensors"], machine)
    from mlx_lm.models.cache import KVCache

    def peak() -> int:
        cache = [KVCache() for _ in model.layers]
        for layer in cache:  # as if all but the last chunk were there
            size = found.plan.per_token_bytes // len(cache) // 16  # 2 heads of float32, twice
            filler = mx.zeros((1, 2, context - chunk, size))
            if context > chunk:
                layer.update_and_fetch(filler, filler)
        mx.eval([a for layer in cache for a in layer.state if isinstance(a, mx.array)])
        mx.clear_cache()
        mx.reset_peak_memory()
        model(mx.zeros((1, chunk), dtype=mx.uint32), cache=cache)
        mx.eval([array for layer in cache for array in (layer.keys, layer.values)])
        return mx.get_peak_memory() - mx.get_active_memory()

    # How much of it MLX's tasks hold at once is up to their threads: the most is what counts.
    taken = max(peak() for _ in range(5))
    assert 0 < taken <= found.transient_bytes(context, chunk) < 1.5 * taken
