"""Embedding on the engine: batched, chunked, alone give what NumPy makes of the hidden states."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxlite.engine import backend, embed, load
from mlxlite.engine.embed import Embedder, Tap, group_size
from mlxlite.engine.worker import Worker
from mlxlite.errors import BadRequest, EngineDown, EngineFault
from mlxlite.types import EmbedSpec
from tests import tiny
from tests.rows import PATIENCE_S, Gate, ask, start

import mlx.core as mx  # isort: skip
import mlx.nn as nn  # isort: skip

# One of each kind of model that matters here: a plain stack, windows, experts (lists of modules in
# a list of modules), a recurrence, a head inside the stack, a stack inside a wrapper.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "gpt_neox": {
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
    },
    "gemma3": {
        "text_config": {
            **{key: value for key, value in tiny.CONFIG.items() if key != "architectures"},
            "model_type": "gemma3_text",
            "vocab_size": 512,
            "head_dim": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
        }
    },
}
RANDOM = random.Random(5)
INPUTS = tuple(tuple(RANDOM.randrange(3, 500) for _ in range(n)) for n in (5, 1, 33, 17, 5, 2, 41))
SPECS: dict[str, dict[str, Any]] = {
    "last": {"pooling": "last"},
    "mean": {"pooling": "mean"},
    "cls": {"pooling": "cls"},
    "logits": {"logit_ids": (5, 300)},
}
BUDGET_S = 0.2


def loaded(kind: str) -> load.LoadedModel:
    config = {**tiny.CONFIG, "vocab_size": 512, "model_type": kind, **FAMILIES[kind]}
    return load.LoadedModel(tiny.build(config), config, "float32", 0, 1024)


def drain(work: Any, budget_s: float = BUDGET_S) -> tuple[np.ndarray, int]:
    """The vectors of a job, and how many slices it took."""
    next(work)
    slices = 1
    try:
        while True:
            work.send(budget_s)
            slices += 1
    except StopIteration as end:
        return read(end.value), slices


def read(vectors: Sequence[bytes]) -> np.ndarray:
    return np.array([np.frombuffer(vector, dtype="<f4") for vector in vectors])


@pytest.fixture(scope="module")
def llama() -> load.LoadedModel:
    return loaded("llama")


# ---------------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_vectors_are_pooled_hidden_states(llama: load.LoadedModel, pooling: str) -> None:
    found, _ = drain(Embedder(llama).run(EmbedSpec(INPUTS, pooling)))
    for ids, vector in zip(INPUTS, found, strict=True):
        hidden = np.array(llama.model.model(mx.array([ids])), dtype=np.float64)[0]
        pooled = {"last": hidden[-1], "mean": hidden.mean(axis=0), "cls": hidden[0]}[pooling]
        np.testing.assert_allclose(vector, pooled / np.linalg.norm(pooled), atol=3e-6)


def test_logits_are_the_models(llama: load.LoadedModel) -> None:
    found, _ = drain(Embedder(llama).run(EmbedSpec(INPUTS, logit_ids=(5, 300))))
    for ids, vector in zip(INPUTS, found, strict=True):
        logits = np.array(llama.model(mx.array([ids])))[0, -1]
        np.testing.assert_allclose(vector, logits[[5, 300]], atol=2e-5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_batched_and_chunked_are_as_alone(kind: str) -> None:
    model = loaded(kind)
    for name, entries in SPECS.items():
        spec = EmbedSpec(INPUTS, **entries)
        alone = np.array(
            [drain(Embedder(model).run(EmbedSpec((ids,), **entries)))[0][0] for ids in INPUTS]
        )
        assert alone.shape == (len(INPUTS), 2 if name == "logits" else 64)
        assert len({vector.tobytes() for vector in alone}) > 4, "inputs differ, and so do these"
        together, _ = drain(Embedder(model).run(spec))
        np.testing.assert_allclose(together, alone, atol=1e-5, err_msg=name)
        small = Embedder(model)
        small._room = lambda budget_s: 12  # type: ignore[method-assign]
        chunked, slices = drain(small.run(spec))
        np.testing.assert_allclose(chunked, alone, atol=1e-5, err_msg=name)
        assert slices >= sum(map(len, INPUTS)) // 12


def test_the_tap_leaves_the_model_as_it_was(llama: load.LoadedModel) -> None:
    model, ids = llama.model, mx.array([[5, 9, 200]])
    before, kind = np.array(model(ids)), type(model.model)
    tap = Tap(model, "llama")

    def fail(hidden: mx.array) -> mx.array:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        tap(ids, None, fail)
    assert type(model.model) is kind
    np.testing.assert_array_equal(np.array(model(ids)), before)


def test_a_model_without_a_place_to_tap_is_refused() -> None:
    class Odd(nn.Module):
        def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
            return mx.zeros((*ids.shape, 512))

    with pytest.raises(BadRequest, match="odd"):
        Tap(Odd(), "odd")


def test_numbers_that_are_not_finite_are_a_fault(llama: load.LoadedModel) -> None:
    embedder = Embedder(llama)
    embedder._tap = lambda ids, cache, pick: (mx.full((1, 1, 64), mx.inf), None)  # type: ignore[assignment]
    with pytest.raises(EngineFault, match="--dtype"):
        drain(embedder.run(EmbedSpec(((5, 9),))))


# ------------------------------------------------------------------------------------ slices


@pytest.mark.parametrize(
    ("lengths", "room", "size"),
    [
        pytest.param([7], 3, 1, id="one always"),
        pytest.param([5, 5, 5, 5], 100, 4, id="all"),
        pytest.param([5, 5, 5, 5], 15, 3, id="room"),
        pytest.param([100, 100, 900], 9000, 2, id="padding"),
        pytest.param([1, 20, 20], 9000, 3, id="a little padding is cheaper than a forward"),
    ],
)
def test_group_size(lengths: list[int], room: int, size: int) -> None:
    assert group_size(lengths, room) == size


def test_groups_hold_little_padding() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        lengths = sorted(rng.randrange(1, 600) for _ in range(rng.randrange(1, 80)))
        room = rng.randrange(1, 5000)
        while lengths:
            size = group_size(lengths, room)
            group, lengths = lengths[:size], lengths[size:]
            padded = size * group[-1]
            assert size == 1 or padded <= room
            assert padded - sum(group) <= max(padded / 4, 32)


def test_slices_keep_to_their_budget(llama: load.LoadedModel, monkeypatch: Any) -> None:
    """On a machine of 1,000 tokens a second: a clock that the forwards wind."""
    clock, seen = [0.0], list[int]()
    real = embed._Batch.add

    def add(self: Any, tap: Any, start: int, size: int, cache: Any) -> None:
        real(self, tap, start, size, cache)
        seen.append(len(self._ids) * size)
        clock[0] += seen[-1] / 1000

    monkeypatch.setattr(embed._Batch, "add", add)
    monkeypatch.setattr(embed.time, "perf_counter", lambda: clock[0])
    inputs = tuple((3,) * 16 for _ in range(100))
    drain(Embedder(llama).run(EmbedSpec(inputs)), 0.2)
    assert seen[0] == 32, "the first is careful"
    assert sum(seen) == 1600 and max(seen) <= 208 and min(seen[4:-1]) >= 150


# ------------------------------------------------------------------------------------ worker


def test_embedding_beside_running_rows(engine: Worker) -> None:
    gate = Gate(engine)
    futures = [engine.embed(EmbedSpec(INPUTS, pooling)) for pooling in ("last", "mean")]
    row = start(engine, max_tokens=8)
    gate.open()
    assert row.done.generated_tokens == 8
    first, second = (read(future.result(PATIENCE_S)) for future in futures)
    assert first.shape == second.shape == (len(INPUTS), 64) and not np.allclose(first, second)
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, atol=1e-6)
    assert row.ids[:6] == ask(engine).ids, "the row never noticed"


def test_rows_decode_between_slices(engine: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._loop.embedder, "_room", lambda budget_s: 12)
    done_at: list[int] = []
    gate = Gate(engine)
    future = engine.embed(EmbedSpec(INPUTS))
    future.add_done_callback(lambda _: done_at.append(len(row.ids)))
    row = start(engine, max_tokens=40)
    gate.open()
    assert row.done.generated_tokens == 40 and future.result(PATIENCE_S)
    assert 5 < done_at[0] < 40, "a token came between each two of its slices"


def test_a_cancelled_job_is_dropped(engine: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._loop.embedder, "_room", lambda budget_s: 12)
    slices: list[int] = []
    real = embed._Batch.add

    def add(self: Any, *given: Any) -> None:
        real(self, *given)
        slices.append(1)
        if len(slices) == 2:
            future.cancel()

    monkeypatch.setattr(embed._Batch, "add", add)
    gate = Gate(engine)
    future = engine.embed(EmbedSpec(INPUTS))
    gate.open()
    with pytest.raises(CancelledError):
        future.result(PATIENCE_S)
    ask(engine)
    monkeypatch.undo()
    assert len(engine.embed(EmbedSpec(((5,),))).result(PATIENCE_S)) == 1
    assert len(slices) == 2


def test_a_failing_job_leaves_the_engine_running(
    engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *given: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(embed._Batch, "add", fail)
        with pytest.raises(EngineFault, match="out of memory"):
            engine.embed(EmbedSpec(INPUTS)).result(PATIENCE_S)
    assert len(engine.embed(EmbedSpec(((5,),))).result(PATIENCE_S)) == 1


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_stop_answers_who_waits(engine_options: Any, is_ready: bool) -> None:
    worker = Worker(engine_options)
    early = worker.embed(EmbedSpec(INPUTS))  # before it was even started
    worker.start()
    if is_ready:
        assert len(early.result(PATIENCE_S)) == len(INPUTS)
        gate = Gate(worker)
        late = worker.embed(EmbedSpec(INPUTS))
        worker.stop(0)
        gate.open()
        with pytest.raises(EngineDown):
            late.result(PATIENCE_S)
    worker.stop()
    assert early.done() or early.exception(PATIENCE_S)
    with pytest.raises(EngineDown):
        worker.embed(EmbedSpec(INPUTS))


# ----------------------------------------------------------------------------------- loading


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = str(folder / "model.safetensors")
        weights: Any = mx.load(file)
        mx.save_safetensors(file, {change(name): array for name, array in weights.items()})

    return apply


def without_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": None}))


def without_layout(folder: Path) -> None:
    (folder / "modules.json").unlink()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: None, id="bare names"),
        pytest.param(rename(lambda name: "model." + name), id="whole names"),
        pytest.param(without_architecture, id="known by its layout"),
        pytest.param(without_layout, id="known by its architecture"),
    ],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_without_a_head_loads(
    tmp_path: Path, is_tied: bool, change: Callable[[Path], None]
) -> None:
    folder = tiny.make_embedder(tmp_path / "m", tie_word_embeddings=is_tied)
    change(folder)
    found = load.load(folder, backend.start(tmp_path), "auto", tmp_path / "dense")
    config = {**found.config, "tie_word_embeddings": is_tied}
    whole = load.LoadedModel(tiny.build(config), config, "float32", 0, 1024)
    spec = EmbedSpec(INPUTS)
    np.testing.assert_allclose(
        drain(Embedder(found).run(spec))[0], drain(Embedder(whole).run(spec))[0], atol=1e-6
    )


def test_a_chat_model_without_its_head_is_still_damaged(tmp_path: Path) -> None:
    folder = tiny.make_embedder(tmp_path / "m")
    without_layout(folder)
    without_architecture(folder)
    with pytest.raises(load.ModelError, match="cannot be loaded"):
        load.load(folder, backend.start(tmp_path), "auto", tmp_path / "dense")
