"""Figures that need the engine in this process: what the server and the schedule cost (floor 4).

Percentages are medians of interleaved pairs (decision D25): a few steps one way, a few the other,
on the same rows. The prefix tree is measured with payloads that hold nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from mlxlite.bench import cost, crowd, filled, jumped
from mlxlite.config import Settings
from mlxlite.engine.jobs import Jobs
from mlxlite.engine.loop import Counters, Loop, WorkerOptions
from mlxlite.engine.prefix import PrefixTree
from mlxlite.engine.row import Phase, Row
from mlxlite.launch import dense_folder
from mlxlite.models import library
from mlxlite.types import Event, RowSpec, Sampling, TokenLogprob

_TREE_TOKENS, _TREE_ENTRIES, _TREE_TURNS = 40_000, 100, 21
_TAX_TURNS, _TAX_TOKENS = 12, 32
_ROWS, _PAIRS, _STEPS = 16, 24, 4
_WARM_UP_STEPS = 8


def measure(
    settings: Settings, model: library.LocalModel, say: Callable[[str], None]
) -> dict[str, float]:
    """All of them, by name; units in the names, shares in percent."""
    found = prefix_ms()
    say(f"inside: prefix tree {found}")
    tax = crowd.measure(settings, model, 1, _TAX_TOKENS, _TAX_TURNS)
    say(f"inside: {tax}")
    found["decode_share"] = 100 * tax.step_share
    found.update(bookkeeping(settings, model))
    calls = filled.measure(settings, model)
    say(f"inside: {calls}")
    found["fill_steps_saved"] = 100 * calls.share if calls.is_same else 0.0
    found["fill_time_share"] = calls.time_share
    jumps = jumped.measure(settings, model)
    say(f"inside: {jumps}")
    found["jump_steps_saved"] = 100 * jumps.steps_saved if jumps.is_same else 0.0
    found["jump_time_share"] = jumps.time_share
    for surface, seconds in cost.measure(settings, model).items():
        found[f"{surface}_us_a_token"] = seconds * 1e6
    return {name: round(value, 4) for name, value in found.items()}


# ----------------------------------------------------------------------------- the prefix tree


@dataclass(frozen=True, slots=True)
class _Nothing:
    """A span of so many tokens that holds no memory."""

    tokens: int
    nbytes: int = 1
    buffers: int = 1

    def split(self, at: int) -> tuple[_Nothing, _Nothing]:
        return _Nothing(at), _Nothing(self.tokens - at)


def prefix_ms() -> dict[str, float]:
    """Look up and insert prompts of 40k tokens among 100 of that length, which begin alike in steps
    of 400 tokens: each lookup runs through many nodes, each insert cuts one."""
    draws = random.Random(7)

    def ids(shared: int) -> Sequence[int]:
        return tuple(base[:shared]) + tuple(draws.choices(range(150_000), k=len(base) - shared))

    base = draws.choices(range(150_000), k=_TREE_TOKENS)
    tree = PrefixTree(1 << 40, 1 << 30, cut_anywhere=True)
    for entry in range(_TREE_ENTRIES):
        tree.insert(ids(entry * _TREE_TOKENS // _TREE_ENTRIES), lambda a, b: _Nothing(b - a))
    lookups, inserts = [], []
    for turn in range(_TREE_TURNS):
        asked = ids(_TREE_TOKENS - 100 - turn)
        began = time.perf_counter()
        match = tree.match(asked, len(asked) - 1)
        lookups.append(time.perf_counter() - began)
        assert match is not None and match.length > _TREE_TOKENS // 2
        began = time.perf_counter()
        tree.insert(asked, lambda a, b: _Nothing(b - a))
        inserts.append(time.perf_counter() - began)
    return {
        "lookup_ms": statistics.median(lookups) * 1000,
        "insert_ms": statistics.median(inserts) * 1000,
    }


# --------------------------------------------------------------------------------- bookkeeping


def bookkeeping(settings: Settings, model: library.LocalModel) -> dict[str, float]:
    """What a decode step of 16 rows costs beyond forward and draw: the loop's whole step beside the
    batch's step alone, on the same rows, in turns of four steps.

    bookkeeping_share: median of the pairs, percent. bookkeeping_ms: the same by another way, host
    time of a step outside the batch's."""
    loop = Loop(
        WorkerOptions(
            folder=model.folder,
            dense_folder=dense_folder(settings, model.folder),
            kernel_folder=settings.home / "kernels",
            dtype=settings.dtype,
            max_rows=_ROWS,
        ),
        Counters(),
        Jobs(_ROWS),
        lambda row: None,
    )
    facts = loop.open()
    batch = loop.batch
    assert batch is not None
    try:
        events: SimpleQueue[Event] = SimpleQueue()
        draws = random.Random(7)
        for row_id in range(_ROWS):
            ids = tuple(draws.choices(range(3, min(facts.vocab_size, 1000)), k=24))
            limit = _WARM_UP_STEPS + 4 * _PAIRS * _STEPS
            spec = RowSpec(
                prompt_ids=ids, max_tokens=limit, sampling=Sampling(), eos_ids=frozenset()
            )
            loop.submit(Row(row_id, spec, events.put))
        while not (
            loop.scheduler.live and all(r.phase is Phase.DECODE for r in loop.scheduler.live)
        ):
            loop.advance()
        for _ in range(_WARM_UP_STEPS):
            loop.advance()
        rows = list(loop.scheduler.live)

        def take(row: Row, token: int, logprob: TokenLogprob | None) -> None:
            row.ids.append(token)
            row.accepted += 1

        clock = _Clock(batch.step)
        shares, outside = [], []
        for _ in range(_PAIRS):
            whole_s = [_seconds(loop.advance) for _ in range(_STEPS)]
            bare_s = [_seconds(lambda: batch.step(rows, take)) for _ in range(_STEPS)]
            shares.append(1 - statistics.median(bare_s) / statistics.median(whole_s))
        batch.step = clock  # type: ignore[method-assign]  # from here on its time is told apart
        for _ in range(_STEPS):
            outside.append(_seconds(loop.advance) - clock.last_s)
    finally:
        batch.drop_all()
        loop.close()
    return {
        "bookkeeping_share": 100 * statistics.median(shares),
        "bookkeeping_ms": statistics.median(outside) * 1000,
    }


class _Clock:
    """A batch's step that tells its own time, less what the loop does with the tokens."""

    def __init__(self, step: Callable[..., None]) -> None:
        self._step = step
        self.last_s = 0.0

    def __call__(self, decode: Sequence[Row], accept: Callable[..., None]) -> None:
        accepting_s = 0.0

        def timed(*token: Any) -> None:
            nonlocal accepting_s
            accepting_s += _seconds(lambda: accept(*token))

        self.last_s = _seconds(lambda: self._step(decode, timed)) - accepting_s


def _seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
