"""Fixtures that several test files share. They import MLX only for those who ask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The tiny model's matrices are too small to share between threads: the threads of MKL would wait
# for each other more than they compute. And two processes whose threads spin for the same cores,
# as two servers of the real model would in a parallel run, take five times as long as one after
# the other.
os.environ.setdefault("MKL_NUM_THREADS", "1")

if TYPE_CHECKING:
    from mlxlite.engine.worker import Worker, WorkerOptions
    from tests.live import LiveApp


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: at the end no worker waits for the last of them."""
    weights = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        weight = 2 if "real" in marks else 1 if marks & {"slow", "clients"} else 0
        weights[item.path] = max(weight, weights.get(item.path, 0))
    items.sort(key=lambda item: -weights[item.path])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny real model (see `tiny.py`); nobody may change it."""
    from tests import tiny

    return tiny.make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path) -> Iterator[LiveApp]:
    """A running server of the tiny model, for tests that leave it in order."""
    from tests.live import LiveApp

    with LiveApp(tiny_folder) as server:
        yield server


@pytest.fixture(scope="session")
def engine_options(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkerOptions:
    """Options of an engine for the tiny model: two rows run, two may wait."""
    from mlxlite.engine.worker import WorkerOptions

    kept = tmp_path_factory.mktemp("kept")
    return WorkerOptions(tiny_folder, kept / "dense", kept / "kernels", max_rows=2, max_waiting=2)


@pytest.fixture(scope="session")
def shared_engine(engine_options: WorkerOptions) -> Iterator[Worker]:
    from mlxlite.engine.worker import Worker

    worker = Worker(engine_options)
    worker.start()
    worker.wait_ready(10)
    yield worker
    worker.stop()


@pytest.fixture
def engine(shared_engine: Worker) -> Iterator[Worker]:
    """A running engine; checks that the test left it in order."""
    from mlxlite.types import EngineState, Finish
    from tests import rows

    yield shared_engine
    assert shared_engine.state is EngineState.READY
    assert rows.ask(shared_engine, max_tokens=2).finish is Finish.LENGTH, "the next one is served"
    stats = shared_engine.stats()
    assert (stats["active_rows"], stats["pending_rows"]) == (0, 0)
    ended = stats["completed_rows"] + stats["cancelled_rows"] + stats["failed_rows"]
    assert stats["submitted_rows"] == ended
