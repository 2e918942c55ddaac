"""Turns a GGUF file into an ordinary MLX snapshot folder, which mlx-lm itself can load too.

The folder gets config.json, generation_config.json, model*.safetensors, tokenizer.json and
tokenizer_config.json. Weights stream from the mapped file to the new one a few rows at a time, so
an import takes some 20 MB beside the mapped pages, whatever the model's size. No `mlx` is involved:
reading the blocks ourselves also keeps damaged files away from `mx.load`, which crashes on some.

What conversion to GGUF did is undone on the way (see `gguf_config`); what quantisation did is kept
(see `gguf_blocks`): bit widths differ between tensors, so config.json lists those that differ from
the commonest under `quantization`, keyed by module, as mlx-lm reads it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxlite.models import gguf_blocks
from mlxlite.models.gguf_config import Target, plan_snapshot
from mlxlite.models.gguf_file import GgufFile, TensorEntry, read_gguf
from mlxlite.models.gguf_tokenizer import build_tokenizer
from mlxlite.models.progress import Progress
from mlxlite.models.safetensors_file import SafetensorsWriter, TensorSpec

SHARD_BYTES = 5_000_000_000  # as transformers and mlx-lm shard
CHUNK_VALUES = 1 << 17  # decoded at a time; half a MB of float32 stays in a core's cache


def import_gguf(path: Path, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Write the snapshot of `path` into the existing, empty `folder`; give its config.

    All files are synced to disk. On an error the folder is left half-filled for the caller to drop.
    """
    progress = progress or Progress()
    with read_gguf(path) as file:
        config, targets = plan_snapshot(file)
        tokenizer, tokenizer_config = build_tokenizer(file, config)
        if (quantization := _quantization(file, targets)) is not None:
            config["quantization"] = quantization
        dense = _dense_dtype(file, targets)
        config["dtype"] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dense]
        _write_weights(file, targets, dense, folder, progress)
    generation = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if key in config
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", config)
    return config


def write_json(path: Path, content: Any) -> None:
    """Write and sync one JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())


def snapshot_bytes(path: Path) -> int:
    """About how large the snapshot of `path` will be, for the check of free space.

    Repacked blocks grow from 18 to at most 20 bytes in 32 values, Q2_K from 84 to 128 in 256.
    """
    return path.stat().st_size * 3 // 2


# --- planning ---------------------------------------------------------------------------------


def _is_packed(entry: TensorEntry) -> bool:
    """Whether the tensor stays quantised. Norms and biases never do: MLX has no such layers."""
    return len(entry.shape) == 2 and entry.block_type.name in gguf_blocks.DECODERS


def _quantization(file: GgufFile, targets: list[Target]) -> dict[str, Any] | None:
    """mlx-lm's `quantization` entry: the commonest width, and every module that differs from it."""
    bits = {
        target.module: gguf_blocks.DECODERS[entry.block_type.name].bits
        for target in targets
        if _is_packed(entry := file.tensors[target.source])
    }
    if not bits:
        return None
    commonest = Counter(bits.values()).most_common(1)[0][0]
    group_size = gguf_blocks.GROUP_SIZE
    exceptions = {
        module: {"group_size": group_size, "bits": width}
        for module, width in bits.items()
        if width != commonest
    }
    return {"group_size": group_size, "bits": commonest, "mode": "affine", **exceptions}


def _dense_dtype(file: GgufFile, targets: list[Target]) -> str:
    """One dtype for all that is not packed: mixing them would make MLX compute in the widest.

    GGUF keeps norms in float32 whatever the weights are, so the matrices decide.
    """
    kinds = {
        entry.block_type.name
        for target in targets
        if len((entry := file.tensors[target.source]).shape) == 2
    }
    if kinds == {"F32"}:
        return "F32"
    return "BF16" if kinds <= {"F32", "BF16"} else "F16"


def _specs(file: GgufFile, target: Target, dense: str) -> dict[str, TensorSpec]:
    """What one source tensor becomes in the safetensors file."""
    entry = file.tensors[target.source]
    if not _is_packed(entry):
        return {f"{target.module}.{target.parameter}": TensorSpec(dense, entry.shape)}
    rows, columns = entry.shape
    bits = gguf_blocks.DECODERS[entry.block_type.name].bits
    groups = (rows, columns // gguf_blocks.GROUP_SIZE)
    return {
        f"{target.module}.weight": TensorSpec("U32", (rows, columns * bits // 32)),
        f"{target.module}.scales": TensorSpec("F16", groups),
        f"{target.module}.biases": TensorSpec("F16", groups),
    }


def _shards(
    file: GgufFile, targets: list[Target], dense: str, limit_bytes: int
) -> list[tuple[list[Target], dict[str, TensorSpec]]]:
    """Targets in order, cut where the next one would pass the limit."""
    shards: list[tuple[list[Target], dict[str, TensorSpec]]] = []
    room_bytes = 0
    for target in targets:
        specs = _specs(file, target, dense)
        n_bytes = sum(spec.n_bytes for spec in specs.values())
        if not shards or n_bytes > room_bytes:
            shards.append(([], {}))
            room_bytes = limit_bytes
        shards[-1][0].append(target)
        shards[-1][1].update(specs)
        room_bytes -= n_bytes
    return shards


# --- writing ----------------------------------------------------------------------------------


def _write_weights(
    file: GgufFile, targets: list[Target], dense: str, folder: Path, progress: Progress
) -> None:
    shards = _shards(file, targets, dense, SHARD_BYTES)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    progress.start("import", sum(file.tensors[target.source].n_bytes for target in targets))
    try:
        for name, (members, specs) in zip(names, shards, strict=True):
            with SafetensorsWriter(folder / name, specs) as writer:
                for target in members:
                    _write_tensor(file, target, dense, writer, progress)
    finally:
        progress.finish()
    if len(shards) > 1:
        places = {
            tensor: name for name, (_, specs) in zip(names, shards, strict=True) for tensor in specs
        }
        total = sum(spec.n_bytes for _, specs in shards for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)


def _write_tensor(
    file: GgufFile, target: Target, dense: str, writer: SafetensorsWriter, progress: Progress
) -> None:
    entry = file.tensors[target.source]
    kind, block_bytes = entry.block_type.name, entry.block_type.block_bytes
    shape = entry.shape if len(entry.shape) == 2 else (1, entry.shape[0])
    if target.n_heads and len(entry.shape) == 1:
        shape = (entry.shape[0], 1)  # a bias has one value a row
    raw = np.frombuffer(file.tensor_bytes(entry), np.uint8).reshape(shape[0], -1)  # (R, row bytes)
    order = rotary_order(shape[0], target.n_heads) if target.n_heads else None

    step = max(1, CHUNK_VALUES // shape[1])
    for start in range(0, shape[0], step):
        rows = raw[start : start + step] if order is None else raw[order[start : start + step]]
        if _is_packed(entry):
            parts = gguf_blocks.repack(kind, rows, block_bytes)
            for suffix, part in zip(("weight", "scales", "biases"), parts, strict=True):
                n_bytes = part.itemsize * part.shape[1]  # of one row
                writer.write(f"{target.module}.{suffix}", start * n_bytes, part.tobytes())
        else:
            name = f"{target.module}.{target.parameter}"
            if kind == dense and not target.shift:
                data = rows.tobytes()
            else:
                values = gguf_blocks.dequantise(kind, rows, block_bytes) + np.float32(target.shift)
                data = gguf_blocks.dense_bytes(values, dense)
            writer.write(name, start * (len(data) // len(rows)), data)
        progress.advance(rows.nbytes)


def rotary_order(n_rows: int, n_heads: int) -> NDArray[np.int64]:
    """For each row in Hugging Face's order, the row of the GGUF tensor that holds it.

    The converter splits a head's rows in two halves and interleaves them (`LlamaModel.permute`), so
    that pairs which rotate together are neighbours: 0, h, 1, h+1, ... for a half size h.
    """
    half = n_rows // n_heads // 2
    return np.arange(n_rows).reshape(n_heads, half, 2).swapaxes(1, 2).reshape(-1)
