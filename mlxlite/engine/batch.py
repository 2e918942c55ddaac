"""The batch: the rows that decode, the token each has in flight, and their forward.

A step queues the forward of the tokens in flight before it reads them, so the device never waits
for Python: step n + 1 runs while the host looks at token n. What the host then decides (an end, a
stop) comes one step late, and the surplus token is dropped. Rows with a guide that may steer are
sampled after the guide saw token n; their forward is queued early all the same.

Rows share one forward (`lanes`), the sampling and the host read. Everything here runs on the engine
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlxlite.engine import sample
from mlxlite.engine.drawn import Drawn, add_logprobs, most_logprobs, score
from mlxlite.engine.lanes import Lanes, cache_arrays
from mlxlite.engine.load import LoadedModel
from mlxlite.engine.penalties import penalties_of
from mlxlite.engine.recent import Recent, Strengths, adjusted, recent_of, strengths_of
from mlxlite.engine.row import Phase, Row
from mlxlite.engine.runs import agreed, drawn, may_check, pays
from mlxlite.engine.slots import is_trimmable, merge, split
from mlxlite.types import Run, TokenLogprob, Took

_FEWEST_CANDIDATES = 64
_RELAX_AFTER = 256  # steps
_SCORED_TOKENS = 128  # prompt tokens whose logits exist at once: 78 MB at 150,000 ids in float32

Accept = Callable[[Row, int, TokenLogprob | None], None]
"""Told each token that reached the host, in row order. It may end the row or set its mask."""
Failed = Callable[[Row, Exception], None]


class Batch:
    """runs_ahead: whether a queued forward runs while Python goes on (`Backend`). If not, a forward
    is built before the last tokens are read, which takes Python some milliseconds, and started
    after it. run_share: see `Backend`."""

    def __init__(
        self, loaded: LoadedModel, runs_ahead: bool = True, run_share: float = 1.25
    ) -> None:
        self._model = loaded.model
        self._runs_ahead = runs_ahead
        self._run_share = run_share
        self._run_tokens = 0  # that came in runs since they were last counted
        self.failed: Failed = _raise  # told whose guide failed
        self.lanes = Lanes(loaded.model)
        self._may_retract = all(map(is_trimmable, self.lanes.new_cache()))
        self.vocab_size = 0  # width of the logits, known after `warm_up`
        self._inflight: Drawn | None = None  # not yet read
        self._candidates = _FEWEST_CANDIDATES
        self._since_short = 0  # steps since a draw had too few
        self._recipe: sample.Recipe | None = None
        self._recipe_ids: list[int] = []
        self._strengths: Strengths | None = None
        self._strengths_ids: list[int] = []

    # ------------------------------------------------------------------------------- prefill

    def warm_up(self, tokens: int) -> float:
        """Run one decode and one short prompt, so that libraries load and kernels compile now.

        Returns seconds that the prompt of `tokens` took.
        """
        logits = self._model(mx.zeros((1, 1), dtype=mx.uint32), cache=self.lanes.new_cache())
        mx.eval(mx.argmax(logits[:, -1], axis=-1))
        self.vocab_size = int(logits.shape[-1])
        started = time.perf_counter()
        cache = self.lanes.new_cache()
        self._model(mx.zeros((1, tokens), dtype=mx.uint32), cache=cache)
        mx.eval(cache_arrays(cache))
        return time.perf_counter() - started

    def prefill(self, row: Row, tokens: int) -> list[TokenLogprob]:
        """Run the next `tokens` prompt tokens of a row into its cache.

        Only the cache is evaluated: logits stay lazy and are never computed, so the head costs
        nothing here. The prompt's last token is left to the first decode step. Only for a row that
        wants log-probabilities of its prompt are they computed, and returned.
        """
        if row.cache is None:
            row.cache = self.lanes.new_cache()
        ids = row.source[row.fed : row.fed + tokens]
        found: list[TokenLogprob] = []
        if row.spec.prompt_logprobs:
            found = self._run_scored(row, ids)
        else:
            self._model(mx.array([ids], dtype=mx.uint32), cache=row.cache)
            mx.eval(cache_arrays(row.cache))
        mx.clear_cache()  # a chunk's temporaries are of a size that decoding never asks for again
        return found

    def prefill_together(self, rows: Sequence[Row]) -> None:
        """Run the next chunks of several prompts, each to its end or mark, in one forward.

        All have as many tokens in their caches, which are KVCaches. The shorter ones are padded on
        the right: attention is causal, so what comes after a prompt does not reach it.
        """
        first = rows[0]
        counts = [row.chunk_left for row in rows]
        longest = max(counts)
        ids = [
            [*row.source[row.fed : row.fed + count], *[0] * (longest - count)]
            for row, count in zip(rows, counts, strict=True)
        ]
        caches = self.lanes.new_cache()
        if first.fed:
            merge(caches, [row.cache or [] for row in rows], first.fed)
        self._model(mx.array(ids, dtype=mx.uint32), cache=caches)
        mx.eval(cache_arrays(caches))
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            row.cache = self.lanes.new_cache()
            split(caches, index, row.cache, row.fed + count)
        mx.clear_cache()

    def _run_scored(self, row: Row, ids: Sequence[int]) -> list[TokenLogprob]:
        """Run prompt tokens and say how likely the model thought the one after each of them."""
        assert row.cache is not None
        following = row.spec.prompt_ids[row.fed + 1 : row.fed + 1 + len(ids)]
        found: list[TokenLogprob] = []
        for at in range(0, len(ids), _SCORED_TOKENS):
            piece = slice(at, at + _SCORED_TOKENS)
            logits = self._model(mx.array([ids[piece]], dtype=mx.uint32), cache=row.cache)[0]
            drawn = score(logits, row, following[piece])
            mx.eval(*drawn.arrays, cache_arrays(row.cache))
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
        #    read; one that ended or is held since is dropped.
        old = self._inflight
        if old is not None and not any(row.phase is Phase.DECODE for row in old.rows):
            old = None
        seen = {row: i for i, row in enumerate(old.rows)} if old is not None else {}
        for row in decode:
            if row not in seen:
                self.open(row)
        rows = self.lanes.arrange([row for row in decode if row.wants_another])

        # 2. Queue the forward, and the draw too unless a guide has a word in it.
        new: Drawn | None = None
        steered = any(row.is_steered and (old or row.run) is not None for row in rows)
        if rows:
            inputs = _inputs(old, seen, rows)
            for index, row in enumerate(rows):
                if row.penalties is not None:
                    row.penalties.push(inputs[index])
            logits = self.lanes.forward(inputs)
            # Now, as a late draw's rows will have one more token on the host.
            on_host = {row for row in rows if row not in seen}
            strengths, recent = self._looked_at(rows, inputs, on_host)
            queued = [logits]
            if not steered:
                new = self._draw(logits, rows, strengths, recent)
                queued = new.arrays
            if self._runs_ahead:
                mx.async_eval(*queued, *self._arrays(rows))

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

        # 4. What guides expect next goes through the model at once.
        if any(row.run is not None for row in rows):
            if not self._runs_ahead:
                mx.async_eval(logits, *self._arrays(rows))  # two writes in a graph: a copy of all
            for place, row in enumerate(rows):
                while row.run is not None and row.phase is Phase.DECODE:
                    logits = self._take_run(row, place, len(rows), logits, accept)
            inputs = mx.array([row.next_input for row in rows], dtype=mx.uint32)
            strengths, recent = self._looked_at(rows, inputs, set(rows))

        # 5. The late draw of steered rows, and the late forward where there is no running ahead. If
        #    all rows ended just now, nobody needs either.
        if not any(row.phase is Phase.DECODE for row in rows):
            self._inflight = None
            return
        if steered:
            new = self._draw(logits, rows, strengths, recent)
        if new is not None and (steered or not self._runs_ahead):
            mx.async_eval(*new.arrays, *self._arrays(rows))
        self._inflight = new

    def read(self, accept: Accept) -> None:
        """Read the tokens in flight now, with no forward queued behind them: the next step begins
        with what is on the host. For a first token that would else wait for a prompt's chunk."""
        old, self._inflight = self._inflight, None
        if old is None:
            return
        tokens, certain = old.read()
        for index, row in enumerate(old.rows):
            if not certain[index] and row.phase is Phase.DECODE:
                tokens[index] = self._redraw(old, index)
        for row, token, logprob in zip(old.rows, tokens, old.read_logprobs(), strict=True):
            if row.phase is Phase.DECODE:
                accept(row, token, logprob)
        self._adapt(all(certain))

    @property
    def awaits_a_first(self) -> bool:
        """Whether a row's first token is in flight."""
        return self._inflight is not None and any(not row.ids for row in self._inflight.rows)

    def _take_run(
        self, row: Row, place: int, rows: int, logits: mx.array, accept: Accept
    ) -> mx.array:
        """Take as much of a row's run as there is to take, maybe nothing. Returns the logits (B, V)
        of the step, the row's own after what was taken.

        place: of the row in them. rows: how many share the step.
        """
        run, row.run = row.run, None
        assert run is not None and row.spec.guide is not None
        ids = run.ids[: row.spec.max_tokens - len(row.ids)]
        # A prompt's logprobs are over by now; those of an answer are wanted token by token.
        is_supported = row.spec.top_logprobs is None and (run.is_sure or may_check(row))
        is_tried = is_supported and not row.forced and pays(len(ids), rows, self._run_share)
        took = Took(0, is_tried, is_supported)
        if is_tried:
            took, logits = self._run(row, run, ids, place, logits)
        taken = took.count
        try:
            row.spec.guide.took(took)
        except Exception as error:
            self.failed(row, error)
            return logits
        row.stepped, row.ahead = row.stepped - taken, taken
        for token in ids[:taken]:
            row.stepped, row.ahead = row.stepped + 1, row.ahead - 1
            row.sampled += 1
            if row.penalties is not None:
                row.penalties.push(mx.array(token, dtype=mx.uint32))
            accept(row, token, None)
            if row.phase is not Phase.DECODE:
                break
        self._run_tokens += taken
        return logits

    def _run(
        self, row: Row, run: Run, ids: Sequence[int], place: int, logits: mx.array
    ) -> tuple[Took, mx.array]:
        """What the row takes of the ids, all in its cache, and the step's logits after them."""
        if not run.is_sure:
            self._compute_masks([row])
            now = sample.masked(logits[place : place + 1], [row])
            if drawn(row, now, (), 0, self.vocab_size) != [ids[0]]:
                return Took(0), logits
        taken, checkpoint_s = len(ids), 0.0
        if run.is_sure:
            after = self.lanes.run(row, ids)
            mx.async_eval(after, *self.lanes.arrays)
        else:
            started = time.perf_counter()
            trial = self.lanes.begin_trial(row, ids)
            checkpoint_s = time.perf_counter() - started
            after = self.lanes.run_trial(trial)
            mx.async_eval(after, *self.lanes.arrays)
            masks = run.masks(len(ids) - 1) if run.masks is not None else ()
            found = drawn(row, after[:-1], masks, 1, self.vocab_size)
            taken = 1 + agreed(ids[1:], found)
            started = time.perf_counter()
            self.lanes.end_trial(trial, taken)
            mx.async_eval(*self.lanes.arrays)
            checkpoint_s += time.perf_counter() - started
        own = after[taken - 1 : taken]
        logits = mx.concatenate([logits[:place], own, logits[place + 1 :]], axis=0)
        return Took(taken, checkpoint_s=checkpoint_s), logits

    def take_run_tokens(self) -> int:
        """How many tokens came in runs since the last call."""
        count, self._run_tokens = self._run_tokens, 0
        return count

    def awaits(self, row: Row) -> bool:
        """Whether a token of the row is in flight."""
        return self._inflight is not None and row in self._inflight.rows

    @property
    def is_busy(self) -> bool:
        """Whether tokens are in flight, or rows have not left their places yet."""
        return self._inflight is not None or bool(self.lanes.rows)

    def let_go(self) -> None:
        """Forget the rows, all ended, and the tokens in flight: nothing is kept while idle."""
        self._inflight = None
        self.lanes.forget()

    def drop_all(self) -> None:
        """Forget everything after a failed step."""
        self.let_go()
        self._recipe, self._recipe_ids = None, []
        self._strengths, self._strengths_ids = None, []
        mx.clear_cache()

    def _arrays(self, rows: Sequence[Row]) -> list[mx.array]:
        """All that a step writes in place, to be evaluated with it."""
        found = self.lanes.arrays
        for row in rows:
            if row.penalties is not None:
                found += row.penalties.arrays
        return found

    def _looked_at(
        self, rows: list[Row], inputs: mx.array, on_host: set[Row]
    ) -> tuple[Strengths | None, Recent | None]:
        """What bias and penalties need of this step's rows; see `recent_of`."""
        ids = [row.id for row in rows]
        if ids != self._strengths_ids:
            self._strengths, self._strengths_ids = strengths_of(rows), ids
        how = self._strengths
        if how is None or how.width == 0:
            return how, None
        return how, recent_of(rows, inputs, on_host, how.width, self.vocab_size)

    def _draw(
        self,
        logits: mx.array,
        rows: list[Row],
        strengths: Strengths | None,
        recent: Recent | None,
        corrected: Drawn | None = None,
    ) -> Drawn:
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
            if self._may_retract:
                candidates = self._candidates
        else:
            how = sample.recipe(rows, self.vocab_size)
        if any(row.next_mask is not None for row in rows):
            mx.async_eval(logits, *self._arrays(rows))  # the masks are computed while it runs
            self._compute_masks(rows)
        if strengths is not None:
            logits = adjusted(logits, strengths, recent)
        logits = sample.masked(_penalised(logits, rows), rows)
        row_keys = sample.keys(rows)
        token_ids, is_certain = sample.draw(logits, how, row_keys, candidates)
        if any(row.forced for row in rows):
            is_forced = mx.array([bool(row.forced) for row in rows])
            wanted = [row.forced.popleft() if row.forced else 0 for row in rows]
            token_ids = mx.where(is_forced, mx.array(wanted, dtype=mx.uint32), token_ids)
            is_certain = None if is_certain is None else is_certain | is_forced
        new = Drawn(rows, token_ids, is_certain)
        if is_certain is not None:
            new.keys, new.logits = row_keys, logits
        if (most := most_logprobs(corrected.rows if corrected else rows)) is not None:
            add_logprobs(new, logits, most)
        for row in rows:
            row.sampled += 1
        return new

    def _compute_masks(self, rows: Sequence[Row]) -> None:
        """Have the guides compute what they allow, where that is due."""
        for row in rows:
            compute, row.next_mask = row.next_mask, None
            if compute is None:
                continue
            try:
                words = compute()
                row.mask = sample.bound(words, self.vocab_size) if len(words) else None
            except Exception as error:
                self.failed(row, error)

    def _redraw(self, step: Drawn, index: int) -> int:
        """The token of one row by the plain sort, because the candidates were too few."""
        assert step.logits is not None and step.keys is not None
        one = slice(index, index + 1)
        row = step.rows[index]
        how = sample.recipe([row], self.vocab_size)
        exact, _ = sample.draw(step.logits[one], how, step.keys[one], None)
        token: int = exact.item()  # type: ignore[assignment]  # MLX: any kind of number
        if step.logprob is not None:
            fixed = Drawn([row], exact)
            add_logprobs(fixed, step.logits[one], most_logprobs(step.rows) or 0)
            step.replace(index, fixed)
        return token

    def _rerun(
        self, row: Row, token: int, logits: mx.array, place: int, new: Drawn | None
    ) -> mx.array:
        """Take a wrong token of a row out of its cache and run the right one. Returns the logits.

        place: of the row in the new step. new: that step's draw, if it is already queued.
        """
        if row.penalties is not None:
            row.penalties.undo()
            row.penalties.push(mx.array(token, dtype=mx.uint32))
        again = self.lanes.forward_again(row, token)
        if new is not None:
            row.sampled -= 1
            how = strengths_of([row])
            recent = None
            if how is not None and how.width:
                inputs = mx.array([token], dtype=mx.uint32)
                recent = recent_of([row], inputs, (), how.width, self.vocab_size)
            new.replace(place, self._draw(again, [row], how, recent, corrected=new))
            mx.async_eval(*new.arrays, *self._arrays([row]))
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


def _raise(row: Row, error: Exception) -> None:
    raise error


def _inputs(old: Drawn | None, seen: Mapping[Row, int], rows: Sequence[Row]) -> mx.array:
    """The next input (B,) of each row: its token in flight, else its newest one on the host."""
    if (
        old is not None
        and len(seen) == len(rows)
        and all(seen.get(r) == i for i, r in enumerate(rows))
    ):
        return old.ids
    known = [row.next_input for row in rows if row not in seen]
    parts = [] if old is None else [old.ids]
    if known:
        parts.append(mx.array(known, dtype=mx.uint32))
    every = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    fresh = iter(range(len(seen), len(seen) + len(known)))
    return every[mx.array([seen[row] if row in seen else next(fresh) for row in rows])]


def _penalised(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Logits (B, V) with the bias and penalties of rows that look at many tokens applied."""
    if all(row.penalties is None for row in rows):
        return logits
    adjusted = [
        logits[i] if row.penalties is None else row.penalties(logits[i]).astype(logits.dtype)
        for i, row in enumerate(rows)
    ]
    return mx.stack(adjusted)
