"""Clients that leave, faults that stay where they are, streams that wait (F54, F56, F57, D19).

Raw sockets against servers whose engine is held at a known point, so that nothing depends on time.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine.scheduler import ChunkSizer
from mlxlite.text.guides import TextGuide
from mlxlite.types import Verdict
from tests.live import (
    CHAT,
    WAIT_S,
    Brake,
    LiveApp,
    Reply,
    chat_body,
    connect,
    frames,
    post_bytes,
    read_until,
    stream_text,
)

pytestmark = pytest.mark.slow

LONG = [{"role": "user", "content": "word12 " * 200}]  # many chunks of prefill
PLAIN_AND_STREAMED = pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
ENDINGS = pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])


@pytest.fixture
def server(tiny_folder: Path) -> Iterator[LiveApp]:
    with LiveApp(tiny_folder) as server:
        cut_small(server)
        yield server


def cut_small(server: LiveApp) -> None:
    """Prefill in chunks of 32 tokens, however fast this machine is."""
    server.worker._loop.scheduler.sizer = ChunkSizer(32, 32)


def begin(server: LiveApp, **body: Any) -> socket.socket:
    sock = connect(server.address)
    sock.sendall(post_bytes(CHAT, chat_body(**body)))
    return sock


def leave(sock: socket.socket, is_reset: bool) -> None:
    """Close in order, or as a killed process with unread bytes does."""
    if is_reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def wait_until_noticed(server: LiveApp) -> None:
    """Until the engine was told; `/stats` itself is the one request that is left."""
    deadline_s = time.monotonic() + WAIT_S
    while server.ask("GET", "/stats").json()["http"]["requests_active"] > 1:
        assert time.monotonic() < deadline_s


def is_empty(batch: dict[str, Any]) -> bool:
    return batch["active_rows"] == batch["pending_rows"] == 0


# ------------------------------------------------------------------------ clients that leave


@PLAIN_AND_STREAMED
@ENDINGS
def test_leaving_in_prefill(server: LiveApp, is_stream: bool, is_reset: bool) -> None:
    """Noticed between two chunks: the rest of the prompt is never run (F57)."""
    brake = Brake(server.worker._loop.batch, "prefill", after=1)
    sock = begin(server, messages=LONG, stream=is_stream)
    brake.wait()
    leave(sock, is_reset)
    wait_until_noticed(server)
    brake.free()
    batch = server.wait_batch(is_empty)
    assert brake.calls == 2  # the chunk that was running, no other
    assert (batch["cancelled_rows"], batch["generated_tokens"]) == (1, 0)
    assert server.chat().status == 200


@PLAIN_AND_STREAMED
@ENDINGS
def test_leaving_in_decode(server: LiveApp, is_stream: bool, is_reset: bool) -> None:
    """Gone within one step, also where nothing is streamed (F56)."""
    brake = Brake(server.worker._loop.batch, "step", after=4)
    sock = begin(server, max_tokens=500, stream=is_stream)
    brake.wait()
    if is_stream:
        read_until(sock, b'{"content":"')
    leave(sock, is_reset)
    wait_until_noticed(server)
    brake.free()
    batch = server.wait_batch(is_empty)
    assert brake.calls == 5
    assert batch["cancelled_rows"] == 1 and batch["generated_tokens"] <= 5
    assert server.chat().status == 200


@PLAIN_AND_STREAMED
def test_leaving_the_queue(tiny_folder: Path, is_stream: bool) -> None:
    """A request that waits for a row is forgotten before it costs anything."""
    with LiveApp(tiny_folder, batch="1") as server, ThreadPoolExecutor(1) as pool:
        alone = server.chat().text
        prefills = Brake(server.worker._loop.batch, "prefill", hold=False)
        brake = Brake(server.worker._loop.batch, "step")
        running = pool.submit(server.chat)
        brake.wait()
        done_prefills = prefills.calls
        sock = begin(server, messages=LONG, stream=is_stream)
        server.wait_batch(lambda batch: batch["pending_rows"] == 1)
        leave(sock, is_reset=False)
        while server.ask("GET", "/stats").json()["http"]["requests_active"] > 2:
            pass
        brake.free()
        assert running.result().text == alone
        batch = server.wait_batch(is_empty)
        assert (batch["cancelled_rows"], prefills.calls) == (1, done_prefills)


def test_half_requests_cost_nothing(server: LiveApp) -> None:
    whole = post_bytes(CHAT, chat_body())
    for end in (1, 20, len(whole) // 2, len(whole) - 1):
        sock = connect(server.address)
        sock.sendall(whole[:end])
        sock.close()
    assert server.chat().status == 200
    assert server.batch()["submitted_rows"] == 1


def test_neighbours_of_leavers(server: LiveApp) -> None:
    """Of many streams half leave at different moments; the others are as if they were alone."""

    def body(n: int) -> dict[str, Any]:
        return {"max_tokens": 30, "temperature": 1.0, "seed": n, "stream": True}

    alone = [stream_text(frames(server.chat(**body(n)).body)) for n in range(4)]
    with ThreadPoolExecutor(6) as pool:

        def leaver(n: int) -> None:
            sock = begin(server, **{**body(n), "max_tokens": 300})
            seen = 0
            while seen <= n:
                seen += read_until(sock, b"data: ").count(b"data: ")
            sock.close()

        leavers = [pool.submit(leaver, n) for n in range(4)]
        stayers = [pool.submit(server.chat, **body(n)) for n in range(4)]
        assert [stream_text(frames(each.result().body)) for each in stayers] == alone
        for each in leavers:
            each.result()
    server.wait_batch(is_empty)


def test_pipelined_requests_answer_in_order(server: LiveApp) -> None:
    sock = connect(server.address)
    sock.sendall(post_bytes(CHAT, chat_body(max_tokens=3)) * 2 + post_bytes(CHAT, {}))
    data = read_until(sock, b"messages required")
    assert data.count(b"HTTP/1.1 200 OK") == 2 and data.count(b"HTTP/1.1 400 ") == 1
    sock.close()


# --------------------------------------------------------------------------------- the queue


def test_queue_full(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, batch="1", queue="1") as server, ThreadPoolExecutor(2) as pool:
        brake = Brake(server.worker._loop.batch, "step")
        accepted = [pool.submit(server.chat)]
        brake.wait()
        accepted.append(pool.submit(server.chat, stream=True))
        server.wait_batch(lambda batch: batch["pending_rows"] == 1)
        for is_stream in (False, True):
            reply = server.chat(stream=is_stream)
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert (reply.error["code"], reply.error["type"]) == (
                "queue_full",
                "rate_limit_error",
            )
            assert reply.error["message"] == "admission queue is full"
        assert server.chat(temperature=-1).status == 400  # judged before the queue
        assert server.chat(max_tokens=0).status == 200  # needs no row
        brake.free()
        assert [each.result().status for each in accepted] == [200, 200]
        assert frames(accepted[1].result().body)[-1] == "[DONE]"
        assert server.batch()["rejected_rows"] == 2
        assert server.chat().status == 200


# ------------------------------------------------------------------------------- faults stay


@pytest.fixture
def faulty_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide that fails at its fifth token, for requests whose stop string is BOOM."""

    class Faulty(TextGuide):
        def __init__(self, sink: Any, **options: Any) -> None:
            super().__init__(sink, **options)
            self.is_faulty = any("BOOM" in each.stop for each in sink._stops._automata)
            self.seen = 0

        def observe(self, ids: Any) -> Verdict:
            self.seen += len(ids)
            if self.is_faulty and self.seen >= 5:
                raise ZeroDivisionError("the guide is broken")
            return super().observe(ids)

    monkeypatch.setattr("mlxlite.prepare.TextGuide", Faulty)


def broken_off(reply: Reply) -> dict[str, Any]:
    """Check a stream that failed half-way: an error frame, the end, no [DONE]."""
    assert reply.status == 200
    *before, last = frames(reply.body)
    assert before and "[DONE]" not in before and last != "[DONE]"
    assert all(choice["finish_reason"] is None for f in before for choice in f["choices"])
    assert set(last) == {"error"}
    error: dict[str, Any] = last["error"]
    assert error["type"] == "server_error"
    return error


def test_a_fault_in_one_row_stays_there(
    server: LiveApp, faulty_guide: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # the fault is logged with its stack, as it should be
    alone = server.chat(max_tokens=40, stop="never there").text
    with ThreadPoolExecutor(6) as pool:
        good = [
            pool.submit(server.chat, max_tokens=40, stop="never there", stream=is_stream)
            for is_stream in (False, True, False, True)
        ]
        bad = [
            pool.submit(server.chat, max_tokens=40, stop="BOOM", stream=is_stream)
            for is_stream in (False, True)
        ]
        assert good[0].result().text == good[2].result().text == alone
        for each in (good[1], good[3]):
            assert stream_text(frames(each.result().body)) == alone
            assert frames(each.result().body)[-1] == "[DONE]"
        plain = bad[0].result()
        assert (plain.status, plain.error["code"]) == (500, "engine_fault")
        assert broken_off(bad[1].result())["code"] == "engine_fault"
    assert server.batch()["failed_rows"] == 2
    assert server.chat(max_tokens=40).text == alone


@PLAIN_AND_STREAMED
def test_a_fault_in_the_forward(
    server: LiveApp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_stream: bool,
) -> None:
    """It ends the rows of that step, once, and the next request is answered (F54)."""
    caplog.set_level(logging.CRITICAL)
    alone = server.chat().text
    batch = server.worker._loop.batch
    assert batch is not None
    original, calls = batch.lanes.forward, iter(range(1000))

    def failing(*args: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("no memory left")
        return original(*args)

    monkeypatch.setattr(batch.lanes, "forward", failing)
    reply = server.chat(stream=is_stream)
    error = broken_off(reply) if is_stream else reply.error
    assert error["code"] == "engine_fault" and "no memory left" in error["message"]
    assert is_stream or reply.status == 500
    assert server.chat().text == alone
    assert server.ask("GET", "/health").status == 200


@PLAIN_AND_STREAMED
def test_a_fault_in_prefill(
    server: LiveApp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_stream: bool,
) -> None:
    caplog.set_level(logging.CRITICAL)
    alone = server.chat().text
    original = server.worker._loop.batch.prefill  # type: ignore[union-attr]

    def failing(row: Any, tokens: int) -> None:
        if len(row.spec.prompt_ids) > 200:
            raise RuntimeError("prompt of doom")
        original(row, tokens)

    monkeypatch.setattr(server.worker._loop.batch, "prefill", failing)
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(server.chat)
        reply = pool.submit(server.chat, messages=LONG, stream=is_stream).result()
        error = broken_off(reply) if is_stream else reply.error
        assert "prompt of doom" in error["message"]
        assert good.result().text == alone


@PLAIN_AND_STREAMED
def test_a_bug_in_rendering(
    server: LiveApp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_stream: bool,
) -> None:
    """What nobody foresaw is a 500, or an error frame, without its inner words; the row ends."""
    caplog.set_level(logging.CRITICAL)

    def broken(*args: Any) -> Any:
        raise KeyError("secret detail")

    name = "Texts.frame" if is_stream else "render_whole"
    monkeypatch.setattr(f"mlxlite.api.openai.{name}", broken)
    reply = server.chat(stream=is_stream, max_tokens=500 if is_stream else 5)
    error = broken_off(reply) if is_stream else reply.error
    assert error["message"] == "internal error" and b"secret" not in reply.body
    server.wait_batch(is_empty)


# ------------------------------------------------------------------------------- heartbeats


def test_heartbeats_in_a_slow_prefill(tiny_folder: Path) -> None:
    """Comments between frames, one line each, and the answer is what it was (F17, F19)."""
    with LiveApp(tiny_folder, heartbeat_s="0.05", prompt_cache="0") as server:
        cut_small(server)
        text = server.chat(messages=LONG).text
        brake = Brake(server.worker._loop.batch, "prefill", after=1)
        sock = begin(server, messages=LONG, stream=True)
        brake.wait()
        data = b""
        while data.count(b": keep-alive\n") < 2:
            data += read_until(sock, b": keep-alive\n")
        assert b'"role":"assistant"' in data  # the first frame does not wait for the prompt
        brake.free()
        data += read_until(sock, b"data: [DONE]\n\n")
        sock.close()
        body = unchunked(data.partition(b"\r\n\r\n")[2])
        assert b": keep-alive\n\n" not in body
        assert stream_text(frames(body)) == text


def unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        body, data = body + data[:length], data[length + 2 :]
    return body


def test_a_slow_client_holds_nobody_up(server: LiveApp) -> None:
    """A client that does not read gets its answer later; its neighbour gets its own at once."""
    sock = begin(server, max_tokens=60, stream=True)
    read_until(sock, b"assistant")
    assert server.chat().status == 200
    server.wait_batch(is_empty)
    assert b"data: [DONE]\n\n" in read_until(sock, b"[DONE]\n\n")
    sock.close()


def test_leaving_does_not_wait_for_a_neighbours_prefill(server: LiveApp) -> None:
    """Cancels are taken between any two steps, whoever they serve."""
    brake = Brake(server.worker._loop.batch, "prefill", after=2)
    first = begin(server, max_tokens=900, stream=True)
    read_until(first, b'{"content":"')
    second = begin(server, messages=LONG, stream=True)
    brake.wait()
    first.close()
    while server.ask("GET", "/stats").json()["http"]["requests_active"] > 2:
        pass
    brake.free()
    server.wait_batch(lambda batch: batch["cancelled_rows"] == 1)
    assert b"[DONE]" in read_until(second, b"[DONE]")
    second.close()
