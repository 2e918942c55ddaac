"""The first half of a start: the port, the model's files, the engine thread (floor 4).

What can fail cheaply fails here, before anything heavy is imported: a port clash, a missing or
damaged model (spec 80 section 2). Then the engine thread starts to load, and only then is the rest
of the program imported, while the weights are read. So keep the imports of this file few.
"""

from __future__ import annotations

import functools
import logging
import socket
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from mlxlite import heap
from mlxlite.config import Settings
from mlxlite.http.listen import bind, bind_unix
from mlxlite.kvplan import Room
from mlxlite.models import fit, library
from mlxlite.models.safetensors_file import check_safetensors

if TYPE_CHECKING:
    from mlxlite.engine.worker import Worker

log = logging.getLogger(__name__)

_LEAST_CONTEXT = 2048


def start_engine(settings: Settings, model: library.LocalModel) -> Worker:
    """Check a model's files and start the engine on it; returns at once, loading goes on.

    Raises ModelError, one line, for a damaged file or a memory budget that leaves no room, and
    BackendMissing where MLX has no backend.
    """
    heap.settle()
    for file in library.weight_files(model.folder):
        check_safetensors(file)  # before MLX sees it
    if settings.memory_budget is not None:
        machine = fit.guessed_machine(settings.dtype)
        found = library.fit_of(model, machine, settings.memory_budget)
        fit.require_room(found, model.name)
    from mlxlite.engine.worker import Worker, WorkerOptions  # imports mlx

    worker = Worker(
        WorkerOptions(
            folder=model.folder,
            dense_folder=dense_folder(settings, model.folder),
            kernel_folder=settings.home / "kernels",
            dtype=settings.dtype,
            max_rows=settings.batch,
            max_waiting=settings.queue,
            replays=settings.replay == "on",
            prompt_cache_bytes=int(settings.prompt_cache * 2**30),
            room=functools.partial(_room, settings, model),
        )
    )
    worker.start()
    return worker


def _room(settings: Settings, model: library.LocalModel, kind: str, memory_bytes: int) -> Room:
    """What memory allows, by arithmetic from the model's files (decision D18). With too little of
    it the context is shorter, never none: only a budget that was asked for refuses a model."""
    found = library.fit_of(
        model, fit.machine(kind, memory_bytes, settings.dtype), settings.memory_budget
    )
    context = max(found.max_safe_context, min(_LEAST_CONTEXT, found.max_context))
    if context < found.max_context:
        log.warning("memory allows a context of %d tokens, not %d", context, found.max_context)
    transient = found.transient_bytes(min(fit.TYPICAL_CONTEXT, context))
    left = found.usable_bytes - found.weights.n_bytes - transient
    room_bytes = max(left, found.plan.row_bytes(context))
    return Room(found.usable_bytes, found.plan, room_bytes, context)


def dense_folder(settings: Settings, folder: Path) -> Path:
    """Where a model's dense copy lives: beside a snapshot of our own, else in our home."""
    if folder.is_relative_to(settings.home):
        return folder / "dense"
    return settings.home / "dense" / sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def listen(settings: Settings) -> socket.socket:
    """The bound socket of these settings. Raises MlxliteError, one line, if it cannot be had."""
    if settings.unix is not None:
        return bind_unix(settings.unix)
    return bind(settings.host, settings.port)
