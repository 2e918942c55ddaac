"""server: exchanges and streams over raw sockets against live ports."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator

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
from test_wire import MALFORMED

from mlxlite.http import server as server_module
from mlxlite.http.guard import Policy
from mlxlite.http.routing import Request, Response, Route, Router, json_response
from mlxlite.http.wire import Limits

# ------------------------------------------------------------------------------------- exchanges


def test_keep_alive_and_fields(live: Live) -> None:
    with live.connect() as client:
        ids = set()
        for _ in range(3):
            status, fields, body = client.send(GET).answer()
            assert (status, body) == (200, b"hello")
            assert fields["content-length"] == "5" and "connection" not in fields
            assert fields["date"].endswith(" GMT")
            ids.add(fields["x-request-id"])
        assert len(ids) == 3
        status, fields, body = client.send(get("/", fields="Connection: close\r\n")).answer()
        assert fields["connection"] == "close" and body == b"hello" and client.is_closed()
    assert live.on_loop(live.server.stats)["requests_total"] == 4


def test_small_frames_leave_at_once(live: Live) -> None:
    with live.connect() as client:
        client.send(GET).answer()
        (connection,) = live.server.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_http_1_0(live: Live) -> None:
    with live.connect() as client:
        status, fields, body = client.send(b"GET / HTTP/1.0\r\n\r\n").answer()
        assert status == 200 and fields["connection"] == "close" and client.is_closed()
    with live.connect() as client:
        for _ in range(2):
            client.send(get("/", "1.0", fields="Connection: keep-alive\r\n"))
            _, fields, body = client.answer()
            assert fields["connection"] == "keep-alive" and body == b"hello"


def test_head_options_and_405(live: Live) -> None:
    with live.connect() as client:
        status, fields, _ = client.send(get("/", method="HEAD")).answer(has_body=False)
        assert status == 200 and fields["content-length"] == "5"
        status, fields, _ = client.send(get("/empty", method="HEAD")).answer(has_body=False)
        assert status == 200 and fields["content-type"] == "text/event-stream"
        status, fields, _ = client.send(get("/", method="OPTIONS")).answer()
        assert status == 204 and fields["allow"] == "GET, HEAD, OPTIONS"
        assert "content-length" not in fields
        status, fields, _ = client.send(get("/", method="PUT")).answer()
        assert status == 405 and fields["allow"] == "GET, HEAD, OPTIONS"
        status, fields, body = client.send(get("/none")).answer()
        assert status == 404 and json.loads(body)["error"]["code"] is None


def test_bodies_at_every_cut(live: Live) -> None:
    sized = post("/echo/?beta=true", b"abc")
    chunked = CHUNKED_POST + b"2\r\nab\r\n1;x\r\nc\r\n0\r\nT: 1\r\n\r\n"
    with live.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for data in (sized, chunked):
            for at in range(1, len(data), 7):
                client.send(data[:at]).send(data[at:])
                assert client.answer()[2] == b"abc"
            for i in range(len(data)):
                client.send(data[i : i + 1])
            assert client.answer()[2] == b"abc"


def test_interleaved_bodies_stay_apart(live: Live) -> None:
    """All sockets are read into one buffer."""
    with live.connect() as one, live.connect() as other:
        requests = (post("/echo", b"a" * 90_000), post("/echo", b"b" * 90_000))
        for at in range(0, len(requests[0]), 10_000):
            for client, data in zip((one, other), requests, strict=True):
                client.send(data[at : at + 10_000])
        assert one.answer()[2] == b"a" * 90_000
        assert other.answer()[2] == b"b" * 90_000


def test_a_read_allocates_what_came(live: Live) -> None:
    """A large buffer for each read, cut to what came, is what wears the heap out."""
    with live.connect() as client:
        client.send(get("/hello")).answer()
        tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(10):
                client.send(get("/hello")).answer()
            grown = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    assert grown < server_module.RECEIVE_BYTES // 4


def test_pipelining_keeps_the_order(live: Live, app: App) -> None:
    with live.connect() as client:
        client.send(post("/echo", b"1") + get("/wait") + post("/echo", b"2") + get("/none") + GET)
        assert client.answer()[2] == b"1"
        assert app.entered.wait(WAIT_S)
        live.on_loop(lambda: app.release.set())
        assert client.answer()[2] == b'"done"'
        assert client.answer()[2] == b"2"
        assert client.answer()[0] == 404
        assert client.answer()[2] == b"hello"


def test_reading_pauses_behind_a_slow_handler(live: Live, app: App) -> None:
    count = 200
    behind = post("/echo", b"x" * 20_000) * count
    with live.connect() as client:
        client.send(get("/wait"))
        assert app.entered.wait(WAIT_S)
        writer = threading.Thread(target=client.send, args=(behind,))
        writer.start()
        (connection,) = live.server.connections
        live.wait_until(lambda: not connection.transport.is_reading())
        buffered = live.on_loop(lambda: connection._parser.buffered_bytes)
        assert buffered < server_module.PIPELINE_BYTES + (1 << 20)
        live.on_loop(lambda: app.release.set())
        assert client.answer()[2] == b'"done"'
        assert all(client.answer()[2] == b"x" * 20_000 for _ in range(count))
        writer.join(WAIT_S)


def test_continue(live: Live) -> None:
    expect = "Expect: 100-continue\r\n"
    with live.connect() as client:
        client.send(get("/echo", method="POST", fields=f"Content-Length: 2\r\n{expect}"))
        assert client.head() == (100, {})
        assert client.send(b"ok").answer()[2] == b"ok"
        assert client.send(post("/echo", b"here", expect)).answer()[2] == b"here"  # 100 is not owed
        assert client.send(get("/", fields=expect)).answer()[0] == 200
        too_long = f"Content-Length: {1 << 30}\r\n{expect}"
        status, _, _ = client.send(get("/echo", method="POST", fields=too_long)).answer()
        assert status == 413 and client.is_closed()


def test_a_refused_body_is_not_asked_for() -> None:
    async def handler(request: Request) -> Response:
        return json_response(1)

    router = Router(
        [Route("POST", "/x", handler), Route("GET", "/x", handler)], Policy(api_key="k")
    )
    with serving(router) as live, live.connect() as client:
        status, fields, _ = client.send(get("/x")).answer()
        assert status == 401 and fields["www-authenticate"] == "Bearer"
        assert "connection" not in fields  # no body, so the connection goes on
        expect = "Content-Length: 2\r\nExpect: 100-continue\r\n"
        status, fields, _ = client.send(get("/x", method="POST", fields=expect)).answer()
        assert status == 401 and fields["connection"] == "close" and client.is_closed()
    with serving(router) as live, live.connect() as client:
        client.send(get("/x").replace(b"localhost", b"a.test"))
        assert client.answer()[0] == 403


@pytest.mark.parametrize(
    ("data", "status"), [(d, s) for _, d, s in MALFORMED], ids=[n for n, *_ in MALFORMED]
)
def test_malformed(shared: Live, data: bytes, status: int) -> None:
    with shared.connect() as client, shared.connect() as neighbour:
        neighbour.send(GET[:20])
        answered, fields, body = client.send(data).answer()
        assert answered == status and fields["connection"] == "close"
        assert json.loads(body)["error"]["message"] and "x-request-id" in fields
        assert client.is_closed()
        assert neighbour.send(GET[20:]).answer()[0] == 200


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    with serving(App()) as running:
        yield running


def test_lingering_close() -> None:
    """The answer is read although megabytes that nobody wants are still being sent."""
    size = 20 << 20
    with serving(App(), limits=Limits(body_bytes=1000)) as live, live.connect() as client:
        client.send(get("/echo", method="POST", fields=f"Content-Length: {size}\r\n"))
        client.send(b"x" * size)
        status, fields, _ = client.answer()
        assert status == 413 and fields["connection"] == "close" and client.is_closed()


def test_lingering_is_bounded(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LINGER_S", 0.05)
    monkeypatch.setattr(server_module, "LINGER_BYTES", 1 << 20)
    with serving(app) as live:
        with live.connect() as client:  # stays and says nothing
            client.send(b"GET\r\n\r\n").answer()
            live.wait_until(lambda: not live.server.connections)
        with live.connect() as client:  # never stops sending
            client.send(b"GET\r\n\r\n").answer()
            with pytest.raises(OSError):
                for _ in range(1000):
                    client.send(b"x" * 100_000)


# --------------------------------------------------------------------------------------- streams


def test_stream_frames_and_close(live: Live, app: App) -> None:
    with live.connect() as client:
        status, fields = client.send(get("/stream")).head()
        assert status == 200 and fields["transfer-encoding"] == "chunked"
        assert fields["content-type"] == "text/event-stream"
        assert fields["cache-control"] == "no-cache" and "x-request-id" in fields
        assert client.chunk() == b"data: 0\n\n"
        assert app.entered.wait(WAIT_S)
        live.on_loop(lambda: app.release.set())
        assert client.chunk() == b"data: 1\n\n"
        assert client.chunk() == b""
        assert client.send(GET).answer()[2] == b"hello"  # the connection goes on
        assert client.send(get("/empty")).answer()[2] == b""
    assert app.closed == 2


def test_stream_to_http_1_0(live: Live, app: App) -> None:
    with live.connect() as client:
        status, fields = client.send(
            get("/stream", "1.0", fields="Connection: keep-alive\r\n")
        ).head()
        assert fields["connection"] == "close" and "transfer-encoding" not in fields
        assert client.file.read(9) == b"data: 0\n\n"
        live.on_loop(lambda: app.release.set())
        assert client.file.read() == b"data: 1\n\n"
    assert app.closed == 1


def test_heartbeats_come_after_the_first_frame(live: Live, app: App) -> None:
    with live.connect() as client:
        client.send(get("/silent"))
        assert app.entered.wait(WAIT_S)
        client.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)
        client.sock.settimeout(WAIT_S)
        client.file.close()
        client.file = client.sock.makefile("rb")
        app.entered.clear()
        live.on_loop(lambda: app.release.set())
        assert client.head()[0] == 200
        assert client.chunk() == b"data: 0\n\n"
        assert [client.chunk() for _ in range(3)] == [b": keep-alive\n"] * 3
        assert app.entered.wait(WAIT_S)
        live.on_loop(lambda: app.release.set())
        while client.chunk() != b"":
            pass
    assert app.closed == 1


def test_an_error_before_the_first_frame(live: Live, app: App) -> None:
    with live.connect() as client:
        status, fields, body = client.send(get("/early")).answer()
        assert status == 429 and fields["retry-after"] == "1"
        assert json.loads(body)["error"]["code"] == "queue_full"
        assert client.send(GET).answer()[0] == 200
    assert app.closed == 1


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_error_after_the_first_frame_breaks_the_connection(
    live: Live, app: App, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with live.connect() as client:
        client.send(get("/late", version))
        with pytest.raises(ConnectionResetError):  # never a clean end
            while client.sock.recv(1000):
                pass
    live.wait_until(lambda: not live.server.connections)
    assert "half-way" in caplog.text and app.closed == 1
