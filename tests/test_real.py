"""The real default model through the real command: it knows Paris, and its text is exact.

One server for all tests; it and the weights are what a newcomer gets from `make run`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.live import CHAT, ROOT, Child, ask, connect, environment, post_bytes, read_until
from tests.scripted import QWEN

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


def test_messages(child: Child) -> None:
    """The same answer by Anthropic's package, plain and streamed; the prompt as it was counted."""
    asked: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": QUESTION}]}
    with anthropic.Anthropic(base_url=child.url, api_key="x", max_retries=0) as client:
        count = client.messages.count_tokens(**asked).input_tokens
        asked.update(max_tokens=60, extra_body={"temperature": 0})
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_text() == answer.content[0].text
    assert "Paris" in answer.content[0].text and answer.stop_reason == "end_turn"
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count


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


# ------------------------------------------------------------------------------------ tools

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}


def history() -> list[dict[str, Any]]:
    """Three earlier calls of one shape: even a small model copies the pattern."""
    messages: list[dict[str, Any]] = []
    for n, (town, degrees) in enumerate((("London", 12), ("Madrid", 25), ("Berlin", 9))):
        call = {"name": "get_weather", "arguments": json.dumps({"town": town})}
        messages += [
            {"role": "user", "content": f"What is the weather in {town}?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{n}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{n}", "content": f"{degrees} degrees"},
            {"role": "assistant", "content": f"It is {degrees} degrees in {town}."},
        ]
    return [*messages, {"role": "user", "content": "What is the weather in Paris?"}]


def test_tool_calls(tmp_path: Path) -> None:
    """Streamed and plain give the same calls, and they can be sent back."""
    template = tmp_path / "qwen.jinja"
    template.write_text(QWEN, encoding="utf-8")
    flags = ("--port", "0", "--chat-template", str(template))
    with (
        Child(HOME, "serve", MODEL, *flags, deadline_s=300) as child,
        openai.OpenAI(base_url=child.wait_ready().url + "/v1", api_key="x") as client,
    ):
        asked: dict[str, Any] = {"model": "any", "temperature": 0, "max_tokens": 60}
        messages = history()
        whole = client.chat.completions.create(messages=messages, tools=[TOOL], **asked)
        choice = whole.choices[0]
        calls = choice.message.tool_calls
        assert calls and choice.finish_reason == "tool_calls"
        assert calls[0].function.name == "get_weather"
        assert json.loads(calls[0].function.arguments) == {"town": "Paris"}

        streamed: dict[int, list[str]] = {}
        text, finish = "", None
        for chunk in client.chat.completions.create(
            messages=messages, tools=[TOOL], stream=True, **asked
        ):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
            for piece in delta.tool_calls or ():
                if piece.id:
                    streamed[piece.index] = [piece.function.name, ""]
                streamed[piece.index][1] += piece.function.arguments
        assert [[c.function.name, c.function.arguments] for c in calls] == list(streamed.values())
        assert text == (choice.message.content or "") and finish == "tool_calls"

        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "18 degrees"}
        answer = client.chat.completions.create(
            messages=[*messages, choice.message, result], tools=[TOOL], **asked
        )
        assert "18 degrees" in answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None
