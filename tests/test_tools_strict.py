"""Strict parsers beyond `<tool_call>`: every family with an opener (spec 30 section 6)."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlite.text.tools.families import FAMILIES
from mlxlite.text.tools.format import Tools
from mlxlite.text.tools.strict import markup_of, strict_call
from tests.golden.shapes import TOOLS

KNOWN = Tools.of(TOOLS)
WITHOUT = {"llama3", "harmony"}  # no opener; one that only a header tells from thinking

GOOD: list[tuple[str, str, str, dict[str, Any]]] = [
    ("minimax", '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
     '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>', "add", {"a": 1, "b": 2}),
    ("minicpm", '<function name="add"><param name="a">1</param>\n</function>', "add", {"a": 1}),
    ("gemma4", '<|tool_call>call:files.read-x{path:<|"|>a {b}, "c"<|"|>,where:{a:[1,true,null]}}'
     "<tool_call|>", "files.read-x", {"path": 'a {b}, "c"', "where": {"a": [1, True, None]}}),
    ("functiongemma", "<start_function_call>call:files.read-x{path:<escape>it's<escape>}"
     "<end_function_call>", "files.read-x", {"path": "it's"}),
    ("pythonic", "<|tool_call_start|>[files.read-x(path=\"a, b)\", zip='x', where={\"a\": [1]}, "
     "free=None, note=True)]<|tool_call_end|>", "files.read-x",
     {"path": "a, b)", "zip": "x", "where": {"a": [1]}, "free": None, "note": True}),
    ("llama4", "<|python_start|>[add()]<|python_end|>", "add", {}),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
     "add", {"a": 1}),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "add", {"a": 1}),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
     '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "add", {"a": 1}),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', "add", {"a": 1}),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "add", {"a": 1}),
]  # fmt: skip


def parsed(family: str, text: str) -> Any:
    markup = markup_of(family)
    assert markup is not None
    return markup.parse(text, KNOWN)


@pytest.mark.parametrize(("family", "text", "name", "arguments"), GOOD)
def test_a_call_is_read(family: str, text: str, name: str, arguments: dict[str, Any]) -> None:
    assert parsed(family, text) == (name, arguments)
    assert parsed(family, f"\n{text}\n") == (name, arguments)
    markup = markup_of(family)
    assert markup is not None and text.startswith(markup.opener) and text.endswith(markup.closer)


@pytest.mark.parametrize(("family", "text", "name", "arguments"), GOOD)
def test_nothing_else_is(family: str, text: str, name: str, arguments: dict[str, Any]) -> None:
    wrong = [
        "Look: " + text,
        text + " done",
        text * 2,
        text.replace(name, "who"),
        text[:-3],
        text[3:],
        "",
    ]
    if '{"a": 1}' in text:
        wrong += [
            text.replace('{"a": 1}', other)
            for other in ('{"a": 1,}', '{"a": 1, "a": 2}', "[1]", "{'a': 1}", '{"a": NaN}', "")
        ]
    for bad in wrong:
        assert parsed(family, bad) is None, bad


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("minimax", '<minimax:tool_call><invoke name="add">x</invoke></minimax:tool_call>'),
        ("minimax", '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter>'
         '<parameter name="a">2</parameter></invoke></minimax:tool_call>'),
        ("minicpm", '<function name="add"><param name="a">1</param>x</function>'),
        ("gemma4", "<|tool_call>call:add{a:1}call:add{a:2}<tool_call|>"),
        ("gemma4", "<|tool_call>call:add{a:1,a:2}<tool_call|>"),
        ("gemma4", "<|tool_call>call:add{a:word}<tool_call|>"),
        ("gemma4", "<|tool_call>call:add{a:1<tool_call|>"),
        ("functiongemma", "<start_function_call>call:add{a:word}<end_function_call>"),
        ("pythonic", "<|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[add(a=1, a=2)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[add(a=word)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS][{"name": "add"}, {"name": "add"}]'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS][1]"),
    ],
)  # fmt: skip
def test_what_would_need_a_repair_is_refused(family: str, text: str) -> None:
    assert parsed(family, text) is None


def test_every_family_has_its_markup_or_a_reason_not_to() -> None:
    for family in FAMILIES:
        markup = markup_of(family.name)
        assert (markup is None) is (family.name in WITHOUT), family.name
        if markup is not None:
            format = family.make()
            openers = [opener.lower() for opener in format.openers]
            assert any(markup.opener.lower().startswith(opener) for opener in openers)
    for name in ("hermes", "qwen_xml", "glm", "generic"):
        markup = markup_of(name)
        assert markup is not None and markup.parse is strict_call


def test_an_envelope_that_is_no_object_is_no_call() -> None:
    assert strict_call('<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>', KNOWN) is None
