"""A tiny config for every model type of mlx-lm: sizes that differ wherever two could be mixed up.

`SIZES` holds a value for each field that any model file asks for; a type gets those that its
`ModelArgs` has, so that a config never says more than a real one would. `SPECIAL` replaces what a
type needs otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

from mlxlite.engine import load

S, F = "sliding_attention", "full_attention"
WINDOW = 8

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "model_dim", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 4),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "loop_window_size"), WINDOW),
    **dict.fromkeys(("intermediate_size", "n_inner", "block_ff_dim", "ff_intermediate_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), 1024),
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("layer_norm_epsilon", "post_norm_eps"), 1e-5),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k"), 2),
    "num_experts_per_token": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_hidden_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("logits_scaling", "attention_multiplier", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("residual_multiplier", "routed_scaling_factor", "scale_depth"), 1.0),
    **dict.fromkeys(("scale_emb", "logits_soft_cap", "final_logit_softcapping"), 1.0),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias"), False),
    **dict.fromkeys(("conv_bias", "use_qkv_bias", "linear_allow_neg_eigval"), False),
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm", "use_conv_bias", "qk_norm"), True),
    **dict.fromkeys(("use_expert_bias", "mamba_conv_bias", "mamba_enabled", "post_norm"), True),
    **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 4),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "moe_layer_freq"), 1),
    **dict.fromkeys(("decoder_sparse_step", "num_dense_layers", "attn_layer_offset"), 1),
    **dict.fromkeys(("expert_layer_offset", "block_ffn_dim_multiplier"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "mamba_step"), 2),
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval"), 2),
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size", "block_dim"), 32),
    **dict.fromkeys(("dim_model_base", "mamba_d_ssm"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_state", "mamba_chunk_size"), 8),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("short_conv_kernel_size", "conv1d_width", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("decay_low_rank_dim", "rotary_dim", "block_multiple_of"), 4),
    **dict.fromkeys(("layer_group_size", "group_norm_size", "mamba_n_groups"), 2),
    **dict.fromkeys(("n_groups", "mamba_expand", "n_shared_head", "index_n_heads"), 2),
    **dict.fromkeys(("num_attention_groups", "dense_attention_every_n_layers"), 2),
    **dict.fromkeys(("num_kv_reuse_layers", "zero_expert_num", "conv_window"), 2),
    "vocab_size": 64,
    "head_dim": 16,  # not hidden_size / heads
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rotary_emb_base": 10000,
    "model_max_length": 1024,
    "mlp_only_layers": [],
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "index_topk": 4,
    "layer_types": [S, F, S, F],
    "num_kv_shared_layers": 0,
    "state_size": 5,
    "ssm_state_size": 5,
    "time_step_limit": [0.0, 10.0],
    "mamba_proj_bias": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
    | {"kda_layers": [1, 3], "full_attn_layers": [2, 4]},
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
    "block_types": ["recurrent", "attention"],
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "gegelu_limit": 1.0,
    "kv_channels": 8,
    "hidden_size_per_layer_input": 16,
}

_ROPE = {"rope_theta": 10000.0, "rope_type": "default", "type": "default"}
_LLAMA4_ROPE = {**_ROPE, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}
_NAS_BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
]

SPECIAL: dict[str, dict[str, Any]] = {
    "baichuan_m1": {"sliding_window_layers": [0, 2]}
    | {"num_swa_attention_heads": 2, "num_swa_key_value_heads": 1},
    "cohere2": {"hidden_size": 64},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000},
    },
    "deepseek_v2": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    },
    "exaone": {"head_dim": None},
    "exaone4": {"sliding_window_pattern": "LLGL"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", F, S, "conv_mixer"]},
    "gemma3n": {
        "vocab_size_per_layer_input": 64,
        "rope_local_base_freq": 1.0,
        "activation_sparsity_pattern": [0.5] * 4,
        "altup_num_inputs": 4,
        "altup_coef_clip": 1.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "num_kv_shared_layers": 2,
    },
    "gemma4": {"global_head_dim": 24, "num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 24, "num_global_key_value_heads": 1}
    | {"attention_k_eq_v": True},
    "glm_moe_dsa": {"rope_parameters": _ROPE},
    "gpt_oss": {"layer_types": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan": {"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2}
    | {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "lille-130m": {"n_embd": 512},
    "llama4": {"num_experts_per_tok": 1, "attention_chunk_size": 256}
    | {"interleave_moe_layer_step": 2},
    "llama4_text": {"no_rope_layers": [0, 0, 1, 1]},
    "longcat_flash_ngram": {"hidden_size": 132, "ngram_vocab_size_ratio": 2, "emb_split_num": 1},
    "mellum": {"rope_parameters": {S: _ROPE, F: _ROPE}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 12,
        "swa_v_head_dim": 8,
        "moe_layer_freq": [0, 1, 1, 1],
    },
    "minicpm3": {
        "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 256}
        | {"short_factor": [1.0] * 2, "long_factor": [1.0] * 2}
    },
    "minimax_m3_vl": {
        "layer_types": None,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 8,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 0, 1],
        },
    },
    "ministral3": {"rope_parameters": _LLAMA4_ROPE},
    "mistral4": {"rope_parameters": _LLAMA4_ROPE},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": _NAS_BLOCKS * 2},
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": "M*-M"},
    "olmo3": {"layer_types": None},
    "olmo_hybrid": {"layer_types": None},
    "openelm": {
        "num_transformer_layers": 4,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [1, 2, 2, 4],
        "ffn_multipliers": [1.0] * 4,
    },
    "spark2_5": {"layer_types": None, "rope_parameters": {S: _ROPE, F: _ROPE}},
    "step3p5": {"attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1}},
}

# Types that keep a text model's config inside their own -> (file, class) of its arguments.
_INNER: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("llama", "ModelArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}

# What cannot run on a CPU, or asks for files or packages that are not here.
UNRUNNABLE = frozenset({"bitnet", "muse_spark", "olmo", "prism_hadamard_qwen35"})
_NO_MODELS = frozenset(
    "__init__ activations base bitlinear_layers cache gated_delta mla pipeline rope_utils ssm "
    "switch_layers".split()
)


def model_files() -> list[str]:
    """The model types that the installed mlx-lm defines."""
    load.bare_package()
    package = importlib.import_module("mlx_lm.models")
    names = sorted(path.stem for path in Path(list(package.__path__)[0]).glob("*.py"))
    return [name for name in names if name not in _NO_MODELS]


def config_of(kind: str) -> dict[str, Any]:
    """A tiny config of a model type."""
    sizes = {**SIZES, **SPECIAL.get(kind, {})}
    file, name = _INNER.get(kind, (kind, "ModelArgs"))
    arguments = getattr(importlib.import_module(f"mlx_lm.models.{file}"), name)
    known = {key: value for key, value in sizes.items() if key in argument_names(arguments)}
    known["model_type"] = file
    if kind not in _INNER:
        return known
    return {"model_type": kind, "vocab_size": 64, "text_config": known}


def argument_names(arguments: Any) -> set[str]:
    if dataclasses.is_dataclass(arguments):
        return {field.name for field in dataclasses.fields(arguments)}
    return set(inspect.signature(arguments).parameters)
