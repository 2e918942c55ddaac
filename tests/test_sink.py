"""The sink: stops, thinking, calls, special tokens in one stream; and the guide that owns one."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import pytest

from mlxlite.text.channels import GEMMA, HARMONY, THINK_TAGS
from mlxlite.text.guides import TextGuide, closing_ids
from mlxlite.text.sink import Sink, fresh_call_id
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.families import ToolRouting, route
from mlxlite.types import Delta, Guide, Verdict
from tests import tokenizers_made as made
from tests.folded import Folded, run, sink_of, tokenizer_with
from tests.golden import markers, shapes
from tests.golden.shapes import TOOLS, Golden

TOKENIZER = tokenizer_with()
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADDED = ["call_00000001", "add", '{"a":1}']


def routing(golden: Golden) -> ToolRouting | None:
    return route(golden.template, golden.model_type, TOOLS)


def shown(text: str, *, stops: Sequence[str] = (), starts_open: bool = False) -> Folded:
    """An answer with tools, think tags and stops; the same at every cut."""

    def answer(portions: list[str]) -> tuple[Folded, str | None]:
        sink = sink_of(TOKENIZER, routing(shapes.HERMES), THINK_TAGS, starts_open, stops)
        return run(sink, TOKENIZER, portions), sink.stopped

    whole, stopped = answer([text])
    assert answer(list(text)) == (whole, stopped)
    for cut in range(1, len(text)):
        assert answer([text[:cut], text[cut:]]) == (whole, stopped)
    assert stopped is None or stopped in stops
    return whole


# ------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize(
    ("text", "stops", "starts_open", "expected"),
    [
        ("Hello.\nUser: more", ["\nUser:"], False, Folded("Hello.")),  # F29
        ("a <tool b", ["<to"], False, Folded("a ")),  # in the held tail of a marker
        ("a <tool", ["<tool"], False, Folded("a ")),  # found only when the end releases it
        ("a \nUse", ["\nUser:"], False, Folded("a \nUse")),
        ("Why STOP not</think>b", ["STOP"], True, Folded("", "Why ")),  # in reasoning
        ("a</think>b STOP c", ["STOP"], True, Folded("b ", "a")),
        ("a</think>b", ["</think>"], True, Folded("", "a")),  # before the tags are split
        (f"a {CALL} b STOP", ["STOP"], False, Folded("a  b ", "", [ADDED])),
        (CALL, ['"name"', "add", "}", "</tool_call>"], False, Folded("", "", [ADDED])),
        (f"{CALL}\n\n{CALL}", ["\n\n"], False,
         Folded("", "", [ADDED, ["call_00000002", "add", '{"a":1}']])),
        (f"a STOP {CALL}", ["STOP"], False, Folded("a ")),
        (f"a\nUs{CALL}er:", ["\nUser:"], False, Folded("a\nUser:", "", [ADDED])),  # not across
        ("<tool_call>STOP</tool_call> b", ["STOP"], False, Folded("<tool_call>")),  # no call
    ],
)  # fmt: skip
def test_stops(text: str, stops: list[str], starts_open: bool, expected: Folded) -> None:
    assert shown(text, stops=stops, starts_open=starts_open) == expected


def test_after_a_stop_nothing_follows() -> None:
    sink = sink_of(TOKENIZER, stops=["b"])
    assert sink.push(TOKENIZER.encode("abc")) == [Delta(text="a")]
    assert sink.push(TOKENIZER.encode("def")) == []
    assert sink.finish() == []
    assert sink.stopped == "b"


# ---------------------------------------------------------------------------- thinking, calls


def test_everything_in_one_answer() -> None:
    text = f"<think>I add.</think>\n\nLook.{CALL}\n"
    assert shown(text) == Folded("\n\nLook.", "I add.", [ADDED])


def test_think_tags_inside_a_call_are_its_own() -> None:
    text = CALL.replace("1", '"<think>"')
    assert shown(text).calls[0][2] == '{"a":"<think>"}'


def test_a_call_inside_reasoning_is_a_call() -> None:
    """Qwen3.5 forgets to close its thinking (spec 30 section 1: the router comes first)."""
    assert shown(f"I add.\n{CALL}", starts_open=True) == Folded("", "I add.\n", [ADDED])


def test_reasoning_is_counted_with_its_markup() -> None:
    tokens = [TOKENIZER.encode(part) for part in ("<think>", "one two", "</think>", "\n\n", "x")]
    for portions in (tokens, [[i] for part in tokens for i in part], [sum(tokens, [])]):
        sink = sink_of(TOKENIZER, thinking=THINK_TAGS)
        for portion in portions:
            sink.push(portion)
        assert sink.reasoning_tokens == sum(map(len, tokens[:3]))
        assert not sink.is_thinking


def test_thinking_pauses_in_a_call() -> None:
    sink = sink_of(TOKENIZER, routing(shapes.HERMES), THINK_TAGS, True)
    assert sink.is_thinking
    sink.push(TOKENIZER.encode('a<tool_call>{"name"'))
    assert not sink.is_thinking


def test_calls_are_counted() -> None:
    sink = sink_of(TOKENIZER, routing(shapes.HERMES))
    sink.push(TOKENIZER.encode(CALL[:-20]))
    assert (sink.calls, sink.completed_calls) == (1, 0)
    sink.push(TOKENIZER.encode(CALL[-20:]))
    assert (sink.calls, sink.completed_calls) == (1, 1)


def test_calls_beyond_the_most_are_dropped() -> None:
    sink = sink_of(TOKENIZER, routing(markers.PYTHONIC), most_calls=1)
    text = "<|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>"
    assert run(sink, TOKENIZER, [text]) == Folded("", "", [ADDED])
    assert (sink.calls, sink.completed_calls) == (1, 1)


def test_call_ids() -> None:
    assert re.fullmatch("call_[0-9a-f]{8}", fresh_call_id())
    assert len({fresh_call_id() for _ in range(100)}) == 100
    sink = Sink(TOKENIZER, tools=routing(shapes.HERMES))
    (delta,) = sink.push(TOKENIZER.encode(CALL))
    assert delta.call is not None and delta.call.id.startswith("call_")


# ----------------------------------------------------------------------------- special tokens


def test_special_tokens_of_no_family_never_show() -> None:
    tokenizer = tokenizer_with("<|tool_call>", "<tool_call|>", "<|secret|>")
    ids = tokenizer.encode("a<|secret|>b<|im_end|>c<|tool_call>d<tool_call|>")
    for tools in (None, routing(shapes.HERMES)):
        assert Folded().add(sink_of(tokenizer, tools).push(ids)).content == "abcd"
    sink = sink_of(tokenizer, routing(markers.GEMMA4))
    assert Folded().add(sink.push(ids)).content == "abc<|tool_call>d<tool_call|>"


def test_marker_ids_mean_nothing_without_their_family() -> None:
    """Ids 48, 49, 100 and 101 are Gemma's markers; elsewhere they are ordinary tokens."""
    ids = [48, 49, 100, 101, 52]
    sink = sink_of(TOKENIZER, thinking=THINK_TAGS)
    folded = Folded().add(sink.push(ids)).add(sink.finish())
    assert folded.content == TOKENIZER.decode(ids) != ""


def test_characters_split_over_tokens() -> None:
    """F23, F25: in text, in reasoning and in arguments."""
    text = f"한국 🙂<think>👨‍👩‍👧</think>{CALL}".replace("1", '"🙂é한"')
    ids = TOKENIZER.encode(text)
    sink = sink_of(TOKENIZER, routing(shapes.HERMES), THINK_TAGS)
    folded = Folded()
    for token_id in ids:
        folded.add(sink.push((token_id,)))
    folded.add(sink.finish())
    assert (folded.content, folded.reasoning) == ("한국 🙂", "👨‍👩‍👧")
    assert folded.calls[0][2] == '{"a":"🙂é한"}'
    cut = sink_of(TOKENIZER)
    assert (
        Folded().add(cut.push(TOKENIZER.encode("a🙂")[:-1])).add(cut.finish()).content == "a\ufffd"
    )


@pytest.mark.parametrize(
    "backend", [made.sentencepiece(), made.sentencepiece(False), made.tekken(False)]
)
def test_other_tokenizers(backend: object) -> None:
    tokenizer = Tokenizer(backend)  # type: ignore[arg-type]
    sink = sink_of(tokenizer, routing(shapes.HERMES), THINK_TAGS)
    folded = Folded().add(sink.push(tokenizer.encode(f" hello{CALL}", False))).add(sink.finish())
    assert folded.content.strip() == "hello" and folded.calls == [ADDED]


def test_a_tokenizer_without_spaces() -> None:
    backend = made.word_piece()
    backend.add_special_tokens(["<think>", "</think>", "<secret>"])
    tokenizer = Tokenizer(backend)
    sink = sink_of(tokenizer, thinking=THINK_TAGS)
    ids = tokenizer.encode("<think>hello</think>world<secret>", False)
    folded = Folded().add(sink.push(ids)).add(sink.finish())
    assert (folded.reasoning.strip(), folded.content.strip()) == ("hello", "world")


# ------------------------------------------------------------------------------------ guides


def verdicts(guide: TextGuide, ids: Sequence[int]) -> tuple[int, Verdict]:
    """Feeds a guide id by id to its first decision: how many ids it saw, and the decision."""
    for n, token_id in enumerate(ids):
        verdict = guide.observe((token_id,))
        if verdict.stop or verdict.forced:
            return n + 1, verdict
    return len(ids), Verdict(1)


def test_a_guide_stops_at_the_id_of_the_stop_string() -> None:
    ids = TOKENIZER.encode("Hello.\nUser: more")
    guide: Guide = TextGuide(sink_of(TOKENIZER, stops=["\nUser:"]))
    assert not guide.may_steer
    assert guide.observe(()) == Verdict(0)
    verdict = guide.observe(ids)
    assert verdict == Verdict(len(TOKENIZER.encode("Hello.\nUser:")), stop=True)


def test_a_guide_stops_after_the_only_call() -> None:
    ids = TOKENIZER.encode(f"{CALL}\n{CALL}")
    guide = TextGuide(sink_of(TOKENIZER, routing(shapes.HERMES)), most_calls=1)
    seen, verdict = verdicts(guide, ids)
    assert verdict == Verdict(1, stop=True)
    assert TOKENIZER.decode(ids[:seen]) == CALL.removesuffix("</tool_call>"), "it is complete"
    sink = sink_of(TOKENIZER, routing(shapes.HERMES))
    assert Folded().add(sink.push(ids[:seen])).add(sink.finish()) == Folded("", "", [ADDED])
    many = TextGuide(sink_of(TOKENIZER, routing(shapes.HERMES)))
    assert verdicts(many, ids) == (len(ids), Verdict(1))


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_closes_the_thinking(budget: int) -> None:
    closing = closing_ids(TOKENIZER, THINK_TAGS)
    assert TOKENIZER.decode(closing) == "\n</think>\n\n"
    sink = sink_of(TOKENIZER, thinking=THINK_TAGS, starts_open=True)
    guide = TextGuide(sink, budget_tokens=budget, closing=closing)
    assert guide.may_steer
    first = guide.observe(())
    ids = TOKENIZER.encode("one two three four five six seven")
    if budget == 0:
        assert first == Verdict(0, forced=closing)
    else:
        assert first == Verdict(0)
        assert verdicts(guide, ids) == (budget, Verdict(1, forced=closing))
    assert sink.is_thinking
    assert [guide.observe((i,)) for i in closing] == [Verdict(1)] * len(closing)
    assert not sink.is_thinking
    assert verdicts(guide, ids) == (len(ids), Verdict(1)), "the answer is not cut"


def test_a_budget_counts_portions_id_by_id() -> None:
    closing = closing_ids(TOKENIZER, THINK_TAGS)
    sink = sink_of(TOKENIZER, thinking=THINK_TAGS, starts_open=True)
    guide = TextGuide(sink, budget_tokens=3, closing=closing)
    assert guide.observe(TOKENIZER.encode("one two three four")) == Verdict(3, forced=closing)


def test_a_budget_waits_for_thinking_that_the_model_opens() -> None:
    closing = closing_ids(TOKENIZER, THINK_TAGS)
    guide = TextGuide(sink_of(TOKENIZER, thinking=THINK_TAGS), budget_tokens=0, closing=closing)
    assert guide.observe(()) == Verdict(0)
    assert guide.observe(TOKENIZER.encode("Hello ")) == Verdict(len(TOKENIZER.encode("Hello ")))
    opening = TOKENIZER.encode("<think>")
    assert guide.observe(opening) == Verdict(len(opening), forced=closing)


@pytest.mark.parametrize("golden", [markers.GEMMA4, markers.HARMONY], ids=lambda g: g.family)
def test_a_budget_closes_channels(golden: Golden) -> None:
    thinking = GEMMA if golden is markers.GEMMA4 else HARMONY
    tokenizer = tokenizer_with(*golden.specials)
    closing = closing_ids(tokenizer, thinking)
    guide = TextGuide(sink_of(tokenizer, thinking=thinking), budget_tokens=6, closing=closing)
    ids = tokenizer.encode(f"{thinking.opening}one two three four five six")
    seen, verdict = verdicts(guide, ids)
    assert seen < len(ids) and verdict == Verdict(1, forced=closing)
    sink = sink_of(tokenizer, thinking=thinking)
    folded = Folded().add(sink.push([*ids[:seen], *closing, *tokenizer.encode("Hi.")]))
    assert folded.add(sink.finish()).content == "Hi."
    assert folded.reasoning


def test_the_guide_and_the_stream_agree() -> None:
    ids = TOKENIZER.encode(f"<think>a\nUser b</think>{CALL} and\nUser: c")
    for stops in (["\nUser:"], ["ser b"], [" and"]):
        guide = TextGuide(sink_of(TOKENIZER, routing(shapes.HERMES), THINK_TAGS, stops=stops))
        seen, verdict = verdicts(guide, ids)
        assert verdict.stop
        sink = sink_of(TOKENIZER, routing(shapes.HERMES), THINK_TAGS, stops=stops)
        sink.push(ids[: seen - 1])
        assert sink.stopped is None
        sink.push(ids[seen - 1 : seen])
        assert sink.stopped == stops[0]


# ----------------------------------------------------------------------------------- figures

PROSE = "The quick brown fox jumps over the lazy dog. if a < b: x = [1, 2]\\n"
HEADS = {
    "prose": "",
    "argument": '<tool_call>{"name": "files.read-x", "arguments": {"path": "',
    "parameter": "<tool_call><function=files.read-x><parameter=path>",
    "broken": "<tool_call>{'name': 'files.read-x', 'arguments': {'path': '",
    "spaces": CALL,
}


@pytest.mark.parametrize("head", HEADS)
def test_the_cost_is_linear_and_small(head: str) -> None:
    """Issue 3: under 60 microseconds a token, whatever the length of a block."""
    body = TOKENIZER.encode(" \n" if head == "spaces" else PROSE)

    def seconds_a_token(tokens: int) -> float:
        ids = TOKENIZER.encode(HEADS[head]) + (body * (tokens // len(body) + 1))[:tokens]
        sink = sink_of(TOKENIZER, routing(shapes.HERMES), THINK_TAGS, stops=["\nUser:"])
        started = time.perf_counter()
        for token_id in ids:
            sink.push((token_id,))
        sink.finish()
        return (time.perf_counter() - started) / len(ids)

    short, long = seconds_a_token(1_000), seconds_a_token(16_000)
    assert long < 60e-6
    assert long < 4 * short + 10e-6
