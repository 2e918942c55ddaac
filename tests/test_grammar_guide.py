"""GrammarGuide: thinking first, then the form; calls; stops (decisions D7, D8, D24)."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Guide, Verdict
from tests import prepared, scripted, tiny
from tests.prepared import BOS, EOS
from tests.walks import ids_in

VOCAB = 600
THINKING = (
    "{% if enable_thinking is not defined or enable_thinking %}{# <think> </think> #}{% endif %}"
    + scripted.QWEN
)


def tokenizer(*added: str) -> Tokenizer:
    backend = tiny.make_tokenizer()
    backend.add_tokens(list(added))
    return Tokenizer(backend, eos_ids=[0, 2], bos_token=BOS, eos_token=EOS)


MARKED = tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = tokenizer()  # the markers are written letter by letter


def guide_of(
    words: Tokenizer = MARKED, template: str = scripted.QWEN, model_type: str = "llama", **ask: Any
) -> Guide:
    preparation = prepared.make(words, template=template, model_type=model_type, vocab_size=VOCAB)
    request = prepared.ask(**ask)
    found = preparation(request, preparation.constrain(request))
    assert found.spec.guide is not None
    return found.spec.guide


def constraint(**field: Any) -> Any:
    from mlxlite.constraints import take_constraint

    return take_constraint(field)


DIGIT = constraint(guided_regex="[0-9]x?")
TWO = constraint(guided_regex="[0-9]{2}")


class Row:
    """A row that a guide steers. mask: the ids allowed next; None if all are."""

    def __init__(self, guide: Guide, words: Tokenizer = MARKED) -> None:
        self.guide, self.words = guide, words
        self.mask: set[int] | None = None
        self.last = Verdict(0)
        self._take(guide.observe(()))

    def _take(self, verdict: Verdict) -> None:
        self.last = verdict
        if verdict.mask is not None:
            self.mask = ids_in(verdict.mask) or None

    def say(self, text: str) -> Row:
        """Each token is one that is allowed."""
        for token in self.words.encode(text, add_special_tokens=False):
            assert self.allows(token), self.words.token_text(token)
            self._take(self.guide.observe((token,)))
        return self

    def allows(self, token: int | str) -> bool:
        if isinstance(token, str):
            (token,) = self.words.encode(token, add_special_tokens=False)
        return self.mask is None or token in self.mask

    @property
    def may_end(self) -> bool:
        return self.allows(2)


def test_a_form_without_thinking() -> None:
    row = Row(guide_of(constraint=TWO, enable_thinking=False))
    assert row.allows("4") and not row.allows("x") and not row.may_end
    row.say("4")
    assert not row.last.stop
    assert row.say("2").last == Verdict(1, stop=True), "complete, and nothing can follow"


def test_eos_where_it_may_end() -> None:
    row = Row(guide_of(constraint=DIGIT, enable_thinking=False)).say("7")
    assert row.may_end and row.allows("x") and not row.allows("7")
    assert row.say("x").last.stop


def test_a_thought_comes_first() -> None:
    """The model opens it itself; inside all is free but the end of the answer."""
    row = Row(guide_of(template=THINKING, constraint=TWO))
    assert row.allows("<think>") and row.allows("1") and not row.allows("x")
    row.say("<think>")
    assert row.allows("x") and row.allows("1") and not row.may_end
    row.say("well, well</think>")
    assert row.allows("1") and not row.allows("x") and not row.allows("<think>")
    assert row.say("12").last.stop


def test_a_thought_may_be_left_out() -> None:
    row = Row(guide_of(template=THINKING, constraint=TWO)).say("1")
    assert not row.allows("<think>")
    assert row.say("2").last.stop


def test_no_thought_if_it_is_switched_off() -> None:
    row = Row(guide_of(template=THINKING, constraint=TWO, enable_thinking=False))
    assert not row.allows("<think>")


def test_the_prompt_opens_the_thought() -> None:
    row = Row(guide_of(template=scripted.QWEN + "<think>\n", constraint=TWO))
    assert row.allows("x") and not row.may_end
    row.say("hm</think>")
    assert row.allows("1") and not row.allows("x")


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_ends_the_thought(budget: int) -> None:
    """Without the blanks that would belong to the answer."""
    row = Row(
        guide_of(template=scripted.QWEN + "<think>\n", constraint=TWO, thinking_budget=budget)
    )
    row.say("x" * budget)
    assert MARKED.decode(row.last.forced) == "\n</think>"
    row.say("\n</think>")
    assert row.allows("1") and not row.allows("x")
    assert row.say("12").last.stop


def test_a_stop_string_cuts_the_form() -> None:
    row = Row(guide_of(constraint=constraint(guided_regex="abcd"), stop=("c",))).say("ab")
    assert not row.last.stop
    assert row.say("c").last.stop


def test_harmony_names_a_channel_first() -> None:
    words = tokenizer("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    guide = guide_of(words, "<|channel|>{{ messages[0].content }}<|message|>", "gpt_oss",
                     constraint=TWO)  # fmt: skip
    row = Row(guide, words).say("<|channel|>analysis<|message|>thinking")
    assert not row.may_end
    row.say("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert row.allows("1") and not row.allows("x")
    assert row.say("12").last.stop


# --------------------------------------------------------------------------------- the calls

SCHEMA = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


CALL = '<tool_call>\n{"name": "add", "arguments": {"n":true}}\n</tool_call>'


@pytest.mark.parametrize("words", [MARKED, PIECES], ids=["marked", "pieces"])
def test_a_strict_call_is_kept_to_its_schema(words: Tokenizer) -> None:
    guide = guide_of(words, tools=(tool("add", strict=True), tool("sub")))
    row = Row(guide, words).say("Well: ")
    assert row.mask is None
    row.say('<tool_call>\n{"name": "add", "arguments": {"')
    assert row.mask is not None and row.allows("n") and not row.allows("m") and not row.may_end
    row.say('n":true}}\n</tool_call>')
    assert row.mask is None and not row.last.stop, "free again"
    row.say('and <tool_call>\n{"name": "sub", "arguments": {"n":false}}\n</tool_call>')
    assert row.mask is None


def test_a_marker_ends_with_its_token() -> None:
    """A token that went on after it could say what the form does not allow."""
    backend = tiny.make_tokenizer()
    backend.add_tokens(["call>x", "call>", ">{"])
    words = Tokenizer(backend, eos_ids=[0, 2], bos_token=BOS, eos_token=EOS)
    row = Row(guide_of(words, tools=(tool("add", strict=True),)), words).say("a <tool_")
    assert row.allows("call>") and not row.allows("call>x") and row.allows("x")
    assert row.say("x").allows("call>x"), "it was none"
    row.say("<tool_").say("call")
    assert not row.allows(">{") and row.allows(">")
    row.say(">").say('{"name": "add", "arguments": {"n":true}}\n</tool_call>')
    assert row.mask is None


def test_one_strict_call_if_told() -> None:
    guide = guide_of(tools=(tool("add", strict=True),), parallel_tool_calls=False)
    row = Row(guide).say(CALL.removesuffix("\n</tool_call>"))
    assert row.last.stop, "the call is complete; its closing marker need not come"


@pytest.mark.parametrize("name", ["", "add"])
def test_a_forced_call(name: str) -> None:
    row = Row(guide_of(tools=(tool("add"), tool("sub")), forced_call=name, stop=("a", "\n")))
    assert row.mask is not None and not row.may_end and not row.allows("x")
    row.say(CALL)
    assert row.last.stop is (name == "add"), "a named function is called once"
    assert row.last.stop or row.may_end and row.allows("\n")


def test_a_thought_ahead_of_a_forced_call() -> None:
    row = Row(guide_of(template=THINKING, tools=(tool("add"),), forced_call="add"))
    row.say("<think>hm</think>")
    assert not row.allows("x")
    assert row.say(CALL).last.stop


def test_a_call_instead_of_the_form() -> None:
    """With tools the model may call one before it answers."""
    row = Row(guide_of(tools=(tool("add", strict=True),), constraint=TWO, enable_thinking=False))
    assert row.allows("<tool_call>") and row.allows("1") and not row.allows("x")
    row.say(CALL.removesuffix("\n</tool_call>"))
    assert row.mask is not None and not row.may_end
    row.say("\n</tool_call>")
    assert row.may_end
    answer = Row(guide_of(tools=(tool("add"),), constraint=TWO, enable_thinking=False)).say("1")
    assert not answer.allows("<tool_call>")
