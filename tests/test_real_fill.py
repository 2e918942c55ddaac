"""Fill on the real model, greedy: the same ids with and without it, in fewer decode steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxlite import app, config, launch
from mlxlite.bench import filled
from mlxlite.engine.worker import Worker
from mlxlite.models import library
from mlxlite.prepare import Preparation
from mlxlite.types import Ask

pytestmark = pytest.mark.real

HOME = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
MODEL = "smollm2-135m"
CALLS = Ask(
    messages=tuple(filled.conversation()), tools=filled.TOOLS, temperature=0.0, max_tokens=120
)
PROSE = replace(CALLS, messages=({"role": "user", "content": "What is the capital of France?"},))
LIST = "apples, pears, plums, cherries, grapes, figs, dates, limes, melons and peaches"
AGAIN = f"Repeat this sentence word by word: We bought {LIST}."


@pytest.fixture(scope="module")
def settings() -> config.Settings:
    return config.build({"home": str(HOME)}, {})


@pytest.fixture(scope="module")
def worker(settings: config.Settings) -> Iterator[Worker]:
    assert (HOME / "models" / MODEL).is_dir(), f"run `mlxlite get {MODEL}` first"
    worker = launch.start_engine(settings, library.describe(HOME / "models" / MODEL, MODEL))
    yield worker
    worker.stop()


def prepares(settings: config.Settings, worker: Worker, mode: str) -> Preparation:
    return app.open_model(
        replace(settings, fill=mode, chat_template=filled.TEMPLATE, fill_k=4), worker
    )


def both(
    settings: config.Settings, worker: Worker, ask: Ask, mode: str
) -> tuple[filled.Answer, filled.Answer]:
    plain = filled.answer(worker, prepares(settings, worker, "off"), ask)
    return plain, filled.answer(worker, prepares(settings, worker, mode), ask)


@pytest.fixture(scope="module")
def plain(settings: config.Settings, worker: Worker) -> filled.Answer:
    """The turn of two calls, not filled."""
    found = filled.answer(worker, prepares(settings, worker, "off"), CALLS)
    assert found.text.count("<tool_call>") == 2 and found.fill is None
    return found


def test_two_calls(settings: config.Settings, worker: Worker, plain: filled.Answer) -> None:
    strict = filled.answer(worker, prepares(settings, worker, "strict"), CALLS)
    assert strict.ids == plain.ids
    assert strict.fill is not None and strict.fill["events"] == 4
    assert strict.fill["injected"] + strict.fill["decodeSteps"] == len(strict.ids)
    assert strict.steps <= 0.65 * plain.steps


@pytest.mark.parametrize("chunk", [1, 4])
def test_two_calls_in_chunks(
    settings: config.Settings, worker: Worker, plain: filled.Answer, chunk: int
) -> None:
    chunked = replace(settings, fill_append_chunk_size=chunk)
    strict = filled.answer(worker, prepares(chunked, worker, "strict"), CALLS)
    assert strict.ids == plain.ids
    assert strict.fill is not None and strict.fill["events"] == 4
    assert (strict.steps <= 0.65 * plain.steps) is (chunk > 1)


def test_prose(settings: config.Settings, worker: Worker) -> None:
    """A model that calls nothing is not made to."""
    plain, strict = both(settings, worker, PROSE, "strict")
    assert strict.ids == plain.ids and strict.steps <= plain.steps
    assert strict.fill is not None and strict.fill["events"] == 0


def test_echo(settings: config.Settings, worker: Worker) -> None:
    """A sentence that the prompt holds; what the model says otherwise is its own."""
    ask = replace(CALLS, messages=({"role": "user", "content": AGAIN},), max_tokens=60)
    plain, echo = both(settings, worker, ask, "echo")
    assert echo.ids == plain.ids
    assert echo.fill is not None and echo.fill["echo"] > 0 and echo.fill["strict"] == 0
    assert echo.steps < plain.steps


def test_in_a_batch(settings: config.Settings, worker: Worker, plain: filled.Answer) -> None:
    """Filled rows beside an unfilled one say what they say alone (decision D6)."""
    off, strict = (prepares(settings, worker, mode) for mode in ("off", "strict"))
    together = filled.answers(worker, [off, strict, strict], CALLS)
    assert all(each.ids == plain.ids for each in together)
