"""What a form of the answer costs: a step, a compile, sixteen rows (floor 4; decision D7).

Constrained and free rows run in turns on one engine, so that both see the same noise (decision
D25); the cost of a step is told by the engine's own clock. The schema is a list without an end, so
that all rows run to their limit.
"""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from mlxlite import app, launch
from mlxlite.config import Settings
from mlxlite.engine.worker import Worker
from mlxlite.models import library
from mlxlite.prepare import Preparation
from mlxlite.types import JSON, Ask, Constraint, Event, RowSpec

_TOKENS, _TURNS, _ROWS = 32, 8, 16
_COMPILES = 9
_FIELDS = 40
_PROMPT = "List short sentences about a lighthouse keeper and the sea, as JSON."
_ENDLESS: JSON = {"type": "array", "minItems": 1000, "items": {"type": "string", "maxLength": 200}}
_KINDS: tuple[JSON, ...] = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "string"}},
    {"anyOf": [{"type": "number"}, {"type": "null"}]},
)


def measure(
    settings: Settings,
    model: library.LocalModel,
    say: Callable[[str], None],
    *,
    turns: int = _TURNS,
    tokens: int = _TOKENS,
) -> dict[str, float]:
    """grammar_vocabulary_ms, grammar_compile_ms: of the first form, and of a schema of 40 fields.
    grammar_step_cost: of a constrained step over a free one, percent. grammar_rate16: tokens a
    second of 16 constrained rows to those of 16 free ones, percent."""
    # Without jumps: a step of several tokens takes longer, and is not what is compared here.
    settings = replace(settings, batch=max(settings.batch, _ROWS), grammar_jump="off")
    worker = launch.start_engine(settings, model)
    try:
        prepare = app.open_model(settings, worker)
        began = time.perf_counter()
        prepare.grammars.open()
        found = {"grammar_vocabulary_ms": (time.perf_counter() - began) * 1000}
        found["grammar_compile_ms"] = statistics.median(
            _compile_s(prepare, n) * 1000 for n in range(_COMPILES)
        )
        for rows in (1, _ROWS):
            step, rate = _shares(worker, prepare, rows, tokens, turns)
            say(f"grammar: {rows} rows: step {100 * step:.1f} %, rate {100 * rate:.1f} % of free")
            if rows == 1:
                found["grammar_step_cost"] = 100 * (step - 1)
            else:
                found["grammar_step_cost16"] = 100 * (step - 1)
                found["grammar_rate16"] = 100 * rate
    finally:
        worker.stop()
    return {name: round(value, 3) for name, value in found.items()}


def _compile_s(prepare: Preparation, salt: int) -> float:
    """Seconds to compile a schema that was not compiled before."""
    fields = {f"field_{n}_{salt}": _KINDS[n % len(_KINDS)] for n in range(_FIELDS)}
    schema: JSON = {"type": "object", "properties": fields, "required": list(fields)}
    began = time.perf_counter()
    prepare.grammars.compile(Constraint("json", schema, "bench", "bench"))
    return time.perf_counter() - began


def _shares(
    worker: Worker, prepare: Preparation, rows: int, tokens: int, turns: int
) -> tuple[float, float]:
    """Constrained to free: time of a step, tokens a second; medians of pairs."""
    steps, rates = list[float](), list[float]()
    for turn in range(turns + 1):
        free, formed = (
            _run(worker, [_spec(prepare, tokens, is_formed) for _ in range(rows)])
            for is_formed in (False, True)
        )
        if turn:  # the first one warms up
            steps.append(formed[0] / free[0])
            rates.append(free[1] / formed[1])
    return statistics.median(steps), statistics.median(rates)


def _spec(prepare: Preparation, tokens: int, is_formed: bool) -> RowSpec:
    ask = Ask(
        messages=({"role": "user", "content": _PROMPT},),
        max_tokens=tokens,
        temperature=0.0,
        logit_bias=tuple((token, -100.0) for token in sorted(prepare.tokenizer.eos_ids)),
        constraint=Constraint("json", _ENDLESS, "bench", "bench") if is_formed else None,
    )
    return prepare(ask, prepare.constrain(ask)).spec


def _run(worker: Worker, specs: list[RowSpec]) -> tuple[float, float]:
    """Seconds of a step by the engine's clock, the median; and of a token, by the wall's."""
    worker.take_step_times()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    began = time.perf_counter()
    for spec in specs:
        worker.submit(spec, events.put)
    ended = count = 0
    while ended < len(specs):
        event = events.get()
        count += len(event.ids)
        ended += event.done is not None
    seconds = time.perf_counter() - began
    return statistics.median(worker.take_step_times()), seconds / count
