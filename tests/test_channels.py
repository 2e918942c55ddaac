"""Thinking: think tags at every cut, channels of Gemma 4 and gpt-oss (spec 30 sections 3, 10)."""

from __future__ import annotations

import pytest

from mlxlite.text.channels import (
    BRACKET_TAGS,
    GEMMA,
    HARMONY,
    THINK_TAGS,
    Thinking,
    ThinkTags,
    thinking_of,
)
from tests.folded import Folded, run, sink_of, tokenizer_with


def split(portions: list[str], starts_open: bool = False) -> tuple[str, str]:
    """Reasoning and content of a text."""
    tags = ThinkTags("<think>", "</think>", starts_open)
    pieces = [piece for portion in portions for piece in tags.push(portion)] + tags.flush()
    assert all(text for _, text in pieces)
    return (
        "".join(text for is_reasoning, text in pieces if is_reasoning),
        "".join(text for is_reasoning, text in pieces if not is_reasoning),
    )


@pytest.mark.parametrize(
    ("text", "starts_open", "reasoning", "content"),
    [
        ("Let me see.</think>\n\nIt is 4.", True, "Let me see.", "\n\nIt is 4."),  # F71
        ("<think>a</think>b<think>c</think>d", False, "ac", "bd"),
        ("<think>never closed", False, "never closed", ""),
        ("never closed, seeded", True, "never closed, seeded", ""),
        ("a < b, a <th, <thin", False, "", "a < b, a <th, <thin"),
        ("<think>a</thin</think>b", False, "a</thin", "b"),
        ("<think></think>", False, "", ""),
        ("<think>\n</think> x", False, "\n", " x"),
        ("</think>stays", False, "", "</think>stays"),
    ],
)
def test_think_tags(text: str, starts_open: bool, reasoning: str, content: str) -> None:
    expected = (reasoning, content)
    assert split([text], starts_open) == expected
    assert split(list(text), starts_open) == expected
    for cut in range(1, len(text)):
        assert split([text[:cut], text[cut:]], starts_open) == expected


def test_text_outside_flows_at_once() -> None:
    tags = ThinkTags("<think>", "</think>")
    assert tags.push("if a < b") == [(False, "if a < b")]
    assert tags.push(" <thi") == [(False, " ")]
    assert tags.push("s") == [(False, "<this")]


@pytest.mark.parametrize(
    ("source", "model_type", "thinking"),
    [
        ("{% if enable_thinking %}<think>{% endif %}", "qwen3", THINK_TAGS),
        ("{{ content.split('</think>')[-1] }}", "qwen2", THINK_TAGS),
        ("<|channel>thought", "", GEMMA),
        ("", "gemma4_text", GEMMA),
        ("<|start|>assistant<|channel|>final<|message|>", "", HARMONY),
        ("", "gpt_oss", HARMONY),
        ("[THINK]", "mistral3", BRACKET_TAGS),
        ("{{ messages }}", "llama", None),
    ],
)
def test_the_template_tells(source: str, model_type: str, thinking: Thinking | None) -> None:
    assert thinking_of(source, model_type) is thinking


SPECIALS = {
    GEMMA: ("<|channel>", "<channel|>", "<|tool_call>"),
    HARMONY: ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|constrain|>"),
}


def shown(thinking: Thinking, text: str, starts_open: bool = False) -> Folded:
    tokenizer = tokenizer_with(*SPECIALS[thinking])

    def answer(portions: list[str]) -> Folded:
        sink = sink_of(tokenizer, thinking=thinking, starts_open=starts_open)
        return run(sink, tokenizer, portions)

    whole = answer([text])
    assert answer(list(text)) == whole
    for cut in range(1, len(text)):
        assert answer([text[:cut], text[cut:]]) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\nSo.<channel|>Hello", "\nSo.", "Hello"),
        ("<|channel>thought\n<channel|>Hello", "\n", "Hello"),
        ("<|channel>thought<channel|>Hello", "", "Hello"),
        ("<|channel>thought\ncut at ma", "\ncut at ma", ""),
        ("<|channel>though", "", ""),
        ("Hi<|channel>x\na<channel|> you<|channel>y\nb<channel|>", "\na\nb", "Hi you"),
    ],
)
def test_gemma(text: str, reasoning: str, content: str) -> None:
    assert shown(GEMMA, text) == Folded(content, reasoning)


def test_gemma_seeded_open() -> None:
    assert shown(GEMMA, "So.<channel|>Hello", starts_open=True) == Folded("Hello", "So.")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            "So.",
            "Hi",
        ),
        ("<|channel|>final<|message|>Hi<|return|>", "", "Hi"),
        ("<|channel|>commentary<|message|>I will look.<|end|>", "", "I will look."),
        ("<|message|>bare", "", "bare"),
        ("no markup < at all", "", "no markup < at all"),
        ("<|channel|>ana", "", ""),
        ("<|channel|>analysis<|message|>cut", "cut", ""),
        ("<|channel|>commentary to=functions.f<|message|>{}<|end|>", "", "{}"),
    ],
)
def test_harmony_without_tools(text: str, reasoning: str, content: str) -> None:
    assert shown(HARMONY, text) == Folded(content, reasoning)


def test_harmony_seeded_open() -> None:
    text = "So.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert shown(HARMONY, text, starts_open=True) == Folded("Hi", "So.")


def test_a_header_without_end_is_words() -> None:
    words = "words " * 100
    tokenizer = tokenizer_with(*SPECIALS[HARMONY])
    for portions in ([f"<|channel|>{words}"], ["<|channel|>", *words]):
        assert run(sink_of(tokenizer, thinking=HARMONY), tokenizer, portions).content == words
