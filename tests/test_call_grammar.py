"""Calls as a grammar, family by family: whatever it allows is read back as just these calls (D8).

A walk draws at random from the ids that the guide allows, and tries to break out of strings and
elements; the family's own reader then reads what it wrote, by the sink that a client's answer goes
through.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from mlxlite.errors import BadRequest
from mlxlite.prepare import Preparation, Prepared
from mlxlite.text.tokenizer import Tokenizer
from tests import prepared, walks
from tests.folded import Folded
from tests.golden.markers import DEEPSEEK, FAMILIES, HARMONY, MISTRAL
from tests.golden.shapes import Golden
from tests.schema_table import obj

FENCED = replace(DEEPSEEK, template=DEEPSEEK.template + "{# ```json #}")
LISTS = replace(MISTRAL, template=MISTRAL.template.replace("[ARGS]", " "))
ALL = [
    pytest.param(golden, specials, id=f"{name}-{'tokens' if specials else 'text'}")
    for golden, name in (
        *((golden, golden.family) for golden in FAMILIES),
        (FENCED, "deepseek-v3"),
        (LISTS, "mistral-lists"),
    )
    for specials in dict.fromkeys((golden.specials, ()))
]

S: dict[str, Any] = {"type": "string"}
I: dict[str, Any] = {"type": "integer", "minimum": -9, "maximum": 20}  # noqa: E741  (as in the table)
NASTY = ['say "hi"', "a < b && c", "</parameter></param>x", "line\nend", " a ", "1", "null", "한🙂",
         "<![CDATA[x", "&lt;", "", "it's"]  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "no-parameters": obj(),
    "said-nothing": {},
    "text": obj(a=S),
    "texts": obj(["b"], a=S, b=S, c={"type": ["string", "null"]}),
    "bounded": obj(a={**S, "maxLength": 5}, b={**S, "minLength": 2, "maxLength": 9}),
    "not-empty": obj(a={**S, "minLength": 1}),
    "pattern": obj(a={**S, "pattern": "^[a-c]{2,4}$"}, d={**S, "format": "date"}),
    "given": obj(a={"enum": ["red", "green", "1", "true", "null"]}, b={"const": "x y"}),
    "given-texts": obj(a={**S, "enum": ["red", "1", "null", "true"]}),
    "given-nasty": obj(["a"], a={"enum": [*NASTY, 1, None, True, 2.5, [1], {"b": "}"}]}),
    "numbers": obj(a=I, b={"type": "number"}, c={"type": "integer"}, d={"type": "boolean"}),
    "null": obj(a={"type": "null"}, b={"anyOf": [S, {"type": "null"}]}),
    "unions": obj(a={"anyOf": [I, S]}, b={"type": ["integer", "string"]}),
    "optional": obj(["c"], a=I, b=S, c=I, d={"type": "boolean"}),
    "all-optional": obj([], a=I, b=S, c={"type": "boolean"}),
    "arrays": obj(a={"type": "array", "items": S, "maxItems": 3},
                  b={"type": "array", "items": I, "minItems": 2, "maxItems": 3}),
    "nested": obj(a=obj(["b"], b=obj(c=S, d=I), e={"type": "array", "items": obj(f=S)}), g=S),
    "references": {"$defs": {"P": obj(x=I, n={"enum": ["é", 'q"']}), "C": {"enum": ["on", "off"]}},
                   **obj(a={"$ref": "#/$defs/P"}, b={"$ref": "#/$defs/C"})},
    "tree": {"$defs": {"T": obj(["v"], v=I, kids={"type": "array", "items": {"$ref": "#/$defs/T"},
                                                  "maxItems": 2})},
             **obj(t={"$ref": "#/$defs/T"})},
    "anything": obj(a={}, b={"type": "object"}),
    "closed": {**obj(a=I), "additionalProperties": False},
    "open-typed": {"type": "object", "additionalProperties": I},
    "open-beside": {**obj(a=I), "additionalProperties": {"type": "boolean"}},
}  # fmt: skip


def tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@cache
def preparation_of(template: str, model_type: str, specials: tuple[str, ...]) -> Preparation:
    return prepared.make(
        walks.tokenizer(*specials),
        template=template,
        model_type=model_type,
        vocab_size=600,
        context=100_000,
    )


@dataclass
class Case:
    """A model of a family. specials: its markers that are tokens of their own."""

    golden: Golden
    specials: Sequence[str]

    @property
    def words(self) -> Tokenizer:
        return walks.tokenizer(*self.specials)

    def prepared(self, *tools: Any, **asked: Any) -> Prepared:
        model_type = self.golden.model_type or "llama"
        preparation = preparation_of(self.golden.template, model_type, tuple(self.specials))
        ask = prepared.ask(tools=tools, **asked)
        return preparation(ask, preparation.constrain(ask))

    def walk(self, found: Prepared, seed: int, start: str = "") -> tuple[str, Folded]:
        assert found.spec.guide is not None
        first = self.words.encode(start, add_special_tokens=False)
        ids = walks.walk(found.spec.guide, self.words, seed, start=first)
        sink = found.make_sink()
        folded = Folded().add(sink.push(ids)).add(sink.finish())
        return self.words.decode(ids, keep_special=True), folded


def checked(folded: Folded, schemas: dict[str, Any], text: str) -> list[str]:
    """The names of the calls, whose arguments are valid."""
    for _, name, arguments in folded.calls:
        checks = jsonschema.Draft202012Validator.FORMAT_CHECKER
        validator = jsonschema.Draft202012Validator(schemas[name], format_checker=checks)
        validator.validate(json.loads(arguments))
    assert not folded.content.strip(), text
    return [name for _, name, _ in folded.calls]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize(("golden", "specials"), ALL)
def test_one_forced_call(golden: Golden, specials: Sequence[str], name: str) -> None:
    case, schema = Case(golden, specials), SCHEMAS[name]
    for seed in range(2):
        found = case.prepared(tool("files.read-x", schema, strict=True), forced_call="files.read-x")
        text, folded = case.walk(found, seed)
        assert checked(folded, {"files.read-x": schema}, text) == ["files.read-x"], text


@pytest.mark.parametrize(("golden", "specials"), ALL)
def test_any_of_some_tools(golden: Golden, specials: Sequence[str]) -> None:
    """Several calls where the family writes several; one if told; each to one of the tools."""
    case = Case(golden, specials)
    schemas = {"add": obj(a=I), "paint.it": obj(["a"], a={"enum": ["red", "blue"]}, b=S)}
    tools = [tool(name, schema) for name, schema in schemas.items()]
    counts, called = set(), set()
    for seed in range(12):
        text, folded = case.walk(case.prepared(*tools, forced_call=""), seed)
        names = checked(folded, schemas, text)
        counts.add(len(names))
        called |= set(names)
        one = case.prepared(*tools, forced_call="", parallel_tool_calls=False)
        assert len(checked(case.walk(one, seed)[1], schemas, text)) == 1
        two = case.prepared(*tools, forced_call="", max_tool_calls=2)
        assert len(checked(case.walk(two, seed)[1], schemas, text)) <= 2
    assert called == set(schemas)
    is_single = golden.family in ("llama3", "harmony")
    assert 0 not in counts and (max(counts) == 1) is is_single, counts


# What a model writes when it calls a tool by itself.
OPENINGS = {
    "minimax": "<minimax:tool_call>", "gemma4": "<|tool_call>", "harmony":
    "<|channel|>commentary to=functions.", "functiongemma": "<start_function_call>",
    "pythonic": "<|tool_call_start|>", "kimi": "<|tool_calls_section_begin|>",
    "deepseek": "<｜tool▁calls▁begin｜>", "minicpm": "<function name=", "mistral": "[TOOL_CALLS]",
    "llama4": "[paint(", "llama3": '{"name": "paint", "parameters":',
}  # fmt: skip


@pytest.mark.parametrize(("golden", "specials"), ALL)
def test_a_strict_call_by_itself(golden: Golden, specials: Sequence[str]) -> None:
    """From its marker on it is held to the form; before and after, all is free."""
    case = Case(golden, specials)
    schema = obj(["a"], a={"enum": ["red", "blue"]}, b=I)
    tools = (tool("paint", schema, strict=True), tool("sub", SCHEMAS["text"]))
    opening = OPENINGS.get(golden.family, "<tool_call>")
    thought = "</think>" if golden.starts_open or golden.family == "hermes" else ""
    schemas = {"paint": schema, "sub": SCHEMAS["text"]}
    called = set()
    for seed in range(6):
        found = case.prepared(*tools)
        guide = found.spec.guide
        assert guide is not None and guide.observe(()).mask is None, "free"
        text, folded = case.walk(case.prepared(*tools), seed, f"{thought}{opening}")
        assert text.lower().startswith(f"{thought}{opening}".lower())
        called |= set(checked(folded, schemas, text))
    assert "paint" in called


def test_what_only_looks_like_a_call_is_free() -> None:
    """A JSON answer, a list, a header of another kind: no call, and not held to one."""
    strict = tool("add", obj(a=I), strict=True)
    for family, text in (
        ("llama3", '{"name": "Alice", "parameters": 5}'),
        ("llama3", 'It is {"name": "add", "parameters": {"a": "x"}}'),
        ("llama4", "[1, 2, add]"),
        ("llama4", 'so [add(a="x")]'),
        ("hermes", '</think>{"name": "add", "arguments": {"a": "x"}}'),
        ("mistral", 'add[ARGS]{"a": "x"}'),
    ):
        golden = next(each for each in FAMILIES if each.family == family)
        case = Case(golden, golden.specials)
        written, folded = case.walk(case.prepared(strict), 0, text)
        assert written == text and not folded.calls
        assert folded.content == text.removeprefix("</think>")


def test_a_message_that_no_grammar_saw_is_no_call() -> None:
    case = Case(HARMONY, HARMONY.specials)
    text = '<|channel|>final to=functions.add<|message|>{"a": "x"}'
    written, folded = case.walk(case.prepared(tool("add", obj(a=I), strict=True)), 0, text)
    assert written == text and (folded.content, folded.calls) == ('{"a": "x"}', [])


@pytest.mark.parametrize("budget", [None, 0, 5])
def test_harmony_thinks_before_a_forced_call(budget: int | None) -> None:
    """Its reasoning is part of the grammar; a budget ends it, even inside a character."""
    case = Case(HARMONY, HARMONY.specials)
    schema = obj(a=I)
    for seed in range(8):
        found = case.prepared(tool("add", schema), forced_call="add", thinking_budget=budget)
        guide = found.spec.guide
        assert guide is not None
        guide.observe(())
        ids = case.words.encode("<|channel|>analysis<|message|>", add_special_tokens=False)
        said = case.words.encode("Let me 한🙂" * 3, add_special_tokens=False)[: 6 + seed]
        forced: tuple[int, ...] = ()
        for token in [*ids, *said]:
            verdict = guide.observe((token,))
            if verdict.forced:
                forced = verdict.forced
                break
        assert bool(forced) is (budget is not None)
        for token in forced:
            verdict = guide.observe((token,))
        if forced:
            assert case.words.decode(forced, keep_special=True) == "<|end|><|start|>assistant"
            assert verdict.mask is not None
            (channel,) = case.words.encode("<|channel|>", add_special_tokens=False)
            assert channel in walks.ids_in(verdict.mask)
        text, folded = case.walk(
            case.prepared(tool("add", schema), forced_call="add"),
            seed,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        )
        assert checked(folded, {"add": schema}, text) == ["add"] and folded.reasoning == "Hm."


# ------------------------------------------------------------------------------ what cannot be

ODD = obj(**{"a b": S})


@pytest.mark.parametrize(
    ("family", "name", "schema"),
    [
        ("qwen_xml", "add", ODD),
        ("pythonic", "add", ODD),
        ("glm", "add", obj(**{"": S})),
        ("minimax", "a b", obj()),
        ("gemma4", "a b", obj()),
        ("mistral", "ü ü", obj()),
        ("qwen_xml", "add", {"anyOf": [obj(a=S), obj(b=S)]}),
        ("glm", "add", obj(a={"type": "object", "patternProperties": {"^x": S}})),
        ("minicpm", "add", obj(a={**S, "format": "phone"})),
        ("functiongemma", "add", obj(a={**S, "enum": ["<escape>"]})),
        ("qwen_xml", "add", obj(a={"type": "array", "items": {"enum": ["</parameter>"]}})),
        ("llama4", "add", obj(a={"type": "array", "items": S, "uniqueItems": True})),
    ],
)
def test_what_a_family_cannot_write(family: str, name: str, schema: Any) -> None:
    """Refused if it was promised; otherwise looser, but a call, where only its arguments are so."""
    golden = next(each for each in FAMILIES if each.family == family)
    case = Case(golden, golden.specials)
    with pytest.raises(BadRequest, match="cannot be enforced") as caught:
        case.prepared(tool(name, schema, strict=True))
    assert str(caught.value.param).startswith("tools")
    loose = tool(name, schema)
    if name == "add":
        _, folded = case.walk(case.prepared(loose, forced_call=""), 1)
        assert {each[1] for each in folded.calls} == {"add"}
        assert all(isinstance(json.loads(each[2]), dict) for each in folded.calls)
    else:
        with pytest.raises(BadRequest, match="the name"):
            case.prepared(loose, forced_call="")
