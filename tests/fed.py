"""Rows whose every token is known, for tests of slots: each should hear what it hears alone.

Windows are 8 wide: they wrap.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxlite.engine.lanes import Lanes, Pool, cache_arrays
from mlxlite.engine.row import Phase, Row
from mlxlite.types import RowSpec, Sampling
from tests import kv_configs, tiny

import mlx.core as mx  # isort: skip

VOCAB = 64
WINDOW = kv_configs.WINDOW

# What a model asks of a cache differs by more than the cache's class: each of these asks for
# something else, or mixes the kinds in another way.
POOLED = (
    "llama",
    "qwen3",
    "gpt2",
    "phi3",
    "gemma2",  # a soft cap in an attention of its own: wants an array of a mask
    "gemma3_text",
    "gpt_oss",  # sinks
    "ministral3",
    "mistral3",
    "cohere2",
    "exaone4",
    "olmo3",
    "mimo_v2_flash",
    "deepseek_v2",
    "deepseek_v3",  # latent attention: what is kept is keys and values at once
    "deepseek_v32",  # a list of two caches a layer
    "minicpm3",
    "gemma3n",  # late layers read the cache of an earlier one
    "gemma4",
    "llama4_text",
    "qwen3_next",
    "kimi_linear",
    "lfm2",
    "falcon_h1",
    "mamba",
    "mamba2",
    "jamba",
    "nemotron_h",
    "granitemoehybrid",
    "rwkv7",
    "recurrent_gemma",
    "plamo3",
)


@functools.cache
def model_of(kind: str, **entries: Any) -> Any:
    return tiny.build({**kv_configs.config_of(kind), **entries})


_numbers = itertools.count(1)


@dataclass(eq=False)
class Fed:
    """A row whose every token is known, and what the model says after each of them when alone."""

    model: Any
    row: Row
    ids: tuple[int, ...]
    expected: list[np.ndarray] = field(default_factory=list)  # from the prompt's last token on
    worst: float = 0.0

    @property
    def next_id(self) -> int:
        return self.ids[self.row.length]

    @property
    def is_over(self) -> bool:
        return self.row.length == len(self.ids)

    def compare(self, logits: mx.array) -> None:
        """Logits (V,) after the newest token."""
        expected = self.expected[self.row.length - self.row.fed - 1]
        away = np.abs(np.array(logits.astype(mx.float32)) - expected).max()
        assert np.isfinite(away)  # or max() would pass over it
        self.worst = max(self.worst, float(away / expected.std()))

    def assert_close(self) -> None:
        assert self.worst < 1e-3, f"row of {self.row.fed} tokens, {self.row.stepped} steps"


def own_cache(model: Any, ids: Sequence[int]) -> list[Any]:
    """The model's own cache after these ids."""
    cache = Lanes(model).new_cache()
    if ids:
        model(mx.array([list(ids)], dtype=mx.uint32), cache=cache)
        mx.eval(cache_arrays(cache))
    return cache


def step_alone(model: Any, token: int, cache: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([[token]], dtype=mx.uint32), cache=cache)[0, -1]
    mx.eval(logits, cache_arrays(cache))
    return logits


def fed(model: Any, draw: random.Random, length: int, steps: int) -> Fed:
    """A row of `length` tokens in its own cache, with `steps` more to come."""
    ids = tuple(draw.choices(range(1, VOCAB), k=length + steps))
    row = Row(
        next(_numbers), RowSpec((*ids[:length], 0), Sampling(), steps, frozenset()), lambda e: None
    )
    row.fed, row.cache, row.phase = length, own_cache(model, ids[:length]), Phase.DECODE
    made = Fed(model, row, ids)
    cache = own_cache(model, ids[:length])
    for token in ids[length:]:
        made.expected.append(np.array(step_alone(model, token, cache).astype(mx.float32)))
    return made


def forward(pool: Pool, rows: Sequence[Fed]) -> None:
    """One token of every row of a pool, compared."""
    known = {each.row: each for each in rows}
    inside = [known[row] for row in pool.rows]
    logits = pool.forward(mx.array([each.next_id for each in inside], dtype=mx.uint32))
    mx.async_eval(logits, *pool.arrays)
    for index, each in enumerate(inside):
        each.compare(logits[index])


def new_pool(model: Any) -> Pool:
    return Pool(model, Lanes(model).new_cache())


def come_and_go(model: Any) -> None:
    """Rows of many lengths join a pool, leave it and come back, at random."""
    draw = random.Random(3)
    lengths = [1, WINDOW - 1, WINDOW, 5, WINDOW + 1, 19]
    rows = [fed(model, draw, length, draw.randint(4, 9)) for length in lengths]
    pool = new_pool(model)
    coming, away = list(rows), list[Fed]()
    came_back = 0
    while coming or away or pool.rows:
        while coming and (not pool.rows or draw.random() < 0.4):
            pool.join(coming.pop(0).row)
        if away and draw.random() < 0.5:
            pool.join(away.pop(draw.randrange(len(away))).row)
            came_back += 1
        for each in rows:
            if each.row in pool.rows:
                if each.is_over:
                    pool.leave(each.row, keeps_cache=False)
                elif draw.random() < 0.15:
                    pool.leave(each.row, keeps_cache=True)
                    away.append(each)
        if pool.rows:
            forward(pool, rows)
    assert came_back
    for each in rows:
        each.assert_close()
