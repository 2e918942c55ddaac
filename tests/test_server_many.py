"""Many clients of one server process, and clients that do nothing: what they cost (spec 70)."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.footprint import HAS_PROC, open_files, resident_bytes, settle
from tests.live import CHAT, WAIT_S, Child, ask, chat_body, post_bytes, read_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_PROC, reason="measures the memory of a child"),
]

IDLE = 1_000
MOST_IDLE_BYTES = 50 << 20
SILENT = 8
# The server's send buffer is 128 KiB, doubled by Linux, and lies in the kernel. In the process a
# silent client has one frame that waits and 256 tokens at most, with 20 log-probabilities each
# about 1.5 MB; what it would have by the end of its answer is ten times that.
MOST_SILENT_BYTES = 3 << 20  # each
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "tiny"
    return tiny.make_model(folder, max_position_embeddings=8192)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Child]:
    arguments = ("serve", "--model", str(model), "--port", "0", "--batch", str(SILENT + 2))
    with Child(tmp_path, *arguments, deadline_s=120, MKL_NUM_THREADS="1") as child:
        child.wait_ready()
        ask(child.address, "POST", CHAT, chat_body(top_logprobs=20, logprobs=True))  # warm
        yield child


def connected(server: Child, stack: ExitStack, receive_buffer: int | None = None) -> socket.socket:
    sock = stack.enter_context(closing(socket.socket()))
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(WAIT_S)
    sock.connect(server.address)
    return sock


def health(sock: socket.socket) -> None:
    sock.sendall(GET)
    assert read_until(sock, b'{"status":"ok"}').startswith(b"HTTP/1.1 200 ")


def test_a_thousand_idle_connections(server: Child) -> None:
    """Each was used once and is kept alive; the last one is served as the first one was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < IDLE + 100:
        pytest.skip(f"only {soft} files may be open")
    pid = server.process.pid
    before, files = resident_bytes(pid), open_files(pid)
    with ExitStack() as stack:
        clients = [connected(server, stack) for _ in range(IDLE)]
        for client in clients:
            health(client)
        taken = resident_bytes(pid) - before
        stats = ask(server.address, "GET", "/stats").json()["http"]
        print(f"\n{IDLE} idle connections: {taken / 1e6:.1f} MB")
        assert stats["connections"] == IDLE + 1
        assert taken < MOST_IDLE_BYTES
        for client in clients[:: IDLE // 10]:
            health(client)
    settle(server.address)
    assert open_files(pid) <= files + 1  # the one that asked may still be closing


def test_silent_clients(server: Child) -> None:
    """They ask for long streams and read nothing: their rows are held, and the others served."""
    pid = server.process.pid
    body = chat_body(
        max_tokens=8000, stream=True, logprobs=True, top_logprobs=20,
        logit_bias={"0": -100, "2": -100},
    )  # fmt: skip
    expected = ask(server.address, "POST", CHAT, chat_body()).json()["choices"]
    before = resident_bytes(pid)
    with ExitStack() as stack:
        for _ in range(SILENT):
            connected(server, stack, receive_buffer=4096).sendall(post_bytes(CHAT, body))
        stats = standstill(server)
        taken = resident_bytes(pid) - before
        print(f"\n{SILENT} silent clients: {taken / 1e6:.1f} MB")
        assert stats["active_rows"] == SILENT and stats["failed_rows"] == 0
        assert taken < SILENT * MOST_SILENT_BYTES
        assert ask(server.address, "POST", CHAT, chat_body()).json()["choices"] == expected
        assert standstill(server)["active_rows"] == SILENT
    assert settle(server.address)["batch"]["cancelled_rows"] == SILENT


def standstill(server: Child) -> dict[str, Any]:
    """Wait until the engine makes no step any more; its counters then."""
    deadline_s = time.monotonic() + 60
    last = -1
    while True:
        stats: dict[str, Any] = ask(server.address, "GET", "/stats").json()["batch"]
        if stats["active_rows"] == SILENT and stats["decode_steps"] == last:
            return stats
        assert time.monotonic() < deadline_s, stats
        last = stats["decode_steps"]
        time.sleep(0.3)  # hundreds of steps, if it made any
