"""Where the npm clients are, and what keeps them on this machine: only loopback answers.

`make test-npm` runs these tests in a network namespace of their own where the system lets it; in
any case every proxy variable points to a door that notes who knocks and lets nobody out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import socketserver
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clients_npm.stage import QWEN, Stage
from tests.live import ROOT

NPM = ROOT / ".venv" / "npm"
SCRIPTS = Path(__file__).parent
THINKER = QWEN + "{# <think> #}"
DEADLINE_S = 90  # of one client; they take a few seconds


class Door(socketserver.ThreadingTCPServer):
    """Stands where a proxy would. knocks: the request lines of those who wanted out."""

    daemon_threads = True

    def __init__(self) -> None:
        self.knocks: list[str] = []
        super().__init__(("127.0.0.1", 0), _Doorman)
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Doorman(socketserver.StreamRequestHandler):
    server: Door

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            self.server.knocks.append(self.rfile.readline(1000).decode("latin-1").strip())


def raise_loopback() -> None:
    """A fresh network namespace has its loopback down; only its root can change that."""
    up = struct.pack("16sh", b"lo", 1)  # IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with contextlib.suppress(OSError):
            fcntl.ioctl(sock, 0x8914, up)  # SIOCSIFFLAGS


def is_alone() -> bool:
    """Whether there is no way out: a datagram socket finds no route to a documentation address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return sock.connect_ex(("192.0.2.1", 9)) == errno.ENETUNREACH


@pytest.fixture(scope="session")
def door() -> Iterator[Door]:
    if not (NPM / "node_modules").is_dir():
        pytest.skip("not set up: `make test-npm` does it")
    if is_alone():
        raise_loopback()
    door = Door()
    yield door
    door.close()


@pytest.fixture(scope="module")
def stage(door: Door, tiny_folder: Path) -> Iterator[Stage]:
    with Stage(tiny_folder, THINKER) as stage:
        yield stage


@dataclass
class Desk:
    """A client's own home and working folder, and how to run it there."""

    folder: Path
    door: Door
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """A program to its end, in an environment that holds nothing of the developer's."""
        bins = [NPM / "node_modules" / ".bin", *NPM.glob("node_modules/node-*/bin")]
        proxies = ("http_proxy", "https_proxy", "all_proxy")
        environment = {
            "PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"]]),
            "HOME": str(self.home),
            "TMPDIR": str(self.folder),
            "LANG": "C.UTF-8",
            **{name: self.door.url for name in proxies},
            **{name.upper(): self.door.url for name in proxies},
            "no_proxy": "127.0.0.1,localhost",
            "NO_PROXY": "127.0.0.1,localhost",
            **self.variables,
        }
        # A program is looked up in its own environment only if named by its path.
        program = shutil.which(command[0], path=environment["PATH"]) or command[0]
        return subprocess.run(
            [program, *command[1:]],
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )


@pytest.fixture
def desk(door: Door, tmp_path: Path) -> Iterator[Desk]:
    """Checks at the end that its client did not try to leave this machine."""
    desk = Desk(tmp_path, door)
    desk.home.mkdir()
    desk.work.mkdir()
    door.knocks.clear()
    yield desk
    assert door.knocks == []
