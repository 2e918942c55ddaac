"""What the measured values say: medians, spread, ratios, and whether the targets are met (floor 4).

Pure: values in, figures out. Every leg gives values of metrics, by server; `METRICS` says what each
is and which way is better, `TARGETS` what issue 5 asks of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Metric:
    """title: of its row in the table. digits: shown after the point. scale: of shown values."""

    title: str
    digits: int
    more_is_better: bool = False
    scale: float = 1.0


METRICS: dict[str, Metric] = {
    "ready_s": Metric("start to ready (s)", 2),
    "first_s": Metric("start to first token (s)", 2),
    "cold_s": Metric("1k prompt, cold: first token (s)", 3),
    "cached_s": Metric("1k prompt, again: first token (s)", 3),
    "decode_tps": Metric("decode, one stream (tok/s)", 1, True),
    "streams1_tps": Metric("1 stream, prompt included (tok/s)", 1, True),
    "streams4_tps": Metric("4 streams (tok/s)", 1, True),
    "streams16_tps": Metric("16 streams (tok/s)", 1, True),
    "idle_s": Metric("short request, idle: first token (s)", 3),
    "busy_s": Metric("short request while 4 streams decode (s)", 3),
    "busy_gap_s": Metric("longest pause of those streams (s)", 3),
    "prefill_s": Metric("short request while an 8k prompt prefills (s)", 3),
    "prefill_chunks": Metric("the same in chunks of that prompt", 2),
    "seeded_s": Metric("seeded request among 4 streams: first token (s)", 3),
    "seeded_gap_s": Metric("longest pause of those streams (s)", 3),
    "fanout_s": Metric("8 requests, one 1k system prompt: all begun (s)", 2),
    "again_ready_s": Metric("killed, started again: ready (s)", 2),
    "again_first_s": Metric("killed, started again: first token of its 1k prompt (s)", 2),
    "peak_bytes": Metric("peak memory (MB)", 0, scale=1e-6),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of one metric on one server."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half of the way from the smallest to the largest value, as a share of the median."""
        if not self.median:
            return 0.0
        return (max(self.values) - min(self.values)) / 2 / abs(self.median)


@dataclass(slots=True)
class Results:
    """servers: names, ours first. samples: by metric, then by server. texts: what each server said
    to the same greedy request. inside: figures of one process, see `inner`."""

    servers: list[str]
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    texts: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    inside: dict[str, float] = field(default_factory=dict)

    def add(self, server: str, values: Mapping[str, Sequence[float]]) -> None:
        for metric, found in values.items():
            self.samples.setdefault(metric, {}).setdefault(server, []).extend(found)

    def say(self, server: str, texts: Mapping[str, str]) -> None:
        for request, text in texts.items():
            self.texts.setdefault(request, {})[server] = text

    def sample(self, metric: str, server: str) -> Sample | None:
        values = self.samples.get(metric, {}).get(server)
        return Sample(tuple(values)) if values else None

    def median(self, metric: str, server: str) -> float | None:
        found = self.sample(metric, server)
        return None if found is None else found.median

    @property
    def own(self) -> str:
        return self.servers[0]


def advantage(metric: Metric, own: float, other: float) -> float | None:
    """How many times better `own` is; None where that means nothing."""
    better, worse = (other, own) if metric.more_is_better else (own, other)
    return worse / better if better > 0 else None


# ------------------------------------------------------------------------------- differences


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy answers part: after `at` characters of equal text."""

    request: str
    server: str
    at: int
    own: str
    other: str


def differences(results: Results) -> tuple[int, list[Difference]]:
    """How many answers of others were compared with ours, and those that differ."""
    compared, found = 0, []
    for request, said in results.texts.items():
        for server in results.servers[1:]:
            if results.own not in said or server not in said:
                continue
            compared += 1
            # mlx_lm drops the space that an answer begins with; that is known, and no difference.
            own, other = said[results.own].lstrip(" "), said[server].lstrip(" ")
            # One may have been cut by a limit that counts otherwise; what both said counts.
            length = min(len(own), len(other))
            if own[:length] != other[:length]:
                at = next(n for n in range(length) if own[n] != other[n])
                cut = slice(max(at - 20, 0), at + 20)
                found.append(Difference(request, server, at, own[cut], other[cut]))
    return compared, found


# ----------------------------------------------------------------------------------- targets


@dataclass(frozen=True, slots=True)
class Verdict:
    """found: None where it was not measured. at_least: else the target is a most."""

    claim: str
    found: float | None
    target: float
    at_least: bool
    unit: str = "×"

    @property
    def passed(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.target if self.at_least else self.found <= self.target


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def judge(
    results: Results, peer: str | None, same_blas: str | None, blas: str | None
) -> list[Verdict]:
    """The figures of issue 5. peer: mlx_lm.server as pip installs it; same_blas: the same with the
    BLAS that mlxlite uses; blas: that one's name."""

    def own(metric: str) -> float | None:
        return results.median(metric, results.own)

    def beside(metric: str, server: str | None, turn: bool = False) -> float | None:
        other = None if server is None else results.median(metric, server)
        return _ratio(other, own(metric)) if turn else _ratio(own(metric), other)

    found: list[Verdict] = []
    for metric, count, least in (("streams4_tps", "4", 2.0), ("streams16_tps", "16", 2.5)):
        if peer is not None:
            claim = f"{count} streams: rate to {peer}'s"
            found.append(Verdict(claim, beside(metric, peer), least, True))
        if same_blas is not None:
            claim = f"{count} streams: rate to {same_blas}'s"
            found.append(Verdict(claim, beside(metric, same_blas), 1.2, True))
    slow_blas = blas is not None and "mkl" not in blas
    claim = "4 streams: rate to our own single stream's"
    ratio = _ratio(own("streams4_tps"), own("streams1_tps"))
    found.append(Verdict(claim, ratio, 2.5 if slow_blas else 1.9, True))
    claim = "cached 1k prompt: first token to cold"
    found.append(Verdict(claim, _ratio(own("cached_s"), own("cold_s")), 0.10, False))
    for server in (peer, same_blas):
        if server is not None:
            claim = f"cached 1k prompt: first token to {server}'s"
            found.append(Verdict(claim, beside("cached_s", server), 0.5, False))
    claim = "short request while 4 streams decode: first token to idle"
    found.append(Verdict(claim, _ratio(own("busy_s"), own("idle_s")), 2.0, False))
    claim = "short request while an 8k prompt prefills: first token"
    found.append(Verdict(claim, own("prefill_chunks"), 2.0, False, " chunks"))
    for claim, name, target, at_least, unit in INSIDE:
        found.append(Verdict(claim, results.inside.get(name), target, at_least, unit))
    return found


# Claim, its name among the figures of `inner`, target, whether that is a least, unit.
INSIDE: tuple[tuple[str, str, float, bool, str], ...] = (
    ("lookup of a 40k-token prompt among 100 entries", "lookup_ms", 2.0, False, " ms"),
    ("insert of one", "insert_ms", 2.0, False, " ms"),
    ("decode step through the server to the bare loop's", "decode_share", 97.0, True, " %"),
    ("scheduler and bookkeeping at 16 rows", "bookkeeping_share", 3.0, False, " % of a step"),
    ("an object of ten keys: decode steps saved by jumps", "jump_steps_saved", 20.0, True, " %"),
    ("the same: time to that without jumps", "jump_time_share", 0.95, False, "×"),
    ("two calls in a turn: decode steps saved by fill", "fill_steps_saved", 35.0, True, " %"),
    ("the same: time to that without fill", "fill_time_share", 0.9, False, "×"),
    ("a step with a grammar over one without", "grammar_step_cost", 2.0, False, " %"),
    ("compile of a schema of 40 fields", "grammar_compile_ms", 50.0, False, " ms"),
    ("16 rows with a grammar: rate to 16 without", "grammar_rate16", 90.0, True, " %"),
)
