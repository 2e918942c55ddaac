"""Counters and histograms of answers, as Prometheus reads them (floor 2, decision D14).

Pure: fed by `stream` at the end of each row with the same record that its log line shows, rendered
as text when somebody asks. Gauges are not kept here; whoever renders passes what is true now.
Owned by the event loop.

    # HELP mlxlite_answers_total Answers that ended.
    # TYPE mlxlite_answers_total counter
    mlxlite_answers_total{surface="chat",outcome="eos"} 3
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxlite.recent import Recent
from mlxlite.types import Done

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds. A first token takes from milliseconds (a short prompt on a GPU) to minutes (a long one on
# a CPU); the time between two tokens a tenth of that.
_TO_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


@dataclass(slots=True)
class Histogram:
    """bounds: upper limits of the buckets, rising; what is above the last is in `count` alone."""

    name: str
    doc: str
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)  # one a bound, not cumulative
    count: int = 0
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.bounds)

    def observe(self, value: float, times: int = 1) -> None:
        place = bisect_left(self.bounds, value)
        if place < len(self.counts):
            self.counts[place] += times
        self.count += times
        self.total += value * times

    def lines(self) -> list[str]:
        found = _head(self.name, "histogram", self.doc)
        so_far = 0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            so_far += count
            found.append(f'{self.name}_bucket{{le="{bound:g}"}} {so_far}')
        found.append(f'{self.name}_bucket{{le="+Inf"}} {self.count}')
        return [*found, f"{self.name}_sum {_number(self.total)}", f"{self.name}_count {self.count}"]


@dataclass(frozen=True, slots=True)
class Family:
    """Numbers of one name. rows: (labels, value)."""

    name: str
    kind: str  # counter | gauge
    doc: str
    rows: Sequence[tuple[Mapping[str, str], float]]

    def lines(self) -> list[str]:
        found = _head(self.name, self.kind, self.doc)
        for labels, value in self.rows:
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            found.append(f"{self.name}{'{' + pairs + '}' if pairs else ''} {_number(value)}")
        return found


class Metrics:
    """What has ended so far. recent: the last of it, one by one."""

    def __init__(self) -> None:
        self.recent = Recent()
        self._answers: dict[tuple[str, str], int] = {}
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._embedded_inputs = 0
        self._embedded_tokens = 0
        self._queued = Histogram(
            "mlxlite_queue_wait_seconds", "From the request to its first prefill.", _TO_FIRST_S
        )
        self._first = Histogram(
            "mlxlite_time_to_first_token_seconds", "From the request to its first token.",
            _TO_FIRST_S,
        )  # fmt: skip
        self._between = Histogram(
            "mlxlite_inter_token_seconds",
            "Between tokens: the mean of an answer, counted once for each of its gaps.",
            _BETWEEN_S,
        )

    def ended(self, surface: str, done: Done | None) -> None:
        """An answer ended; None: its client left before."""
        outcome = "left" if done is None else done.finish.value
        outcome = "stop" if outcome == "guide" else outcome  # as the log has it
        key = (surface, outcome)
        self._answers[key] = self._answers.get(key, 0) + 1
        if done is None:
            return
        self._prompt_tokens += done.prompt_tokens
        self._cached_tokens += done.cached_tokens
        self._generated_tokens += done.generated_tokens
        self._queued.observe(done.queued_s)
        if done.generated_tokens > 0:
            self._first.observe(done.queued_s + done.prefill_s)
        if (gaps := done.generated_tokens - 1) > 0:
            self._between.observe(done.decode_s / gaps, gaps)

    def embedded(self, surface: str, outcome: str, inputs: int, tokens: int) -> None:
        """A request for vectors or scores ended: done, error or left. tokens: as the model saw
        them, if it did."""
        key = (surface, outcome)
        self._answers[key] = self._answers.get(key, 0) + 1
        self._embedded_inputs += inputs
        self._embedded_tokens += tokens

    def render(self, now: Sequence[Family]) -> str:
        """All of it in the text format 0.0.4, followed by the families of the moment."""
        answers = [
            ({"surface": surface, "outcome": outcome}, float(count))
            for (surface, outcome), count in sorted(self._answers.items())
        ]
        families: list[Family | Histogram] = [
            Family("mlxlite_answers_total", "counter", "Answers that ended.", answers),
            single("mlxlite_prompt_tokens_total", "counter", "Of ended answers, cached ones too.",
                   self._prompt_tokens),
            single("mlxlite_cached_tokens_total", "counter", "Prompt tokens that were restored.",
                   self._cached_tokens),
            single("mlxlite_generated_tokens_total", "counter", "Of ended answers.",
                   self._generated_tokens),
            single("mlxlite_embedded_inputs_total", "counter", "Texts embedded or judged.",
                   self._embedded_inputs),
            single("mlxlite_embedded_tokens_total", "counter", "Of these texts.",
                   self._embedded_tokens),
            self._queued,
            self._first,
            self._between,
            *now,
        ]  # fmt: skip
        return "\n".join(line for family in families for line in family.lines()) + "\n"


def single(name: str, kind: str, doc: str, value: float) -> Family:
    """One number without labels."""
    return Family(name, kind, doc, [({}, value)])


def _head(name: str, kind: str, doc: str) -> list[str]:
    return [f"# HELP {name} {doc}", f"# TYPE {name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) else repr(value)
