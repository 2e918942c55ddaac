"""What was found out by trying is kept for the next start, and for nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine.verdicts import Verdicts
from mlxlite.engine.worker import Worker, WorkerOptions
from tests import tiny
from tests.decoding import tiny_model
from tests.rows import PATIENCE_S, ask

MODEL: Any = tiny_model().model


def test_what_was_written_is_read(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "k", MODEL, {"a": 1})
    assert verdicts.read() is None
    verdicts.write({"may_pool": True})
    assert Verdicts(tmp_path / "k", MODEL, {"a": 1}).read() == {"may_pool": True}
    assert Verdicts(tmp_path / "k", MODEL, {"a": 2}).read() is None
    assert len(list((tmp_path / "k").iterdir())) == 1, "no draft is left"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"may_pool": 1}', '{"may_pool": "yes"}'])
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
