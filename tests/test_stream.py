"""stream: what the engine produced, in any portions, becomes the same text, plain or streamed.

The engine is a script here: it delivers given ids in given portions from a thread of its own and
asks the row's guide like the real one. The oracle for text is one decode of all ids, cut at the
first stop string.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from mlxlite.errors import Busy, Cancelled, EngineDown, EngineFault, MlxliteError
from mlxlite.prepare import Prepared
from mlxlite.stream import Answer, deltas, fold
from mlxlite.text.guides import StopGuide
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Delta, Done, Event, Finish, RowSpec, Sampling, Sink
from tests import tiny

TOKENIZER = Tokenizer(tiny.make_tokenizer(), eos_ids=[0, 2])
PROMPT_TOKENS = 5


class ScriptedEngine:
    """Delivers `portions` of ids, then the end; asks the guide before each id."""

    def __init__(
        self,
        portions: Sequence[Sequence[int]],
        finish: Finish = Finish.EOS,
        error: MlxliteError | None = None,
        end_apart: bool = False,
        is_endless: bool = False,
    ) -> None:
        self.portions = portions
        self.finish = finish
        self.error = error
        self.end_apart = end_apart
        self.is_endless = is_endless
        self.cancelled: list[int] = []
        self.submitted = 0
        self.threads: list[threading.Thread] = []

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        self.submitted += 1
        thread = threading.Thread(target=self._deliver, args=(spec, sink))
        self.threads.append(thread)
        thread.start()
        return 41

    def cancel(self, row_id: int) -> None:
        self.cancelled.append(row_id)

    def _deliver(self, spec: RowSpec, sink: Sink) -> None:
        finish, sent = self.finish, 0
        for n, portion in enumerate(self.portions):
            ids: tuple[int, ...] = ()
            for token in portion:
                ids += (token,)
                sent += 1
                if spec.guide is not None and spec.guide.observe((token,)).stop:
                    finish = Finish.GUIDE
                    break
            is_last = n == len(self.portions) - 1 or finish is Finish.GUIDE
            if is_last and not self.end_apart and not self.is_endless:
                sink(Event(ids, self._done(finish, sent)))
                return
            sink(Event(ids))
            if is_last:
                break
        if not self.is_endless:
            sink(Event(done=self._done(finish, sent)))

    def _done(self, finish: Finish, sent: int) -> Done:
        return Done(finish, PROMPT_TOKENS, 2, sent, 0.1, 0.2, 0.3, self.error)


def prepared(stops: tuple[str, ...] = (), limit: int = 100) -> Prepared:
    guide = StopGuide(TOKENIZER, stops) if stops else None
    spec = RowSpec((1,) * PROMPT_TOKENS, Sampling(), limit or 1, frozenset({0, 2}), guide)
    return Prepared(spec, stops, limit)


def collect(engine: Any, request: Prepared) -> list[Delta]:
    async def run() -> list[Delta]:
        return [delta async for delta in deltas(engine, TOKENIZER, request, "test")]

    return asyncio.run(run())


def folded(engine: Any, request: Prepared) -> Answer:
    async def run() -> Answer:
        return await fold(deltas(engine, TOKENIZER, request, "test"))

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
        assert answer.usage.completion_tokens == len(ids)


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
    assert engine.submitted == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_closing_early_cancels(steps: int) -> None:
    engine = ScriptedEngine([TOKENIZER.encode("hello world")], is_endless=True)

    async def run() -> None:
        pieces = deltas(engine, TOKENIZER, prepared(), "test")  # type: ignore[arg-type]
        for _ in range(steps):
            await anext(pieces)
        await pieces.aclose()

    asyncio.run(run())
    assert engine.cancelled == [41]


def test_cancelling_a_waiting_reader_cancels() -> None:
    engine = ScriptedEngine([()], is_endless=True)

    async def run() -> None:
        pieces = deltas(engine, TOKENIZER, prepared(), "test")  # type: ignore[arg-type]
        await anext(pieces)
        task = asyncio.ensure_future(fold(pieces))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert engine.cancelled == [41]


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
        async for delta in deltas(engine, TOKENIZER, prepared(), "test"):  # type: ignore[arg-type]
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
        def submit(self, spec: RowSpec, sink: Sink) -> int:
            raise Busy("admission queue is full")

    async def run() -> None:
        await anext(deltas(Full([]), TOKENIZER, prepared(), "test"))  # type: ignore[arg-type]

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
            await asyncio.gather(
                *(fold(deltas(each, TOKENIZER, prepared(), "t")) for each in engines)  # type: ignore[arg-type]
            )
        )

    assert [answer.text for answer in asyncio.run(run())] == texts
