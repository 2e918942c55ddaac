"""Every family with an opening marker is filled: a turn of two calls, in each."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlite.text.fill.guide import FillGuide
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from tests import prepared
from tests.filling import TAGS, WEATHER, Engine, ids_of, tokenizer
from tests.golden.markers import FAMILIES
from tests.golden.shapes import Golden

# Fills in a turn of two calls: a beginning each, and an end where the format has a closing tag.
FILLS = {
    **dict.fromkeys(("hermes", "gemma4", "functiongemma", "kimi", "deepseek", "pythonic"), 2),
    **dict.fromkeys(("qwen_xml", "glm", "minicpm", "minimax"), 4),
    "mistral": 1,  # without a closing marker, where the first call ends cannot be told
}
# Bare objects and lists, and a header that only a parser of its own could tell from thinking.
UNFILLED = {"generic", "llama3", "llama4", "harmony"}


def turn(golden: Golden, made: Tokenizer) -> list[int]:
    """The ids of an answer with two calls, as the template has it."""
    calls = [
        {
            "id": "x",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": n}},
        }
        for n in (5, 17)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    text = ChatTemplate(golden.template).render(messages, tools=None, add_generation_prompt=False)
    opening = "<|start|>assistant" if golden.family == "harmony" else "<|im_start|>assistant\n"
    answer = text.rpartition(opening)[2].partition("<|im_end|>")[0]
    return [*ids_of(("Sum.</think>\n\n" if golden.starts_open else "") + answer, made)]


@pytest.mark.parametrize("golden", FAMILIES, ids=lambda golden: golden.family)
def test_two_calls(golden: Golden) -> None:
    made = tokenizer(tags=tuple(dict.fromkeys((*TAGS, *golden.specials))))
    preparation = prepared.make(
        made,
        template=golden.template,
        vocab_size=made.vocab_size,
        model_type=golden.model_type or "llama",
        fill="strict",
    )
    guide = preparation(prepared.ask(tools=(WEATHER,), max_tokens=500)).spec.guide
    if golden.family in UNFILLED:
        assert guide is None
        return
    assert isinstance(guide, FillGuide)
    script = turn(golden, made)
    engine = Engine(script)
    assert engine.run(guide) == script
    assert len(engine.runs) == guide.counters.events == FILLS[golden.family]
    assert all(run.is_sure and count == len(run.ids) for run, count in engine.runs)
    for run, _ in engine.runs:
        assert made.decode(run.ids) in made.decode(script), "what the model would have written"


def test_no_family_is_left_out() -> None:
    assert {golden.family for golden in FAMILIES} == UNFILLED | set(FILLS)
