"""Responses: the events of a stream against a written grammar (`responses.py`), plain = streamed.

The model is a script (`scripted.py`), the rest is the live server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxlite.errors import EngineDown, EngineFault
from mlxlite.types import Finish
from tests.live import WAIT_S, Brake, connect, post_bytes, read_until
from tests.responses import BROKEN, RESPONSES, both, check, plain, post, read, shape, streamed
from tests.scripted import CACHED_TOKENS, QWEN, TOKENIZER, ScriptedApp

pytestmark = pytest.mark.slow

THINKER = QWEN + "{# <think> #}"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "name": name, "parameters": parameters}


TOOLS = [tool("add", a={"type": "integer"}), tool("grep", pattern={"type": "string"})]


def hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(scope="module")
def app(tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture(autouse=True)
def unbroken(app: ScriptedApp) -> Iterator[None]:
    yield
    app.engine.error, app.engine.is_endless = None, False


# ---------------------------------------------------------------------------------- items


CALLS = hermes("add", {"a": 1}) + "\n" + hermes("grep", {"pattern": "x" * 40})
ADD = ("function_call", "add", '{"a":1}')
GREP = ("function_call", "grep", '{"pattern":"' + "x" * 40 + '"}')


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", [("message", "")]),  # clients look for a message
        ("ok", [("message", "ok")]),
        ("\n ok \U0001f642\n", [("message", "\n ok \U0001f642\n")]),
        ("<think>hm</think>ok", [("reasoning", "hm"), ("message", "ok")]),
        ("<think>hm", [("reasoning", "hm")]),
        ("<think></think>", [("message", "")]),
        (hermes("add", {"a": 1}), [ADD]),
        (CALLS, [ADD, GREP]),
        (hermes("add", {}), [("function_call", "add", "{}")]),
        (f"<think>hm</think>{CALLS}", [("reasoning", "hm"), ADD, GREP]),
        (
            f"<think>hm</think>so: {CALLS} done",
            [("reasoning", "hm"), ("message", "so: "), ADD, GREP, ("message", " done")],
        ),
        (
            "<think>a</think>b<think>c</think>d",
            [("reasoning", "a"), ("message", "b"), ("reasoning", "c"), ("message", "d")],
        ),
        ("<tool_call>{bad}</tool_call>", [("message", "<tool_call>{bad}</tool_call>")]),
    ],
)
def test_items(app: ScriptedApp, text: str, items: list[Any]) -> None:
    found, final = both(app, text, tools=TOOLS)
    assert found == items
    assert (final["status"], final["error"], final["incomplete_details"]) == (
        "completed",
        None,
        None,
    )
    assert all(item["status"] == "completed" for item in final["output"])
    assert final["completed_at"] >= final["created_at"]


def test_what_an_item_is(app: ScriptedApp) -> None:
    _, final = both(app, f"<think>hm</think>so: {hermes('add', {'a': 1})}", tools=TOOLS)
    reasoning, message, call = final["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    part = {"type": "output_text", "text": "so: ", "annotations": [], "logprobs": []}
    assert message["role"] == "assistant" and message["content"] == [part]
    assert call["call_id"].startswith("call_") and json.loads(call["arguments"]) == {"a": 1}


def test_a_call_names_the_namespace_of_its_function(app: ScriptedApp) -> None:
    """codex looks a function up by both, and sends both back."""
    tools = [TOOLS[0], {"type": "namespace", "name": "files", "description": "", "tools": TOOLS}]
    _, final = both(app, CALLS, tools=tools)
    assert [call.get("namespace") for call in final["output"]] == [None, "files"]
    assert "namespace" not in final["output"][0], "a function of its own has none"
    result = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    call = {"type": "function_call", "call_id": "c1", "name": "grep", "arguments": "{}"}
    app.engine.says("ok")
    chain = plain(app, tools=tools, input=[{**call, "namespace": "files"}, result])
    stored = app.ask("GET", f"{RESPONSES}/{chain['id']}/input_items").json()["data"][-1]
    assert (stored["name"], stored["namespace"]) == ("grep", "files")


def test_functions_of_one_name_are_told_apart(app: ScriptedApp) -> None:
    """Two servers behind codex with the same tool: the model is told two names, codex its own."""
    tools = [
        {"type": "namespace", "name": name, "description": "", "tools": [TOOLS[1]]}
        for name in ("mcp__a", "mcp__b")
    ]
    second = hermes("mcp__b__grep", {"pattern": "x"})
    text = hermes("grep", {"pattern": "x"}) + second
    found, final = both(app, text, tools=tools)
    assert [item[:2] for item in found] == [("function_call", "grep")] * 2
    assert [call["namespace"] for call in final["output"]] == ["mcp__a", "mcp__b"]
    _, call = final["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    plain(app, tools=tools, input=[{"role": "user", "content": "hi"}, call, result])
    prompt = TOKENIZER.decode(app.engine.specs[-1].prompt_ids, keep_special=True)
    assert '{"name": "mcp__b__grep", "arguments": {"pattern": "x"}}' in prompt
    own = [{"type": "namespace", "name": "a", "description": "", "tools": [TOOLS[0]]}, TOOLS[0]]
    _, final = both(app, hermes("add", {}) + hermes("a__add", {}), tools=own)
    assert [call.get("namespace") for call in final["output"]] == [None, "a"]


def test_arguments_come_in_fragments(app: ScriptedApp) -> None:
    app.engine.says(hermes("grep", {"pattern": "x" * 400}))
    events = streamed(app, tools=TOOLS)
    check(events)
    deltas = [event for event in events if event["type"].endswith("arguments.delta")]
    assert len(deltas) > 50
    (done,) = (event for event in events if event["type"].endswith("arguments.done"))
    assert done["name"] == "grep" and json.loads(done["arguments"]) == {"pattern": "x" * 400}


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("one two", [("message", "one two")]),
        ("<think>hm", [("reasoning", "hm")]),
        ("", [("message", "")]),
    ],
)
def test_the_limit_makes_it_incomplete(app: ScriptedApp, text: str, items: list[Any]) -> None:
    """D12: `response.incomplete`, with the reason, whatever was open."""
    found, final = both(app, text, Finish.LENGTH)
    assert found == items
    assert final["status"] == "incomplete" and final["completed_at"] is None
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][-1]["status"] == "incomplete"


def test_max_output_tokens(app: ScriptedApp) -> None:
    text = "the quick brown fox"
    for limit in (1, 3):
        items, final = both(app, text, max_output_tokens=limit)
        assert items == [("message", TOKENIZER.decode(TOKENIZER.encode(text)[:limit]))]
        assert (final["usage"]["output_tokens"], final["max_output_tokens"]) == (limit, limit)
    items, final = both(app, text, max_output_tokens=0)
    assert items == [("message", "")] and final["status"] == "incomplete"
    items, final = both(app, text, max_output_tokens=10**9)  # clamped (clients.md, Requests 1)
    assert final["status"] == "completed" and final["max_output_tokens"] == 10**9


def test_usage(app: ScriptedApp) -> None:
    text = "<think>hello world</think>ok"
    _, final = both(app, text)
    usage = final["usage"]
    assert usage["output_tokens"] == len(TOKENIZER.encode(text)) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] == len(app.engine.specs[-1].prompt_ids)
    assert usage["input_tokens_details"]["cached_tokens"] == CACHED_TOKENS
    thought = usage["output_tokens_details"]["reasoning_tokens"]
    assert len(TOKENIZER.encode("hello world")) <= thought < usage["output_tokens"]
    assert both(app, "ok")[1]["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


# ------------------------------------------------------------------------------- log-probabilities


def test_logprobs_of_the_text_alone(app: ScriptedApp) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    items, final = both(app, f"<think>hm</think>so it is{CALLS}", tools=TOOLS, **asked)
    assert [item[0] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    found = final["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in found).endswith("so it is")
    assert all(len(entry["top_logprobs"]) == 2 for entry in found)
    assert all(bytes(e["bytes"]).decode() == e["token"] and e["logprob"] <= 0 for e in found)


def test_logprobs_in_the_stream(app: ScriptedApp) -> None:
    app.engine.says("the quick \U0001f642 fox")
    for asked in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1}):
        events = streamed(app, **asked)
        final = check(events)
        joined = [entry for event in events if event["type"].endswith("text.delta")
                  for entry in event["logprobs"]]  # fmt: skip
        (done,) = (event for event in events if event["type"].endswith("text.done"))
        assert joined == done["logprobs"] == final["output"][0]["content"][0]["logprobs"]
        assert b"".join(bytes(entry["bytes"]) for entry in joined).decode() == (
            "the quick \U0001f642 fox"
        )
        assert all(len(entry["top_logprobs"]) == asked.get("top_logprobs", 0) for entry in joined)
    for asked in ({}, {"include": ["reasoning.encrypted_content"]}, {"top_logprobs": 0}):
        part = plain(app, **asked)["output"][0]["content"][0]
        assert part["logprobs"] == []


# ------------------------------------------------------------------------------------ calls


def test_how_many_calls(app: ScriptedApp) -> None:
    two = [hermes("add", {"a": n}) for n in (1, 2)]
    three = "".join([*two, hermes("add", {"a": 3}), " tail"])
    calls = [("function_call", "add", f'{{"a":{n}}}') for n in (1, 2, 3)]
    assert both(app, three, tools=TOOLS)[0] == [*calls, ("message", " tail")]
    items, final = both(app, three, tools=TOOLS, max_tool_calls=2)
    assert items == calls[:2] and final["max_tool_calls"] == 2
    assert final["status"] == "completed"
    assert final["usage"]["output_tokens"] <= len(TOKENIZER.encode("".join(two)))
    assert both(app, three, tools=TOOLS, max_tool_calls=1)[0] == calls[:1]
    assert both(app, three, tools=TOOLS, max_tool_calls=9)[0] == [*calls, ("message", " tail")]
    items, final = both(app, three, tools=TOOLS, max_tool_calls=2, parallel_tool_calls=False)
    assert items == calls[:1] and final["parallel_tool_calls"] is False


# ---------------------------------------------------------------------------- broken streams


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", []),
        ("half an ans", [("message", "half an ans")]),
        ("<think>hm", [("reasoning", "hm")]),
        ("<think>hm</think>so", [("reasoning", "hm"), ("message", "so")]),
        (f"ok{hermes('add', {'a': 1})}", [("message", "ok"), ADD]),
    ],
)
def test_an_error_in_mid_stream(app: ScriptedApp, text: str, items: list[Any]) -> None:
    """Clients.md, Streams 3: `response.failed` the reason, the full object, the end."""
    app.engine.says(text, 1, Finish.ERROR)
    app.engine.error = EngineFault("the step failed")
    final = check(streamed(app, tools=TOOLS), BROKEN)
    assert final["error"] == {"code": "server_error", "message": "the step failed"}
    assert [shape(item) for item in final["output"]] == items
    assert app.ask("GET", f"{RESPONSES}/{final['id']}").status == 404
    reply = post(app, tools=TOOLS)
    assert (reply.status, reply.error["message"]) == (500, "the step failed")


def test_a_bug_in_mid_stream(
    app: ScriptedApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlxlite.text.sink import Sink

    def broken(self: Sink, ids: Any) -> Any:
        raise RuntimeError("secret")

    app.engine.says("ok")
    monkeypatch.setattr(Sink, "push", broken)
    final = check(streamed(app), BROKEN)
    assert final["error"]["message"] == "internal error"
    assert "secret" in caplog.text


def test_a_refusal_is_no_stream(app: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*given: Any) -> int:
        raise EngineDown("the engine is not running")

    monkeypatch.setattr(app.engine, "submit", down)
    reply = post(app, stream=True)
    assert reply.status == 503 and reply.headers["content-type"] == "application/json"
    assert reply.error["code"] == "engine_down"


@pytest.mark.parametrize("is_stream", [True, False])
def test_leaving(app: ScriptedApp, is_stream: bool) -> None:
    """The row is cancelled, nothing is stored (F56)."""
    app.engine.says("never ending", 1)
    app.engine.is_endless = True
    app.engine.cancelled.clear()
    submits = Brake(app.engine, "submit", hold=False)
    kept = Brake(app.engine, "cancel", hold=False)
    stored = app.ask("GET", "/stats").json()["response_store"]["entries"]
    sock = connect(app.address)
    sock.sendall(post_bytes(RESPONSES, {"input": "hello", "stream": is_stream}))
    if is_stream:
        data = read_until(sock, b"event: response.output_text.delta")
        assert b"\r\n\r\n" in data
    submits.wait()
    sock.close()
    kept.wait()
    assert app.engine.cancelled == [41]
    assert app.ask("GET", "/stats").json()["response_store"]["entries"] == stored


def test_heartbeats_between_frames(tiny_folder: Path) -> None:
    with ScriptedApp(tiny_folder, QWEN, heartbeat_s="0.05") as app:
        app.engine.is_endless = True
        sock = connect(app.address)
        sock.sendall(post_bytes(RESPONSES, {"input": "hello", "stream": True}))
        data = read_until(sock, b": keep-alive\n")
        assert b"event: response.in_progress" in data
        sock.close()


# ------------------------------------------------------------------------ the official client


def test_the_stream_helper(app: ScriptedApp) -> None:
    """Its accumulator fails on a wrong index or an item that was never announced (F95)."""
    app.engine.says(f"<think>hm</think>so: {CALLS}")
    with app.client.responses.stream(model="m", input="hello", tools=TOOLS) as stream:
        snapshots = [event.snapshot for event in stream if hasattr(event, "snapshot")]
        final = stream.get_final_response()
    assert snapshots[-1] == GREP[2] and "so: " in snapshots
    assert final.output_text == "so: "
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert final.output[2].parsed_arguments == {"a": 1} or final.output[2].arguments == ADD[2]


def test_the_async_client(app: ScriptedApp) -> None:
    app.engine.says("the quick brown fox")

    async def run() -> None:
        url = app.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            whole, stream = await asyncio.gather(
                client.responses.create(model="m", input="hello"),
                client.responses.create(model="m", input="hello", stream=True),
            )
            text = ""
            async for event in stream:
                text += event.delta if event.type == "response.output_text.delta" else ""
            assert text == whole.output_text == "the quick brown fox"
            async with client.responses.stream(model="m", input="hello") as helper:
                final = await helper.get_final_response()
            assert final.output_text == text

    asyncio.run(run())


def test_a_failure_reaches_the_client(app: ScriptedApp) -> None:
    app.engine.says("half", 1, Finish.ERROR)
    app.engine.error = EngineFault("the step failed")
    events = list(app.client.responses.create(model="m", input="hello", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the step failed"


def test_quick(app: ScriptedApp) -> None:
    """A long answer costs far less than 1 ms a token from the engine to the client's hands."""
    app.engine.says("word " * 600)
    begun_s = time.monotonic()
    body = post(app, stream=True).body
    assert time.monotonic() - begun_s < WAIT_S
    check(read(body))
