"""A model's config -> the plan of its caches, without MLX (decision D18, spec 60 section 4).

What a layer keeps is decided by mlx-lm's model files, so the rules here follow those of mlx-lm
0.32.2, one small function a family; `tests/test_fit_layout.py` compares them with the real caches.
A type without a rule counts as full attention in every layer, which no known cache exceeds.
Recurrent states count as float32 where that depends on how a checkpoint keeps its decay rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxlite.errors import ModelError
from mlxlite.kvplan import Const, Full, KVPlan, Layer, Window
from mlxlite.models.kv_config import MOST_LAYERS, SAME_AS, Sizes, whole

_STATE_BYTES = 4  # float32
_SLIDING = "sliding_attention"


_Rule = Callable[[Sizes, int], list[Layer]]
_RULES: dict[str, _Rule] = {}


def resolve(config: dict[str, Any]) -> str:
    """The model type whose rule a config follows."""
    given = str(config.get("model_type"))
    text = config.get("text_config")
    if given in ("mistral3", "llava"):  # full attention in every layer, whatever its text model
        is_latent = isinstance(text, dict) and text.get("model_type") == "mistral4"
        given = "mistral4" if is_latent else "mistral3"
    if given == "bailing_hybrid":
        architectures = config.get("architectures") or []
        given = "bailing_moe_v3" if "BailingMoeV3ForCausalLM" in architectures else given
    return SAME_AS.get(given, given)


def kv_plan(config: dict[str, Any], item_bytes: int) -> KVPlan:
    """The plan of a model's caches.

    config: the content of `config.json`. item_bytes: of the activations' dtype. Raises ModelError
    that names the key of a size that is missing or makes no sense.
    """
    name = resolve(config)
    return KVPlan(tuple(_RULES.get(name, _plain)(Sizes(config, name), item_bytes)))


def _rule(names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


# ------------------------------------------------------------------------- attention only


def _plain(c: Sizes, item: int) -> list[Layer]:
    return [(Full(c.kv_width * item),)] * c.layers


def _sliding(c: Sizes, item: int, slides: Sequence[bool]) -> list[Layer]:
    """Full and sliding layers of one width."""
    full: Layer = (Full(c.kv_width * item),)
    window: Layer = (Window(c.count("window"), c.kv_width * item),) if any(slides) else full
    return [window if is_sliding else full for is_sliding in slides]


@_rule("llama ministral3 afmoe exaone_moe laguna muse_spark")
def _llama(c: Sizes, item: int) -> list[Layer]:
    types = c.per_layer("layer_types") or ["full_attention"] * c.layers
    return _sliding(c, item, [kind == _SLIDING for kind in types])


@_rule("gpt_oss olmo3 mellum muse_glimmer spark2_5")
def _alternating(c: Sizes, item: int) -> list[Layer]:
    every = 2 if c.name == "gpt_oss" else 4
    if types := c.per_layer("layer_types"):
        return _sliding(c, item, [kind != "full_attention" for kind in types])
    return _sliding(c, item, [(i + 1) % every != 0 for i in range(c.layers)])


@_rule("cohere2 gemma3_text gemma3 plamo3")
def _patterned(c: Sizes, item: int) -> list[Layer]:
    every = max(c.count("sliding_window_pattern"), 1)
    return _sliding(c, item, [(i + 1) % every != 0 for i in range(c.layers)])


@_rule("exaone4")
def _exaone4(c: Sizes, item: int) -> list[Layer]:
    pattern = str(c.get("sliding_window_pattern") or "G")
    return _sliding(c, item, [pattern[i % len(pattern)] == "L" for i in range(c.layers)])


@_rule("gemma3n")
def _gemma3n(c: Sizes, item: int) -> list[Layer]:
    """The last layers use the keys and values of earlier ones."""
    own = max(c.layers - c.count("num_kv_shared_layers", 0), 0)
    return _sliding(c, item, [kind == _SLIDING for kind in c.per_layer("layer_types")[:own]])


@_rule("gemma4_text gemma4")
def _gemma4(c: Sizes, item: int) -> list[Layer]:
    """As gemma3n; full layers may have heads of their own number and size."""
    every = max(c.count("sliding_window_pattern"), 1)
    types = c.per_layer("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else _SLIDING for i in range(c.layers)
    ]
    heads = c.kv_heads
    if c.get("attention_k_eq_v"):
        heads = c.count("num_global_key_value_heads", heads)
    full: Layer = (Full(2 * heads * (c.count("global_head_dim") or c.head_dim) * item),)
    window: Layer = (Window(c.count("window"), c.kv_width * item),)
    own = max(c.layers - c.count("num_kv_shared_layers"), 0)
    return [full if kind == "full_attention" else window for kind in types[:own]]


@_rule("step3p5")
def _step3p5(c: Sizes, item: int) -> list[Layer]:
    types = c.per_layer("layer_types")
    slides = [kind == _SLIDING for kind in types] or [i % 2 == 0 for i in range(c.layers)]
    groups = c.count("num_attention_groups")
    other = groups
    if c.get("attention_other_setting"):
        other = c.inner("attention_other_setting").count("num_attention_groups")
    full: Layer = (Full(2 * groups * c.head_dim * item),)
    window: Layer = (Window(c.count("window"), 2 * other * c.head_dim * item),)
    return [window if is_sliding else full for is_sliding in slides]


@_rule("mimo_v2_flash")
def _mimo_v2_flash(c: Sizes, item: int) -> list[Layer]:
    """Keys and values differ in size, full and sliding layers too."""
    width = c.kv_heads * (c.count("head_dim") + c.count("v_head_dim"))
    near = c.count("swa_num_key_value_heads") * (
        c.count("swa_head_dim") + c.count("swa_v_head_dim")
    )
    full: Layer = (Full(width * item),)
    window: Layer = (Window(c.count("sliding_window_size"), near * item),)
    return [window if kind == 1 else full for kind in c.per_layer("hybrid_layer_pattern")]


@_rule("llama4")
def _llama4(c: Sizes, item: int) -> list[Layer]:
    """Chunked layers are cut back to a chunk before each forward, then grow by a slab."""
    width = c.kv_width * item
    chunked: Layer = (Window(c.count("attention_chunk_size") + 256, width),)
    return [(Full(width),) if (i + 1) % 4 == 0 else chunked for i in range(c.layers)]


@_rule("iquestloopcoder")
def _iquestloopcoder(c: Sizes, item: int) -> list[Layer]:
    """The stack runs twice, the second time with a window."""
    window: Layer = (Window(c.count("loop_window_size"), c.kv_width * item),)
    return [*_plain(c, item), *[window] * c.layers]


@_rule("nanbeige")
def _nanbeige(c: Sizes, item: int) -> list[Layer]:
    """The stack runs several times, each with caches of its own."""
    weights = c.get("loop_loss_weights")
    loops = len(weights) + 1 if isinstance(weights, list) and weights else c.count("num_loops", 1)
    return _plain(c, item) * min(loops, MOST_LAYERS // max(c.layers, 1))


@_rule("afm7")
def _afm7(c: Sizes, item: int) -> list[Layer]:
    return _plain(c, item)[: max(c.layers - c.count("num_kv_reuse_layers", 0), 0)]


@_rule("dbrx")
def _dbrx(c: Sizes, item: int) -> list[Layer]:
    width = 2 * c.inner("attn_config").count("kv_n_heads") * c.head_dim
    return [(Full(width * item),)] * c.layers


@_rule("qwen")
def _qwen(c: Sizes, item: int) -> list[Layer]:
    return [(Full(2 * c.heads * c.count("kv_channels") * item),)] * c.layers


@_rule("gpt_bigcode")
def _gpt_bigcode(c: Sizes, item: int) -> list[Layer]:
    heads = 1 if c.get("multi_query") else c.heads
    return [(Full(2 * heads * c.head_dim * item),)] * c.layers


@_rule("plamo")
def _plamo(c: Sizes, item: int) -> list[Layer]:
    heads = -(-c.heads // max(c.count("n_shared_head"), 1))
    return [(Full(2 * heads * c.head_dim * item),)] * c.layers


@_rule("openelm")
def _openelm(c: Sizes, item: int) -> list[Layer]:
    heads = [whole("num_kv_heads", entry) for entry in c.per_layer("num_kv_heads")]
    return [(Full(2 * count * c.head_dim * item),) for count in heads]


@_rule("nemotron-nas")
def _nemotron_nas(c: Sizes, item: int) -> list[Layer]:
    """Each block has a number of heads of its own, or no attention."""
    layers: list[Layer] = []
    for block in c.get("block_configs") or []:
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise ModelError("config.json: 'block_configs' must hold objects with 'attention'")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        group = max(whole("n_heads_in_group", attention.get("n_heads_in_group")), 1)
        layers.append((Full(2 * (c.heads // group) * c.head_dim * item),))
    return layers


# ----------------------------------------------------------------------- latent attention


def _latent(c: Sizes, item: int) -> Full:
    """One latent and one rotary key of each token, whatever the number of heads."""
    return Full((c.count("kv_lora_rank") + c.count("qk_rope_head_dim", 0)) * item)


@_rule("deepseek_v3 glm4_moe_lite mistral4")
def _mla(c: Sizes, item: int) -> list[Layer]:
    return [(_latent(c, item),)] * c.layers


@_rule("deepseek_v32")
def _indexed(c: Sizes, item: int) -> list[Layer]:
    """Beside the latent, the keys of the indexer; its cache holds as many unused values."""
    return [(_latent(c, item), Full(2 * c.count("index_head_dim") * item))] * c.layers


@_rule("longcat_flash")
def _longcat_flash(c: Sizes, item: int) -> list[Layer]:
    return [(_latent(c, item), _latent(c, item))] * c.layers


@_rule("longcat_flash_ngram")
def _longcat_flash_ngram(c: Sizes, item: int) -> list[Layer]:
    """First the newest ids themselves, int64, for the embedding of n-grams."""
    ids = Window(max(c.count("emb_neighbor_num") - 1, 0), 8)
    return [(ids,), *_longcat_flash(c, item)]


@_rule("deepseek_v2 youtu_llm minicpm3")
def _expanded(c: Sizes, item: int) -> list[Layer]:
    """Latent attention whose cache holds what the latent expands to, for every head."""
    value = c.head_dim if c.name == "minicpm3" else c.count("v_head_dim")
    key = c.count("qk_nope_head_dim") + c.count("qk_rope_head_dim")
    return [(Full(c.heads * (key + value) * item),)] * c.layers


@_rule("deepseek_v41")
def _deepseek_v41(c: Sizes, item: int) -> list[Layer]:
    """A window and compressed groups; counted as if nothing were compressed."""
    width = c.count("head_dim") + c.count("index_head_dim")
    return [(Full(width * max(item, _STATE_BYTES)),)] * c.layers


@_rule("minimax_m3_vl")
def _minimax_m3(c: Sizes, item: int) -> list[Layer]:
    """Sparse layers keep an index key of each token."""
    sparse = c.inner("sparse_attention_config") if c.get("sparse_attention_config") else c
    has_index = any(
        s.get(k) for s in (sparse, c) for k in ("sparse_block_size", "index_block_size")
    )
    freq = sparse.per_layer("sparse_attention_freq") or c.per_layer("sparse_attention_freq")
    types = c.per_layer("layer_types")
    full = Full(c.kv_width * item)
    layers: list[Layer] = []
    for i in range(c.layers):
        is_sparse = types[i] != "full_attention" if types else bool(freq[i]) if freq else True
        if has_index and is_sparse:
            index = sparse.count("sparse_index_dim", c.count("index_head_dim", 0))
            layers.append((full, Full(index * item)))
        else:
            layers.append((full,))
    return layers


# ----------------------------------------------------------- recurrent and hybrid models


def _linear(conv_width: int, conv_kernel: int, state_values: int, item: int) -> Const:
    """The last inputs of a convolution and the state of a recurrence."""
    return Const(max(conv_kernel - 1, 0) * conv_width * item + state_values * _STATE_BYTES)


@_rule("mamba")
def _mamba(c: Sizes, item: int) -> list[Layer]:
    width = c.count("intermediate_size" if c.get("intermediate_size") else "d_inner")
    state = c.count("state_size" if c.get("state_size") else "d_state")
    kernel = c.count("conv_kernel" if c.get("conv_kernel") else "d_conv")
    return [(_linear(width, kernel, width * state, item),)] * c.layers


def _mamba2_state(c: Sizes, keys: str, item: int) -> Const:
    """keys: where a config has the heads, their size, groups, states and the convolution."""
    heads, head_dim, groups, state, kernel = (c.count(key) for key in keys.split())
    width = heads * head_dim
    return _linear(width + 2 * groups * state, kernel, width * state, item)


_IN_HYBRID = "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv"


@_rule("mamba2")
def _mamba2(c: Sizes, item: int) -> list[Layer]:
    state = "ssm_state_size" if c.get("ssm_state_size") else "state_size"
    keys = f"num_heads head_dim n_groups {state} conv_kernel"
    return [(_mamba2_state(c, keys, item),)] * c.layers


@_rule("falcon_h1")
def _falcon_h1(c: Sizes, item: int) -> list[Layer]:
    return [(_mamba2_state(c, _IN_HYBRID, item), Full(c.kv_width * item))] * c.layers


@_rule("granitemoehybrid")
def _granite_hybrid(c: Sizes, item: int) -> list[Layer]:
    full: Layer = (Full(c.kv_width * item),)
    types = c.per_layer("layer_types")
    mamba: Layer = (_mamba2_state(c, _IN_HYBRID, item),) if "mamba" in types else full
    return [mamba if kind == "mamba" else full for kind in types]


@_rule("nemotron_h")
def _nemotron_h(c: Sizes, item: int) -> list[Layer]:
    """A pattern of mamba (M), attention (*) and feed-forward layers, which keep nothing."""
    pattern = c.get("hybrid_override_pattern") or c.get("layers_block_type") or c.get("layer_types")
    if not isinstance(pattern, list | str) or len(pattern) > MOST_LAYERS:
        raise ModelError("config.json: lacks 'hybrid_override_pattern'")
    keys = "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel"
    part = _mamba2_state(c, keys, item)
    layers: list[Layer] = []
    for kind in pattern:
        if kind in ("M", "linear_attention", "mamba", "conv"):
            layers.append((part,))
        elif kind in ("*", "full_attention", "attention"):
            layers.append((Full(c.kv_width * item),))
    return layers


@_rule("plamo2")
def _plamo2(c: Sizes, item: int) -> list[Layer]:
    head, step = c.count("hidden_size_per_head"), max(c.count("mamba_step"), 1)
    width = c.count("mamba_num_heads") * head
    mamba: Layer = (
        _linear(width, c.count("mamba_d_conv"), width * c.count("mamba_d_state"), item),
    )
    full: Layer = (Full(2 * c.kv_heads * head * item),)
    last = step // 2 if c.layers > step // 2 else c.layers - 1
    is_full = [i % step == last if c.layers > step // 2 else i == last for i in range(c.layers)]
    return [full if found or not c.get("mamba_enabled") else mamba for found in is_full]


@_rule("jamba")
def _jamba(c: Sizes, item: int) -> list[Layer]:
    width = c.count("mamba_expand") * c.count("hidden")
    mamba: Layer = (
        _linear(width, c.count("mamba_d_conv"), width * c.count("mamba_d_state"), item),
    )
    types = c.per_layer("layers_block_type")
    if not types:
        period, offset = max(c.count("attn_layer_period"), 1), c.count("attn_layer_offset")
        types = ["attention" if i % period == offset else "mamba" for i in range(c.layers)]
    return [(Full(c.kv_width * item),) if kind == "attention" else mamba for kind in types]


@_rule("qwen3_next")
def _qwen3_next(c: Sizes, item: int) -> list[Layer]:
    every = max(c.count("full_attention_interval"), 1)
    full: Layer = (Full(c.kv_width * item),)
    linear: Layer = (_gated_delta(c, item),)
    return [full if (i + 1) % every == 0 else linear for i in range(c.layers)]


@_rule("olmo_hybrid")
def _olmo_hybrid(c: Sizes, item: int) -> list[Layer]:
    types = c.per_layer("layer_types") or [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(c.layers)
    ]
    linear: Layer = (_gated_delta(c, item),)
    full: Layer = (Full(c.kv_width * item),)
    return [linear if kind == "linear_attention" else full for kind in types]


def _gated_delta(c: Sizes, item: int) -> Const:
    keys = c.count("linear_num_key_heads") * c.count("linear_key_head_dim")
    values = c.count("linear_num_value_heads") * c.count("linear_value_head_dim")
    kernel = c.count("linear_conv_kernel_dim")
    return _linear(2 * keys + values, kernel, values * c.count("linear_key_head_dim"), item)


@_rule("kimi_linear kimi_k3")
def _kimi(c: Sizes, item: int) -> list[Layer]:
    linear = c.inner("linear_attn_config")
    heads, head = linear.count("num_heads"), linear.count("head_dim")
    kernel = linear.count("short_conv_kernel_size", 4)
    delta: Layer = (_linear(3 * heads * head, kernel, heads * head * head, item),)
    numbers = linear.get("kda_layers")  # counted from one
    chosen = set(numbers) if isinstance(numbers, list) else set()
    return [delta if i + 1 in chosen else (_latent(c, item),) for i in range(c.layers)]


@_rule("bailing_moe_linear bailing_hybrid bailing_moe_v3")
def _bailing(c: Sizes, item: int) -> list[Layer]:
    """Groups that end in an attention layer; an unfinished group is attention throughout."""
    head = c.count("head_dim", 0) or c.count("hidden") // max(c.heads, 1)
    if c.name == "bailing_moe_linear":
        full = Full(2 * c.kv_heads * head * item)
        head = c.count("hidden") // max(c.heads, 1)  # the linear layers ignore head_dim
    else:
        full = _latent(c, item)
    state = c.heads * head * head
    linear = Const(state * (item if c.name == "bailing_moe_linear" else _STATE_BYTES))
    if c.name == "bailing_moe_v3":
        linear = _linear(3 * c.heads * head, c.count("short_conv_kernel_size"), state, item)
    group = max(c.count("layer_group_size"), 1)
    whole = c.layers // group * group
    return [(full,) if (i + 1) % group == 0 or i >= whole else (linear,) for i in range(c.layers)]


@_rule("lfm2 lfm2_moe")
def _lfm2(c: Sizes, item: int) -> list[Layer]:
    conv: Layer = (Const(max(c.count("conv_L_cache") - 1, 0) * c.count("hidden") * item),)
    chosen = c.get("full_attn_idxs")
    if not isinstance(chosen, list):
        chosen = [
            i for i, kind in enumerate(c.per_layer("layer_types")) if kind == "full_attention"
        ]
    return [(Full(c.kv_width * item),) if i in chosen else conv for i in range(c.layers)]


@_rule("gear")
def _gear(c: Sizes, item: int) -> list[Layer]:
    full = Full(c.kv_width * item)
    window = Window(c.count("window"), c.kv_width * item)
    conv = Const(max(c.count("conv_L_cache") - 1, 0) * c.kv_width * item)
    types = c.per_layer("layer_types") or ["full_attention"] * c.layers
    known: dict[str, Layer] = {"full_attention": (full,), _SLIDING: (window,)}
    return [known.get(kind, (conv,)) for kind in types]


@_rule("baichuan_m1")
def _baichuan_m1(c: Sizes, item: int) -> list[Layer]:
    """Each layer also keeps the key and value before the newest, for a convolution of two."""
    chosen = c.get("sliding_window_layers") or []
    layers: list[Layer] = []
    for i in range(c.layers):
        near = "num_swa_" if i in chosen else "num_"
        heads = c.count(f"{near}attention_heads", 0) or c.heads
        kv_heads = c.count(f"{near}key_value_heads", 0) or c.kv_heads
        width = 2 * kv_heads * (c.count("hidden") // max(heads, 1)) * item
        part = Window(c.count("window"), width) if i in chosen else Full(width)
        layers.append((Const(width), part))
    return layers


@_rule("recurrent_gemma")
def _recurrent_gemma(c: Sizes, item: int) -> list[Layer]:
    """One key and one value head, always within a window; the recurrence has one value a channel,
    kept in the activations' dtype."""
    width = c.count("hidden")
    pattern = c.get("block_types") or c.get("_block_types")
    if not isinstance(pattern, list) or not pattern:
        raise ModelError("config.json: lacks 'block_types'")
    recurrent: Layer = (Const(c.count("conv1d_width") * width * item),)
    window: Layer = (Window(c.count("attention_window_size"), 2 * c.head_dim * item),)
    return [
        recurrent if pattern[i % len(pattern)] == "recurrent" else window for i in range(c.layers)
    ]


@_rule("rwkv7")
def _rwkv7(c: Sizes, item: int) -> list[Layer]:
    width = c.count("hidden")
    return [(Const((2 + c.count("head_dim")) * width * item),)] * c.layers
