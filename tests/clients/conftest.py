"""What all tests of real clients share: a scripted server, the real one, and no network.

Clients are heavy to import (seconds each), so the test files import them inside functions: the
collection of the rest of the suite stays quick, and what a client does while it is imported happens
under the guard below too.
"""

from __future__ import annotations

import gc
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import Child
from tests.turns import THINKER, TurnsApp

HOME = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
MODEL = "smollm2-135m"
# The clients keep connections for their own life and close none of them. Every file here says that
# this is no error; what is left at its end is collected in `nothing_left`.
UNCLOSED = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
LOOPBACK = ("127.0.0.1", "::1", "localhost", b"127.0.0.1", b"localhost", None)

# Each says to one of the clients: send nothing home, fetch nothing.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else importing litellm fetches a table of prices
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
# Settings of the developer's own that would lead a client elsewhere.
FOREIGN = ("OPENAI_", "ANTHROPIC_", "AZURE_", "LITELLM_", "LANGSMITH_", "LANGCHAIN_")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(scope="session")
def attempts() -> Iterator[list[Any]]:
    """Every try to leave the loopback since the last look; each raised.

    Clients swallow errors of their telemetry, so that a raise alone would go unseen.
    """
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(FOREIGN) or name in PROXIES:
                patch.delenv(name)
        for name, value in QUIET.items():
            patch.setenv(name, value)
        _guard(patch, found)
        yield found


def _guard(patch: pytest.MonkeyPatch, found: list[Any]) -> None:
    look_up = socket.getaddrinfo

    def refuse(address: Any) -> None:
        found.append(address)
        raise OSError(f"a client tried to reach {address!r}")

    def is_here(sock: socket.socket, address: Any) -> bool:
        return sock.family == socket.AF_UNIX or address[0] in LOOPBACK

    for name in ("connect", "connect_ex"):
        original = getattr(socket.socket, name)

        def guarded(sock: socket.socket, address: Any, original: Any = original) -> Any:
            if not is_here(sock, address):
                refuse(address)
            return original(sock, address)

        patch.setattr(socket.socket, name, guarded)

    def guarded_look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if host not in LOOPBACK:
            refuse(host)
        return look_up(host, *rest, **named)

    patch.setattr(socket, "getaddrinfo", guarded_look_up)


@pytest.fixture(autouse=True)
def loopback_only(attempts: list[Any]) -> Iterator[list[Any]]:
    """Fails a test in which anything tried to leave the loopback."""
    yield attempts
    found = list(attempts)
    attempts.clear()
    assert found == []


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """What a file's clients left open is no other file's fault."""
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def shared_app(tiny_folder: Path, attempts: list[Any]) -> Iterator[TurnsApp]:
    with TurnsApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture
def app(shared_app: TurnsApp) -> Iterator[TurnsApp]:
    """The whole server around a script; the test must use its script up."""
    shared_app.engine.specs.clear()
    yield shared_app
    shared_app.end()


@pytest.fixture(scope="session")
def real_url() -> Iterator[str]:
    """The real command on the real default model."""
    assert (HOME / "models" / MODEL).is_dir(), f"run `mlxlite get {MODEL}` first"
    with Child(HOME, "serve", MODEL, "--port", "0", deadline_s=900) as child:
        yield child.wait_ready().url
        assert "Traceback" not in child.errors()
