"""What was found out by trying is kept for the next start, and for nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine.turned import MOST_ROWS
from mlxlite.engine.verdicts import Verdicts
from mlxlite.engine.worker import Worker, WorkerOptions
from tests import tiny
from tests.decoding import tiny_model
from tests.rows import PATIENCE_S, ask

import mlx.core as mx  # isort: skip  (after the backend chose its BLAS)

MODEL: Any = tiny_model().model


def test_what_was_written_is_read(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "k", MODEL, {"a": 1})
    assert verdicts.read() is None
    verdicts.write({"may_pool": True})
    assert Verdicts(tmp_path / "k", MODEL, {"a": 1}).read() == {"may_pool": True}
    assert Verdicts(tmp_path / "k", MODEL, {"a": 2}).read() is None
    assert len(list((tmp_path / "k").iterdir())) == 1, "no draft is left"


@pytest.mark.parametrize("text", ["", "[]", "{", "true"])
def test_a_damaged_file_is_nothing(tmp_path: Path, text: str) -> None:
    verdicts = Verdicts(tmp_path, MODEL, {})
    verdicts.write({"may_pool": True})
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert verdicts.read() is None


def test_a_folder_that_cannot_be_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("a file")
    verdicts = Verdicts(tmp_path / "k", MODEL, {})
    verdicts.write({"may_pool": True})
    assert verdicts.read() is None


def test_a_second_start_knows_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.make_model(folder)

    def engine() -> Worker:
        worker = Worker(WorkerOptions(folder, tmp_path / "dense", tmp_path / "kernels"))
        worker.start()
        worker.wait_ready(PATIENCE_S)
        return worker

    first = engine()
    while first.stats()["shares_forwards"] is None:
        ask(first, (5,), max_tokens=2)
    assert first.stats()["shares_forwards"] is True
    first.stop()
    (kept,) = (tmp_path / "kernels").glob("judged-*.json")
    assert json.loads(kept.read_text())["may_pool"] is True
    second = engine()
    assert second.stats()["shares_forwards"] is True
    assert second._loop.scheduler.may_group
    second.stop()

    kept.write_text('{"may_pool": 1, "turned": {"1x1": []}}')
    third = engine()
    while third.stats()["shares_forwards"] is None:
        ask(third, (5,), max_tokens=2)
    third.stop()
    assert json.loads(kept.read_text())["may_pool"] is True, "a verdict of another kind is none"


def test_products_are_measured_while_nothing_runs_and_kept(tmp_path: Path) -> None:
    tiny.make_model(folder := tmp_path / "model")
    worker = Worker(WorkerOptions(folder, tmp_path / "dense", tmp_path / "kernels"))
    worker.start()
    worker.wait_ready(PATIENCE_S)
    deadline_s = time.monotonic() + PATIENCE_S
    found: dict[str, Any] = {}
    while "turned" not in found:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # nothing tells when an idle engine has found something out
        for kept in (tmp_path / "kernels").glob("judged-*.json"):
            found = json.loads(kept.read_text())
    worker.stop()
    assert all(len(sizes) == MOST_ROWS + 1 for sizes in found["turned"].values())
    assert bool(found["turned"]) == (mx.default_device() == mx.Device(mx.cpu))
