"""GGUF files that clients upload, in pieces, until they are whole and become a model (floor 2).

    POST /api/imports {name, size, modified}   -> Uploads.begin    id, and how much is here
    PUT  /api/imports/{id}?offset=N  (bytes)   -> Uploads.add      at most a body's size at a time
    the last piece                             -> an import, a row of GET /downloads

A piece is appended where the last one ended, so an upload that broke off goes on, after a restart
too: its name on the disk is made of what the file is called, how long it is and when it changed. No
name from a request is part of a path. The header is read as soon as it is here: what is no GGUF
file, or one that cannot be imported, is refused before the rest is sent. Files are touched on
threads; the registry is the event loop's.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlite.errors import (
    BadRequest,
    Busy,
    Conflict,
    DiskFull,
    DownloadError,
    ModelError,
    NotFound,
)
from mlxlite.models.download import require_space
from mlxlite.models.gguf_config import plan_snapshot
from mlxlite.models.gguf_file import NotHere, read_gguf
from mlxlite.models.gguf_tokenizer import check_kind

FOLDER = "uploads"
PIECE_BYTES = 8 << 20  # a body is collected in memory, and its limit is 32 MiB
MOST_BYTES = 1 << 40
MOST_OPEN = 4
STALE_S = 86_400  # an upload that nobody went on with for a day is dropped
HEADER_BYTES = 64 << 20  # a header with the largest vocabularies takes a quarter of it
_MAGIC = b"GGUF"
_NAME = re.compile(r"[^\x00-\x1f/\\]{1,200}\.gguf", re.IGNORECASE)


@dataclass(slots=True)
class Upload:
    """One file on its way. offset: bytes that are here."""

    id: str
    name: str
    n_bytes: int
    path: Path
    offset: int = 0
    is_checked: bool = False  # its header was read and is good
    is_importing: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def row(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "size": self.n_bytes,
            "offset": self.offset,
            "piece_bytes": PIECE_BYTES,
        }


class Uploads:
    """All of a server."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER
        self._open: dict[str, Upload] = {}

    async def begin(self, name: Any, size: Any, modified: Any) -> Upload:
        """A new upload, or one to go on with. Raises BadRequest, Busy, DiskFull."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadRequest("name must be the name of a .gguf file", param="name")
        if type(size) is not int or not 24 <= size <= MOST_BYTES:
            raise BadRequest(f"size must be from 24 to {MOST_BYTES} bytes", param="size")
        if modified is not None and (type(modified) is not int or abs(modified) > 10**15):
            raise BadRequest("modified must be a time in milliseconds", param="modified")
        mark = f"{name}\0{size}\0{modified}".encode("utf-8", "replace")
        upload_id = hashlib.sha256(mark).hexdigest()[:24]
        if (upload := self._open.get(upload_id)) is not None:
            _require_idle(upload)
            return upload
        if len(self._open) >= MOST_OPEN:
            raise Busy(f"{MOST_OPEN} uploads are open; finish or cancel one of them")
        upload = Upload(upload_id, name, size, self._folder / f"{upload_id}.gguf")
        self._open[upload_id] = upload
        try:
            upload.offset = await asyncio.to_thread(self._prepare, upload)
        except BaseException:
            self._open.pop(upload_id, None)
            raise
        return upload

    def find(self, upload_id: str) -> Upload:
        """Raises NotFound."""
        if (upload := self._open.get(upload_id)) is None:
            raise NotFound(f"no upload {upload_id[:40]!r}", code="upload_not_found")
        return upload

    async def add(self, upload_id: str, offset: int, piece: bytes | bytearray) -> Upload:
        """Append a piece. `is_whole(upload)` says whether it was the last one.

        Raises NotFound; Conflict if the piece is not the next one, and its message holds which is;
        BadRequest if the file turns out to be none that can be imported, which drops it;
        DiskFull, which keeps it.
        """
        upload = self.find(upload_id)
        _require_idle(upload)
        if upload.lock.locked():
            raise Conflict("a piece of this upload is being written", code="already_running")
        async with upload.lock:
            if offset != upload.offset:
                raise Conflict(
                    f"offset: the next piece begins at {upload.offset}",
                    param="offset",
                    code="wrong_offset",
                )
            if offset + len(piece) > upload.n_bytes:
                raise BadRequest("the piece goes beyond the size that was told", param="size")
            try:
                upload.offset = await asyncio.to_thread(_append, upload, piece)
                if not upload.is_checked:
                    upload.is_checked = await asyncio.to_thread(_check, upload)
            except ModelError as error:
                await self._drop(upload)
                reason = error.message.removeprefix(f"{upload.path}: ")
                raise BadRequest(f"{upload.name}: {reason}", param="file") from None
            return upload

    async def cancel(self, upload_id: str) -> None:
        """Drop it. Raises NotFound."""
        upload = self.find(upload_id)
        _require_idle(upload)
        async with upload.lock:
            await self._drop(upload)

    def imported(self, upload: Upload) -> None:
        """The import of a whole file is over. If it failed, the file is still there, and a next
        attempt has only its last byte to send."""
        self._open.pop(upload.id, None)

    def rows(self) -> list[dict[str, Any]]:
        return [upload.row() for upload in self._open.values()]

    async def _drop(self, upload: Upload) -> None:
        self._open.pop(upload.id, None)
        await asyncio.to_thread(upload.path.unlink, missing_ok=True)

    def _prepare(self, upload: Upload) -> int:
        """Make room for a file; how much of it is here."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self._folder.glob("*.gguf"):
                is_open = path.stem in self._open
                if not is_open and time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink(missing_ok=True)
            upload.path.touch(mode=0o600)
            offset = upload.path.stat().st_size
            if offset > upload.n_bytes:
                os.truncate(upload.path, 0)
                offset = 0
        except OSError as error:
            raise _full(error, self._folder) from None
        # Beside the file there will be what it becomes.
        try:
            require_space(self._folder, upload.n_bytes - offset + upload.n_bytes * 3 // 2)
        except DownloadError as error:
            raise DiskFull(error.message.removeprefix(f"{self._folder}: ")) from None
        if offset and offset == upload.n_bytes:  # nothing would be sent, so nothing would happen
            os.truncate(upload.path, offset - 1)
            offset -= 1
        return offset


def is_whole(upload: Upload) -> bool:
    return upload.offset == upload.n_bytes


def _append(upload: Upload, piece: bytes | bytearray) -> int:
    """Write a piece; the new length. What a full disk took of it is given back."""
    before = upload.offset
    try:
        with open(upload.path, "r+b") as file:
            file.truncate(before)
            file.seek(before)
            file.write(piece)
    except OSError as error:
        try:
            os.truncate(upload.path, before)
        except OSError:
            pass  # the next piece tries it again
        raise _full(error, upload.path.parent) from None
    return before + len(piece)


def _check(upload: Upload) -> bool:
    """Whether the header is here and good; False: more of it is to come. Raises ModelError."""
    with open(upload.path, "rb") as file:
        if not _MAGIC.startswith(file.read(4)[: min(4, upload.offset)]):
            raise ModelError(f"{upload.path}: not a GGUF file: it does not begin with GGUF")
    try:
        with read_gguf(upload.path, upload.n_bytes) as gguf:
            check_kind(gguf)
            with suppress(NotHere):  # a few numbers among the weights; the import looks at them
                plan_snapshot(gguf)
    except NotHere:
        if upload.offset >= HEADER_BYTES:
            raise ModelError(f"{upload.path}: its header is of no sane length") from None
        return False
    return True


def _require_idle(upload: Upload) -> None:
    if upload.is_importing:
        raise Conflict(f"{upload.name} is being imported", code="already_running")


def _full(error: OSError, folder: Path) -> DiskFull:
    try:
        left = f"; {shutil.disk_usage(folder).free / 1e9:.2f} GB are free"
    except OSError:
        left = ""  # the reason alone must do
    return DiskFull(f"the upload cannot be written: {error.strerror or error}{left}")
