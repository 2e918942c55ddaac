"""Downloads and imports that clients ask for: started, watched, cancelled, one a target (floor 2).

    POST /downloads -> Downloads.start -> a child process (models/child) -> rows of GET /downloads

Each runs in a child of its own, in a process group of its own, so that it can be stopped at any
moment and never takes the interpreter from the event loop. What one leaves behind when it is killed
is what `models/install` and `models/hub` leave: never half a model, and what the next attempt can
go on with. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlxlite
from mlxlite.errors import BadRequest, Busy, Conflict, HubFault, NotFound
from mlxlite.models.catalogue import CATALOGUE
from mlxlite.models.library import hub_cache
from mlxlite.types import JSON

log = logging.getLogger(__name__)

MOST_AT_ONCE = 4
MOST_ENDED = 5  # rows of what is over (spec 70 section 8)
RATE_WINDOW_S = 5.0
SEARCH_S = 30.0
MOST_SEARCHES = 2
LINE_BYTES = 1 << 20  # a search's answer is one line

# Answers come first: what a child does at its start alone (imports) can hold up the event loop for
# ten milliseconds where cores are few.
_CALMLY = (nice, "-n", "10") if (nice := shutil.which("nice")) else ()

# Names as the hub makes them: two parts of letters, digits, `-`, `_` and `.`, 96 at most, without
# `--` and `..`, which its cache gives a meaning. Whatever passes here can be part of a file's name.
_REPOSITORY = re.compile(
    r"(?=.{3,96}\Z)(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.A
)
_GGUF = re.compile(r"(?=.{6,200}\Z)(?:[A-Za-z0-9][\w. +-]*/){0,3}[A-Za-z0-9][\w. +-]*\.gguf", re.A)


@dataclass(frozen=True, slots=True)
class Target:
    """What to bring: a name of the catalogue, a hub repository, one GGUF file of one, or a file
    that was uploaded (`upload`: where it lies)."""

    model: str
    file: str | None = None
    upload: Path | None = None

    @property
    def key(self) -> str:
        if self.upload is not None:
            return f"upload:{self.upload.name}"
        return self.model if self.file is None else f"{self.model}/{self.file}"


def read_target(model: Any, file: Any = None) -> Target:
    """A target as a request names it. Raises BadRequest; a request never names a path (D13)."""
    if not isinstance(model, str) or not model:
        raise BadRequest("model must be a catalogue name or a hub id (org/name)", param="model")
    if model not in CATALOGUE and not _REPOSITORY.fullmatch(model):
        raise BadRequest(
            f"model: {model[:100]!r} is neither a name of the catalogue nor a hub id (org/name)",
            param="model",
        )
    if file is None:
        return Target(model)
    if not isinstance(file, str) or not _GGUF.fullmatch(file) or ".." in file:
        raise BadRequest("file must be the name of a .gguf file of that repository", param="file")
    if model in CATALOGUE:
        raise BadRequest("file goes with a hub id, not with a catalogue name", param="file")
    return Target(model, file)


class Download:
    """One run. state: running, done, failed or cancelled."""

    def __init__(self, number: int, target: Target, clock: Callable[[], float]) -> None:
        self.id = f"dl_{number}"
        self.target = target
        self.state = "running"
        self.name: str | None = None  # of the local model, once it is one
        self.error: str | None = None
        self.started_at = time.time()
        self.finished_at: float | None = None
        self.told: Mapping[str, Any] = {}  # the newest line of progress
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # (s, bytes) of the last seconds
        self.is_cancelled = False
        self.process: asyncio.subprocess.Process | None = None
        self.task: asyncio.Task[None] | None = None

    def tell(self, line: Mapping[str, Any]) -> None:
        if line.get("stage") != self.told.get("stage"):
            self._samples.clear()
        self.told = line
        now_s = self._clock()
        self._samples.append((now_s, int(line.get("received", 0))))
        while now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    @property
    def bytes_per_s(self) -> float:
        if self.state != "running" or len(self._samples) < 2:
            return 0.0
        (from_s, from_bytes), (to_s, to_bytes) = self._samples[0], self._samples[-1]
        return max(0.0, (to_bytes - from_bytes) / max(to_s - from_s, 1e-3))

    def row(self) -> dict[str, JSON]:
        """As `GET /downloads` shows it (spec 70 section 8)."""
        told = self.told
        return {
            "id": self.id,
            "repo_id": self.target.model,
            "file": self.target.file,
            "kind": "download" if self.target.upload is None else "import",
            "state": self.state,
            "stage": told.get("stage", "prepare"),
            "current_file": told.get("file"),
            "received_bytes": told.get("received", 0),
            "total_bytes": told.get("total", 0),
            "resumes": told.get("resumes", True),
            "files_done": told.get("files", 0),
            "files_total": told.get("files_total", 0),
            "bytes_per_sec": round(self.bytes_per_s),
            "started_at": round(self.started_at, 3),
            "finished_at": None if self.finished_at is None else round(self.finished_at, 3),
            "error": self.error,
            "model": self.name,
        }


class Downloads:
    """All of a server. changed: called when a new model is there."""

    def __init__(self, home: Path, changed: Callable[[], None]) -> None:
        self._home = home
        self._changed = changed
        self._runs: dict[str, Download] = {}
        self._numbers = itertools.count(1)
        self._searching = 0
        self._is_closed = False

    def start(self, target: Target, ended: Callable[[Download], None] | None = None) -> Download:
        """Begin to bring it; an ended row of the same target goes. Raises Conflict if it is under
        way, Busy if too many are."""
        if self._is_closed:
            raise Busy("the server is stopping")
        running = [run for run in self._runs.values() if run.state == "running"]
        if any(run.target.key == target.key for run in running):
            raise Conflict(f"{target.key} is being fetched already", code="already_running")
        if len(running) >= MOST_AT_ONCE:
            raise Busy(f"{MOST_AT_ONCE} downloads are under way; wait for one of them")
        for run in list(self._runs.values()):
            if run.target.key == target.key:
                del self._runs[run.id]
        run = Download(next(self._numbers), target, asyncio.get_running_loop().time)
        self._runs[run.id] = run
        run.task = asyncio.create_task(self._bring(run, ended))
        return run

    def find(self, download_id: str) -> Download:
        """Raises NotFound."""
        if (run := self._runs.get(download_id)) is None:
            raise NotFound(f"no download {download_id[:40]!r}", code="download_not_found")
        return run

    async def cancel(self, download_id: str) -> Download:
        """Stop it and wait until it has; one that is over leaves the list. Raises NotFound."""
        run = self.find(download_id)
        if run.state != "running":
            del self._runs[run.id]
            return run
        run.is_cancelled = True
        _kill(run.process)
        if run.task is not None:
            await asyncio.wait([run.task])
        return run

    def rows(self) -> list[dict[str, JSON]]:
        """Newest first: all that run, and the last that ended."""
        runs = list(reversed(self._runs.values()))
        ended = [run for run in runs if run.state != "running"][:MOST_ENDED]
        return [run.row() for run in runs if run.state == "running" or run in ended]

    def fetched_repositories(self) -> list[str]:
        """Hub repositories that are being fetched now."""
        return [run.target.model for run in self._runs.values() if run.state == "running"]

    async def search(self, query: str) -> list[dict[str, JSON]]:
        """What the hub has. Raises HubFault, and Busy if others are searching."""
        if self._searching >= MOST_SEARCHES:
            raise Busy("other searches are under way")
        self._searching += 1
        process = None
        try:
            async with asyncio.timeout(SEARCH_S):
                process = await _child({"do": "search", "query": query, "home": str(self._home)})
                *_, last = [line async for line in _lines(process)] or [{}]
        except TimeoutError:
            raise HubFault(f"the hub did not answer within {SEARCH_S:g} s") from None
        finally:
            self._searching -= 1
            _kill(process)
            if process is not None:
                await process.wait()
        if "done" not in last:
            raise HubFault(str(last.get("error", "the search broke off")))
        found: list[dict[str, JSON]] = last["done"]["models"]
        return found

    async def close(self) -> None:
        """Stop all; what arrived is kept for the next time."""
        self._is_closed = True
        tasks = []
        for run in self._runs.values():
            if run.state == "running" and run.task is not None:
                run.is_cancelled = True
                _kill(run.process)
                tasks.append(run.task)
        if tasks:
            await asyncio.wait(tasks)

    async def _bring(self, run: Download, ended: Callable[[Download], None] | None) -> None:
        try:
            run.name, run.error = await self._run(run)
        except Exception as error:  # of the process itself, such as none left
            log.exception("%s could not be fetched", run.target.key)
            run.error = f"the download could not be started: {error}"
        finally:
            run.finished_at = time.time()
            run.process = None
            run.state = "done" if run.name is not None else "failed"
            if run.name is None and run.is_cancelled:
                run.state, run.error = "cancelled", None
            log.info("%s: %s%s", run.target.key, run.state, f", {run.error}" if run.error else "")
            self._forget_oldest()
            self._changed()
            if ended is not None:
                ended(run)

    async def _run(self, run: Download) -> tuple[str | None, str | None]:
        """The model's name, or what went wrong."""
        target = run.target
        asked = {"do": "get", "home": str(self._home), "model": target.model, "file": target.file}
        if target.upload is not None:
            asked |= {"do": "import", "path": str(target.upload)}
        run.process = process = await _child(asked)
        try:
            if run.is_cancelled:  # meanwhile
                _kill(process)
            found: tuple[str | None, str | None] = (None, None)
            async for line in _lines(process):
                if "done" in line:
                    found = (str(line["done"]["name"]), None)
                elif "error" in line:
                    found = (None, self._shown(str(line["error"])))
                else:
                    run.tell(line)
            code = await process.wait()
        finally:
            _kill(process)
        return found if any(found) else (None, f"the download process ended early (code {code})")

    def _shown(self, error: str) -> str:
        """Without where things lie on this machine, which a client need not know."""
        for folder in (self._home, hub_cache()):
            error = error.replace(f"{folder}/", "").replace(str(folder), "the disk")
        return error

    def _forget_oldest(self) -> None:
        ended = [run.id for run in self._runs.values() if run.state != "running"]
        for download_id in ended[:-MOST_ENDED]:
            del self._runs[download_id]


async def _child(asked: Mapping[str, Any]) -> asyncio.subprocess.Process:
    package = str(Path(mlxlite.__file__).parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        *_CALMLY,
        sys.executable,
        "-P",  # the folder that we were started in is no place for modules
        "-m",
        "mlxlite.models.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": tempfile.gettempdir(),  # the engine's kernels may have taken the variable
        },
        start_new_session=True,
        limit=LINE_BYTES,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asked).encode() + b"\n")  # and stays open: see models/child
    return process


async def _lines(process: asyncio.subprocess.Process) -> Any:
    """The JSON lines that a child says, to its end."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        with suppress(ValueError):  # cut off by a kill
            yield json.loads(line)


def _kill(process: asyncio.subprocess.Process | None) -> None:
    """The whole group: pip runs in a process of its own."""
    if process is not None and process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
