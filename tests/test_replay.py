"""Replayed layers say what they say as usual, and only where it was found that they do."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine import (
    backend,  # first: it picks the BLAS
    kernels,
    load,
    on_cpu,
    rehearsal,
    replay,
    rotary,
)
from mlxlite.engine.findings import Findings, Source
from mlxlite.engine.lanes import Lanes, Pool, cache_arrays
from mlxlite.engine.load import LoadedModel
from mlxlite.engine.replay import Replay, Replayed
from tests import kv_configs, tiny
from tests.fed import POOLED, VOCAB, come_and_go, fed, forward, new_pool

import mlx.core as mx  # isort: skip

# Models whose forward is not that of a list of layers with one cache each, or whose layers want
# something else than arrays: they go the usual way.
USUAL = ()


pytestmark = pytest.mark.skipif(
    not kernels.has_compiler(), reason="without g++ MLX records nothing"
)


@pytest.fixture(autouse=True)
def unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX records, but joins no operations: so these tests take no minutes to compile. Its own
    switch for that (CompileMode::no_fuse) has no name in Python."""
    (library,) = Path(mx.__file__).parent.glob("lib/libmlx.*")
    switch = ctypes.CDLL(str(library))["_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"]
    monkeypatch.setattr(mx, "enable_compile", lambda: switch(2))


@functools.cache
def replayed(kind: str) -> tuple[Any, Replay]:
    model = tiny.build(kv_configs.config_of(kind))
    rotary.install(model)
    found = replay.install(model)
    found.is_on = True
    return model, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", POOLED)
def test_rows_that_come_and_go_get_what_they_get_alone(kind: str) -> None:
    model, found = replayed(kind)
    come_and_go(model)
    assert bool(found.recordings) is (kind not in USUAL)
    assert all(each.is_recordable for each in found.kinds) is (kind not in USUAL)


def pooled(model: Any, lengths: tuple[int, ...], steps: int = 4) -> tuple[Pool, list[Any]]:
    draw = random.Random(1)
    rows = [fed(model, draw, length, steps) for length in lengths]
    pool = new_pool(model)
    for each in rows:
        pool.join(each.row)
    return pool, rows


def test_layers_that_are_alike_share_a_recording() -> None:
    for kind, kinds in (("qwen3", 1), ("llama", 2)):  # one of its layers has a window
        model, found = replayed(kind)
        found.recordings.clear()
        pool, rows = pooled(model, (3, 5))
        forward(pool, rows)
        assert len(found.kinds) == kinds and len(model.layers) > 1
        assert len(found.recordings) == kinds
        forward(pool, rows)
        assert len(found.recordings) == kinds, "the same shape"
        pool.leave(rows[0].row, keeps_cache=False)
        forward(pool, rows)
        assert len(found.recordings) == 2 * kinds
        for each in rows:
            each.assert_close()


def test_recordings_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = replayed("llama")
    monkeypatch.setattr(replay, "_FEWEST_KEPT", 3)
    for count in range(1, 8):
        pool, rows = pooled(model, tuple(range(2, 2 + count)), 1)
        forward(pool, rows)
    assert len(found.recordings) == 4 * len(found.kinds), "four shapes of each kind"


def test_other_weights_and_tables_are_not_recorded() -> None:
    """Two layers of a recording have weights of their own, and each step its own positions."""
    model, found = replayed("qwen3")
    pool, rows = pooled(model, (3, 9, 17), 9)
    for _ in range(9):
        forward(pool, rows)
    assert len(found.kinds) == 1
    for each in rows:
        each.assert_close()


def test_rows_alone_and_prompts_go_the_usual_way() -> None:
    model, found = replayed("llama")
    found.recordings.clear()
    cache = Lanes(model).new_cache()
    for ids in ([1, 2, 3], [4]):
        mx.eval(model(mx.array([ids]), cache=cache), cache_arrays(cache))
    mx.eval(model(mx.array([[1, 2]])))
    assert not found.recordings


def test_nothing_is_copied_that_is_written_in_place() -> None:
    """A buffer with two owners would be, whole, at each write."""
    config = kv_configs.config_of("llama")
    model = tiny.build({**config, "num_hidden_layers": 2, "max_position_embeddings": 1 << 20})
    found = replay.install(model)
    pool, rows = pooled(model, (3, 4), 12)
    pool._resize(64, 1 << 14)
    mx.eval(pool.arrays)
    whole = sum(array.nbytes for array in pool.arrays)
    for is_on in (False, True):
        found.is_on = is_on
        forward(pool, rows)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(4):
            forward(pool, rows)
        mx.synchronize()
        assert mx.get_peak_memory() - before < whole / 8, is_on
    assert found.recordings


def test_a_layer_that_cannot_be_recorded_goes_the_usual_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.build(kv_configs.config_of("llama"))
    found = replay.install(model)
    found.is_on = True
    mlp = type(model.layers[0].mlp)
    usual = mlp.__call__

    def looks(self: Any, x: mx.array) -> Any:
        assert float(x.sum().item()) == float(x.sum().item())  # which a recording cannot know
        return usual(self, x)

    monkeypatch.setattr(mlp, "__call__", looks)
    pool, rows = pooled(model, (3, 8))
    for _ in range(4):
        forward(pool, rows)
    assert not found.kinds[0].is_recordable and not found.recordings
    for each in rows:
        each.assert_close()


def test_layers_that_differ_in_anything_are_of_kinds_of_their_own() -> None:
    model = tiny.build({**kv_configs.config_of("llama"), "num_hidden_layers": 4})
    model.layers[1].self_attn.scale *= 2
    model.layers[2].mlp.up_proj.bias = mx.zeros(model.layers[2].mlp.up_proj.weight.shape[0])
    model.layers[3].self_attn._own_numbers = mx.array([1.0])
    assert len(replay.install(model).kinds) == 4
    assert all(isinstance(layer, Replayed) for layer in model.layers)


# ----------------------------------------------------------------------------- the rehearsal


def rehearsed(model: Any, found: Replay) -> bool:
    for _ in rehearsal.rehearse(model, Lanes(model), found, "float32", VOCAB):
        assert not found.is_on, "whoever comes between goes the usual way"
    return found.is_on


def fresh() -> tuple[Any, Replay]:
    model = tiny.build(kv_configs.config_of("llama"))
    return model, replay.install(model)


@pytest.mark.parametrize("gain", [0.0, 1e9])
def test_what_does_not_pay_is_not_done(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_GAIN", gain)
    model, found = fresh()
    assert rehearsed(model, found) is (gain > 1) and bool(found.recordings) is (gain > 1)


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_layers_that_would_say_something_else_are_not_replayed(
    wrong: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal, "_GAIN", 1e9)
    run = Replay.run
    monkeypatch.setattr(Replay, "run", lambda *given: run(*given) + mx.array([wrong, *[0] * 31]))
    assert not rehearsed(*fresh())
    assert "say something else" in caplog.text


def test_an_engine_outlives_a_replay_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a library cannot be compiled: that is only seen when it is evaluated."""
    model, found = fresh()
    usual = Pool.forward

    def fails(pool: Pool, inputs: mx.array) -> mx.array:
        if found.is_on:
            raise RuntimeError("Failed to compile function")
        return usual(pool, inputs)

    monkeypatch.setattr(Pool, "forward", fails)
    assert not rehearsed(model, found)
    assert "cannot be replayed" in caplog.text


# ------------------------------------------------------------------------------ the findings


class Child:
    """In place of the one that compiles. made: the libraries; None or an error: see `Build`."""

    made_here: list[str] | Exception | None = ["mlx/lib.so"]

    def __init__(self, kernel_folder: Path, what: dict[str, Any]) -> None:
        self.folder, self.what = kernel_folder / "fused", what
        self.is_over = self.is_stopped = False

    def made(self) -> list[str] | None:
        if isinstance(self.made_here, Exception):
            raise self.made_here
        for name in self.made_here or ():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()
        return self.made_here

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", "")
    monkeypatch.setattr(kernels, "is_worth_it", lambda weight_bytes: True)
    monkeypatch.setattr(kernels, "has_compiler", lambda: True)
    monkeypatch.setattr(kernels, "Build", Child)
    monkeypatch.setattr(rehearsal, "_GAIN", 1e9)
    return tmp_path


def findings_of(folder: Path, replays: bool = True) -> Findings:
    config = kv_configs.config_of("llama")
    loaded = LoadedModel(tiny.build(config), config, "float32", 1, 64)
    source = Source(folder / "model", folder / "dense", folder, "auto", replays)
    changed = on_cpu.install(loaded.model)
    return Findings(loaded, changed, Lanes(loaded.model), VOCAB, backend.start(folder), source)


def try_all(findings: Findings) -> None:
    while findings.may_try(0, 0):
        findings.go_on()


def finish(findings: Findings) -> Any:
    """Try all there is to try; the child is over when it is asked for."""
    try_all(findings)
    child: Any = findings._building
    if child is not None:
        assert findings.patience_s is not None, "or nobody would look for its end"
        child.is_over = True
        try_all(findings)
    assert findings.patience_s is None
    return child


def test_layers_are_replayed_once_their_kernels_are_compiled(folder: Path) -> None:
    findings = findings_of(folder)
    assert not findings._replay.is_on
    child = finish(findings)
    assert child.what["turned"] == findings._turn.sizes and child.what["vocab_size"] == VOCAB
    assert child.what["model"] == str(folder / "model") and child.what["dtype"] == "auto"
    assert findings._replay.is_on
    again = findings_of(folder)
    assert again._replay.is_on and not again.may_try(0, 0), "it is known"
    again.doubt()
    assert not again._replay.is_on


def test_nothing_is_tried_beside_rows(folder: Path) -> None:
    findings = findings_of(folder)
    while not findings.is_judged:
        findings.go_on()
    assert findings.may_try(0, 0) and not findings.may_try(0, 1) and not findings.may_try(1, 0)
    try_all(findings)
    child: Any = findings._building
    assert not findings.may_try(0, 0), "the child is not over"
    child.is_over = True
    assert findings.may_try(0, 0) and not findings.may_try(0, 1)


@pytest.mark.parametrize("change", ["a library is gone", "nonsense"])
def test_what_was_found_holds_as_long_as_what_it_was_found_with(folder: Path, change: str) -> None:
    """Or MLX would compile in the middle of a step."""
    finish(findings_of(folder))
    if change == "a library is gone":
        (folder / "fused" / "mlx" / "lib.so").unlink()
    else:
        (kept,) = folder.glob("judged-*.json")
        known = json.loads(kept.read_text())
        kept.write_text(json.dumps({**known, "replayed": {"kernels": 5}}))
    again = findings_of(folder)
    assert not again._replay.is_on
    assert finish(again) is not None and again._replay.is_on


def test_without_a_compiler_nothing_is_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(findings_of(folder))
    monkeypatch.setattr(kernels, "has_compiler", lambda: False)
    again = findings_of(folder)
    assert not again._replay.is_on and not again.may_try(0, 0)


def test_who_wants_none_has_none(folder: Path) -> None:
    finish(findings_of(folder))
    again = findings_of(folder, replays=False)
    assert not again._replay.is_on and not again.may_try(0, 0)


def test_what_cannot_be_compiled_is_not_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "made_here", None)
    findings = findings_of(folder)
    finish(findings)
    assert not findings._replay.is_on
    again = findings_of(folder)
    assert not again._replay.is_on and not again.may_try(0, 0)


def test_a_child_that_was_ended_is_asked_again_by_the_next_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "made_here", OSError("signal 9"))
    findings = findings_of(folder)
    finish(findings)
    assert not findings._replay.is_on and not findings.may_try(0, 0)
    monkeypatch.setattr(Child, "made_here", [])
    again = findings_of(folder)
    finish(again)
    assert again._replay.is_on


def test_an_engine_that_closes_leaves_no_child(folder: Path) -> None:
    findings = findings_of(folder)
    try_all(findings)
    child: Any = findings._building
    findings.close()
    assert child.is_stopped and findings.patience_s is None


# ------------------------------------------------------------------------------- the kernels


def test_where_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    usual = tempfile.gettempdir()
    folder = kernels.settle(tmp_path)
    assert folder == tmp_path / "fused" and os.environ["TMPDIR"] == str(folder)
    assert tempfile.gettempdir() == usual
    assert kernels.present(folder, [])
    (folder / "a.so").touch()
    assert kernels.present(folder, ["a.so"]) and not kernels.present(folder, ["a.so", "b.so"])
    (tmp_path / "file").touch()
    assert kernels.settle(tmp_path / "file") is None


def test_only_models_of_some_size_are_worth_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_free_bytes", lambda: 2 << 30)
    sizes = (1 << 20, 200 << 20, 900 << 20, 8 << 30)
    assert [kernels.is_worth_it(size) for size in sizes] == [False, True, False, False]
    monkeypatch.undo()
    assert kernels._free_bytes() > 0


def what(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder), "dense": str(folder / "dense"), "dtype": "auto",
        "turned": {}, "vocab_size": 512,
    }  # fmt: skip


def ended(build: kernels.Build) -> kernels.Build:
    build._process.wait(300)
    assert build.is_over
    return build


@pytest.mark.slow
def test_a_child_compiles_them(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with them layers say the same."""
    build = ended(kernels.Build(tmp_path, what(tiny_folder)))
    made = build.made()
    assert made and kernels.present(tmp_path / "fused", made)
    assert all(name.startswith("mlx/") and name.endswith(".so") for name in made)
    assert not list((tmp_path / "fused").glob(".building-*")), "its own folder is gone"
    monkeypatch.undo()  # join
    monkeypatch.setenv("TMPDIR", str(tmp_path / "fused"))
    monkeypatch.setattr(rehearsal, "_GAIN", 1e9)
    loaded = load.load(tiny_folder, backend.start(tmp_path), "auto", tmp_path / "dense")
    assert rehearsed(loaded.model, on_cpu.install(loaded.model).replay)
    assert sorted(made) == sorted(
        str(path.relative_to(tmp_path / "fused")) for path in tmp_path.rglob("*.so")
    ), "nothing else was needed"


def test_a_child_that_fails_or_is_ended(tmp_path: Path) -> None:
    assert ended(kernels.Build(tmp_path, what(tmp_path / "none"))).made() is None
    build = kernels.Build(tmp_path, what(tmp_path))
    build._process.kill()
    with pytest.raises(OSError):
        ended(build).made()
    build = kernels.Build(tmp_path, what(tmp_path))
    build.stop()
    assert build.is_over
