"""The asyncio shell: listens, feeds bytes to `wire`, runs handlers, sends answers.

One `Connection` per client socket, one task per request, requests of a connection one after the
other; pipelined bytes wait in the parser. Everything runs on the event loop.

    IDLE -> READING -> ANSWERING -> IDLE ...             keep-alive
                            `----> LINGERING -> GONE     the answer was the last one

Invariants:
- A client that leaves is noticed at once, also while its handler waits: reading never stops for an
  answer (only past `PIPELINE_BYTES`). A half-close counts as leaving. Clients of an API do not shut
  their sending side down while they wait, and a proxy that lost its client shows it in this way.
- A handler is cancelled at most once: its client left or stopped reading, or the grace of `stop` is
  over.
- Each write waits until the kernel took the one before, so at most one frame is buffered here. A
  client that takes nothing for `idle_reader_s` while something waits for it is cut.
- No answer ends well by accident: a stream that fails half-way breaks its connection.
- After its last answer the server sends FIN and reads on for a while, so that the client gets the
  answer even while it still sends (RFC 9112 section 9.6: a close right away would reset it).

asyncio sets TCP_NODELAY where the listening socket names its protocol: small frames leave at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto

from mlxlite.errors import EngineDown
from mlxlite.http import routing, wire
from mlxlite.http.listen import BACKLOG
from mlxlite.http.routing import EventStream, Handler, Request, Response

log = logging.getLogger(__name__)

# One read of any socket. A buffer of asyncio's own would be as large, made anew for each read and
# cut to what came: beside what lives longer, that leaves holes of this size in the heap (see heap).
RECEIVE_BYTES = 256 << 10
PIPELINE_BYTES = 1 << 20  # read ahead while a request is answered; beyond it reading pauses
PARTS_PER_TURN = 256  # body parts per turn of the loop: under 1 ms even for one-byte chunks
FRAMES_PER_TURN = 64  # frames sent before others get their turn, if the stream never waits
# After the last answer: how long and how much a client may still send before it is cut.
LINGER_S = 5.0
LINGER_BYTES = 64 << 20  # twice the largest body
STOP_LINGER_S = 0.5  # the same, when the server stops
SLICE_BYTES = 256 << 10  # of a whole answer, written at once
SEND_BUFFER_BYTES = 128 << 10  # doubled by Linux; about a thousand frames of a chat


class Phase(Enum):
    IDLE = auto()  # nothing of a next request is here
    READING = auto()  # a part of it is
    ANSWERING = auto()  # its handler runs, or the answer is going out
    LINGERING = auto()  # answered for the last time; what still comes is dropped
    GONE = auto()


class Server:
    """Serves `app` on one listening socket.

    app: a Router, or any handler; it may have `admit(request)`, see `routing.admit`.
    receive_timeout_s: a head must be whole that long after its first byte, and a body must make
    progress that often; else 408. Connections without a request have no timeout.
    """

    def __init__(
        self,
        app: Handler,
        *,
        limits: wire.Limits | None = None,
        receive_timeout_s: float = 30.0,
        idle_reader_s: float = 30.0,
    ) -> None:
        self.app = app
        self.limits = limits or wire.Limits()
        self.receive_timeout_s = receive_timeout_s
        self.idle_reader_s = idle_reader_s
        self.is_stopping = False
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.connections_total = 0
        self.requests_total = 0
        self.receive_buffer = memoryview(bytearray(RECEIVE_BYTES))  # of the read that happens now
        self._listener: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Accept connections on a socket from `bind`; it belongs to the server now."""
        # Accepted sockets inherit it. A large buffer would hide for megabytes that a client reads
        # slowly, or does not read at all.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self, loop), sock=sock, backlog=BACKLOG
        )

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop accepting, let running handlers end within `grace_s`, cancel the rest, close all.

        A cancelled handler that has sent nothing yet is answered with 503. Requests that are not
        whole are dropped.
        """
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_if_unanswered()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=grace_s)
        for connection in list(self.connections):
            connection.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=LINGER_S)
        for task in self.tasks:
            log.error("a handler ignored its cancellation: %r", task.get_coro())
        if self.connections:  # those that linger
            await asyncio.wait([each.closed for each in self.connections], timeout=STOP_LINGER_S)
        for connection in list(self.connections):
            connection.transport.abort()
            await connection.closed
        if self._listener is not None:
            await self._listener.wait_closed()

    def stats(self) -> dict[str, int]:
        """Gauges and counters for `/stats`."""
        return {
            "connections": len(self.connections),
            "connections_total": self.connections_total,
            "requests_active": len(self.tasks),
            "requests_total": self.requests_total,
        }


class Connection(asyncio.BufferedProtocol):
    """One client socket, from accept to close."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        # The connection:
        self._server = server
        self._loop = loop
        self.transport: asyncio.Transport
        self.closed = loop.create_future()
        self._parser = wire.RequestParser(server.limits)
        self._phase = Phase.IDLE
        self._timer: asyncio.TimerHandle | None = None  # for the head, the body or lingering
        self._is_reading_paused = False
        self._is_turn_due = False  # `_advance` is scheduled
        self._linger_left = LINGER_BYTES
        # The request, from its head to the end of its answer:
        self._request: Request | None = None
        self._body = bytearray()
        self._keep_alive = True
        self._task: asyncio.Task[None] | None = None
        # The answer:
        self._is_head_sent = False
        self._last_write_s = 0.0
        self._beat: asyncio.TimerHandle | None = None
        # Back pressure: set while the kernel takes no more.
        self._writable: asyncio.Future[None] | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # paused = the kernel did not take everything
        self._server.connections.add(self)
        self._server.connections_total += 1
        if self._server.is_stopping:  # accepted just before
            transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next read goes; `buffer_updated` follows before anything else is read."""
        return self._server.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase is Phase.LINGERING:
            self._linger_left -= nbytes
            if self._linger_left < 0:
                self.transport.abort()
            return
        self._parser.feed(self._server.receive_buffer[:nbytes])
        if self._is_turn_due:
            self._balance_reading()
        else:
            self._advance()

    def eof_received(self) -> None:
        """The client shut its side down: it has left."""
        self._leave()
        self.transport.abort()  # a close would wait until the client took what is unsent

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._server.connections.discard(self)
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()
        self._watch_reader(self.transport.get_write_buffer_size(), self._loop.time())

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():  # done: its waiter was cancelled
            writable.set_result(None)
        if self._reader_timer is not None:
            self._reader_timer.cancel()

    def close_if_unanswered(self) -> None:
        """The server stops: nothing is being answered here, so nothing is lost."""
        if self._phase in (Phase.IDLE, Phase.READING):
            self.transport.close()
            self._leave()

    def cancel(self) -> None:
        """Cancel the handler, once."""
        if self._task is not None:
            self._task.cancel()
        self._task = None

    def _reset(self) -> None:
        """Close so that the client sees an error, never an end: RST instead of FIN."""
        sock = self.transport.get_extra_info("socket")
        with suppress(OSError):  # the client was first
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # -------------------------------------------------------------------------------- reading

    def _advance(self) -> None:
        """Read parts until a request is whole, bytes run out or the turn is over."""
        self._is_turn_due = False
        try:
            for _ in range(PARTS_PER_TURN):
                if self._phase not in (Phase.IDLE, Phase.READING):
                    break
                part = self._parser.next_part()
                if part is None:
                    self._wait_for_bytes()
                    break
                elif isinstance(part, wire.Head):
                    self._take_head(part)
                elif isinstance(part, bytes):
                    self._body += part
                elif self._request is not None:  # End
                    self._request.content = self._body
                    self._begin(self._request, None)
            else:
                self._is_turn_due = True
                self._loop.call_soon(self._advance)
        except wire.ProtocolError as error:
            self._refuse(error)
        self._balance_reading()

    def _take_head(self, head: wire.Head) -> None:
        request = Request.from_head(head, self._address("peername"), self._address("sockname"))
        self._request = request
        self._body = bytearray()
        self._phase = Phase.READING
        self._keep_alive = head.keep_alive
        self._server.requests_total += 1
        refusal = routing.admit(self._server.app, request)
        if refusal is None:
            # RFC 9110 section 10.1.1: no 100 is owed once the body is coming.
            if head.expects_continue and self._parser.buffered_bytes == 0:
                self._write(wire.CONTINUE)
            return
        if head.has_body:
            self._keep_alive = False  # its body stays unread
        else:
            self._parser.next_part()  # its End
        self._begin(request, refusal)

    def _address(self, end: str) -> str | None:
        address = self.transport.get_extra_info(end)
        return address[0] if isinstance(address, tuple) else None

    def _wait_for_bytes(self) -> None:
        """Arm the timer of what is awaited: the rest of a body, of a head, or nothing."""
        if self._request is None and self._parser.is_between_requests:
            self._phase = Phase.IDLE
            self._clear_timer()
        elif self._request is not None or self._phase is Phase.IDLE:
            # More of a body, or the first byte of a head; its later ones buy no time.
            self._phase = Phase.READING
            self._set_timer(self._server.receive_timeout_s, self._time_out)

    def _time_out(self) -> None:
        self._refuse(wire.ProtocolError(408, "the request did not arrive in time"))

    def _refuse(self, error: wire.ProtocolError) -> None:
        """Answer bytes that are no request, for the last time on this connection."""
        if self._request is None:
            self._server.requests_total += 1
            self._request = Request("", "")
        self._keep_alive = False
        self._begin(self._request, routing.error_response(error, self._request.surface))

    def _balance_reading(self) -> None:
        """Stop reading while more than enough is buffered, so that memory is bounded."""
        if self._phase is Phase.GONE:
            return
        is_full = self._parser.buffered_bytes > PIPELINE_BYTES
        if is_full and not self._is_reading_paused:
            self.transport.pause_reading()
        elif self._is_reading_paused and not is_full:
            self.transport.resume_reading()
        self._is_reading_paused = is_full

    def _set_timer(self, after_s: float, then: Callable[[], None]) -> None:
        self._clear_timer()
        self._timer = self._loop.call_later(after_s, then)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------------------------ answering

    def _begin(self, request: Request, refusal: Response | None) -> None:
        self._phase = Phase.ANSWERING
        self._clear_timer()
        self._is_head_sent = False
        task = self._loop.create_task(self._exchange(request, refusal))
        self._task = task
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _exchange(self, request: Request, refusal: Response | None) -> None:
        """Answer one request, then go on to the next or close. The body of its task."""
        try:
            result = refusal or await routing.answer(self._server.app, request)
            if isinstance(result, EventStream):
                await self._send_stream(request, result)
            else:
                head, body = self._render(request, result)
                self._is_head_sent = True
                await self._send(head, body)
                log.debug("%s %r %d", request.method, request.path, result.status)
        except asyncio.CancelledError:
            if self._phase is Phase.GONE:
                raise
            if self._is_head_sent:
                self._reset()
                raise
            stopping = routing.error_response(EngineDown("the server is stopping"), request.surface)
            self._write(b"".join(self._render(request, stopping)))
        except Exception:
            log.exception("the answer to %r broke off (%s)", request.path, request.request_id)
            self._reset()
            return
        self._task = None
        if self._phase is not Phase.GONE:
            self._end_exchange()

    def _end_exchange(self) -> None:
        self._request = None
        self._body = bytearray()
        if self._keep_alive and not self._server.is_stopping:
            self._phase = Phase.IDLE
            self._advance()
            return
        self._phase = Phase.LINGERING
        self._parser = wire.RequestParser()  # drops what is buffered
        with suppress(OSError):  # the client was first
            self.transport.write_eof()
        self._set_timer(LINGER_S, self.transport.abort)
        self._balance_reading()

    async def _send_stream(self, request: Request, stream: EventStream) -> None:
        is_chunked = request.minor >= 1
        encode = wire.render_chunk if is_chunked else bytes
        if not is_chunked:
            self._keep_alive = False  # the close is what ends it
        frames = 0
        try:
            head = self._render_head(request, 200, stream.headers, None)
            self._is_head_sent = True
            self._write(head)
            if request.method == "HEAD":
                return
            self._start_beat(stream.heartbeat_s, encode(stream.HEARTBEAT))
            async for frame in stream:
                if self._phase is Phase.GONE:  # and the handler took no notice
                    break
                self._write(encode(frame))
                if self._writable is not None:
                    await self._writable
                frames += 1
                if frames % FRAMES_PER_TURN == 0:
                    await asyncio.sleep(0)
        finally:
            if self._beat is not None:
                self._beat.cancel()
            await stream.close()
        if is_chunked:
            self._write(wire.LAST_CHUNK)
        if self._writable is not None:
            await self._writable
        log.debug("%s %r 200, %d frames", request.method, request.path, frames)

    def _start_beat(self, interval_s: float, data: bytes) -> None:
        """Send `data` whenever nothing was sent for so long: a timer, so frames cost nothing."""

        def beat() -> None:
            due_s = self._last_write_s + interval_s - self._loop.time()
            if due_s <= 0:
                if self._writable is None:  # else the client is not even reading frames
                    self._write(data)
                due_s = interval_s
            self._beat = self._loop.call_later(due_s, beat)

        self._beat = self._loop.call_later(interval_s, beat)

    def _render(self, request: Request, response: Response) -> tuple[bytes, bytes]:
        """The head, and the body as it is sent."""
        status, body = response.status, response.body
        head = self._render_head(request, status, response.headers, len(body))
        return head, body if request.method != "HEAD" and wire.has_body(status) else b""

    async def _send(self, head: bytes, body: bytes) -> None:
        """A whole answer, in slices between which others have their turn: the system takes 1 ms for
        a megabyte."""
        self._write(head + body[:SLICE_BYTES])
        for start in range(SLICE_BYTES, len(body), SLICE_BYTES):
            await (self._writable or asyncio.sleep(0))
            self._write(body[start : start + SLICE_BYTES])
        if self._writable is not None:
            await self._writable

    def _render_head(
        self, request: Request, status: int, headers: Mapping[str, str], length: int | None
    ) -> bytes:
        """The whole head; decides for good whether this answer is the last one."""
        fields = [("date", wire.http_date(int(time.time()))), *request.reply_fields]
        fields += [*headers.items(), *wire.framing_fields(status, length, request.minor)]
        self._keep_alive = self._keep_alive and not self._server.is_stopping
        if not self._keep_alive:
            fields.append(("connection", "close"))
        elif request.minor == 0:  # where it is not the default
            fields.append(("connection", "keep-alive"))
        return wire.render_head(status, fields)

    def _write(self, data: bytes) -> None:
        if self._phase is not Phase.GONE:
            self.transport.write(data)
        self._last_write_s = self._loop.time()

    # -------------------------------------------------------------------------------- leaving

    def _watch_reader(self, unsent_bytes: int, since_s: float) -> None:
        """Cut a client that took none of what waits for it for `idle_reader_s`."""
        now_s, idle_s = self._loop.time(), self._server.idle_reader_s
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes < unsent_bytes:
            since_s = now_s  # slow, but reading
        if now_s - since_s < idle_s:
            self._reader_timer = self._loop.call_later(
                idle_s / 4, self._watch_reader, left_bytes, since_s
            )
            return
        log.info("a client stopped reading for %g s and was cut", idle_s)
        self._reset()
        self._leave()

    def _leave(self) -> None:
        """The client is gone, or as good as: wake whoever works for it. Does nothing twice."""
        if self._phase is Phase.GONE:
            return
        self._phase = Phase.GONE
        self._clear_timer()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        if self._request is not None:
            self._request.disconnected.set()
        self.cancel()
