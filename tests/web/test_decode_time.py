"""What a page that is open costs the model: decode steps with and without it, in turns.

Figures are medians of the engine's newest steps, as `/stats` has them; pairs are taken one after
the other (decision D25). Run with `-m "web and bench"`.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.browser import Page
from tests.live import CHAT, ask, connect, post_bytes
from tests.web.acts import READY, say

pytestmark = [pytest.mark.web, pytest.mark.real, pytest.mark.bench]

PAIRS = 5
SEGMENT_S = 8.0  # fills the engine's window of newest steps
STORY = "Write a very long story about the sea, in twenty chapters."
ENDLESS = {"temperature": 1, "max_tokens": 4000, "logit_bias": {"0": -100, "2": -100}}


def step_ms(address: tuple[str, int]) -> float:
    """The median step of a segment that begins now."""
    time.sleep(SEGMENT_S)  # what is measured is time
    found: float = ask(address, "GET", "/stats").json()["batch"]["decode_step_ms"]
    return found


@contextmanager
def streaming(address: tuple[str, int]) -> Iterator[None]:
    """A client that takes an endless answer."""
    body = {"messages": [{"role": "user", "content": STORY}], "stream": True, **ENDLESS}
    sock = connect(address)
    sock.sendall(post_bytes(CHAT, body))

    def drain() -> None:
        while sock.recv(65536):
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    yield
    sock.shutdown(2)
    reader.join()
    sock.close()


def report(name: str, pairs: list[tuple[float, float]]) -> None:
    added = statistics.median(shown / away - 1 for away, shown in pairs)
    print(f"{name}: {100 * added:+.1f} % {json.dumps([[round(x, 2) for x in p] for p in pairs])}")


@pytest.fixture
def address(real_url: str) -> tuple[str, int]:
    parts = urlsplit(real_url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


def test_status_view(tab: Page, real_url: str, address: tuple[str, int]) -> None:
    pairs = []
    with streaming(address):
        for _ in range(PAIRS):
            tab.goto("about:blank")
            away = step_ms(address)
            tab.goto(real_url + "/#/status")
            tab.wait("document.querySelector('.facts dd')")
            pairs.append((away, step_ms(address)))
    report("status view", pairs)


def test_chat_view(tab: Page, real_url: str, address: tuple[str, int]) -> None:
    """An answer that the page shows, against one that a plain client takes."""
    pairs = []
    for _ in range(PAIRS):
        tab.goto("about:blank")
        with streaming(address):
            away = step_ms(address)
        tab.goto(real_url + "/#/chat")
        tab.wait(READY)
        say(tab, STORY)
        pairs.append((away, step_ms(address)))
        assert tab.run("Boolean(document.querySelector('.send.is-stop'))")  # it was not over
        tab.press("Escape")
        tab.wait("!document.querySelector('.send.is-stop')")
    report("chat view", pairs)
