"""Rows run by the engine alone, and the same rows as streams over HTTP (decision D25).

In turns, in one process. Two clocks: the engine's own, of its decode steps, and the wall, from the
first row given to the last token seen, which counts the way in and out too.
"""

from __future__ import annotations

import queue
import statistics
import time
from dataclasses import dataclass

from mlxlite import app, launch
from mlxlite.bench.inside import serving
from mlxlite.config import Settings
from mlxlite.models import library
from mlxlite.types import Ask, Event

_PROMPT = "Write a long story about a lighthouse keeper and the sea."


@dataclass(frozen=True, slots=True)
class Shares:
    """step_s: a decode step alone and through HTTP. rate: tokens a second, likewise. All medians
    of the turns; a share is what HTTP leaves of it."""

    rows: int
    step_s: tuple[float, float]
    rate: tuple[float, float]

    @property
    def step_share(self) -> float:
        return self.step_s[0] / self.step_s[1]

    @property
    def rate_share(self) -> float:
        return self.rate[1] / self.rate[0]

    def __str__(self) -> str:
        alone, served = (each * 1000 for each in self.step_s)
        return (
            f"{self.rows} streams: decode step {alone:.2f} ms alone, {served:.2f} ms through HTTP "
            f"({self.step_share:.1%}); {self.rate[0]:.0f} tok/s alone, {self.rate[1]:.0f} through "
            f"HTTP ({self.rate_share:.1%})"
        )


def measure(
    settings: Settings, model: library.LocalModel, rows: int, tokens: int, turns: int
) -> Shares:
    """Run `rows` rows of `tokens` tokens alone and as chat streams, `turns` times each."""
    worker = launch.start_engine(settings, model)
    prepare = app.open_model(settings, worker)
    banned = {str(token): -100 for token in prepare.tokenizer.eos_ids}  # all rows run to the limit
    body = {
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": tokens,
        "temperature": 0,
        "logit_bias": banned,
        "stream": True,
    }
    ask = Ask(
        messages=({"role": "user", "content": _PROMPT},),
        max_tokens=tokens,
        temperature=0.0,
        logit_bias=tuple((int(token), bias) for token, bias in banned.items()),
    )
    steps: tuple[list[float], list[float]] = ([], [])
    rates: tuple[list[float], list[float]] = ([], [])
    with serving(settings, model.name, worker) as server:
        for turn in range(turns + 1):
            worker.take_step_times()
            specs = [prepare(ask).spec for _ in range(rows)]
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            started = time.perf_counter()
            for spec in specs:
                worker.submit(spec, events.put)
            ended = 0
            while ended < rows:
                ended += events.get().done is not None
            alone_s = time.perf_counter() - started
            alone_steps = worker.take_step_times()
            server.ask([("/v1/chat/completions", body)] * rows)
            served_s = server.wait()
            served_steps = worker.take_step_times()
            if turn:  # the first turn warms up
                for place, seconds, found in (
                    (0, alone_s, alone_steps),
                    (1, served_s, served_steps),
                ):
                    rates[place].append(rows * tokens / seconds)
                    steps[place].append(statistics.median(found))
    worker.stop()
    return Shares(
        rows,
        (statistics.median(steps[0]), statistics.median(steps[1])),
        (statistics.median(rates[0]), statistics.median(rates[1])),
    )
