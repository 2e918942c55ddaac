"""The legs: what one server is asked in one round, and what is taken from the clock (floor 4).

A leg gets a server, a round's number and the means to make prompts; it gives values by metric and
the texts of greedy answers. It knows nothing of other servers: `matrix` runs the same round on all
of them before the next one. Prompts depend on leg and round alone, so all servers get the same, and
no prompt that should be cold was seen before.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from mlxlite.bench.client import Answer, RequestFailed, ask, get
from mlxlite.bench.servers import Server

PROMPT_TOKENS = 1000
LONG_PROMPT_TOKENS = 7900  # with its answer below the 8,192 of the default model
DECODE_TOKENS = 192
_STREAM_TOKENS = 48
_CROWD_TOKENS = 24  # of sixteen
_BUSY_TOKENS = 48
_SEEDED_TOKENS = 24
_POLL_S = 0.02  # of a counter that changes a few times a second
_FAN = 8
_FAN_TOKENS = 8
_SHORT = "What is the capital of France? Answer in one sentence."
_SUBJECTS = (
    "a lighthouse keeper", "an old clock", "the first snow", "a lost letter", "two rivers",
    "a night train", "the baker's son", "a broken bridge", "the last wolf", "a silent piano",
    "a market in spring", "the tallest tree", "an empty house", "a paper boat", "the desert road",
    "a winter harbour",
)  # fmt: skip
_WORDS = (
    "the of and a to in is that it was for on are as with they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how up "
    "out them then she many some so these would other into has more her two like him see time "
    "could no make than first been its who now people my made over did down only way find use may "
    "water long little very after words called just where most know"
).split()

Values = dict[str, list[float]]


@dataclass(slots=True)
class Found:
    values: Values = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Kit:
    """Makes prompts. words_per_token: as the first server's tokenizer counts. salt: what makes the
    prompts of this run unlike those of any other."""

    words_per_token: float
    salt: str

    def prompt(self, seed: str, tokens: int) -> str:
        """Some `tokens` tokens of words, other ones from the first word on for another seed."""
        draws = random.Random(f"{self.salt} {seed}")
        count = max(round(tokens * self.words_per_token), 1)
        return f"{seed}-{self.salt} " + " ".join(draws.choices(_WORDS, k=count))


Run = Callable[[Server, int, Kit], Awaitable[Found]]


@dataclass(frozen=True, slots=True)
class Leg:
    """rounds: wanted. prompt_tokens: that a server without the right cache runs before there is a
    value, by which one that is much too slow is told beforehand. owns: it starts and kills the
    server."""

    name: str
    run: Run
    rounds: int
    prompt_tokens: int = 0
    owns: bool = False


def _body(server: Server, text: str, tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    limits = {"max_tokens": tokens, "temperature": 0}
    return {"model": server.model, "messages": messages, **limits, **more}


async def short(server: Server, kit: Kit, label: str) -> float:
    """Seconds to the first token of a short request that was not asked before."""
    text = f"{label}{kit.salt}: {_SHORT}"
    return (await ask(server.base, _body(server, text, 1))).ttft_s


async def calibrate(server: Server, salt: str) -> Kit:
    """Learn how many of our words make a token; 0.75 without usage. Raises RequestFailed."""
    draws = random.Random(salt)
    counts = []
    for words in (1, 101):
        text = " ".join(draws.choices(_WORDS, k=words))
        counts.append((await ask(server.base, _body(server, text, 1))).prompt_tokens)
    few, many = counts
    return Kit(100 / (many - few) if few and many and many > few else 0.75, salt)


# ------------------------------------------------------------------------------ start, restart


async def _begin(server: Server, text: str) -> tuple[float, float]:
    """Start a server that is down: seconds until it is ready, and until its first token."""
    started = time.perf_counter()
    server.spawn()
    await server.wait_ready()
    ready_s = time.perf_counter() - started
    sent = time.perf_counter()
    answer = await ask(server.base, _body(server, text, 1))
    return ready_s, sent - started + answer.ttft_s


async def start(server: Server, turn: int, kit: Kit) -> Found:
    server.stop()
    ready_s, first_s = await _begin(server, _SHORT)
    return Found({"ready_s": [ready_s], "first_s": [first_s]})


async def restart(server: Server, turn: int, kit: Kit) -> Found:
    """Killed while it has the prompt in its cache; asked for it again at once."""
    prompt = kit.prompt(f"restart{turn}", PROMPT_TOKENS)
    await ask(server.base, _body(server, prompt, 1))
    server.stop(signal.SIGKILL)
    ready_s, first_s = await _begin(server, prompt)
    return Found({"again_ready_s": [ready_s], "again_first_s": [first_s]})


# ----------------------------------------------------------------------------- one at a time


async def prompt(server: Server, turn: int, kit: Kit) -> Found:
    body = _body(server, kit.prompt(f"cold{turn}", PROMPT_TOKENS), 1)
    cold, again = await ask(server.base, body), await ask(server.base, body)
    found = Found({"cold_s": [cold.ttft_s], "cached_s": [again.ttft_s]})
    if cold.prompt_tokens is not None:
        found.values["prompt_tokens"] = [cold.prompt_tokens]
    return found


async def decode(server: Server, turn: int, kit: Kit) -> Found:
    text = f"Write a long story about {_SUBJECTS[turn % len(_SUBJECTS)]} and the sea."
    answer = await ask(server.base, _body(server, text, DECODE_TOKENS))
    return Found({"decode_tps": [answer.rate]}, {f"decode {turn}": answer.text})


# ------------------------------------------------------------------------------------ together


class _Streams:
    """Long answers that go on beside something else; they end, or are left, with the block."""

    def __init__(self, server: Server, count: int, tokens: int, seed: str) -> None:
        self._begun = [asyncio.Event() for _ in range(count)]
        self._bodies = [
            _body(server, f"Write a long story about {subject}, part {seed}.", tokens)
            for subject in _SUBJECTS[:count]
        ]
        self._server = server
        self._tasks: list[asyncio.Task[Answer]] = []

    async def __aenter__(self) -> _Streams:
        self._tasks = [
            asyncio.create_task(ask(self._server.base, body, begun))
            for body, begun in zip(self._bodies, self._begun, strict=True)
        ]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begun(self) -> None:
        """Until all have their first token. Raises what a stream raised that has none."""
        for task, event in zip(self._tasks, self._begun, strict=True):
            waiting = asyncio.create_task(event.wait())
            try:
                both: list[asyncio.Task[Any]] = [task, waiting]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if not event.is_set():
                task.result()
                raise RequestFailed("a stream without text")

    @property
    def all_run(self) -> bool:
        return not any(task.done() for task in self._tasks)

    async def answers(self) -> list[Answer]:
        return list(await asyncio.gather(*self._tasks))


def streams(count: int, tokens: int) -> Run:
    async def run(server: Server, turn: int, kit: Kit) -> Found:
        """Tokens of all streams over the time from the first request to the last token."""
        started = time.perf_counter()
        async with _Streams(server, count, tokens, f"{count}{turn}") as running:
            answers = await running.answers()
        seconds = time.perf_counter() - started
        rate = sum(answer.tokens for answer in answers) / seconds
        texts = {f"{count} streams {turn}.{n}": a.text for n, a in enumerate(answers)}
        return Found({f"streams{count}_tps": [rate]}, texts)

    return run


async def busy(server: Server, turn: int, kit: Kit) -> Found:
    """A short request idle, then as often as fits while four streams decode."""
    idle_s = [await short(server, kit, f"i{turn}{n}") for n in range(2)]
    found: Values = {"idle_s": idle_s, "busy_s": [], "busy_gap_s": []}
    async with _Streams(server, 4, _BUSY_TOKENS, f"busy{turn}") as running:
        await running.begun()
        while running.all_run and len(found["busy_s"]) < 3:
            seconds = await short(server, kit, f"b{turn}{len(found['busy_s'])}")
            if running.all_run or not found["busy_s"]:
                found["busy_s"].append(seconds)
        answers = await running.answers()
    found["busy_gap_s"].append(max(answer.longest_gap_s for answer in answers))
    return Found(found)


async def prefill(server: Server, turn: int, kit: Kit) -> Found:
    """Short requests while an 8k prompt runs, which is left before its end when it takes long."""
    idle_s = await short(server, kit, f"p{turn}")
    body = _body(server, kit.prompt(f"long{turn}", LONG_PROMPT_TOKENS), 1)
    task = asyncio.create_task(ask(server.base, body))
    found: Values = {"prefill_s": []}
    try:
        chunk_s = await _chunk_s(server, task)
        if chunk_s is None:
            # Sent and taken up: an event would be the server's, and it tells of none.
            await asyncio.wait([task], timeout=max(0.2, 2 * idle_s))
        while not task.done() and len(found["prefill_s"]) < 3:
            seconds = await short(server, kit, f"q{turn}{len(found['prefill_s'])}")
            if not task.done() or not found["prefill_s"]:
                found["prefill_s"].append(seconds)
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not found["prefill_s"]:
        return Found(notes=["the 8k prompt was done before a short request could come"])
    if chunk_s is not None:
        found["chunk_s"] = [chunk_s]
        found["prefill_chunks"] = [seconds / chunk_s for seconds in found["prefill_s"]]
    await short(server, kit, f"r{turn}")  # whatever it still computes for the one that left is over
    return Found(found)


async def _chunk_s(server: Server, task: asyncio.Task[Answer]) -> float | None:
    """Seconds of a chunk of the prompt that runs alone now, by the counters of `/stats`, which
    mlxlite has; None for a server that does not tell, or a prompt that is over too soon."""
    seen: list[tuple[float, int]] = []
    while (count := await _chunks(server)) is not None and not task.done():
        if not seen or count > seen[-1][1]:
            seen.append((time.perf_counter(), count))
            # The first to be seen was there before, the second is as long as it was guessed to be.
            if len(seen) == 5:
                (began, before), (ended, after) = seen[2], seen[4]
                return (ended - began) / (after - before)
        await asyncio.sleep(_POLL_S)
    return None


async def _chunks(server: Server) -> int | None:
    """Chunks of prompts that the server has run; None if it is not mlxlite."""
    if server.ready != "/ready":
        return None
    return int((await get(server.base, "/stats", whole=True))["batch"]["prefill_chunks"])


async def seeded(server: Server, turn: int, kit: Kit) -> Found:
    """A seeded request alone and among four streams: how long it and they wait; the same text?"""
    drawn = {"temperature": 0.8, "seed": 7 + turn}
    body = _body(server, "Name three birds and say where they live.", _SEEDED_TOKENS, **drawn)
    alone = await ask(server.base, body)
    async with _Streams(server, 4, _BUSY_TOKENS, f"seeded{turn}") as running:
        await running.begun()
        among = await ask(server.base, body)
        answers = await running.answers()
    gap_s = max(answer.longest_gap_s for answer in answers)
    found = Found({"seeded_s": [among.ttft_s], "seeded_gap_s": [gap_s]})
    if alone.text != among.text:
        found.notes.append(f"seed {drawn['seed']}: another text among four streams than alone")
    return found


async def fanout(server: Server, turn: int, kit: Kit) -> Found:
    """Eight at once with one long system prompt that nobody has seen."""
    system = {"role": "system", "content": kit.prompt(f"fan{turn}", PROMPT_TOKENS)}
    bodies = [_body(server, f"Tell me of {what}.", _FAN_TOKENS) for what in _SUBJECTS[:_FAN]]
    for body in bodies:
        body["messages"].insert(0, system)
    answers = await asyncio.gather(*(ask(server.base, body) for body in bodies))
    return Found({"fanout_s": [max(answer.ttft_s for answer in answers)]})


LEGS: tuple[Leg, ...] = (
    Leg("start", start, 3, owns=True),
    Leg("prompt", prompt, 3),
    Leg("decode", decode, 5),
    Leg("streams1", streams(1, _STREAM_TOKENS), 3),
    Leg("streams4", streams(4, _STREAM_TOKENS), 3),
    Leg("streams16", streams(16, _CROWD_TOKENS), 3),
    Leg("busy", busy, 3),
    Leg("prefill", prefill, 1, 4096),  # two chunks of mlx_lm's
    Leg("seeded", seeded, 2),
    Leg("fanout", fanout, 2, _FAN * PROMPT_TOKENS),
    Leg("restart", restart, 2, 2 * PROMPT_TOKENS, owns=True),
)
INSIDE = "inside"  # the leg that needs no server: see `inner`
GRAMMAR = "grammar"  # neither does this one: see `forms`
NAMES = (*(leg.name for leg in LEGS), INSIDE, GRAMMAR)
