"""Chat completions with tools: what a model writes becomes the calls that clients read.

The model is a script (`scripted.py`), the rest is the live server, judged by the `openai` package.
Every answer is asked for twice, plain and streamed, and both must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxlite.types import Finish
from tests.live import HELLO, frames
from tests.scripted import QWEN, TOKENIZER, ScriptedApp

pytestmark = pytest.mark.slow

GLM = QWEN + "{# <arg_key> <arg_value> #}"
CODER = QWEN + "{# <function= #}"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("add", a={"type": "integer"}, b={"type": "integer"}),
    tool("weather", town={"type": "string"}),
    tool("grep", pattern={"type": "string"}),
    tool("files.read", path={"type": "string"}),
    tool("set-all", values={"type": "array"}, where={"type": "object"}),
]
NAMES = {each["function"]["name"] for each in TOOLS}


def hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(scope="module", params=[QWEN, GLM, CODER], ids=["qwen", "glm", "coder"])
def each_app(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, request.param) as app:
        yield app


@pytest.fixture(scope="module")
def app(tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, QWEN) as app:
        yield app


def plain(app: ScriptedApp, **body: Any) -> Any:
    asked = {"model": "m", "messages": HELLO, "tools": TOOLS, **body}
    return app.client.chat.completions.create(**asked)


def streamed(app: ScriptedApp, **body: Any) -> dict[str, Any]:
    """A stream folded as clients do it, by the index of a call; checks ids and indexes."""
    content, finish, calls = "", [], {}
    for chunk in plain(app, stream=True, **body):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish += [choice.finish_reason] if choice.finish_reason else []
        for piece in choice.delta.tool_calls or ():
            if piece.index == len(calls):  # announced: id, type and name come once
                assert piece.id.startswith("call_") and piece.type == "function"
                calls[piece.index] = [piece.id, piece.function.name, ""]
            else:
                assert piece.id is None and piece.function.name is None
            assert piece.index == len(calls) - 1, "calls come one after the other"
            calls[piece.index][2] += piece.function.arguments
    ids = [call[0] for call in calls.values()]
    assert len(set(ids)) == len(ids)
    assert len(finish) == 1
    return {"content": content, "calls": [call[1:] for call in calls.values()], "finish": finish[0]}


def both(
    app: ScriptedApp, text: str, portion: int = 1, end: Finish = Finish.EOS, **body: Any
) -> tuple[str | None, list[tuple[str, Any]], str]:
    """Content, calls and finish of an answer; checks that the streamed one is the same."""
    app.engine.says(text, portion, end)
    (choice,) = plain(app, **body).choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert streamed(app, **body) == {
        "content": message.content or "",
        "calls": [list(call) for call in calls],
        "finish": choice.finish_reason,
    }
    assert (message.content is None) == (bool(calls) and not message.content)
    assert (choice.finish_reason == "tool_calls") == bool(calls)
    assert message.tool_calls is None or message.tool_calls
    parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    return message.content, parsed, choice.finish_reason


# -------------------------------------------------------------------- the rows of faults.md


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (  # F1: a call that is not JSON, whatever parser is active
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            ("add", {"a": 1}),
        ),
        (  # F2: backslashes written singly
            r'<tool_call>{"name": "grep", "arguments": {"pattern": "\d+\.py$"}}</tool_call>',
            ("grep", {"pattern": r"\d+\.py$"}),
        ),
        (hermes("files.read", {"path": "it's a, b"}), ("files.read", {"path": "it's a, b"})),  # F5
        (  # F6: braces within braces and within strings
            hermes("set-all", {"where": {"a": {"b": 1}, "c": "}{"}, "n": 2}),
            ("set-all", {"where": {"a": {"b": 1}, "c": "}{"}, "n": 2}),
        ),
        (  # F10: XML
            "<tool_call>\n<function=weather>\n<parameter=town>\nParis\n</parameter>\n"
            "</function>\n</tool_call>",
            ("weather", {"town": "Paris"}),
        ),
        (hermes("set-all", {"values": [1, [2, "x"], {"y": None}]}),  # F14
         ("set-all", {"values": [1, [2, "x"], {"y": None}]})),
        ('<tool_call>{"name": "add", "parameters": {}}</tool_call>', ("add", {})),  # F15
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', ("add", {"a": 1})),
        ('<tool_call>{"name": "add"}</tool_call>', ("add", {})),
        ('<tool_call>{"name": "weather", "arguments": {"town": "\U0001f642 한국"}}</tool_call>',
         ("weather", {"town": "\U0001f642 한국"})),
    ],
)  # fmt: skip
def test_calls(each_app: ScriptedApp, text: str, call: tuple[str, Any]) -> None:
    """The short call as the only output (F11): content null, finish tool_calls, no markup."""
    assert both(each_app, text) == (None, [call], "tool_calls")
    assert both(each_app, text, 1000, Finish.LENGTH) == (None, [call], "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "Paris.",
        "",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>no call at all</tool_call>",
        "<tool_call>",
        "a < b and <tool",
        "<tool_call>{{{{</tool_call> so",
    ],
)
def test_what_is_no_call_is_content(each_app: ScriptedApp, text: str) -> None:
    """F1, F16: every byte of it, finish stop, and no `tool_calls` key."""
    assert both(each_app, text) == (text, [], "stop")
    assert both(each_app, text, end=Finish.LENGTH) == (text, [], "length")
    message = each_app.chat(tools=TOOLS, max_tokens=None).json()["choices"][0]["message"]
    assert set(message) == {"role", "content"}


def test_two_towns(app: ScriptedApp) -> None:
    """F12: indexes 0 and 1, an id each; text before the calls is content."""
    calls = hermes("weather", {"town": "Rome"}) + "\n" + hermes("weather", {"town": "Bonn"})
    towns = [("weather", {"town": "Rome"}), ("weather", {"town": "Bonn"})]
    assert both(app, calls) == (None, towns, "tool_calls")
    assert both(app, "Let me see.\n" + calls) == ("Let me see.\n", towns, "tool_calls")
    ids = [call.id for call in plain(app).choices[0].message.tool_calls]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)


def test_a_good_call_beside_a_bad_one(app: ScriptedApp) -> None:
    """D11: each block is judged alone."""
    bad = '<tool_call>{"name": "unknown"}</tool_call>'
    good = hermes("add", {"a": 1})
    assert both(app, f"{bad} {good} end") == (f"{bad}  end", [("add", {"a": 1})], "tool_calls")


def test_arguments_are_streamed_in_fragments(app: ScriptedApp) -> None:
    """A long argument is not withheld to its end (F19), and no chunk shows markup."""
    app.engine.says(hermes("grep", {"pattern": "x" * 400}))
    found = frames(app.chat(tools=TOOLS, stream=True, max_tokens=None).body)
    deltas = [f["choices"][0]["delta"] for f in found[:-1]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert len(pieces) > 50
    first, *rest = pieces
    assert set(first) == {"index", "id", "type", "function"}
    assert all(set(piece) == {"index", "function"} for piece in rest)
    assert all(set(piece["function"]) == {"arguments"} for piece in rest)
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert json.loads(joined) == {"pattern": "x" * 400}


# ------------------------------------------------------------------------- what may be called


def test_without_tools_markup_is_text(app: ScriptedApp) -> None:
    call = hermes("add", {"a": 1})
    assert both(app, call, tools=openai.NOT_GIVEN) == (call, [], "stop")
    assert both(app, call, tool_choice="none") == (call, [], "stop")
    assert both(app, call, tools=[{"type": "web_search"}]) == (call, [], "stop")


def test_tool_choice_none_keeps_tools_from_the_prompt(app: ScriptedApp) -> None:
    def prompt(**body: Any) -> str:
        app.engine.says("ok")
        assert app.chat(**body).status == 200
        return TOKENIZER.decode(app.engine.specs[-1].prompt_ids, keep_special=True)

    without = prompt()
    assert prompt(tools=TOOLS, tool_choice="none") == prompt(tools=[]) == without
    assert prompt(tools=TOOLS, tool_choice="auto") == prompt(tools=TOOLS) != without
    assert all(f'"{name}"' in prompt(tools=TOOLS) for name in NAMES)
    nested = [{"type": "namespace", "name": "n", "tools": TOOLS}, {"type": "web_search"}]
    assert prompt(tools=nested) == prompt(tools=TOOLS)


def test_one_call_only(app: ScriptedApp) -> None:
    """`parallel_tool_calls: false`: the row ends at the first call (D8)."""
    first, second = hermes("add", {"a": 1}), hermes("add", {"a": 2})
    calls = [("add", {"a": 1})]
    asked: dict[str, Any] = {"parallel_tool_calls": False}
    assert both(app, f"ok {first}\n{second} tail", **asked) == ("ok ", calls, "tool_calls")
    usage = plain(app, **asked).usage
    assert usage.completion_tokens <= len(TOKENIZER.encode("ok " + first))
    # What is no call does not count as one.
    bad = '<tool_call>{"name": "unknown"}</tool_call>'
    content, calls, finish = both(app, f"{bad}{first}{second}", **asked)
    assert (content, calls, finish) == (bad, [("add", {"a": 1})], "tool_calls")
    two = [("add", {"a": 1}), ("add", {"a": 2})]
    assert both(app, first + second, parallel_tool_calls=True) == (None, two, "tool_calls")


def test_stops_do_not_look_inside_calls(app: ScriptedApp) -> None:
    """Clients.md, Requests 14: a stop string never cuts a call; after the stop nothing follows."""
    call = hermes("weather", {"town": "STOP"})
    assert both(app, call, stop="STOP") == (None, [("weather", {"town": "STOP"})], "tool_calls")
    assert both(app, f"a STOP {call}", stop=["STOP"]) == ("a ", [], "stop")
    content, calls, finish = both(app, f"{call} b STOP c", stop=["STOP"])
    assert (content, calls, finish) == (" b ", [("weather", {"town": "STOP"})], "tool_calls")


# ------------------------------------------------------------------------------- round trip


def test_a_call_and_its_result_come_back(app: ScriptedApp) -> None:
    """F35, F38; spec 30 section 9: the message we sent, as a client sends it back."""
    app.engine.says(hermes("weather", {"town": "Rome"}))
    message = plain(app).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "mild"}
    app.engine.says("It is mild.")
    answer = plain(app, messages=[*HELLO, message, result])
    assert answer.choices[0].message.content == "It is mild."
    prompt = TOKENIZER.decode(app.engine.specs[-1].prompt_ids, keep_special=True)
    assert prompt.partition("hello world")[2] == (
        '<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": '
        '{"town": "Rome"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nmild\n'
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ("{bad", '"{bad"'),  # F38: passed on as it is
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        ("", "{}"),
        (None, "{}"),
        ("[1]", '"[1]"'),
    ],
)
def test_arguments_of_the_history(app: ScriptedApp, arguments: Any, rendered: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    for content in (None, "", []):
        app.engine.says("ok")
        history = [*HELLO, {"role": "assistant", "content": content, "tool_calls": [call]}]
        results = [
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]}
        ]
        assert app.chat(messages=history + results, tools=TOOLS).text == "ok"
        prompt = TOKENIZER.decode(app.engine.specs[-1].prompt_ids, keep_special=True)
        assert f'{{"name": "add", "arguments": {rendered}}}' in prompt
