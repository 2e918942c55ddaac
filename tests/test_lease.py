"""Leases (spec 70 section 14): held from dispatch to the last byte, given back exactly once.

A second lease is held throughout, so that one given back twice shows. Answers are read as the
server reads them: `routing.answer`, the frames, `close` whatever happens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlxlite import app as application
from mlxlite.errors import Busy
from mlxlite.http.routing import EventStream, Request, Response, Route, Router, answer
from mlxlite.lease import Leases, leased
from tests.live import CHAT, WAIT_S, chat_body, connect, post_bytes, read_until
from tests.scripted import QWEN, ScriptedApp
from tests.sockets import Live, get, serving

FRAMES = [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]


class Body:
    """Frames that tell what was done to them: an iterator, not a generator, so that only `aclose`
    closes it.

    fails_at: the number of the frame that is an error instead. waits_at: of the one that never
    comes. closing: what `aclose` raises.
    """

    def __init__(
        self,
        leases: Leases,
        frames: list[bytes] = FRAMES,
        fails_at: int | None = None,
        waits_at: int | None = None,
        closing: Exception | None = None,
    ) -> None:
        self.leases = leases
        self.frames = frames
        self.fails_at = fails_at
        self.waits_at = waits_at
        self.closing = closing
        self.pulled = 0
        self.closed = 0
        self.held_when_closed = 0
        self.is_waiting = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        at, self.pulled = self.pulled, self.pulled + 1
        if at == self.waits_at:
            self.is_waiting.set()
            await asyncio.Event().wait()
        if at == self.fails_at:
            raise ZeroDivisionError(at)
        if at >= len(self.frames):
            raise StopAsyncIteration
        return self.frames[at]

    async def aclose(self) -> None:
        self.closed += 1
        self.held_when_closed = self.leases.held
        if self.closing is not None:
            raise self.closing


async def read(result: Response | EventStream, most: int = 99) -> list[bytes]:
    """What the server does with a stream, most: frames after which it stops of its own accord."""
    assert isinstance(result, EventStream)
    got: list[bytes] = []
    try:
        while len(got) < most:
            got.append(await anext(result))
    except StopAsyncIteration:
        pass
    finally:
        await result.close()
    return got


class Case:
    """One answer of a body, beside another that is held throughout."""

    def __init__(self, **how: Any) -> None:
        self.leases = Leases()
        self.leases.acquire()
        self.body = Body(self.leases, **how)
        self.request = Request("GET", "/")

    async def begin(self) -> Response | EventStream:
        async def handler(service: object, request: Request) -> EventStream:
            assert self.leases.held == 2, "it is held while the handler runs"
            return EventStream(self.body)

        hold = leased(self.leases, handler)
        return await answer(lambda request: hold(None, request), self.request)

    @property
    def is_released(self) -> bool:
        """Once, and the body was closed once, before."""
        assert self.body.closed == 1 and self.body.held_when_closed == 2
        return self.leases.held == 1


# ---------------------------------------------------------------------------------- exactly once


async def to_the_end(case: Case) -> None:
    assert await read(await case.begin()) == case.body.frames


async def to_the_end_twice(case: Case) -> None:
    result = await case.begin()
    await read(result)
    assert await read(result) == []


async def half_way(case: Case) -> None:
    assert len(await read(await case.begin(), most=2)) == 2


async def not_at_all(case: Case) -> None:
    """As for HEAD."""
    await read(await case.begin(), most=0)


async def fails_first(case: Case) -> None:
    result = await case.begin()
    assert isinstance(result, Response) and result.status == 500


async def fails_later(case: Case) -> None:
    result = await case.begin()
    assert not isinstance(result, Response) and case.leases.held == 2
    with pytest.raises(ZeroDivisionError):
        await read(result)


async def cancelled_first(case: Case) -> None:
    task = asyncio.ensure_future(case.begin())
    await case.body.is_waiting.wait()
    assert case.leases.held == 2
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or case.body.closing is not None


async def cancelled_later(case: Case) -> None:
    result = await case.begin()
    task = asyncio.ensure_future(read(result))
    await case.body.is_waiting.wait()
    assert case.leases.held == 2
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or case.body.closing is not None


ENDINGS: list[tuple[Callable[[Case], Any], dict[str, Any]]] = [
    (to_the_end, {"frames": []}),
    (to_the_end, {"frames": FRAMES[:1]}),
    (to_the_end, {}),
    (to_the_end_twice, {}),
    (half_way, {}),
    (not_at_all, {}),
    (fails_first, {"fails_at": 0}),
    (fails_later, {"fails_at": 1}),
    (fails_later, {"fails_at": 3}),
    (cancelled_first, {"waits_at": 0}),
    (cancelled_later, {"waits_at": 1}),
    (cancelled_later, {"waits_at": 3}),
]
NAMES = [
    "-".join([end.__name__, *(str(len(v) if isinstance(v, list) else v) for v in how.values())])
    for end, how in ENDINGS
]


@pytest.mark.parametrize(("end", "how"), ENDINGS, ids=NAMES)
def test_a_stream_gives_its_lease_back_once(
    end: Callable[[Case], Any], how: dict[str, Any]
) -> None:
    async def go() -> None:
        case = Case(**how)
        await end(case)
        assert case.is_released

    asyncio.run(go())


@pytest.mark.parametrize(("end", "how"), ENDINGS[2:], ids=NAMES[2:])
def test_a_body_that_cannot_be_closed_gives_it_back_as_well(
    end: Callable[[Case], Any], how: dict[str, Any]
) -> None:
    async def go() -> None:
        case = Case(closing=RuntimeError("stuck"), **how)
        with suppress(RuntimeError):
            await end(case)
        assert case.is_released

    asyncio.run(go())


@pytest.mark.parametrize(
    "outcome",
    [Response(204), Busy("full"), ZeroDivisionError(), asyncio.CancelledError()],
    ids=["response", "refusal", "bug", "cancelled"],
)
def test_what_has_no_body_to_come_gives_it_back_at_once(outcome: Any) -> None:
    async def go() -> None:
        leases = Leases()
        leases.acquire()

        async def handler(service: str, request: Request) -> Response:
            assert (service, leases.held) == ("service", 2)
            if isinstance(outcome, BaseException):
                raise outcome
            assert isinstance(outcome, Response)
            return outcome

        call = leased(leases, handler)("service", Request("GET", "/"))
        if isinstance(outcome, Response):
            assert await call is outcome
        else:
            with pytest.raises(type(outcome)) as caught:
                await call
            assert caught.value is outcome
        assert leases.held == 1

    asyncio.run(go())


def test_a_lease_is_given_back_once() -> None:
    async def go() -> None:
        leases = Leases()
        first, second = leases.acquire(), leases.acquire()
        for held in (1, 1):
            first.release()
            assert leases.held == held
        second.release()
        second.release()
        assert leases.held == 0

    asyncio.run(go())


# -------------------------------------------------------------------------------- nothing changed


def test_heads_and_frames_are_the_inner_ones() -> None:
    async def go() -> None:
        case = Case()
        inner = EventStream(case.body, headers={"warning": "199 - x"}, heartbeat_s=0.25)

        async def handler(service: object, request: Request) -> EventStream:
            return inner

        outer = await leased(case.leases, handler)(None, case.request)
        assert isinstance(outer, EventStream)
        assert dict(outer.headers) == dict(inner.headers) and "warning" in outer.headers
        assert outer.heartbeat_s == 0.25
        got = await read(outer)
        assert len(got) == 3 and all(a is b for a, b in zip(got, FRAMES, strict=True))

    asyncio.run(go())


def test_frames_are_passed_one_by_one() -> None:
    """The first is waited for before the head goes out, as without a lease; then none ahead."""

    async def go() -> None:
        case = Case()
        result = await case.begin()
        assert isinstance(result, EventStream) and case.body.pulled == 1
        for pulled in (1, 2, 3):
            await anext(result)
            assert case.body.pulled == pulled
        await result.close()

    asyncio.run(go())


# ------------------------------------------------------------------------------------- drained


def test_drained() -> None:
    async def go() -> None:
        leases = Leases()
        await asyncio.wait_for(leases.drained(), WAIT_S)
        first, second = leases.acquire(), leases.acquire()
        waits = [asyncio.ensure_future(leases.drained()) for _ in range(2)]
        await asyncio.sleep(0)
        first.release()
        await asyncio.sleep(0)
        assert not any(wait.done() for wait in waits)
        second.release()
        await asyncio.wait_for(asyncio.gather(*waits), WAIT_S)

    asyncio.run(go())


def test_drained_means_now() -> None:
    """An answer that begins between the last release and the waiter's turn is waited for too."""

    async def go() -> None:
        leases = Leases()
        first = leases.acquire()
        wait = asyncio.ensure_future(leases.drained())
        await asyncio.sleep(0)
        first.release()
        second = leases.acquire()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not wait.done()
        second.release()
        await asyncio.wait_for(wait, WAIT_S)

    asyncio.run(go())


# ------------------------------------------------------------------------------- on real sockets


class Served:
    """Handlers behind leases, on a server."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.is_open = threading.Event()
        self.router = Router(
            [Route("GET", path, self._leased(path)) for path in ("/silent", "/flood", "/wait")]
            + [Route("GET", "/short", self._leased("/short"))]
        )

    def _leased(self, path: str) -> Callable[[Request], Any]:
        handler = getattr(self, path[1:])
        hold = leased(self.leases, lambda _, request: handler(request))
        return lambda request: hold(None, request)

    async def silent(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            yield FRAMES[0]
            self.is_open.set()
            await asyncio.Event().wait()

        return EventStream(frames())

    async def flood(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            while True:
                self.is_open.set()
                yield b"data: " + b"x" * 20_000 + b"\n\n"

        return EventStream(frames())

    async def wait(self, request: Request) -> Response:
        self.is_open.set()
        await asyncio.Event().wait()
        return Response()

    async def short(self, request: Request) -> EventStream:
        async def frames() -> AsyncIterator[bytes]:
            for frame in FRAMES:
                yield frame

        return EventStream(frames())


@pytest.fixture
def served() -> Iterator[tuple[Served, Live]]:
    app = Served()
    with serving(app) as live:
        yield app, live


@pytest.mark.parametrize("path", ["/silent", "/flood", "/wait"])
def test_a_client_that_leaves(served: tuple[Served, Live], path: str) -> None:
    app, live = served
    with live.connect() as client:
        client.send(get(path))
        assert app.is_open.wait(WAIT_S)
        assert live.on_loop(lambda: app.leases.held) == 1
    live.wait_until(lambda: app.leases.held == 0)
    live.call(app.leases.drained())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_to_its_end(served: tuple[Served, Live], method: str) -> None:
    app, live = served
    with live.connect() as client:
        for _ in range(2):  # the connection is as good as before
            client.send(get("/short", method=method))
            status, fields, body = client.answer(has_body=method == "GET")
            assert (status, fields["content-type"]) == (200, "text/event-stream")
            assert body == (b"".join(FRAMES) if method == "GET" else b"")
            live.wait_until(lambda: app.leases.held == 0)


def test_health_while_answers_are_waited_for(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drains waits for the stream; `/health`, itself an answer, neither waits nor stays."""
    services: list[Any] = []
    routes = application.routes

    def watched(service: Any) -> list[Route]:
        services.append(service)
        return routes(service)

    monkeypatch.setattr(application, "routes", watched)
    server = ScriptedApp(tiny_folder, QWEN, home=str(tmp_path))
    with server:
        (service,) = services
        server.engine.says("hello world")
        server.engine.is_endless = True
        with connect(server.address) as sock:
            sock.sendall(post_bytes(CHAT, chat_body(stream=True)))
            read_until(sock, b"world")
            draining = asyncio.run_coroutine_threadsafe(service.leases.drained(), server.loop)
            for _ in range(3):
                assert server.ask("GET", "/health").json() == {"status": "ok"}
            stats = server.ask("GET", "/stats").json()
            assert (stats["sessions"], stats["leases"]) == ({"open": 1}, {"held": 2, "left": 0})
            deadline_s = time.monotonic() + WAIT_S
            while service.leases.held != 1:  # the last answer's own goes with its last byte
                assert time.monotonic() < deadline_s
            assert not draining.done()
        draining.result(WAIT_S)
        assert server.ask("GET", "/health").status == 200
