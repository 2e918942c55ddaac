"""The batch: the rows that decode, the token each has in flight, and the one forward.

A step queues the forward of the tokens in flight before it reads them, so the device never waits
for Python: step n + 1 runs while the host looks at token n. What the host then decides (an end, a
stop) comes one step late, and the surplus token is dropped. Rows with a guide that may steer are
sampled after the guide saw token n; their forward is queued early all the same.

Caches are mlx-lm's own, one set a row, which every model supports; rows share the sampling and the
host read. Everything here runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxlite.engine import sample
from mlxlite.engine.load import LoadedModel
from mlxlite.engine.row import Phase, Row

Accept = Callable[[Row, int], None]
"""Told each token that reached the host, in row order. It may end the row or set its mask."""


class Batch:
    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self.vocab_size = 0  # width of the logits, known after `warm_up`
        self.rows: list[Row] = []
        self._inflight: mx.array | None = None  # (B,) uint32: drawn for `rows`, not yet read
        self._recipe: sample.Recipe | None = None
        self._recipe_ids: list[int] = []

    # ------------------------------------------------------------------------------- prefill

    def warm_up(self, tokens: int) -> float:
        """Run one decode and one short prompt, so that libraries load and kernels compile now.

        Returns seconds that the prompt of `tokens` took.
        """
        logits = self._model(mx.zeros((1, 1), dtype=mx.uint32), cache=self._new_cache())
        mx.eval(mx.argmax(logits[:, -1], axis=-1))
        self.vocab_size = int(logits.shape[-1])
        started = time.perf_counter()
        cache = self._new_cache()
        self._model(mx.zeros((1, tokens), dtype=mx.uint32), cache=cache)
        mx.eval(_arrays(cache))
        return time.perf_counter() - started

    def prefill(self, row: Row, tokens: int) -> None:
        """Run the next `tokens` prompt tokens of a row into its cache.

        Only the cache is evaluated: logits stay lazy and are never computed, so the head costs
        nothing here. The prompt's last token is left to the first decode step.
        """
        if row.cache is None:
            row.cache = self._new_cache()
        ids = row.spec.prompt_ids[row.fed : row.fed + tokens]
        self._model(mx.array([ids], dtype=mx.uint32), cache=row.cache)
        mx.eval(_arrays(row.cache))
        mx.clear_cache()  # a chunk's temporaries are of a size that decoding never asks for again

    # -------------------------------------------------------------------------------- decode

    def step(self, decode: Sequence[Row], accept: Accept) -> None:
        """One step: forward the tokens in flight, then read them and draw the next ones.

        decode: the rows that are past their prompt; those not seen before join here. Every row that
        is still decoding afterwards and may go on has one token in flight.
        """
        # 1. Who goes on, and with which input. A row whose last allowed token is in flight is only
        #    read; one that ended since is dropped.
        old, inflight = self.rows, self._inflight
        if not any(row.phase is Phase.DECODE for row in old):
            old, inflight = [], None
        going = [i for i, row in enumerate(old) if row.phase is Phase.DECODE and row.wants_another]
        joining = [row for row in decode if row not in old]
        rows = [old[i] for i in going] + joining

        # 2. Queue the forward, and the draw too unless a guide has a word in it.
        drawn: mx.array | None = None
        steered = any(row.is_steered for row in rows)
        if rows:
            inputs = _inputs(inflight, going, len(old), joining)
            logits = self._forward(inputs, rows)
            if steered:
                mx.async_eval(logits, *_row_arrays(rows))
            else:
                drawn = self._draw(logits, rows)
                mx.async_eval(drawn, *_row_arrays(rows))

        # 3. Read the tokens that were in flight; the only host read of the step.
        if inflight is not None:
            tokens: list[int] = inflight.tolist()  # type: ignore[assignment]
            for row, token in zip(old, tokens, strict=True):
                if row.phase is Phase.DECODE:
                    accept(row, token)

        # 4. The late draw of steered rows.
        if rows and steered:
            drawn = self._draw(sample.masked(logits, rows), rows)
            mx.async_eval(drawn)
        self.rows, self._inflight = rows, drawn

    def let_go(self) -> None:
        """Forget the rows, all ended, and the tokens in flight: nothing is kept while idle."""
        self.rows, self._inflight = [], None

    def drop_all(self) -> None:
        """Forget everything after a failed step."""
        self.let_go()
        self._recipe, self._recipe_ids = None, []
        mx.clear_cache()

    def _forward(self, inputs: mx.array, rows: Sequence[Row]) -> mx.array:
        """Logits (B, V) of the position after each row's input (B,)."""
        logits = []
        for index, row in enumerate(rows):
            if row.cache is None:  # a prompt of one token has no prefill
                row.cache = self._new_cache()
            token = inputs[index : index + 1][None]
            logits.append(self._model(token, cache=row.cache)[:, -1, :])
        return logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=0)

    def _draw(self, logits: mx.array, rows: Sequence[Row]) -> mx.array:
        ids = [row.id for row in rows]
        if self._recipe is None or ids != self._recipe_ids:
            self._recipe, self._recipe_ids = sample.recipe(rows, self.vocab_size), ids
        drawn = sample.sample(logits, self._recipe, rows)
        if any(row.forced for row in rows):
            is_forced = mx.array([bool(row.forced) for row in rows])
            wanted = [row.forced.popleft() if row.forced else 0 for row in rows]
            drawn = mx.where(is_forced, mx.array(wanted, dtype=mx.uint32), drawn)
        for row in rows:
            row.sampled += 1
        return drawn

    def _new_cache(self) -> list[Any]:
        if hasattr(self._model, "make_cache"):
            return list(self._model.make_cache())
        from mlx_lm.models.cache import KVCache  # only after load() put the bare package in place

        return [KVCache() for _ in self._model.layers]


def _inputs(
    inflight: mx.array | None, going: list[int], before: int, joining: Sequence[Row]
) -> mx.array:
    """The next input (B,) of the rows that go on, followed by that of the rows that join."""
    parts = []
    if inflight is not None and going:
        parts.append(inflight if len(going) == before else inflight[mx.array(going)])
    if joining:
        parts.append(mx.array([row.spec.prompt_ids[-1] for row in joining], dtype=mx.uint32))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _arrays(cache: list[Any]) -> list[mx.array]:
    """The buffers of a cache themselves, not views of them.

    They are evaluated with every step: a buffer that stays lazy is copied whole at its next write,
    and so is one of which a view is alive (engine-notes section 4).
    """
    found: list[mx.array] = []
    for part in cache:
        if hasattr(part, "caches"):  # several kinds in one layer (CacheList)
            found.extend(_arrays(list(part.caches)))
            continue
        leaves: list[tuple[str, Any]] = tree_flatten(vars(part))  # type: ignore[assignment]
        found.extend(leaf for _, leaf in leaves if isinstance(leaf, mx.array))
    return found


def _row_arrays(rows: Sequence[Row]) -> list[mx.array]:
    return [array for row in rows if row.cache is not None for array in _arrays(row.cache)]
