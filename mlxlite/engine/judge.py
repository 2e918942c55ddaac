"""The judge: whether a model's rows may share a forward, found out by trying.

Some models read a position from the shape of a buffer, or keep state in a way of their own; no list
of names tells which (engine-notes section 1). So rows of different length are run alone and in a
pool of slots, with the same tokens, and what comes out is compared. It takes eleven small forwards,
one at a time between other work, soon after the start of an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

import mlx.core as mx

from mlxlite.engine.lanes import Lanes, Pool, cache_arrays
from mlxlite.engine.row import Row
from mlxlite.types import RowSpec, Sampling

log = logging.getLogger(__name__)

_PROMPTS = ((5, 3, 8), (9, 4, 7, 2, 6, 3, 1))
_TOKENS = ((4, 6, 2), (7, 1, 5))  # run one a step after its prompt
# Of the logits' spread. What is right differs by 1e-5 of it in float32 and some 1e-2 in 16 bits;
# what is wrong by 0.4 and more.
TOLERANCE = {"float32": 0.01}
TOLERANCE_16_BITS = 0.2


def judge(model: Any, lanes: Lanes, dtype: str, vocab_size: int) -> Iterator[None]:
    """Find out whether the model's rows may pool, and tell `lanes`; a forward between yields."""
    verdict = False
    try:
        verdict = lanes.has_slots() and (yield from _agrees(model, lanes, dtype, vocab_size))
    except Exception:  # a model that cannot be asked runs alone
        log.exception("this model does not run in slots")
    lanes.may_pool = verdict
    log.debug("rows share a forward" if verdict else "rows run one by one: the model needs it")


def _agrees(model: Any, lanes: Lanes, dtype: str, vocab_size: int) -> Generator[None, None, bool]:
    alone: list[list[mx.array]] = []
    for prompt, tokens in zip(_PROMPTS, _TOKENS, strict=True):
        cache = prompted(model, lanes, prompt, vocab_size)
        found = []
        for token in tokens:
            found.append(model(ids_of([token], vocab_size), cache=cache)[0, -1])
            mx.eval(found[-1], cache_arrays(cache))
            yield
        alone.append(found)

    pool = Pool(model, lanes.new_cache())
    for prompt in _PROMPTS:
        row = Row(0, RowSpec((*prompt, 0), Sampling(), 1, frozenset()), lambda event: None)
        row.cache = prompted(model, lanes, prompt, vocab_size)
        row.fed = len(prompt)
        pool.join(row)
        yield
    worst = 0.0
    for step in range(len(_TOKENS[0])):
        inputs = ids_of([tokens[step] for tokens in _TOKENS], vocab_size)[0]
        together = pool.forward(inputs).astype(mx.float32)
        mx.eval(together, pool.arrays)
        for index, found in enumerate(alone):
            expected = found[step].astype(mx.float32)
            spread = mx.maximum(mx.std(expected), 1e-9)
            away = mx.max(mx.abs(together[index] - expected)) / spread
            difference: float = away.item()  # type: ignore[assignment]  # MLX: any number
            worst = max(worst, difference)
        yield
    return worst <= TOLERANCE.get(dtype, TOLERANCE_16_BITS)


def ids_of(tokens: list[int], vocab_size: int) -> mx.array:
    return mx.array([[token % vocab_size for token in tokens]], dtype=mx.uint32)


def prompted(model: Any, lanes: Lanes, prompt: tuple[int, ...], vocab_size: int) -> list[Any]:
    cache = lanes.new_cache()
    model(ids_of(list(prompt), vocab_size), cache=cache)
    mx.eval(cache_arrays(cache))
    return cache
