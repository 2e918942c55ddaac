"""The guard: where a row may fire (spec 50 section 5), and strict parsers of all families."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxlite.text.channels import GEMMA, THINK_TAGS, Thinking
from mlxlite.text.fill import guard as guards
from mlxlite.text.fill.guard import Guard, has_closed_literals, is_closed_reasoning
from mlxlite.text.fill.plan import Kind, Row
from mlxlite.text.tools.format import Tools
from tests.filling import DOCS, HERMES, TOKENIZER, WEATHER, XML, compiled, ids_of, markup, row_of

TOOLS = Tools.of((WEATHER, DOCS))
REQUIRED = {"get_weather": ["city"], "search_docs": ["query"]}
SCAFFOLD = row_of(compiled(HERMES, WEATHER, DOCS), Kind.SCAFFOLD)
NAME = row_of(compiled(HERMES, WEATHER, DOCS), Kind.NAME)
CLOSE = row_of(compiled(XML, WEATHER), Kind.CLOSE)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def make(
    family: str = "hermes",
    *,
    starts_open: bool = False,
    thinking: Thinking = THINK_TAGS,
    required: Any = REQUIRED,
) -> Guard:
    return Guard(
        TOKENIZER.bytes_of, markup(family), thinking, TOOLS, required, starts_open=starts_open
    )


def allows(text: str, row: Row = SCAFFOLD, **more: Any) -> bool:
    """Whether a row may fire at the end of an answer; asked once, and after every token."""
    once, often = make(**more), make(**more)
    ids = ids_of(text)
    once.observe(ids)
    for token in ids:
        often.observe((token,))
        found = often.allows(row)
    assert once.allows(row) is found
    return found


# -------------------------------------------------------------------------- where a call begins


@pytest.mark.parametrize(
    "before",
    [
        "",
        "\n\n",
        CALL,
        CALL + "\n",
        f"{CALL}\n{CALL}  \n",
        "<think>They want the weather.</think>",
        '\n<think>\nIs it `city` or "town"?\n</think>\n\n' + CALL + "\n",
        "<think>```py\nx = 'a\n```\nDone.</think>\n",
        "<think>~~~~\n```\n~~~\n~~~~~\n</think>",
        "<think></think>",
    ],
)
def test_it_allows_a_call_at_a_boundary(before: str) -> None:
    assert allows(before + "<tool_call>")
    assert allows(before + '<tool_call>\n{"name": "get', NAME)


@pytest.mark.parametrize(
    "before",
    [
        "Sure. ",  # prose
        "<think>I will write ",  # inside the thinking
        "<think>I don't know.</think>",  # an open quote: it may be one
        '<think>He said "call</think>',
        "<think>Use `x</think>",
        "<think>```\n",  # inside a fence
        "<think>```\nx\n</think>",
        "<think>````\nx\n```\n</think>",
        "<think>```\nx\n~~~\n</think>",
        "<think>```\nx\n``` and on\n</think>",
        "<think>a<think>b</think>",
        "<think>a</think><think>b</think>",  # the second is none of the answer's beginning
        CALL + " and ",
        CALL + "<think>b</think>",
        "<tool_call>",  # a second opener in an open block
        '<tool_call>\n{"name": "search_docs", "arguments": {"query": "',
        # A block that ends inside an argument, and one that needs a repair.
        '<tool_call>\n{"name": "search_docs", "arguments": {"query": "</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x",}}\n</tool_call>',
        '<tool_call>\n{"name": "who", "arguments": {}}\n</tool_call>',
    ],
)
def test_it_refuses_anywhere_else(before: str) -> None:
    assert not allows(before + "<tool_call>")
    assert not allows(before + '<tool_call>\n{"name": "get', NAME)


def test_a_thought_that_the_prompt_opened() -> None:
    for text in ("Weather.\n</think>\n\n", "</think>", f"a</think>{CALL}\n"):
        assert allows(text + "<tool_call>", starts_open=True)
        assert not allows(text + "<tool_call>"), "it is prose then"
    assert allows("a</think>\n<think>b</think>\n<tool_call>", starts_open=True)
    for text in ("", "Weather. ", "I don't.</think>", "<think></think>", "a<think>b</think>"):
        assert not allows(text + "<tool_call>", starts_open=True)


def test_the_trigger_is_all_there_is_of_the_call() -> None:
    assert not allows('<tool_call>\n{"name": "get', SCAFFOLD)
    assert not allows("<tool_call>", NAME)
    assert not allows('<tool_call> \n{"name": "get', NAME)
    unmarked = Row(ids_of('"name": "get'), NAME.emit, Kind.NAME)
    assert not allows('<tool_call>\n{"name": "get', unmarked), "a trigger without the marker"
    longer = Row(ids_of("</think>\n\n<tool_call>"), SCAFFOLD.emit, Kind.SCAFFOLD)
    assert allows("a</think>\n\n<tool_call>", longer, starts_open=True)


def test_kinds_that_are_never_allowed() -> None:
    assert not allows("<tool_call>", Row(SCAFFOLD.trigger, SCAFFOLD.emit, Kind.TURN_END))
    assert allows("<tool_call>", Row(SCAFFOLD.trigger, SCAFFOLD.emit, Kind.KEY))


def test_a_long_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MOST_TOKENS", 40)
    assert allows(CALL[:0] + "<think>" + "a" * 30 + "</think><tool_call>")
    assert not allows("<think>" + "a" * 40 + "</think><tool_call>")


def test_half_a_character_and_ids_of_nothing_do_no_harm() -> None:
    made = make()
    made.observe([*ids_of("<think>한국어 🙂</think>"), 10_000, *ids_of("<tool_call>")])
    assert made.allows(SCAFFOLD)
    cut = make()
    cut.observe([*ids_of("<think>"), ids_of("🙂")[0], *ids_of("</think>\n<tool_call>")])
    assert cut.allows(SCAFFOLD)


def test_a_channel_is_thinking_as_well() -> None:
    row = Row(ids_of("<|tool_call>"), ids_of("call:x"), Kind.SCAFFOLD)
    more: dict[str, Any] = {"family": "gemma4", "thinking": GEMMA}
    assert allows("<|channel>thought\nSum.\n<channel|><|tool_call>", row, **more)
    call = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
    assert allows(call + "<|tool_call>", row, **more)
    assert not allows("<|channel>thought\nSum. <|tool_call>", row, **more)
    assert not allows(
        "<|tool_call>call:get_weather{city:Rome}<tool_call|><|tool_call>", row, **more
    )


def test_it_does_not_look_at_what_is_settled_again() -> None:
    """The work of a long answer grows with its length, not with its square."""
    counted = 0

    def parse(text: str, tools: Tools) -> Any:
        nonlocal counted
        counted += len(text)
        return markup("hermes").parse(text, tools)

    base = markup("hermes")
    made = Guard(
        TOKENIZER.bytes_of,
        type(base)(base.opener, base.closer, parse),
        THINK_TAGS,
        TOOLS,
        REQUIRED,
        starts_open=False,
    )
    for _ in range(50):
        made.observe(ids_of("<tool_call>"))
        assert made.allows(SCAFFOLD)
        made.observe(ids_of(CALL.removeprefix("<tool_call>") + "\n"))
    assert counted == 49 * len(CALL)


def plain_rules(text: str, row: Row, starts_open: bool) -> bool:
    """The rules for the beginning of a call, in their order, on the whole text."""
    for is_open in (starts_open, None):
        text = text.lstrip()
        if is_open is None:
            if not text.startswith("<think>"):
                continue
            text = text.removeprefix("<think>")
        elif not is_open:
            continue
        thought, closing, text = text.partition("</think>")
        if not closing or not is_closed_reasoning(thought, "<think>"):
            return False
    while True:
        text = text.lstrip()
        if not text.startswith("<tool_call>"):
            return False
        block, closing, rest = text.partition("</tool_call>")
        if not closing:
            break
        if markup("hermes").parse(block + closing, TOOLS) is None:
            return False
        text = rest
    trigger = TOKENIZER.decode(row.trigger)
    return text.count("<tool_call>") == 1 and text == trigger[trigger.index("<tool_call>") :]


def test_it_equals_the_plain_rules() -> None:
    parts = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, CALL, "\n", " ", "a"]
    parts += ["it's", '"q"', "\n```\n", '\n{"name": "get', "<", "<think", "<think>a</think>"]
    draws = random.Random(11)
    counts = {True: 0, False: 0}
    for _ in range(4000):
        text = "".join(draws.choices(parts, k=draws.randint(0, 5)))
        row = draws.choice((SCAFFOLD, NAME))
        text += TOKENIZER.decode(row.trigger) if draws.random() < 0.8 else ""
        starts_open = draws.random() < 0.4
        made = make(starts_open=starts_open)
        ids = ids_of(text)
        for at, token in enumerate(ids):
            made.observe((token,))
            if draws.random() < 0.3:
                so_far = TOKENIZER.decode(ids[: at + 1])
                assert made.allows(row) is plain_rules(so_far, row, starts_open), so_far
        found = made.allows(row)
        assert found is plain_rules(text, row, starts_open), (text, starts_open)
        assert not (found and made.is_lost)
        counts[found] += 1
    assert counts[True] > 300


# ----------------------------------------------------------------------------- where one ends

XML_CALL = "<tool_call>\n<function=get_weather><parameter=city>\n{}\n</parameter>"


@pytest.mark.parametrize("value", ["Rome", "", "10", 'say "x"', "a < b", "한국", "`x`\nand y"])
def test_it_allows_the_end_of_a_whole_call(value: str) -> None:
    assert allows(XML_CALL.format(value), CLOSE, family="qwen_xml")


@pytest.mark.parametrize(
    "text",
    [
        XML_CALL.format("it's"),  # perhaps in the middle of a literal
        XML_CALL.format('print("</parameter>'),
        XML_CALL.format("x").replace("city", "town"),
        XML_CALL.format("x").replace("get_weather", "who"),
        XML_CALL.format("x").replace("get_weather", "search_docs"),
        XML_CALL.format("x") + "\n<parameter=city>\ny\n</parameter>",
        XML_CALL.format("x").removeprefix("<tool_call>"),
        "Prose. " + XML_CALL.format("x"),
    ],
)
def test_it_refuses_to_end_what_is_no_whole_call(text: str) -> None:
    assert not allows(text, CLOSE, family="qwen_xml")


@pytest.mark.parametrize("names", ["unknown", None, [], ["city", "b"], ["b"]])
def test_it_ends_no_call_whose_only_argument_is_not_the_only_one(names: Any) -> None:
    required = {} if names == "unknown" else {"get_weather": names}
    assert not allows(XML_CALL.format("x"), CLOSE, family="qwen_xml", required=required)


# ----------------------------------------------------------------------------- closed literals


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("", True),
        ("plain", True),
        ("it's", False),
        ("'a' \"b\" `c`", True),
        ("'a\\' b", True),  # no escapes between single quotes
        ('"a\\" b', False),
        ('"a\\" b"', True),
        ("`a\\` b`", True),
        ("\\' a", True),  # outside it escapes the quote
        ("a\\", True),
        ('"a\\', False),
        ("'\"'", True),
        ('"\'"', True),
        ("``` x", False),
    ],
)
def test_closed_literals(text: str, closed: bool) -> None:
    assert has_closed_literals(text) is closed


def slow_literals(text: str) -> bool:
    quote, at = "", 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "\"'`":
            quote = char
        at += 1
    return not quote


def test_closed_literals_equal_a_scan() -> None:
    draws = random.Random(3)
    for _ in range(3000):
        text = "".join(draws.choices("ab\"'`\\\n", k=draws.randint(0, 12)))
        assert has_closed_literals(text) is slow_literals(text), text


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("a\n```\nit's\n```\nb", True),
        ("a\n  ```\nx\n  ```\nb", True),
        ("```x```", True),  # code within a line, no fence
        ("~~~\n```\n~~~", True),
        ("~~~\n```\n```", False),
        ("a <think> b", False),
    ],
)
def test_closed_reasoning(text: str, closed: bool) -> None:
    assert is_closed_reasoning(text, "<think>") is closed
