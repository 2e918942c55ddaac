"""Clients that leave while others depend on them, or on whom nobody waits any more (F56, F57).

What one leaver needs is in test_disconnect. Here rows share a prefix, a request, a pool of slots;
one goes, at a point where the engine is held, and the others must say what they say alone. The
engine checks itself at each step, and its memory is what it was before.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine.scheduler import ChunkSizer
from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.types import Event, Finish, RowSpec, Sampling
from tests.live import (
    CHAT,
    WAIT_S,
    Brake,
    LiveApp,
    chat_body,
    connect,
    frames,
    post_bytes,
    read_until,
    stream_text,
)
from tests.rows import PATIENCE_S, PROMPT, Heard, ask

pytestmark = pytest.mark.slow

CHUNK = 32
SHARED = "word12 " * 100  # seven chunks
# What is asked behind it. The last two share more with each other than with the first.
TAILS = ("fox", "dog " * 40 + "one", "dog " * 40 + "two")


def shared_body(tail: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": SHARED + tail}]
    return chat_body(messages=messages, temperature=1.0, seed=5, **more)


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> Callable[..., str]:
    """What a question gets that shares nothing with anybody."""
    known: dict[str, str] = {}

    def text(tail: str) -> str:
        if tail not in known:
            with LiveApp(tiny_folder) as server:
                known[tail] = server.ask("POST", CHAT, shared_body(tail)).text
        return known[tail]

    return text


@pytest.fixture
def server(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveApp]:
    monkeypatch.setenv("MLXLITE_CHECK", "1")
    with LiveApp(tiny_folder, prompt_cache="1") as server:
        server.chat()  # the first answer leaves tables behind that are not its own
        server.worker._loop.scheduler.sizer = ChunkSizer(CHUNK, CHUNK)
        yield server


class Chunks:
    """Lets the engine run chunks of prompts one by one."""

    def __init__(self, server: LiveApp) -> None:
        self.tokens: list[int] = []
        self._may_run = threading.Semaphore(0)
        self._began = threading.Condition()
        batch: Any = server.worker._loop.batch
        self._prefill = batch.prefill
        batch.prefill = self._run

    def _run(self, row: Any, tokens: int) -> Any:
        with self._began:
            self.tokens.append(tokens)
            self._began.notify_all()
        assert self._may_run.acquire(timeout=WAIT_S)
        return self._prefill(row, tokens)

    def wait(self, count: int) -> None:
        """Until this chunk has begun."""
        with self._began:
            assert self._began.wait_for(lambda: len(self.tokens) >= count, WAIT_S)

    def go(self, count: int = 10_000) -> None:
        self._may_run.release(count)


def begin(server: LiveApp, body: dict[str, Any]) -> socket.socket:
    sock = connect(server.address)
    sock.sendall(post_bytes(CHAT, {**body, "stream": True}))
    read_until(sock, b"assistant")  # the engine has it
    return sock


def finish(sock: socket.socket) -> str:
    data = read_until(sock, b"[DONE]\n\n")
    sock.close()
    lines = [line for line in data.split(b"\r\n") if line.startswith(b"data: ")]
    return stream_text(frames(b"".join(lines)))


def wait_requests(server: LiveApp, count: int) -> None:
    """Until the server has noticed who left; the question itself is one more."""
    deadline_s = time.monotonic() + WAIT_S
    while server.ask("GET", "/stats").json()["http"]["requests_active"] != count + 1:
        assert time.monotonic() < deadline_s


def active_bytes(server: LiveApp) -> int:
    """MLX's memory but for the prefixes that are kept, of an idle engine."""
    server.wait_batch(lambda batch: batch["shares_forwards"] is not None)  # the judge is done
    batch = server.wait_batch(lambda batch: batch["active_rows"] == batch["pending_rows"] == 0)
    found: int = batch["memory"]["active_bytes"] - batch["prompt_cache"]["bytes"]
    return found


def wait_for_memory(server: LiveApp, before: int) -> None:
    """Until it is what it was; the engine reads it once a step, so a row may be gone before."""
    server.wait_batch(
        lambda batch: (
            batch["active_rows"] == batch["pending_rows"] == 0
            and batch["memory"]["active_bytes"] - batch["prompt_cache"]["bytes"] - before < SMALL
        )
    )


SMALL = 32 << 10  # one row of these takes 200 KB


@pytest.mark.parametrize("leaver", [0, 1, 2], ids=["the donor", "a middle one", "the last"])
def test_leaving_a_shared_prefix(server: LiveApp, alone: Callable[[str], str], leaver: int) -> None:
    """The second waits for what the first computes, the third for the second. Whoever leaves, the
    others get their own answers, and nothing is computed twice."""
    before = active_bytes(server)
    chunks = Chunks(server)
    socks = [begin(server, shared_body(TAILS[0]))]
    chunks.wait(1)
    socks += [begin(server, shared_body(tail)) for tail in TAILS[1:]]
    server.wait_batch(lambda batch: batch["pending_rows"] == 2)
    chunks.go(1)
    chunks.wait(2)  # the two were admitted before that, and wait
    waiting = [row for row in server.worker._loop.scheduler.live if row.waits_for is not None]
    assert len(waiting) == 2
    socks.pop(leaver).close()
    wait_requests(server, 2)
    chunks.go()
    left = [tail for place, tail in enumerate(TAILS) if place != leaver]
    assert [finish(sock) for sock in socks] == [alone(tail) for tail in left]
    batch = server.batch()
    assert batch["cancelled_rows"] == 1 and batch["failed_rows"] == 0
    # Once each: what all share, what the last two share, and the tails, with a last short chunk.
    longest = max(len(row.spec.prompt_ids) for row in waiting)
    assert sum(chunks.tokens) <= longest + 2 * CHUNK
    wait_for_memory(server, before)


@pytest.mark.parametrize("chunks_before", [2, 5])
def test_leaving_alone_in_prefill(server: LiveApp, chunks_before: int) -> None:
    """What was computed is kept as a prefix, the rest is given back at once."""
    before = active_bytes(server)
    chunks = Chunks(server)
    sock = begin(server, shared_body("fox"))
    chunks.go(chunks_before - 1)
    chunks.wait(chunks_before)
    sock.close()
    wait_requests(server, 0)
    chunks.go()
    wait_for_memory(server, before)
    assert len(chunks.tokens) == chunks_before
    server.ask("POST", CHAT, shared_body("fox"))
    assert server.batch()["cached_tokens"] >= chunks_before * CHUNK


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_leaving_with_all_rows_of_a_request(
    server: LiveApp, alone: Callable[[str], str], where: str
) -> None:
    """One client, five rows; its neighbour, in the same pool, does not notice."""
    before = active_bytes(server)
    brake = Brake(server.worker._loop.batch, "prefill" if where == "prefill" else "step", after=3)
    neighbour = begin(server, shared_body("fox"))
    leaver = begin(server, chat_body(n=5, max_tokens=900, temperature=1.0, seed=1))
    brake.wait()
    leaver.close()
    wait_requests(server, 1)
    brake.free()
    assert finish(neighbour) == alone("fox")
    server.wait_batch(lambda batch: batch["cancelled_rows"] == 5)
    wait_for_memory(server, before)


# -------------------------------------------------------------------------- beside a held row


class Held(Heard):
    """A sink that holds its row from its third event on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = threading.Event()
        self._is_held = False

    def __call__(self, event: Event) -> bool:  # type: ignore[override]  # Heard never holds
        super().__call__(event)
        if event.done is None and len(self.events) == 3:
            self._is_held = True
            self.is_reached.set()
        return self._is_held

    def go_on(self, engine: Worker) -> None:
        self._is_held = False
        engine.resume(self.row_id)


@pytest.fixture
def worker(engine_options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setenv("MLXLITE_CHECK", "1")
    made = Worker(dataclasses.replace(engine_options, prompt_cache_bytes=1 << 24))
    made.start()
    made.wait_ready(PATIENCE_S)
    yield made
    made.stop()


@pytest.mark.parametrize("way", ["cancelled", "at its limit"])
def test_a_row_ends_beside_a_held_one(worker: Worker, way: str) -> None:
    """An engine at rest keeps nothing but the held row's cache: no slot, no token in flight."""
    expected = ask(worker, max_tokens=20).ids
    held = Held()
    held.row_id = worker.submit(RowSpec(PROMPT, Sampling(), 20, frozenset()), held)
    heard = Heard()
    limit = 900 if way == "cancelled" else 12
    heard.row_id = worker.submit(RowSpec((8, 9), Sampling(), limit, frozenset()), heard)
    assert held.is_reached.wait(PATIENCE_S)
    if way == "cancelled":
        worker.cancel(heard.row_id)
    assert heard.finish is (Finish.CANCELLED if way == "cancelled" else Finish.LENGTH)
    batch: Any = worker._loop.batch
    deadline_s = time.monotonic() + PATIENCE_S
    while batch.is_busy or batch.lanes.rows:
        assert time.monotonic() < deadline_s, "something is left in its place"
        time.sleep(0.001)  # the engine's own state has no event to wait for
    held.go_on(worker)
    assert held.finish is Finish.LENGTH and held.ids == expected
