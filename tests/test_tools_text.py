"""Tool calls in text: the rows of `faults.md` and the lines of spec 30 section 12, at every cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxlite.text.channels import THINK_TAGS
from mlxlite.text.tools.families import family_of, route
from mlxlite.types import CallPiece, Delta
from tests.folded import Folded, run, sink_of, tokenizer_with
from tests.golden.shapes import GENERIC, TOOLS, tool

SEARCH = tool(
    "grep",
    pattern={"type": "string"},
    n={"type": "integer"},
    either={"type": ["string", "integer"]},
    text={"type": ["string", "null"]},
)
ALL = [*TOOLS, SEARCH]
TOKENIZER = tokenizer_with()


def shown(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of an output of a model without a family, the same at every cut."""

    def answer(portions: list[str]) -> Folded:
        sink = sink_of(TOKENIZER, route(GENERIC.template, "", ALL), THINK_TAGS)
        return run(sink, TOKENIZER, portions)

    whole = answer([text])
    assert answer(list(text)) == whole
    for cut in range(1, len(text), 3):
        assert answer([text[:cut], text[cut:]]) == whole
    return whole.content, [(name, json.loads(text)) for _, name, text in whole.calls]


def block(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def grep(**arguments: Any) -> tuple[str, list[tuple[str, Any]]]:
    return "", [("grep", arguments)]


ADD = '{"name": "add", "arguments": {"a": 1}}'
ADDED = ("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # F1: not the template's format
        (block("add<arg_key>a</arg_key><arg_value>1</arg_value>"), ("", [ADDED])),
        (block("<function=add><parameter=a>1</parameter></function>"), ("", [ADDED])),
        # F2: single backslashes
        (
            block(r'{"name": "grep", "arguments": {"pattern": "\d+\.py$\u12"}}'),
            grep(pattern=r"\d+\.py$\u12"),
        ),
        # F5: names with dots and hyphens, quotes and commas in values
        (
            block('{"name": "files.read-x", "arguments": {"path": "it\'s a, b"}}'),
            ("", [("files.read-x", {"path": "it's a, b"})]),
        ),
        (
            block("{'name': 'files.read-x', 'arguments': {'path': 'it's a, b'}}"),
            ("", [("files.read-x", {"path": "it's a, b"})]),
        ),
        # F6: nested objects
        (
            block('{"name": "add", "arguments": {"where":{"a":{"b":1}},"n":2}}'),
            ("", [("add", {"where": {"a": {"b": 1}}, "n": 2})]),
        ),
        # F15: parameters, missing and blank arguments
        (block('{"name": "add", "parameters": {}}'), ("", [("add", {})])),
        (block('{"name": "add"}'), ("", [("add", {})])),
        (block('{"name": "add", "arguments": null}'), ("", [("add", {})])),
        (block('{"name": "add", "arguments": " "}'), ("", [("add", {})])),
        (block('{"name": "add", "arguments": "{\\"a\\": 1}"}'), ("", [ADDED])),
        (block('{"function": {"name": "add", "arguments": {"a": 1}}}'), ("", [ADDED])),
        (block('{"function": {"name": "add"}, "arguments": {"a": 1}}'), ("", [ADDED])),
        (block('{"id": [1, {}], "name": "add", "arguments": {"a": 1}, "x": 2}'), ("", [ADDED])),
        # 5.4: the ladder
        (block(f"\n```json\n{ADD}\n```\n"), ("", [ADDED])),
        (block(f"Sure: {ADD}"), ("", [ADDED])),
        (block('{"name": "add", "arguments": {"a": 1,},}'), ("", [ADDED])),
        (block('{"name": "add", "arguments": {"a": True, "b": [None, False,]}}'),
         ("", [("add", {"a": True, "b": [None, False]})])),
        (block('{"arguments": {"name": "add", "a": 1}}'), ("", [ADDED])),
        (block('{"arguments": {"function": "add", "a": 1}}'), ("", [ADDED])),
        (block('{"name": "add", "arguments": {"a": 1}'), ("", [ADDED])),
        (block('{"name": "add", "arguments": {"a": 1}}}}'), ("", [ADDED])),
        # cut off
        ('<tool_call>{"name": "grep", "arguments": {"pattern": "a\\', grep(pattern="a")),
        ('<tool_call>{"name": "grep", "arguments": {"n": 1, "pat', grep(n=1)),
        ('<tool_call>{"name": "grep", "arguments": {"n": 12', grep(n=12)),
        ('<tool_call>{"name": "grep", "arguments": {"n": [1, {"x": tr', grep(n=[1, {}])),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_', ("", [ADDED])),
        ("<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>", ("", [ADDED])),
        ('<tool_call>{"name": "gr', ('<tool_call>{"name": "gr', [])),
        ("<tool_call>", ("<tool_call>", [])),
        ("x <", ("x <", [])),
        # what came before, between and after
        (f"Look.{block(ADD)}", ("Look.", [ADDED])),
        (f"Look.\n{block(ADD)}\n\n{block(ADD)}\n", ("Look.\n", [ADDED, ADDED])),
        (f"{block(ADD)}\nDone. ", ("\nDone. ", [ADDED])),
        (f"{block(ADD)}\n{block('oops')}\n", (f"\n{block('oops')}\n", [ADDED])),
        (f"{block('{}')}{block(ADD)}", (block("{}"), [ADDED])),
        (f"<tool_call>{ADD}\n{ADD}</tool_call>", ("", [ADDED, ADDED])),
        (f"The tag `<tool_call>` opens a call.\n{block(ADD)}",
         ("The tag `<tool_call>` opens a call.\n", [ADDED])),
        # failures are content, verbatim
        (block('{"name": "who", "arguments": {"x": "<tool_call>"}}'),
         (block('{"name": "who", "arguments": {"x": "<tool_call>"}}'), [])),
        (block('{"name": "", "arguments": {}}'), (block('{"name": "", "arguments": {}}'), [])),
        (block('{"name": "add", "arguments": 5}'), (block('{"name": "add", "arguments": 5}'), [])),
        (block("[1]"), (block("[1]"), [])),
        (block(" add me "), (block(" add me "), [])),
        ("<function=who><parameter=a>1</parameter></function> <functional>",
         ("<function=who><parameter=a>1</parameter></function> <functional>", [])),
        # the closing marker inside a string: data if the JSON goes on, else the end
        (block('{"name": "grep", "arguments": {"pattern": "a</tool_call>b"}}'),
         grep(pattern="a</tool_call>b")),
        ('<tool_call>{"name": "grep", "arguments": {"pattern": "a}}</tool_call> so' + block(ADD),
         (" so", [("grep", {"pattern": "a}}"}), ADDED])),
        # broken beyond repair after it was announced: closed, and the rest is content
        (block('{"name": "add", "arguments": {"a": 1 2}, "x"}') + "!",
         (' 2}, "x"}</tool_call>!', [ADDED])),
        # 5.7: values by schema
        (block("<function=grep><parameter=pattern>007</parameter><parameter=n>7</parameter>"
               "<parameter=either>7</parameter><parameter=text>null</parameter></function>"),
         grep(pattern="007", n=7, either=7, text="null")),
        (block("<function=grep><parameter=pattern></parameter><parameter=n>x</parameter></function>"),
         grep(pattern="", n="x")),
        (block("<function=grep><parameter=n>1</parameter>, <parameter=n>2</parameter></function>"),
         grep(n=2)),
        ("<TOOL_CALL><FUNCTION=grep><PARAMETER=n>1</PARAMETER></FUNCTION></TOOL_CALL>", grep(n=1)),
        # code streams without loss
        ("if a<b and c <d: f(x<tool)", ("if a<b and c <d: f(x<tool)", [])),
    ],
)  # fmt: skip
def test_outputs(text: str, expected: tuple[str, list[tuple[str, Any]]]) -> None:
    assert shown(text) == expected


def deltas(*portions: str) -> list[list[Delta]]:
    sink = sink_of(TOKENIZER, route(GENERIC.template, "", ALL))
    out = [sink.push(TOKENIZER.encode(portion)) for portion in portions]
    return [*out, sink.finish()]


def call(arguments: str, index: int = 0, name: str = "grep") -> Delta:
    return Delta(call=CallPiece(index, f"call_{index + 1:08x}", name, arguments))


def test_arguments_flow_as_they_come() -> None:
    """F10, F14: markup is withheld, fragments join to JSON, a long value is not buffered."""
    assert deltas(
        'Look.\n<tool_call>{"name": "grep", "argu',
        'ments": {"pat',
        'tern": "one ',
        "two\\",
        'n", "n": 1',
        "2}",
        "}</tool_call>",
    ) == [
        [Delta(text="Look.\n")],
        [call("{")],
        [call('"pattern":"one ')],
        [call("two")],
        [call('\\n"')],
        [call(',"n":12}')],
        [],
        [],
    ]


def test_nothing_is_sent_before_a_known_name() -> None:
    assert deltas('<tool_call>{"arguments": {"n": 1}, "name": "gr', 'ep"}</tool_call>') == [
        [],
        [call('{"n":1}')],
        [],
    ]
    text = '<tool_call>{"name": "who", "arguments": {"n": 1}}</tool_call>'
    assert [piece for part in deltas(*text) for piece in part if piece.call] == []


def test_parameters_flow_one_by_one() -> None:
    assert deltas(
        "<tool_call><function=grep><parameter=n>1</parameter>",
        "<parameter=pattern>a",
        "b</parameter></function></tool_call>",
    ) == [[call('{"n":1')], [], [call(',"pattern":"ab"}')], []]


def test_parallel_calls_have_their_own_index() -> None:
    """F12."""
    text = block('{"name": "grep"}') + "\n" + block('{"name": "add"}')
    assert deltas(text)[0] == [call("{}"), call("{}", 1, "add")]


def test_prose_is_not_held() -> None:
    assert deltas("Let me think, a < b", " and <to", "day") == [
        [Delta(text="Let me think, a < b")],
        [Delta(text=" and ")],
        [Delta(text="<today")],
        [],
    ]


def test_an_answer_in_json_is_not_held() -> None:
    assert deltas('{"city": "Se', 'oul"}')[:2] == [
        [Delta(text='{"city": "Se')],
        [Delta(text='oul"}')],
    ]


def test_a_bare_envelope_after_thinking() -> None:
    text = f"<think>I add.</think>\n\n{ADD}"
    assert shown(text) == ("\n\n", [ADDED])


def test_without_tools_nothing_is_routed() -> None:
    assert route(GENERIC.template, "", []) is None
    assert route(GENERIC.template, "", [{"type": "web_search"}]) is None
    sink = sink_of(TOKENIZER)
    assert run(sink, TOKENIZER, [block(ADD)]) == Folded(block(ADD))


@pytest.mark.parametrize(
    ("source", "model_type", "family"),
    [
        ("<minimax:tool_call> <tool_call>", "", "minimax"),
        ("", "gemma4", "gemma4"),
        ("<tool_call> <arg_key>", "", "glm"),
        ("<tool_call>\n<function=", "", "qwen_xml"),
        ("<tool_call>\\n<function=", "", "qwen_xml"),
        ("[TOOL_CALLS]", "", "mistral"),
        ("<tool_call>", "qwen2", "hermes"),
        ("<|start_header_id|> parameters", "", "llama3"),
        ("", "llama4_text", "llama4"),
        ("", "gpt_oss", "harmony"),
        ("{{ messages }}", "llama", "generic"),
        ("", "", "generic"),
    ],
)
def test_families(source: str, model_type: str, family: str) -> None:
    assert family_of(source, model_type).name == family
