"""fields: every request field with every wrong kind of value, judged through real JSON.

Nothing here needs a model: a wrong value is refused before one is touched (decision D12).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mlxlite import fields
from mlxlite.asks import parse_chat
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
    tuple: "string or list",
    object: "string or object",
}
# One value of each JSON type, and the kinds of field that take it.
VALUES: dict[str, tuple[Any, ...]] = {
    "true": (bool,),
    '"1"': (str, object, tuple),
    '""': (str, object, tuple),
    "1": (int, float),
    "1.5": (float,),
    "1.0": (float,),
    "[1]": (list, tuple),
    "[]": (list, tuple),
    '{"a": 1}': (dict, object),
    "{}": (dict, object),
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
        for raw in (f"{field.low - 1!r}", "-1e30" if field.kind is float else "-" + "9" * 30):
            error = refusal(field.name, raw)
            # -1 is how some clients say that they did not set it (spec 10 section 4).
            low = 0 if field is fields.TOP_LOGPROBS else field.low
            assert error.message == f"{field.name} must be at least {low:g}"
            assert error.param == field.name
        ask_with(field.name, f"{field.low:g}")
    if field.high is not None:
        over = (f"{field.high + 1:g}",) if field.kind is int else (f"{field.high + 0.5!r}", "1e300")
        for raw in (*over, "9" * 4000):
            error = refusal(field.name, raw)
            assert error.message == f"{field.name} must be at most {field.high:g}"
        ask_with(field.name, f"{field.high:g}")


def test_limits_of_the_spec() -> None:
    """The ranges of spec 10 section 4, spelled out; D9: up to 20 log-probabilities."""
    found = {f.name: (f.low, f.high) for f in NUMBERS}
    assert found == {
        "max_completion_tokens": (0, None),
        "max_tokens": (0, None),
        "temperature": (0, None),
        "top_p": (0, 1),
        "top_k": (0, None),
        "min_p": (0, 1),
        "seed": (None, None),
        "xtc_probability": (0, 1),
        "xtc_threshold": (0, 0.5),
        "repetition_penalty": (0, 1e6),  # bounds of ours from here: float32 ends at 3e38
        "repetition_context_size": (0, None),
        "presence_penalty": (-1e6, 1e6),
        "presence_context_size": (0, None),
        "frequency_penalty": (-1e6, 1e6),
        "frequency_context_size": (0, None),
        "top_logprobs": (-1, 20),
        "n": (1, 128),
        "max_thinking_tokens": (0, None),
    }
    assert refusal("xtc_threshold", "0.9").message == "xtc_threshold must be at most 0.5"
    assert refusal("top_logprobs", "21").message == "top_logprobs must be at most 20"


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
    assert error.message == "stream_options.include_usage must be of type bool"
    assert error.param == "stream_options.include_usage"


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
        ("5", "stop"),
        ("1.5", "stop"),
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
    ("tool_choice", '"required"'),
    ("tool_choice", '"Auto"'),
    ("tool_choice", '""'),
    ("tool_choice", "{}"),
    ("tool_choice", '{"type": "function", "function": {"name": "f"}}'),
    ("tool_choice", '{"type": "image_generation"}'),
    ("functions", '[{"name": "f"}]'),
    ("function_call", '{"name": "f"}'),
    ("adapter", '"mine"'),
    ("adapter", '"a+b"'),
    ("adapter", '""'),
    ("audio", '{"voice": "a"}'),
    ("modalities", '["text", "audio"]'),
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
    ("adapter", '"none"'),
    ("adapter", '"NONE"'),
    ("functions", "[]"),
    ("function_call", '"auto"'),
    ("function_call", '"none"'),
    ("modalities", "[]"),
    ("modalities", '["text"]'),
    ("structured_outputs", "{}"),
    ("guided_regex", '""'),
    ("guided_choice", "[]"),
    ("guided_grammar", '""'),
    ("guided_json", '""'),
    ("no_such_field", '[{"deep": [1, 2]}]'),
]


@pytest.mark.parametrize(("name", "raw"), PROMISES)
def test_promises_are_refused(name: str, raw: str) -> None:
    error = refusal(name, raw)
    assert error.param == name and error.message.startswith(f"{name} ")
    if name == "tool_choice":
        assert "must be auto, none" in error.message or "no tools" in error.message
    elif name == "adapter":
        assert json.loads(raw) in error.message and "none is" in error.message
    else:
        assert "is not support" in error.message


@pytest.mark.parametrize(("name", "raw"), HINTS)
def test_hints_are_accepted(name: str, raw: str) -> None:
    ask_with(name, raw)


# ------------------------------------------------------------------------------- logit bias


@pytest.mark.parametrize(
    ("raw", "pairs"),
    [
        ("{}", ()),
        ('{"5": 100}', ((5, 100.0),)),
        ('{"5": -100, "0": 0.5}', ((5, -100.0), (0, 0.5))),
        ('{"511": 1e30}', ((511, 1e30),)),
        ('{"123456789012345678": 1}', ((123456789012345678, 1.0),)),  # judged by the vocabulary
    ],
)
def test_logit_bias(raw: str, pairs: Any) -> None:
    assert ask_with("logit_bias", raw).logit_bias == pairs


@pytest.mark.parametrize(
    "raw",
    [
        '{"": 1}',
        '{"a": 1}',
        '{"1.5": 1}',
        '{"1.0": 1}',
        '{"-1": 1}',
        '{"007": 1}',
        '{"+1": 1}',
        '{" 1": 1}',
        '{"1_0": 1}',
        '{"\u0967": 1}',
        '{"1e2": 1}',
        '{"' + "9" * 5000 + '": 1}',
        '{"5": "1"}',
        '{"5": true}',
        '{"5": null}',
        '{"5": [1]}',
        '{"5": 1e999}',
        '{"5": -1e999}',
        '{"5": 1e300}',
        '{"5": ' + "9" * 400 + "}",
    ],
)
def test_wrong_logit_bias(raw: str) -> None:
    error = refusal("logit_bias", raw)
    assert error.message == "logit_bias must be a dict of int to float"
    assert error.param == "logit_bias"


# ----------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": False, "top_logprobs": -1}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": -1}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"top_logprobs": 2}, 2),
        ({"top_logprobs": 0}, None),
    ],
)
def test_logprobs(body: dict[str, Any], count: int | None) -> None:
    assert parse(json.dumps({"messages": MESSAGES, **body})).top_logprobs == count


def test_top_logprobs_against_logprobs() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(json.dumps({"messages": MESSAGES, "logprobs": False, "top_logprobs": 2}))
    assert caught.value.param == "top_logprobs"


# ----------------------------------------------------------------------------------------- hlg


def test_hlg() -> None:
    assert ask_with("hlg", "{}").hlg.get("enabled") is None
    found = ask_with("hlg", '{"enabled": true, "width": 0, "toe": 100, "other": [1]}').hlg
    assert (found["enabled"], found["width"], found["toe"]) == (True, 0, 100)
    nulls = dict.fromkeys(("enabled", "width", "shoulder", "toe", "pivot_offset"))
    assert ask_with("hlg", json.dumps(nulls)) == ask_with("hlg", "{}")


@pytest.mark.parametrize("name", ["width", "shoulder", "toe", "pivot_offset"])
@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ("-0.5", "at least 0"),
        ("100.5", "at most 100"),
        ("1e999", "a finite number"),
        ("-1e999", "a finite number"),
        ("9" * 400, "at most 100"),
        ('"4"', "of type number"),
        ("true", "of type number"),
        ("[4]", "of type number"),
        ("{}", "of type number"),
    ],
)
def test_wrong_hlg(name: str, raw: str, why: str) -> None:
    error = refusal("hlg", f'{{"{name}": {raw}}}')
    assert (error.message, error.param) == (f"hlg.{name} must be {why}", f"hlg.{name}")


@pytest.mark.parametrize("raw", ["1", '"yes"', "[]", "{}", '""', "0"])
def test_wrong_hlg_enabled(raw: str) -> None:
    error = refusal("hlg", f'{{"enabled": {raw}}}')
    assert error.message == "hlg.enabled must be of type bool"
    assert error.param == "hlg.enabled"


# ------------------------------------------------------------------------------------ thinking


@pytest.mark.parametrize(
    ("body", "thinks", "budget"),
    [
        ({}, None, None),
        ({"thinking": {}}, None, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "adaptive", "display": "full"}}, None, None),
        ({"thinking": {"type": None, "budget_tokens": None}}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, 1024),
        ({"thinking": {"budget_tokens": 0}}, None, 0),
        ({"max_thinking_tokens": 7}, None, 7),
        ({"max_thinking_tokens": 0, "thinking": {"budget_tokens": 5}}, None, 0),
        ({"max_thinking_tokens": None, "thinking": {"budget_tokens": 5}}, None, 5),
        # A budget above max_tokens is normal (clients.md, Requests 6).
        ({"max_tokens": 5, "thinking": {"budget_tokens": 10**30}}, None, 10**30),
    ],
)
def test_thinking(body: dict[str, Any], thinks: bool | None, budget: int | None) -> None:
    ask = parse(json.dumps({"messages": MESSAGES, **body}))
    assert (ask.thinking, ask.thinking_budget) == (thinks, budget)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"budget_tokens": "5"}', "thinking.budget_tokens must be of type int"),
        ('{"budget_tokens": 1.5}', "thinking.budget_tokens must be of type int"),
        ('{"budget_tokens": [5]}', "thinking.budget_tokens must be of type int"),
        ('{"budget_tokens": true}', "thinking.budget_tokens must be of type int"),
        ('{"budget_tokens": -1}', "thinking.budget_tokens must be at least 0"),
        ('{"type": 5}', "thinking.type must be of type string"),
        ('{"type": ["enabled"]}', "thinking.type must be of type string"),
        ('{"type": true}', "thinking.type must be of type string"),
    ],
)
def test_wrong_thinking(raw: str, message: str) -> None:
    error = refusal("thinking", raw)
    assert error.message == message and error.param == message.split()[0]


def test_a_bias_of_too_many_tokens() -> None:
    raw = json.dumps({str(token): 1 for token in range(fields.MOST_BIASES + 1)})
    assert (
        refusal("logit_bias", raw).message == "logit_bias must hold 4096 tokens at most, not 4097"
    )


@pytest.mark.parametrize("raw", ['"hgih"', '""', '"HIGH"', '"most"', '"none "'])
def test_a_typing_slip_does_not_switch_thinking_on(raw: str) -> None:
    error = refusal("reasoning_effort", raw)
    assert error.param == "reasoning_effort"
    assert error.message.endswith("must be one of none, minimal, low, medium, high, xhigh, max")


def test_template_options() -> None:
    """Real booleans only; other keys and other types are ignored (spec 10 section 1)."""
    ask = ask_with("chat_template_kwargs", '{"enable_thinking": false, "preserve_thinking": true}')
    assert (ask.enable_thinking, ask.preserve_thinking) == (False, True)
    for junk in ('"true"', "1", "0", "null", "[]", "{}"):
        raw = f'{{"enable_thinking": {junk}, "preserve_thinking": {junk}, "other": {junk}}}'
        assert ask_with("chat_template_kwargs", raw) == ask_with("chat_template_kwargs", "{}")
