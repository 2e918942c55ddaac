"""fields: every request field with every wrong kind of value, judged through real JSON.

Nothing here needs a model: a wrong value is refused before one is touched (decision D12).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mlxlite import fields
from mlxlite.api.openai import parse_chat
from mlxlite.errors import BadRequest
from mlxlite.http.routing import Request
from mlxlite.types import Ask

MESSAGES = [{"role": "user", "content": "hi"}]
TYPE_NAMES = {
    bool: "bool",
    int: "int",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}
# One value of each JSON type, and the kinds of field that take it.
VALUES: dict[str, tuple[Any, ...]] = {
    "true": (bool,),
    '"1"': (str,),
    '""': (str,),
    "1": (int, float),
    "1.5": (float,),
    "1.0": (float,),
    "[1]": (list,),
    "[]": (list,),
    '{"a": 1}': (dict,),
    "{}": (dict,),
}
OUTER = [field for field in fields.CHAT if field is not fields.MESSAGES]
NUMBERS = [field for field in OUTER if field.kind in (int, float)]


def parse(raw: str) -> Ask:
    return parse_chat(asyncio.run(Request("POST", "/", content=raw.encode()).json()))


def ask_with(name: str, raw: str) -> Ask:
    """A good request but for one field, given as JSON text."""
    return parse(f'{{"messages": {json.dumps(MESSAGES)}, "{name}": {raw}}}')


def refusal(name: str, raw: str) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        ask_with(name, raw)
    assert caught.value.status == 400
    return caught.value


def test_the_table_is_whole() -> None:
    names = [field.name for field in fields.CHAT]
    assert len(set(names)) == len(names)
    assert all(field.doc and field.absent for field in fields.CHAT)


@pytest.mark.parametrize("field", OUTER, ids=lambda field: field.name)
def test_types(field: fields.Field) -> None:
    for raw, kinds in VALUES.items():
        if field.kind not in kinds:
            error = refusal(field.name, raw)
            assert error.message == f"{field.name} must be of type {TYPE_NAMES[field.kind]}"
            assert error.param == field.name


@pytest.mark.parametrize("field", OUTER, ids=lambda field: field.name)
def test_null_is_absent(field: fields.Field) -> None:
    assert ask_with(field.name, "null") == parse(json.dumps({"messages": MESSAGES}))


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_infinite_and_not_a_number(field: fields.Field) -> None:
    for raw in ("1e999", "-1e999"):
        error = refusal(field.name, raw)
        assert error.param == field.name
        wanted = "be of type int" if field.kind is int else "be a finite number"
        assert error.message == f"{field.name} must {wanted}"
    for raw in ("NaN", "Infinity", "-Infinity"):  # no JSON at all
        assert refusal(field.name, raw).message == "invalid JSON body"


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_limits(field: fields.Field) -> None:
    if field.low is not None:
        for raw in (f"{field.low - 1:g}", "-1e30" if field.kind is float else "-" + "9" * 30):
            error = refusal(field.name, raw)
            assert error.message == f"{field.name} must be at least {field.low:g}"
            assert error.param == field.name
        ask_with(field.name, f"{field.low:g}")
    if field.high is not None:
        for raw in (f"{field.high + 0.5:g}", "1e300", "9" * 4000):
            error = refusal(field.name, raw)
            assert error.message == f"{field.name} must be at most {field.high:g}"
        ask_with(field.name, f"{field.high:g}")


def test_huge_numbers() -> None:
    assert ask_with("max_tokens", "9" * 30).max_tokens == int("9" * 30)
    assert ask_with("seed", "-" + "9" * 30).seed == -int("9" * 30)
    assert ask_with("temperature", "1e300").temperature == 1e300
    assert refusal("temperature", "9" * 400).message == "temperature must be a finite number"
    assert refusal("max_tokens", "9" * 5000).message == "invalid JSON body"  # Python's own limit


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("null", "messages required"),
        ("[]", "messages required"),
        ('"hi"', "messages must be of type list"),
        ("1", "messages must be of type list"),
        ("{}", "messages must be of type list"),
        ("true", "messages must be of type list"),
    ],
)
def test_messages(raw: str, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(f'{{"messages": {raw}}}')
    assert (caught.value.message, caught.value.param) == (message, "messages")


def test_messages_absent() -> None:
    with pytest.raises(BadRequest, match="messages required"):
        parse("{}")


@pytest.mark.parametrize("raw", ["[]", "1", '"x"', "null", "{", "", "\\xff", "{}x", "[" * 5000])
def test_bodies(raw: str) -> None:
    with pytest.raises(BadRequest, match="invalid JSON body"):
        parse(raw)


def test_stream_options() -> None:
    assert not ask_with("stream_options", "{}").include_usage
    assert not ask_with("stream_options", '{"include_usage": null}').include_usage
    assert not ask_with("stream_options", '{"include_usage": false}').include_usage
    assert ask_with("stream_options", '{"include_usage": true}').include_usage
    assert not ask_with("stream_options", '{"continuous_usage_stats": true}').include_usage
    error = refusal("stream_options", '{"include_usage": "yes"}')
    assert error.message == "include_usage must be of type bool"
    assert error.param == "include_usage"


def test_max_completion_tokens_comes_first() -> None:
    def limit(**body: Any) -> int | None:
        return parse(json.dumps({"messages": MESSAGES, **body})).max_tokens

    assert limit() is None
    assert limit(max_tokens=5) == 5
    assert limit(max_completion_tokens=3) == 3
    assert limit(max_completion_tokens=3, max_tokens=5) == 3
    assert limit(max_completion_tokens=0, max_tokens=5) == 0
    assert limit(max_completion_tokens=None, max_tokens=5) == 5
    # Both are judged, whichever counts.
    with pytest.raises(BadRequest, match="max_tokens must be of type int"):
        limit(max_completion_tokens=3, max_tokens="5")


@pytest.mark.parametrize(
    ("raw", "stops"),
    [
        ("null", ()),
        ('""', ()),
        ("[]", ()),
        ('"a"', ("a",)),
        ('["a", "", "b", "a"]', ("a", "b")),
    ],
)
def test_stop(raw: str, stops: tuple[str, ...]) -> None:
    assert ask_with("stop", raw).stop == stops


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ("1", "stop"),
        ("true", "stop"),
        ("{}", "stop"),
        ("[1]", "stop[0]"),
        ('["a", null]', "stop[1]"),
        (json.dumps([f"s{n}" for n in range(65)]), "stop"),
        (json.dumps("x" * 4097), "stop"),
    ],
)
def test_wrong_stop(raw: str, param: str) -> None:
    assert refusal("stop", raw).param == param


# ------------------------------------------------------------------- promises and hints

PROMISES = [
    ("n", "2"),
    ("n", "9" * 30),
    ("logprobs", "true"),
    ("logprobs", "1"),
    ("top_logprobs", "2"),
    ("response_format", '{"type": "json_object"}'),
    ("response_format", '{"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}'),
    ("response_format", '"text"'),
    ("tool_choice", '"required"'),
    ("tool_choice", '{"type": "function", "function": {"name": "f"}}'),
    ("tools", '[{"type": "function", "function": {"name": "f"}}]'),
    ("functions", '[{"name": "f"}]'),
    ("guided_json", "{}"),
    ("guided_regex", '"a+"'),
    ("guided_choice", '["a"]'),
    ("guided_grammar", '"root ::= x"'),
    ("structured_outputs", '{"regex": "a"}'),
    ("logit_bias", '{"1": 5}'),
    ("frequency_penalty", "0.5"),
    ("presence_penalty", "-1"),
    ("repetition_penalty", "1.1"),
    ("xtc_probability", "0.5"),
    ("adapter", '"mine"'),
    ("audio", '{"voice": "a"}'),
]
HINTS = [
    ("store", "true"),
    ("metadata", '{"a": "b"}'),
    ("user", '"me"'),
    ("prompt_cache_key", '"k"'),
    ("service_tier", '"auto"'),
    ("n", "1"),
    ("stream", "false"),
    ("max_completion_tokens", "5"),
    ("stream_options", '{"continuous_usage_stats": true}'),
    ("ignore_eos", "true"),
    ("parallel_tool_calls", "true"),
    ("safety_identifier", '"s"'),
    ("reasoning_effort", '"low"'),
    ("verbosity", '"low"'),
    ("response_format", '{"type": "text"}'),
    ("tool_choice", '"auto"'),
    ("tool_choice", '"none"'),
    ("tools", "[]"),
    ("logprobs", "false"),
    ("top_logprobs", "0"),
    ("logit_bias", "{}"),
    ("frequency_penalty", "0"),
    ("presence_penalty", "0.0"),
    ("repetition_penalty", "1.0"),
    ("no_such_field", '[{"deep": [1, 2]}]'),
]


@pytest.mark.parametrize(("name", "raw"), PROMISES)
def test_promises_are_refused(name: str, raw: str) -> None:
    error = refusal(name, raw)
    assert error.param == name
    assert error.message == f"{name} is not supported yet"


@pytest.mark.parametrize(("name", "raw"), HINTS)
def test_hints_are_accepted(name: str, raw: str) -> None:
    ask_with(name, raw)


def test_tools_that_may_not_be_called_are_no_promise() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    parse(json.dumps({"messages": MESSAGES, "tools": tools, "tool_choice": "none"}))
