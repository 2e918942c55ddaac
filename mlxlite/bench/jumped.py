"""What jump-forward saves in a compact object of ten keys: decode steps and time, with the same ids
(spec 40 section 6, decision D7; floor 4).

One engine, two preparations, in turns; greedy.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from mlxlite import app, launch
from mlxlite.bench import filled
from mlxlite.config import Settings
from mlxlite.models import library
from mlxlite.types import JSON, Ask, Constraint

_KEYS = (
    "name", "age", "city", "country", "occupation", "email", "phone", "language", "currency",
    "timezone",
)  # fmt: skip
_TEXT: JSON = {"type": "string", "maxLength": 16}
_PERSON: JSON = {
    "type": "object",
    "properties": {key: {"type": "integer"} if key == "age" else _TEXT for key in _KEYS},
    "required": list(_KEYS),
    "additionalProperties": False,
}
_TOKENS = 300
_TURNS = 3


@dataclass(frozen=True, slots=True)
class Found:
    """steps, seconds: without jumping and with it; medians."""

    steps: tuple[int, int]
    seconds: tuple[float, float]
    is_same: bool

    @property
    def steps_saved(self) -> float:
        return 1 - self.steps[1] / self.steps[0]

    @property
    def time_share(self) -> float:
        return self.seconds[1] / self.seconds[0]

    def __str__(self) -> str:
        return (
            f"an object of ten keys: {self.steps[0]} decode steps, {self.steps[1]} with jumps "
            f"({self.steps_saved:.0%} fewer), {self.time_share:.2f} of the time, ids "
            f"{'the same' if self.is_same else 'NOT the same'}"
        )


def measure(settings: Settings, model: library.LocalModel) -> Found:
    """Ask one engine for the object, with jumps and without."""
    worker = launch.start_engine(settings, model)
    try:
        prepares = [
            app.open_model(replace(settings, grammar_jump=jump), worker) for jump in ("off", "on")
        ]
        ask = Ask(
            messages=({"role": "user", "content": "Describe a person as JSON."},),
            max_tokens=_TOKENS,
            temperature=0.0,
            constraint=Constraint("json", _PERSON, "response_format", "response_format"),
        )
        seconds: tuple[list[float], list[float]] = ([], [])
        answers = []
        for turn in range(_TURNS + 1):
            for place, prepare in enumerate(prepares):
                answers.append(filled.answer(worker, prepare, ask))
                if turn:  # the first one compiles, and fills the prompt cache
                    seconds[place].append(answers[-1].seconds)
        plain, jumped = answers[-2:]
        return Found(
            (plain.steps, jumped.steps),
            (statistics.median(seconds[0]), statistics.median(seconds[1])),
            all(answer.ids == plain.ids for answer in answers),
        )
    finally:
        worker.stop()
