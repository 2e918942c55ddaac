"""The loop: what happens on the engine thread, one step after the other.

Everything that touches an array is below this file. A failure ends as little as it can: in a row's
guide or sink that row, in a prefill the row it served, in the shared step the rows of that step
(D19). Only what fails twice in a row is passed on, to whoever can start afresh (`worker`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxlite.engine import backend as mlx_backend  # before anything that imports mlx
from mlxlite.engine import load, on_cpu, sample
from mlxlite.engine.batch import Batch
from mlxlite.engine.embed import Embedder
from mlxlite.engine.findings import Findings, Source
from mlxlite.engine.jobs import Jobs
from mlxlite.engine.memory import Budget
from mlxlite.engine.reuse import PromptCache
from mlxlite.engine.row import Phase, Row
from mlxlite.engine.scheduler import (
    CHUNK_BUDGET_S,
    SHARED_CHUNK_BUDGET_S,
    ChunkSizer,
    Scheduler,
    Step,
)
from mlxlite.engine.slots import is_plain
from mlxlite.errors import Cancelled, EngineFault, MlxliteError, ModelError
from mlxlite.kvplan import Room
from mlxlite.types import Event, Finish, ModelFacts, TokenLogprob, Verdict

import mlx.core as mx  # isort: skip  (after the backend chose its BLAS)

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8  # long enough to show the speed of a prefill, short enough for a quick start
_CLEAR_EVERY_STEPS = 256  # decode steps between two clearings of MLX's buffer cache
_COUNT_EVERY_STEPS = 64  # decode steps between two looks at how much the rows have grown
_MOST_CACHED_BYTES = 2**30  # freed buffers that MLX keeps for reuse
_MOST_FAILED_STEPS = 2  # in a row; then whatever is wrong is not the rows' (D19)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """folder: the model. dense_folder: see `load.load`. kernel_folder: compiled kernels are kept
    there.

    max_rows: rows that run at once. max_waiting: rows that may wait for that. replays: whether to
    find out if layers are replayed. prompt_cache_bytes: of kept prefixes; 0 keeps none. room:
    (backend, bytes of its memory) -> what memory allows; without it nobody counts.
    """

    folder: Path
    dense_folder: Path
    kernel_folder: Path
    dtype: str = "auto"
    max_rows: int = 8
    max_waiting: int = 64
    replays: bool = True
    prompt_cache_bytes: int = 0
    room: Callable[[str, int], Room] | None = None


@dataclass(slots=True)
class Counters:
    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0  # as they come; what has to do with prompts, when its row ends
    decode_steps: int = 0
    prefill_chunks: int = 0
    restarts: int = 0
    retreats: int = 0
    run_tokens: int = 0  # that came several in a forward, because they were known


class Loop:
    """One life of the engine: a model, its rows, what it remembers. `ended` is told each row's end
    before the row's sink is."""

    def __init__(
        self, options: WorkerOptions, counters: Counters, jobs: Jobs, ended: Callable[[Row], None]
    ) -> None:
        self._options = options
        self._counters = counters
        self._jobs = jobs
        self._ended = ended
        self._failed_steps = 0
        self._checks = os.environ.get("MLXLITE_CHECK") == "1"
        self.is_abandoned = False  # set by the watchdog: its rows are answered, it must stop
        self.memory = (0, 0, 0)  # bytes active, peak, cached by MLX
        self.step_s: deque[float] = deque(maxlen=512)  # durations of steps that only decoded
        self.scheduler = Scheduler(options.max_rows, ChunkSizer(1, 1))
        self.batch: Batch | None = None
        self.embedder: Embedder | None = None
        self.prompts: PromptCache | None = None
        self.budget: Budget | None = None
        self._findings: Findings | None = None

    # --------------------------------------------------------------------------- open, close

    def open(self) -> ModelFacts:
        """Load the model and run it once. Raises ModelError, BackendMissing."""
        options = self._options
        backend = mlx_backend.start(options.kernel_folder)
        if backend.kind == "cpu" and backend.blas is None:
            log.info(
                "no fast BLAS found; for ten times the speed install mlxlite[mkl] or libopenblas0"
            )
        loaded = load.load(options.folder, backend, options.dtype, options.dense_folder)
        changed = on_cpu.install(loaded.model) if backend.kind == "cpu" else None
        batch = Batch(loaded, backend.runs_ahead, backend.run_share)
        try:
            speed = _WARM_UP_TOKENS / batch.warm_up(_WARM_UP_TOKENS)
        except Exception as error:  # such as a dtype that this backend has no kernel for
            raise ModelError(f"{options.folder}: the model does not run: {error}") from error
        self.batch = batch
        batch.failed = self._row_failed
        self.embedder = Embedder(loaded)
        self.prompts = PromptCache(batch.lanes, options.prompt_cache_bytes)
        self.scheduler.sizer = ChunkSizer(*backend.chunk_tokens, tokens_per_s=speed)
        max_context = loaded.max_context
        if options.room is not None:
            room = options.room(backend.kind, backend.memory_bytes)
            max_context = min(max_context, room.max_context)
            self._count_memory(room, backend.kind)
        vocab_size = batch.vocab_size
        source = Source(
            options.folder, options.dense_folder, options.kernel_folder, options.dtype,
            options.replays,
        )  # fmt: skip
        self._findings = Findings(loaded, changed, batch.lanes, vocab_size, backend, source)
        self._group()
        return ModelFacts(
            model_type=str(loaded.config["model_type"]),
            backend=backend.kind,
            dtype=loaded.dtype,
            weight_bytes=loaded.weight_bytes,
            max_context=max_context,
            vocab_size=vocab_size,
            memory_bytes=backend.memory_bytes,
        )

    def _group(self) -> None:
        """Let prompts be run together, if it is known by now that they can be."""
        assert self.batch is not None
        lanes = self.batch.lanes
        self.scheduler.may_group = lanes.may_pool and is_plain(lanes.new_cache())

    def _count_memory(self, room: Room, kind: str) -> None:
        assert self.prompts is not None
        mx.set_memory_limit(room.usable_bytes)  # a hint: MLX goes past it, so we count ourselves
        if kind != "cpu":  # there freed memory goes back to the system at once, which is as quick
            mx.set_cache_limit(min(room.usable_bytes // 16, _MOST_CACHED_BYTES))
        tree = self.prompts.tree
        tree.max_bytes = min(tree.max_bytes, max(room.room_bytes, 0))
        self.budget = Budget(
            room.plan, room.room_bytes, lambda: tree.nbytes, tree.evict, room.usable_bytes
        )
        self.scheduler.has_room = self.budget.admits

    def close(self) -> None:
        """Let go of every array."""
        if self.prompts is not None:
            self.prompts.tree.clear()
        if self._findings is not None:
            self._findings.close()
        self.batch = self.embedder = self.prompts = self.budget = self._findings = None
        self.scheduler.has_room = lambda row, running: True

    # ------------------------------------------------------------------------- what comes in

    def submit(self, row: Row) -> None:
        self.scheduler.submit(row)

    def give_up(self, ids: set[int]) -> None:
        for row in self.scheduler.rows:
            if row.id in ids:
                self.end(row, Finish.CANCELLED, error=Cancelled("the client left"))

    def resume(self, ids: set[int]) -> None:
        for row in self.scheduler.live:
            if row.id in ids:
                row.is_held = False

    @property
    def has_work(self) -> bool:
        """Whether to step. Tokens in flight are read before the engine rests, even if all rows are
        held: only then is a held row's cache its own, and the memory of those that left free."""
        is_busy = self.batch is not None and self.batch.is_busy
        return self.scheduler.has_work or is_busy or self._may_try

    @property
    def patience_s(self) -> float | None:
        """How long to wait for work before asking again; None: until some comes."""
        return None if self._findings is None else self._findings.patience_s

    @property
    def _may_try(self) -> bool:
        if self._findings is None:
            return False
        return self._findings.may_try(len(self.scheduler.waiting), len(self.scheduler.live))

    # ------------------------------------------------------------------------------ one step

    def advance(self) -> None:
        """One step of the plan, and a slice of a job. Raises what fails twice in a row."""
        assert self.batch is not None and self.prompts is not None
        for row in [row for row in self.scheduler.live if row.is_leaving]:
            if not self.batch.awaits(row):
                self._send_back(row)
        for row in self.scheduler.admit():
            try:
                self.prompts.begin(row, self.scheduler.live)
            except Exception as error:
                self._row_failed(row, error)
        step = self.scheduler.plan()
        if not step.is_idle or (self.batch.is_busy and self.scheduler.live):
            self._step(step)
        if self.is_abandoned:  # it hung, and another life has begun
            return
        if self._may_try:
            self._try()
        # Rows wait meanwhile, so a slice beside them is as short as a prompt's chunk is.
        self._jobs.step(SHARED_CHUNK_BUDGET_S if self.scheduler.rows else CHUNK_BUDGET_S)
        if not self.scheduler.rows:
            self.batch.let_go()
        if self._checks:
            self.check()
        self.memory = mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()

    @property
    def shares_forwards(self) -> bool | None:
        """Whether rows decode together; None until that is known."""
        if self.batch is None or self._findings is None or not self._findings.is_judged:
            return None
        return self.batch.lanes.may_pool

    def _try(self) -> None:
        assert self._findings is not None
        was_judged = self._findings.is_judged
        self._findings.go_on()
        if self._findings.is_judged and not was_judged:
            self._group()

    def _step(self, step: Step) -> None:
        assert self.batch is not None
        started = time.perf_counter()
        decode, prefill = list(step.decode), step.prefill
        if prefill is not None:
            prompts = [prefill, *step.beside]
            if step.beside:
                self._prefill_together(prompts)
            else:
                self._prefill(prefill, step.prefill_tokens)
            # Whose prompt is done does not wait a step for its first token.
            decode += [row for row in prompts if row.phase is Phase.DECODE and not row.rests]
        ready = [row for row in decode if row.phase is Phase.DECODE and self._opened(row)]
        if not ready and not self.batch.is_busy:
            return
        try:
            self.batch.step(ready, self._accept)
            # A first token does not wait for the next chunk, which may take long.
            if self.batch.awaits_a_first and self.scheduler.has_prompts:
                self.batch.read(self._accept)
        except Exception as error:
            log.exception("a decode step failed; its rows end")
            lost = {*ready, *self.batch.lanes.rows}
            self.batch.drop_all()
            if self._findings is not None:
                self._findings.doubt()
            for row in lost:
                self.end(row, Finish.ERROR, error=EngineFault(f"the engine failed: {error}"))
            self._failed_steps += 1
            if self._failed_steps >= _MOST_FAILED_STEPS:
                raise
            return
        self._failed_steps = 0
        self._counters.run_tokens += self.batch.take_run_tokens()
        self._counters.decode_steps += 1
        if self._counters.decode_steps % _CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        if self.budget is not None and self._counters.decode_steps % _COUNT_EVERY_STEPS == 0:
            victim = self.budget.keep_within(self.scheduler.live)
            if victim is not None:
                victim.is_leaving = True
        if prefill is None and ready:
            self.step_s.append(time.perf_counter() - started)

    def _send_back(self, row: Row) -> None:
        """Memory is short: the row's state is given up, and it goes to the head of the queue."""
        assert self.batch is not None and self.prompts is not None
        log.info("memory is short: row %d waits with %d tokens", row.id, row.length)
        self.prompts.ended(row, self.scheduler.live, keeps=False)
        self.scheduler.send_back(row)
        self.batch.lanes.release(row)
        self._counters.retreats += 1

    def _prefill_together(self, rows: list[Row]) -> None:
        assert self.batch is not None and self.prompts is not None
        started = time.perf_counter()
        counts = [row.chunk_left for row in rows]
        try:
            self.batch.prefill_together(rows)
        except Exception as error:
            log.exception("a prefill failed; its rows end")
            for row in rows:
                self.end(row, Finish.ERROR, error=EngineFault(f"the engine failed: {error}"))
            return
        self._counters.prefill_chunks += 1
        self.scheduler.sizer.measured(max(counts) * len(rows), time.perf_counter() - started)
        for row, count in zip(rows, counts, strict=True):
            self.scheduler.prefilled(row, count, 0.0)
            self.prompts.passed(row, self.scheduler.live)

    def _prefill(self, row: Row, tokens: int) -> None:
        assert self.batch is not None and self.prompts is not None
        started = time.perf_counter()
        try:
            logprobs = self.batch.prefill(row, tokens)
        except Exception as error:
            log.exception("a prefill failed; its row ends")
            self.end(row, Finish.ERROR, error=EngineFault(f"the engine failed: {error}"))
            return
        self._counters.prefill_chunks += 1
        # A scored prompt is slow; its speed says nothing about other rows' chunks.
        seconds = 0.0 if row.spec.prompt_logprobs else time.perf_counter() - started
        self.scheduler.prefilled(row, tokens, seconds)
        self.prompts.passed(row, self.scheduler.live)
        if logprobs:
            try:
                row.is_held |= bool(row.sink(Event(logprobs=tuple(logprobs))))
            except Exception as error:
                self._row_failed(row, error)

    def _opened(self, row: Row) -> bool:
        """Prepare a row for its first draw and hear its guide's opening word; once."""
        if row.is_open:
            return True
        assert self.batch is not None
        try:
            self.batch.open(row)
            if row.spec.guide is not None:
                verdict = row.spec.guide.observe(())
                self._steer(row, verdict)
                if verdict.stop:
                    self.end(row, Finish.GUIDE)
        except Exception as error:
            self._row_failed(row, error)
        return row.phase is Phase.DECODE

    def _accept(self, row: Row, token: int, logprob: TokenLogprob | None) -> None:
        """One token of one row reached the host: count it, ask the guide, tell the sink."""
        if row.first_at is None:
            row.first_at = time.perf_counter()
        row.ids.append(token)
        if token in row.spec.eos_ids:
            self._count(row)
            self.end(row, Finish.EOS)
            return
        ids: tuple[int, ...] = (token,)
        logprobs = () if logprob is None else (logprob,)
        finish: Finish | None = None
        try:
            if row.spec.guide is not None:
                verdict = row.spec.guide.observe(ids)
                self._steer(row, verdict)
                if verdict.keep == 0:
                    ids, logprobs = (), ()
                finish = Finish.GUIDE if verdict.stop else None
            if ids:  # a counter that others read never goes back
                self._count(row)
            # Not `accepted`: a token that the guide dropped has used up its draw all the same.
            if finish is None and len(row.ids) >= row.spec.max_tokens:
                finish = Finish.LENGTH
            if finish is None:
                row.is_held |= bool(row.sink(Event(ids, logprobs=logprobs)))
        except Exception as error:
            self._row_failed(row, error)
            return
        if finish is not None:
            self.end(row, finish, ids, logprobs=logprobs)

    def _count(self, row: Row) -> None:
        row.accepted += 1
        self._counters.generated_tokens += 1

    def _steer(self, row: Row, verdict: Verdict) -> None:
        forced, mask, run = verdict.forced, verdict.mask, verdict.run
        if (forced or mask is not None or run is not None) and not row.is_steered:
            raise ValueError("the guide steers without having said that it may")
        assert self.batch is not None
        vocab_size = self.batch.vocab_size
        # An id outside the vocabulary would reach past the embedding, in the shared forward.
        for ids in (forced, run.ids if run is not None else ()):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise ValueError(f"the guide forced an id outside 0..{vocab_size - 1}")
        row.forced.extend(forced)
        if mask is not None:
            row.next_mask = mask if callable(mask) else None
            if not callable(mask):
                row.mask = sample.bound(mask, vocab_size) if len(mask) else None
        if run is not None:
            row.run = run

    # ----------------------------------------------------------------------------------- ends

    def _row_failed(self, row: Row, error: Exception) -> None:
        log.error("the guide or sink of row %d failed; the row ends", row.id, exc_info=error)
        self.end(row, Finish.ERROR, error=EngineFault(f"the request failed: {error}"))

    def end(
        self,
        row: Row,
        finish: Finish,
        ids: tuple[int, ...] = (),
        error: MlxliteError | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """End a row once: out of the schedule, what it computed kept, counted, its sink told."""
        if row.phase is Phase.ENDED:
            return
        self.scheduler.remove(row)
        if self.prompts is not None:
            try:
                self.prompts.ended(row, self.scheduler.live, keeps=finish is not Finish.ERROR)
            except Exception:
                log.exception("what row %d computed is lost", row.id)
        counters = self._counters
        counters.prompt_tokens += row.fed
        counters.cached_tokens += row.cached
        if finish is Finish.ERROR:
            counters.failed += 1
        elif finish is Finish.CANCELLED:
            counters.cancelled += 1
        else:
            counters.completed += 1
        self._ended(row)
        try:
            row.end(finish, ids, error, logprobs)
        except Exception:
            log.exception("the sink of row %d failed at its end", row.id)

    def end_all(self, error: MlxliteError, finish: Finish) -> None:
        """Answer every waiter."""
        prompts, self.prompts = self.prompts, None  # nothing is worth keeping now
        for row in self.scheduler.rows:
            self.end(row, finish, error=error)
        self.prompts = prompts
        self._jobs.end_all(error)

    def memory_stats(self) -> dict[str, int]:
        """What admission counts with; empty where nobody counts."""
        if self.budget is None:
            return {}
        return {
            "usable_bytes": self.budget.usable_bytes,
            "room_bytes": self.budget.room_bytes,
            "rows_bytes": self.budget.total(list(self.scheduler.live)),
            "kept_bytes": self.budget.kept(),
        }

    def check(self) -> None:
        """Verify what must always hold (`MLXLITE_CHECK=1`). Raises AssertionError."""
        assert self.batch is not None and self.prompts is not None
        live = {row: place for place, row in enumerate(self.scheduler.live)}
        placed = self.batch.lanes.rows
        assert len(placed) == len(set(placed)), "a row has two places"
        for row in placed:
            assert row in live or row.phase is Phase.ENDED, "a row is left behind"
        for row in live:
            assert row.phase is not Phase.ENDED, "an ended row is live"
            pooled = self.batch.lanes.pool_of(row) is not None
            assert not (pooled and row.cache is not None), "a row has two caches"
            awaited = row.waits_for
            assert awaited is None or live.get(awaited, len(live)) < live[row], "waits in vain"
        if not self.batch.is_busy:
            assert not placed, "a row is left behind"
        if not live:
            assert not self.batch.is_busy, "something runs for nobody"
