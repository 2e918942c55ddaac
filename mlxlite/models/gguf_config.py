"""What a GGUF file's metadata means in the vocabulary of Hugging Face and mlx-lm.

`plan_snapshot` turns a checked file into the `config.json` of the model and a list of `Target`s:
which tensor goes where, with its rows reordered or shifted. It reads metadata and the tensor table,
no weights (but the few numbers of `rope_freqs.weight`), and imports no numpy.

Sources: the GGUF specification for keys, llama.cpp's `convert_hf_to_gguf.py` for what conversion
does to names, rows and norms (each is undone here), mlx-lm's model files for the expected names.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from mlxlite.errors import ModelError
from mlxlite.models.gguf_file import GgufFile


@dataclass(frozen=True, slots=True)
class Target:
    """Where one GGUF tensor goes.

    n_heads: when not 0, rows are in llama.cpp's rotary order for that many heads. shift: added to
    every value.
    """

    source: str
    module: str  # "model.layers.0.self_attn.q_proj"
    parameter: str  # "weight" or "bias"
    n_heads: int = 0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """One supported `general.architecture`."""

    model_type: str
    hf_class: str
    norms: tuple[tuple[str, str], ...]  # GGUF name -> mlx-lm name, of norms as wide as the model
    has_head_norms: bool = False
    has_biases: tuple[str, ...] = ()  # projections that always carry a bias
    # llama.cpp rotates neighbouring pairs for this family, Hugging Face the two halves of a head;
    # the converter permutes the rows of q and k from one to the other.
    is_permuted: bool = False
    # The converter stores 1 + w for norms; mlx-lm's gemma adds the 1 itself.
    norm_shift: float = 0.0


_PRE_NORMS = (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", _PRE_NORMS, is_permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _PRE_NORMS, has_biases=("q", "k", "v")),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _PRE_NORMS, has_head_norms=True),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            ("attn_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ),
        has_head_norms=True,
        norm_shift=-1.0,
    ),
}

# Kinds of blocks that an import can read (`gguf_blocks`, which needs numpy to say so itself).
DENSE = ("F32", "F16", "BF16")
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

# llama.cpp's defaults where a key may be absent (llama-model.cpp, `load_hparams`).
DEFAULT_ROPE_BASE = 10000.0
GEMMA3_LOCAL_ROPE_BASE = 10000.0
GEMMA3_SLIDING_PATTERN = 6
GEMMA3_27B_LAYERS = 62  # the size whose attention scale is not its head size
# Texts that end a turn, beside the ids that the metadata names (llama.cpp, `special_eog_ids`).
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
CONTROL = 3  # token type


def plan_snapshot(file: GgufFile) -> tuple[dict[str, Any], list[Target]]:
    """The config.json (without `quantization`) and every tensor's place; ModelError when the file
    is of another architecture, incomplete, or has tensors or blocks that nothing here knows."""
    return _Plan(file).build()


class _Plan:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.metadata = file.metadata
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            self.fail(
                f"architecture {architecture!r} is not supported (supported: {', '.join(FAMILIES)})"
            )
        self.architecture = architecture
        self.family = FAMILIES[self.architecture]

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.file.path}: {reason}")

    # --- metadata ---

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """`<architecture>.<key>`, checked; None as default means that it must be there."""
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # per-layer lists are fine while all layers agree
        if value is None:
            if default is None:
                self.fail(f"the metadata lacks {key!r}")
            return default
        if isinstance(value, list):
            self.fail(f"{key!r} differs between layers, which is not supported")
        allowed = (int, float) if kind is float else (int,)
        if type(value) not in allowed or not 0 < value < 1 << 31:
            self.fail(f"{key!r} is {value!r}, not a positive {kind.__name__}")
        return kind(value)

    def token_id(self, role: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return value if type(value) is int and 0 <= value < self.vocab_size else None

    # --- the plan ---

    def build(self) -> tuple[dict[str, Any], list[Target]]:
        if self.metadata.get("split.count", 0) not in (0, 1):
            self.fail(
                "is one part of a split model; join the parts with `llama-gguf-split --merge`"
            )
        if self.metadata.get(f"{self.architecture}.expert_count", 0):
            self.fail("mixtures of experts are not supported (supported: dense models)")
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            self.fail("lacks the tensor 'token_embd.weight'")
        self.vocab_size, self.width = embedding.shape
        if self.get("embedding_length", int) != self.width:
            self.fail(f"'token_embd.weight' has width {self.width}, not the metadata's")
        self.n_layers: int = self.get("block_count", int)
        if self.n_layers > len(self.file.tensors):  # before a loop over a nonsense number
            self.fail(f"has {len(self.file.tensors)} tensors for {self.n_layers} layers")
        self.n_heads: int = self.get("attention.head_count", int)
        self.n_kv_heads: int = self.get("attention.head_count_kv", int, self.n_heads)
        self.head_size: int = self.get("attention.key_length", int, self.width // self.n_heads)
        if self.get("attention.value_length", int, self.head_size) != self.head_size:
            self.fail("heads whose keys and values differ in size are not supported")
        if self.get("rope.dimension_count", int, self.head_size) != self.head_size:
            self.fail("rotary embedding of a part of each head is not supported")
        if self.n_heads % self.n_kv_heads or self.head_size % 2:
            self.fail(f"bad heads: {self.n_heads}, {self.n_kv_heads} of size {self.head_size}")
        targets = self.targets()
        self.check_blocks()
        return self.config(), targets

    def check_blocks(self) -> None:
        for name, entry in self.file.tensors.items():
            if (kind := entry.block_type.name) not in (*DENSE, *PACKED):
                self.fail(
                    f"tensor {name!r} is stored as {kind}, which is not supported "
                    f"(supported: {', '.join((*DENSE, *PACKED))})"
                )

    def targets(self) -> list[Target]:
        family, width = self.family, self.width
        n_inner: int = self.get("feed_forward_length", int)
        q_rows, kv_rows = self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        projections = (  # GGUF name, letter, mlx-lm name, shape, heads whose rows are permuted
            ("attn_q", "q", "self_attn.q_proj", (q_rows, width), self.n_heads),
            ("attn_k", "k", "self_attn.k_proj", (kv_rows, width), self.n_kv_heads),
            ("attn_v", "v", "self_attn.v_proj", (kv_rows, width), 0),
            ("attn_output", "o", "self_attn.o_proj", (width, q_rows), 0),
            ("ffn_gate", "gate", "mlp.gate_proj", (n_inner, width), 0),
            ("ffn_up", "up", "mlp.up_proj", (n_inner, width), 0),
            ("ffn_down", "down", "mlp.down_proj", (width, n_inner), 0),
        )
        # For llama, mlx-lm's `attention_bias` and `mlp_bias` mean four and three biases at once.
        self.has_attention_bias = self.has_mlp_bias = False
        biased = family.has_biases
        if self.architecture == "llama":
            self.has_attention_bias = "blk.0.attn_q.bias" in self.file.tensors
            self.has_mlp_bias = "blk.0.ffn_gate.bias" in self.file.tensors
            biased += ("q", "k", "v", "o") if self.has_attention_bias else ()
            biased += ("gate", "up", "down") if self.has_mlp_bias else ()

        wanted: list[tuple[Target, tuple[int, ...]]] = []

        def want(source: str, module: str, shape: tuple[int, ...], n_heads: int = 0) -> None:
            name, _, parameter = source.rpartition(".")
            shift = family.norm_shift if name.endswith("_norm") else 0.0
            permuted = n_heads if family.is_permuted else 0
            wanted.append((Target(source, module, parameter, permuted, shift), shape))

        want("token_embd.weight", "model.embed_tokens", (self.vocab_size, width))
        for layer in range(self.n_layers):
            there, here = f"blk.{layer}", f"model.layers.{layer}"
            for source, module in family.norms:
                want(f"{there}.{source}.weight", f"{here}.{module}", (width,))
            if family.has_head_norms:
                for letter in ("q", "k"):
                    module = f"{here}.self_attn.{letter}_norm"
                    want(f"{there}.attn_{letter}_norm.weight", module, (self.head_size,))
            for source, letter, module, shape, n_heads in projections:
                want(f"{there}.{source}.weight", f"{here}.{module}", shape, n_heads)
                if letter in biased:
                    want(f"{there}.{source}.bias", f"{here}.{module}", shape[:1], n_heads)
        want("output_norm.weight", "model.norm", (width,))
        if "output.weight" in self.file.tensors:
            want("output.weight", "lm_head", (self.vocab_size, width))

        self.check_tensors(wanted)
        return [target for target, _ in wanted]

    def check_tensors(self, wanted: list[tuple[Target, tuple[int, ...]]]) -> None:
        for target, shape in wanted:
            entry = self.file.tensors.get(target.source)
            if entry is None:
                self.fail(f"lacks the tensor {target.source!r}")
            if entry.shape != shape:
                self.fail(
                    f"tensor {target.source!r} has shape {entry.shape}, the metadata says {shape}"
                )
        known = {target.source for target, _ in wanted} | {"rope_freqs.weight"}
        for name in self.file.tensors:
            if name not in known:
                self.fail(
                    f"has the tensor {name!r}, which a plain {self.architecture} model has not; "
                    f"this variant is not supported"
                )

    def config(self) -> dict[str, Any]:
        context_length = self.get("context_length", int)
        config: dict[str, Any] = {
            "architectures": [self.family.hf_class],
            "model_type": self.family.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.get("feed_forward_length", int),
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_size,
            "rms_norm_eps": _shortest(self.get("attention.layer_norm_rms_epsilon", float)),
            "max_position_embeddings": context_length,
            "rope_theta": _shortest(self.get("rope.freq_base", float, DEFAULT_ROPE_BASE)),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
        }
        if (scaling := self.rope_scaling(config["rope_theta"])) is not None:
            config["rope_scaling"] = scaling
        if self.architecture == "llama":
            config |= {"attention_bias": self.has_attention_bias, "mlp_bias": self.has_mlp_bias}
        if self.architecture == "gemma3":
            config |= self.gemma3_config()
        if (bos := self.token_id("bos")) is not None:
            config["bos_token_id"] = bos
        if eos := self.eos_ids():
            config["eos_token_id"] = eos[0] if len(eos) == 1 else eos
        if (pad := self.token_id("padding")) is not None:
            config["pad_token_id"] = pad
        return config

    def gemma3_config(self) -> dict[str, Any]:
        is_27b = self.n_layers == GEMMA3_27B_LAYERS
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self.get("attention.sliding_window", int),
            "sliding_window_pattern": self.get(
                "attention.sliding_window_pattern", int, GEMMA3_SLIDING_PATTERN
            ),
            "rope_local_base_freq": _shortest(
                self.get("rope.freq_base_swa", float, GEMMA3_LOCAL_ROPE_BASE)
            ),
            "query_pre_attn_scalar": self.width // self.n_heads if is_27b else self.head_size,
        }

    def eos_ids(self) -> list[int]:
        """Every id that ends generation, the metadata's `eos` first."""
        ids = [self.token_id(role) for role in ("eos", "eot", "eom")]
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        types = self.metadata.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(types, list):
            pairs = enumerate(zip(tokens, types, strict=False))
            ids += [i for i, (token, kind) in pairs if kind == CONTROL and token in TURN_ENDS]
        return list(dict.fromkeys(i for i in ids if i is not None))

    # --- rotary embedding ---

    def rope_scaling(self, base: float) -> dict[str, Any] | None:
        entry = self.file.tensors.get("rope_freqs.weight")
        if entry is not None:
            if entry.block_type.name != "F32" or entry.shape != (self.head_size // 2,):
                self.fail(f"'rope_freqs.weight' is {entry.block_type.name} of shape {entry.shape}")
            raw = self.file.tensor_bytes(entry)
            factors = list(struct.unpack(f"<{self.head_size // 2}f", raw))
            return self.llama3_scaling(base, factors)
        prefix = f"{self.architecture}.rope.scaling."
        kind = self.metadata.get(prefix + "type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.get("rope.scaling.factor", float)}
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": self.get("rope.scaling.factor", float),
                "original_max_position_embeddings": self.get(
                    "rope.scaling.original_context_length", int
                ),
            }
        self.fail(f"rope scaling {kind!r} is not supported (supported: none, linear, yarn, llama3)")

    def llama3_scaling(self, base: float, factors: list[float]) -> dict[str, Any] | None:
        """The `llama3` settings whose divisors equal `factors`; GGUF keeps only the divisors.

        The lowest frequencies are divided by exactly `factor`, so it is the largest entry. The rest
        is the same in every released Llama 3 but the original context, which is tried.
        """
        if all(abs(factor - 1) < 1e-4 for factor in factors):
            return None
        for original in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
            scaling = {
                "rope_type": "llama3",
                "factor": round(max(factors), 4),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
            expected = llama3_divisors(base, self.head_size, scaling)
            if all(
                math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)
            ):
                return scaling
        self.fail("the frequencies in 'rope_freqs.weight' match no known Llama 3 rope scaling")


def llama3_divisors(base: float, head_size: int, scaling: dict[str, Any]) -> list[float]:
    """What Llama 3.1 divides each rotary frequency by (transformers, `_compute_llama3_parameters`;
    the converter's `rope_freqs` holds the same numbers)."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for i in range(0, head_size, 2):
        wavelength = 2 * math.pi * base ** (i / head_size)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _shortest(value: float) -> float:
    """A float32 of the metadata as the shortest decimal that means it: 1e-05, not 9.99e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
