"""The server and its event loop inside this process, its clients outside (floor 4).

What the server costs is measured where its engine can be run without it, in turns, so that both see
the same noise (decision D25).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlxlite import app, launch
from mlxlite.config import Settings
from mlxlite.types import JSON

if TYPE_CHECKING:
    from mlxlite.engine.worker import Worker

_START_S = 120.0

# Opens the streams that stdin's first line tells of and prints how long they took; once for each
# line. All it does with what comes is to drop it.
_CLIENT = """
import json, selectors, socket, sys, time
for line in sys.stdin:
    port, requests = json.loads(line)
    reader = selectors.DefaultSelector()
    started = time.perf_counter()
    for path, body in requests:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(f"{head}Content-Length: {len(data)}\\r\\n\\r\\n".encode() + data)
        reader.register(client, selectors.EVENT_READ)
    while reader.get_map():
        for key, _ in reader.select():
            if not key.fileobj.recv(1 << 16):
                reader.unregister(key.fileobj)
                key.fileobj.close()
    print(time.perf_counter() - started, flush=True)
"""


class Inside:
    """A running server and its client."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, client: subprocess.Popen[str]):
        self._loop = loop
        self._port = port
        self._client = client

    def cpu_s(self, turns: int = 0) -> float:
        """CPU time of the event loop's thread so far, after so many more turns of the loop."""
        found: Future[float] = Future()

        def turn(left: int) -> None:
            if left:
                self._loop.call_soon(turn, left - 1)
            else:
                found.set_result(time.thread_time())

        self._loop.call_soon_threadsafe(turn, turns)
        return found.result(_START_S)

    def ask(self, requests: Sequence[tuple[str, JSON]]) -> None:
        """Let the client open these streams, (path, body) each, and drop what comes."""
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps([self._port, requests]) + "\n")
        self._client.stdin.flush()

    def wait(self) -> float:
        """Until the client has read them to their ends: seconds from the first connect."""
        assert self._client.stdout is not None
        return float(self._client.stdout.readline())


@contextmanager
def serving(settings: Settings, name: str, engine: Worker) -> Iterator[Inside]:
    """An engine behind the whole server, on a thread."""
    sock = launch.listen(settings)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready = threading.Event()
    work = app.serve(settings, name, engine, sock, lambda line: ready.set(), until=stop)
    thread = threading.Thread(target=loop.run_until_complete, args=(work,))
    thread.start()
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if not ready.wait(_START_S):
            raise TimeoutError("the server did not start")
        with client:
            yield Inside(loop, int(sock.getsockname()[1]), client)
    finally:
        client.kill()
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        sock.close()
