"""`python -m mlxlite.models.child`: one download, import or search in a process of its own.

A server starts it (`mlxlite/downloads.py`), so that the hub's client and numpy never share its
interpreter, and because only a process can be stopped at any moment. Lines of JSON both ways:

    stdin    {"do": "get", "home": "/h", "model": "org/name", "file": null}
    stdout   {"stage": "download", "received": 1, "total": 9, "files": 0, "files_total": 3,
              "file": "model.safetensors", "resumes": true}
             {"done": {"name": "org/name"}}   or   {"error": "one line"}

Stdin stays open; when it ends, the server is gone and this process group ends too. It must lead a
group of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from mlxlite.errors import MlxliteError
from mlxlite.models import hub, hub_token, install
from mlxlite.models.progress import Arrived, Progress

TOLD_EVERY_S = 0.25


class Told(Progress):
    """Progress as lines of JSON, from a thread of its own while something goes on."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._stage = "prepare"
        self._total_bytes = self._total_files = 0
        self._look: Callable[[], Arrived] | None = None
        self._arrived = Arrived(0)
        self._resumes = True
        self._is_over = False
        threading.Thread(target=self._tell_on, daemon=True).start()

    def watch(
        self, total_bytes: int, total_files: int, look: Callable[[], Arrived], resumes: bool = True
    ) -> None:
        with self._lock:
            self._stage, self._look, self._resumes = "download", look, resumes
            self._total_bytes, self._total_files = total_bytes, total_files

    def start(self, label: str, total_bytes: int) -> None:
        with self._lock:
            self._stage, self._look = label.partition(" ")[0], None
            self._total_bytes, self._total_files = total_bytes, 0
            self._arrived = Arrived(0)

    def advance(self, n_bytes: int) -> None:
        with self._lock:
            self._arrived = Arrived(self._arrived.n_bytes + n_bytes)

    def end(self, line: dict[str, Any]) -> None:
        """The last line."""
        with self._lock:
            self._is_over = True
            self._write(line)

    def tell(self) -> None:
        with self._lock:
            if self._is_over:
                return
            if self._look is not None:
                self._arrived = self._look()
            arrived = self._arrived
            self._write(
                {
                    "stage": self._stage,
                    "received": arrived.n_bytes,
                    "total": self._total_bytes,
                    "files": arrived.files,
                    "files_total": self._total_files,
                    "file": arrived.file,
                    "resumes": self._resumes,
                }
            )

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()

    def _tell_on(self) -> None:
        while True:
            self.tell()
            time.sleep(TOLD_EVERY_S)  # a rate of reports, nothing is waited for


def work(asked: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do what a line asks for. Raises MlxliteError."""
    home = Path(asked["home"])
    if asked["do"] == "search":
        return {"models": hub.search(asked["query"], hub_token.read(home))}
    if asked["do"] == "import":
        uploaded = Path(asked["path"])
        model = install.get_upload(uploaded, asked["model"], home, progress)
        uploaded.unlink(missing_ok=True)
    elif asked.get("file"):
        model = install.get_hub_file(asked["model"], asked["file"], home, progress)
    else:
        model = install.get(asked["model"], home, progress)
    return {"name": model.name, "size_bytes": model.size_bytes}


def main() -> int:
    asked = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_server, daemon=True).start()
    # What libraries print goes to stderr: stdout is for our lines alone.
    told = Told(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    try:
        done = work(asked, told)
    except MlxliteError as error:
        told.end({"error": error.message.replace("\n", " ")})
        return 1
    told.tell()  # the last figures
    told.end({"done": done})
    return 0


def _end_with_server() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
