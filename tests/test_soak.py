"""The soak's short form (see `soak.py`): some seconds of random traffic on each kind of cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import KINDS, soak
from tests.soak_traffic import Answer, Plan, Traffic, differs

GREEDY = Plan("/v1/chat/completions", {"temperature": 0})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "little memory"])
def test_soak(tmp_path: Path, kind: str) -> None:
    found = soak(kind, tmp_path, seconds=1, seed=3, is_short=True)
    assert found.faults == [], "\n".join(found.lines())
    assert found.counts["status 200"] > 20 and found.counts["compared"] > 0
    assert found.stats["batch"]["prompt_cache"]["evictions"] > 0


def test_the_same_seed_asks_the_same() -> None:
    first, second, other = Traffic(4), Traffic(4), Traffic(5)
    asked = [first.next() for _ in range(200)]
    assert asked == [second.next() for _ in range(200)]
    assert asked != [other.next() for _ in range(200)]


@pytest.mark.parametrize(
    ("second", "how"),
    [
        (Answer(["ab"], [[(1, -0.1, -2.0), (2, -0.1, -3.0)]]), None),
        (Answer(["ac"], [[(1, -0.1, -2.0), (3, -0.1, -3.0)]]), "other"),
        (Answer(["cb"], [[(3, -0.1, -2.0), (2, -0.1, -3.0)]]), "other"),
        (Answer(["ab"], []), "other"),
    ],
    ids=["same", "second token", "first token", "no tokens"],
)
def test_differs(second: Answer, how: str | None) -> None:
    first = Answer(["ab"], [[(1, -0.1, -2.0), (2, -0.1, -3.0)]])
    assert differs(GREEDY, first, second) == how


def test_a_tie_is_shown_by_its_logprobs() -> None:
    first = Answer(["ab"], [[(1, -0.1, -2.0), (2, -0.7, -0.7001)]])
    second = Answer(["ac"], [[(1, -0.1, -2.0), (3, -0.7, -0.7001)]])
    assert differs(GREEDY, first, second) == "tie"
    drawn = Plan(GREEDY.path, {"temperature": 1.0})
    assert differs(drawn, first, second) == "other"
