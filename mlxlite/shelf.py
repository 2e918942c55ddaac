"""What is on this machine, as `GET /library` shows it: each model, and what of it fits (floor 2).

Looking takes a read of every weight file's header, so it happens in the pool and is remembered for
30 seconds, or until something changed. The model that is served is always among them, also if it
lies in a folder that nobody would look into.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from mlxlite.config import Settings
from mlxlite.errors import ModelError, NotFound
from mlxlite.models import fit, library
from mlxlite.models.library import LocalModel
from mlxlite.types import JSON

REMEMBERED_S = 30.0  # spec 70 section 8


class Shelf:
    """All local models. served: those that were loaded in this process, by the name that they were
    loaded under. model_files: model types that mlx-lm has under another name. machine: what fits
    is counted for. Owned by the event loop; only `_found` runs elsewhere."""

    def __init__(
        self,
        settings: Settings,
        model_files: Mapping[str, str],
        machine: Callable[[], fit.Machine],
    ) -> None:
        self.served: dict[str, LocalModel] = {}
        self._settings = settings
        self._model_files = model_files
        self._machine = machine
        self._models: dict[str, LocalModel] = {}
        self._places: dict[str, Path] = {}  # their folders, with all links followed
        self._rows: list[dict[str, JSON]] = []
        self._looked_at: float | None = None
        self._looking: asyncio.Future[None] | None = None
        self._changes = 0

    def changed(self) -> None:
        """Something came or went: the next one who asks looks again."""
        self._looked_at = None
        self._changes += 1

    async def rows(self, is_fresh_wanted: bool = False) -> list[dict[str, JSON]]:
        """One a model, by name, without `serving` (spec 70 section 8)."""
        await self._look(is_fresh_wanted)
        return self._rows

    def name_of(self, folder: Path | None) -> str | None:
        """What the model in a folder is called here, as of the last look."""
        if folder is None:
            return None
        real = folder.resolve()  # it may have come by a link, or from where we were started
        found = (name for name, place in self._places.items() if place == real)
        return next(found, None)

    async def find(self, name: str) -> LocalModel:
        """A local model by its very name; never a path. Raises NotFound."""
        await self._look(False)
        if name not in self._models:
            await self._look(True)  # it may have come just now
        if (model := self._models.get(name)) is None:
            raise NotFound(
                f"no local model is called {name[:100]!r}", code="model_not_found", param="model"
            )
        return model

    async def _look(self, is_fresh_wanted: bool) -> None:
        now_s = time.monotonic()
        is_old = self._looked_at is None or now_s - self._looked_at > REMEMBERED_S
        if not is_old and not is_fresh_wanted:
            return
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look_again())
        # Whoever leaves must not end it for the others.
        await asyncio.shield(self._looking)

    async def _look_again(self) -> None:
        changes = self._changes
        try:
            # Not in the service's pool: slow disks must not keep prompts waiting.
            self._models, self._places, self._rows = await asyncio.to_thread(
                _found, self._settings, dict(self.served), self._machine(), self._model_files
            )
            if changes == self._changes:
                self._looked_at = time.monotonic()
        finally:
            self._looking = None


def _found(
    settings: Settings,
    served: dict[str, LocalModel],
    machine: fit.Machine,
    model_files: Mapping[str, str],
) -> tuple[dict[str, LocalModel], dict[str, Path], list[dict[str, JSON]]]:
    models = {model.name: model for model in library.local_models(settings.home)}
    places = {name: model.folder.resolve() for name, model in models.items()}
    for name, model in served.items():
        place = model.folder.resolve()
        if name not in models and place not in places.values() and place.is_dir():
            models[name], places[name] = replace(model, name=name), place
    rows = [_row(models[name], machine, settings, model_files) for name in sorted(models)]
    return models, places, rows


def _row(
    model: LocalModel, machine: fit.Machine, settings: Settings, model_files: Mapping[str, str]
) -> dict[str, JSON]:
    try:
        found = library.fit_of(model, machine, settings.memory_budget)
    except ModelError:
        found = None
    supported = model_files.get(model.model_type, model.model_type) in _architectures()
    return {
        "repo_id": model.name,
        "source": model.source if not model.source.startswith("folder:") else "folder",
        "model_type": model.model_type,
        "size_bytes": model.size_bytes,
        "quant_bits": model.bits,
        "max_context": None if found is None else found.max_context,
        "chat": model.has_chat_template,
        "vision": False,  # images are no input of this server
        "audio": False,
        "supported": supported,
        "support_tier": "text" if supported else "unsupported",
        "modified": _modified(model.folder),
        "assessment": None if found is None else _assessment(found),
    }


def _assessment(found: fit.Fit) -> dict[str, JSON]:
    context = min(fit.TYPICAL_CONTEXT, found.max_context)
    speed = found.decode_tps(context)
    return {
        "fits": found.fits(context),
        "max_safe_context": found.max_safe_context,
        "predicted_decode_tps": None if speed is None else round(speed, 1),
        "context_tokens": context,
        "total_bytes": found.total_bytes(context),
        "usable_bytes": found.usable_bytes,
    }


def _modified(folder: Path) -> int:
    try:
        return int((folder / "config.json").stat().st_mtime)
    except OSError:
        return 0


@cache
def _architectures() -> frozenset[str]:
    """The model files of the installed mlx-lm; nothing of it is imported."""
    spec = importlib.util.find_spec("mlx_lm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return frozenset(path.stem for place in places for path in Path(place, "models").glob("*.py"))
