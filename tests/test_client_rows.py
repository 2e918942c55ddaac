"""Rows of clients.md that no other test names: what unmodified clients send, and depend on.

Each test's docstring names its row. The others: Requests 1, 2, 14 in test_api_openai*, 3 and 4 in
test_api_anthropic_request, 7 in test_fields_tools, 10 in clients/, 11 with the embeddings, 12 in
test_api_completions; Streams 3 and 5 with each surface, 6 in clients_npm/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import chunks, responses, transcripts
from tests.live import CHAT, HELLO, LiveApp, Reply, frames
from tests.turns import THINKER, TurnsApp, call

pytestmark = pytest.mark.slow

ROME = call("weather", town="Rome")
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "weather", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    chunks.COMPLETIONS: {"prompt": "hello"},
    responses.RESPONSES: {"input": "hello"},
    transcripts.MESSAGES: {"messages": HELLO, "max_tokens": 9},
    transcripts.COUNT: {"messages": HELLO},
}
ANSWERING = [path for path in BODIES if path != transcripts.COUNT]


@pytest.fixture(scope="module")
def shared(tiny_folder: Path) -> Iterator[TurnsApp]:
    with TurnsApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture
def app(shared: TurnsApp) -> Iterator[TurnsApp]:
    shared.script()
    yield shared
    shared.end()


def answered(app: TurnsApp, path: str, body: dict[str, Any], **headers: str) -> Reply:
    if path in ANSWERING:
        app.engine.turns.clear()
        app.script("ok")
    reply = app.ask("POST", path, {**BODIES[path.partition("?")[0]], **body}, headers)
    assert reply.status == 200, (path, body, reply.body)
    return reply


# ---------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("path", BODIES)
def test_keys_and_versions(tiny_folder: Path, path: str) -> None:
    """Requests 5: either header with either surface, any version, unknown betas, `?beta=true`."""
    with TurnsApp(tiny_folder, THINKER, api_key="secret") as app:
        for key in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            for version in ("2023-06-01", "2099-01-01", "new"):
                more = {"anthropic-version": version, "anthropic-beta": "of-tomorrow-1,other"}
                app.script(*["ok"] * (path in ANSWERING))
                given = {**key, **more}
                assert app.ask("POST", path + "?beta=true", BODIES[path], given).status == 200
        wrong = app.ask("POST", path, BODIES[path], {"x-api-key": "Secret"})
        assert wrong.status == 401


MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HINTS: dict[str, list[dict[str, Any]]] = {
    transcripts.MESSAGES: [
        {"thinking": {"type": "enabled", "budget_tokens": 32000}, "max_tokens": 100},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"output_config": {"effort": "high"}},
        {"metadata": {"user_id": "me"}},
        MARK,
        {"system": [{"type": "text", "text": "x", **MARK}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **MARK}]}]},
        {"tools": [{"name": "f", "input_schema": {**SCHEMA, "$schema": "x"}, **MARK}]},
        {"tools": [{"name": "f", "input_schema": SCHEMA, "type": "custom", "strict": False,
                    "defer_loading": True, "eager_input_streaming": True}]},
        {"container": "c", "service_tier": "auto", "speed": "fast", "inference_geo": "eu"},
        {"diagnostics": {"a": 1}},
    ],
    responses.RESPONSES: [
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"reasoning": {"effort": "medium", "summary": "auto"}},
        {"prompt_cache_key": "k", "safety_identifier": "me", "client_metadata": {"a": "b"}},
        {"parallel_tool_calls": True, "tools": [{**FLAT, "strict": False}]},
        {"truncation": "auto"},
        {"input": [{"id": "msg_1", "status": "completed", "role": "user", "content": "x"},
                   {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "3"}]},
    ],
    CHAT: [
        {"store": True, "metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "k"},
        {"service_tier": "auto", "n": 1, "stream": False, "max_completion_tokens": 9},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"ignore_eos": True},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "hint"),
    [(path, hint) for path, hints in HINTS.items() for hint in hints],
    ids=[f"{path.split('/')[-1]}-{n}" for path, hints in HINTS.items() for n in range(len(hints))],
)
def test_hints_are_never_a_400(app: TurnsApp, path: str, hint: dict[str, Any]) -> None:
    """Requests 6 and Errors 3: every hint that the row lists, in the shapes that clients send."""
    answered(app, path, hint)


def test_several_messages_in_a_row(app: TurnsApp) -> None:
    """Requests 8: no instructions, long developer and user messages in a row, in all shapes."""
    long = "word " * 300
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": long + "one"},
        {"role": "developer", "content": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
        {"type": "message", "role": "user", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    answered(app, responses.RESPONSES, {"input": items})
    (prompt,) = app.prompts
    order = ["one", "two", "three", "four", "five"]
    assert [prompt.count(word) for word in order] == [1] * 5
    assert sorted(order, key=prompt.index) == order
    assert prompt.count(long) == 1 and prompt.count("system\n") == 1


def test_a_format_and_a_forced_tool(app: TurnsApp) -> None:
    """Requests 9: the tool wins."""
    schema = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    body = {
        "text": {"format": schema},
        "tools": [FLAT],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    app.script('<tool_call>\n{"name": "weather", "arguments": {"town":"Rome"}}\n</tool_call>')
    reply = app.ask("POST", responses.RESPONSES, {**BODIES[responses.RESPONSES], **body})
    assert reply.status == 200 and "warning" not in reply.headers
    (call,) = reply.json()["output"]
    assert (call["type"], call["arguments"]) == ("function_call", '{"town":"Rome"}')
    (spec,) = app.engine.specs
    assert spec.guide is not None and spec.guide.may_steer
    app.end()


@pytest.mark.parametrize("path", ANSWERING)
def test_headers_of_streams(app: TurnsApp, path: str) -> None:
    """Requests 13: JSON accepted for a stream, other encodings offered, Node's fetch metadata."""
    reply = answered(
        app,
        path,
        {"stream": True},
        **{
            "accept": "application/json",
            "accept-encoding": "br, zstd, gzip, deflate",
            "sec-fetch-mode": "cors",
        },
    )
    assert reply.headers["content-type"] == "text/event-stream"
    assert "content-encoding" not in reply.headers and b"data: {" in reply.body


# ----------------------------------------------------------------------------------- streams


def test_every_frame_of_messages_is_named(app: TurnsApp) -> None:
    """Streams 1: an `event:` line on every frame, the type of its data."""
    app.script(f"<think>hm</think>ok{ROME}")
    tool = {"name": "weather", "input_schema": SCHEMA}
    reply = transcripts.ask(app, stream=True, tools=[tool], max_tokens=200)
    found = [frame for frame in reply.body.decode().split("\n\n") if frame]
    assert len(found) > 10
    for frame in found:
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_every_part_of_a_response_is_announced(app: TurnsApp) -> None:
    """Streams 2: the grammar and the indexes of `responses.py`, reasoning, text and calls."""
    text = f"<think>hm</think>ok{ROME}{ROME}"
    app.script(text)
    final = responses.check(responses.streamed(app, tools=[FLAT]))
    kinds = [item["type"] for item in final["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]


def test_indexes_and_usage_of_chat(app: TurnsApp) -> None:
    """Streams 4: `tool_calls[].index` on every piece; usage once, last, with `choices: []`."""
    app.script(f"{ROME}{ROME}")
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"stream": True, "stream_options": options, "tools": [TOOL], "max_tokens": None}
    *found, last, done = frames(app.chat(**asked).body)
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    assert all(frame["usage"] is None and frame["choices"] for frame in found)
    pieces = [
        piece for frame in found for piece in frame["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert {piece["index"] for piece in pieces} == {0, 1}


# ------------------------------------------------------------------------------------ errors


WRONG: list[tuple[str, str, Any, int, str]] = [
    ("POST", CHAT, {"messages": HELLO, "temperature": -1}, 400, "invalid_request_error"),
    ("POST", CHAT, {"messages": []}, 400, "invalid_request_error"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, 400,
     "invalid_request_error"),
    ("POST", responses.RESPONSES, {"input": "x", "previous_response_id": "resp_0"}, 404,
     "invalid_request_error"),
    ("POST", responses.RESPONSES, {"input": 5}, 400, "invalid_request_error"),
    ("GET", responses.RESPONSES + "/resp_0", None, 404, "invalid_request_error"),
    ("GET", "/v1/models/gpt-4", None, 404, "invalid_request_error"),
    ("POST", transcripts.MESSAGES, {"messages": HELLO}, 400, "invalid_request_error"),
    ("POST", transcripts.MESSAGES, {"messages": HELLO, "max_tokens": "x"}, 400,
     "invalid_request_error"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "kind"), WRONG)
def test_what_a_repeat_cannot_mend(
    app: TurnsApp, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    """Errors 1: 400 or 404 and never `server_error`, by which clients decide about repeats."""
    reply = app.ask(method, path, body)
    assert (reply.status, reply.error["type"]) == (status, kind)
    assert "retry-after" not in reply.headers


def test_a_burst_is_queued(tiny_server: LiveApp) -> None:
    """Errors 2: far more requests at once than rows run; each waits and none is refused."""
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda n: tiny_server.chat(max_tokens=2, seed=n), range(48)))
    assert {reply.status for reply in replies} == {200}
