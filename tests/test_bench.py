"""The benchmarks' own parts: that they run, and, asked for with `-m bench`, what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxlite import config
from mlxlite.bench import cost, crowd
from mlxlite.config import Settings
from mlxlite.models import library


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    yield config.build({"home": str(tmp_path), "port": "0", "log_level": "error"}, {})


@pytest.fixture
def model(tiny_folder: Path) -> library.LocalModel:
    return library.describe(tiny_folder, "tiny")


@pytest.mark.slow
def test_a_crowd_runs(settings: Settings, model: library.LocalModel) -> None:
    found = crowd.measure(settings, model, rows=3, tokens=8, turns=1)
    assert found.rows == 3 and min(*found.step_s, *found.rate) > 0
    assert "3 streams: decode step " in str(found)


@pytest.mark.slow
def test_every_surface_has_a_cost(settings: Settings, model: library.LocalModel) -> None:
    found = cost.measure(settings, model, rows=2, tokens=20)
    assert set(found) == set(cost.SURFACES) and min(found.values()) > 0


@pytest.mark.bench
def test_a_token_costs_little(settings: Settings, model: library.LocalModel) -> None:
    """Issue 4: under 60 µs from event to socket."""
    found = {name: round(s * 1e6, 1) for name, s in cost.measure(settings, model).items()}
    print(f"\nCPU time from event to socket, µs a token: {found}")
    assert found["chat"] < 60


@pytest.mark.bench
def test_sixty_four_streams(settings: Settings, model: library.LocalModel) -> None:
    """Issue 4: on the tiny model, whose steps cost nothing, HTTP leaves 60 % of the rate."""
    found = crowd.measure(replace(settings, batch=64), model, rows=64, tokens=64, turns=5)
    print(f"\n{found}")
    assert found.rate_share >= 0.6
