"""A run as Markdown and as JSON (floor 4). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxlite.bench.figures import METRICS, Difference, Results, Verdict, advantage

_SHOWN_DIFFERENCES = 6
_MARKS = {True: "pass", False: "FAIL", None: "not measured"}


def table(results: Results) -> str:
    """A row a metric. Medians with their spread, and in brackets how many times better ours is."""
    names = results.servers
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, metric in METRICS.items():
        if name not in results.samples:
            continue
        own = results.median(name, results.own)
        cells = [metric.title]
        for server in names:
            sample = results.sample(name, server)
            if sample is None:
                cells.append("–")
                continue
            cell = f"{sample.median * metric.scale:.{metric.digits}f}"
            if len(sample.values) > 1:
                cell += f" ±{sample.spread:.0%}"
            if server != results.own and own is not None:
                times = advantage(metric, own, sample.median)
                cell += "" if times is None else f" ({times:.{0 if times >= 100 else 2}f}×)"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(found: Sequence[Verdict]) -> str:
    """A line a target: what it is, what came out, whether that passes."""
    lines = []
    for verdict in found:
        wanted = f"{'≥' if verdict.at_least else '≤'} {verdict.target:g}{verdict.unit}"
        value = "" if verdict.found is None else f" {verdict.found:.3g}{verdict.unit}"
        lines.append(f"- {_MARKS[verdict.passed]}: {verdict.claim}:{value} (target {wanted})")
    return "\n".join(lines)


def equality(compared: int, found: Sequence[Difference]) -> str:
    """What the comparison of greedy answers says."""
    if not compared:
        return "No greedy answers were compared."
    lines = [f"Greedy answers: {compared - len(found)} of {compared} equal to ours."]
    for one in found[:_SHOWN_DIFFERENCES]:
        lines.append(
            f"- {one.request}, {one.server}: from character {one.at} on: "
            f"ours {one.own!r}, theirs {one.other!r}"
        )
    if len(found) > _SHOWN_DIFFERENCES:
        lines.append(f"- and {len(found) - _SHOWN_DIFFERENCES} more (in the JSON)")
    return "\n".join(lines)


def as_json(
    results: Results,
    about: dict[str, Any],
    judged: Sequence[Verdict],
    compared: int,
    differ: Sequence[Difference],
) -> dict[str, Any]:
    """Everything: each value as measured, units in the names."""
    metrics: dict[str, Any] = {}
    for name in results.samples:
        metrics[name] = {}
        for server in results.servers:
            sample = results.sample(name, server)
            if sample is not None:
                metrics[name][server] = {
                    "median": sample.median,
                    "spread": sample.spread,
                    "values": list(sample.values),
                }
    return {
        **about,
        "metrics": metrics,
        "inside": results.inside,
        "targets": [
            {
                "claim": one.claim,
                "found": one.found,
                "target": one.target,
                "at_least": one.at_least,
                "unit": one.unit.strip(),
                "passed": one.passed,
            }
            for one in judged
        ],
        "greedy": {
            "compared": compared,
            "differences": [
                {
                    "request": one.request,
                    "server": one.server,
                    "at": one.at,
                    "own": one.own,
                    "other": one.other,
                }
                for one in differ
            ],
        },
        "notes": results.notes,
    }
