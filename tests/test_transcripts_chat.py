"""Event transcripts of chat completions and completions, judged by the grammar of `chunks.py`.

The model is a script, the rest is the live server; every answer is asked for plain and streamed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.types import Finish
from tests import chunks
from tests.chunks import COMPLETIONS, both, both_texts
from tests.live import CHAT, HELLO, Brake, connect, post_bytes, read_until
from tests.scripted import ScriptedApp
from tests.turns import THINKER, Turn, TurnsApp, call

pytestmark = pytest.mark.slow

ADD, WEATHER = call("add", a=1, b=2), call("weather", town="Rome")
SUM, ROME = ("add", {"a": 1, "b": 2}), ("weather", {"town": "Rome"})
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "weather")
]
ERROR = {
    "message": "the step failed",
    "type": "server_error",
    "param": None,
    "code": "engine_fault",
}


@pytest.fixture(scope="module")
def app(tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture(scope="module")
def turns(tiny_folder: Path) -> Iterator[TurnsApp]:
    with TurnsApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture(autouse=True)
def unbroken(app: ScriptedApp) -> Iterator[None]:
    yield
    app.engine.error, app.engine.is_endless = None, False


# ------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize("portion", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "end", "shape"),
    [
        ("", Finish.EOS, ("", "", [], "stop")),
        ("", Finish.LENGTH, ("", "", [], "length")),
        ("Paris.", Finish.EOS, ("", "Paris.", [], "stop")),
        ("\U0001f642 한국어", Finish.EOS, ("", "\U0001f642 한국어", [], "stop")),
        (ADD, Finish.EOS, ("", "", [SUM], "tool_calls")),
        (f"{ADD}\n{WEATHER}", Finish.EOS, ("", "", [SUM, ROME], "tool_calls")),
        ("<think>hm</think>", Finish.EOS, ("hm", "", [], "stop")),
        ("<think>hm", Finish.LENGTH, ("hm", "", [], "length")),
        (
            f"<think>hm</think>So: {ADD}\n{WEATHER}",
            Finish.EOS,
            ("hm", "So: ", [SUM, ROME], "tool_calls"),
        ),
        (f"{ADD} and", Finish.LENGTH, ("", " and", [SUM], "tool_calls")),
    ],
    ids=["empty", "cut-empty", "text", "split-characters", "call", "calls", "reasoning",
         "cut-reasoning", "reasoning-text-calls", "text-after-a-call"],
)  # fmt: skip
def test_chat(app: ScriptedApp, text: str, end: Finish, shape: Any, portion: int) -> None:
    app.engine.says(text, portion, end)
    (choice,) = both(app, tools=TOOLS).choices
    assert choice.shape == shape


def test_the_words_of_a_full_answer(app: ScriptedApp) -> None:
    """What the grammar read is what it is meant to see: all of its words, in this order."""
    app.engine.says(f"<think>hm, well</think>So it is {ADD}{WEATHER}")
    (choice,) = both(app, tools=TOOLS).choices
    words = choice.words.split()
    order = [word for n, word in enumerate(words) if n == 0 or word != words[n - 1]]
    calls = ["call", "arguments", "call", "arguments"]
    assert order == ["opening", "reasoning", "text", *calls, "finish"]


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body.replace(DONE, b""),
        lambda body: body + DONE,
        lambda body: body.replace(DONE, b'data: {"error":{}}\n\n'),
        lambda body: body[body.index(b"\n\n") + 2 :],
        lambda body: body.replace(b'"content":"k"', b'"content":""'),
        lambda body: body.replace(b'"index":1,"id"', b'"index":2,"id"'),
        lambda body: body.replace(b'"index":1,"id"', b'"index":0,"id"'),
        lambda body: body.replace(b'"finish_reason":"tool_calls"', b'"finish_reason":"stop"'),
        lambda body: body.replace(b'"finish_reason":"tool_calls"', b'"finish_reason":null'),
        lambda body: body.replace(b'"reasoning":"', b'"thought":"', 1),
        lambda body: body.replace(b'"object":"chat.completion.chunk"', b'"object":"x"', 1),
        lambda body: body.replace(b"data: [DONE]", body.split(b"\n\n")[-3] + b"\n\ndata: [DONE]"),
    ],
    ids=["no-done", "two-dones", "error-and-finish", "no-opening", "empty-text", "index-left-out",
         "index-again", "wrong-reason", "no-reason", "one-name-of-two", "other-object",
         "two-finishes"],
)  # fmt: skip
def test_the_grammar_refuses(app: ScriptedApp, spoil: Any) -> None:
    """A good stream with one thing wrong."""
    app.engine.says(f"<think>hm</think>ok{ADD}{WEATHER}")
    body = app.chat(tools=TOOLS, stream=True, max_tokens=None).body
    assert chunks.read(body).choices[0].shape == ("hm", "ok", [SUM, ROME], "tool_calls")
    spoilt = spoil(body)
    assert spoilt != body
    with pytest.raises((AssertionError, KeyError, ValueError)):
        chunks.read(spoilt)


def test_several_choices(turns: TurnsApp) -> None:
    """Each is a transcript of its own; calls, ids and finishes of one are none of the other's."""
    texts = ["", f"<think>hm</think>ok{ADD}{WEATHER}", ADD]
    for _ in range(3):  # plain, with usage, without
        turns.engine.turns += map(Turn, texts)
    found = both(turns, tools=TOOLS, n=3).choices
    assert [choice.shape for choice in found] == [
        ("", "", [], "stop"),
        ("hm", "ok", [SUM, ROME], "tool_calls"),
        ("", "", [SUM], "tool_calls"),
    ]
    turns.end()


def test_log_probabilities(app: ScriptedApp) -> None:
    """One entry a token, in chunks of their own where the text is withheld."""
    app.engine.says(f"<think>hm</think>ok {ADD}")
    count = sum(len(portion) for portion in app.engine.portions)
    (choice,) = both(app, tools=TOOLS, logprobs=True, top_logprobs=1).choices
    assert choice.entries == count and "entries" in choice.words


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", ("", "", 0)),
        ("half an ans", ("", "half an ans", 0)),
        ("<think>hm", ("hm", "", 0)),
        (f"<think>hm</think>so {ADD}", ("hm", "so ", 1)),
        (f"{ADD}{WEATHER[:-20]}", ("", "", 2)),
    ],
    ids=["empty", "text", "reasoning", "after-a-call", "in-a-call"],
)
@pytest.mark.parametrize("wants_usage", [False, True], ids=["bare", "usage"])
def test_chat_error_in_mid_stream(
    app: ScriptedApp, text: str, shape: Any, wants_usage: bool
) -> None:
    """Clients.md, Streams 3: an error frame, then the end: no finish, no usage, no [DONE]."""
    app.engine.says(text, 1, Finish.ERROR)
    app.engine.error = Turn("", Finish.ERROR).error
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": None}
    options = {"include_usage": wants_usage}
    reply = app.chat(**asked, stream=True, stream_options=options)
    found = chunks.read(reply, wants_usage=wants_usage, is_broken=True)
    (choice,) = found.choices
    assert (choice.reasoning, choice.text, len(choice.calls)) == shape and choice.finish is None
    assert found.error == ERROR
    assert (app.chat(**asked).status, app.chat(**asked).error) == (500, ERROR)


def test_one_of_several_choices_fails(turns: TurnsApp) -> None:
    """The fault of one is the end of all; what the other got stays right."""
    turns.script("fine", Turn("half", Finish.ERROR))
    found = chunks.read(turns.chat(n=2, stream=True, max_tokens=None), n=2, is_broken=True)
    assert found.error == ERROR
    first, second = found.choices
    assert first.finish in (None, "stop") and "fine".startswith(first.text)
    assert second.finish is None and "half".startswith(second.text)
    turns.end()


# -------------------------------------------------------------------------------- completions


@pytest.mark.parametrize("portion", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "end", "finish"),
    [
        ("", Finish.EOS, "stop"),
        ("", Finish.LENGTH, "length"),
        ("Paris.", Finish.EOS, "stop"),
        ("\U0001f642 한국어", Finish.LENGTH, "length"),
        (f"<think>hm</think>ok{ADD}", Finish.EOS, "stop"),
    ],
    ids=["empty", "cut-empty", "text", "split-characters", "markup-is-text"],
)
@pytest.mark.parametrize("echo", [False, True], ids=["", "echo"])
def test_completions(
    app: ScriptedApp, text: str, end: Finish, finish: str, echo: bool, portion: int
) -> None:
    app.engine.says(text, portion, end)
    for choice in both_texts(app, echo=echo, prompt=["hello", "world"], max_tokens=500).choices:
        assert (choice.text.removeprefix("hello").removeprefix("world"), choice.finish) == (
            text,
            finish,
        )
        assert choice.text.startswith(("hello", "world")) == echo


def test_log_probabilities_of_completions(app: ScriptedApp) -> None:
    app.engine.says("Paris \U0001f642")
    count = sum(len(portion) for portion in app.engine.portions)
    (choice,) = both_texts(app, logprobs=1).choices
    assert (
        choice.entries == count and "entries" in choice.words and choice.text == "Paris \U0001f642"
    )


@pytest.mark.parametrize("text", ["", "half an ans"], ids=["empty", "text"])
def test_completions_error_in_mid_stream(app: ScriptedApp, text: str) -> None:
    app.engine.says(text, 1, Finish.ERROR)
    app.engine.error = Turn("", Finish.ERROR).error
    asked = {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}
    reply = app.ask("POST", COMPLETIONS, asked)
    found = chunks.read(reply, wants_usage=True, is_broken=True, is_chat=False)
    assert (found.choices[0].text, found.choices[0].finish) == (text, None)
    assert found.error == ERROR
    plain = app.ask("POST", COMPLETIONS, {**asked, "stream": False})
    assert (plain.status, plain.error) == (500, ERROR)


# ------------------------------------------------------------------------------- disconnect


@pytest.mark.parametrize(
    ("path", "asked", "mark"),
    [
        (CHAT, {"messages": HELLO}, b'{"content":"'),
        (COMPLETIONS, {"prompt": "hello"}, b'"text":"'),
    ],
    ids=["chat", "completions"],
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_leaving(
    app: ScriptedApp, path: str, asked: dict[str, Any], mark: bytes, is_stream: bool
) -> None:
    """What came before is a beginning of the grammar; the row is cancelled, once (F56)."""
    app.engine.says("never ending")
    app.engine.is_endless = True
    app.engine.cancelled.clear()
    submits = Brake(app.engine, "submit", hold=False)
    cancels = Brake(app.engine, "cancel", hold=False)
    sock = connect(app.address)
    sock.sendall(post_bytes(path, {**asked, "stream": is_stream}))
    if is_stream:
        read_until(sock, mark)
    submits.wait()
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    cancels.wait()
    assert app.engine.cancelled == [41]
    app.engine.is_endless = False
    app.engine.says("the next one")
    assert app.chat(max_tokens=None).text == "the next one"
