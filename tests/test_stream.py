"""stream: what the engine produced, in any portions, becomes the same text, plain or streamed.

The engine is a script here (`scripted.py`). The oracle for text is one decode of all ids, cut at
the first stop string; for calls and reasoning, the same ids in one portion.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlxlite.errors import Busy, Cancelled, EngineDown, EngineFault, MlxliteError
from mlxlite.metrics import Metrics
from mlxlite.prepare import Prepared
from mlxlite.session import Sessions
from mlxlite.stream import Answer, deltas, fold
from mlxlite.text.channels import THINK_TAGS
from mlxlite.text.guides import TextGuide
from mlxlite.text.sink import Sink
from mlxlite.text.tools.families import route
from mlxlite.types import CallPiece, Delta, Event, Finish, RowSpec, Sampling
from tests.scripted import TOKENIZER, ScriptedEngine

PROMPT_TOKENS = 5
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def opened(engine: Any) -> Sessions:
    """engine: what a test plays an engine with."""
    return Sessions(engine)


def prepared(
    stops: tuple[str, ...] = (), limit: int = 1000, top_logprobs: int | None = None
) -> Prepared:
    def make_sink() -> Sink:
        return Sink(TOKENIZER, stops=stops)

    guide = TextGuide(make_sink()) if stops else None
    return asked(make_sink, guide, limit, top_logprobs)


def with_markup(
    most_calls: int | None = None, budget: int | None = None, limit: int = 1000, **how: Any
) -> Prepared:
    """A request with a tool and think tags."""

    def make_sink() -> Sink:
        tools = route("<tool_call>", "", TOOLS)
        return Sink(TOKENIZER, thinking=THINK_TAGS, tools=tools, most_calls=most_calls, **how)

    closing = TOKENIZER.encode(THINK_TAGS.closing, add_special_tokens=False)
    guide = TextGuide(make_sink(), most_calls=most_calls, budget_tokens=budget, closing=closing)
    return asked(make_sink, guide, limit, 2)


def asked(
    make_sink: Any, guide: TextGuide | None, limit: int, top_logprobs: int | None
) -> Prepared:
    spec = RowSpec(
        prompt_ids=(1,) * PROMPT_TOKENS,
        sampling=Sampling(),
        max_tokens=limit or 1,
        eos_ids=frozenset({0, 2}),
        guide=guide,
        top_logprobs=top_logprobs,
    )
    return Prepared(spec, make_sink, limit)


def collect(engine: Any, request: Prepared) -> list[Delta]:
    async def run() -> list[Delta]:
        return [delta async for delta in deltas(opened(engine), request, "test")]

    return asyncio.run(run())


def folded(engine: Any, request: Prepared) -> Answer:
    async def run() -> Answer:
        return await fold(deltas(opened(engine), request, "test"))

    return asyncio.run(run())


def oracle(ids: Sequence[int], stops: Sequence[str]) -> tuple[str, bool]:
    """The text up to the stop that is completed first (the longer of two), and whether it was."""
    text = TOKENIZER.decode(ids)
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


def cut(rng: random.Random, ids: Sequence[int]) -> list[Sequence[int]]:
    portions, at = [], 0
    while at < len(ids):
        size = rng.choice((0, 1, 1, 1, 2, 3, 7))
        portions.append(ids[at : at + size])
        at += size
    return portions or [()]


TEXTS = [
    "plain words that say hello to the world again and again",
    "\U0001f642\U0001f642 한국어 éè naïve \U0001f468\u200d\U0001f469\u200d\U0001f467",
    " leading space\n\nUser: hi\nUser: there",
    "",
]


@pytest.mark.parametrize("round_", range(60))
def test_streamed_is_plain_is_decoded(round_: int) -> None:
    """Random ids, portions and stops: three ways to the same text."""
    rng = random.Random(round_)
    if round_ % 3:
        ids = [rng.randrange(3, 512) for _ in range(rng.randrange(0, 60))]
    else:
        ids = TOKENIZER.encode(rng.choice(TEXTS))
    whole = TOKENIZER.decode(ids)
    stops: tuple[str, ...] = ()
    if round_ % 2 and whole:
        starts = [rng.randrange(len(whole)) for _ in range(rng.randrange(1, 4))]
        pieces = (whole[at : at + rng.randrange(1, 6)] for at in starts)
        stops = tuple(dict.fromkeys([*pieces, "never there"]))
        stops = tuple(stop for stop in stops if "\ufffd" not in stop) or ("never there",)
    text, is_stopped = oracle(ids, stops)

    streamed = collect(ScriptedEngine(cut(rng, ids), end_apart=bool(round_ % 4)), prepared(stops))
    assert "".join(delta.text for delta in streamed) == text
    assert [delta.finish for delta in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[0] == Delta()  # the engine took it
    assert all(delta.text for delta in streamed[1:-1])
    answer = folded(ScriptedEngine(cut(rng, ids)), prepared(stops))
    assert answer.text == text
    assert answer.finish == streamed[-1].finish == "stop"
    if not is_stopped:
        assert answer.usage.completion_tokens == len(ids) + 1  # the end is a token


@pytest.mark.parametrize("stop", ["\nUser:", "User", "\n", "r: h", "hi\nUser"])
def test_no_part_of_a_stop_gets_out(stop: str) -> None:
    """One id at a time: every prefix of what was sent is a prefix of the right text (F29)."""
    ids = TOKENIZER.encode("fine\nUse it\nUser: hi\nUser: there")
    text, is_stopped = oracle(ids, [stop])
    streamed = collect(ScriptedEngine([(i,) for i in ids]), prepared((stop,)))
    sent = ""
    for delta in streamed:
        sent += delta.text
        assert text.startswith(sent)
    assert is_stopped and sent == text and streamed[-1].finish == "stop"


def test_characters_are_never_split() -> None:
    ids = TOKENIZER.encode("\U0001f642한é")
    assert len(ids) > 3
    streamed = collect(ScriptedEngine([(i,) for i in ids]), prepared())
    assert all("\ufffd" not in delta.text for delta in streamed)
    # A character that the end cuts short is shown as what it is, once.
    cut_short = collect(ScriptedEngine([(i,) for i in ids[:-1]], Finish.LENGTH), prepared())
    assert "".join(d.text for d in cut_short) == TOKENIZER.decode(ids[:-1])


def test_length_and_usage() -> None:
    ids = TOKENIZER.encode("hello world")
    answer = folded(ScriptedEngine([ids], Finish.LENGTH), prepared())
    assert answer.finish == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, len(ids), 2)
    assert (usage.queued_s, usage.prefill_s, usage.decode_s) == (0.1, 0.2, 0.3)


def test_held_text_comes_out_at_the_end() -> None:
    """What could have become a stop string and did not (D11: no held text is lost)."""
    ids = TOKENIZER.encode("say hello\nUse")
    streamed = collect(ScriptedEngine([(i,) for i in ids], Finish.LENGTH), prepared(("\nUser:",)))
    assert "".join(delta.text for delta in streamed) == "say hello\nUse"
    assert streamed[-1].finish == "length"


def test_nothing_asked_for() -> None:
    engine = ScriptedEngine([(5,)])
    answer = folded(engine, prepared(limit=0))
    assert (answer.text, answer.finish, answer.usage.completion_tokens) == ("", "length", 0)
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert engine.specs == []


@pytest.mark.parametrize("steps", [1, 2])
def test_closing_early_cancels(steps: int) -> None:
    engine = ScriptedEngine([TOKENIZER.encode("hello world")], is_endless=True)

    async def run() -> None:
        pieces = deltas(opened(engine), prepared(), "test")
        for _ in range(steps):
            await anext(pieces)
        await pieces.aclose()

    asyncio.run(run())
    assert engine.cancelled == [41]


def test_cancelling_a_waiting_reader_cancels() -> None:
    engine = ScriptedEngine([()], is_endless=True)

    async def run() -> None:
        pieces = deltas(opened(engine), prepared(), "test")
        await anext(pieces)
        task = asyncio.ensure_future(fold(pieces))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert engine.cancelled == [41]


def test_who_leaves_at_the_last_piece_is_no_longer_running() -> None:
    engine = ScriptedEngine([TOKENIZER.encode("hello world")])
    metrics = Metrics()

    async def run() -> None:
        pieces = deltas(opened(engine), prepared(), "test", metrics)
        assert not (await anext(pieces)).text and metrics.recent.newest_first()[0]["finish"] is None
        assert (await anext(pieces)).text  # the row has ended, its usage has not come
        await pieces.aclose()

    asyncio.run(run())
    (row,) = metrics.recent.newest_first()
    assert row["finish"] is not None


def test_an_end_is_not_cancelled() -> None:
    engine = ScriptedEngine([(5,)])
    collect(engine, prepared())
    assert engine.cancelled == []


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        (Finish.ERROR, EngineFault("it broke")),
        (Finish.CANCELLED, Cancelled("gone")),
        (Finish.CANCELLED, EngineDown("stopping")),
    ],
)
def test_errors(finish: Finish, error: MlxliteError) -> None:
    """What came before is delivered, then what the row ended with is raised."""
    ids = TOKENIZER.encode("hello world")
    engine = ScriptedEngine([(i,) for i in ids], finish, error, end_apart=True)
    sent: list[str] = []

    async def run() -> None:
        async for delta in deltas(opened(engine), prepared(), "test"):
            assert delta.finish is None
            sent.append(delta.text)

    with pytest.raises(type(error)) as caught:
        asyncio.run(run())
    assert caught.value is error
    assert TOKENIZER.decode(ids).startswith("".join(sent))
    assert engine.cancelled == []
    with pytest.raises(type(error)):
        folded(ScriptedEngine([ids], finish, error), prepared())


def test_an_error_without_a_reason_is_still_one() -> None:
    with pytest.raises(EngineFault):
        folded(ScriptedEngine([(5,)], Finish.ERROR), prepared())


def test_a_refusal_comes_before_anything() -> None:
    class Full(ScriptedEngine):
        def submit(self, spec: RowSpec, sink: Callable[[Event], None]) -> int:
            raise Busy("admission queue is full")

    async def run() -> None:
        await anext(deltas(opened(Full([])), prepared(), "test"))

    with pytest.raises(Busy):
        asyncio.run(run())


def test_the_log_never_holds_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        collect(ScriptedEngine([TOKENIZER.encode("secret words")]), prepared())
    (record,) = caplog.records
    assert record.getMessage().startswith("test: in 5 (2 cached) out ")
    assert "secret" not in record.getMessage()


def test_many_at_once() -> None:
    """Each mailbox gets its own row's events, whatever the threads do."""
    texts = [f"answer number {n} says hello" for n in range(40)]

    async def run() -> list[Answer]:
        engines = [ScriptedEngine([(i,) for i in TOKENIZER.encode(text)]) for text in texts]
        return list(
            await asyncio.gather(*(fold(deltas(opened(each), prepared(), "t")) for each in engines))
        )

    assert [answer.text for answer in asyncio.run(run())] == texts


# ----------------------------------------------------------------- calls, reasoning, logprobs

CALL = '<tool_call>{"name": "add", "arguments": {"a": [1, {"b": "}"}], "c": "x"}}</tool_call>'
BAD = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'
MARKED = [
    CALL,
    f"<think>hm</think>One moment.{CALL}\n{CALL}",
    f"<think>hm</think>{BAD} and {CALL} more",
    "<think>never closed",
    f"{CALL[:30]}",
    "\U0001f642<think>\U0001f642</think>\n\n\U0001f642",
]


def shape(answer: Answer) -> tuple[Any, ...]:
    """All of an answer but the ids of its calls, which are drawn."""
    calls = [(call.index, call.name, call.arguments) for call in answer.calls]
    return answer.text, answer.reasoning, calls, answer.finish, answer.logprobs, answer.usage


@pytest.mark.parametrize("text", MARKED)
def test_portions_do_not_matter(text: str) -> None:
    ids = TOKENIZER.encode(text)
    whole = folded(ScriptedEngine([ids]), with_markup())
    for round_ in range(12):
        engine = ScriptedEngine(cut(random.Random(round_), ids), end_apart=bool(round_ % 2))
        assert shape(folded(engine, with_markup())) == shape(whole)
    assert [entry.id for entry in whole.logprobs] == ids


def test_calls() -> None:
    """Each delta has one kind; the pieces of a call share index, id and name (F12, F14)."""
    streamed = collect(ScriptedEngine([(i,) for i in TOKENIZER.encode(MARKED[1])]), with_markup())
    pieces = [delta.call for delta in streamed if delta.call is not None]
    assert all(bool(d.text) + bool(d.reasoning) + (d.call is not None) <= 1 for d in streamed)
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    by_index = [[p for p in pieces if p.index == n] for n in range(2)]
    ids = set()
    for call in by_index:
        assert {(p.id, p.name) for p in call} == {(call[0].id, "add")}
        ids.add(call[0].id)
        assert len(call) > 1, "arguments come in fragments"
        assert json.loads("".join(p.arguments for p in call)) == {"a": [1, {"b": "}"}], "c": "x"}
    assert len(ids) == 2
    assert "".join(d.text for d in streamed) == "One moment."
    assert "".join(d.reasoning for d in streamed) == "hm"
    assert [d.finish for d in streamed if d.finish] == ["tool_calls"]


@pytest.mark.parametrize(
    ("text", "end", "finish"),
    [
        (CALL, Finish.EOS, "tool_calls"),
        (CALL, Finish.LENGTH, "tool_calls"),
        (CALL + " and", Finish.LENGTH, "tool_calls"),
        (BAD, Finish.EOS, "stop"),
        (BAD, Finish.LENGTH, "length"),
        ("fine", Finish.EOS, "stop"),
        ("fine", Finish.LENGTH, "length"),
    ],
)
def test_finish(text: str, end: Finish, finish: str) -> None:
    """Calls, then stops, then the limit (spec 30 section 1; F11)."""
    engine = ScriptedEngine([TOKENIZER.encode(text)], end)
    answer = folded(engine, with_markup())
    assert answer.finish == finish and bool(answer.calls) == (finish == "tool_calls")


def test_a_stop_found_only_at_the_end_is_a_stop() -> None:
    """Text that was held for a call's markup, then turns out to hold the stop string."""
    text = '<tool_call>{"name": "sub'
    engine = ScriptedEngine([TOKENIZER.encode(text)], Finish.LENGTH)
    answer = folded(engine, with_markup(stops=("sub",)))
    assert (answer.text, answer.finish) == ('<tool_call>{"name": "', "stop")


def test_one_call_only() -> None:
    engine = ScriptedEngine([(i,) for i in TOKENIZER.encode(CALL + CALL)])
    answer = folded(engine, with_markup(most_calls=1))
    assert len(answer.calls) == 1 and answer.finish == "tool_calls"
    assert json.loads(answer.calls[0].arguments)["c"] == "x"
    assert answer.usage.completion_tokens <= len(TOKENIZER.encode(CALL))  # it ended there


@pytest.mark.parametrize("budget", [0, 1, 3, 10**30])
def test_thinking_budget(budget: int) -> None:
    """The block is closed by force, and the forced ids are part of the answer (D10)."""
    engine = ScriptedEngine([(i,) for i in TOKENIZER.encode("<think>hello world again, so")])
    answer = folded(engine, with_markup(budget=budget))
    if budget == 10**30:
        assert (answer.text, answer.reasoning) == ("", "hello world again, so")
        return
    assert answer.reasoning.endswith("\n") and len(answer.reasoning) < 20
    assert answer.text.startswith("\n\n") and answer.text.endswith("so")
    assert answer.reasoning[:-1] + answer.text[2:] == "hello world again, so"
    assert answer.usage.reasoning_tokens < answer.usage.completion_tokens


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs_are_all_there(top: int | None) -> None:
    """One an id, in order, however the text was held back; on no delta if nobody asked."""
    ids = TOKENIZER.encode("\U0001f642 say hello\nUser")
    engine = ScriptedEngine([(i,) for i in ids])
    streamed = collect(engine, prepared(("\nUser:",), top_logprobs=top))
    entries = [entry for delta in streamed for entry in delta.logprobs]
    if top is None:
        assert entries == []
    else:
        assert [entry.id for entry in entries] == ids
        assert [entry.logprob for entry in entries] == [-n / 8 for n in range(len(ids))]
        assert {len(entry.top) for entry in entries} == {top}
        assert streamed[-1].logprobs == ()
    engine = ScriptedEngine([ids])
    answer = folded(engine, prepared(("\nUser:",), top_logprobs=top))
    assert list(answer.logprobs) == entries


def test_logprobs_of_an_end_that_comes_alone() -> None:
    engine = ScriptedEngine([(5,), (6,)], Finish.LENGTH, end_apart=True)
    assert len(folded(engine, prepared(top_logprobs=1)).logprobs) == 2


def test_fold_joins_the_pieces_of_each_call() -> None:
    usage = folded(ScriptedEngine(), prepared()).usage

    async def pieces() -> Any:
        for call in (("a", "f", "{"), ("a", "f", "}"), ("b", "g", "{}")):
            yield Delta(call=CallPiece("ab".index(call[0]), *call))
        yield Delta(finish="tool_calls", usage=usage)

    async def run() -> Answer:
        return await fold(pieces())

    assert asyncio.run(run()).calls == (CallPiece(0, "a", "f", "{}"), CallPiece(1, "b", "g", "{}"))
