"""Message normalisation: every shape that clients send, and every 400 with its path."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from mlxlite.errors import BadRequest
from mlxlite.text.messages import (
    fold_system,
    gather_system,
    merge_neighbours,
    normalise_messages,
    typed_tool_schemas,
)


def one(**fields: Any) -> dict[str, Any]:
    return normalise_messages([fields])[0]


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
        **more,
    }


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_roles_stay(role: str) -> None:
    assert one(role=role, content="x") == {"role": role, "content": "x"}


def test_developer_is_system_unless_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "answer in French"}
    assert normalise_messages([message])[0]["role"] == "system"
    assert normalise_messages([message], knows_developer=True)[0]["role"] == "developer"


def test_the_legacy_function_role_and_call() -> None:
    assert one(role="function", name="f", content="1")["role"] == "tool"
    old = one(role="assistant", content=None, function_call={"name": "f", "arguments": '{"a":1}'})
    assert old == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "hi"}], "hi"),
        ([{"type": "output_text", "text": "hi", "annotations": []}], "hi"),
        ([{"type": "never_heard_of", "text": "hi"}], "hi"),
        ([{"text": "hi"}, "there"], "hithere"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "x"),
    ],
)
def test_content_becomes_one_string(content: Any, text: str) -> None:
    for role in ("system", "user", "assistant", "tool"):
        assert one(role=role, content=content)["content"] == text


def test_null_content() -> None:
    assert one(role="assistant", content=None, tool_calls=[call("{}")])["content"] == ""
    assert one(role="assistant")["content"] == ""
    assert one(role="tool", content=None)["content"] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": {"b": [1, 2]}}', {"a": {"b": [1, 2]}}),
        ({"a": 1}, {"a": 1}),
        ("{bad", "{bad"),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5000, "9" * 5000),
        ("", {}),
        ("  ", {}),
        (None, {}),
    ],
)
def test_arguments(arguments: Any, expected: Any) -> None:
    out = one(role="assistant", content=None, tool_calls=[call(arguments)])
    assert out["tool_calls"] == [call(expected)]


def test_argument_keys_keep_their_order() -> None:
    out = one(role="assistant", tool_calls=[call('{"z": 1, "a": 2}')])
    assert list(out["tool_calls"][0]["function"]["arguments"]) == ["z", "a"]


def test_names_ids_and_unknown_fields_pass() -> None:
    out = one(role="tool", name="f", tool_call_id="c1", content="x", custom=[1])
    assert out == {
        "role": "tool",
        "name": "f",
        "tool_call_id": "c1",
        "content": "x",
        "custom": [1],
    }


def test_our_own_answer_with_every_field_spelled_out_comes_back() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "name": None,
        "reasoning": None,
    }
    assert one(**answer) == {"role": "assistant", "content": "hi"}
    assert "tool_calls" not in one(role="assistant", content="hi", tool_calls=[])


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_goes_out_under_both_names(key: str) -> None:
    out = one(role="assistant", content="4", **{key: "2 + 2"})
    assert out["reasoning"] == out["reasoning_content"] == "2 + 2"


def test_the_input_is_never_changed() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b", "name": None},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call('{"a": 1}')]},
    ]
    before = copy.deepcopy(messages)
    out = normalise_messages(messages)
    for repair in (merge_neighbours, gather_system, fold_system):
        kept = copy.deepcopy(out)
        repair(out)
        assert out == kept
    assert messages == before


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([None], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": None, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "system", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": 5}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "odd", "x": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "reasoning": ["x"]}], "messages[0].reasoning"),
        ([{"role": "assistant", "reasoning_content": 5}], "messages[0].reasoning_content"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [call(5)]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [call("{}", id=5)]}],
            "messages[0].tool_calls[0].id",
        ),
        ([{"role": "assistant", "function_call": "f"}], "messages[0].function_call"),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": 5.5}],
            "messages[1].content",
        ),
    ],
)
def test_a_wrong_value_is_named_by_its_path(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        normalise_messages(messages)
    assert caught.value.param == param
    assert param.split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    "kind",
    ["image", "image_url", "input_image", "audio", "input_audio", "audio_url", "video"]
    + ["video_url", "file", "input_file"],
)
def test_media_is_refused(kind: str) -> None:
    part = {"type": kind, "text": "not even with text", kind: {"url": "data:,"}}
    with pytest.raises(BadRequest, match="text only") as caught:
        normalise_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert caught.value.param == "messages[0].content[1].type"


def test_messages_quote_little_of_a_long_value() -> None:
    with pytest.raises(BadRequest) as caught:
        normalise_messages([{"role": "x" * 10_000, "content": ""}])
    assert len(caught.value.message) < 200


# --------------------------------------------------------------------------------------- schemas


def typed(schema: Any) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return typed_tool_schemas([tool])[0]["function"]["parameters"]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["string", "null"]}, ["string", "null"]),
        ({"enum": [1, "a"]}, "integer"),
        ({"enum": [True]}, "boolean"),
        ({"enum": []}, "string"),
        ({"const": 1.5}, "number"),
        ({"const": None}, "null"),
        ({"const": [1]}, "array"),
        ({"enum": ["a"], "properties": {}}, "string"),  # the first clue counts
        ({"properties": {"x": {}}}, "object"),
        ({"additionalProperties": False}, "object"),
        ({"items": {}}, "array"),
        ({"prefixItems": [{}]}, "array"),
        ({"anyOf": [{"description": "?"}, {"type": "number"}]}, "number"),
        ({"anyOf": [{"enum": [1]}, {}]}, "integer"),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, "null"),
        ({"description": "?"}, "string"),
        ({"type": None, "items": {}}, "array"),
    ],
)
def test_a_missing_type_is_inferred(node: Any, expected: Any) -> None:
    assert typed({"properties": {"p": node}})["properties"]["p"]["type"] == expected


def test_types_are_filled_in_at_every_depth() -> None:
    out = typed(
        {
            "properties": {
                "a": {"items": {"properties": {"deep": {}}}},
                "b": {"prefixItems": [{}, {"const": 1}]},
                "c": {"additionalProperties": {"anyOf": [{"enum": ["x"]}]}},
                "d": True,
                "type": {"description": "a parameter called type"},
            }
        }
    )
    assert out["type"] == "object"
    got = out["properties"]
    assert got["a"]["items"]["properties"]["deep"]["type"] == "string"
    assert [item["type"] for item in got["b"]["prefixItems"]] == ["string", "integer"]
    assert got["c"]["additionalProperties"]["anyOf"][0]["type"] == "string"
    assert got["d"] is True
    assert got["type"]["type"] == "string"


def test_schemas_of_other_shapes() -> None:
    assert typed({})["type"] == "object"
    flat = {"type": "function", "name": "f", "parameters": {"properties": {"x": {}}}}
    assert typed_tool_schemas([flat])[0]["parameters"]["properties"]["x"]["type"] == "string"
    odd: list[dict[str, Any]] = [{"type": "web_search"}, {"function": None}, {"parameters": 5}]
    assert typed_tool_schemas(odd) == odd


def test_schemas_are_copied_and_bounded() -> None:
    tools = [{"function": {"parameters": {"properties": {"x": {"items": {}}}}}}]
    before = json.dumps(tools)
    typed_tool_schemas(tools)
    assert json.dumps(tools) == before
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(BadRequest, match="deeply") as caught:
        typed(deep)
    assert caught.value.param == "tools"


# --------------------------------------------------------------------------------------- repairs


def turns(*pairs: str) -> list[dict[str, Any]]:
    """ "s:text" and so on, as messages."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


def test_merge_neighbours() -> None:
    assert merge_neighbours(turns("u:a", "u:b", "a:c", "a:d", "u:e")) == turns(
        "u:a\n\nb", "a:c\n\nd", "u:e"
    )
    assert merge_neighbours(turns("s:a", "s:b", "u:")) == turns("s:a\n\nb", "u:")
    assert merge_neighbours(turns("u:", "u:b")) == turns("u:b")
    apart = turns("t:a", "t:b")
    assert merge_neighbours(apart) == apart
    calls = [{**turns("a:x")[0], "tool_calls": [call({})]}, *turns("a:y")]
    assert merge_neighbours(calls) == calls


def test_gather_and_fold_system() -> None:
    mixed = turns("u:a", "s:x", "a:b", "s:y", "u:c")
    assert gather_system(mixed) == turns("s:x\n\ny", "u:a", "a:b", "u:c")
    assert fold_system(mixed) == turns("u:x\n\ny\n\na", "a:b", "u:c")
    assert fold_system(turns("s:x", "a:b")) == turns("u:x", "a:b")
    assert fold_system(turns("s:x", "u:")) == turns("u:x")
    plain = turns("u:a", "a:b")
    assert gather_system(plain) == fold_system(plain) == plain
