"""What the servers are given to serve: equal weights, or random ones of a known size (floor 4).

On a CPU mlxlite unpacks a quantised model to float32. So that both servers run the same numbers,
its dense copy is dressed as an ordinary model folder for both. A shape needs no download: weights
from a seed, a tokenizer made here, so that the benchmark runs anywhere. What such a model says is
noise; how long it takes is not. No MLX here: the measuring process stays small.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mlxlite import launch
from mlxlite.config import Settings
from mlxlite.errors import ModelError
from mlxlite.models import library
from mlxlite.models.safetensors_file import DTYPE_BYTES, SafetensorsWriter, TensorSpec
from mlxlite.text.tokenizer import BYTE_OF_CHAR

# ------------------------------------------------------------------------- the dense copy


def dense_copy(settings: Settings, model: library.LocalModel) -> Path | None:
    """The float32 weights that an earlier start of mlxlite kept of a quantised model."""
    folder = launch.dense_folder(settings, model.folder)
    return next(iter(sorted(folder.glob("float32-*.safetensors"))), None)


def dress(model: library.LocalModel, weights: Path, folder: Path) -> Path:
    """Make `folder` a model of these dense weights, with the config and tokenizer of `model`.

    Links, no copies. The names are mlx-lm's: it loads them as it would a conversion of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = library.read_object(model.folder / "config.json")
    for packed in ("quantization", "quantization_config"):
        config.pop(packed, None)
    config["dtype"] = "float32"
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    for file in model.folder.iterdir():
        is_weights = file.suffix in (".safetensors", ".gguf") or "safetensors" in file.name
        if file.is_file() and not is_weights and file.name not in ("config.json", library.RECORD):
            os.symlink(file.resolve(), folder / file.name)
    os.symlink(weights.resolve(), folder / "model.safetensors")
    return folder


# ------------------------------------------------------------------------------ random weights


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama-like model. Sizes as in its config."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool  # the head is the embedding
    context: int = 16_384


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, 2048, False),
    "135m": Shape(576, 1536, 30, 9, 3, 64, 49_152, True),  # SmolLM2
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256, True),  # Llama 3.2
    "3b": Shape(3072, 8192, 28, 24, 8, 128, 128_256, True),
    "8b": Shape(4096, 14_336, 32, 32, 8, 128, 128_256, False),  # Llama 3.1
}

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SLICE_BYTES = 1 << 24
_EXPONENT_BIAS = 127  # of float32 and bfloat16


def make_shape(name: str, home: Path, dtype: str) -> library.LocalModel:
    """A model folder of this shape, made once and kept in the home. dtype: F32 or BF16.

    Raises ModelError for an unknown name."""
    if name not in SHAPES:
        raise ModelError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    folder = home / "bench" / f"{name}-{dtype.lower()}"
    if not folder.is_dir():
        draft = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            draft.mkdir(parents=True)
            _write_shape(SHAPES[name], draft, dtype)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return library.describe(folder, f"random-{name}")


def _write_shape(shape: Shape, folder: Path, dtype: str) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": 0,
        "eos_token_id": [0, 2],
        "dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype],
    }
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[2],
        "add_bos_token": False,
        "chat_template": _TEMPLATE,
    }
    vocabulary, silent = _vocabulary(shape.vocab)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary)))
    tensors = dict(_tensors(shape))
    specs = {tensor: TensorSpec(dtype, dims) for tensor, dims in tensors.items()}
    draws = random.Random(7)
    with SafetensorsWriter(folder / "model.safetensors", specs) as writer:
        for tensor, dims in tensors.items():
            if len(dims) == 1:
                writer.write(tensor, 0, _ones(dims[0], dtype))
                continue
            # 1.53 is the root mean square of what `_noise` draws from 1 to 2.
            exponent = round(math.log2(1 / math.sqrt(dims[1]) / 1.53))
            n_bytes = prod(dims) * DTYPE_BYTES[dtype]
            for at in range(0, n_bytes, _SLICE_BYTES):
                size = min(_SLICE_BYTES, n_bytes - at)
                writer.write(tensor, at, _noise(draws.randbytes(size), dtype, exponent))
            if tensor == ("model.embed_tokens.weight" if shape.is_tied else "lm_head.weight"):
                # Logits of 0: greedy answers never end, and never say half a character.
                writer.write(tensor, 0, bytes(silent * dims[1] * DTYPE_BYTES[dtype]))


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (shape.hidden,)
        yield f"{at}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{at}.self_attn.q_proj.weight", (shape.heads * shape.head_dim, shape.hidden)
        yield f"{at}.self_attn.k_proj.weight", (shape.kv_heads * shape.head_dim, shape.hidden)
        yield f"{at}.self_attn.v_proj.weight", (shape.kv_heads * shape.head_dim, shape.hidden)
        yield f"{at}.self_attn.o_proj.weight", (shape.hidden, shape.heads * shape.head_dim)
        yield f"{at}.mlp.gate_proj.weight", (shape.inner, shape.hidden)
        yield f"{at}.mlp.up_proj.weight", (shape.inner, shape.hidden)
        yield f"{at}.mlp.down_proj.weight", (shape.hidden, shape.inner)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.is_tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def _noise(data: bytes, dtype: str, exponent: int) -> bytes:
    """Random bits as numbers whose magnitudes lie between 2**exponent and twice that: sign and
    fraction stay, the exponent's bits are set. Both formats have them in the same places."""
    width, biased = DTYPE_BYTES[dtype], _EXPONENT_BIAS + exponent
    upper = bytes(byte & 0x80 | biased >> 1 for byte in range(256))
    lower = bytes(byte & 0x7F | (biased & 1) << 7 for byte in range(256))
    drawn = bytearray(data)
    drawn[width - 1 :: width] = drawn[width - 1 :: width].translate(upper)
    drawn[width - 2 :: width] = drawn[width - 2 :: width].translate(lower)
    return bytes(drawn)


def _ones(count: int, dtype: str) -> bytes:
    return (bytes(DTYPE_BYTES[dtype] - 2) + b"\x80\x3f") * count  # 1.0, little-endian


def _vocabulary(size: int) -> tuple[list[str], int]:
    """Tokens by id, and how many of the first ones must not be drawn: special ones and parts of
    characters. Without merges a prompt is one token a byte; the words are only ever said."""
    by_byte = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    spoken = [by_byte[byte] for byte in range(32, 127)]
    silent = [*_SPECIAL, *(char for char in by_byte.values() if char not in spoken)]
    tokens = silent + spoken
    for number in range(size - len(tokens)):
        letters = ""
        for _ in range(4):
            number, letter = divmod(number, 26)
            letters += chr(ord("a") + letter)
        tokens.append(by_byte[ord(" ")] + letters)
    return tokens, len(silent)


def _tokenizer(tokens: list[str]) -> dict[str, object]:
    """The content of tokenizer.json: bytes of a byte-level BPE that merges nothing."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": at, "content": text, "special": True, **flags}
            for at, text in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: at for at, text in enumerate(tokens)},
            "merges": [],
        },
    }
