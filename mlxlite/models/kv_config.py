"""Sizes in a model's config: other names for them, and what published configs leave out.

The tables follow mlx-lm 0.32.2; `tests/test_fit_layout.py` compares the defaults with the
dataclasses of its model files, and `SAME_AS` with the loader's own table.
"""

from __future__ import annotations

from typing import Any

from mlxlite.errors import ModelError

_MOST = 1 << 24  # of any count or width in a config; more is damage, and would make sums slow
MOST_LAYERS = 10_000

# Other names of the same quantity, most common first.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers"),
    "hidden": ("hidden_size", "d_model", "n_embd", "model_dim", "hidden_dim"),
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "window": ("sliding_window", "window_size"),
}

# Types that mlx-lm runs with the text model of another one.
SAME_AS: dict[str, str] = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "xverse": "llama",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v32",
    "deepseek_v41_text": "deepseek_v41",
    "gemma4_unified": "gemma4",
    "lfm2-vl": "lfm2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "prism_hadamard_qwen35": "qwen3_next",
    "minimax_m2": "minimax",
}

_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_GEMMA3 = {
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
_GEMMA4 = {
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
}

# Defaults that published configs rely on.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {**_GEMMA3, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma3_text": {**_GEMMA3, "num_attention_heads": 4, "num_key_value_heads": 1},
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "cohere2": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "plamo3": {
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "window_size": 2048,
        "sliding_window_pattern": 8,
    },
    "gpt_oss": {
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "afmoe": {"head_dim": 64, "num_key_value_heads": 4, "sliding_window": 2048},
    "laguna": {"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 512},
    "muse_glimmer": {
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "sliding_window": 2048,
    },
    "step3p5": {"sliding_window": 512},
    "gear": {"sliding_window": 512, "conv_L_cache": 3},
    "iquestloopcoder": {"loop_window_size": 64},
    "qwen": {"num_attention_heads": 16, "num_hidden_layers": 24, "kv_channels": 128},
    "gpt_bigcode": {"multi_query": True},
    "plamo": {"n_shared_head": 8},
    "minimax_m3_vl": {
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "deepseek_v2": {
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "youtu_llm": {
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "deepseek_v3": {**_MLA, "num_hidden_layers": 30},
    "glm4_moe_lite": _MLA,
    "deepseek_v32": {**_MLA, "num_hidden_layers": 30, "index_head_dim": 128},
    "deepseek_v41": {"num_hidden_layers": 40, "head_dim": 512, "index_head_dim": 128},
    "bailing_moe_v3": {
        **_MLA,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 128,
        "layer_group_size": 4,
        "short_conv_kernel_size": 4,
    },
    "falcon_h1": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
    },
    "plamo2": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_size_per_head": 128,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_num_heads": 64,
        "mamba_step": 2,
        "mamba_enabled": True,
    },
    "qwen3_next": {"full_attention_interval": 4},
    "longcat_flash_ngram": {"emb_neighbor_num": 4},
    "cohere": {"num_key_value_heads": 64},
    "deepseek": {"num_key_value_heads": 32},
    "mixtral": {"num_key_value_heads": 8},
    "nanochat": {"num_key_value_heads": 10},
    "phi": {"num_key_value_heads": 32},
    "phimoe": {"num_key_value_heads": 8},
    "talkie": {"head_dim": 128},
}

# Types whose attention divides the width by the heads, whatever `head_dim` says.
DIVIDES = frozenset(
    "Klear apertus bailing_moe cohere deepseek granite granitemoe granitemoehybrid helium hunyuan "
    "internlm2 internlm3 mimo minicpm mixtral nanochat phi phi3 phi3small phimoe qwen2 qwen2_moe "
    "stablelm starcoder2 jamba lfm2 lfm2_moe baichuan_m1 recurrent_gemma dbrx gpt2 gpt_bigcode "
    "gpt_neox gptj lille-130m nemotron-nas phixtral plamo afm7 olmo minicpm3".split()
)
# Types that keep keys and values of every query head, whatever the config says of fewer.
ALL_HEADS = frozenset("gpt2 gpt_neox gptj phixtral olmo talkie".split())


class Sizes:
    """Checked reading of a config's sizes. name: the type whose defaults apply."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        text = config.get("text_config")
        own = {**config, **text} if isinstance(text, dict) else config
        known = {key: value for key, value in own.items() if value is not None}
        self.name = name
        self._values = {**DEFAULTS.get(name, {}), **known}
        self.layers = self.count("layers") if "block_configs" not in known else 0
        if self.layers > MOST_LAYERS:
            raise ModelError(f"config.json: {self.layers} layers are more than {MOST_LAYERS}")

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A size by its name or one of its other names. ModelError names the key."""
        names = NAMES.get(key, (key,))
        for name in names:
            if name in self._values:
                return whole(name, self._values[name])
        if default is None:
            raise ModelError(f"config.json: lacks {names[0]!r}")
        return default

    def per_layer(self, key: str) -> list[Any]:
        """A list with an entry for each layer; empty if the config has none."""
        found = self.get(key)
        if found is None:
            return []
        if not isinstance(found, list | str) or len(found) < self.layers:
            raise ModelError(f"config.json: {key!r} must have an entry for each layer")
        return list(found[: self.layers])

    def inner(self, key: str) -> Sizes:
        """The object under a key, read in the same way."""
        found = self.get(key)
        if not isinstance(found, dict):
            raise ModelError(f"config.json: lacks the object {key!r}")
        return Sizes({"num_hidden_layers": self.layers, **found}, "")

    @property
    def heads(self) -> int:
        return self.count("heads")

    @property
    def kv_heads(self) -> int:
        return self.heads if self.name in ALL_HEADS else self.count("kv_heads", self.heads)

    @property
    def head_dim(self) -> int:
        if self.name not in DIVIDES and self.get("head_dim") is not None:
            return self.count("head_dim")
        return self.count("hidden") // max(self.heads, 1)

    @property
    def kv_width(self) -> int:
        """Values that a layer of plain attention keeps of a token."""
        return 2 * self.kv_heads * self.head_dim


def whole(key: str, value: Any) -> int:
    """A count or width of a config. ModelError names the key."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ModelError(f"config.json: {key!r} must be a whole number up to {_MOST}")
    return value
