"""What clients send to Responses: the chat request that it amounts to, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxlite.api import responses_request as requests
from mlxlite.api.responses_items import read_input
from mlxlite.errors import BadRequest, TooLong
from mlxlite.types import Ask

pytestmark = pytest.mark.slow

HELLO: dict[str, Any] = {"input": "hello"}
USER = {"role": "user", "content": "hello"}


def parse(**body: Any) -> Ask:
    asked = {**HELLO, **body}
    requests.check_body(asked)
    return requests.parse_response(asked, read_input(asked), asked.get("instructions"))


def messages(given: Any, instructions: str | None = None) -> list[Any]:
    return list(parse(input=given, instructions=instructions).messages or ())


def call(call_id: str = "c1", arguments: str = '{"a": 1}', **more: Any) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments}
    return {**item, **more}


def result(output: Any = "3", call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output, **more}


def thought(*texts: str, **more: Any) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": summary, **more}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


# ---------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "given",
    [
        "hello",
        [USER],
        [{"type": "message", **USER}],
        [{"type": None, "id": None, **USER}],
        [{"type": "message", "id": "msg_1", "status": "completed", **USER}],
        [{"role": "user", "content": ["hel", {"text": "lo"}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        [{"role": "user", "content": [{"type": "output_text", "text": "hello"}]}],
        [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, USER],
    ],
)
def test_one_message(given: Any) -> None:
    assert messages(given) == [USER]


def test_system_messages_are_gathered() -> None:
    """Instructions first, then each in its order, a blank line between; one message, at the
    front."""
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        USER,
        {"role": "system", "content": "c"},
        said("ok"),
        {"role": "developer", "content": ""},
        USER,
        {"role": "developer", "content": "d"},
    ]
    others = [USER, said("ok"), USER]
    assert messages(given, "a") == [{"role": "system", "content": "a\n\nb\n\nc\n\nd"}, *others]
    assert messages(given) == [{"role": "system", "content": "b\n\nc\n\nd"}, *others]
    assert messages([USER], "") == [USER]
    assert messages([], "a") == [{"role": "system", "content": "a"}]


def test_calls_and_results() -> None:
    silent = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    for item in (call(), call(id="fc_1", status="completed"), call(id=None, namespace="x")):
        assert messages([USER, item, result()]) == [USER, silent, RESULT]
    other = {**CALLED, "id": "c2"}
    both = {**silent, "tool_calls": [CALLED, other]}
    results = [RESULT, {**RESULT, "tool_call_id": "c2"}]
    given = [call(), call("c2"), result(), result(call_id="c2")]
    assert messages(given) == [both, *results]  # calls of one turn are one message
    given = [call(), result(), call("c2"), result(call_id="c2")]
    apart = [silent, results[0], {**silent, "tool_calls": [other]}, results[1]]
    assert messages(given) == apart
    empty = {**CALLED, "function": {"name": "add", "arguments": "{}"}}
    assert messages([call(arguments="")]) == [{**silent, "tool_calls": [empty]}]


def test_what_a_model_said_in_one_turn_is_one_message() -> None:
    turn = {"role": "assistant", "content": "so: ", "reasoning": "hm", "tool_calls": [CALLED]}
    assert messages([thought("hm"), said("so: "), call(), result()]) == [turn, RESULT]
    assert messages([said("so"), call(), said(": "), result()])[0]["content"] == "so: "
    assert messages([said("a"), said("b"), USER]) == [said("a"), said("b"), USER]
    assert messages([call(), result(), said("a")])[2] == said("a")
    hint = {"role": "developer", "content": "x"}  # does not part a call from its turn
    assert messages([said("a"), hint, call()])[1:] == [
        {"role": "assistant", "content": "a", "tool_calls": [CALLED]}
    ]


def test_reasoning() -> None:
    content = [{"type": "reasoning_text", "text": "in full"}]
    assert messages([thought("hm"), said("a")]) == [{**said("a"), "reasoning": "hm"}]
    assert messages([thought("a", "b"), said("c")])[0]["reasoning"] == "a\n\nb"
    assert messages([thought("hm", content=content), said("a")])[0]["reasoning"] == "in full"
    assert messages([thought("a"), thought("b"), said("c")])[0]["reasoning"] == "ab"
    given = [thought("a"), call(), thought("b"), said("c")]
    assert [message["reasoning"] for message in messages(given)] == ["a", "b"]
    # Dropped: without text, encrypted, or with nothing that it led to.
    assert messages([thought(), said("a")]) == [said("a")]
    assert messages([{"type": "reasoning", "encrypted_content": "x"}, said("a")]) == [said("a")]
    assert messages([thought("hm"), USER]) == [USER]
    assert messages([USER, thought("hm")]) == [USER]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("", ""),
        ([], ""),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
    ],
)
def test_tool_outputs(output: Any, text: str) -> None:
    assert messages([call(), result(output)])[1]["content"] == text


def test_freeform_calls_of_earlier_turns() -> None:
    freeform = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    turn, answer = messages([freeform, output])
    function = {"name": "patch", "arguments": '{"input": "a \\"b\\""}'}
    assert turn["tool_calls"][0]["function"] == function
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": "done"}


def test_refusals_are_text() -> None:
    part = {"type": "refusal", "refusal": "no"}
    assert messages([{"role": "assistant", "content": [part]}, USER]) == [said("no"), USER]


def test_every_item_has_an_id_and_none_is_changed() -> None:
    given = [USER, call(), result(), thought("x"), said("ok"), {"id": "msg_9", **USER}]
    before = repr(given)
    items = read_input({"input": given})
    assert repr(given) == before
    prefixes = [item["id"].split("_")[0] for item in items]
    assert prefixes == ["msg", "fc", "fco", "rs", "msg", "msg"]
    assert items[3]["id"] == "rs_1" and items[5]["id"] == "msg_9"
    assert read_input({"input": items}) == items  # what is stored reads as itself


# ---------------------------------------------------------------------------------- fields


def test_fields_mean_what_they_mean_in_chat() -> None:
    ask = parse(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "low", "summary": "auto"},
        top_logprobs=3,
        parallel_tool_calls=False,
        max_tool_calls=2,
        stream=True,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=["x"],
        logit_bias={"5": 1},
        chat_template_kwargs={"enable_thinking": False},
        thinking={"type": "enabled", "budget_tokens": 9},
    )
    assert (ask.max_tokens, ask.temperature, ask.top_p, ask.top_k) == (7, 0.5, 0.9, 5)
    assert (ask.reasoning_effort, ask.top_logprobs, ask.parallel_tool_calls) == ("low", 3, False)
    assert (ask.max_tool_calls, ask.stream, ask.seed, ask.stop) == (2, True, 3, ("x",))
    assert (ask.min_p, ask.logit_bias, ask.enable_thinking) == (0.1, ((5, 1.0),), False)
    assert (ask.thinking, ask.thinking_budget) == (True, 9)
    assert parse(max_tokens=5).max_tokens == 5
    assert parse(reasoning={"effort": "max"}).reasoning_effort == "max"
    assert parse(include=["message.output_text.logprobs"]).top_logprobs == 0
    assert parse(include=["reasoning.encrypted_content", "x"]).top_logprobs is None
    nulls = dict.fromkeys(field.name for field in requests.FIELDS)
    assert parse(**nulls) == parse()


def test_tools_are_nested() -> None:
    flat = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}}
    function = {key: value for key, value in flat.items() if key != "type"}
    nested = {"type": "function", "function": function}
    hosted = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "mcp"}]
    for tools in (
        [flat],
        [*hosted, flat],
        [{"type": "namespace", "name": "n", "tools": [*hosted, flat]}],
        [nested],
        [{key: value for key, value in flat.items() if key != "type"}],
    ):
        assert parse(tools=tools).tools == (nested,)
        assert parse(tools=tools, tool_choice="auto").tools == (nested,)
        assert parse(tools=tools, tool_choice="none").tools == ()
    for strict in (False, None):
        assert len(parse(tools=[{**flat, "strict": strict}]).tools) == 1
    bare = parse(tools=[{"type": "function", "name": "f.g-h_i", "parameters": None}]).tools
    assert bare[0]["function"]["parameters"] == {}
    assert parse(tools=hosted).tools == parse(tools=[]).tools == ()


HINTS: list[dict[str, Any]] = [
    {"include": ["reasoning.encrypted_content", "file_search_call.results"]},
    {"store": False},
    {"reasoning": {"effort": "none", "summary": "detailed", "generate_summary": "auto"}},
    {"reasoning": {}},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    {"client_metadata": {"a": 1}, "safety_identifier": "s", "user": "u"},
    {"service_tier": "flex"},
    {"truncation": "auto"},
    {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    {"text": {"format": None}},
    {"metadata": {"a": "b"}},
    {"context_management": [{"type": "compaction"}]},
    {"stream_options": {"include_obfuscation": False}},
    {"background": False, "unknown": 1, "n": 1},
]


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: next(iter(hint)))
def test_hints_are_accepted(hint: dict[str, Any]) -> None:
    assert parse(**hint).messages == (USER,)


IMAGE = {"type": "input_image", "image_url": "data:"}
TOOL = {"type": "function", "name": "f", "parameters": {}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": 5}),
    ("input", {"input": {"role": "user"}}),
    ("input", {"input": ""}),
    ("input", {"input": []}),
    ("input", {"input": [thought("hm")]}),
    ("input[0]", {"input": ["hello"]}),
    ("input[1]", {"input": [USER, None]}),
    ("input[0].id", {"input": [{}]}),
    ("input[0].type", {"input": [{"type": "computer_call"}]}),
    ("input[0].type", {"input": [{"type": 5}]}),
    ("input[0].role", {"input": [{"role": "king", "content": "x"}]}),
    ("input[0].role", {"input": [{"type": "message", "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content", {"input": [{"role": "user", "content": 5}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [5]}]}),
    ("input[2].content[0].type", {"input": [USER, USER, {"role": "user", "content": [IMAGE]}]}),
    ("input[0].content[1].type", {"input": [{"role": "user", "content": ["a", {"type": "x"}]}]}),
    (
        "input[0].content[0].type",
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    ),
    ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"text": 5}]}]}),
    ("input[0].call_id", {"input": [call("")]}),
    ("input[0].name", {"input": [call(name=None)]}),
    ("input[0].arguments", {"input": [call(arguments={"a": 1})]}),  # type: ignore[arg-type]
    ("input[0].output", {"input": [result(None)]}),
    ("input[0].output", {"input": [result(5)]}),
    ("input[0].output[0].type", {"input": [result([IMAGE])]}),
    ("input[0].call_id", {"input": [result(call_id=5)]}),  # type: ignore[arg-type]
    ("input[0].summary", {"input": [{"type": "reasoning", "summary": 5}]}),
    ("input[0].input", {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "n"}]}),
    ("input[0].id", {"input": [{"type": "item_reference", "id": 5}]}),
    ("instructions", {"instructions": ["x"]}),
    ("previous_response_id", {"previous_response_id": 5}),
    ("max_output_tokens", {"max_output_tokens": -1}),
    ("max_output_tokens", {"max_output_tokens": "5"}),
    ("max_output_tokens", {"max_output_tokens": 1.5}),
    ("max_tool_calls", {"max_tool_calls": 0}),
    ("max_tool_calls", {"max_tool_calls": True}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": -1}),
    ("include", {"include": "x"}),
    ("include[0]", {"include": [5]}),
    ("store", {"store": "no"}),
    ("reasoning", {"reasoning": "low"}),
    ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
    ("reasoning.summary", {"reasoning": {"summary": 5}}),
    ("text", {"text": "x"}),
    ("text.format", {"text": {"format": "json"}}),
    ("text.verbosity", {"text": {"verbosity": 1}}),
    ("truncation", {"truncation": "middle"}),
    ("metadata", {"metadata": "x"}),
    ("metadata.a", {"metadata": {"a": 1}}),
    ("user", {"user": 5}),
    ("service_tier", {"service_tier": 5}),
    ("stream", {"stream": "yes"}),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 2}),
    ("stop", {"stop": 5}),
    ("tools", {"tools": {"a": 1}}),
    ("tools[0]", {"tools": [5]}),
    ("tools[0].name", {"tools": [{"type": "function", "parameters": {}}]}),
    ("tools[1].tools[0].name", {"tools": [TOOL, {"type": "namespace", "tools": [{}]}]}),
    ("tools[0].parameters", {"tools": [{**TOOL, "parameters": 5}]}),
    ("tools[0].strict", {"tools": [{**TOOL, "strict": 1}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "nope"}, "tools": [TOOL]}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.type", {"text": {"format": {}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    (
        "text.format.strict",
        {"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}},
    ),
    ("tool_choice", {"tool_choice": {"type": "file_search"}}),
    ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools", "mode": "all", "tools": []}}),
    ("tool_choice", {"tool_choice": 5}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("guided_regex", {"guided_regex": 5}),
    ("adapter", {"adapter": "mine"}),
]


@pytest.mark.parametrize(("param", "body"), REFUSED, ids=[f"{p}-{n}" for n, (p, _) in
                                                         enumerate(REFUSED)])  # fmt: skip
def test_errors_name_the_clients_own_field(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)
    assert "messages" not in caught.value.message and "function." not in caught.value.message


def test_errors_from_further_down() -> None:
    found = requests.in_our_words(TooLong("the prompt has 9 tokens", param="messages"))
    assert (type(found), found.param, found.code) == (TooLong, "input", "context_length_exceeded")
    found = requests.in_our_words(BadRequest("logit_bias names token 9", param="logit_bias"))
    assert (found.param, found.message) == ("logit_bias", "logit_bias names token 9")
    assert requests.in_our_words(BadRequest("x")).param is None
    assert (
        requests.in_our_words(BadRequest("messages[3].x", param="messages[3].x")).param == "input"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "name": "f", "parameters": {"maximum": math.inf}}]),
        ("tool_choice", {"type": "function", "name": "f", "x": -math.inf}),
        ("text", {"format": {"type": "text", "x": [math.inf]}}),
    ],
)
def test_what_is_echoed_can_be_sent(name: str, value: Any) -> None:
    """1e999 is JSON, and Python reads infinity; found by `test_fuzz`."""
    with pytest.raises(BadRequest, match=f"^{name} holds a number that is too large$"):
        requests.echo({name: value}, None)
