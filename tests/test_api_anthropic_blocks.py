"""Messages: what a model writes becomes blocks, plain and streamed in the same order (F73).

The model is a script (`scripted.py`), the rest is the live server. Every transcript is judged by
the grammar in `transcripts.py`, every answer is asked for twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from mlxlite.api import anthropic as surface
from mlxlite.api import anthropic_request
from mlxlite.app import ROUTES, SURFACES
from mlxlite.errors import Busy, EngineDown, EngineFault, MlxliteError
from mlxlite.http.routing import encode_json
from mlxlite.types import CallPiece, Delta, Finish, Usage
from tests.live import HELLO, WAIT_S, connect, post_bytes, read_until
from tests.scripted import CACHED_TOKENS, QWEN, TOKENIZER, ScriptedApp
from tests.transcripts import (
    BROKEN,
    COUNT,
    MESSAGES,
    ask,
    both,
    check,
    events,
    plain,
    refused,
    stream,
)

pytestmark = pytest.mark.slow

THINKER = QWEN + "{# <think> #}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}</tool_call>'


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object", "properties": properties}}


TOOLS = [tool("weather", town={"type": "string"}), tool("add", a={"type": "integer"}, b={})]


def use(name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": given}


ROME = use("weather", town="Rome")
SUM = use("add", a=1, b=[2, {"c": "}"}])


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def thought(words: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": ""}


@pytest.fixture(scope="module")
def shared_app(tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture
def app(shared_app: ScriptedApp) -> Iterator[ScriptedApp]:
    yield shared_app
    shared_app.engine.error, shared_app.engine.is_endless = None, False
    shared_app.engine.__dict__.pop("submit", None)


def said(app: ScriptedApp, words: str, end: Finish = Finish.EOS, **body: Any) -> Any:
    """Blocks and stop reason of an answer, whatever portions it came in, plain and streamed."""
    asked = {"max_tokens": 2000, "tools": TOOLS, **body}
    found = []
    for portion in (1, 3, 1000):
        app.engine.says(words, portion, end)
        found.append(both(app, **asked))
    assert found[0] == found[1] == found[2]
    return found[0]["content"], found[0]["stop_reason"]


# ----------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    ("words", "blocks", "reason"),
    [
        ("", [text("")], "end_turn"),
        ("Paris.", [text("Paris.")], "end_turn"),
        ("\U0001f642 한국어", [text("\U0001f642 한국어")], "end_turn"),
        ("<think>hm</think>", [thought("hm")], "end_turn"),
        ("<think></think>ok", [text("ok")], "end_turn"),
        ("<think>hm</think>\n\nok", [thought("hm"), text("\n\nok")], "end_turn"),
        (CALL, [ROME], "tool_use"),
        (f"{CALL}\n{ADD}", [ROME, SUM], "tool_use"),
        (f"Let me see.\n{CALL}", [text("Let me see.\n"), ROME], "tool_use"),
        (f"<think>hm</think>ok{CALL}{ADD}", [thought("hm"), text("ok"), ROME, SUM], "tool_use"),
        (f"<think>a</think>b<think>c</think>{CALL}", [thought("a"), text("b"), thought("c"), ROME],
         "tool_use"),
        (f"{CALL} after {ADD}", [ROME, text(" after "), SUM], "tool_use"),
        ('<tool_call>{"name": "add"}</tool_call>', [use("add")], "tool_use"),
        ('<tool_call>{"name": "no"}</tool_call>', [text('<tool_call>{"name": "no"}</tool_call>')],
         "end_turn"),
    ],
)  # fmt: skip
def test_blocks(app: ScriptedApp, words: str, blocks: list[Any], reason: str) -> None:
    assert said(app, words) == (blocks, reason)
    limited = reason if reason == "tool_use" else "max_tokens"
    assert said(app, words, Finish.LENGTH) == (blocks, limited)


def test_calls_have_ids_of_their_own(app: ScriptedApp) -> None:
    app.engine.says(f"{CALL}{ADD}")
    ids = [block["id"] for block in plain(app, tools=TOOLS, max_tokens=200)["content"]]
    assert len(set(ids)) == 2 and all(ids)


def test_arguments_come_in_fragments(app: ScriptedApp) -> None:
    """Not withheld to the end (F19); joined they are JSON (F14)."""
    app.engine.says(CALL.replace("Rome", "x" * 300))
    found = stream(app, tools=TOOLS, max_tokens=2000)
    check(found)
    pieces = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
    assert len(pieces) > 50 and json.loads("".join(pieces)) == {"town": "x" * 300}


def test_no_tools_no_calls(app: ScriptedApp) -> None:
    for body in ({"tools": None}, {"tool_choice": {"type": "none"}}):
        assert said(app, CALL, **body) == ([text(CALL)], "end_turn")
    web = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    assert said(app, CALL, tools=web) == ([text(CALL)], "end_turn")


def test_one_call_only(app: ScriptedApp) -> None:
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert said(app, f"ok{CALL}{ADD} more", tool_choice=one) == ([text("ok"), ROME], "tool_use")
    two = {"type": "auto", "disable_parallel_tool_use": False}
    assert said(app, f"{CALL}{ADD}", tool_choice=two) == ([ROME, SUM], "tool_use")


def test_the_stop_sequence_is_named(app: ScriptedApp) -> None:
    def end(words: str, *stops: str) -> Any:
        app.engine.says(words)
        message = both(app, max_tokens=200, tools=TOOLS, stop_sequences=list(stops))
        return message["content"], message["stop_reason"], message["stop_sequence"]

    assert end("one END two", "END") == ([text("one ")], "stop_sequence", "END")
    assert end("one END two", "two", "ne E") == ([text("o")], "stop_sequence", "ne E")
    assert end("<think>a END</think>b", "END") == ([thought("a ")], "stop_sequence", "END")
    assert end("END", "END") == ([text("")], "stop_sequence", "END")
    assert end("one", "END") == ([text("one")], "end_turn", None)
    assert end(CALL, "Rome") == ([ROME], "tool_use", None)
    assert end(f"{CALL} END", "END")[1:] == ("tool_use", None)


def test_usage(app: ScriptedApp) -> None:
    """Anthropic counts what was cached apart; all three figures are the prompt."""
    app.engine.says("<think>hm</think>ok")
    usage = both(app, max_tokens=200)["usage"]
    prompt = ask(app, COUNT, max_tokens=None).json()["input_tokens"]
    details = usage.pop("output_tokens_details")
    assert usage == {
        "input_tokens": prompt - CACHED_TOKENS,
        "cache_read_input_tokens": CACHED_TOKENS,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(TOKENIZER.encode("<think>hm</think>ok")) + 1,
    }
    assert 0 < details["thinking_tokens"] < usage["output_tokens"]


def test_a_thinking_budget_closes_the_block(app: ScriptedApp) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1}
    (first, second), _ = said(app, "<think>hello world again", thinking=thinking)
    assert first["type"] == "thinking" and second["type"] == "text"
    over = {"type": "enabled", "budget_tokens": 32_000, "display": "omitted"}
    assert said(app, "<think>a</think>b", thinking=over)[0] == [thought("a"), text("b")]


@pytest.mark.parametrize("arguments", ["{bad", '{"a":1e999}', '{"a":NaN}', "[1]", "[" * 5000])
def test_an_input_that_is_no_object_is_given_as_it_is(arguments: str) -> None:
    usage = Usage(1, 1, 0, 0, 0.0, 0.0, 0.0)

    async def run() -> dict[str, Any]:
        async def pieces() -> Any:
            yield Delta(call=CallPiece(0, "c", "f", arguments))
            yield Delta(finish="tool_calls", usage=usage)

        return await surface.fold(surface.render_opening("msg_1", "m", 1), pieces())

    assert asyncio.run(run())["content"][0]["input"] == {"_raw": arguments}


# ------------------------------------------------------------------------ the official client


@pytest.fixture
def client(app: ScriptedApp) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        yield client


def test_stream_helper(app: ScriptedApp, client: anthropic.Anthropic) -> None:
    app.engine.says(f"<think>hm</think>ok{CALL}{ADD}")
    asked: dict[str, Any] = {"model": "m", "max_tokens": 300, "messages": HELLO, "tools": TOOLS}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as running:
        kinds = [event.type for event in running]
        final = running.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
    assert kinds.count("content_block_stop") == 4
    assert [b.to_dict() | {"id": ""} for b in final.content] == [
        b.to_dict() | {"id": ""} for b in whole.content
    ]
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (final.stop_reason, final.usage) == ("tool_use", whole.usage)


def test_tool_loop(app: ScriptedApp, client: anthropic.Anthropic) -> None:
    """The package's own runner: a call, its result, the answer; our blocks come back."""
    asked_for: list[str] = []

    @anthropic.beta_tool
    def weather(town: str) -> str:
        """The weather in a town."""
        asked_for.append(town)
        app.engine.says("It is mild.")
        return "mild"

    for is_stream in (False, True):
        app.engine.says(f"<think>hm</think>ok{CALL}")
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=300, messages=HELLO, tools=[weather], stream=is_stream
        )
        final = runner.until_done()
        assert final.content[0].text == "It is mild." and final.stop_reason == "end_turn"
        prompt = TOKENIZER.decode(app.engine.specs[-1].prompt_ids, keep_special=True)
        assert prompt.partition("hello world")[2] == (
            '<|im_end|>\n<|im_start|>assistant\nok\n<tool_call>\n{"name": "weather", "arguments": '
            '{"town": "Rome"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nmild\n'
            "</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
    assert asked_for == ["Rome", "Rome"]


def test_errors_in_mid_stream_raise(app: ScriptedApp, client: anthropic.Anthropic) -> None:
    app.engine.says("hello world", finish=Finish.ERROR)
    app.engine.error = EngineFault("the step failed")
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        with client.messages.stream(model="m", max_tokens=50, messages=HELLO) as running:
            running.until_done()
    with pytest.raises(anthropic.InternalServerError) as caught:
        client.messages.create(model="m", max_tokens=50, messages=HELLO)
    assert caught.value.type == "api_error"


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("words", ["", "hello", "<think>hm", f"a{CALL[:-14]}", f"{CALL}b"])
def test_an_error_in_mid_stream_is_the_end(app: ScriptedApp, words: str) -> None:
    """An error event, and no success after it (D12)."""
    app.engine.says(words, finish=Finish.ERROR)
    app.engine.error = EngineFault("the step failed")
    found = stream(app, tools=TOOLS, max_tokens=200)
    check(found, BROKEN)
    assert found[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the step failed"},
    }
    assert refused(ask(app, max_tokens=200), 500, "api_error") == "the step failed"


def test_a_bug_in_mid_stream_is_told_and_logged(
    app: ScriptedApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise ValueError("secret")

    app.engine.says("hello")
    monkeypatch.setattr(surface.Blocks, "end", fail)
    with caplog.at_level(logging.ERROR):
        found = stream(app)
    check(found, BROKEN)
    assert found[-1]["error"] == {"type": "api_error", "message": "internal error"}
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Busy("admission queue is full"), "rate_limit_error"),
        (EngineDown("no engine"), "overloaded_error"),
        (EngineFault("broken"), "api_error"),
    ],
)
def test_refusals_of_the_engine(app: ScriptedApp, error: MlxliteError, kind: str) -> None:
    """Plain errors, also of a stream that never opened."""

    def refuse(*given: object) -> int:
        raise error

    app.engine.submit = refuse
    for is_stream in (False, True):
        reply = ask(app, stream=is_stream)
        assert refused(reply, error.status, kind) == error.message
        assert reply.headers.get("retry-after") == (None if error.status == 500 else "1")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (405, "invalid_request_error"), (408, "invalid_request_error"),
        (413, "request_too_large"), (429, "rate_limit_error"), (431, "invalid_request_error"),
        (499, "api_error"), (500, "api_error"), (501, "api_error"), (503, "overloaded_error"),
    ],
)  # fmt: skip
def test_error_types(status: int, kind: str) -> None:
    error = MlxliteError("why")
    error.status = status
    told = surface.render_error(error)
    assert told == {"type": "error", "error": {"type": kind, "message": "why"}}


# ---------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_leaving(app: ScriptedApp, is_stream: bool) -> None:
    """The row is given up as soon as the client has gone (F56)."""
    app.engine.says("hello world")
    app.engine.is_endless = True
    submitted, cancelled = len(app.engine.specs), len(app.engine.cancelled)
    body = {"messages": HELLO, "max_tokens": 50, "stream": is_stream}
    sock = connect(app.address)
    sock.sendall(post_bytes(MESSAGES, body))
    deadline_s = time.monotonic() + WAIT_S
    if is_stream:
        read_until(sock, b"text_delta")
    while len(app.engine.specs) == submitted:
        assert time.monotonic() < deadline_s
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    while len(app.engine.cancelled) == cancelled:
        assert time.monotonic() < deadline_s


def test_heartbeats_are_comments(tiny_folder: Path) -> None:
    """In any silence, between frames, also where a call is withheld (F17, F19)."""
    with ScriptedApp(tiny_folder, QWEN, heartbeat_s="0.05") as app:
        app.engine.says("hello")
        app.engine.is_endless = True
        sock = connect(app.address)
        sock.sendall(post_bytes(MESSAGES, {"messages": HELLO, "max_tokens": 50, "stream": True}))
        data = read_until(sock, b": keep-alive\n\r\n")
        sock.close()
    _, _, body = data.partition(b"\r\n\r\n")
    chunks = b"".join(body.split(b"\r\n")[1::2])
    assert [event["type"] for event in events(chunks)][0] == "message_start"


def test_parsing_is_not_the_event_loops_work(
    app: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = anthropic_request.parse_chat

    def spied(body: Any) -> Any:
        seen.append(threading.current_thread().name)
        return original(body)

    monkeypatch.setattr(anthropic_request, "parse_chat", spied)
    app.engine.says("ok")
    assert plain(app)["content"] == [text("ok")] and ask(app, COUNT).status == 200
    assert len(seen) == 2 and all(name.startswith("mlxlite-prepare") for name in seen)


def test_every_route_has_its_surface() -> None:
    """Guards the table in `app`: all our routes are in it."""
    ours = {path for _, path, handler in ROUTES if handler.__module__ == surface.__name__}
    assert ours == {path for path, name in SURFACES.items() if name is surface}


@pytest.mark.parametrize("text", ["a", "%", "%b %%", "\0", '"\\', "é😀\u2028", "\n", "x" * 9000])
@pytest.mark.parametrize("kind", list(surface._PIECES))
def test_filled_frames_are_the_encoded_ones(kind: str, text: str) -> None:
    blocks = surface.Blocks(count=12)
    for event in [*blocks.add({"type": kind}, text), *blocks.add({"type": kind}, text)]:
        head, _, data = surface._frame(event).partition(b"\ndata: ")
        assert head == f"event: {event['type']}".encode()
        assert data == encode_json(event) + b"\n\n"
