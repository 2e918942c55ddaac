"""A model folder in Hugging Face / MLX layout -> a model ready to run (decisions D2, D3).

mlx-lm defines the models. Its package imports transformers and a hub client when it is imported
(1.3 to 3.6 s), its model files need neither, so a bare package object stands in for it and only
`mlx_lm.models.<type>` is ever imported.

On a CPU packed weights are slower than dense ones, so they are unpacked once to float32 and the
dense copy is kept on disk for the next start. Everything here runs on the engine thread: an array
belongs to the thread that made it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import math
import os
import sys
import types
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxlite.engine import quantised
from mlxlite.engine.backend import Backend
from mlxlite.errors import ModelError

log = logging.getLogger(__name__)

# model_type in a config -> the file of mlx-lm that defines it; anything else is its own name.
# As in mlx-lm 0.32.2 (its table cannot be imported without transformers); compared in test_load.
MODEL_FILES = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}
MODEL_FILES_BY_ARCHITECTURE = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
_EMBEDDINGS = "embed_tokens.weight"
# A model that states no context length (most recurrent ones) has no hard one; 32k keeps sums
# finite.
_UNSTATED_CONTEXT = 32_768


@dataclass(slots=True)
class LoadedModel:
    """model: an mlx-lm model, evaluated. weight_bytes: of its arrays. dtype: of its activations."""

    model: Any  # an nn.Module whose __call__(inputs (B, T), cache=...) gives logits (B, T, V)
    config: dict[str, Any]
    dtype: str
    weight_bytes: int
    max_context: int


def bare_package() -> None:
    """Register a stand-in for the package `mlx_lm`, unless the real one is already imported."""
    if "mlx_lm" in sys.modules:
        return
    spec = importlib.machinery.PathFinder.find_spec("mlx_lm")
    if spec is None or spec.submodule_search_locations is None:
        raise ModelError("the package mlx-lm is not installed")
    package = types.ModuleType("mlx_lm")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["mlx_lm"] = package


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` with tagged floats undone and rotary settings where mlx-lm looks for them.

    Raises ModelError naming the file and the reason.
    """
    config: dict[str, Any] = _untag_floats(_read_json(folder / "config.json"))
    for scope in (config, config.get("text_config")):
        if isinstance(scope, dict):
            _spread_rope(scope)
    return config


def _spread_rope(config: dict[str, Any]) -> None:
    """transformers 5 writes `rope_parameters`, which most of mlx-lm's models do not read: without
    this they would run with a default base, and answer nonsense."""
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        return
    if isinstance(local := given.get("sliding_attention"), dict):  # by kind of layer, as Gemma's
        config.setdefault("rope_local_base_freq", local.get("rope_theta", 10_000.0))
        given = given.get("full_attention")
    if not isinstance(given, dict):
        return
    if "rope_theta" in given:
        config.setdefault("rope_theta", given["rope_theta"])
    if "partial_rotary_factor" in given:
        config.setdefault("partial_rotary_factor", given["partial_rotary_factor"])
    if given.get("rope_type", "default") != "default" and config.get("rope_scaling") is None:
        config["rope_scaling"] = given


def context_length(config: dict[str, Any]) -> int:
    """The longest sequence, in tokens, that a config says its model was made for."""
    for scope in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(value := scope.get(key), int) and value > 0:
                return value
    return _UNSTATED_CONTEXT


def load(folder: Path, backend: Backend, dtype: str, dense_folder: Path) -> LoadedModel:
    """Build the model of a folder and load its weights.

    dtype: auto, float32, bfloat16 or float16. dense_folder: where a dense copy is kept (made when
    needed, safe to delete). Raises ModelError, one line, for anything wrong with the folder.
    """
    config = read_config(folder)
    try:
        model_class, args_class = _model_classes(config)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error.message}") from None
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no .safetensors file")
    wanted = backend.dtype(dtype)
    if _is_for_embedding(folder, config) and _lacks_head(files):
        config = {**config, "tie_word_embeddings": True}  # so mlx-lm's model wants no head either
    try:
        model = model_class(args_class.from_dict(config))
        scheme = quantised.scheme_of(config, _optional_json(folder / "hf_quant_config.json"))
        dense = _dense_copy_path(folder, files, backend, scheme, model, wanted, dense_folder)
        weights = _kept_dense_copy(dense, model)
        if weights is None:
            weights = _source_weights(model, files, config)
            if dense is not None and wanted is not None and quantised.can_unpack(weights):
                log.info("unpacking the weights to %s, once; kept in %s", wanted, dense.parent)
                weights = _unpacked(model, weights, config, wanted)
                _keep_dense_copy(dense, weights)
            elif scheme is not None:
                quantised.quantise(model, scheme, weights, config)
        weights = _cast(model, weights, wanted)
        model.eval()
        model.load_weights(list(weights.items()), strict=True)
        weights.clear()  # the arrays now belong to the model alone
        mx.eval(model.parameters())
    except ModelError:
        raise
    except Exception as error:  # a model file may raise anything on a config it does not expect
        raise ModelError(f"{folder}: cannot be loaded: {_one_line(error)}") from error
    arrays = list(quantised.parameters(model).values())
    return LoadedModel(
        model=model,
        config=config,
        dtype=_activation_dtype(arrays),
        weight_bytes=sum(array.nbytes for array in arrays),
        max_context=context_length(config),
    )


# ------------------------------------------------------------------------------ model classes


def _model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    if config.get("model_file"):
        raise ModelError(
            f"the model brings its own code ({config['model_file']!r}), which mlxlite does not run"
        )
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError("there is no model_type")
    architectures = config.get("architectures") or []
    for architecture in [architectures] if isinstance(architectures, str) else architectures:
        if (kind, architecture) in MODEL_FILES_BY_ARCHITECTURE:
            name = MODEL_FILES_BY_ARCHITECTURE[kind, architecture]
            break
    else:
        name = MODEL_FILES.get(kind, kind)
    bare_package()
    is_name = name.replace("-", "_").isidentifier()  # some files have hyphens; none is a path
    if not is_name or importlib.util.find_spec(f"mlx_lm.models.{name}") is None:
        raise ModelError(f"model_type {kind!r} is not one that the installed mlx-lm defines")
    try:
        file = importlib.import_module(f"mlx_lm.models.{name}")
        return file.Model, file.ModelArgs
    except SystemExit:  # one file exits when a package of its own is missing
        raise ModelError(f"model_type {kind!r} needs a package that is not installed") from None
    except (ImportError, AttributeError) as error:
        raise ModelError(f"model_type {kind!r} cannot be used: {_one_line(error)}") from error


# ------------------------------------------------------------------------------------ weights


def _source_weights(model: Any, files: list[Path], config: dict[str, Any]) -> quantised.Weights:
    """The folder's own weights, in the model's names."""
    weights: quantised.Weights = {}
    for file in files:
        weights.update(_load_file(file))
    if _EMBEDDINGS in weights and f"model.{_EMBEDDINGS}" in quantised.parameters(model):
        weights = {f"model.{name}": array for name, array in weights.items()}  # of a bare stack
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method in ("awq", "gptq"):
        weights = quantised.repack_awq(weights)
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if method == "bitnet":
        layers = importlib.import_module("mlx_lm.models.bitlinear_layers")
        layers.bitnet_quantize(model, config["quantization_config"])
    return weights


def _is_for_embedding(folder: Path, config: dict[str, Any]) -> bool:
    """True for the layout of sentence-transformers, and for an architecture like Qwen3Model."""
    names = config.get("architectures") or [""]
    return (folder / "modules.json").exists() or str(names[0]).endswith(("Model", "Encoder"))


def _lacks_head(files: list[Path]) -> bool:
    """True if no file has a head for tokens; only the files' headers are read."""
    return not any(name.endswith("lm_head.weight") for file in files for name in _load_file(file))


def _unpacked(
    model: Any, weights: quantised.Weights, config: dict[str, Any], wanted: str
) -> quantised.Weights:
    shapes = {name: array.shape for name, array in quantised.parameters(model).items()}
    dense = quantised.unpack(weights, shapes, config, getattr(mx, wanted))
    return _cast(model, dense, wanted)


def _load_file(file: Path) -> quantised.Weights:
    try:
        return mx.load(str(file))  # type: ignore[return-value]
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {_one_line(error)}") from error


def _cast(model: Any, weights: quantised.Weights, wanted: str | None) -> quantised.Weights:
    """Floating weights in the wanted dtype, except those that the model wants left alone."""
    if wanted is None:
        return weights
    dtype = getattr(mx, wanted)
    keep = getattr(model, "cast_predicate", lambda name: True)
    return {
        name: array.astype(dtype)
        if mx.issubdtype(array.dtype, mx.floating) and (keep(name) or dtype == mx.float32)
        else array
        for name, array in weights.items()
    }


def _activation_dtype(arrays: list[mx.array]) -> str:
    """The dtype that most floating parameters have: what the activations will be."""
    sizes: dict[str, int] = {}
    for array in arrays:
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).rpartition(".")[2]
            sizes[name] = sizes.get(name, 0) + array.size
    return max(sizes, key=lambda name: sizes[name]) if sizes else "float32"


# ------------------------------------------------------------------------------ the dense copy


def _dense_copy_path(
    folder: Path,
    files: list[Path],
    backend: Backend,
    scheme: quantised.Scheme | None,
    model: Any,
    wanted: str | None,
    dense_folder: Path,
) -> Path | None:
    """Where the dense copy of a packed model is or will be; None if it is to stay packed (D3)."""
    if scheme is None or not backend.prefers_dense or wanted is None:
        return None
    size = quantised.dense_bytes(model, getattr(mx, wanted).size)
    if size > backend.memory_bytes // 3:
        return None
    return dense_folder / f"{wanted}-{_fingerprint(folder, files)}.safetensors"


def _fingerprint(folder: Path, files: list[Path]) -> str:
    """A hash of what the weights are without reading them all: names, sizes, times, headers."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        status = file.stat()
        digest.update(f"{file.name}|{status.st_size}|{status.st_mtime_ns}".encode())
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, 1 << 24)))
    return digest.hexdigest()[:16]


def _kept_dense_copy(path: Path | None, model: Any) -> quantised.Weights | None:
    """The dense weights that an earlier start kept, or None; a damaged copy is made again."""
    if path is None or not path.exists():
        return None
    try:
        weights = _load_file(path)
    except ModelError as error:
        log.warning("the dense copy is made again: %s", error)
        return None
    shapes = {name: array.shape for name, array in quantised.parameters(model).items()}
    return weights if shapes == {name: array.shape for name, array in weights.items()} else None


def _keep_dense_copy(path: Path, weights: quantised.Weights) -> None:
    """Keep the dense weights for the next start; a full or read-only disk is no failure."""
    draft = path.with_name(f"{path.stem}.{os.getpid()}.part.safetensors")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(draft), weights)
        os.replace(draft, path)
    except (OSError, RuntimeError) as error:
        log.warning("no dense copy kept, the next start unpacks again: %s", _one_line(error))
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        return
    for old in path.parent.glob("*.safetensors"):
        if old != path and old.stem.partition("-")[0] == path.stem.partition("-")[0]:
            old.unlink(missing_ok=True)


# --------------------------------------------------------------------------------- small files


def _read_json(path: Path) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def _optional_json(path: Path) -> dict[str, Any] | None:
    return _read_json(path) if path.exists() else None


_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _untag_floats(value: Any) -> Any:
    """Undo {"__float__": "Infinity"}, how transformers writes floats that JSON has no word for."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and (tag := str(value["__float__"])) in _TAGGED_FLOATS:
            return _TAGGED_FLOATS[tag]
        return {key: _untag_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untag_floats(item) for item in value]
    return value


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " …"
