"""The real model's rows: together, or with a cached prompt, they say what each says cold and alone.

Rounding differs with the rows beside it, so where the two best logits are closer than 1e-3 either
may win, and what follows is not compared.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.types import Finish, RowSpec, Sampling
from tests.rows import Heard

pytestmark = pytest.mark.real

HOME = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
FOLDER = HOME / "models" / "smollm2-135m"
PATIENCE_S = 120
TOKENS = 12
NEAR_TIE = 1e-3
TEXTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n",
    "1, 2, 3, 4,",
    "The chemical symbol of gold is",
    "Roses are red,",
    "import numpy as np\n\n",
    "Q: What is the largest planet?\nA:",
    "In 1969,",
    "To make bread you need flour,",
    "SELECT name FROM",
    "She opened the door and",
    "The three states of matter are",
    "Photosynthesis is",
    "My favourite colour is",
    "A" * 50,
    "On the first day of the trip we walked along the river until the sun went down. " * 8,
    "List of prime numbers:",
    "한국어",
)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    head = "You are a careful assistant. Go on with this text, word by word and without haste: "
    return [tuple(tokenizer.encode(head + text).ids) for text in TEXTS]


def engine(cache_bytes: int) -> Worker:
    # What was made of the model and found out about it before is there.
    options = WorkerOptions(FOLDER, HOME / "dense", HOME / "kernels", max_rows=8)
    worker = Worker(dataclasses.replace(options, prompt_cache_bytes=cache_bytes))
    worker.start()
    worker.wait_ready(PATIENCE_S)
    return worker


@pytest.fixture(scope="module")
def remembering() -> Iterator[Worker]:
    worker = engine(1 << 30)
    yield worker
    worker.stop()


def start(worker: Worker, prompt: Sequence[int]) -> Heard:
    heard = Heard()
    spec = RowSpec(tuple(prompt), Sampling(), TOKENS, frozenset(), top_logprobs=2)
    heard.row_id = worker.submit(spec, heard)
    return heard


def ended(heard: Heard) -> Heard:
    assert heard._ended.wait(PATIENCE_S) and heard.finish is Finish.LENGTH
    return heard


@pytest.fixture(scope="module")
def cold(prompts: list[tuple[int, ...]]) -> Iterator[list[Heard]]:
    """Each prompt by itself, on an engine that remembers nothing."""
    worker = engine(0)
    yield [ended(start(worker, prompt)) for prompt in prompts]
    worker.stop()


def assert_same(found: Sequence[Heard], expected: Sequence[Heard]) -> None:
    ties = 0
    for one, other, text in zip(found, expected, TEXTS[: len(found)], strict=True):
        told = [entry for event in other.events for entry in event.logprobs]
        for index, (token, wanted) in enumerate(zip(one.ids, other.ids, strict=True)):
            if token != wanted:
                (_, best), (_, second) = told[index].top[:2]
                assert best - second < NEAR_TIE, f"{text!r} differs at token {index}"
                ties += 1
                break
    assert ties <= 2, "so many near ties are none"


def test_rows_say_together_what_they_say_alone_and_cached_what_they_say_cold(
    remembering: Worker, prompts: list[tuple[int, ...]], cold: list[Heard]
) -> None:
    while remembering.stats()["shares_forwards"] is None:  # the judge thinks
        ended(start(remembering, prompts[0]))
    assert remembering.stats()["shares_forwards"]
    together = [ended(row) for row in [start(remembering, prompt) for prompt in prompts]]
    assert_same(together, cold)
    again = [ended(row) for row in [start(remembering, prompt) for prompt in prompts]]
    assert [row.done.cached_tokens for row in again] == [len(prompt) - 1 for prompt in prompts]
    assert_same(again, cold)
    by_itself = [ended(start(remembering, prompt)) for prompt in prompts[:5]]
    assert_same(by_itself, cold[:5])
