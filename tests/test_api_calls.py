"""Forced and strict calls through the whole server, in the markup of several families (D8).

The model is tiny and random, so a call is one by the grammar alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests import schema_table as table
from tests.golden.markers import FAMILIES
from tests.live import HELLO, LiveApp
from tests.prepared import TOKENIZER

_ENDS = {
    n for n in range(512) if TOKENIZER.bytes_of(n) and set(TOKENIZER.bytes_of(n)) <= set(b'"}]')
}
ASKED: dict[str, Any] = {
    "max_tokens": 400,
    "temperature": 1,
    "logit_bias": {str(n): 9 for n in _ENDS},
}
SCHEMAS: dict[str, Any] = {
    "add": table.obj(a=table.I, b=table.I),
    "paint": table.obj(["colour"], colour={"enum": ["red", "blue"]}, coats=table.I,
                       names={"type": "array", "items": table.S, "maxItems": 2}),
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NOT = table.obj(a={"type": "boolean", "not": {"const": False}})
SERVED = (
    "qwen_xml",
    "glm",
    "minicpm",
    "gemma4",
    "mistral",
    "llama3",
    "pythonic",
    "kimi",
    "harmony",
)


@pytest.fixture(scope="module", params=SERVED)
def app(request: Any, tiny_folder: Any) -> Iterator[LiveApp]:
    golden = next(each for each in FAMILIES if each.family == request.param)
    with LiveApp(tiny_folder, chat_template=golden.template) as app:
        yield app


def check(calls: Any, names: set[str]) -> None:
    assert calls
    for call in calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_forced_calls(app: LiveApp, is_stream: bool) -> None:
    """Any of them, one by name, one of the allowed; stop strings do not cut them."""
    named: Any = {"type": "function", "function": {"name": "paint"}}
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": some}
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as client:
        for seed, (choice, names) in enumerate(
            [("required", set(SCHEMAS)), (named, {"paint"}), (allowed, {"add"})]
        ):
            asked: dict[str, Any] = {
                "model": "m", "messages": HELLO, "tools": TOOLS, "tool_choice": choice,
                "seed": seed, "stop": ["a", "=", "\n"], "parallel_tool_calls": seed > 0, **ASKED,
                "extra_body": {"max_thinking_tokens": 0},
            }  # fmt: skip
            if is_stream:
                with client.chat.completions.stream(**asked) as stream:
                    (found,) = stream.get_final_completion().choices
            else:
                (found,) = client.chat.completions.create(**asked).choices  # type: ignore[assignment]  # the same shape
            if found.finish_reason == "length":  # a random model may write call after call
                assert choice == allowed
                continue
            assert found.finish_reason == "tool_calls" and not found.message.content
            check(found.message.tool_calls, names)
            assert choice == allowed or len(found.message.tool_calls or ()) == 1


def test_allowed_tools_on_responses(tiny_server: LiveApp) -> None:
    """Flat, and a wrong one is named as it was written."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]  # TOOLS is untyped
    choice: dict[str, Any] = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "paint"}],
    }
    body = {"input": "x", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    reply = tiny_server.ask("POST", "/v1/responses", body)
    (call,) = reply.json()["output"]
    assert call["name"] == "paint" and reply.json()["tool_choice"] == choice
    jsonschema.validate(json.loads(call["arguments"]), SCHEMAS["paint"])
    for wrong, param in (
        ({**choice, "mode": "must"}, "tool_choice.mode"),
        ({**choice, "tools": [{"type": "function", "name": "sub"}]}, "tool_choice.tools[0]"),
        ({"type": "web_search_preview"}, "tool_choice"),
    ):
        reply = tiny_server.ask("POST", "/v1/responses", {**body, "tool_choice": wrong})
        assert (reply.status, reply.error["param"]) == (400, param)


def test_strict_tools_on_messages(tiny_server: LiveApp) -> None:
    """Enforced where that can be; a hint that is warned of where it cannot (Requests 6)."""
    tool: Any = {"name": "paint", "input_schema": SCHEMAS["paint"], "strict": True}
    with anthropic.Anthropic(base_url=tiny_server.url, api_key="x", max_retries=0) as client:
        for seed in range(4):
            found = client.messages.create(
                model="m", max_tokens=400, messages=HELLO,  # type: ignore[arg-type]  # as clients do
                tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True},
                extra_body={"temperature": 1, "seed": seed},
            )  # fmt: skip
            (block,) = found.content
            assert block.type == "tool_use" and found.stop_reason == "tool_use"
            jsonschema.validate(block.input, SCHEMAS["paint"])
    body = {
        "messages": HELLO, "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": NOT, "strict": True}],
    }  # fmt: skip
    reply = tiny_server.ask("POST", "/v1/messages", body)
    assert reply.status == 200 and "strict tools are not enforced" in reply.headers["warning"]
    wrong = {**body, "tools": [{**tool, "strict": 5}]}
    reply = tiny_server.ask("POST", "/v1/messages", wrong)
    assert reply.status == 400 and "tools[0].strict" in reply.error["message"]


def test_strict_tools_that_cannot_be(app: LiveApp) -> None:
    """On OpenAI's surfaces it is a promise."""
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": NOT}}
    reply = app.chat(tools=[tool], tool_choice="required")
    assert reply.status == 400 and reply.error["param"].startswith("tool"), reply.body
    loose = {"type": "function", "function": {"name": "f", "parameters": NOT}}
    assert app.chat(tools=[loose], tool_choice="required", max_tokens=9).status == 200
