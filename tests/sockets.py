"""A server in a thread and raw-socket clients, shared by the tests of `http/server`.

Each test starts a server of its own with its own event loop. Nothing here sleeps; handlers tell by
`threading.Event`s what happened to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from mlxlite.errors import Busy
from mlxlite.http.listen import bind
from mlxlite.http.routing import EventStream, Request, Response, Route, Router, json_response
from mlxlite.http.server import Server

WAIT_S = 5.0
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED_POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


class Live:
    """A running server. Unhandled errors of its loop fail the test that stops it."""

    def __init__(self, app: Any, **settings: Any) -> None:
        self.unhandled: list[dict[str, Any]] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        sock = bind("127.0.0.1", 0)
        self.address = sock.getsockname()
        self.server = self.call(self._start(app, sock, settings))

    async def _start(self, app: Any, sock: socket.socket, settings: dict[str, Any]) -> Server:
        server = Server(app, **settings)
        await server.start(sock)
        return server

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def connect(self, receive_buffer: int | None = None) -> Client:
        return Client(self.address, receive_buffer)

    def on_loop(self, look: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return look()

        return self.call(call())

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Ask on the loop until it is so."""
        deadline_s = time.monotonic() + WAIT_S
        while not self.on_loop(is_true):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)  # what the server's own state says has no event to wait for

    def close(self) -> None:
        self.call(self.server.stop(0.0))
        assert not self.server.connections and not self.server.tasks
        self.call(self.loop.shutdown_default_executor())
        leftover = self.on_loop(lambda: len(asyncio.all_tasks()))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()
        assert leftover == 1 and self.unhandled == []  # the task that counts


class Client:
    """A socket with the few lines of HTTP that these tests need."""

    def __init__(self, address: tuple[str, int], receive_buffer: int | None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(WAIT_S)
        try:
            self.sock.connect(address)
        except OSError:
            self.sock.close()
            raise
        self.file = self.sock.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.sock.close()

    def send(self, data: bytes) -> Client:
        self.sock.sendall(data)
        return self

    def head(self) -> tuple[int, dict[str, str]]:
        line = self.file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        fields = {}
        while (field := self.file.readline()) != b"\r\n":
            name, _, value = field.decode("latin-1").rstrip("\r\n").partition(": ")
            fields[name] = value
        return int(line.split()[1]), fields

    def chunk(self) -> bytes:
        size = int(self.file.readline(), 16)
        data = self.file.read(size)
        assert self.file.read(2) == b"\r\n"
        return data

    def answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        status, fields = self.head()
        body = b""
        if has_body and fields.get("transfer-encoding") == "chunked":
            while data := self.chunk():
                body += data
        elif has_body and "content-length" in fields:
            body = self.file.read(int(fields["content-length"]))
        elif has_body and status != 204:
            body = self.file.read()
        return status, fields, body

    def is_closed(self) -> bool:
        return self.file.read(1) == b""


class App:
    """Handlers that tell what happens to them."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.cancelled = threading.Event()
        self.finished = threading.Event()
        self.gone: list[bool] = []
        self.closed = 0
        self.release: asyncio.Event | None = None  # made on the loop
        self.router = Router(
            [
                Route("GET", "/", self.hello),
                Route("POST", "/echo", self.echo),
                Route("POST", "/json", self.json),
                Route("GET", "/wait", self.wait),
                Route("POST", "/wait", self.wait),
                Route("GET", "/stream", self.stream),
                Route("GET", "/silent", self.silent),
                Route("GET", "/flood", self.flood),
                Route("GET", "/large", self.large),
                Route("GET", "/early", self.early),
                Route("GET", "/late", self.late),
                Route("GET", "/empty", self.empty),
            ]
        )

    async def hello(self, request: Request) -> Response:
        return Response(200, b"hello", {"content-type": "text/plain"})

    async def echo(self, request: Request) -> Response:
        return Response(200, request.body)

    async def json(self, request: Request) -> Response:
        body = await request.json()
        return json_response({"count": len(body["a"])})

    async def _hold(self, request: Request) -> None:
        self.release = asyncio.Event()
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.gone.append(request.disconnected.is_set())
            self.cancelled.set()
            raise

    async def wait(self, request: Request) -> Response:
        await self._hold(request)
        self.finished.set()
        return json_response("done")

    def _stream(self, frames: AsyncIterator[bytes], **settings: Any) -> EventStream:
        return EventStream(Counted(frames, self), **settings)

    async def stream(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            yield b"data: 0\n\n"
            yield b""
            await self._hold(request)
            yield b"data: 1\n\n"
            self.finished.set()

        return self._stream(frames())

    async def silent(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            await self._hold(request)
            yield b"data: 0\n\n"
            await self._hold(request)

        return self._stream(frames(), heartbeat_s=0.02)

    async def flood(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: " + b"x" * 20_000 + b"\n\n"
            finally:
                self.gone.append(request.disconnected.is_set())
                self.cancelled.set()

        return self._stream(frames(), heartbeat_s=0.01)

    async def large(self, request: Request) -> Response:
        return Response(200, b"x" * (8 << 20))

    async def early(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            raise Busy("the queue is full")
            yield b""

        return self._stream(frames())

    async def late(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            yield b"data: 0\n\n"
            raise ValueError("half-way")

        return self._stream(frames())

    async def empty(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            return
            yield b""

        return self._stream(frames())


class Counted:
    """Passes frames on and counts how often it is closed."""

    def __init__(self, frames: AsyncIterator[bytes], app: App) -> None:
        self._frames = frames
        self._app = app

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    def __anext__(self) -> Awaitable[bytes]:
        return self._frames.__anext__()

    async def aclose(self) -> None:
        self._app.closed += 1
        await self._frames.aclose()


@pytest.fixture
def app() -> App:
    return App()


@contextlib.contextmanager
def serving(app: Any, **settings: Any) -> Iterator[Live]:
    live = Live(getattr(app, "router", app), **settings)
    try:
        yield live
    finally:
        live.close()


@pytest.fixture
def live(app: App) -> Iterator[Live]:
    with serving(app) as running:
        yield running


def get(path: str, version: str = "1.1", method: str = "GET", fields: str = "") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n{fields}\r\n".encode()


def post(path: str, body: bytes, fields: str = "") -> bytes:
    return get(path, method="POST", fields=f"Content-Length: {len(body)}\r\n{fields}") + body
