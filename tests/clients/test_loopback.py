"""The guard that the other files rely on: nothing leaves the loopback unseen."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tests.turns import TurnsApp

pytestmark = pytest.mark.clients

NOWHERE = ("192.0.2.1", 80)  # reserved for documentation: never routed


def test_leaving_raises_and_is_noted(loopback_only: list[Any]) -> None:
    async def dial() -> None:
        await asyncio.open_connection(*NOWHERE)

    with socket.socket() as sock:
        for leave in (
            lambda: sock.connect(NOWHERE),
            lambda: sock.connect_ex(NOWHERE),
            lambda: socket.create_connection(NOWHERE),
            lambda: socket.getaddrinfo("example.org", 443),
            lambda: asyncio.run(dial()),
        ):
            with pytest.raises(OSError, match="tried to reach"):
                leave()
            assert loopback_only
            loopback_only.clear()


def test_the_server_is_reached(app: TurnsApp) -> None:
    app.script("hello")
    assert app.chat(max_tokens=None).text == "hello"
