"""Does a model fit this machine, and with how long a context? Arithmetic alone (decision D18).

Weights are counted from safetensors headers as the loader will hold them, caches by `kv_layout`,
both in milliseconds and without MLX. Rules: spec 60 section 5. Where its prefill constant was taken
on a GPU, ours for a CPU was measured: attention there writes out its scores, so what a prefill
needs for a moment grows with the context.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mlxlite.errors import ModelError
from mlxlite.kvplan import KVPlan
from mlxlite.models.kv_config import NAMES, Sizes
from mlxlite.models.kv_layout import kv_plan, resolve
from mlxlite.models.safetensors_file import TensorSpec, check_safetensors

USABLE_SHARE = 0.75  # of the memory, without a budget
TYPICAL_CONTEXT = 8192
_UNPACK_SHARE = 3  # a model is unpacked where that takes at most 1/3 of the memory (decision D3)
_EFFICIENCY, _MOE_EFFICIENCY = 0.82, 0.76  # of the bandwidth, that decoding reaches
_UNKNOWN_MAC = 273.0
_MOST_GROWTH = 16  # of a file when it is loaded: two bits become a float32

# Memory bandwidth in GB/s (spec 60 section 5).
SKUS: dict[str, float] = {
    "M1": 68,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": 400,
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": 546,
}

# On a GPU, bytes of a prefill for each token of its chunk, and the largest chunk (spec).
_GPU_CHUNK_BYTES, _GPU_CHUNK = 550_000, 2048
# On a CPU, values for each token of a chunk: so many times the width of the model and of its
# feed-forward layers, and copies of the scores (heads x chunk x context). The most that llama and
# qwen3_moe models of 512 to 1024 wide took at 1k to 8k tokens: 53 to 91 kB a token, and 1.06 to
# 1.14 times the scores (mlx 0.32.4, float32).
_CPU_WIDTHS, _CPU_INNER_WIDTHS, _CPU_SCORES, _CPU_CHUNK = 14, 6, 1.25, 512
_INNER_WIDTHS = (
    "intermediate_size",
    "n_inner",
    "ff_intermediate_size",
    "mlp_hidden_size",
    "block_ff_dim",
    "ffn_hidden_size",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """memory_bytes: RAM where the CPU or a Mac's GPU computes, else the GPU's own.

    kind: cpu, metal or cuda. dtype: of the activations, None for the checkpoint's own.
    bandwidth: of the memory, GB/s, None where unknown.
    """

    kind: str
    memory_bytes: int
    dtype: str | None
    bandwidth: float | None = None


def machine(kind: str, memory_bytes: int = 0, dtype: str = "auto") -> Machine:
    """A machine as the engine's backend tells of it; 0 bytes: this computer's RAM."""
    wanted = dtype if dtype != "auto" else "float32" if kind == "cpu" else None
    chip = _chip() if kind == "metal" else None
    return Machine(kind, memory_bytes or ram_bytes(), wanted, bandwidth(chip))


def guessed_machine(dtype: str = "auto") -> Machine:
    """This computer, before MLX is there to tell: a Mac computes on its GPU, others on the CPU."""
    return machine("metal" if sys.platform == "darwin" else "cpu", 0, dtype)


def ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bandwidth(chip: str | None) -> float | None:
    """GB/s of a chip such as `Apple M3 Max`; None for no chip of Apple's."""
    if chip is None or not chip.startswith("Apple M"):
        return None
    return SKUS.get(chip.removeprefix("Apple ").strip(), _UNKNOWN_MAC)


def _chip() -> str | None:
    """What macOS calls the processor."""
    try:
        libc = ctypes.CDLL(None)
        buffer, size = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
        if libc.sysctlbyname(b"machdep.cpu.brand_string", buffer, ctypes.byref(size), None, 0):
            return None
    except (OSError, AttributeError):
        return None
    return buffer.value.decode(errors="replace")


# ------------------------------------------------------------------------------------ weights


@dataclass(frozen=True, slots=True)
class Weights:
    """As loaded. expert_bytes: of experts, of which only some are read for a token.

    dtype: of the activations.
    """

    n_bytes: int
    expert_bytes: int
    dtype: str
    is_unpacked: bool


_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FP8 = ("F8_E4M3", "F8_E5M2")  # unpacked to bfloat16 by mlx-lm's model files
_NOT_LOADED = (
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "mtp",
)
_EXPERTS = ("experts", "switch_mlp", "switch_glu")
# Values in one stored item of tensors that other tools packed.
_PACKED_BY_OTHERS = {"qweight": 8, "weight_packed": 8}
_PACKED_BLOCKS = "_blocks"  # of mxfp4: two values a byte
_BESIDE_PACKED = ("scales", "biases", "qzeros", "g_idx", "weight_scale", "weight_scale_inv")


def weights(
    specs: Mapping[str, TensorSpec], config: Mapping[str, Any], machine: Machine
) -> Weights:
    """Count the weights of a model as `engine/load` will hold them.

    specs: the headers of all its files. What mlx-lm leaves out of a checkpoint is known only in
    part, so a count may be too high, by tensors that are then dropped.
    """
    is_tied = bool(_of(config, "tie_word_embeddings"))
    loaded = {name: spec for name, spec in specs.items() if _is_loaded(name, is_tied)}
    own = _own_dtype(loaded.values())
    dtype = machine.dtype or own
    is_packed = any(
        name.endswith((".scales", ".qweight", ".weight_packed", _PACKED_BLOCKS)) for name in loaded
    )
    dense = sum(_values(name, spec, loaded, config) for name, spec in loaded.items())
    dense_bytes = dense * _SIZES[dtype]
    if (
        machine.kind == "cpu"
        and machine.dtype is not None
        and is_packed
        and dense_bytes <= machine.memory_bytes // _UNPACK_SHARE
        and not any(name.endswith(".global_scale") for name in loaded)
    ):
        experts = sum(_values(n, s, loaded, config) for n, s in loaded.items() if _is_expert(n))
        return Weights(dense_bytes, experts * _SIZES[dtype], dtype, True)
    sizes = {name: _held(spec, machine.dtype) for name, spec in loaded.items()}
    experts = sum(size for name, size in sizes.items() if _is_expert(name))
    return Weights(sum(sizes.values()), experts, dtype, False)


def _is_loaded(name: str, is_tied: bool) -> bool:
    parts = name.split(".")
    if parts[-1] == "inv_freq" or (is_tied and "lm_head" in parts):
        return False
    return not any(part in _NOT_LOADED for part in parts)


def _is_expert(name: str) -> bool:
    return any(part in _EXPERTS for part in name.split("."))


def _held(spec: TensorSpec, wanted: str | None) -> int:
    """Bytes of a tensor that is not unpacked; floating ones are cast."""
    if spec.dtype in _FP8:
        return prod(spec.shape) * _SIZES[wanted or "bfloat16"]
    if spec.dtype in _FLOATS and wanted is not None:
        return prod(spec.shape) * _SIZES[wanted]
    return spec.n_bytes


def _values(
    name: str, spec: TensorSpec, loaded: Mapping[str, TensorSpec], config: Mapping[str, Any]
) -> int:
    """Values that a tensor is of, once unpacked; 0 for what only describes a packing."""
    path, _, last = name.rpartition(".")
    if last == "weight" and (scales := loaded.get(f"{path}.scales")) is not None:
        return prod(scales.shape) * _group_size(path, config)
    if last in _PACKED_BY_OTHERS:
        return prod(spec.shape) * _PACKED_BY_OTHERS[last]
    if last.endswith(_PACKED_BLOCKS):
        return prod(spec.shape) * 2
    if last in _BESIDE_PACKED or last.endswith("_scales"):
        return 0
    return prod(spec.shape)


def _group_size(path: str, config: Mapping[str, Any]) -> int:
    told = config.get("quantization") or config.get("quantization_config") or {}
    layer = told.get(path) if isinstance(told, dict) else None
    for scope in (layer, told):
        if isinstance(scope, dict) and type(found := scope.get("group_size")) is int and found > 0:
            return found
    return 64


def _own_dtype(specs: Any) -> str:
    """The dtype of most floating values."""
    counts: dict[str, int] = {}
    for spec in specs:
        name = "bfloat16" if spec.dtype in _FP8 else _FLOATS.get(spec.dtype)
        if name is not None:
            counts[name] = counts.get(name, 0) + prod(spec.shape)
    return max(counts, key=lambda name: counts[name]) if counts else "float32"


def _of(config: Mapping[str, Any], *keys: str) -> Any:
    """The first of these keys that a config or its text model has."""
    text = config.get("text_config")
    for scope in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            if scope.get(key) is not None:
                return scope[key]
    return None


# ---------------------------------------------------------------------------------------- fit


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model takes, and what of it fits. All methods are cheap, none reads a file.

    max_context: tokens that the model was made for. budget_bytes: what the operator allows, if
    they said. read_share: of the experts that a token reads. widths: values for each token of a
    chunk in a CPU's prefill; heads: of attention.
    """

    machine: Machine
    weights: Weights
    plan: KVPlan
    max_context: int
    budget_bytes: int | None
    read_share: float
    widths: int
    heads: int

    @property
    def usable_bytes(self) -> int:
        if self.budget_bytes is not None:
            return self.budget_bytes
        return int(self.machine.memory_bytes * USABLE_SHARE)

    def kv_bytes(self, context: int) -> int:
        """Of one row."""
        return self.plan.row_bytes(context)

    def transient_bytes(self, context: int, chunk: int | None = None) -> int:
        """The most that a prefill takes for a moment at this context; chunk: its tokens, if not
        as many as the context allows."""
        if self.machine.kind != "cpu":
            return min(_GPU_CHUNK, context if chunk is None else chunk) * _GPU_CHUNK_BYTES
        tokens = min(_CPU_CHUNK, context if chunk is None else chunk)
        scores = int(_CPU_SCORES * self.heads * context)
        return tokens * (self.widths + scores) * _SIZES[self.weights.dtype]

    def total_bytes(self, context: int) -> int:
        return self.weights.n_bytes + self.kv_bytes(context) + self.transient_bytes(context)

    def fits(self, context: int) -> bool:
        return self.total_bytes(context) <= self.usable_bytes

    @property
    def max_safe_context(self) -> int:
        """The longest context of one row that fits beside a whole prefill chunk; 0 if none does."""
        low, high = 0, self.max_context  # all of it grows with the context, so halve
        while low < high:
            middle = (low + high + 1) // 2
            if self._needs(middle) <= self.usable_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _needs(self, context: int) -> int:
        transient = self.transient_bytes(context, _GPU_CHUNK)
        return self.weights.n_bytes + self.kv_bytes(context) + transient

    @property
    def least_bytes(self) -> int:
        """The smallest budget under which a row of one slab can run."""
        return self._needs(min(256, self.max_context))

    def rows(self, context: int) -> int:
        """Rows of this context that fit together."""
        room = self.usable_bytes - self.weights.n_bytes - self.transient_bytes(context, _GPU_CHUNK)
        return max(room, 0) // max(self.plan.row_bytes_allocated(context), 1)

    def decode_tps(self, context: int, bandwidth: float | None = None) -> float | None:
        """Tokens a second of one row, from the memory's bandwidth; None where that is unknown."""
        speed = self.machine.bandwidth if bandwidth is None else bandwidth
        if speed is None:
            return None
        skipped = self.weights.expert_bytes * (1 - self.read_share)
        efficiency = _MOE_EFFICIENCY if self.read_share < 1 else _EFFICIENCY
        moved = self.weights.n_bytes - skipped + self.kv_bytes(context)
        return speed * 1e9 / max(moved, 1) * efficiency


def measure(
    config: dict[str, Any],
    files: Sequence[Path],
    machine: Machine,
    budget_gb: float | None = None,
) -> Fit:
    """Count a model from its config and the headers of its weight files.

    budget_gb: decimal GB. Raises ModelError for a damaged file or a config without its sizes.
    """
    specs: dict[str, TensorSpec] = {}
    for file in files:
        specs.update(check_safetensors(file))
    return _fit(config, weights(specs, config, machine), machine, budget_gb)


def at_most(config: dict[str, Any], file_bytes: int, machine: Machine) -> Fit:
    """What a model cannot exceed, without opening its files. Raises ModelError as `measure`."""
    return _fit(config, Weights(file_bytes * _MOST_GROWTH, 0, "float32", False), machine, None)


def _fit(
    config: dict[str, Any], counted: Weights, machine: Machine, budget_gb: float | None
) -> Fit:
    sizes = Sizes(config, resolve(config))
    hidden = _widest(sizes, *NAMES["hidden"])
    inner = max(_widest(sizes, *_INNER_WIDTHS) or 4 * hidden, _read_experts_width(sizes))
    plan = kv_plan(config, _SIZES[counted.dtype])
    attends = plan.per_token_bytes > 0 or plan.windows
    return Fit(
        machine=machine,
        weights=counted,
        plan=plan,
        max_context=context_length(config),
        budget_bytes=None if budget_gb is None else int(budget_gb * 1e9),
        read_share=_read_share(config),
        widths=_CPU_WIDTHS * hidden + _CPU_INNER_WIDTHS * inner,
        heads=_widest(sizes, *NAMES["heads"], "num_query_heads") if attends else 0,
    )


_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
_UNSTATED_CONTEXT = 32_768


def context_length(config: Mapping[str, Any]) -> int:
    """The longest sequence that a config says its model was made for; as the engine reads it."""
    text = config.get("text_config")
    for scope in (config, text if isinstance(text, dict) else {}):
        for key in _CONTEXT_KEYS:
            if isinstance(value := scope.get(key), int) and value > 0:
                return value
    return _UNSTATED_CONTEXT


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token is sent to."""
    count = _of(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = _of(
        config,
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
    )
    if type(count) is not int or type(chosen) is not int or not 0 < chosen <= count:
        return 0, 0
    return count, chosen


def _read_share(config: Mapping[str, Any]) -> float:
    count, chosen = _experts(config)
    return chosen / count if count else 1.0


def _widest(sizes: Sizes, *names: str) -> int:
    """The largest of some sizes, any of which may differ by layer; 0 if there is none."""
    found = [sizes.get(name) for name in names]
    flat = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return max((item for item in flat if type(item) is int), default=0)


def _read_experts_width(sizes: Sizes) -> int:
    chosen = sizes.get("num_experts_per_tok")
    return chosen * _widest(sizes, "moe_intermediate_size") if type(chosen) is int else 0


def require_room(fit: Fit, name: str) -> None:
    """Raise ModelError, one line, if a budget leaves a model no room at all."""
    if fit.budget_bytes is not None and fit.least_bytes > fit.budget_bytes:
        raise ModelError(
            f"{name}: its weights take {fit.weights.n_bytes / 1e9:.2f} GB; a memory budget of "
            f"{fit.budget_bytes / 1e9:g} GB leaves no room to run it, the least is "
            f"{fit.least_bytes / 1e9:.2f} GB"
        )
