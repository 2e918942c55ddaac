"""Writes small GGUF files for tests: any metadata, any tensors, all four architectures.

`tiny_gguf` makes a model with random float weights in Hugging Face's order and gives them back, so
that a test can compare what an import wrote with what went in. It does what llama.cpp's converter
does (permute rows, add 1 to norms), written here independently of the code that undoes it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from mlxlite.models.gguf_file import BLOCK_TYPES

NUMBERS = {block_type.name: number for number, block_type in BLOCK_TYPES.items()}
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
WIDTH, INNER, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 256, 256, 4, 2, 64, 2


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """Value type and value; the type follows from Python's."""
    if isinstance(content, bool):
        return struct.pack("<I?", BOOL, content)
    if isinstance(content, int):
        return struct.pack("<II", U32, content)
    if isinstance(content, float):
        return struct.pack("<If", F32, content)
    if isinstance(content, str):
        return struct.pack("<I", STRING) + string(content)
    if content and isinstance(content[0], str):
        body = b"".join(map(string, content))
        return struct.pack("<IIQ", ARRAY, STRING, len(content)) + body
    if content and isinstance(content[0], list):
        body = b"".join(value(entry)[4:] for entry in content)
        return struct.pack("<IIQ", ARRAY, ARRAY, len(content)) + body
    form, kind = ("f", F32) if content and isinstance(content[0], float) else ("i", I32)
    return struct.pack(f"<IIQ{len(content)}{form}", ARRAY, kind, len(content), *content)


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]],
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """tensors: name -> (type name, row-major shape, raw blocks)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, content in metadata.items():
        out += string(key) + value(content)
    offset = 0
    for name, (kind, shape, raw) in tensors.items():
        out += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out += struct.pack("<IQ", NUMBERS[kind], offset)
        offset += -(-len(raw) // alignment) * alignment
    out += b"\0" * (-len(out) % alignment)
    out += b"".join(raw + b"\0" * (-len(raw) % alignment) for _, _, raw in tensors.values())
    path.write_bytes(out)
    return path


def random_blocks(kind: str, n_blocks: int, seed: int = 0) -> bytes:
    """Blocks with random levels and scales of a sane size (random bytes would hold NaN scales)."""
    generator = np.random.default_rng(seed)
    block_type = BLOCK_TYPES[NUMBERS[kind]]
    raw = generator.integers(0, 256, (n_blocks, block_type.block_bytes), np.uint8)
    halves = {  # where the float16 fields are
        "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
        "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    }  # fmt: skip
    for at in halves[kind]:
        size = 2e-4 if kind.endswith("K") else 5e-3  # K-quants multiply it by another scale
        scales = generator.uniform(size, 2 * size, n_blocks).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.tobytes()


def dense_blocks(values: np.ndarray[Any, Any], kind: str) -> bytes:
    if kind == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()


# --- vocabularies -----------------------------------------------------------------------------


def byte_letters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def byte_level_metadata(pre: str = "smollm") -> dict[str, Any]:
    """Three control tokens, the bytes, and a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters()]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<think>"]
    types = [3, 3, 3, *[1] * (len(tokens) - 4), 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["▁", "h", "e", "l", "o", "▁h", "ll", "el", "lo", "▁he", "▁hello", "▁hell", "<pad>"]
    scores = [0.0] * 259 + [-20.0, -21.0, -22.0, -23.0, -24.0, -3.0, -1.0, -9.0, -2.0, -4.0]
    scores += [-5.0, -6.0, 0.0]
    types = [2, 3, 3, *[6] * 256, *[1] * 12, 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


# --- whole models -----------------------------------------------------------------------------


def permute(weight: np.ndarray[Any, Any], n_heads: int) -> np.ndarray[Any, Any]:
    """Interleave the two halves of each head's rows, one row at a time (Hugging Face -> GGUF)."""
    size = len(weight) // n_heads
    order = [
        head * size + half * (size // 2) + i
        for head in range(n_heads)
        for i in range(size // 2)
        for half in range(2)
    ]
    return weight[order]


def tiny_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    is_tied: bool = True,
    rope_freqs: list[float] | None = None,
) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A 2-layer model whose matrices are stored as `kind`; gives the values in Hugging Face's names
    and order, for dense kinds only (random blocks have no other source than themselves)."""
    generator = np.random.default_rng(5)
    a = architecture
    keys = byte_level_metadata() if a != "gemma3" else sentencepiece_metadata()
    vocabulary = len(keys["tokenizer.ggml.tokens"]) + 3
    keys |= {
        "general.architecture": a,
        f"{a}.block_count": LAYERS,
        f"{a}.context_length": 128,
        f"{a}.embedding_length": WIDTH,
        f"{a}.feed_forward_length": INNER,
        f"{a}.attention.head_count": HEADS,
        f"{a}.attention.head_count_kv": KV_HEADS,
        f"{a}.attention.key_length": HEAD_SIZE,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 50000.0,
    }
    if a == "gemma3":
        keys |= {
            "gemma3.attention.sliding_window": 16,
            "gemma3.attention.sliding_window_pattern": 2,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.eot_token_id": 1,
        }
    keys |= metadata or {}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    reference: dict[str, np.ndarray[Any, Any]] = {}

    def add(source: str, module: str, shape: tuple[int, ...], n_heads: int = 0) -> None:
        values = (generator.standard_normal(shape) * 0.05).astype(np.float32)
        if source.endswith("norm.weight") and a != "gemma3":
            values += 1
        if len(shape) == 2 and kind not in ("F32", "F16", "BF16"):
            block_type = BLOCK_TYPES[NUMBERS[kind]]
            n_blocks = shape[0] * shape[1] // block_type.block_elements
            tensors[source] = kind, shape, random_blocks(kind, n_blocks, len(tensors))
            return
        stored = kind if len(shape) == 2 else "F32"
        reference[module] = values
        if n_heads and a == "llama":
            values = permute(values, n_heads)
        if source.endswith("norm.weight") and a == "gemma3":
            values = values + 1
        tensors[source] = stored, shape, dense_blocks(values, stored)

    add("token_embd.weight", "model.embed_tokens.weight", (vocabulary, WIDTH))
    for i in range(LAYERS):
        there, here = f"blk.{i}.", f"model.layers.{i}."
        names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        if a == "gemma3":
            names |= {"ffn_norm": "pre_feedforward_layernorm"}
            names |= {"post_attention_norm": "post_attention_layernorm"}
            names |= {"post_ffw_norm": "post_feedforward_layernorm"}
        for source, module in names.items():
            add(f"{there}{source}.weight", f"{here}{module}.weight", (WIDTH,))
        if a in ("qwen3", "gemma3"):
            add(f"{there}attn_q_norm.weight", f"{here}self_attn.q_norm.weight", (HEAD_SIZE,))
            add(f"{there}attn_k_norm.weight", f"{here}self_attn.k_norm.weight", (HEAD_SIZE,))
        for source, letter, rows, n_heads in (
            ("attn_q", "q", HEADS * HEAD_SIZE, HEADS),
            ("attn_k", "k", KV_HEADS * HEAD_SIZE, KV_HEADS),
            ("attn_v", "v", KV_HEADS * HEAD_SIZE, 0),
        ):
            module = f"{here}self_attn.{letter}_proj"
            add(f"{there}{source}.weight", f"{module}.weight", (rows, WIDTH), n_heads)
            if a == "qwen2":
                add(f"{there}{source}.bias", f"{module}.bias", (rows,), n_heads)
        out = f"{here}self_attn.o_proj.weight"
        add(f"{there}attn_output.weight", out, (WIDTH, HEADS * HEAD_SIZE))
        add(f"{there}ffn_gate.weight", f"{here}mlp.gate_proj.weight", (INNER, WIDTH))
        add(f"{there}ffn_up.weight", f"{here}mlp.up_proj.weight", (INNER, WIDTH))
        add(f"{there}ffn_down.weight", f"{here}mlp.down_proj.weight", (WIDTH, INNER))
    add("output_norm.weight", "model.norm.weight", (WIDTH,))
    if not is_tied:
        add("output.weight", "lm_head.weight", (vocabulary, WIDTH))
    if rope_freqs is not None:
        raw = np.array(rope_freqs, "<f4").tobytes()
        tensors["rope_freqs.weight"] = "F32", (len(rope_freqs),), raw
    return write_gguf(path, keys, tensors), reference
