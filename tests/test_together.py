"""together: several rows of one request; `n` on chat, by the official client and byte by byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from mlxlite.errors import Busy, EngineDown, EngineFault
from mlxlite.prepare import Prepared
from mlxlite.session import Sessions
from mlxlite.text.sink import Sink
from mlxlite.together import fold_together, together, total
from mlxlite.types import Done, Event, Finish, RowSpec, Sampling, Usage
from mlxlite.types import Sink as EventSink
from tests.live import CHAT, HELLO, Brake, LiveApp, chat_body, connect, frames, post_bytes
from tests.scripted import TOKENIZER

pytestmark = pytest.mark.slow

DONE = Done(Finish.EOS, 3, 0, 2, 0.1, 0.2, 0.3)


class Rows:
    """An engine whose rows a test drives by hand. room: rows that it takes at once."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.open: dict[int, tuple[RowSpec, EventSink]] = {}
        self.started: list[int] = []
        self.cancelled: list[int] = []
        self.is_down = False

    def submit(self, spec: RowSpec, sink: EventSink) -> int:
        if self.is_down:
            raise EngineDown("down")
        if len(self.open) >= self.room:
            raise Busy("admission queue is full")
        row_id = len(self.started)
        self.started.append(spec.sampling.seed)
        self.open[row_id] = (spec, sink)
        return row_id

    def cancel(self, row_id: int) -> None:
        self.cancelled.append(row_id)
        self.open.pop(row_id, None)

    def say(self, row_id: int, text: str) -> None:
        self.open[row_id][1](Event(tuple(TOKENIZER.encode(text, add_special_tokens=False))))

    def end(self, row_id: int, done: Done = DONE) -> None:
        self.open.pop(row_id)[1](Event(done=done))


def prepared(count: int, limit: int = 8) -> list[Prepared]:
    return [
        Prepared(
            RowSpec((5, 6, 7), Sampling(seed=seed), 8, frozenset()),
            lambda: Sink(TOKENIZER),
            limit,
        )
        for seed in range(count)
    ]


def play(scene: Callable[..., Any], rows: int = 3, most: int = 100, room: int = 100) -> Rows:
    """Run a scene with an engine and the stream of its rows; the stream is closed at its end."""
    engine = Rows(room)

    async def run() -> None:
        pieces = together(Sessions(engine), prepared(rows), "test", most)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scene(engine, pieces), 5)
        finally:
            await pieces.aclose()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()

    asyncio.run(run())
    assert len(engine.cancelled) == len(set(engine.cancelled)), "closed exactly once"
    assert engine.open == {}
    return engine


async def texts_until(pieces: Any, count: int) -> list[tuple[int, str]]:
    """The next pieces of text, so many of them."""
    found: list[tuple[int, str]] = []
    while len(found) < count:
        index, delta = await anext(pieces)
        found += [(index, delta.text)] if delta.text else []
    return found


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_pieces_come_with_their_index() -> None:
    async def scene(engine: Rows, pieces: Any) -> None:
        await anext(pieces)
        reader = asyncio.ensure_future(texts_until(pieces, 3))
        await settle()
        assert engine.started == [0, 1, 2]
        for row_id, text in ((2, "fox"), (0, "dog"), (2, "he")):
            engine.say(row_id, text)
            await settle()
        assert await reader == [(2, "fox"), (0, "dog"), (2, "he")]
        for row_id in (1, 0, 2):
            engine.end(row_id)
        found = [(index, delta.finish) async for index, delta in pieces]
        assert sorted(found) == [(0, "stop"), (1, "stop"), (2, "stop")]

    assert play(scene).cancelled == []


def test_folded() -> None:
    async def scene(engine: Rows, pieces: Any) -> None:
        whole = asyncio.ensure_future(fold_together(pieces, 3))
        await settle()
        for row_id in range(3):
            engine.say(row_id, f"word{row_id}")
            engine.end(row_id)
        answers = await whole
        assert [answer.text for answer in answers] == ["word0", "word1", "word2"]
        usage = total([answer.usage for answer in answers], 3)
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 6)

    play(scene)


def test_total_counts_each_prompt_once() -> None:
    usages = [Usage(10 * (i // 2 + 1), i, 1, i // 2, 0, 0, 0) for i in range(4)]
    found = total(usages, 2)
    assert (found.prompt_tokens, found.completion_tokens) == (30, 6)
    assert (found.reasoning_tokens, found.cached_tokens) == (4, 1)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 10])
def test_closing_closes_all(turns: int) -> None:
    """At any moment: before the others started, before their tasks ran, in their midst."""

    async def scene(engine: Rows, pieces: Any) -> None:
        await anext(pieces)
        reader = asyncio.ensure_future(anext(pieces))
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])

    engine = play(scene)
    assert sorted(engine.cancelled) == list(range(len(engine.started)))


def test_a_fault_ends_all() -> None:
    async def scene(engine: Rows, pieces: Any) -> None:
        await anext(pieces)
        reader = asyncio.ensure_future(texts_until(pieces, 9))
        await settle()
        engine.end(0)
        engine.say(2, "fox")
        fault = Done(Finish.ERROR, 3, 0, 0, 0, 0, 0, EngineFault("broke"))
        engine.end(1, fault)
        with pytest.raises(EngineFault, match="broke"):
            await reader

    assert play(scene).cancelled == [2]


def test_one_request_does_not_fill_the_queue() -> None:
    async def scene(engine: Rows, pieces: Any) -> None:
        await anext(pieces)
        reader = asyncio.ensure_future(fold_together(pieces, 7))
        for row_id in range(7):
            await settle()
            assert len(engine.open) == min(2, 7 - row_id) and engine.started[-1] <= row_id + 1
            engine.end(row_id)
        await reader

    assert play(scene, rows=7, most=2).started == list(range(7))


def test_a_full_queue_waits_for_our_own() -> None:
    async def scene(engine: Rows, pieces: Any) -> None:
        await anext(pieces)
        reader = asyncio.ensure_future(fold_together(pieces, 3))
        for row_id in range(3):
            await settle()
            assert list(engine.open) == [row_id]
            engine.end(row_id)
        await reader

    play(scene, room=1)


def test_what_was_begun_waits_for_a_queue_full_of_others() -> None:
    """Half an answer is not thrown away, nor a stream broken off, because others came between."""

    async def scene(engine: Rows, pieces: Any) -> None:
        await anext(pieces)
        reader = asyncio.ensure_future(fold_together(pieces, 3))
        await settle()
        engine.room = 0
        engine.end(0)
        await settle()
        assert not reader.done() and engine.open == {}
        engine.room = 9
        while len(engine.open) < 2:  # `play` has a deadline
            await asyncio.sleep(0.01)
        for row_id in (1, 2):
            engine.end(row_id)
        assert len(await reader) == 3

    play(scene, room=1)


def test_a_full_queue_without_ours_is_busy() -> None:
    async def scene(engine: Rows, pieces: Any) -> None:
        with pytest.raises(Busy):
            await anext(pieces)

    assert play(scene, room=0).started == []


def test_the_engine_goes_down_between_two_rows() -> None:
    async def scene(engine: Rows, pieces: Any) -> None:
        await anext(pieces)
        engine.is_down = True
        with pytest.raises(EngineDown):
            await anext(pieces)

    assert play(scene).cancelled == [0]


@pytest.mark.parametrize("seed", range(60))
def test_random_lives(seed: int) -> None:
    """Whatever the order of tokens, ends, full queues and leaving: texts are whole, ends single."""
    pick = random.Random(seed)
    count = pick.randint(2, 9)
    leaves = pick.random() < 0.5

    async def scene(engine: Rows, pieces: Any) -> None:
        told: dict[int, str] = {}
        got = [""] * count
        finishes = [0] * count

        async def reading() -> None:
            async for index, delta in pieces:
                got[index] += delta.text
                finishes[index] += delta.finish is not None

        reader = asyncio.ensure_future(reading())
        for _ in range(200):
            for _ in range(pick.randint(0, 4)):
                await asyncio.sleep(0)
            if reader.done() or (leaves and pick.random() < 0.03):
                break
            if engine.open and pick.random() < 0.8:
                row_id = pick.choice(list(engine.open))
                if pick.random() < 0.3:
                    engine.end(row_id)
                else:
                    told[row_id] = told.get(row_id, "") + "fox"
                    engine.say(row_id, "fox")
        if leaves:
            reader.cancel()
            await asyncio.wait([reader])
            return
        while engine.open:
            engine.end(next(iter(engine.open)))
            await settle()
        await reader
        assert finishes == [1] * count
        assert got == [told.get(row_id, "") for row_id in range(count)]

    play(scene, rows=count, most=pick.randint(1, 9), room=pick.randint(1, 9))


def test_rows_of_no_tokens() -> None:
    async def run() -> None:
        pieces = together(Sessions(Rows(0)), prepared(3, limit=0), "test", 2)  # type: ignore[arg-type]
        answers = await fold_together(pieces, 3)
        assert [(a.text, a.finish) for a in answers] == [("", "length")] * 3

    asyncio.run(run())


# ------------------------------------------------------------------------------ n, on the wire


@pytest.fixture(scope="module")
def client(tiny_server: LiveApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


HOT: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 9, "temperature": 1.2}


def test_n_is_as_n_requests(client: openai.OpenAI) -> None:
    alone = [client.chat.completions.create(**HOT, seed=40 + i) for i in range(3)]
    answer = client.chat.completions.create(**HOT, seed=40, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [one.choices[0].message.content for one in alone]
    assert len(set(texts)) == 3
    assert answer.usage is not None and alone[0].usage is not None
    assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens
    generated = [one.usage.completion_tokens for one in alone if one.usage]
    assert answer.usage.completion_tokens == sum(generated)
    assert answer.system_fingerprint == alone[0].system_fingerprint != None  # noqa: E711


def test_n_streamed(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**HOT, seed=40, n=4, logprobs=True)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            **HOT, seed=40, n=4, logprobs=True, stream=True, stream_options=options
        )
    )
    *body, last = chunks
    assert last.choices == [] and last.usage == plain.usage
    texts, tokens, finishes = [""] * 4, [0] * 4, {}
    for chunk in body:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert choice.index not in finishes, "nothing comes after the finish"
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += len(choice.logprobs.content or []) if choice.logprobs else 0
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in plain.choices]
    assert finishes == {choice.index: choice.finish_reason for choice in plain.choices}
    assert tokens == [
        len(choice.logprobs.content or []) if choice.logprobs else 0 for choice in plain.choices
    ]
    order = [chunk.choices[0].index for chunk in body]
    assert order != sorted(order), "interleaved"


def test_n_with_stop_strings(tiny_server: LiveApp) -> None:
    """Every row has a guide of its own: it must not see its neighbours' tokens."""
    free = tiny_server.chat(temperature=1.2, seed=3, n=3, max_tokens=20).json()["choices"]
    texts = [choice["message"]["content"] for choice in free]
    stops = [text[4:6] for text in texts]
    found = tiny_server.chat(temperature=1.2, seed=3, n=3, max_tokens=20, stop=stops).json()
    for whole, choice in zip(texts, found["choices"], strict=True):
        cut = min(at for stop in stops if (at := whole.find(stop)) >= 0)
        assert choice["message"]["content"] == whole[:cut]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "2", True])
def test_wrong_n(tiny_server: LiveApp, n: Any) -> None:
    reply = tiny_server.chat(n=n)
    assert reply.status == 400 and reply.error["param"] == "n"


def test_more_answers_than_the_queue_holds(tiny_folder: Any) -> None:
    with LiveApp(tiny_folder, batch="2", queue="1") as server:
        answer = server.chat(n=20, max_tokens=3, temperature=1, seed=1).json()
        assert len(answer["choices"]) == 20
        stats = server.batch()
        assert stats["completed_rows"] == stats["submitted_rows"] == 20


def test_leaving_cancels_all(tiny_folder: Any) -> None:
    with LiveApp(tiny_folder) as server:
        brake = Brake(server.worker._loop.batch, "step", after=4)
        sock = connect(server.address)
        sock.sendall(post_bytes(CHAT, chat_body(n=5, stream=True, max_tokens=900)))
        brake.wait()
        sock.close()
        server.wait_batch(lambda _: server.ask("GET", "/stats").json()["http"]["connections"] == 1)
        brake.free()
        stats = server.wait_batch(lambda stats: stats["cancelled_rows"] == 5)
        assert stats["active_rows"] == stats["pending_rows"] == 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_fault_in_one_row(tiny_folder: Any, is_stream: bool) -> None:
    with LiveApp(tiny_folder) as server:
        batch = server.worker._loop.batch
        original, calls = batch.open, []

        def broken(row: Any) -> None:
            calls.append(row)
            if len(calls) == 2:
                raise RuntimeError("sampler")
            original(row)

        batch.open = broken
        reply = server.chat(n=3, stream=is_stream, max_tokens=600)
        if is_stream:
            *_, last = frames(reply.body)
            assert reply.status == 200 and "sampler" in last["error"]["message"]
        else:
            assert reply.status == 500 and "sampler" in reply.error["message"]
        server.wait_batch(lambda stats: stats["active_rows"] == 0)
        stats = server.batch()
        assert stats["failed_rows"] == 1 and stats["cancelled_rows"] == 2
