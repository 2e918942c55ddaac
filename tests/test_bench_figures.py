"""What the benchmark says of its values: medians, ratios, differences, targets, tables, JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxlite.bench import report
from mlxlite.bench.figures import (
    METRICS,
    Metric,
    Results,
    Sample,
    Verdict,
    advantage,
    differences,
    judge,
)

OURS, PEER, BLAS = "ours", "peer", "peer+blas"
UP, DOWN = Metric("rate", 1, more_is_better=True), Metric("time", 1)


@pytest.mark.parametrize(("values", "median", "spread"), [
    ((3.0,), 3.0, 0.0),
    ((4.0, 2.0), 3.0, 1 / 3),
    ((9.0, 1.0, 2.0), 2.0, 2.0),
    ((0.0, 0.0), 0.0, 0.0),
])  # fmt: skip
def test_samples(values: tuple[float, ...], median: float, spread: float) -> None:
    assert (Sample(values).median, Sample(values).spread) == (median, pytest.approx(spread))


@pytest.mark.parametrize(("metric", "own", "other", "times"), [
    (UP, 10.0, 5.0, 2.0),
    (UP, 5.0, 10.0, 0.5),
    (DOWN, 1.0, 4.0, 4.0),
    (DOWN, 4.0, 1.0, 0.25),
    (DOWN, 0.0, 1.0, None),
    (UP, 1.0, 0.0, None),
])  # fmt: skip
def test_above_one_is_better(metric: Metric, own: float, other: float, times: float | None) -> None:
    assert advantage(metric, own, other) == times


def filled() -> Results:
    results = Results([OURS, PEER, BLAS])
    for server, values in {
        OURS: {"cold_s": [1.0, 1.2, 0.8], "cached_s": [0.05], "streams4_tps": [40.0]},
        PEER: {"cold_s": [150.0], "cached_s": [0.2], "streams4_tps": [10.0]},
        BLAS: {"streams4_tps": [40.0]},
    }.items():
        results.add(server, values)
    results.add(OURS, {"streams1_tps": [20.0], "idle_s": [0.1], "busy_s": [0.15, 0.25, 0.35]})
    results.add(OURS, {"prefill_chunks": [1.5], "peak_bytes": [7e8]})
    results.inside = {"lookup_ms": 0.1, "decode_share": 96.0}
    return results


def test_values_add_up() -> None:
    results = filled()
    results.add(PEER, {"cold_s": [50.0]})
    assert results.samples["cold_s"][PEER] == [150.0, 50.0]
    assert results.median("cold_s", PEER) == 100.0
    assert results.median("cold_s", BLAS) is None and results.median("none", OURS) is None


def passed(results: Results, *servers: Any) -> dict[str, bool | None]:
    return {verdict.claim: verdict.passed for verdict in judge(results, *servers)}


def test_targets() -> None:
    assert passed(filled(), PEER, BLAS, "libmkl_rt.so.2") == {
        "4 streams: rate to peer's": True,
        "4 streams: rate to peer+blas's": False,  # 1.0 of 1.2
        "16 streams: rate to peer's": None,
        "16 streams: rate to peer+blas's": None,
        "4 streams: rate to our own single stream's": True,
        "cached 1k prompt: first token to cold": True,
        "cached 1k prompt: first token to peer's": True,
        "cached 1k prompt: first token to peer+blas's": None,
        "short request while 4 streams decode: first token to idle": False,  # 2.5 of 2
        "short request while an 8k prompt prefills: first token": True,
        "lookup of a 40k-token prompt among 100 entries": True,
        "insert of one": None,
        "decode step through the server to the bare loop's": False,
        "scheduler and bookkeeping at 16 rows": None,
        "two calls in a turn: decode steps saved by fill": None,
        "an object of ten keys: decode steps saved by jumps": None,
        "the same: time to that without jumps": None,
        "the same: time to that without fill": None,
        "a step with a grammar over one without": None,
        "compile of a schema of 40 fields": None,
        "16 rows with a grammar: rate to 16 without": None,
    }


def test_targets_know_the_blas_and_who_is_there() -> None:
    claim = "4 streams: rate to our own single stream's"
    assert passed(filled(), None, None, "libopenblas.so.0")[claim] is False  # 2.0 of 2.5
    assert passed(filled(), None, None, None)[claim] is True
    assert not any("peer" in claim for claim in passed(filled(), None, None, None))


def test_differences_have_a_place() -> None:
    results = Results([OURS, PEER])
    for request, own, other in (
        ("same", "abc", "abc"),
        ("cut", "abc", "ab"),
        ("space", " abc", "abc"),
        ("other", "abcdef", "abXdef"),
    ):
        results.say(OURS, {request: own})
        results.say(PEER, {request: other})
    results.say(PEER, {"alone": "x"})
    compared, found = differences(results)
    assert compared == 4
    assert [(one.request, one.at, one.own, one.other) for one in found] == [
        ("other", 2, "abcdef", "abXdef")
    ]
    shown = report.equality(compared, found)
    assert "3 of 4 equal" in shown and "from character 2 on" in shown
    assert "No greedy answers" in report.equality(0, [])


def test_table() -> None:
    lines = report.table(filled()).splitlines()
    assert lines[:2] == ["| | ours | peer | peer+blas |", "|---|---|---|---|"]
    found = {line.split(" | ")[0].strip("| "): line for line in lines[2:]}
    assert set(found) == {METRICS[name].title for name in filled().samples}
    assert found[METRICS["cold_s"].title].endswith("| 1.000 ±20% | 150.000 (150×) | – |")
    assert found[METRICS["streams4_tps"].title].endswith("| 40.0 | 10.0 (4.00×) | 40.0 (1.00×) |")
    assert found[METRICS["peak_bytes"].title].endswith("| 700 | – | – |")


@pytest.mark.parametrize(("verdict", "line"), [
    (Verdict("a", 2.0, 2.0, True), "- pass: a: 2× (target ≥ 2×)"),
    (Verdict("a", 1.99, 2.0, True), "- FAIL: a: 1.99× (target ≥ 2×)"),
    (Verdict("a", 2.5, 2.0, False, " ms"), "- FAIL: a: 2.5 ms (target ≤ 2 ms)"),
    (Verdict("a", None, 2.0, False), "- not measured: a: (target ≤ 2×)"),
], ids=["met", "missed", "too much", "absent"])  # fmt: skip
def test_verdicts(verdict: Verdict, line: str) -> None:
    assert report.verdicts([verdict]) == line


def test_json_holds_every_value() -> None:
    results = filled()
    results.notes.append("peer: slow")
    judged = judge(results, PEER, BLAS, None)
    found = report.as_json(results, {"when": "now"}, judged, *differences(results))
    assert json.loads(json.dumps(found)) == found
    assert found["when"] == "now" and found["notes"] == ["peer: slow"]
    assert found["metrics"]["cold_s"][OURS]["values"] == [1.0, 1.2, 0.8]
    assert [target["passed"] for target in found["targets"]] == [one.passed for one in judged]
