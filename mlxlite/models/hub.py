"""The Hugging Face hub: whole repositories, single GGUF files, search.

mlxlite itself opens no connection: `huggingface_hub` does, imported on first use, so the user's own
settings count (`HF_ENDPOINT`, proxies, offline switches). From 1.22 on that client keeps nothing of
a file that did not arrive whole, so large files are brought here first, by its own `http_get`, into
`blobs/<sha256>.incomplete`, where a later run goes on. Its `snapshot_download` then finds them and
adds the small ones and the links.

Invariants: what is called a blob is whole and has the sha256 that it is named by. The weights of a
repository are linked last, so a run that is killed leaves nothing that looks like a model. No *.py
is fetched: code from a repository is never run.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mlxlite.errors import DownloadError
from mlxlite.models.download import file_sha256, keep_verified, require_space
from mlxlite.models.progress import Arrived, Progress

# What a model needs from a hub repository.
PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.jinja", "*.txt")
WEIGHTS = "*.safetensors"
SOURCE = "source.gguf"  # what a GGUF file is called until it is imported

FILES_AT_ONCE = 4
PIECE_BYTES = 256 << 10
# What the hub serves by plain HTTP; larger ones come by its own protocol, and do not resume.
MOST_HTTP_BYTES = 50_000_000_000
FOUND_AT_MOST = 30
_GGUF_NAMES = 40  # that a search shows of a repository

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a repository. mark: what its blob is called, if the hub told it."""

    name: str
    n_bytes: int
    sha256: str | None
    mark: str | None


def fetch_repository(
    repository: str, cache: Path, progress: Progress, token: str | None = None
) -> Path:
    """Download what a model needs of `org/name` into the hub's cache; give the snapshot's folder.

    Raises DownloadError, one line. What arrived of large files is kept for the next attempt.
    """
    import huggingface_hub as hub

    def fetch() -> Path:
        cache.mkdir(parents=True, exist_ok=True)
        commit, files = _listed(hub, repository, token)
        wanted = [f for f in files if any(fnmatch.fnmatch(f.name, p) for p in PATTERNS)]
        if not any(fnmatch.fnmatch(file.name, WEIGHTS) for file in wanted):
            raise DownloadError(
                f"{repository}: has no .safetensors file; one of its .gguf files, if it has any, "
                f"can be imported instead"
            )
        folder = cache / ("models--" + repository.replace("/", "--"))
        if not progress.is_visible:
            hub.utils.disable_progress_bars()
        seen = _Seen(folder, commit, wanted)
        require_space(cache, sum(file.n_bytes for file in wanted) - seen.look().n_bytes)
        progress.watch(sum(file.n_bytes for file in wanted), len(wanted), seen.look)
        blobs = folder / "blobs"

        def bring(file: _File) -> None:
            assert file.sha256 is not None
            url = hub.hf_hub_url(repository, file.name, revision=commit)
            headers = hub.utils.build_hf_headers(token=token)
            _bring(url, blobs / file.sha256, file.n_bytes, file.sha256, headers)

        _each(bring, [file for file in wanted if _is_ours(file)])
        for patterns in ([p for p in PATTERNS if p != WEIGHTS], list(PATTERNS)):
            snapshot = hub.snapshot_download(
                repository, cache_dir=str(cache), allow_patterns=patterns, token=token
            )
        return Path(snapshot)

    return _told(repository, fetch)


def fetch_file(
    repository: str, name: str, folder: Path, progress: Progress, token: str | None = None
) -> Path:
    """Download one GGUF file of `org/name` as `<folder>/source.gguf`, resumably. DownloadError."""
    import huggingface_hub as hub

    def fetch() -> Path:
        commit, files = _listed(hub, repository, token)
        file = next((file for file in files if file.name == name), None)
        if file is None or not _is_ours(file):
            raise DownloadError(f"{repository}: has no file {name!r} that could be fetched")
        if not progress.is_visible:
            hub.utils.disable_progress_bars()
        target = folder / SOURCE
        incomplete = target.with_name(target.name + ".incomplete")

        def look() -> Arrived:
            return Arrived(_size(target) or _size(incomplete) or 0, 0, name)

        # Beside the file there will be what it becomes (`gguf_import.snapshot_bytes`).
        require_space(folder, file.n_bytes - look().n_bytes + file.n_bytes * 3 // 2)
        progress.watch(file.n_bytes, 1, look)
        if target.exists() and file_sha256(target) != file.sha256:
            target.unlink()  # of another revision
        assert file.sha256 is not None
        url = hub.hf_hub_url(repository, name, revision=commit)
        headers = hub.utils.build_hf_headers(token=token)
        _bring(url, target, file.n_bytes, file.sha256, headers)
        return target

    return _told(repository, fetch)


def fetch_url(url: str, target: Path, n_bytes: int, sha256: str, progress: Progress) -> None:
    """Download a file from anywhere on the web by the hub's client, without its token, resumably.

    Raises DownloadError.
    """
    from huggingface_hub.utils import disable_progress_bars

    if not progress.is_visible:
        disable_progress_bars()
    _told(urlsplit(url).netloc, lambda: _bring(url, target, n_bytes, sha256, {}))


def search(query: str, token: str | None = None) -> list[dict[str, Any]]:
    """Models of the hub whose names hold the query, most downloaded first. Raises DownloadError.

    Row: id, downloads, likes, gated, updated (Unix s), licence, task, parameters, size_bytes (of
    the safetensors), safetensors, gguf (names of such files, the first 40). None: the hub does not
    tell.
    """
    import huggingface_hub as hub

    expand = ["downloads", "likes", "gated", "lastModified", "tags", "pipeline_tag"]
    expand += ["safetensors", "siblings"]

    def ask() -> list[dict[str, Any]]:
        found = hub.HfApi(token=token).list_models(
            search=query, sort="downloads", limit=FOUND_AT_MOST, expand=expand
        )
        return [_row(model) for model in found]

    return _told("search", ask)


# Bytes of a value, by the names that safetensors gives its types; packed ones count as stored.
_VALUE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}


def _row(model: Any) -> dict[str, Any]:
    names = [str(file.rfilename) for file in getattr(model, "siblings", None) or []]
    tags = [str(tag) for tag in getattr(model, "tags", None) or []]
    told = getattr(model, "safetensors", None)
    counts = dict(getattr(told, "parameters", None) or {})
    updated = getattr(model, "last_modified", None)
    licences = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    gguf = sorted(name for name in names if name.lower().endswith(".gguf"))
    return {
        "id": str(model.id),
        "downloads": getattr(model, "downloads", None),
        "likes": getattr(model, "likes", None),
        "gated": bool(getattr(model, "gated", False)),
        "updated": None if updated is None else int(updated.timestamp()),
        "licence": licences[0] if licences else None,
        "task": getattr(model, "pipeline_tag", None),
        "parameters": getattr(told, "total", None),
        "size_bytes": sum(n * _VALUE_BYTES.get(kind, 1) for kind, n in counts.items()) or None,
        "safetensors": any(name.endswith(".safetensors") for name in names),
        "gguf": gguf[:_GGUF_NAMES],
    }


# ------------------------------------------------------------------------------------- within


def _told(what: str, work: Callable[[], T]) -> T:
    """Run it; what the client raises becomes one line."""
    try:
        return work()
    except DownloadError:
        raise
    # The client's errors come from three HTTP libraries and share no base class; this is a border.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DownloadError(
            f"{what}: the hub's client could not fetch it: {reason[:300]}"
        ) from None


def _listed(hub: Any, repository: str, token: str | None) -> tuple[str, list[_File]]:
    """The newest commit of a repository, and its files."""
    told = hub.HfApi(token=token).model_info(repository, files_metadata=True)
    files = []
    for file in told.siblings or []:
        lfs = getattr(file, "lfs", None)
        sha256 = getattr(lfs, "sha256", None)
        mark = sha256 or getattr(file, "blob_id", None)
        files.append(_File(file.rfilename, file.size or 0, sha256, mark))
    return getattr(told, "sha", None) or "main", files


def _is_ours(file: _File) -> bool:
    return file.sha256 is not None and 0 < file.n_bytes <= MOST_HTTP_BYTES


class _Seen:
    """What of a repository is on the disk."""

    def __init__(self, folder: Path, commit: str, files: list[_File]) -> None:
        self._folder = folder
        self._commit = commit
        self._files = files

    def look(self) -> Arrived:
        n_bytes = n_files = 0
        coming = None
        for file in self._files:
            if (self._folder / "snapshots" / self._commit / file.name).exists():
                n_bytes, n_files = n_bytes + file.n_bytes, n_files + 1
                continue
            here = 0
            if file.mark is not None:
                blob = self._folder / "blobs" / file.mark
                here = _size(blob) or _size(blob.with_name(file.mark + ".incomplete")) or 0
            n_bytes += min(here, file.n_bytes)
            if coming is None and here < file.n_bytes:
                coming = file.name
        return Arrived(n_bytes, n_files, coming)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _bring(url: str, target: Path, n_bytes: int, sha256: str, headers: dict[str, Any]) -> None:
    """Bring one file to `target`, whole and verified, through `<target>.incomplete`."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get

    # It writes nothing before a piece is whole, and 10 MB, its own size, would be lost with a kill.
    constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
    target.parent.mkdir(parents=True, exist_ok=True)
    incomplete = target.with_name(target.name + ".incomplete")
    while not target.exists():
        with open(incomplete, "ab", buffering=0) as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # another mlxlite may be bringing it
            if not _is_at(incomplete, out.fileno()):
                continue  # it has just finished
            done_bytes = os.fstat(out.fileno()).st_size
            if done_bytes > n_bytes:
                out.truncate(0)
                done_bytes = 0
            http_get(url, out, resume_size=done_bytes, headers=headers, expected_size=n_bytes)
            os.fsync(out.fileno())
            name = url.rpartition("/")[2]
            keep_verified(incomplete, target, file_sha256(incomplete), sha256, name)


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one that the path names now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _each(work: Callable[[_File], None], files: Iterable[_File]) -> None:
    """Several at a time; raises the first error. The threads end with the process, so that an
    interrupt need not wait for them."""
    waiting, errors = deque(files), deque[BaseException]()

    def run() -> None:
        while not errors:
            try:
                file = waiting.popleft()
            except IndexError:
                return
            try:
                work(file)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(FILES_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
