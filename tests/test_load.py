"""Loading: model folders of several kinds through the real loader, sound and damaged ones.

What mlx-lm itself says is asked in child processes, because importing its package loads
transformers, which ours must never do.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine import backend, load, quantised
from mlxlite.errors import ModelError
from tests import tiny

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip
from mlx.utils import tree_flatten  # isort: skip

pytestmark = pytest.mark.slow

CPU = backend.start(Path("/nowhere"))  # the folder is for a GPU's kernels
GPU_LIKE = replace(CPU, kind="metal", prefers_dense=False)

FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},  # a name for llama
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "qwen2_moe": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def open_folder(
    folder: Path, dtype: str = "auto", on: backend.Backend = CPU, dense: Path | None = None
) -> load.LoadedModel:
    return load.load(folder, on, dtype, dense or folder / "dense")


def logits_of(model: Any) -> mx.array:
    logits = model(mx.array([[5, 9, 200, 31, 7]])).astype(mx.float32)
    mx.eval(logits)
    return logits  # type: ignore[no-any-return]


def distance(one: mx.array, other: mx.array) -> float:
    """Largest difference of logits, relative to their spread."""
    return float((mx.abs(one - other).max() / mx.std(one)).item())


def full_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def store(folder: Path, config: dict[str, Any], model: nn.Module) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))


# ------------------------------------------------------------------------------- dense models


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_load_in_every_dtype(kind: str, tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path / kind, model_type=kind, **FAMILIES[kind])
    config = full_config(folder)
    expected = logits_of(tiny.build(config))
    tolerances = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.6}
    for dtype, tolerance in tolerances.items():
        if "moe" in kind and dtype != "float32":
            continue  # MLX's expert layers compute in float32 only on a CPU
        loaded = open_folder(folder, dtype)
        assert loaded.dtype == dtype and loaded.max_context == 1024
        assert distance(expected, logits_of(loaded.model)) < tolerance
        arrays = quantised.parameters(loaded.model).values()
        assert loaded.weight_bytes == sum(array.nbytes for array in arrays)
        assert {array.dtype for array in arrays} == {getattr(mx, dtype)}
    assert not (folder / "dense").exists(), "a dense model needs no copy"


def test_half_precision_weights_become_float32_on_a_cpu_only(tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path / "half")
    model = tiny.build(full_config(folder))
    model.set_dtype(mx.bfloat16)
    store(folder, full_config(folder), model)
    assert open_folder(folder).dtype == "float32"
    kept = open_folder(folder, on=GPU_LIKE)
    assert kept.dtype == "bfloat16" and 2 * kept.weight_bytes == open_folder(folder).weight_bytes


def test_what_a_model_wants_in_its_own_dtype_is_cast_to_float32_only() -> None:
    class Picky:
        def cast_predicate(self, name: str) -> bool:
            return name != "router"

    weights = {name: mx.ones(2, dtype=mx.bfloat16) for name in ("router", "other")}
    weights["ids"] = mx.array([1])
    for dtype, router in (("float16", mx.bfloat16), ("float32", mx.float32)):
        cast = load._cast(Picky(), weights, dtype)
        assert (cast["router"].dtype, cast["other"].dtype) == (router, getattr(mx, dtype))
        assert cast["ids"].dtype == mx.int32
    assert load._cast(Picky(), weights, None) is weights


def test_weights_may_lie_in_several_files(tiny_folder: Path, tmp_path: Path) -> None:
    weights: Any = mx.load(str(tiny_folder / "model.safetensors"))
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        file = tmp_path / f"model-0000{number + 1}-of-00002.safetensors"
        mx.save_safetensors(str(file), {name: weights[name] for name in part})
    (tmp_path / "adapter.safetensors").write_bytes(b"not a part of the model")
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    whole = logits_of(open_folder(tiny_folder).model)
    assert mx.array_equal(logits_of(open_folder(tmp_path).model), whole)


# --------------------------------------------------------------------------- quantised models


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A snapshot of 4-bit layers with an 8-bit embedding and a head left dense."""
    folder = tiny.make_model(tmp_path / "packed")
    store_packed(folder, seed=7)
    return folder


def store_packed(folder: Path, seed: int) -> None:
    config = full_config(folder)
    entries = {
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 6},
        "lm_head": False,
    }
    model = tiny.build(config, seed)
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda path, module: (
            entries.get(path, True) if hasattr(module, "to_quantized") else False
        ),
    )
    store(folder, {**config, "quantization": {"group_size": 32, "bits": 4, **entries}}, model)


def packed_layers(loaded: load.LoadedModel) -> dict[str, tuple[int, int]]:
    return {
        name: (module.bits, module.group_size)
        for name, module in loaded.model.named_modules()
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    }


def test_packed_weights_stay_packed_where_that_is_fast(packed: Path) -> None:
    layers = packed_layers(open_folder(packed, on=GPU_LIKE))
    assert layers.pop("model.embed_tokens") == (8, 32)
    assert layers.pop("model.layers.0.mlp.up_proj") == (6, 64)
    assert set(layers.values()) == {(4, 32)} and len(layers) == 13 and "lm_head" not in layers


def test_a_cpu_unpacks_once_and_keeps_the_copy(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_packed = logits_of(open_folder(packed, on=GPU_LIKE).model)
    first = open_folder(packed)
    assert not packed_layers(first) and first.dtype == "float32"
    assert distance(as_packed, logits_of(first.model)) < 1e-4
    [copy] = (packed / "dense").iterdir()
    assert copy.name.startswith("float32-")
    monkeypatch.setattr(load, "_source_weights", lambda *args: pytest.fail("unpacked again"))
    second = open_folder(packed)
    assert mx.array_equal(logits_of(first.model), logits_of(second.model))


def test_each_dtype_has_a_copy_of_its_own(packed: Path) -> None:
    as_packed = logits_of(open_folder(packed).model)
    assert distance(as_packed, logits_of(open_folder(packed, "float16").model)) < 0.1
    names = sorted(file.name.partition("-")[0] for file in (packed / "dense").iterdir())
    assert names == ["float16", "float32"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "garbage": lambda file: file.write_bytes(b"{" * 1000),
    "incomplete": lambda file: mx.save_safetensors(str(file), {"lm_head.weight": mx.zeros(3)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_made_again(packed: Path, damage: str) -> None:
    sound = logits_of(open_folder(packed).model)
    [copy] = (packed / "dense").iterdir()
    size = copy.stat().st_size
    DAMAGES[damage](copy)
    assert mx.array_equal(logits_of(open_folder(packed).model), sound)
    assert [file.stat().st_size for file in (packed / "dense").iterdir()] == [size]


def test_a_copy_of_other_weights_is_not_used(packed: Path) -> None:
    before = logits_of(open_folder(packed).model)
    [old] = (packed / "dense").iterdir()
    store_packed(packed, seed=8)
    after = logits_of(open_folder(packed).model)
    assert distance(before, after) > 0.1
    assert distance(after, logits_of(open_folder(packed, on=GPU_LIKE).model)) < 1e-4
    [new] = (packed / "dense").iterdir()
    assert new != old, "the old copy is gone"


def test_a_model_too_large_to_unpack_stays_packed_in_float32(packed: Path) -> None:
    dense_bytes = open_folder(packed).weight_bytes
    small = replace(CPU, memory_bytes=3 * dense_bytes - 1)
    loaded = open_folder(packed, on=small, dense=packed / "other")
    assert packed_layers(loaded) and not (packed / "other").exists()
    assert loaded.dtype == "float32" and loaded.weight_bytes < dense_bytes
    floats = {a.dtype for a in quantised.parameters(loaded.model).values()} - {mx.uint32}
    assert floats == {mx.float32}
    assert distance(logits_of(open_folder(packed).model), logits_of(loaded.model)) < 1e-4
    fits = replace(CPU, memory_bytes=3 * dense_bytes)
    assert not packed_layers(open_folder(packed, on=fits))


def test_a_disk_that_takes_no_copy_is_no_failure(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (packed / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        loaded = open_folder(packed, dense=packed / "file" / "dense")
    assert not packed_layers(loaded)
    assert "no dense copy kept" in caplog.text


# --------------------------------------------------------------------------------------- errors


def spoil_config(**entries: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**full_config(folder), **entries}))

    return spoil


def rewrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 3000)


def drop_a_tensor(folder: Path) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    del weights["model.norm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


SPOILED: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda f: (f / "config.json").unlink(), ["config.json", "no such file"]),
    (rewrite("config.json", b"[1, 2]"), ["config.json", "JSON object"]),
    (rewrite("config.json", b"{"), ["config.json", "cannot be read"]),
    (rewrite("config.json", b"\xff\xfe{}"), ["config.json", "cannot be read"]),
    (rewrite("config.json", b"[" * 100_000), ["config.json", "cannot be read"]),
    (rewrite("config.json", b"{}"), ["no model_type"]),
    (lambda f: (f / "model.safetensors").unlink(), ["no .safetensors file"]),
    (rewrite("model.safetensors", b""), ["model.safetensors", "cannot be read"]),
    (rewrite("model.safetensors", b"\x00" * 64), ["model.safetensors", "cannot be read"]),
    (rewrite("model.safetensors", b"\xff" * 64), ["model.safetensors", "cannot be read"]),
    (cut, ["model.safetensors", "cannot be read"]),
    (drop_a_tensor, ["cannot be loaded", "model.norm.weight"]),
    (spoil_config(hidden_size=32), ["cannot be loaded", "shape"]),
    (spoil_config(hidden_size="wide"), ["cannot be loaded"]),
    (spoil_config(num_attention_heads=0), ["cannot be loaded", "zero"]),
    (spoil_config(num_hidden_layers=3), ["cannot be loaded", "layers.2"]),
    (spoil_config(quantization="four bits"), ["cannot be loaded"]),
    (spoil_config(text_config=[1]), ["cannot be loaded"]),
    (spoil_config(model_type="gpt9"), ["'gpt9'", "mlx-lm"]),
    (spoil_config(model_type="../llama"), ["'../llama'", "mlx-lm"]),
    (spoil_config(model_type="base"), ["'base'"]),
    (spoil_config(model_type=7), ["no model_type"]),
    (spoil_config(model_type="olmo"), ["'olmo'", "not installed"]),
    (spoil_config(model_file="mine.py"), ["'mine.py'", "own code"]),
    (spoil_config(quantization_config={"quant_method": "modelopt"}), ["NVFP4"]),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_a_bad_folder_is_one_clear_line(
    spoil: Callable[[Path], object], words: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    spoil(tmp_path)
    with pytest.raises(ModelError) as caught:
        open_folder(tmp_path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    for word in words:
        assert word in message


# --------------------------------------------------------------------------------------- config


def test_tagged_floats_are_numbers(tmp_path: Path) -> None:
    tagged = {
        "a": {"__float__": "Infinity"},
        "b": [{"c": {"__float__": "-Infinity"}}],
        "d": {"__float__": "NaN"},
        "e": {"__float__": "1.0"},
        "f": {"__float__": ["NaN"]},
        "g": {"__float__": "NaN", "more": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(tagged))
    config = load.read_config(tmp_path)
    assert config["a"] == math.inf and config["b"] == [{"c": -math.inf}]
    assert math.isnan(config["d"])
    assert {key: config[key] for key in "efg"} == {key: tagged[key] for key in "efg"}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "n_ctx": 512}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 100, "text_config": {"max_position_embeddings": 9}}, 100),
        ({"max_position_embeddings": None, "seq_length": 77}, 77),
        ({"max_position_embeddings": -1}, 32_768),
        ({"max_position_embeddings": "long"}, 32_768),
        ({"text_config": None}, 32_768),
        ({}, 32_768),
    ],
)
def test_context_length(config: dict[str, Any], tokens: int) -> None:
    assert load.context_length(config) == tokens


# --------------------------------------------------------------------- compared with mlx-lm itself

EVERY_MODEL_FILE = """
import importlib, sys
from pathlib import Path
from mlxlite.engine import load

load.bare_package()
folder = Path(sys.modules["mlx_lm"].__path__[0], "models")
names = sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
left = []
for name in names:
    try:
        importlib.import_module(f"mlx_lm.models.{name}")
    except SystemExit:
        left.append(name)
assert left in ([], ["olmo"]), left
assert len(names) > 100, names
heavy = {"transformers", "huggingface_hub", "torch"} & set(sys.modules)
assert not heavy, heavy
"""

SAME_AS_MLX_LM = """
import mlx.core as mx, mlx.nn as nn
from mlx_lm import utils
from mlxlite.engine import load, quantised

load.bare_package()  # leaves the real package where it is
assert load.MODEL_FILES == utils.MODEL_REMAPPING
assert load.MODEL_FILES_BY_ARCHITECTURE == utils.MODEL_ARCHITECTURE_REMAPPING

for packing in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized"):
    told = {"quant_method": "compressed-tensors", "format": packing}
    theirs = {"mode": "affine", **utils._compressed_tensors_quantization(told)}
    assert quantised.scheme_of({"quantization_config": told}, None) == theirs, packing

layer = nn.Linear(256, 32, bias=False)
packings = [("affine", b, g) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
packings += [("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32)]
for mode, bits, group_size in packings:
    arrays = mx.quantize(layer.weight, group_size, bits, mode)
    weights = dict(zip(("p.weight", "p.scales", "p.biases"), arrays))
    ours = quantised.layer_scheme("p", 256, weights, {})
    assert ours == utils.infer_quant_config("p", layer, weights) == {
        "mode": mode, "bits": bits, "group_size": group_size}

def words(*shape):
    return mx.random.randint(0, 2**32 - 1, shape, dtype=mx.uint32)

for dtype in (mx.float16, mx.float32):
    weights = {
        "a.qweight": words(256, 8), "a.qzeros": words(2, 8),
        "a.scales": mx.random.normal((2, 64)).astype(dtype), "a.bias": mx.zeros(64),
        "b.qweight": words(128, 4), "b.scales": mx.random.normal((1, 32)).astype(dtype),
        "norm.weight": mx.ones(256, dtype=mx.bfloat16),
    }
    theirs, _ = utils._transform_awq_weights(weights, {"bits": 4, "group_size": 128})
    ours = quantised.repack_awq(weights)
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert mx.array_equal(ours[name], theirs[name]), name
"""


@pytest.mark.slow
def test_mlx_lm_says_the_same() -> None:
    """Side by side, because importing transformers takes its time."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for script in (EVERY_MODEL_FILE, SAME_AS_MLX_LM)
    ]
    said = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(said)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0},
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0},
            },
        ),
        (
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
        ("nonsense", {}),
        ({"full_attention": 3, "sliding_attention": {}}, {}),
    ],
    ids=["plain", "scaled", "by layer", "partial", "no object", "damaged"],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_rotary_settings_of_newer_configs_are_found(
    tmp_path: Path, given: Any, expected: dict[str, Any], is_nested: bool
) -> None:
    inner = {"model_type": "llama", "rope_parameters": given}
    written = {"model_type": "x", "text_config": inner} if is_nested else inner
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = load.read_config(tmp_path)
    scope = read["text_config"] if is_nested else read
    assert expected.items() <= scope.items()
    assert "rope_scaling" in expected or "rope_scaling" not in scope


def test_older_rotary_settings_stand(tmp_path: Path) -> None:
    given = {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert load.read_config(tmp_path)["rope_theta"] == 7.0


@pytest.mark.parametrize("kind", ["lfm2-vl", "lille-130m", "nemotron-nas"])
def test_files_with_hyphens_are_found(kind: str) -> None:
    model, args = load._model_classes({"model_type": kind})
    assert model.__module__ == args.__module__ == f"mlx_lm.models.{kind}"
