"""A server under test: started, killed and started again here, or one that runs already (floor 4).

Each is a process of its own with its own port, so that what is measured is what a user gets, and a
server that hangs costs its leg and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from mlxlite.bench.client import Base, RequestFailed, get

_POLL_S = 0.01  # another's process tells nobody that it is ready
_STOP_S = 15.0
_SHOWN_CHARS = 200


@dataclass(slots=True)
class Server:
    """command: starts it, without the port; None for one that runs already. ready: the path that
    answers 200 once it is up, not below `/v1`. model: what requests call the model."""

    name: str
    base: Base
    command: list[str] | None = None
    ready: str = "/v1/models"
    environ: dict[str, str] = field(default_factory=dict)
    model: str = "default_model"
    peak_bytes: int | None = None
    _child: subprocess.Popen[bytes] | None = None
    _errors: IO[bytes] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is started here."""
        return self.command is not None

    @property
    def is_up(self) -> bool:
        return not self.is_ours or (self._child is not None and self._child.poll() is None)

    def spawn(self) -> None:
        """Begin to start it, on a free port; `wait_ready` waits."""
        assert self.command is not None and not self.is_up
        self.stop()  # what is left of one that ended by itself
        self.base = replace(self.base, port=_free_port())
        self._errors = tempfile.TemporaryFile()
        self._child = subprocess.Popen(
            [*self.command, "--port", str(self.base.port)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", **self.environ},
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    async def wait_ready(self) -> None:
        """Until it answers. Raises RequestFailed, with its last line, if it ends instead."""
        while True:
            if self._child is not None and self._child.poll() is not None:
                raise RequestFailed(f"it ended instead of starting: {self._last_line()}")
            try:
                await get(self.base, self.ready, whole=True)
                return
            except RequestFailed:
                await asyncio.sleep(_POLL_S)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the process, if it is one of ours, and remember the most memory it ever held."""
        child, self._child = self._child, None
        if child is None:
            return
        now = _peak_bytes(child.pid)
        if now is not None:
            self.peak_bytes = max(now, self.peak_bytes or 0)
        child.send_signal(how)
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if self._errors is not None:
            self._errors.close()

    def _last_line(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no word"]
        return lines[-1][:_SHOWN_CHARS]


def run_once(command: list[str], timeout_s: float) -> None:
    """Run a command to its end. Raises RequestFailed if it fails."""
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RequestFailed(f"not done after {time.monotonic() - started:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no word"]
        raise RequestFailed(lines[-1][:_SHOWN_CHARS])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _peak_bytes(pid: int) -> int | None:
    """The most memory a process ever held; other systems than Linux keep no record of others."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = [int(row.split()[1]) * 1024 for row in status.splitlines() if "VmHWM" in row]
    return found[0] if found else None
