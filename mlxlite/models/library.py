"""What models this machine has, and how a name becomes a folder.

Models live in `<home>/models/<name>/` (fetched or imported by us) and in the Hugging Face hub's
cache (shared with other programs, read as it is). `resolve` answers from the disk alone, in
milliseconds, and raises `NotLocal` for what `get` could bring; `get` brings it. Neither looks
into weights: the loader checks those (`safetensors_file`).

Invariants: a folder under `<home>/models` whose name does not start with a dot is whole, because
models are built in `.<name>.partial` and renamed in one step; one process at a time builds a
name (`.<name>.lock`). Nothing here imports mlx, tokenizers, numpy or the hub's client.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlite.errors import ModelError
from mlxlite.models import fit
from mlxlite.models.catalogue import CATALOGUE, DEFAULT

RECORD = "mlxlite.json"  # where a snapshot of ours came from
RAM_SHARE = 0.6  # of RAM, that a model chosen for the user may take

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be loaded now. bits: of quantised weights, None when they are dense."""

    name: str
    folder: Path
    source: str
    model_type: str
    size_bytes: int
    bits: int | None
    has_chat_template: bool


class NotLocal(ModelError):
    """The model is not here, but `get(name)` could bring it."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class NoLocalModel(NotLocal):
    """No model was named and none is here; `name` is the default's."""


class UnknownModel(ModelError):
    """A name that means nothing, here or elsewhere."""


# --- looking ----------------------------------------------------------------------------------


def models_folder(home: Path) -> Path:
    return home / "models"


def hub_cache() -> Path:
    """Where huggingface_hub keeps its files (its documentation, "Environment variables")."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    if value := os.environ.get("HF_HOME"):
        return Path(value).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def local_models(home: Path) -> list[LocalModel]:
    """All whole models of the home and of the hub's cache, by name. Broken ones are left out."""
    found: dict[str, LocalModel] = {}
    for name, folder in (*_home_folders(home), *_hub_folders()):
        try:
            found.setdefault(name, describe(folder, name))
        except ModelError:
            continue
    return [found[name] for name in sorted(found)]


def _home_folders(home: Path) -> Iterator[tuple[str, Path]]:
    try:
        folders = sorted(models_folder(home).iterdir())
    except OSError:
        return
    for folder in folders:
        if not folder.name.startswith(".") and folder.is_dir():
            yield folder.name, folder


def _hub_folders() -> Iterator[tuple[str, Path]]:
    try:
        repositories = sorted(hub_cache().glob("models--*"))
    except OSError:
        return
    for repository in repositories:
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        if (folder := _hub_snapshot(name)) is not None:
            yield name, folder


def _hub_snapshot(name: str) -> Path | None:
    """The snapshot of `main`, else the newest: models--org--name/snapshots/<commit>."""
    repository = hub_cache() / ("models--" + name.replace("/", "--"))
    try:
        commit = (repository / "refs" / "main").read_text().strip()
        if commit and (repository / "snapshots" / commit).is_dir():
            return repository / "snapshots" / commit
    except (OSError, UnicodeDecodeError):
        pass
    try:
        snapshots = [path for path in (repository / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return None
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def describe(folder: Path, name: str) -> LocalModel:
    """Check that a folder in Hugging Face or MLX layout is complete, without opening weights.

    ModelError names what is missing or unreadable.
    """
    _require_model(folder)
    config = read_object(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{folder / 'config.json'}: lacks 'model_type'")
    size_bytes = sum(path.stat().st_size for path in weight_files(folder))
    quantization = config.get("quantization") or config.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    record = read_object(folder / RECORD) if (folder / RECORD).exists() else {}
    source = record.get("source")
    if not isinstance(source, str):
        source = f"hub:{name}" if folder.parent.name == "snapshots" else f"folder:{folder}"
    return LocalModel(
        name=name,
        folder=folder,
        source=source,
        model_type=model_type,
        size_bytes=size_bytes,
        bits=bits if type(bits) is int else None,
        has_chat_template=_has_chat_template(folder),
    )


def _require_model(folder: Path) -> None:
    """ModelError naming all that the folder lacks, if it has no config or no weights at all."""
    missing = [
        shown
        for shown, pattern in (
            ("config.json", "config.json"),
            ("weights (*.safetensors)", "*.safetensors"),
            ("tokenizer.json", "tokeniz*"),  # older ones are converted
        )
        if not any(folder.glob(pattern))
    ]
    if not missing or missing == ["tokenizer.json"]:  # which the tokenizer tells better
        return
    hint = ""
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        hint = f"; `mlxlite get {gguf}` imports its GGUF file"
    raise ModelError(f"{folder}: is no model, it lacks {', '.join(missing)}{hint}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model; ModelError when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: lacks 'weight_map'")
        names = {str(name) for name in weight_map.values()}
    else:
        # Some repositories keep the weights in a second layout too ("consolidated.safetensors").
        found = {path.name for path in folder.glob("*.safetensors")}
        names = {name for name in found if name.startswith("model")} or found
        for shard in [match for name in names if (match := _SHARD.fullmatch(name))]:
            stem, count = shard.groups()
            # A file count is bounded by five digits, so a nonsense name cannot cost much.
            names |= {f"{stem}-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    if not names:
        raise ModelError(f"{folder}: has no .safetensors file; it is not a model in MLX layout")
    paths = [folder / name for name in sorted(names)]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise ModelError(f"{path}: missing; the model is incomplete")
    return paths


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model; ModelError names file and reason."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {str(error)[:100]}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return content


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.exists() and bool(read_object(config).get("chat_template"))


# --- names ------------------------------------------------------------------------------------


def resolve(name: str | None, home: Path) -> LocalModel:
    """The local model that `name` means; see the order in the code. None: see `choose`.

    NotLocal when `get` could bring it, another ModelError when nothing can.
    """
    if name is None:
        return choose(home)
    # 1. A GGUF file: whatever was imported from it.
    if name.lower().endswith(".gguf"):
        return _resolve_gguf(Path(name).expanduser(), home)
    # 2. A plain name: the home's models come before a folder that happens to be called so.
    is_plain = "/" not in name and not name.startswith((".", "~"))
    if is_plain and (folder := models_folder(home) / name).is_dir():
        return describe(folder, name)
    if name in CATALOGUE:
        raise NotLocal(f"{name}: not on this machine yet; `mlxlite get {name}` fetches it", name)
    # 3. A folder.
    folder = Path(name).expanduser()
    if folder.is_dir():
        return describe(folder, folder.resolve().name)
    if folder.is_file():
        raise UnknownModel(f"{folder}: is no .gguf file; give the folder of a model")
    if name.startswith(("/", "./", "../", "~")):
        raise UnknownModel(f"{folder}: no such folder")
    # 4. A repository of the hub.
    if _REPOSITORY.fullmatch(name):
        return _resolve_repository(name)
    raise UnknownModel(_unknown(name, home))


def choose(home: Path) -> LocalModel:
    """The model for a user who named none (spec 60 section 5): the default if it is here, else the
    largest chat model that leaves the machine room, else the largest that fits. NoLocalModel when
    there is none."""
    machine = fit.guessed_machine()
    usable_bytes = fit.USABLE_SHARE * machine.memory_bytes
    folder = models_folder(home) / DEFAULT
    if folder.is_dir() and _takes_at_most(
        usable_bytes, default := describe(folder, DEFAULT), machine
    ):
        return default
    chat = [model for model in local_models(home) if model.has_chat_template]
    chat.sort(key=lambda model: model.size_bytes, reverse=True)
    for limit_bytes in (RAM_SHARE * machine.memory_bytes, usable_bytes):
        for model in chat:
            if _takes_at_most(limit_bytes, model, machine):
                return model
    raise NoLocalModel(
        f"no model is on this machine {'that fits it' if chat else 'yet'}; "
        f"`mlxlite get {DEFAULT}` fetches a small one",
        DEFAULT,
    )


def fit_of(model: LocalModel, machine: fit.Machine, budget_gb: float | None = None) -> fit.Fit:
    """What a model takes on a machine. Raises ModelError if its files do not tell."""
    config = read_object(model.folder / "config.json")
    return fit.measure(config, weight_files(model.folder), machine, budget_gb)


def _takes_at_most(limit_bytes: float, model: LocalModel, machine: fit.Machine) -> bool:
    """Whether the whole does, at a usual context; headers are read only where it is close."""
    if model.size_bytes > limit_bytes:
        return False
    try:
        config = read_object(model.folder / "config.json")
        found = fit.at_most(config, model.size_bytes, machine)
        context = min(fit.TYPICAL_CONTEXT, found.max_context)
        if found.total_bytes(context) > limit_bytes:
            found = fit_of(model, machine)
    except ModelError:  # nothing more can be counted than its files
        return True
    return found.total_bytes(context) <= limit_bytes


def _resolve_gguf(path: Path, home: Path) -> LocalModel:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    for name, folder in _home_folders(home):
        if is_import_of(folder, path):
            return describe(folder, name)
    raise NotLocal(f"{path}: not imported yet; `mlxlite get {path}` imports it", str(path))


def is_import_of(folder: Path, path: Path) -> bool:
    """Whether the snapshot was made from this very file: same place, size and change time."""
    try:
        return bool(read_object(folder / RECORD).get("file") == fingerprint(path))
    except ModelError:
        return False


def fingerprint(path: Path) -> dict[str, Any]:
    """What tells a changed file without reading it."""
    stat = path.stat()
    return {
        "path": str(path.resolve()),
        "size_bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
    }


def _resolve_repository(name: str) -> LocalModel:
    folder = _hub_snapshot(name)
    if folder is None:
        raise NotLocal(
            f"{name}: no such folder, and not in the hub's cache; `mlxlite get {name}` fetches it",
            name,
        )
    try:
        return describe(folder, name)
    except ModelError as error:
        # Most often a download that was interrupted.
        raise NotLocal(f"{error.message}; `mlxlite get {name}` completes it", name) from None


def _unknown(name: str, home: Path) -> str:
    known = sorted({*CATALOGUE, *(model.name for model in local_models(home))})
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"no model {name!r}; did you mean {' or '.join(near)}?"
    return (
        f"no model {name!r}; give a name that `mlxlite ls` shows, a hub repository (org/name), "
        f"a .gguf file or a folder"
    )
