"""Two engines of one tiny model, for tests of the prompt cache: one remembers, one does not.

`MLXLITE_CHECK=1` lets the engine verify itself too. Files that use them import both fixtures.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlite.engine.lanes import Lanes, cache_arrays
from mlxlite.engine.prefix import PrefixTree
from mlxlite.engine.scheduler import ChunkSizer
from mlxlite.engine.spans import restore
from mlxlite.engine.worker import Worker, WorkerOptions
from mlxlite.types import Finish, RowSpec, Sampling
from tests import kv_configs, tiny
from tests.rows import PATIENCE_S, Heard

import mlx.core as mx  # isort: skip

FAMILIES = ("llama", "gemma3_text", "falcon_h1")  # that are asked everything
OTHERS = ("deepseek_v3", "deepseek_v32", "gpt_oss", "mamba", "qwen3_next", "recurrent_gemma")
CUTTABLE = {"llama", "deepseek_v3", "deepseek_v32"}  # the others: only where a checkpoint is
CHUNK = 32
SEEDED = Sampling(1.0, 0.95, seed=11)
PENALISED = Sampling(repetition_penalty=1.7, frequency_penalty=0.8, presence_penalty=0.5)


def ids_of(count: int, seed: int = 0) -> tuple[int, ...]:
    """Ids that the tiny models' vocabularies all have."""
    return tuple(random.Random(seed).choices(range(3, 64), k=count))


def start(engine: Worker, prompt: Sequence[int], max_tokens: int = 6, **how: Any) -> Heard:
    """Submit a row; how: fields of its spec, and `at_event` of its sink."""
    heard = Heard(how.pop("at_event", None))
    how = {"sampling": Sampling(), "eos_ids": frozenset(), **how}
    spec = RowSpec(prompt_ids=tuple(prompt), max_tokens=max_tokens, **how)
    heard.row_id = engine.submit(spec, heard)
    return heard


def ask(engine: Worker, prompt: Sequence[int], max_tokens: int = 6, **how: Any) -> Heard:
    heard = start(engine, prompt, max_tokens, **how)
    assert heard.finish in (Finish.LENGTH, Finish.EOS, Finish.GUIDE)
    return heard


def run_engine(options: WorkerOptions, cache_bytes: int) -> Worker:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXLITE_CHECK", "1")  # read when an engine is made
        worker = Worker(dataclasses.replace(options, prompt_cache_bytes=cache_bytes))
        worker.start()
        worker.wait_ready(PATIENCE_S)
    worker._loop.scheduler.sizer = ChunkSizer(CHUNK, CHUNK)
    while worker.stats()["shares_forwards"] is None:  # the judge thinks
        ask(worker, (5,), 2)
    assert worker.stats()["shares_forwards"]
    return worker


class Pair:
    """Two engines of one model: one that remembers, one that does not; and the model itself."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.is_cuttable = kind in CUTTABLE
        config = {**kv_configs.config_of(kind), "num_hidden_layers": 2}
        if kind == "llama":
            config |= {"layer_types": None, "sliding_window": None}
        tiny.make_model(folder / kind, **config)
        self.model = tiny.build({**tiny.CONFIG, **config})
        self.options = WorkerOptions(
            folder / kind, folder / "dense", folder / "kernels", max_rows=4, max_waiting=40
        )
        self.warm, self.cold = (run_engine(self.options, size) for size in (1 << 28, 0))

    def stop(self) -> None:
        for worker in (self.warm, self.cold):
            worker.stop()
            assert worker.stats()["restarts"] == 0

    @property
    def tree(self) -> PrefixTree:
        """Only to be touched while nothing runs."""
        prompts = self.warm._loop.prompts
        assert prompts is not None
        return prompts.tree

    def check(self, prompt: Sequence[int], max_tokens: int = 6, **how: Any) -> Heard:
        """Ask both; they must agree. Returns what the one that remembers said."""
        heard = ask(self.warm, prompt, max_tokens, **how)
        assert heard.ids == ask(self.cold, prompt, max_tokens, **how).ids
        return heard

    def cached(self, prompt: Sequence[int], max_tokens: int = 6, **how: Any) -> int:
        return self.check(prompt, max_tokens, **how).done.cached_tokens

    def plain(self, prompt: Sequence[int], max_tokens: int = 6, **how: Any) -> list[int]:
        return ask(self.cold, prompt, max_tokens, **how).ids

    def computed(self) -> int:
        """Prompt tokens that went through the model so far."""
        stats = self.warm.stats()
        return int(stats["prompt_tokens"] - stats["cached_tokens"])

    def paths(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every prefix that is kept as such: its namespace and ids."""
        found = []
        for name, root in self.tree._roots.items():
            waiting = [(node, b"") for node in root.children.values()]
            while waiting:
                node, above = waiting.pop()
                key = above + node.edge
                if self.is_cuttable or node.checkpoint is not None:
                    found.append((name, tuple(np.frombuffer(key, dtype=np.uint32).tolist())))
                waiting += [(child, key) for child in node.children.values()]
        return found

    def payloads(self) -> list[mx.array]:
        """Every array that is kept."""
        nodes = [node for root in self.tree._roots.values() for node in root.below()]
        kept = [
            (getattr(node.span, "pairs", ()), getattr(node.checkpoint, "states", ()))
            for node in nodes
        ]
        return [leaf for _, leaf in tree_flatten(kept) if isinstance(leaf, mx.array)]

    def verify(self) -> None:
        """Whatever is kept is the state of exactly its ids: the next token's logits say so."""
        paths = self.paths()
        for name, ids in random.Random(1).sample(paths, min(len(paths), 8)):
            match = self.tree.match((*ids, 7), len(ids), name)
            assert match is not None and match.length == len(ids)
            caches = Lanes(self.model).new_cache()
            restore(match, caches)
            found = self.model(mx.array([[7]]), cache=caches)[0, -1]
            fresh = Lanes(self.model).new_cache()
            self.model(mx.array([ids]), cache=fresh)
            mx.eval(cache_arrays(fresh))
            expected = np.array(self.model(mx.array([[7]]), cache=fresh)[0, -1])
            away = np.abs(np.array(found) - expected).max()
            assert away < 1e-3 * expected.std(), f"not the state of {len(ids)} ids"


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"), request.param)
    yield pair
    pair.stop()


@pytest.fixture
def pair(family: Pair) -> Iterator[Pair]:
    family.tree.clear()
    yield family
    for worker in (family.warm, family.cold):
        stats = worker.stats()
        assert (stats["active_rows"], stats["pending_rows"], stats["restarts"]) == (0, 0, 0)
    family.verify()


class Chunks:
    """Calls something after each chunk of any prompt, on the engine thread."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: Worker, after: Any) -> None:
        batch: Any = engine._loop.batch
        real = batch.prefill
        self.run: list[tuple[int, int]] = []

        def prefill(row: Any, tokens: int) -> Any:
            found = real(row, tokens)
            self.run.append((row.id, tokens))
            after(row, [size for number, size in self.run if number == row.id])
            return found

        patch.setattr(batch, "prefill", prefill)
