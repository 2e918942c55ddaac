"""Every family is filled: a turn of two calls, in each."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlite.text.fill.guide import FillGuide
from mlxlite.text.fill.plan import PATIENCE
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
    **dict.fromkeys(("mistral", "generic", "llama3", "llama4", "harmony"), 2),
}
# Bare objects and lists, and a header that only a parser of its own could tell from thinking: their
# fills are checked by the model, all or (without a closing marker) those after the first call.
CHECKED = {**dict.fromkeys(("generic", "llama3", "llama4", "harmony"), 2), "mistral": 1}


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
    assert isinstance(guide, FillGuide)
    script = turn(golden, made)
    engine = Engine(script)
    assert engine.run(guide) == script
    assert len(engine.runs) == guide.counters.events == FILLS[golden.family]
    assert all(count == len(run.ids) for run, count in engine.runs)
    checked = sum(not run.is_sure for run, _ in engine.runs)
    assert checked == guide.counters.verify_events == CHECKED.get(golden.family, 0)
    for run, _ in engine.runs:
        assert made.decode(run.ids) in made.decode(script), "what the model would have written"


def test_no_family_is_left_out() -> None:
    assert {golden.family for golden in FAMILIES} == set(FILLS)


def test_a_checked_fill_ends_where_the_model_goes_another_way() -> None:
    golden = next(golden for golden in FAMILIES if golden.family == "llama3")
    made = tokenizer(tags=tuple(dict.fromkeys((*TAGS, *golden.specials))))
    preparation = prepared.make(
        made, template=golden.template, vocab_size=made.vocab_size, fill="strict"
    )

    def filled(script: list[int], **fields: Any) -> tuple[Engine, Any]:
        ask = prepared.ask(**{"tools": (WEATHER,), "max_tokens": 900, **fields})
        guide = preparation(ask).spec.guide
        assert guide is not None
        engine = Engine(script)
        assert engine.run(guide) == script
        return engine, guide

    engine, guide = filled([*ids_of('{"name": "get_wealth", "parameters": {}}', made)])
    assert 0 < guide.counters.verify_accepted < len(engine.runs[0][0].ids)
    assert guide.counters.verify_rejected > 0
    # A long answer without a call is prose, and gives the engine its step of lead back.
    late = [*ids_of("word " * PATIENCE + '{"name": "get_weather"}', made)]
    engine, guide = filled(late)
    assert not engine.runs and not guide.may_steer
    # No guard tells where a thought ends that may be cut short.
    thinks = prepared.ask(tools=(WEATHER,), thinking_budget=100)
    assert not isinstance(preparation(thinks).spec.guide, FillGuide)
