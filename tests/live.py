"""Running servers for tests: in this process on a thread, or as the real command in a child.

`LiveApp` is the whole product but for the command line: engine thread, service, routes, socket. It
starts in 10 ms on the tiny model, so a test that breaks something takes one of its own. `Child` is
the command itself. Nothing here waits for a fixed time: every wait has an event and a deadline.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlite import app, config, launch
from mlxlite.models import library

ROOT = Path(__file__).parent.parent
WAIT_S = 10.0  # far more than anything here takes; only a failure waits for it
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello world"}]


# ------------------------------------------------------------------------------- on a thread


class LiveApp:
    """The app on a model folder, on a free port. flags: settings, as the command line has them.

    `close` fails if anything escaped into the event loop.
    """

    def __init__(self, folder: Path, *, wait: bool = True, **flags: Any) -> None:
        # Without a prompt cache, so that no test's figures depend on those before it.
        given = {"home": str(folder.parent / "home"), "port": "0", "shutdown_s": "0"}
        given |= {"prompt_cache": "0", **flags}
        self.settings = config.build(given, {})
        self.sock = launch.listen(self.settings)
        self.address = self.sock.getsockname()
        self.lines: list[str] = []
        self.unhandled: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.is_announced = threading.Event()
        self._loop_is_up = threading.Event()
        self.worker = self._start_engine(folder)
        self.name = self.settings.served_name or folder.name
        self._thread = threading.Thread(target=self._run, args=(folder.name,))
        self._thread.start()
        assert self._loop_is_up.wait(WAIT_S)
        if wait:
            assert self.is_announced.wait(WAIT_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def _start_engine(self, folder: Path) -> Any:
        return launch.start_engine(self.settings, library.describe(folder, folder.name))

    def _run(self, name: str) -> None:
        try:
            asyncio.run(self._serve(name))
        except Exception as error:
            self.error = error
        finally:
            self._loop_is_up.set()
            self.is_announced.set()

    async def _serve(self, name: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        self._stop = asyncio.Event()
        self._loop_is_up.set()
        await app.serve(self.settings, name, self.worker, self.sock, self._announce, self._stop)

    def _announce(self, line: str) -> None:
        self.lines.append(line)
        self.is_announced.set()

    def begin_stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self.begin_stop()
            self.join()
        self.sock.close()
        assert self.unhandled == []
        if self.error is not None:
            raise self.error

    def __enter__(self) -> LiveApp:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------- asking it

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        return ask(self.address, method, path, body, headers)

    def chat(self, **body: Any) -> Reply:
        """A chat request; greedy and short unless it says otherwise."""
        return self.ask("POST", CHAT, chat_body(**body))

    def batch(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.ask("GET", "/stats").json()["batch"]
        return stats

    def wait_batch(self, is_true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask `/stats` until it is so."""
        deadline_s = time.monotonic() + WAIT_S
        while not is_true(stats := self.batch()):
            assert time.monotonic() < deadline_s, stats
        return stats


def chat_body(**body: Any) -> dict[str, Any]:
    return {"messages": HELLO, "temperature": 0, "max_tokens": 12, **body}


class Brake:
    """Holds a method at its next call until `free`, or only counts (`hold=False`).

    after: calls that pass first.
    """

    def __init__(self, target: object, name: str, *, after: int = 0, hold: bool = True) -> None:
        self.calls = 0
        self.is_reached = threading.Event()
        self._free = threading.Event()
        if not hold:
            self._free.set()
        original = getattr(target, name)

        def held(*args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls > after:
                self.is_reached.set()
                assert self._free.wait(WAIT_S)
            return original(*args, **named)

        setattr(target, name, held)

    def wait(self) -> None:
        assert self.is_reached.wait(WAIT_S)

    def free(self) -> None:
        self._free.set()


# --------------------------------------------------------------------------------- raw HTTP


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json()["error"]
        return found

    @property
    def text(self) -> str:
        found: str = self.json()["choices"][0]["message"]["content"]
        return found


def ask(
    address: Any,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request on a connection of its own. body: bytes, or what becomes JSON."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", timeout=WAIT_S)
    connection.sock = connect(address)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, response.read())
    finally:
        connection.close()


def connect(address: Any) -> socket.socket:
    """A connected socket. address: (host, port), or the path of a unix socket."""
    if isinstance(address, tuple):
        return socket.create_connection(address[:2], timeout=WAIT_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(WAIT_S)
    sock.connect(str(address))
    return sock


def post_bytes(path: str, body: Any) -> bytes:
    """A whole POST request as bytes for a raw socket."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """Read a raw socket until `mark` has come."""
    data = b""
    while mark not in data:
        part = sock.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    return data


def frames(body: bytes) -> list[Any]:
    """The frames of a chat stream; fails unless every byte is as clients need it.

    Frames are one `data:` line and a blank line; heartbeats, one line each, are skipped.
    """
    found: list[Any] = []
    rest = body.decode()
    while rest:
        if rest.startswith(": keep-alive\n"):
            rest = rest.removeprefix(": keep-alive\n")
            continue
        frame, blank, rest = rest.partition("\n\n")
        assert blank and frame.startswith("data: ") and "\n" not in frame and "\r" not in frame
        value = frame.removeprefix("data: ")
        found.append(value if value == "[DONE]" else json.loads(value))
    return found


def stream_text(found: list[Any]) -> str:
    """The concatenated content of a stream's frames."""
    choices = [choice for frame in found if frame != "[DONE]" for choice in frame["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


# ------------------------------------------------------------------------------ in a child


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment with a home of its own and no setting of the developer's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXLITE_")}
    return {**kept, "MLXLITE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), **more}


def run(home: Path, *arguments: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command `mlxlite`, or a script with its arguments, to its end."""
    what = ["-m", "mlxlite"] if script is None else ["-c", script]
    return subprocess.run(
        [sys.executable, *what, *arguments],
        cwd=ROOT,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=60,
    )


class Child:
    """`mlxlite ...` as a process that goes on; killed at the end if it still does."""

    def __init__(self, home: Path, *arguments: str, deadline_s: float = 60.0, **more: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxlite", *arguments],
            cwd=ROOT,
            env=environment(home, **more),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._watchdog = threading.Timer(deadline_s, self.process.kill)
        self._watchdog.start()
        self.url = ""

    def wait_ready(self) -> Child:
        """Read the start lines; sets `url`."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("mlxlite "), line + self.errors()
        assert self.process.stdout.readline().startswith("try: curl")
        self.url = line.split(" at ")[1].split("/v1")[0]
        return self

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def errors(self) -> str:
        """All of its stderr so far."""
        self._errors.seek(0)
        return self._errors.read()

    def wait_for_error(self, text: str) -> None:
        """Until stderr holds the text."""
        deadline_s = time.monotonic() + WAIT_S
        while text not in self.errors():
            assert time.monotonic() < deadline_s

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watchdog.cancel()
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
