"""The batch: the rows that decode, the token each has in flight, and their forward.

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
from mlxlite.engine.drawn import Drawn, add_logprobs, most_logprobs, score
from mlxlite.engine.load import LoadedModel
from mlxlite.engine.penalties import penalties_of
from mlxlite.engine.row import Phase, Row
from mlxlite.types import TokenLogprob

_FEWEST_CANDIDATES = 64
_RELAX_AFTER = 256  # steps
_SCORED_TOKENS = 128  # prompt tokens whose logits exist at once: 78 MB at 150,000 ids in float32

Accept = Callable[[Row, int, TokenLogprob | None], None]
"""Told each token that reached the host, in row order. It may end the row or set its mask."""


class Batch:
    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self.vocab_size = 0  # width of the logits, known after `warm_up`
        self._inflight: Drawn | None = None  # not yet read
        self._candidates = _FEWEST_CANDIDATES
        self._since_short = 0  # steps since a draw had too few
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

    def prefill(self, row: Row, tokens: int) -> list[TokenLogprob]:
        """Run the next `tokens` prompt tokens of a row into its cache.

        Only the cache is evaluated: logits stay lazy and are never computed, so the head costs
        nothing here. The prompt's last token is left to the first decode step. Only for a row that
        wants log-probabilities of its prompt are they computed, and returned.
        """
        if row.cache is None:
            row.cache = self._new_cache()
        ids = row.spec.prompt_ids[row.fed : row.fed + tokens]
        found: list[TokenLogprob] = []
        if row.spec.prompt_logprobs:
            found = self._run_scored(row, ids)
        else:
            self._model(mx.array([ids], dtype=mx.uint32), cache=row.cache)
            mx.eval(_arrays(row.cache))
        mx.clear_cache()  # a chunk's temporaries are of a size that decoding never asks for again
        return found

    def _run_scored(self, row: Row, ids: Sequence[int]) -> list[TokenLogprob]:
        """Run prompt tokens and say how likely the model thought the one after each of them."""
        assert row.cache is not None
        following = row.spec.prompt_ids[row.fed + 1 : row.fed + 1 + len(ids)]
        found: list[TokenLogprob] = []
        for at in range(0, len(ids), _SCORED_TOKENS):
            piece = slice(at, at + _SCORED_TOKENS)
            logits = self._model(mx.array([ids[piece]], dtype=mx.uint32), cache=row.cache)[0]
            drawn = score(logits, row, following[piece])
            mx.eval(*drawn.arrays, _arrays(row.cache))
            found += [entry for entry in drawn.read_logprobs() if entry is not None]
        return found

    # -------------------------------------------------------------------------------- decode

    def open(self, row: Row) -> None:
        """Make what the row's own sampling needs; once, before its first step.

        Apart from `step`, so that a failure here can end this row alone.
        """
        if not row.is_open:
            prompt = row.spec.prompt_ids[:-1]
            row.penalties = penalties_of(row.spec.sampling, prompt, self.vocab_size)
            row.is_open = True

    def step(self, decode: Sequence[Row], accept: Accept) -> None:
        """One step: forward the tokens in flight, then read them and draw the next ones.

        decode: the rows that are past their prompt; those not seen before join here. Every row that
        is still decoding afterwards and may go on has one token in flight.
        """
        # 1. Who goes on, and with which input. A row whose last allowed token is in flight is only
        #    read; one that ended since is dropped.
        old = self._inflight
        if old is not None and not any(row.phase is Phase.DECODE for row in old.rows):
            old = None
        seen = old.rows if old is not None else []
        going = [i for i, row in enumerate(seen) if row in decode and row.wants_another]
        joining = [row for row in decode if row not in seen]
        for row in joining:
            self.open(row)
        rows = [seen[i] for i in going] + joining

        # 2. Queue the forward, and the draw too unless a guide has a word in it.
        new: Drawn | None = None
        steered = any(row.is_steered for row in rows)
        if rows:
            inputs = _inputs(old.ids if old is not None else None, going, len(seen), joining)
            logits = self._forward(inputs, rows)
            if steered:
                mx.async_eval(logits, *_row_arrays(rows))
            else:
                new = self._draw(logits, rows)
                mx.async_eval(*new.arrays, *_row_arrays(rows))

        # 3. Read the tokens that were in flight; the only host read of the step.
        if old is not None:
            tokens, certain = old.read()
            for index, row in enumerate(old.rows):
                if not certain[index] and row.phase is Phase.DECODE:
                    exact = self._redraw(old, index)
                    if exact != tokens[index]:
                        tokens[index] = exact
                        if row in rows:
                            place = rows.index(row)
                            logits = self._rerun(row, exact, logits, place, new)
            for row, token, logprob in zip(old.rows, tokens, old.read_logprobs(), strict=True):
                if row.phase is Phase.DECODE:
                    accept(row, token, logprob)
            self._adapt(all(certain))

        # 4. The late draw of steered rows.
        if rows and steered:
            new = self._draw(logits, rows)
            mx.async_eval(*new.arrays)
        self._inflight = new

    @property
    def is_busy(self) -> bool:
        """Whether tokens are in flight."""
        return self._inflight is not None

    def let_go(self) -> None:
        """Forget the rows, all ended, and the tokens in flight: nothing is kept while idle."""
        self._inflight = None

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
            if row.penalties is not None:
                row.penalties.push(inputs[index])
            token = inputs[index : index + 1][None]
            logits.append(self._model(token, cache=row.cache)[:, -1, :])
        return logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=0)

    def _draw(self, logits: mx.array, rows: list[Row], corrected: Drawn | None = None) -> Drawn:
        """Penalties, masks, then one token a row; what guides force takes its place.

        corrected: a draw of which the single row is drawn again. That is done by sorting, as one
        more token in doubt could not be told to a draw whose other rows were all certain.
        """
        candidates: int | None = None
        if corrected is None:
            ids = [row.id for row in rows]
            if self._recipe is None or ids != self._recipe_ids:
                self._recipe, self._recipe_ids = sample.recipe(rows, self.vocab_size), ids
            how = self._recipe
            if all(_can_retract(row) for row in rows):
                candidates = self._candidates
        else:
            how = sample.recipe(rows, self.vocab_size)
        logits = sample.masked(_penalised(logits, rows), rows)
        row_keys = sample.keys(rows)
        token_ids, is_certain = sample.draw(logits, how, row_keys, candidates)
        if any(row.forced for row in rows):
            is_forced = mx.array([bool(row.forced) for row in rows])
            wanted = [row.forced.popleft() if row.forced else 0 for row in rows]
            token_ids = mx.where(is_forced, mx.array(wanted, dtype=mx.uint32), token_ids)
            is_certain = None if is_certain is None else is_certain | is_forced
        drawn = Drawn(rows, token_ids, is_certain)
        if is_certain is not None:
            drawn.keys, drawn.logits = row_keys, logits
        if (most := most_logprobs(corrected.rows if corrected else rows)) is not None:
            add_logprobs(drawn, logits, most)
        for row in rows:
            row.sampled += 1
        return drawn

    def _redraw(self, drawn: Drawn, index: int) -> int:
        """The token of one row by the plain sort, because the candidates were too few."""
        assert drawn.logits is not None and drawn.keys is not None
        one = slice(index, index + 1)
        row = drawn.rows[index]
        how = sample.recipe([row], self.vocab_size)
        exact, _ = sample.draw(drawn.logits[one], how, drawn.keys[one], None)
        token: int = exact.item()  # type: ignore[assignment]  # MLX: any kind of number
        if drawn.logprob is not None:
            fixed = Drawn([row], exact)
            add_logprobs(fixed, drawn.logits[one], most_logprobs(drawn.rows) or 0)
            drawn.replace(index, fixed)
        return token

    def _rerun(
        self, row: Row, token: int, logits: mx.array, place: int, new: Drawn | None
    ) -> mx.array:
        """Take a wrong token of a row out of its cache and run the right one. Returns the logits.

        place: of the row in the new step. new: that step's draw, if it is already queued.
        """
        assert row.cache is not None
        for part in row.cache:
            part.trim(1)
        if row.penalties is not None:
            row.penalties.undo()
        again = self._forward(mx.array([token], dtype=mx.uint32), [row])
        if new is not None:
            row.sampled -= 1
            new.replace(place, self._draw(again, [row], corrected=new))
            mx.async_eval(*new.arrays, *_row_arrays([row]))
            return logits
        return mx.concatenate([logits[:place], again, logits[place + 1 :]], axis=0)

    def _adapt(self, sufficed: bool) -> None:
        """Look at more candidates after a draw that had too few, at fewer after many that did."""
        if not sufficed:
            self._candidates = min(self._candidates * 4, sample.MOST_CANDIDATES)
            self._since_short = 0
        elif self._candidates > _FEWEST_CANDIDATES:
            self._since_short += 1
            if self._since_short >= _RELAX_AFTER:
                self._candidates = max(self._candidates // 4, _FEWEST_CANDIDATES)
                self._since_short = 0

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
        parts.append(mx.array([row.next_input for row in joining], dtype=mx.uint32))
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
    found = [array for row in rows if row.cache is not None for array in _arrays(row.cache)]
    found += [array for row in rows if row.penalties is not None for array in row.penalties.arrays]
    return found


def _penalised(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Logits (B, V) with each row's bias and penalties applied."""
    if all(row.penalties is None for row in rows):
        return logits
    adjusted = [
        logits[i] if row.penalties is None else row.penalties(logits[i]).astype(logits.dtype)
        for i, row in enumerate(rows)
    ]
    return mx.stack(adjusted)


# Caches that can always drop their newest token. A window that has wrapped and a recurrent state
# cannot, and ConcatenateKVCache says that it can and does not (mlx-lm 0.32.2), so rows of such
# models are drawn by sorting at once.
_ALWAYS_TRIMMABLE = frozenset({"KVCache", "QuantizedKVCache"})


def _can_retract(row: Row) -> bool:
    # A row that has just ended has no cache any more, and none of its draws is ever repeated.
    return all(type(part).__name__ in _ALWAYS_TRIMMABLE for part in row.cache or ())
