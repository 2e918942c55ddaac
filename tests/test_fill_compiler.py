"""Rows from templates: the table of spec 50 section 4.8, and what keeps a choice free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlxlite.text.fill.compiler import ToolFacts, compile_plan
from mlxlite.text.fill.plan import EMPTY, Kind, StrictPlan
from mlxlite.text.fill.plans import Plans, plan_key
from mlxlite.text.fill.probes import CONVERSATION, Probes
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from tests.filling import (
    DOCS,
    FAMILY,
    GLM,
    HERMES,
    TOKENIZER,
    WEATHER,
    WORDS,
    XML,
    compiled,
    ids_of,
    make_probes,
    markup,
    row_of,
    shown,
    tokenizer,
    tool,
)

# ---------------------------------------------------------------------------- the table of 4.8

TABLE = {
    ("xml", 1): [
        ("scaffold", "<tool_call>", "\n<function=get_weather><parameter=city>\n"),
        ("close", "</parameter>", "\n</function>\n</tool_call>"),
    ],
    ("xml", 2): [
        ("scaffold", "<tool_call>", "\n<function"),  # not into the token `=get`
        ("name", "<tool_call>\n<function=get", "_weather><parameter=city>\n"),
        ("name", "<tool_call>\n<function=search", "_docs><parameter="),
    ],
    ("hermes", 1): [
        ("scaffold", "<tool_call>", '\n{"name": "get_weather", "arguments": {"city": '),
    ],
    ("hermes", 2): [
        ("scaffold", "<tool_call>", '\n{"name": "'),
        ("name", '<tool_call>\n{"name": "get', '_weather", "arguments": {"city": '),
        ("name", '<tool_call>\n{"name": "search_docs', '", "arguments": {"'),
    ],
    ("glm", 1): [
        ("scaffold", "<tool_call>", "get_weather<arg_key>city</arg_key><arg_value>"),
    ],
    ("glm", 2): [
        ("name", "<tool_call>get", "_weather<arg_key>city</arg_key><arg_value>"),
    ],
}  # fmt: skip
TEMPLATES = {"xml": XML, "hermes": HERMES, "glm": GLM}
TOOLS = (WEATHER, DOCS)


@pytest.mark.parametrize(("name", "count"), TABLE)
def test_the_table(name: str, count: int) -> None:
    plan = compiled(TEMPLATES[name], *TOOLS[:count])
    assert shown(plan) == TABLE[name, count]
    assert all(row.requires_context for row in plan.rows)


@pytest.mark.parametrize("name", TEMPLATES)
def test_delimiters_end_a_value(name: str) -> None:
    plan = compiled(TEMPLATES[name], *TOOLS)
    (delimiter,) = plan.delimiters
    assert (
        TOKENIZER.token_text(delimiter)
        == {"xml": "</", "hermes": '"}}', "glm": "</arg_value>"}[name]
    )


def occurs(run: Sequence[int], ids: Sequence[int]) -> bool:
    return any(tuple(ids[at : at + len(run)]) == tuple(run) for at in range(len(ids)))


REAL_CALLS = (("get_weather", {"city": "Rome"}), ("search_docs", {"query": "a", "limit": "2"}))


@pytest.mark.parametrize(
    "words", [WORDS, (), ("<tool", "_call>\n", '{"name', '": "get', "=get_we")]
)
@pytest.mark.parametrize("tags", [("<tool_call>", "</tool_call>"), ()])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_row_stands_in_a_real_rendering_id_by_id(
    name: str, count: int, tags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    made = tokenizer(words=words, tags=tags)
    template = TEMPLATES[name]
    plan = compiled(template, *TOOLS[:count], made=made)
    assert plan.rows
    chat = ChatTemplate(template)
    renderings = []
    for called, arguments in REAL_CALLS[:count]:
        function = {"name": called, "arguments": arguments}
        message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        text = chat.render([*CONVERSATION, message], tools=[], add_generation_prompt=False)
        renderings.append(made.encode(text))
    for row in plan.rows:
        run = (*row.trigger, *row.emit)
        assert any(occurs(run, ids) for ids in renderings), made.decode(run, keep_special=True)


# ------------------------------------------------------------------------------- the trigger


def test_a_marker_of_several_tokens_is_written_out_before_anything_is_put_in() -> None:
    """Where plain text and a call part at the first token of the marker, it still is no call."""
    made = tokenizer(tags=())
    assert len(ids_of("<tool_call>", made)) == 5
    scaffold = shown(compiled(XML, WEATHER, made=made), made)[0]
    assert scaffold == ("scaffold", "<tool_call>", TABLE["xml", 1][0][2])


def test_a_marker_merged_with_what_follows_is_in_the_trigger_as_a_whole() -> None:
    made = tokenizer(words=("_call>\n<", *WORDS), tags=())
    scaffold = shown(compiled(XML, WEATHER, made=made), made)[0]
    assert scaffold[1] == "<tool_call>\n<"


THINKING = XML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}",
)
FAMILY[THINKING] = "qwen_xml"


def test_a_primer_that_merges_with_the_answer() -> None:
    """The primer ends with a line end and the answer begins with one; both are one token."""
    assert len(ids_of("\n\n")) == 1
    probes = make_probes(THINKING, [WEATHER])
    found = probes.call("get_weather", {"city": "Rome"})
    assert found is not None
    assert TOKENIZER.decode(found).startswith("\n</think>\n\n<tool_call>")
    assert shown(compiled(THINKING, WEATHER)) == TABLE["xml", 1]


def test_the_end_of_a_thought_forces_no_call() -> None:
    """Not even if the opening marker is not known: the choice for a call is in the trigger."""
    plan = compiled(THINKING, WEATHER, family="mistral")
    assert shown(plan)[0][:2] == ("scaffold", "</think>\n\n<tool_call>")


def test_no_row_is_armed_by_blanks_or_brackets() -> None:
    bare = HERMES.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    for made in (TOKENIZER, tokenizer(words=())):
        for row in compiled(bare, WEATHER, made=made).rows:
            assert any(char.isalpha() for char in made.decode(row.trigger))


# ------------------------------------------------------------------------ what stays a choice


def rows(template: str, *tools: Any) -> list[tuple[str, str, str]]:
    return shown(compiled(template, *tools))


def scaffold(*tools: Any) -> str:
    return rows(HERMES, *tools)[0][2]


def test_open_objects_and_optional_keys_keep_their_keys_free() -> None:
    fixed = '\n{"name": "get_weather", "arguments": {"city": '
    opened = '\n{"name": "get_weather", "arguments": {"'
    either = '\n{"name": "get_weather", "arguments": '
    closed = {"additionalProperties": False}
    assert scaffold(tool("get_weather", "city", **closed)) == fixed
    assert scaffold(tool("get_weather", "city", patternProperties={}, **closed)) == fixed
    assert scaffold(tool("get_weather", "city")) == opened
    assert scaffold(tool("get_weather", "city", additionalProperties=True)) == opened
    assert scaffold(tool("get_weather", "city", patternProperties={"x": {}}, **closed)) == opened
    assert scaffold(tool("get_weather", "city", "country", **closed)) == opened
    # `{}` is an answer as well, and begins with another token than `{"`.
    assert scaffold(tool("get_weather", "city", required=[], **closed)) == either
    assert scaffold(tool("get_weather", **closed)) == either


def test_keys_that_begin_alike_are_not_taken_for_the_only_ones() -> None:
    """Another key is legal in an open object, and need not begin as the declared ones do."""
    both = ("city_name", "city_code")
    closed = tool("get_weather", *both, additionalProperties=False)
    assert scaffold(closed).endswith('{"city_')
    assert scaffold(tool("get_weather", *both)).endswith('{"')


def test_a_number_has_no_quote() -> None:
    """The opening quote of a string is left to the model."""
    assert not scaffold(WEATHER).endswith('"')


def test_names_that_begin_alike_are_told_apart_where_they_part() -> None:
    tools = [tool(f"get_{name}", "x", "y") for name in ("weather", "news", "new")]
    found = rows(HERMES, *tools)
    assert found[0] == ("scaffold", "<tool_call>", '\n{"name": "get')
    names = [trigger.partition('"name": "')[2] for kind, trigger, _ in found if kind == "name"]
    assert names == ["get_weather", "get_news", 'get_new"']


def test_a_name_that_takes_too_many_tokens_to_tell_gets_no_row() -> None:
    made = tokenizer(words=())
    long = "abcdefghij"
    tools = (tool(long + "a", "x"), tool(long + "b", "x"), tool("zz", "x"))
    found = shown(compiled(HERMES, *tools, made=made), made)
    assert [trigger[-1] for kind, trigger, _ in found if kind == "name"] == ["z"]


def test_a_tool_that_goes_on_in_unknown_ways_keeps_the_others_from_firing() -> None:
    """What is fixed of one tool is a prefix of the other's: more of it is not known."""
    either = tool("get", "x", required=[])  # after its name there are keys, or the end
    found = compiled(GLM, either, WEATHER)
    assert [row.kind for row in found.rows] == []
    assert [row.kind for row in compiled(GLM, DOCS, WEATHER).rows] == [Kind.NAME]


# ------------------------------------------------------------------------------ nothing at all


@pytest.mark.parametrize(
    "template",
    [
        XML.replace("<function={{ tool_call.name }}>", ""),  # without the name
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # without the call
        "{{ raise_exception('no') }}",
        "{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}Hello",
        XML.replace("{{ message.content }}", "{{ messages | length }}"),  # another prompt each time
    ],
)
@pytest.mark.parametrize("tools", [(WEATHER,), (WEATHER, DOCS)])
def test_templates_that_give_no_rows(template: str, tools: tuple[Any, ...]) -> None:
    assert compiled(template, *tools, family="hermes") is EMPTY


def test_too_many_tools_or_none() -> None:
    tools = [tool(f"t{n}_{'abcdefgh'[n % 8]}", "x") for n in range(33)]
    assert compiled(HERMES, *tools[:32]).rows
    assert compiled(HERMES, *tools) == compiled(HERMES) == EMPTY


def test_one_tool_without_a_span_leaves_none_for_the_others() -> None:
    """Else the other tools' names would look as if there was nothing else to call."""
    endless = tool("search_" + "docs_" * 64, "query")
    assert compiled(HERMES, WEATHER).rows
    assert compiled(HERMES, WEATHER, endless) is EMPTY


def test_a_fault_in_the_tokenizer_or_the_tools() -> None:
    def broken(text: str) -> list[int]:
        raise ValueError("no such token")

    def make() -> Probes:
        return Probes(lambda messages, is_prompt: "x", broken, None)

    facts = [ToolFacts.of(WEATHER)]
    assert compile_plan(make, facts, TOKENIZER.bytes_of, markup("hermes")) is EMPTY


@pytest.mark.parametrize(
    "parameters",
    [
        None, [], "x", {}, {"properties": []}, {"properties": {"a": True}, "required": "a"},
        {"properties": {"a": {}}, "required": [1, "a"], "additionalProperties": 0},
    ],
)  # fmt: skip
def test_odd_schemas(parameters: Any) -> None:
    odd = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    facts = ToolFacts.of(odd)
    assert not facts.is_closed and facts.determined_key is None
    assert compiled(HERMES, odd).rows


# -------------------------------------------------------------------------------------- closes


def test_a_close_needs_that_every_tool_has_one_argument() -> None:
    closed = tool("search_docs", "query", additionalProperties=False)
    assert [kind for kind, *_ in rows(XML, WEATHER, closed)].count("close") == 1
    assert "close" not in [kind for kind, *_ in rows(XML, WEATHER, DOCS)]


def test_a_close_leaves_the_end_of_the_turn_to_the_model() -> None:
    row = row_of(compiled(XML, WEATHER), Kind.CLOSE)
    assert TOKENIZER.decode(row.emit).endswith("</tool_call>")


# ------------------------------------------------------------------------------------- probes


class Counting:
    """A tokenizer that tells how much it was asked for."""

    def __init__(self, made: Tokenizer) -> None:
        self.made = made
        self.chars = 0

    def __call__(self, text: str) -> list[int]:
        self.chars += len(text)
        return self.made.encode(text)


def test_of_a_long_prompt_only_the_end_is_encoded_again() -> None:
    long = "word " * 2000

    def render(messages: Sequence[Any], is_prompt: bool) -> str:
        return f"<|im_start|>system\n{long}<|im_end|>\n" + ChatTemplate(XML).render(
            messages, add_generation_prompt=is_prompt
        )

    counting = Counting(TOKENIZER)
    probes = Probes(render, counting, None, ["<|im_start|>", "<|im_end|>"])
    once = counting.chars
    assert once > 10_000
    whole = Probes(render, TOKENIZER.encode, None)
    for _ in range(5):
        assert probes.call("get_weather", {"city": "a"}) == whole.call("get_weather", {"city": "a"})
        assert probes.content("abc") == whole.content("abc")
    assert counting.chars - once < 3000


class Bos:
    """A tokenizer that puts BOS ahead of everything."""

    def __init__(self, made: Tokenizer) -> None:
        self.made = made

    def __call__(self, text: str) -> list[int]:
        return [1000, *self.made.encode(text)]


@pytest.mark.parametrize("template", [XML, THINKING])
def test_bos_is_no_part_of_an_answer(template: str) -> None:
    chat = ChatTemplate(template)

    def render(messages: Sequence[Any], is_prompt: bool) -> str:
        return chat.render(messages, add_generation_prompt=is_prompt)

    for specials in ((), ("<|im_start|>",)):
        with_bos = Probes(render, Bos(TOKENIZER), 1000, specials)
        without = Probes(render, TOKENIZER.encode, None, specials)
        found = with_bos.call("get_weather", {"city": "a"})
        assert found is not None and 1000 not in found
        assert found == without.call("get_weather", {"city": "a"})


def test_call_ids_are_never_the_same() -> None:
    """A template that prints them must not make one look fixed."""
    template = XML.replace("<function=", "<id={{ tool_call.id }}><function=").replace(
        "{% set tool_call = tool_call.function %}",
        "{% set call_id = tool_call.id %}{% set tool_call = tool_call.function %}",
    ).replace("tool_call.id }}>", "call_id }}>")  # fmt: skip
    FAMILY[template] = "qwen_xml"
    for _, trigger, emit in shown(compiled(template, WEATHER)):
        assert "probe" not in trigger + emit
    assert rows(template, WEATHER)[0][2] == "\n<id="


# --------------------------------------------------------------------------------------- cache


def test_what_a_plan_depends_on() -> None:
    def key(options: dict[str, Any] | None = None, **schema: Any) -> str:
        return plan_key(options or {}, [tool("get_weather", "city", **schema)])

    keys = [
        key(),
        key({"enable_thinking": True}),
        key({"enable_thinking": False}),
        key({"reasoning_effort": "low"}),
        key({"preserve_thinking": True}),
        key(additionalProperties=False),
        key(patternProperties={"x": {}}),
        key(required=[]),
        plan_key({}, [WEATHER, DOCS]),
        plan_key({}, [DOCS, WEATHER]),
        plan_key({}, [tool("get_weather", "city", "b")]),
    ]
    assert len(set(keys)) == len(keys)
    assert key(properties={"city": {"type": "string"}}) == key(
        properties={"city": {"type": "integer", "description": "x"}}
    )
    json.loads(keys[0])


def test_plans_are_kept_and_the_oldest_goes() -> None:
    plans = Plans(most=2)
    made: list[str] = []

    def get(key: str) -> StrictPlan:
        def make() -> StrictPlan:
            made.append(key)
            return StrictPlan()

        return plans.get(key, make)

    for key in "abacab":
        get(key)
    assert made == ["a", "b", "c", "b"]


def test_one_compile_for_all_who_come_meanwhile() -> None:
    plans, made = Plans(), []

    def make() -> StrictPlan:
        made.append(1)
        return compiled(XML, WEATHER)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: plans.get("k", make), range(8)))
    assert len(made) == 1 and all(plan is found[0] for plan in found)


def test_a_failed_compile_is_tried_again() -> None:
    plans = Plans()
    with pytest.raises(KeyError):
        plans.get("k", lambda: {}["x"])
    assert plans.get("k", StrictPlan) == EMPTY
