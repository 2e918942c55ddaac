"""Whatever a model writes: no exception, JSON arguments, nothing lost, the same at every cut.

Outputs are the golden ones, mutated: cut short, repeated, glued together, with junk, quotes,
brackets, markers and Unicode thrown in. The fast suite takes a sample, `make test` 500 a family.
"""

from __future__ import annotations

import json
import random

import pytest

from mlxlite.text.channels import thinking_of
from mlxlite.text.tools.families import route
from tests.folded import Folded, run, sink_of, tokenizer_with
from tests.golden.markers import FAMILIES
from tests.golden.shapes import TOOLS, Golden

JUNK = (
    *('"', "'", "\\", "\\u", "\\ud83d", "{", "}", "[", "]", ",", ":", "<", ">", "/", "```", "\n"),
    *(" ", "  \n", "é", "한국", "🙂", "\x00", "None", "True", "1e999", "-", "NaN", "0" * 50),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "</function>"),
    *("<parameter=a>", "</parameter>", '{"name": "add", "arguments": {', "[TOOL_CALLS]", "to="),
    *("call:add{", "[add(", "<![CDATA[", "]]>", "words of prose. ", "add", "a=1"),
)


def mutated(rng: random.Random, golden: Golden) -> str:
    outputs = [case.output for case in golden.cases]
    text = rng.choice(outputs)
    for _ in range(rng.randrange(4)):
        at, other = rng.randrange(len(text) + 1), rng.choice(outputs)
        match rng.randrange(7):
            case 0:
                text = text[:at]
            case 1:
                text = text[:at] + rng.choice(JUNK) + text[at:]
            case 2:
                text = text[:at] + rng.choice(golden.specials or JUNK) + text[at:]
            case 3:
                text = text[:at] + text[at + rng.randrange(9) :]
            case 4:
                text += rng.choice(["", "\n", " and "]) + other
            case 5:
                text = text[:at] + other + text[at:]
            case 6:
                text = text.replace('"', rng.choice(["'", "", '\\"', '"']))
        text = text[:1500]
    return text


def cut(rng: random.Random, text: str) -> list[str]:
    pieces = []
    most = rng.choice([1, 3, 12, 60])
    while text:
        size = rng.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def answer(golden: Golden, portions: list[str], stops: tuple[str, ...]) -> Folded:
    tokenizer = tokenizer_with(*golden.specials)
    sink = sink_of(
        tokenizer,
        route(golden.template, golden.model_type, TOOLS),
        thinking_of(golden.template, golden.model_type),
        golden.starts_open,
        stops,
    )
    folded = run(sink, tokenizer, portions)
    assert sink.calls == sink.completed_calls == len(folded.calls)
    assert (sink.stopped is None) or (sink.stopped in stops)
    return folded


def is_within(part: str, text: str) -> bool:
    """True if the characters of a part stand in the text in that order."""
    rest = iter(text)
    return all(char in rest for char in part)


def check(rng: random.Random, golden: Golden) -> None:
    text = mutated(rng, golden)
    stops = rng.choice([(), (), ("words of",), ("\n\n", "}}", "add")])
    whole = answer(golden, [text], stops)
    assert answer(golden, cut(rng, text), stops) == whole, text
    names = {tool["function"]["name"] for tool in TOOLS}
    for _, name, arguments in whole.calls:
        assert name in names
        assert isinstance(json.loads(arguments), dict), text
    assert is_within(whole.content, text), text
    assert is_within(whole.reasoning, text), text
    if not whole.calls and not stops and golden.family not in ("gemma4", "harmony"):
        # Without a call every character is there; think tags alone are gone.
        shown = len(whole.content) + len(whole.reasoning)
        missing = len(text) - shown
        assert missing == 0 or ("think>" in golden.template and missing >= len("<think>")), text


@pytest.mark.parametrize("golden", FAMILIES, ids=lambda golden: golden.family)
def test_a_sample(golden: Golden) -> None:
    rng = random.Random(golden.family)
    for _ in range(36):
        check(rng, golden)


@pytest.mark.slow
@pytest.mark.parametrize("golden", FAMILIES, ids=lambda golden: golden.family)
def test_many(golden: Golden) -> None:
    rng = random.Random(f"{golden.family}, many")
    for _ in range(500):
        check(rng, golden)
