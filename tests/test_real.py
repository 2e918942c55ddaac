"""The real default model through the real command: it knows Paris, and its text is exact.

One server for all tests; it and the weights are what a newcomer gets from `make run`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.live import CHAT, ROOT, Child, ask, connect, environment, post_bytes, read_until

pytestmark = pytest.mark.real

HOME = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France? Answer in one sentence."
EMOJI = "Repeat exactly: \U0001f642\U0001f642 한국어"


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    assert (HOME / "models" / MODEL).is_dir(), f"run `mlxlite get {MODEL}` first"
    with Child(HOME, "serve", MODEL, "--port", "0", deadline_s=300) as child:
        yield child.wait_ready()
        child.signal(signal.SIGTERM)
        assert child.wait() == 0
        assert "Traceback" not in child.errors()


@pytest.fixture(scope="module")
def client(child: Child) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=child.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def plain_and_streamed(client: openai.OpenAI, text: str, **sampling: Any) -> tuple[Any, str]:
    asked = {"model": "any", "messages": [{"role": "user", "content": text}], **sampling}
    chunks = client.chat.completions.create(stream=True, **asked)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return client.chat.completions.create(**asked), streamed


def test_paris(client: openai.OpenAI) -> None:
    answer, streamed = plain_and_streamed(client, QUESTION, temperature=0)
    text = answer.choices[0].message.content
    assert "Paris" in text and text == streamed
    assert answer.model == MODEL and answer.choices[0].finish_reason == "stop"
    assert 30 < answer.usage.prompt_tokens < 60 and answer.usage.completion_tokens < 40


def test_emoji(client: openai.OpenAI) -> None:
    """Characters that are split over tokens survive the stream (F23, F25)."""
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        answer, streamed = plain_and_streamed(client, EMOJI, max_tokens=20, **sampling)
        text = answer.choices[0].message.content
        assert streamed == text
        if sampling["temperature"] == 0:
            assert not text.isascii()  # it did repeat some of them, so something was split


def test_generate() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxlite", "generate", MODEL, QUESTION, "--temperature", "0"],
        cwd=ROOT,
        env=environment(HOME),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "prompt tokens" in done.stderr and "tok/s" in done.stderr


@pytest.mark.parametrize("text", [QUESTION, "Tell me about France. " * 200])
def test_leaving(child: Child, text: str) -> None:
    """A client killed in decode and one in a long prefill: no row is left a step later."""
    messages = [{"role": "user", "content": text}]
    sock = connect(child.address)
    sock.sendall(post_bytes(CHAT, {"messages": messages, "stream": True}))
    read_until(sock, b'{"content":"' if text == QUESTION else b"assistant")
    sock.close()
    while True:  # the watchdog of the child ends it
        batch = ask(child.address, "GET", "/stats").json()["batch"]
        if batch["active_rows"] == batch["pending_rows"] == 0:
            break
    assert batch["cancelled_rows"] >= 1
