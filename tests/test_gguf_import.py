"""GGUF imports against the weights that went in, and through mlx-lm's own model files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxlite.errors import ModelError
from mlxlite.models import gguf_import
from mlxlite.models.gguf_blocks import DECODERS, dequantise
from mlxlite.models.gguf_config import FAMILIES, PACKED, llama3_divisors
from mlxlite.models.gguf_file import BLOCK_TYPES, read_gguf
from mlxlite.models.gguf_import import import_gguf, rotary_order
from mlxlite.models.library import describe, weight_files
from mlxlite.models.safetensors_file import check_safetensors
from tests.gguf_writer import HEADS, NUMBERS, permute, tiny_gguf

pytestmark = pytest.mark.slow

# Loads folders with mlx-lm's model files (without the package's own __init__, which imports
# transformers) and prints the logits of a few tokens, one JSON line a folder.
LOAD = """
import importlib, importlib.util, json, sys, types
from pathlib import Path
import mlx.core as mx, mlx.nn as nn
package = types.ModuleType("mlx_lm")
package.__path__ = list(importlib.util.find_spec("mlx_lm").submodule_search_locations)
sys.modules["mlx_lm"] = package
for folder in map(Path, sys.argv[1:]):
    config = json.loads((folder / "config.json").read_text())
    module = importlib.import_module("mlx_lm.models." + config["model_type"])
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = {}
    for path in folder.glob("model*.safetensors"):
        weights |= mx.load(str(path))
    weights = model.sanitize(weights)
    if (q := config.get("quantization")) is not None:
        wanted = lambda p, m: q.get(p, p + ".scales" in weights)
        nn.quantize(model, q["group_size"], q["bits"], class_predicate=wanted)
    model.load_weights(list(weights.items()), strict=True)
    logits = model(mx.array([[1, 40, 70, 9, 80, 100]]))[0].astype(mx.float32)
    print(json.dumps(logits.tolist()))
"""


def logits_of(*folders: Path) -> list[Any]:
    # Compiled kernels take the C++ compiler seconds and these models nothing.
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1"}
    command = [sys.executable, "-c", LOAD, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    return [np.array(json.loads(line)) for line in done.stdout.splitlines()]


def imported(folder: Path, name: str, *args: Any, **options: Any) -> tuple[Path, Any, Any]:
    """Snapshot folder, config, reference weights."""
    path, reference = tiny_gguf(folder / f"{name}.gguf", *args, **options)
    snapshot = folder / name
    snapshot.mkdir()
    return snapshot, import_gguf(path, snapshot), reference


def load(snapshot: Path) -> dict[str, mx.array]:
    arrays: dict[str, mx.array] = {}
    for path in weight_files(snapshot):
        check_safetensors(path)
        part = mx.load(str(path))
        assert isinstance(part, dict)
        arrays |= part
    return arrays


def test_rotary_order_undoes_the_permutation() -> None:
    weight = np.arange(24).reshape(24, 1)
    assert (permute(weight, 3)[rotary_order(24, 3)] == weight).all()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_dense_weights_return_in_hugging_face_order(
    tmp_path: Path, architecture: str, is_tied: bool
) -> None:
    snapshot, config, reference = imported(tmp_path, "m", architecture, "F32", is_tied=is_tied)
    arrays = load(snapshot)
    assert arrays.keys() == reference.keys()
    for name, values in reference.items():
        np.testing.assert_allclose(np.array(arrays[name]), values, atol=1e-6, err_msg=name)
    assert config["tie_word_embeddings"] is is_tied
    assert config["max_position_embeddings"] == 128 and config["rope_theta"] == 50000.0
    assert config["rms_norm_eps"] == 1e-5 and config["dtype"] == "float32"
    assert "quantization" not in config
    assert describe(snapshot, "m").model_type == FAMILIES[architecture].model_type


def test_mlx_lm_computes_the_same_from_import_and_reference(tmp_path: Path) -> None:
    folders = []
    for architecture in FAMILIES:
        snapshot, config, reference = imported(tmp_path, architecture, architecture, "F32")
        original = tmp_path / f"{architecture}-reference"
        original.mkdir()
        (original / "config.json").write_text(json.dumps(config))
        arrays = {name: mx.array(values) for name, values in reference.items()}
        mx.save_safetensors(str(original / "model.safetensors"), arrays)
        folders += [snapshot, original]
    for kind in ("Q4_1", "Q6_K", "BF16"):  # quantised ones must at least load strictly and compute
        folders.append(imported(tmp_path, kind, "llama", kind)[0])
    results = logits_of(*folders)
    for ours, theirs in zip(results[0:8:2], results[1:8:2], strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert all(np.isfinite(logits).all() for logits in results[8:])


@pytest.mark.parametrize("kind", DECODERS)
def test_quantised_weights_keep_their_values(tmp_path: Path, kind: str) -> None:
    snapshot, config, _ = imported(tmp_path, "m", "llama", kind)
    arrays = load(snapshot)
    quantization = config["quantization"]
    assert (quantization["group_size"], quantization["bits"]) == (32, DECODERS[kind].bits)
    with read_gguf(tmp_path / "m.gguf") as file:
        for source, module in {
            "token_embd": "model.embed_tokens",
            "blk.1.attn_q": "model.layers.1.self_attn.q_proj",
            "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        }.items():
            entry = file.tensors[f"{source}.weight"]
            raw = np.frombuffer(file.tensor_bytes(entry), np.uint8).reshape(entry.shape[0], -1)
            expected = dequantise(kind, raw, entry.block_type.block_bytes)
            if "attn_q" in source:
                expected = expected[rotary_order(len(expected), HEADS)]
            parts = (arrays[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
            values = mx.dequantize(*parts, group_size=32, bits=DECODERS[kind].bits)
            error = np.array(values.astype(mx.float32)) - expected
            assert np.sqrt(np.square(error).mean()) < 0.13 * expected.std()
    assert arrays["model.norm.weight"].dtype == mx.float16


@pytest.mark.parametrize(("kind", "dtype"), [("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_half_precision_weights_and_norms_share_a_dtype(
    tmp_path: Path, kind: str, dtype: mx.Dtype
) -> None:
    snapshot, _, reference = imported(tmp_path, "m", "qwen3", kind)
    arrays = load(snapshot)
    assert {array.dtype for array in arrays.values()} == {dtype}
    name = "model.layers.1.mlp.up_proj.weight"
    ours = np.array(arrays[name].astype(mx.float32))
    np.testing.assert_allclose(ours, reference[name], rtol=2**-7, atol=1e-6)


def test_chunks_and_shards_change_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    whole, config, _ = imported(tmp_path, "whole", "llama", "Q4_K")
    monkeypatch.setattr(gguf_import, "CHUNK_VALUES", 256 * 7)
    monkeypatch.setattr(gguf_import, "SHARD_BYTES", 200_000)
    parts, same, _ = imported(tmp_path, "parts", "llama", "Q4_K")
    assert same == config
    assert len(weight_files(parts)) > 2 and (parts / "model.safetensors.index.json").exists()
    ours, theirs = load(parts), load(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert mx.array_equal(ours[name], theirs[name]), name
    assert describe(parts, "parts").size_bytes > 0
    weight_files(parts)[0].unlink()
    with pytest.raises(ModelError, match="00001.*missing"):
        describe(parts, "parts")


def test_mixed_widths_become_entries_per_layer(tmp_path: Path) -> None:
    path, _ = tiny_gguf(tmp_path / "m.gguf", "llama", "Q4_1")
    with read_gguf(path) as file:
        targets = gguf_import.plan_snapshot(file)[1]
        # The default model's case: only the embedding is of another kind.
        q8 = file.tensors["token_embd.weight"]
        object.__setattr__(q8, "block_type", BLOCK_TYPES[NUMBERS["Q8_0"]])
        assert gguf_import._quantization(file, targets) == {
            "group_size": 32,
            "bits": 4,
            "mode": "affine",
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognised(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = llama3_divisors(50000.0, 64, scaling)
    _, config, _ = imported(tmp_path, "m", "llama", "F32", rope_freqs=divisors)
    assert config["rope_scaling"] == scaling
    path, _ = tiny_gguf(tmp_path / "bad.gguf", rope_freqs=[1.0 + i for i in range(32)])
    with pytest.raises(ModelError, match="rope_freqs"):
        import_gguf(path, tmp_path)


def test_rope_and_eos_settings(tmp_path: Path) -> None:
    linear = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    snapshot, config, _ = imported(tmp_path, "g", "gemma3", metadata=linear)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (16, 2)
    assert config["query_pre_attn_scalar"] == 64
    assert config["eos_token_id"] == [2, 1] and config["bos_token_id"] == 1
    generation = json.loads((snapshot / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 1]}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported .*llama, qwen2"),
        ({"general.architecture": [1]}, "architecture"),
        ({"split.count": 2}, "split model"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.block_count": 1 << 30}, "tensors for 1073741824 layers"),
        ({"llama.block_count": 3}, "lacks the tensor 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 1}, "which a plain llama model has not"),
        ({"llama.attention.head_count": 8}, "has shape"),
        ({"llama.attention.head_count": 0}, "not a positive int"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs between layers"),
        ({"llama.rope.freq_base": float("nan")}, "not a positive float"),
        ({"llama.rope.dimension_count": 32}, "a part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.context_length": "x"}, "not a positive int"),
    ],
)
def test_what_is_not_supported_is_one_line(
    tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    path, _ = tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=reason) as caught:
        import_gguf(path, tmp_path)
    assert "m.gguf" in caught.value.message and "\n" not in caught.value.message


def test_unknown_block_kind_names_tensor_and_kind(tmp_path: Path) -> None:
    path, _ = tiny_gguf(tmp_path / "m.gguf", "llama", "Q4_0")
    raw = path.read_bytes()
    # Q4_0 and IQ4_NL have blocks of the same size: only the type number changes.
    at = raw.index(b"blk.0.attn_v.weight") + 19 + 4 + 16
    path.write_bytes(raw[:at] + b"\x14" + raw[at + 1 :])
    with pytest.raises(ModelError, match="'blk.0.attn_v.weight' is stored as IQ4_NL"):
        import_gguf(path, tmp_path)


def test_kinds_that_are_promised_can_be_read() -> None:
    assert tuple(DECODERS) == PACKED


def test_a_flipped_header_byte_never_crashes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(gguf_import, "_write_weights", lambda *_: None)  # the header is the subject
    path, _ = tiny_gguf(tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    header_bytes = raw.index(b"output_norm.weight") + 50
    n_errors = 0
    for at in range(0, header_bytes, 13):
        raw[at] ^= 0xFF
        path.write_bytes(raw[: header_bytes + 10_000])
        with open(path, "r+b") as file:
            file.truncate(len(raw))
        raw[at] ^= 0xFF
        try:
            import_gguf(path, tmp_path)
        except ModelError as error:
            n_errors += 1
            assert "\n" not in error.message
    assert n_errors > 50


PARIS = """
import sys
from mlx_lm import load
model, tokenizer = load(sys.argv[1])
import mlx.core as mx
model.apply(lambda x: x.astype(mx.float32) if x.dtype == mx.float16 else x)
from mlx_lm.models.cache import make_prompt_cache
chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
cache, out, step = make_prompt_cache(model), [], mx.array([ids])
while len(out) < 16 and not (out and out[-1] in tokenizer.eos_token_ids):
    step = mx.argmax(model(step, cache=cache)[:, -1], -1)[:, None]
    out.append(step.item())
print(ids)
print(tokenizer.decode(out))
"""


@pytest.mark.real
def test_the_default_model_answers_through_mlx_lm_itself() -> None:
    from mlxlite.models.install import get
    from tests.test_gguf_tokenizer import smollm_reference

    home = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
    model = get(None, home)
    done = subprocess.run(
        [sys.executable, "-c", PARIS, str(model.folder)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    ids, answer = done.stdout.decode().splitlines()[-2:]
    assert answer.startswith("The capital of France is Paris.")
    # The published tokenizer's ids of the same prompt begin like this.
    assert json.loads(ids)[:8] == [1, 9690, 198, 2683, 359, 253, 5356, 5646]

    from tokenizers import Tokenizer

    content = json.loads((model.folder / "tokenizer.json").read_text())
    metadata = {
        "tokenizer.ggml.tokens": list(content["model"]["vocab"]),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
    }
    tokenizer = Tokenizer.from_str(json.dumps(content))
    for text in (Path(__file__).read_text(), "Grüße aus 東京, 12.5 % of 2024 … naïve 🙂\n\n\tx"):
        assert tokenizer.encode(text).ids == smollm_reference(text, metadata)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
