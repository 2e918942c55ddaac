"""Messages: how a body is read. Mostly pure: it becomes an Ask, or a 400 that names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.api.anthropic import parse_messages, render_error
from mlxlite.asks import parse_chat
from mlxlite.errors import BadRequest
from mlxlite.http.routing import parse_object
from mlxlite.text.messages import normalise_messages
from tests.scripted import QWEN, TOKENIZER, ScriptedApp
from tests.transcripts import COUNT, ask, plain

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}


def parse(**body: Any) -> Any:
    asked = {"model": "m", "max_tokens": 5, "messages": HELLO, **body}
    return parse_messages(parse_object(json.dumps(asked).encode()))


def turns(*messages: Any, **body: Any) -> list[dict[str, Any]]:
    """The chat messages of a body; what prepare makes of them cannot fail any more."""
    found = parse(messages=list(messages), **body).messages
    normalise_messages(found)
    return [dict(message) for message in found]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def use(call_id: str = "c1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": given}


def called(call_id: str = "c1", **given: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": given}
    return {"id": call_id, "type": "function", "function": function}


def result(content: Any, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def told(content: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "url", "url": "https://a.test/a.pdf"}}


# ------------------------------------------------------------------------------------ system


def test_system() -> None:
    assert turns(*HELLO, system="Be brief.") == [system("Be brief."), *HELLO]
    two = [text("Be", cache_control={"type": "ephemeral"}), text("brief.")]
    assert turns(*HELLO, system=two) == [system("Be\nbrief."), *HELLO]
    for nothing in (None, "", [], [text("")]):
        assert turns(*HELLO, system=nothing) == HELLO


def test_the_billing_block_is_dropped() -> None:
    """Clients.md, Requests 4: it differs from chat to chat."""
    billing = text("x-anthropic-billing-header: cc_version=2.1.0; cch=0a1b2;")
    rules = text("You are an agent.")
    expected = [system("You are an agent."), *HELLO]
    assert turns(*HELLO, system=[billing, rules]) == expected
    assert turns(system([billing, rules]), *HELLO) == expected
    assert turns(*HELLO, system=[billing]) == HELLO
    assert turns(*HELLO, system=[rules, billing])[0]["content"].endswith("cch=0a1b2;")  # a quote


def test_system_inside_messages_is_folded_in_place() -> None:
    """F102; clients.md, Requests 3: the same whether blocks or a string, at any position."""
    for content in ("Be brief.", [text("Be brief.")], [text("Be brief.", cache_control=None)]):
        said = system(content)
        assert turns(said, *HELLO) == [system("Be brief."), *HELLO]
        assert turns(said, *HELLO, system="You.") == [system("You.\nBe brief."), *HELLO]
        assert turns(*HELLO, said) == [user("hi\nBe brief.")]
        history = [*HELLO, assistant("yes")]
        assert turns(*history, said, *HELLO) == [*history, user("Be brief.\nhi")]
        assert turns(said) == [system("Be brief.")]


def test_the_prompt_only_grows(app: ScriptedApp) -> None:
    """A system message late in the chat leaves all that came before it as it was."""

    def prompt(*messages: Any) -> str:
        app.engine.says("ok")
        plain(app, messages=list(messages), system="You.", max_tokens=5)
        return TOKENIZER.decode(app.engine.specs[-1].prompt_ids, keep_special=True)

    history: list[Any] = [user("one"), system("first")]
    before = prompt(*history)
    for more in ([assistant("ok"), user("two")], [assistant("ok"), system([text("x")]), user("y")]):
        history += more
        after = prompt(*history)
        assert after.startswith(before), "the whole last prompt, its answer, what is new"
        before = after


# ---------------------------------------------------------------------------------- messages


def test_text() -> None:
    two = [text("a", citations=None), text("b", cache_control={"type": "ephemeral"}), "c"]
    assert turns(user(two)) == [user("a\nb\nc")]
    assert turns(user([])) == turns(user("")) == [user("")]
    assert turns(user("a"), user([text("b")]), assistant("c"), user("d")) == [
        user("a\nb"), assistant("c"), user("d"),
    ]  # fmt: skip
    for nothing in ("", None, []):
        assert turns(*HELLO, assistant(nothing)) == [*HELLO, assistant("")]


@pytest.mark.parametrize("signature", ["", "EqQBCkgIARABGAIiQL8=", None, 5, ...])
def test_thinking_comes_back_with_any_signature(signature: Any) -> None:
    """F101"""
    block = {"type": "thinking", "thinking": "hm", "signature": signature}
    if signature is ...:
        del block["signature"]
    redacted = {"type": "redacted_thinking", "data": "AAAA"}
    history = assistant([block, redacted, text("ok"), use(a=1)])
    assert turns(*HELLO, history, user([result("1")])) == [
        *HELLO,
        {**assistant("ok"), "reasoning": "hm", "tool_calls": [called(a=1)]},
        told("1"),
    ]


def test_tool_results() -> None:
    """In front of the user's words, in their order; a string, blocks, or nothing."""
    calls = [*HELLO, assistant([text("ok"), use("c1", a=1), use("c2")])]
    expected = [*HELLO, {**assistant("ok"), "tool_calls": [called("c1", a=1), called("c2")]}]
    after = turns(*calls, user([text("x"), result("1", "c1"), text("y"), result([], "c2")]))
    assert after == [*expected, told("1", "c1"), told("", "c2"), user("x\ny")]
    apart = [user([result("1", "c1")]), system("note"), user([result("2", "c2"), text("go")])]
    after = turns(*calls, *apart)
    assert after == [*expected, told("1", "c1"), told("2", "c2"), user("note\ngo")]
    assert turns(user([result("1")])) == [told("1")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("42", "42"),
        (None, ""),
        ([], ""),
        ([text("4"), text("2")], "4\n2"),
        (["4", "2"], "4\n2"),
        ([{"type": "tool_reference", "tool_name": "add"}], "add"),
        ([{"type": "search_result", "title": "t", "source": "s", "content": [text("found")]}],
         "found"),
    ],
)  # fmt: skip
def test_contents_of_a_result(content: Any, words: str) -> None:
    assert turns(user([result(content)])) == [told(words)]
    for fine in (False, None):
        assert turns(user([result(content, is_error=fine)])) == [told(words)]


def test_a_failed_result_says_so() -> None:
    assert turns(user([result("no file", is_error=True)])) == [told("Error:\nno file")]
    assert turns(user([result(None, is_error=True)])) == [told("Error:")]
    assert turns(user([result("error: no", is_error=True)])) == [told("error: no")]


def test_blocks_of_servers_are_skipped() -> None:
    history = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        text("It rains."),
    ]
    assert turns(*HELLO, assistant(history)) == [*HELLO, assistant("It rains.")]


# ------------------------------------------------------------------------------------- tools


def test_tools() -> None:
    dressed = {
        **TOOL, "type": "custom", "strict": False, "defer_loading": True, "input_examples": [],
        "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True,
    }  # fmt: skip
    servers = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "namespace", "name": "n", "tools": [{}]},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    for tools in ([TOOL], [dressed], [{**TOOL, "type": None}], [*servers, TOOL]):
        (found,) = parse(tools=tools).tools
        assert found == {"type": "function", "function": FUNCTION}
    (strict,) = parse(tools=[{**TOOL, "strict": True}]).tools
    assert strict["function"] == {**FUNCTION, "strict": True}
    assert parse(tools=servers).tools == parse(tools=[]).tools == parse(tools=None).tools == ()
    (bare,) = parse(tools=[{"name": "a-b.c_d", "input_schema": {}}]).tools
    assert bare["function"] == {"name": "a-b.c_d", "parameters": {}}


def test_tool_choice() -> None:
    for choice in (None, {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": None}):
        asked = parse(tools=[TOOL], tool_choice=choice)
        assert len(asked.tools) == 1 and asked.parallel_tool_calls
    one = parse(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(one.tools) == 1 and not one.parallel_tool_calls
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).tools == ()


# ------------------------------------------------------------------------ what passes, and not


def test_fields_that_pass() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 7,
        "xtc_probability": 0.5, "xtc_threshold": 0.1, "repetition_penalty": 1.1,
        "repetition_context_size": 5, "presence_penalty": 0.2, "presence_context_size": 6,
        "frequency_penalty": 0.3, "frequency_context_size": 7,
    }  # fmt: skip
    chat = parse_chat({"model": "m", "max_tokens": 5, "messages": HELLO, **given})
    assert parse(**given) == chat
    assert parse(stop_sequences=["a", "", "b"]).stop == ("a", "b")
    assert parse(stream=True).stream and not parse(stream=False).stream
    assert parse(max_tokens=32_000).max_tokens == 32_000


@pytest.mark.parametrize(
    ("thinking", "is_on", "budget"),
    [
        (None, None, None),
        ({"type": "enabled", "budget_tokens": 31_999}, True, 31_999),
        ({"type": "disabled"}, False, None),
        ({"type": "adaptive", "display": "summarized"}, None, None),
        ({"type": "between_tools"}, None, None),
    ],
)
def test_thinking(thinking: Any, is_on: bool | None, budget: int | None) -> None:
    asked = parse(thinking=thinking)
    assert (asked.thinking, asked.thinking_budget) == (is_on, budget)


def test_hints_change_nothing() -> None:
    """Clients.md, Requests 6; and fields of other surfaces mean nothing here."""
    hints = {
        "metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}, "container": "c",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "output_config": {"effort": "high"}, "service_tier": "auto", "speed": "fast",
        "inference_geo": "eu", "diagnostics": {"previous_message_id": None}, "mcp_servers": [],
        "betas": ["x"], "no_such_field": {"deep": [1]}, "thread": None,
        "stop": ["x"], "n": 5, "response_format": {"type": "json_object"}, "logprobs": True,
        "logit_bias": {"1": 5}, "max_completion_tokens": 1, "adapter": "mine",
    }  # fmt: skip
    assert parse(**hints) == parse()
    assert parse(**dict.fromkeys(hints)) == parse()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"model": 5}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"xtc_threshold": 0.9}, "xtc_threshold"),
    ({"frequency_context_size": -1}, "frequency_context_size"),
    ({"stop_sequences": 5}, "stop_sequences"),
    ({"stop_sequences": ["a", 5]}, "stop_sequences[1]"),
    ({"stop_sequences": [str(n) for n in range(65)]}, "stop_sequences"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": 1}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "all"}}, "thinking.budget_tokens"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"system": 5}, "system"),
    ({"system": {"type": "text", "text": "x"}}, "system"),
    ({"system": [5]}, "system[0]"),
    ({"system": [text("a"), {"type": "text"}]}, "system[1].text"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"system": [use()]}, "system[0].type"),
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL, 5]}, "tools[1]"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": " ", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "type": "custom", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description"),
    ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, "tool_choice"),
    ({"output_config": 5}, "output_config"),
    ({"output_config": {"format": 5}}, "output_config.format"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_format": {"type": "json_schema"}}, "output_config.format.schema"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
     "tool_choice.disable_parallel_tool_use"),
]  # fmt: skip
WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ([5], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([*HELLO, {"role": "tool", "content": "x"}], "messages[1].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([user(None)], "messages[0].content"),
    ([user(5)], "messages[0].content"),
    ([user(text("x"))], "messages[0].content"),
    ([user([None])], "messages[0].content[0]"),
    ([user([["x"]])], "messages[0].content[0]"),
    ([user([{}])], "messages[0].content[0].type"),
    ([user([{"type": "poem", "text": "x"}])], "messages[0].content[0].type"),
    ([user([{"type": "text", "text": 5}])], "messages[0].content[0].text"),
    ([user([use()])], "messages[0].content[0].type"),
    ([user([text("look"), IMAGE])], "messages[0].content[1]"),
    ([user([PDF])], "messages[0].content[0]"),
    ([user([{"type": "input_audio", "data": "x"}])], "messages[0].content[0]"),
    ([*HELLO, assistant([IMAGE])], "messages[1].content[0]"),
    ([user([result([text("x"), IMAGE])])], "messages[0].content[0].content[1]"),
    ([user([result([PDF])])], "messages[0].content[0].content[0]"),
    ([user([result(5)])], "messages[0].content[0].content"),
    ([user([result([result("x")])])], "messages[0].content[0].content[0].type"),
    ([user([{"type": "tool_result", "content": "x"}])], "messages[0].content[0].tool_use_id"),
    ([user([result("x", is_error="yes")])], "messages[0].content[0].is_error"),
    ([assistant([{**use(), "id": 5}])], "messages[0].content[0].id"),
    ([assistant([{"type": "tool_use", "id": "c"}])], "messages[0].content[0].name"),
    ([assistant([{**use(), "input": "{}"}])], "messages[0].content[0].input"),
    ([assistant([{"type": "thinking"}])], "messages[0].content[0].thinking"),
    ([*HELLO, system(5)], "messages[1].content"),
    ([*HELLO, system([IMAGE])], "messages[1].content[0]"),
]


@pytest.mark.parametrize(
    ("body", "param"), WRONG + [({"messages": given}, param) for given, param in WRONG_MESSAGES]
)
def test_a_wrong_value_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param
    assert render_error(caught.value)["error"]["message"].startswith(param)


def test_a_thread_is_refused_so_that_clients_go_on_without() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(thread={"type": "continue", "previous_message_id": "msg_1"})
    told = render_error(caught.value)["error"]
    assert told["details"] == {"error_code": "thread_unsupported_request"}


def test_many_messages_are_read_in_linear_time() -> None:
    """A turn of a hundred thousand messages, as large as a body may be."""
    body = {"max_tokens": 1, "messages": [user("x" * 300)] * 100_000}
    (turn,) = parse_messages(body).messages or ()
    assert len(turn["content"]) == 301 * 100_000 - 1


# -------------------------------------------------------------------------------- the prompt


@pytest.fixture(scope="module")
def app(tiny_folder: Path) -> Iterator[ScriptedApp]:
    template = QWEN.replace("{{ message.content }}\n{%- for", "{{ message.reasoning }}"
                            "{{ message.content }}\n{%- for")  # fmt: skip
    with ScriptedApp(tiny_folder, template) as app:
        yield app


def test_the_prompt_is_that_of_chat(app: ScriptedApp) -> None:
    """An agent's turn, on either surface; and it is what is counted (F99)."""
    thinking = {"type": "thinking", "thinking": "hm ", "signature": "AAAA"}
    history = [user("add"), assistant([thinking, text("ok"), use(a=1)]), user([result("1")])]
    app.engine.says("ok")
    asked = {"system": "Be brief.", "tools": [TOOL], "messages": history}
    usage = plain(app, **asked, max_tokens=5)["usage"]
    ids = app.engine.specs[-1].prompt_ids
    assert ask(app, COUNT, **asked).json() == {"input_tokens": len(ids)}
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids)

    call = {"name": "add", "arguments": '{"a": 1}'}
    answer = {"role": "assistant", "content": "ok", "reasoning": "hm "}
    answer["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]  # type: ignore[assignment]
    messages = [system("Be brief."), user("add"), answer, told("1")]
    tools = [{"type": "function", "function": FUNCTION}]
    assert app.chat(messages=messages, tools=tools).status == 200
    assert app.engine.specs[-1].prompt_ids == ids
    prompt = TOKENIZER.decode(ids, keep_special=True)
    assert "hm ok" in prompt and '{"name": "add", "arguments": {"a": 1}}' in prompt
