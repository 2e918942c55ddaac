"""The repair ladder, values by schema, and the strict parser (spec 30 sections 5.4, 5.7, 6)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxlite.text.tools.format import Tools
from mlxlite.text.tools.repair import MAX_REPAIR_CHARS, compact, loads, repaired
from mlxlite.text.tools.strict import strict_call
from mlxlite.text.tools.values import decode_value
from tests.golden.shapes import TOOLS

KNOWN = Tools.of(TOOLS)


@pytest.mark.parametrize(
    ("text", "value", "tags"),
    [
        ('{"a": 1}', {"a": 1}, []),
        ('{"a": "x\ny"}', {"a": "x\ny"}, []),
        ('```json\n{"a": 1}\n```', {"a": 1}, ["fenced_wrapper"]),
        ('```\n{"a": 1}```', {"a": 1}, ["fenced_wrapper"]),
        ('Sure: {"a": {"b": "}"}} done', {"a": {"b": "}"}}, ["prose_prefix"]),
        (r'{"a": "\d\\n"}', {"a": r"\d\n"}, ["bad_escapes"]),
        ('{"a": [True, None, "False"]}', {"a": [True, None, "False"]}, ["python_literals"]),
        ('{"a": [1,], "b": ",}",}', {"a": [1], "b": ",}"}, ["trailing_commas"]),
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}, ["unbalanced_braces"]),
        ('{"a": 1, "b": ', {"a": 1}, ["unbalanced_braces"]),
        ('{"a": 1, "b"', {"a": 1}, ["unbalanced_braces"]),
        ('{"a": "x\\', {"a": "x"}, ["unbalanced_braces"]),
        ("{'a': 'it\\'s', 'b': 'say \"x\"'}", {"a": "it's", "b": 'say "x"'}, ["single_quotes"]),
        ("{'a': 'it's'}", {"a": "it's"}, ["single_quotes"]),
        ("{'a': [1,", {"a": [1]}, None),
    ],
)
def test_the_ladder(text: str, value: Any, tags: list[str] | None) -> None:
    found = repaired(text)
    assert found is not None and found[0] == value
    if tags is not None:
        assert [tag for tag in found[1] if tag in tags] == tags
        assert set(found[1]) - set(tags) <= {"bad_escapes", "unbalanced_braces"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "[1, 2]",
        "5",
        "{a: 1}",
        '{"a" 1}',
        "[x] {}",
        '{"a": NaN}',
        '{"a": 1e999}',
        "{" * 5000,
    ]
    + ['{"a": ' + "9" * 5000 + "}", '{"a": "' + "x" * MAX_REPAIR_CHARS + '"} {'],
)
def test_what_cannot_be_repaired(text: str) -> None:
    assert repaired(text) is None


def test_json_is_strict_about_numbers_and_depth() -> None:
    for text in ("NaN", "1e999", "[" * 100_000, "9" * 5000):
        with pytest.raises(ValueError):
            loads(text)
    assert compact({"a": "한\ud83d", "b": [1, None]}) == '{"a":"한\\ud83d","b":[1,null]}'


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("007", {"type": "string"}, "007"),
        ("7", {"type": "integer"}, 7),
        ("7", {"type": ["string", "integer"]}, 7),
        ("x", {"type": ["string", "integer"]}, "x"),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": ["integer", "null"]}, None),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1, 2]", None, [1, 2]),
        ("words", None, "words"),
        ("  7 ", {}, 7),
        (" 007 ", {"type": "string"}, "007"),
        ("", {"type": "integer"}, ""),
        ("\n\n", {"type": "string"}, ""),
        ("\n    def f():\n        pass\n", {"type": "string"}, "    def f():\n        pass"),
        ("a &lt; b &amp;&amp; c", {"type": "string"}, "a < b && c"),
        ("<a>&lt;</a>", {"type": "string"}, "<a>&lt;</a>"),
        ("a & &lt;", {"type": "string"}, "a & &lt;"),
        ("<![CDATA[ a</param> &lt; ]]>", {"type": "string"}, " a</param> &lt; "),
        ("<![CDATA[7]]>", {"type": "integer"}, 7),
        ("7", True, 7),
        ("NaN", None, "NaN"),
    ],
)
def test_values(text: str, schema: Any, value: Any) -> None:
    assert decode_value(text, schema) == value
    assert type(decode_value(text, schema)) is type(value)


def block(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (block('{"name": "add", "arguments": {"a": 1}}'), {"a": 1}),
        (
            " \n" + block('\n{"function": {"name": "add"}, "arguments": "{\\"a\\": 1}"}\n') + "\n",
            {"a": 1},
        ),
        (block('{"name": "add"}'), {}),
        (block("\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"), {"a": 1}),
        (block("add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"), {"a": 1}),
        (block("add"), {}),
    ],
)
def test_strict_accepts(text: str, arguments: dict[str, Any]) -> None:
    assert strict_call(text, KNOWN) == ("add", arguments)


@pytest.mark.parametrize(
    "text",
    [
        "Look. " + block('{"name": "add"}'),
        block('{"name": "add"}') + " done",
        block('{"name": "add"}') * 2,
        block("add") * 2,
        block('{"name": "who"}'),
        block("who"),
        block('{"name": "add", "arguments": {"a": 1,}}'),
        block('{"name": "add", "arguments": [1]}'),
        block('{"name": "add", "arguments": {"a": 1, "a": 2}}'),
        block('{"name": "add", "arguments": {"a": NaN}}'),
        block('```{"name": "add"}```'),
        block("<function=add>x<parameter=a>1</parameter></function>"),
        block("<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
        block("<function=add><parameter=a>1</parameter></function> x"),
        block("<function=add><parameter=a>1</function>"),
        block("add<arg_key>a</arg_key><arg_value>1</arg_value>x"),
        block("add<arg_key>a</arg_key>x<arg_key>b</arg_key><arg_value>1</arg_value>"),
        block(
            "add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>1</arg_value>"
        ),
        '<tool_call>{"name": "add"}',
        block('{"name": "add"'),
        '{"name": "add"}',
        "",
    ],
)
def test_strict_rejects(text: str) -> None:
    assert strict_call(text, KNOWN) is None


def test_tools_are_known_by_their_functions() -> None:
    tools = Tools.of([*TOOLS, {"type": "web_search"}, {"name": "flat"}, {"function": {"name": 5}}])
    assert sorted(tools.schemas) == ["add", "files.read-x", "flat"]
    assert json.dumps(tools.schema("add", "a")) == '{"type": "integer"}'
    assert tools.schema("flat", "x") is None
