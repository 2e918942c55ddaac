"""fields: `tools` in every right and wrong shape (clients.md, Requests 6 and 7)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxlite.asks import parse_chat
from mlxlite.errors import BadRequest
from mlxlite.types import Ask

MESSAGES = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def ask(tools: Any, **body: Any) -> Ask:
    """Through JSON, as a client's body comes."""
    return parse_chat(json.loads(json.dumps({"messages": MESSAGES, "tools": tools, **body})))


def names(tools: Any, **body: Any) -> list[str]:
    return [tool["function"]["name"] for tool in ask(tools, **body).tools]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_functions() -> None:
    assert ask([ADD]).tools == (ADD,)
    assert ask(None).tools == ask([]).tools == ()
    assert names([named("a"), ADD, named("c")]) == ["a", "add", "c"]
    assert names([{"function": {"name": "bare"}}]) == ["bare"]
    (tool,) = ask([{**named("f"), "x": 1}]).tools
    assert tool == {"type": "function", "function": {"name": "f", "parameters": {}}}
    (tool,) = ask([{"function": {"name": "f", "parameters": None, "strict": False}}]).tools
    assert tool["function"]["parameters"] == {}


@pytest.mark.parametrize("name", ["files.read", "a-b", "a_b", "mcp__x__y", "名", "a b", "x" * 500])
def test_names_may_hold_anything(name: str) -> None:
    assert names([named(name)]) == [name]


def test_schemas_pass_untouched() -> None:
    """Hints inside a tool are not ours to judge: `$schema`, `cache_control`, `defer_loading`."""
    parameters = {"$schema": "x", "properties": {"a": True, "b": {"enum": []}}, "anyOf": "junk"}
    function = {"name": "f", "description": 5, "parameters": parameters, "cache_control": {}}
    (tool,) = ask([{"type": "function", "function": function, "defer_loading": True}]).tools
    assert tool["function"] == function


def test_namespaces_are_flattened_and_server_tools_skipped() -> None:
    tools = [
        {"type": "web_search"},
        {
            "type": "namespace",
            "name": "mcp",
            "tools": [named("a"), {"type": "namespace", "tools": [named("b")]}],
        },
        {"type": "namespace", "tools": []},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "custom", "custom": {"name": "shell"}},
        {"type": "mcp", "server_url": "https://a.test"},
        {"type": None, "name": "x"},
        named("c"),
    ]
    assert names(tools) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ("add", "tools"),
        (1, "tools"),
        (True, "tools"),
        (["add"], "tools[0]"),
        ([None], "tools[0]"),
        ([ADD, 1], "tools[1]"),
        ([[ADD]], "tools[0]"),
        ([{}], "tools[0].function"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "name": "flat"}], "tools[0].function"),
        ([{"type": "function", "function": None}], "tools[0].function"),
        ([{"type": "function", "function": "add"}], "tools[0].function"),
        ([{"type": "function", "function": [1]}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": None}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": " "}}], "tools[0].function.name"),
        ([ADD, {"function": {"name": "f", "parameters": []}}], "tools[1].function.parameters"),
        ([{"function": {"name": "f", "parameters": "{}"}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "parameters": 1}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "strict": 1}}], "tools[0].function.strict"),
        ([{"tools": [ADD, {"tools": [5]}]}], "tools[0].tools[1].tools[0]"),
    ],
)
def test_wrong_tools(tools: Any, param: str) -> None:
    for choice in (None, "auto", "none"):  # judged, used or not
        with pytest.raises(BadRequest) as caught:
            ask(tools, tool_choice=choice)
        assert caught.value.param == param
        assert caught.value.message.startswith(param)


def test_namespaces_within_namespaces() -> None:
    """As deep as JSON itself is read."""
    tools: Any = [ADD]
    for _ in range(300):
        tools = [{"type": "namespace", "tools": tools}]
    assert names(tools) == ["add"]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_tool_choice(choice: Any) -> None:
    assert names([ADD], tool_choice=choice) == ["add"]
    assert ask([ADD], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("required", ""),
        ({"type": "function", "function": {"name": "add"}}, "add"),
        ({"type": "function", "name": "add"}, "add"),
        ("auto", None),
        ("none", None),
        (None, None),
    ],
    ids=["required", "named", "flat", "auto", "none", "null"],
)
def test_forced_calls(choice: Any, forced: str | None) -> None:
    assert ask([ADD], tool_choice=choice).forced_call == forced


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([], "required"),
        ([ADD], {"type": "function", "function": {"name": "sub"}}),
        ([ADD], {"type": "function", "function": {"name": ""}}),
        ([ADD], {"type": "function", "function": "add"}),
        ([ADD], {"type": "web_search"}),
        ([ADD], {"type": "custom", "custom": {"name": "add"}}),
        ([ADD], {}),
        ([ADD], "Required"),
    ],
    ids=["no-tools", "unknown", "empty", "no-object", "hosted", "custom", "nothing", "case"],
)
def test_forced_calls_that_cannot_be(tools: Any, choice: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        ask(tools, tool_choice=choice)
    assert caught.value.param == "tool_choice" and caught.value.message.startswith("tool_choice ")


@pytest.mark.parametrize("choice", [1, True, ["auto"], 1.5])
def test_wrong_tool_choice(choice: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        ask([ADD], tool_choice=choice)
    assert caught.value.message == "tool_choice must be of type string or object"


@pytest.mark.parametrize(("given", "parallel"), [(None, True), (True, True), (False, False)])
def test_parallel_tool_calls(given: Any, parallel: bool) -> None:
    assert ask([ADD], parallel_tool_calls=given).parallel_tool_calls is parallel


def allowed(mode: Any, *listed: Any, is_flat: bool = False) -> dict[str, Any]:
    inner = {"mode": mode, "tools": list(listed)}
    return {"type": "allowed_tools", **(inner if is_flat else {"allowed_tools": inner})}


@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(("mode", "forced"), [("auto", None), ("required", "")])
def test_allowed_tools(mode: str, forced: str | None, is_flat: bool) -> None:
    """Those that are not allowed are as if they had not been sent."""
    tools = [named("a"), ADD, named("c")]
    for listed in ([named("c"), named("a")], [{"type": "function", "name": n} for n in "ac"]):
        choice = allowed(mode, *listed, {"type": "mcp", "server_label": "x"}, is_flat=is_flat)
        found = ask(tools, tool_choice=choice)
        assert [tool["function"]["name"] for tool in found.tools] == ["a", "c"]
        assert found.forced_call == forced
    assert names(tools, tool_choice=allowed("auto", {"type": "web_search"})) == []


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "mode"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "allowed_tools.mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "allowed_tools.tools"),
        ({"type": "allowed_tools", "mode": "required", "tools": {}}, "tools"),
        (allowed("none", ADD), "allowed_tools.mode"),
        (allowed(1, ADD, is_flat=True), "mode"),
        (allowed("auto", ADD, 5), "allowed_tools.tools[1]"),
        (allowed("auto", {"type": "function"}), "allowed_tools.tools[0]"),
        (allowed("auto", named("sub")), "allowed_tools.tools[0]"),
        (allowed("required"), "allowed_tools.tools"),
        (allowed("required", {"type": "web_search"}, is_flat=True), "tools"),
    ],
)
def test_allowed_tools_that_cannot_be(choice: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ask([ADD], tool_choice=choice)
    assert caught.value.param == f"tool_choice.{param}"
    assert caught.value.message.startswith(f"tool_choice.{param} ")
