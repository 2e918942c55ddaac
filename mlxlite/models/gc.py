"""What of the hub's cache can go: superseded snapshots, and blobs that no snapshot needs.

    models--org--name/refs/main            the commit that the name means now
                      snapshots/<commit>/  links into blobs/
                      blobs/<hash>         the bytes

`plan` only looks; `execute` plans anew and deletes. A snapshot is superseded when no ref names it
and another one does; with files of its own among the links it is skipped, since those exist nowhere
else. A blob is dead when no link of a snapshot that stays leads to it. What is younger than an hour
stays: another program may be about to link it. So does the model that is being served, whatever
its age, and every link is looked at, never followed.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 3600
PARTIAL_GRACE_S = 7 * 86_400  # of downloads that could still be resumed


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Of one repository. snapshots and blobs: what goes; skipped: superseded, but not to be
    deleted."""

    repository: str
    snapshots: tuple[Path, ...]
    skipped: tuple[Path, ...]
    blobs: tuple[Path, ...]
    n_bytes: int


def plan(cache: Path, in_use: Collection[Path], now_s: float | None = None) -> list[Reclaim]:
    """What could go from a hub cache. in_use: folders of models that are loaded or fetched."""
    now_s = time.time() if now_s is None else now_s
    used = {_real(folder) for folder in in_use}
    found = []
    for repository in _entries(cache):
        if repository.name.startswith("models--") and _is_folder(repository):
            name = repository.name.removeprefix("models--").replace("--", "/", 1)
            reclaim = _of(repository, name, used, now_s)
            if reclaim.snapshots or reclaim.skipped or reclaim.blobs:
                found.append(reclaim)
    return sorted(found, key=lambda each: each.repository)


def execute(cache: Path, in_use: Collection[Path], now_s: float | None = None) -> list[Reclaim]:
    """Delete it; gives what is gone. What cannot be deleted stays and is not counted."""
    done = []
    for reclaim in plan(cache, in_use, now_s):
        snapshots = tuple(path for path in reclaim.snapshots if _drop_folder(path))
        if len(snapshots) < len(reclaim.snapshots):
            continue  # something still links to its blobs
        gone_bytes, blobs = 0, []
        for blob in reclaim.blobs:
            size = _size(blob)
            try:
                blob.unlink()
            except OSError:
                continue
            gone_bytes += size
            blobs.append(blob)
        done.append(Reclaim(reclaim.repository, snapshots, (), tuple(blobs), gone_bytes))
    return done


def _of(repository: Path, name: str, used: set[Path], now_s: float) -> Reclaim:
    snapshots = [path for path in _entries(repository / "snapshots") if _is_folder(path)]
    named = set(_refs(repository / "refs"))
    current = [path for path in snapshots if path.name in named]
    if not current and snapshots:  # nothing says which one counts: the newest does
        current = [max(snapshots, key=_changed_s)]
    gone: list[Path] = []
    skipped: list[Path] = []
    for path in snapshots:
        # A snapshot of ours that is served may also be the folder above a linked file.
        if path in current or _real(path) in used or now_s - _changed_s(path) < GRACE_S:
            continue
        (gone if _has_only_links(path) else skipped).append(path)
    if _real(repository) in used:  # it is being fetched
        return Reclaim(name, (), (), (), 0)
    needed = {
        target
        for path in snapshots
        if path not in gone
        for link in _files(path)
        if (target := _linked(link)) is not None
    }
    dead = [
        blob
        for blob in _entries(repository / "blobs")
        if not _is_folder(blob)
        and blob.name not in needed
        and now_s - _changed_s(blob) >= _grace_s(blob)
    ]
    return Reclaim(name, tuple(gone), tuple(skipped), tuple(dead), sum(map(_size, dead)))


def _grace_s(blob: Path) -> float:
    return PARTIAL_GRACE_S if blob.name.endswith(".incomplete") else GRACE_S


def _refs(folder: Path) -> Iterator[str]:
    """The commits that branches, tags and pull requests name."""
    for path in _files(folder):
        try:
            yield path.read_text(encoding="ascii")[:100].strip()
        except (OSError, UnicodeDecodeError):
            continue


def _has_only_links(folder: Path) -> bool:
    return all(path.is_symlink() for path in _files(folder))


def _linked(link: Path) -> str | None:
    """The name of the blob that a link of a snapshot leads to."""
    try:
        target = os.readlink(link)
    except OSError:
        return None
    return os.path.basename(target)


def _files(folder: Path) -> Iterator[Path]:
    """All that is no folder, below a folder; links are not followed."""
    for where, folders, names in os.walk(folder):
        for name in (*names, *folders):
            path = Path(where, name)
            if not _is_folder(path):
                yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    """Itself, not through a link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _changed_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return time.time()


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _drop_folder(path: Path) -> bool:
    try:
        shutil.rmtree(path)
    except OSError:
        return False
    return True
