"""A tiny real model, made on the spot: files that the real loader reads (STYLE section 4.6).

Two layers, 64 wide, random weights from a fixed seed, and a byte-level BPE tokenizer of 512 ids.
What it says is noise; that it says the same noise alone, batched, streamed and plain is the test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxlite.engine import backend, load  # noqa: F401  (backend first: it picks the BLAS)

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip
from mlx.utils import tree_flatten  # isort: skip

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": [0, 2],
}


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer with ChatML markers and 512 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the quick brown fox jumps over the lazy dog and says hello to the world again"] * 8
    words = " ".join(f"word{i} number{i * 7}" for i in range(120))
    tokenizer.train_from_iterator([*text, words], trainer)
    return tokenizer


def make_model(
    folder: Path, *, seed: int = 7, template: str | None = TEMPLATE, **config: Any
) -> Path:
    """Write a model folder and return it. config: entries that replace those of CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    full = {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), **config}
    told: dict[str, Any] = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    if template is not None:
        told["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps(full))
    model = build(full, seed)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def make_embedder(folder: Path, *, pooling: str = "lasttoken", **config: Any) -> Path:
    """An embedding model as sentence-transformers saves it: the bare stack of a Qwen3, no head."""
    config = {"model_type": "qwen3", "architectures": ["Qwen3Model"], "head_dim": 16, **config}
    make_model(folder, template=None, **config)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": 64, f"pooling_mode_{pooling}": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    file = str(folder / "model.safetensors")
    weights: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]  # by the file's kind
    bare = {n.removeprefix("model."): a for n, a in weights.items() if n != "lm_head.weight"}
    mx.save_safetensors(file, bare)
    return folder


def make_reranker(folder: Path, **config: Any) -> Path:
    """A reranker like Qwen3's, known by the name of its folder, with tokens for yes and no."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    entries = {"model_type": "qwen3", "head_dim": 16, "vocab_size": tokenizer.get_vocab_size()}
    make_model(folder, **{**entries, **config})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def build(config: dict[str, Any], seed: int = 7) -> nn.Module:
    """A random model of this config, evaluated; wide enough logits that argmax has no near ties."""
    model_class, args_class = load._model_classes(config)
    mx.random.seed(seed)
    model: nn.Module = model_class(args_class.from_dict(config))
    grown = [
        (name, array * 4 if "embed" in name or "lm_head" in name else array)
        for name, array in tree_flatten(model.parameters())
    ]
    model.load_weights(grown)
    mx.eval(model.parameters())
    return model
