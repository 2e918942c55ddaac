"""The rehearsal: whether replayed layers say the same and are quicker, found out by trying.

Steps of one to eight rows are run twice, as usual and replayed, a forward at a time while nothing
else runs. In a process of its own (`kernels`) the same steps make MLX compile what they need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from typing import Any

import mlx.core as mx

from mlxlite.engine.judge import TOLERANCE, TOLERANCE_16_BITS, ids_of, prompted
from mlxlite.engine.lanes import Lanes, Pool
from mlxlite.engine.replay import Replay
from mlxlite.engine.row import Row
from mlxlite.types import RowSpec, Sampling

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8)  # rows; the pools of more would take more memory than they tell
_PROMPT = (5, 3, 8, 9, 4, 7, 2, 6)
_ROUNDS = 4  # the first one records and is not timed
_GAIN = 0.98  # of the time at most, or it stays as it is


def rehearse(
    model: Any, lanes: Lanes, replay: Replay, dtype: str, vocab_size: int
) -> Iterator[None]:
    """Find out whether to replay, and tell `replay`; a forward between yields."""
    pays = False
    try:
        pays = yield from try_out(model, lanes, replay, dtype, vocab_size)
    except Exception:  # such as a compiler that is not there, or not the right one
        log.warning("layers of this model cannot be replayed", exc_info=True)
    if pays:
        replay.is_on = True
    else:
        replay.stop()
    log.debug("layers are replayed" if pays else "layers go the usual way")


def try_out(
    model: Any, lanes: Lanes, replay: Replay, dtype: str, vocab_size: int
) -> Generator[None, None, bool]:
    """Whether it pays and changes nothing. Raises what MLX raises."""
    tolerance = TOLERANCE.get(dtype, TOLERANCE_16_BITS)
    cache = prompted(model, lanes, _PROMPT, vocab_size)
    total = {way: 0.0 for way in (False, True)}
    for count in SIZES:
        pools = {way: _pool(model, lanes, cache, count) for way in total}
        best = {way: float("inf") for way in total}
        yield
        for step in range(_ROUNDS):
            inputs = ids_of([step * count + row for row in range(count)], vocab_size)[0]
            said: list[mx.array] = []
            for way, pool in pools.items():
                replay.is_on = way
                try:
                    started = time.perf_counter()
                    said.append(pool.forward(inputs))
                    mx.eval(said[-1], pool.arrays)
                    spent_s = time.perf_counter() - started
                finally:
                    replay.is_on = False
                if step:
                    best[way] = min(best[way], spent_s)
                yield
            usual, replayed = (each.astype(mx.float32) for each in said)
            spread = mx.maximum(mx.std(usual), 1e-9)
            is_same = mx.max(mx.abs(usual - replayed)) <= tolerance * spread
            if not is_same.item():  # nor if it is no number
                log.warning("replayed layers of this model say something else")
                return False
        for way in total:
            total[way] += best[way]
        pools.clear()  # before the next ones are made
    return total[True] <= _GAIN * total[False]


def _pool(model: Any, lanes: Lanes, cache: list[Any], count: int) -> Pool:
    """A pool of so many rows, all of the same prompt."""
    pool = Pool(model, lanes.new_cache())
    for number in range(count):
        row = Row(number, RowSpec((*_PROMPT, 0), Sampling(), 1, frozenset()), lambda event: None)
        row.cache, row.fed = cache, len(_PROMPT)
        pool.join(row)
    return pool
