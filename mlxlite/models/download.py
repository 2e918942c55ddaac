"""Model files on their way: room on the disk, copies that go on where they stopped, checks.

Whatever goes wrong is one DownloadError of one line. Wheels are in `wheel`, the hub in `hub`.

Invariant: a path that a function here puts something at is whole, and verified.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import IO, Any

from mlxlite.errors import DownloadError
from mlxlite.models.progress import Progress

CHUNK_BYTES = 1 << 20
KEEP_FREE_BYTES = 1 << 30  # a full disk breaks more than this download


def require_space(folder: Path, n_bytes: int) -> None:
    """DownloadError unless `n_bytes` fit on the disk of the existing `folder`, with 1 GiB left."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < n_bytes + KEEP_FREE_BYTES:
        raise DownloadError(
            f"{folder}: {n_bytes / 1e9:.2f} GB are needed and 1.07 GB must stay free, "
            f"but only {free_bytes / 1e9:.2f} GB are; free some space or set MLXLITE_HOME"
        )


def file_sha256(path: Path) -> str:
    """The sha256 of a whole file, as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, target: Path, sha256: str, progress: Progress) -> None:
    """Copy and verify, through `<target>.incomplete`; what an earlier attempt left is continued."""
    incomplete = target.with_name(target.name + ".incomplete")
    try:
        total_bytes = source.stat().st_size
        done_bytes = incomplete.stat().st_size if incomplete.exists() else 0
        if done_bytes > total_bytes:
            done_bytes = 0
        with open(source, "rb") as reader, open(incomplete, "r+b" if done_bytes else "wb") as out:
            digest = hashlib.sha256()
            # 1. The part that is there counts as its own bytes: read them back, not the source's.
            for _ in range(0, done_bytes, CHUNK_BYTES):
                chunk = out.read(min(CHUNK_BYTES, done_bytes - out.tell()))
                digest.update(chunk)
            # 2. The rest.
            reader.seek(done_bytes)
            copy_stream(
                reader, out, digest, f"copy {source.name}", total_bytes - done_bytes, progress
            )
    except OSError as error:
        raise DownloadError(f"{source}: cannot be copied: {error.strerror or error}") from None
    keep_verified(incomplete, target, digest.hexdigest(), sha256, str(source))


def copy_stream(
    reader: IO[bytes], out: IO[bytes], digest: Any, label: str, n_bytes: int, progress: Progress
) -> None:
    """Copy and sync what a reader gives, `n_bytes` of it, and feed the digest."""
    progress.start(label, n_bytes)
    try:
        while chunk := reader.read(CHUNK_BYTES):
            out.write(chunk)
            digest.update(chunk)
            progress.advance(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    finally:
        progress.finish()


def keep_verified(incomplete: Path, target: Path, found: str, wanted: str, origin: str) -> None:
    """Give a file its name if its sha256 is right, else drop it: DownloadError."""
    if found != wanted:
        # Nothing tells which bytes are wrong, so there is nothing to continue from.
        incomplete.unlink()
        raise DownloadError(f"{origin}: arrived damaged: sha256 {found}, expected {wanted}")
    incomplete.replace(target)
