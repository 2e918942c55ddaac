"""server: clients that leave, stall or stay too long; the loop, the stop and the port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from sockets import (  # noqa: F401  (fixtures)
    CHUNKED_POST,
    GET,
    WAIT_S,
    App,
    Client,
    Counted,
    Live,
    app,
    get,
    live,
    post,
    serving,
)

from mlxlite.errors import MlxliteError
from mlxlite.http import server as server_module
from mlxlite.http.listen import bind
from mlxlite.http.routing import EventStream, Request, Route, Router
from mlxlite.http.server import SLICE_BYTES, Connection

pytestmark = pytest.mark.slow

# --------------------------------------------------------------------------------------- leaving


def leave_by_close(client: Client) -> None:
    client.close()


def leave_by_half_close(client: Client) -> None:
    client.sock.shutdown(socket.SHUT_WR)


def leave_by_reset(client: Client) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_half_close, leave_by_reset])
@pytest.mark.parametrize("path", ["/wait", "/stream", "/silent"])
@pytest.mark.parametrize("behind", [b"", post("/echo", b"x" * 1000)[:-1]], ids=["", "pipelined"])
def test_a_client_that_leaves_cancels_its_handler(
    app: App, path: str, leave: Callable[[Client], None], behind: bytes
) -> None:
    with serving(app) as live, live.connect() as client:
        client.send(get(path) + behind)
        assert app.entered.wait(WAIT_S)
        leave(client)
        assert app.cancelled.wait(WAIT_S)
        live.wait_until(lambda: not live.server.connections and not live.server.tasks)
        assert app.gone == [True] and not app.finished.is_set()
        assert app.closed == (0 if path == "/wait" else 1)


@pytest.mark.parametrize("sent", [b"", b"GE", GET[:-2], post("/echo", b"abc")[:-1]])
def test_a_client_that_leaves_before_its_request_is_whole(live: Live, sent: bytes) -> None:
    with live.connect() as client:
        client.send(sent)
        live.wait_until(lambda: len(live.server.connections) == 1)
    live.wait_until(lambda: not live.server.connections)
    assert live.on_loop(lambda: len(live.server.tasks)) == 0


@pytest.mark.parametrize("path", ["/flood", "/large"])
def test_a_client_that_stops_reading_is_cut(app: App, path: str) -> None:
    with serving(app, idle_reader_s=0.1) as live:
        with live.connect(receive_buffer=4096) as client, live.connect() as neighbour:
            client.send(get(path))
            live.wait_until(lambda: len(live.server.tasks) == 1)
            assert neighbour.send(GET).answer()[2] == b"hello"
            live.wait_until(lambda: len(live.server.connections) == 1)  # the neighbour's
            assert neighbour.send(GET).answer()[2] == b"hello"
        if path == "/flood":
            assert app.cancelled.is_set() and app.closed == 1


def test_a_slow_reader_is_not_cut(app: App) -> None:
    with serving(app, idle_reader_s=0.15) as live, live.connect(receive_buffer=4096) as client:
        client.send(get("/large"))
        _, fields = client.head()
        left, started_s = int(fields["content-length"]), time.monotonic()
        while time.monotonic() - started_s < 0.4:
            left -= len(client.file.read(60_000))
            time.sleep(0.02)
        assert len(client.file.read(left)) == left


def test_a_large_answer_goes_out_in_slices(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have their turn between them, also while the reader keeps up; HEAD sends none."""
    sizes: list[int] = []
    write = Connection._write

    def noted(self: Connection, data: bytes) -> None:
        sizes.append(len(data))
        write(self, data)

    monkeypatch.setattr(Connection, "_write", noted)
    with serving(app) as live, live.connect() as client:
        status, _, body = client.send(get("/large")).answer()
        assert status == 200 and sum(sizes) > len(body) > 3 * SLICE_BYTES
        assert max(sizes) <= SLICE_BYTES + 1000 and len(sizes) == -(-len(body) // SLICE_BYTES)
        sizes.clear()
        assert client.send(get("/large").replace(b"GET", b"HEAD")).head()[0] == 200
        assert len(sizes) == 1 and sizes[0] < 1000


def test_an_unread_answer_holds_one_frame_only(app: App) -> None:
    with serving(app) as live, live.connect(receive_buffer=4096) as client:
        client.send(get("/flood"))
        live.wait_until(lambda: any(c._writable is not None for c in live.server.connections))
        (connection,) = live.server.connections
        assert live.on_loop(connection.transport.get_write_buffer_size) < 50_000


@pytest.mark.parametrize("sent", [b"GET\r\n\r\n", GET.replace(b"1.1", b"1.0"), get("/stream")])
def test_a_client_that_resets_at_once(live: Live, sent: bytes) -> None:
    for _ in range(50):  # the reset comes before, while or after the answer goes out
        with live.connect() as client:
            leave_by_reset(client.send(sent))
    live.wait_until(lambda: not live.server.connections and not live.server.tasks)


# -------------------------------------------------------------------------------------- timeouts


@pytest.mark.parametrize("sent", [b"G", GET[:-2], b"\r"])
def test_a_late_head(app: App, sent: bytes) -> None:
    with serving(app, receive_timeout_s=0.05) as live, live.connect() as client:
        assert client.send(GET).answer()[0] == 200
        status, fields, _ = client.send(sent).answer()
        assert status == 408 and fields["connection"] == "close" and client.is_closed()


def test_a_head_has_its_time_from_the_first_byte(app: App) -> None:
    with serving(app, receive_timeout_s=0.1) as live, live.connect() as client:
        with pytest.raises(OSError):  # a byte now and then does not help
            for _ in range(400):
                client.send(b"x")
                time.sleep(0.005)
                if live.on_loop(lambda: not live.server.connections):
                    raise ConnectionResetError
                if live.on_loop(lambda: live.server.requests_total):
                    assert client.answer()[0] == 408
                    raise ConnectionResetError


def test_a_body_must_make_progress(app: App) -> None:
    with serving(app, receive_timeout_s=0.08) as live, live.connect() as client:
        data = post("/echo", b"12345")
        client.send(data[:-5])
        for i in range(5):  # 0.1 s in all
            time.sleep(0.02)
            client.send(data[len(data) - 5 + i :][:1])
        assert client.answer()[2] == b"12345"
        assert client.send(data[:-1]).answer()[0] == 408
        assert client.is_closed()


def test_idle_connections_stay(app: App) -> None:
    with serving(app, receive_timeout_s=0.02, idle_reader_s=0.02) as live:
        with live.connect() as client:
            for _ in range(2):
                time.sleep(0.05)
                assert client.send(GET).answer()[0] == 200


# -------------------------------------------------------------------------------------- the loop


def test_500_idle_connections(live: Live) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(live.connect()) for _ in range(500)]
        live.wait_until(lambda: len(live.server.connections) == 500)
        started_s = time.monotonic()
        for client in clients[::50]:
            assert client.send(GET).answer()[2] == b"hello"
        assert time.monotonic() - started_s < 1
    live.wait_until(lambda: not live.server.connections)


@pytest.mark.parametrize("kind", ["json", "one-byte chunks"])
def test_large_requests_do_not_block_the_loop(live: Live, kind: str) -> None:
    """Ticks go on meanwhile. The limit is wide for a loaded machine: blocking would take 10x."""
    messages = [{"role": "user", "content": "hello world " * 20}] * 20_000
    if kind == "json":
        data = post("/json", json.dumps({"a": messages}).encode())
    else:
        data = CHUNKED_POST + b"1\r\nx\r\n" * 30_000 + b"0\r\n\r\n"
    gaps: list[float] = []

    async def tick(stop: asyncio.Event) -> None:
        while not stop.is_set():
            started_s = time.perf_counter()
            await asyncio.sleep(0)
            gaps.append(time.perf_counter() - started_s)

    async def start() -> asyncio.Event:
        stop = asyncio.Event()
        stop.task = asyncio.ensure_future(tick(stop))  # type: ignore[attr-defined]
        return stop

    stop = live.call(start())
    with live.connect() as client:
        body = client.send(data).answer()[2]
    live.on_loop(stop.set)
    assert body == (b'{"count":20000}' if kind == "json" else b"x" * 30_000)
    print(f"{kind}: longest turn {max(gaps) * 1e3:.1f} ms")
    assert max(gaps) < 0.05


def test_an_endless_ready_stream_does_not_starve_others(live: Live) -> None:
    with live.connect() as client, live.connect() as neighbour:
        client.send(get("/flood"))
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                client.sock.recv(1 << 20)

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(5):
            assert neighbour.send(GET).answer()[2] == b"hello"
        stop.set()
        reader.join(WAIT_S)


# ------------------------------------------------------------------------------------------ stop


def test_stop_lets_handlers_finish(app: App) -> None:
    with serving(app) as live:
        with live.connect() as busy, live.connect() as idle, live.connect() as half:
            idle.send(GET).answer()
            half.send(GET[:10])
            busy.send(get("/wait") + GET)
            assert app.entered.wait(WAIT_S)
            stopping = asyncio.run_coroutine_threadsafe(live.server.stop(WAIT_S), live.loop)
            assert idle.is_closed() and half.is_closed()
            with pytest.raises(ConnectionRefusedError):
                live.connect()
            live.on_loop(lambda: app.release.set())
            status, fields, body = busy.answer()
            assert (status, body) == (200, b'"done"') and fields["connection"] == "close"
            assert busy.is_closed()  # what was pipelined is not begun
            busy.close()
            stopping.result(WAIT_S)


@pytest.mark.parametrize("path", ["/wait", "/stream"])
def test_stop_cancels_after_its_grace(app: App, path: str) -> None:
    with serving(app) as live, live.connect() as client:
        client.send(get(path))
        assert app.entered.wait(WAIT_S)
        stopping = asyncio.run_coroutine_threadsafe(live.server.stop(0.01), live.loop)
        if path == "/wait":
            status, fields, _ = client.answer()
            assert status == 503 and fields["connection"] == "close" and client.is_closed()
        else:
            with pytest.raises(ConnectionResetError):
                while client.sock.recv(1000):
                    pass
        client.close()
        stopping.result(WAIT_S)
        assert app.cancelled.is_set() and app.gone == [False]


def test_stop_does_not_wait_for_those_who_linger(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_LINGER_S", 0.02)
    with serving(app) as live, live.connect() as client:
        client.send(get("/", fields="Connection: close\r\n")).answer()
        live.call(live.server.stop(WAIT_S))
        assert not live.server.connections


# ------------------------------------------------------------------------------------------ bind


def test_bind_clashes_and_restarts() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(MlxliteError, match=f"127.0.0.1:{port}: another program listens"):
        bind("127.0.0.1", port)
    # A connection that the server closed keeps the port in TIME_WAIT; a restart must not mind.
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = first.accept()
        accepted.close()
        client.recv(1)
    first.close()
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port"),
    [("", 0), ("no such host", 0), ("256.1.1.1", 0), ("192.0.2.1", 0), ("127.0.0.1", 70000),
     ("a" * 70, 0)],
)  # fmt: skip
def test_bind_says_what_is_wrong(host: str, port: int) -> None:
    with pytest.raises(MlxliteError, match="^cannot listen on [^\n]*$"):
        bind(host, port)


@pytest.mark.parametrize("host", ["localhost", "::1", "0.0.0.0"])
def test_bind_families(host: str) -> None:
    try:
        sock = bind(host, 0)
    except MlxliteError:
        pytest.skip("no IPv6 here")
    assert sock.getsockname()[1] > 0
    sock.close()


def test_cost_of_a_frame(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Printed, and bounded loosely: the goal is 60 us from an event to the socket."""
    caplog.set_level(logging.WARNING)
    count = 3000

    async def handler(request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            for _ in range(count):
                yield b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'

        return EventStream(frames())

    with serving(Router([Route("GET", "/", handler)])) as bare, bare.connect() as client:
        started_s = time.perf_counter()
        body = client.send(GET).answer()[2]
        frame_s = (time.perf_counter() - started_s) / count
    assert body.count(b"data:") == count
    print(f"{frame_s * 1e6:.1f} us a frame, the client's part included")
    assert frame_s < 500e-6
