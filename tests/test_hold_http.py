"""Rows that are held, over HTTP: a client that does not read stops its own row and nobody else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite import app as application
from mlxlite.http import server as http_server
from mlxlite.http.routing import Route
from mlxlite.session import QUEUED_TOKENS
from tests.live import CHAT, WAIT_S, LiveApp, chat_body, frames, post_bytes, stream_text

OTHER = (8, 9)
TOKENS = 12
LONG = 600


class Silent:
    """A client that sends its request and reads nothing until it is asked to."""

    def __init__(self, address: tuple[str, int], body: dict[str, Any]) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(address)
        data = post_bytes(CHAT, body).replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", 1)
        self.sock.sendall(data)

    def read(self) -> bytes:
        """All of the body; HTTP/1.0, so it is not in chunks and the close ends it."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # it is in a hurry now
        data = b""
        while part := self.sock.recv(1 << 16):
            data += part
        return data.partition(b"\r\n\r\n")[2]

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()


class Slow:
    """A server whose sockets take little, so that a client that does not read shows soon."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        services: list[Any] = []
        routes = application.routes

        def watched(service: Any) -> list[Route]:
            services.append(service)
            return routes(service)

        monkeypatch.setattr(http_server, "SEND_BUFFER_BYTES", 4096)
        monkeypatch.setattr(application, "routes", watched)
        self.app = LiveApp(folder, batch="1")
        (self.service,) = services
        self._rows_before = 0

    def client(self, body: dict[str, Any]) -> Silent:
        self._rows_before = self.app.worker.stats()["submitted_rows"]
        return Silent(self.app.address, body)

    def body(self, **more: Any) -> dict[str, Any]:
        """An answer of so many tokens, and half a kilobyte of frames for each."""
        never = {"0": -100, "2": -100}
        return chat_body(
            max_tokens=LONG, logprobs=True, top_logprobs=5, stream=True, logit_bias=never, **more
        )

    def plain(self, body: dict[str, Any]) -> str:
        return self.app.ask("POST", CHAT, {**body, "stream": False}).text

    def rows(self) -> list[Any]:
        return list(self.app.worker._loop.scheduler.live)

    def wait_held(self, count: int = 1) -> list[Any]:
        """Until so many rows are held. They end if nothing holds them, and then none ever is."""
        deadline_s = time.monotonic() + WAIT_S
        while len(rows := [row for row in self.rows() if row.is_held]) < count:
            assert time.monotonic() < deadline_s and not self.is_over(), "no row was held"
            time.sleep(0.001)  # what the engine's own state says has no event to wait for
        return rows

    def is_over(self) -> bool:
        stats = self.app.worker.stats()
        return (
            stats["submitted_rows"] > self._rows_before
            and stats["active_rows"] + stats["pending_rows"] == 0
        )


@pytest.fixture
def slow(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(tiny_folder, monkeypatch)
    with slow.app:
        yield slow


@pytest.mark.slow
def test_a_client_that_reads_later_gets_every_byte(slow: Slow) -> None:
    """Its row stops after what the sockets and the session hold; others are served meanwhile."""
    body = slow.body()
    short = slow.app.chat().text
    text = slow.plain(body)
    with slow.client(body) as client:
        (row,) = slow.wait_held()
        accepted = row.accepted
        assert QUEUED_TOKENS <= accepted < LONG - QUEUED_TOKENS // 2
        for _ in range(3):
            assert slow.app.chat().text == short
        assert row.is_held and row.accepted <= accepted + 1
        found = frames(client.read())
    assert stream_text(found) == text and found[-1] == "[DONE]"
    chunks = [choice.get("logprobs") for frame in found[:-1] for choice in frame["choices"]]
    assert sum(len(chunk["content"]) for chunk in chunks if chunk) == LONG
    slow.app.wait_batch(lambda batch: batch["active_rows"] == 0)


@pytest.mark.slow
def test_a_client_that_never_reads_is_given_up(slow: Slow) -> None:
    """Its row is cancelled, and it is told, should it read after all."""
    slow.service.sessions._idle_s = 0.05
    with slow.client(slow.body()) as client:
        slow.app.wait_batch(lambda batch: batch["cancelled_rows"] == 1)
        found = [json.loads(part[6:]) for part in client.read().split(b"\n\n") if part[6:]]
    assert "stopped reading" in found[-1]["error"]["message"]
    assert slow.app.chat().status == 200
    slow.app.wait_batch(lambda batch: batch["active_rows"] == 0)


@pytest.mark.slow
def test_a_client_that_leaves_while_its_row_is_held(slow: Slow) -> None:
    with slow.client(slow.body()):
        slow.wait_held()
    slow.app.wait_batch(lambda batch: batch["cancelled_rows"] == 1)
    deadline_s = time.monotonic() + WAIT_S
    while slow.app.ask("GET", "/stats").json()["sessions"]["open"]:  # it is told a little later
        assert time.monotonic() < deadline_s
    assert slow.app.chat().status == 200


@pytest.mark.slow
def test_a_stop_while_a_row_is_held(slow: Slow) -> None:
    with slow.client(slow.body()):
        slow.wait_held()
        slow.app.begin_stop()
        slow.app.join()


@pytest.mark.slow
def test_several_rows_of_a_silent_client_are_held_too(slow: Slow) -> None:
    with slow.client(slow.body(n=2)):
        slow.wait_held()
