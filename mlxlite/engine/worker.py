"""The engine thread: it owns MLX for the process's whole life (STYLE section 4.9).

Only plain values cross its border. In: row specs and cancels, through one inbox. Out: events,
through each row's sink; the engine never waits for a reader. Every row that was submitted is told
its end, whatever happens: an exception in one row's guide or sink ends that row, one in a prefill
ends the row it served, one in the shared step ends the rows of that step, and the loop goes on
(D19).
"""

from __future__ import annotations

import atexit
import itertools
import logging
import statistics
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlite.engine import backend as mlx_backend  # before anything that imports mlx
from mlxlite.engine import load, sample
from mlxlite.engine.batch import Batch
from mlxlite.engine.embed import Embedder
from mlxlite.engine.jobs import Jobs
from mlxlite.engine.row import Phase, Row
from mlxlite.engine.scheduler import (
    CHUNK_BUDGET_S,
    SHARED_CHUNK_BUDGET_S,
    ChunkSizer,
    Scheduler,
)
from mlxlite.errors import (
    Busy,
    Cancelled,
    EngineDown,
    EngineFault,
    MlxliteError,
    ModelError,
)
from mlxlite.types import (
    EmbedSpec,
    EngineState,
    Event,
    Finish,
    ModelFacts,
    RowSpec,
    Sink,
    TokenLogprob,
)

import mlx.core as mx  # isort: skip  (after the backend chose its BLAS)

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8  # long enough to show the speed of a prefill, short enough for a quick start
_CLEAR_EVERY_STEPS = 256  # decode steps between two clearings of MLX's buffer cache


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """folder: the model. dense_folder: see `load.load`. kernel_folder: compiled kernels are kept
    there.

    max_rows: rows that run at once. max_waiting: rows that may wait for that.
    """

    folder: Path
    dense_folder: Path
    kernel_folder: Path
    dtype: str = "auto"
    max_rows: int = 8
    max_waiting: int = 64


@dataclass(slots=True)
class _Counters:
    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    prefill_chunks: int = 0


class Worker:
    """An `Engine` (types.py) around one model. `start()` returns at once; `wait_ready()` waits."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._lock = threading.Condition()
        self._inbox: list[Row] = []  # guarded by _lock, as are the next five
        self._cancels: set[int] = set()
        self._resumes: set[int] = set()
        self._open_rows = 0  # submitted and not yet told their end
        self._stopping = False
        self._state = EngineState.LOADING
        self._error: MlxliteError | None = None
        self._facts: ModelFacts | None = None
        self._settled = threading.Event()  # loaded, or failed to
        self._ids = itertools.count(1)
        self._counters = _Counters()
        self._memory = (0, 0, 0)  # bytes active, peak, cached by MLX; read on the engine thread
        self._step_s: deque[float] = deque(maxlen=512)  # durations of steps that only decoded
        self._thread = threading.Thread(target=self._run, name="mlxlite-engine", daemon=True)
        # Made on the engine thread:
        self._scheduler = Scheduler(options.max_rows, ChunkSizer(1, 1))
        self._batch: Batch | None = None
        self._embedder: Embedder | None = None
        self._jobs = Jobs(options.max_rows + options.max_waiting)  # added to under _lock

    # ------------------------------------------------------------------- from any thread

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.stop)  # an interpreter that ends under a running step aborts

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the model answers. Raises what loading raised, or EngineDown after the
        timeout.
        """
        if not self._settled.wait(timeout_s):
            raise EngineDown("the model is still loading")
        if self._error is not None:
            raise self._error

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._options.folder

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def facts(self) -> ModelFacts:
        if self._facts is None:
            raise EngineDown("the model is not loaded")
        return self._facts

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        with self._lock:
            if self._stopping or self._state in (EngineState.DOWN, EngineState.STOPPED):
                raise EngineDown("the engine is not running")
            if self._open_rows >= self._options.max_rows + self._options.max_waiting:
                self._counters.rejected += 1
                raise Busy("admission queue is full")
            row = Row(next(self._ids), spec, sink)
            self._open_rows += 1
            self._counters.submitted += 1
            self._inbox.append(row)
            self._lock.notify()
        return row.id

    def cancel(self, row_id: int) -> None:
        with self._lock:
            self._cancels.add(row_id)
            self._lock.notify()

    def resume(self, row_id: int) -> None:
        with self._lock:
            self._resumes.add(row_id)
            self._lock.notify()

    def embed(self, spec: EmbedSpec) -> Future[tuple[bytes, ...]]:
        with self._lock:
            if self._stopping or self._state in (EngineState.DOWN, EngineState.STOPPED):
                raise EngineDown("the engine is not running")
            future = self._jobs.add(lambda: self._ready_embedder().run(spec))
            self._lock.notify()
        return future

    def stop(self, timeout_s: float = 30.0) -> None:
        """End every row, let go of MLX and end the thread. Safe to call twice."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        atexit.unregister(self.stop)

    def stats(self) -> dict[str, Any]:
        scheduler = self._scheduler
        steps = list(self._step_s)
        counters = self._counters
        return {
            "state": self._state.value,
            "active_rows": len(scheduler.live),
            "pending_rows": max(self._open_rows - len(scheduler.live), 0),
            "max_rows": self._options.max_rows,
            "submitted_rows": counters.submitted,
            "completed_rows": counters.completed,
            "cancelled_rows": counters.cancelled,
            "failed_rows": counters.failed,
            "rejected_rows": counters.rejected,
            "prompt_tokens": counters.prompt_tokens,
            "generated_tokens": counters.generated_tokens,
            "prefill_chunks": counters.prefill_chunks,
            "decode_steps": counters.decode_steps,
            "jobs": self._jobs.stats(),
            "memory": dict(
                zip(("active_bytes", "peak_bytes", "cache_bytes"), self._memory, strict=True)
            ),
            "decode_step_ms": round(statistics.median(steps) * 1000, 3) if steps else None,
        }

    def take_step_times(self) -> list[float]:
        """Seconds of the newest decode-only steps, oldest first, and forget them (decision D25)."""
        steps = list(self._step_s)
        self._step_s.clear()
        return steps

    # ------------------------------------------------------------------- the engine thread

    def _run(self) -> None:
        try:
            self._live()
        finally:
            self._batch = self._embedder = None
            mx.clear_streams()  # a thread that ends with streams of its own aborts the process

    def _live(self) -> None:
        try:
            self._open()
        except MlxliteError as error:
            self._go_down(error)
            return
        except BaseException as error:
            log.exception("the model could not be loaded")
            self._go_down(EngineDown(f"the model could not be loaded: {error}"))
            return
        self._state = EngineState.READY
        self._settled.set()
        assert self._batch is not None
        try:
            while self._take_inbox():
                self._advance()
                # Rows wait meanwhile, so a slice beside them is as short as a prompt's chunk is.
                self._jobs.step(SHARED_CHUNK_BUDGET_S if self._scheduler.rows else CHUNK_BUDGET_S)
                if not self._scheduler.rows:
                    self._batch.let_go()
                self._memory = mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()
        except BaseException as error:  # a bug of ours; nobody may wait on a dead thread
            log.exception("the engine thread failed")
            self._go_down(EngineDown(f"the engine failed: {error}"))
            return
        self._end_all(EngineDown("the server is stopping"), Finish.CANCELLED)
        self._state = EngineState.STOPPED

    def _open(self) -> None:
        options = self._options
        backend = mlx_backend.start(options.kernel_folder)
        if backend.kind == "cpu" and backend.blas is None:
            log.info(
                "no fast BLAS found; for ten times the speed install mlxlite[mkl] or libopenblas0"
            )
        loaded = load.load(options.folder, backend, options.dtype, options.dense_folder)
        batch = Batch(loaded)
        try:
            speed = _WARM_UP_TOKENS / batch.warm_up(_WARM_UP_TOKENS)
        except Exception as error:  # such as a dtype that this backend has no kernel for
            raise ModelError(f"{options.folder}: the model does not run: {error}") from error
        self._batch = batch
        self._embedder = Embedder(loaded)
        self._scheduler.sizer = ChunkSizer(*backend.chunk_tokens, tokens_per_s=speed)
        self._facts = ModelFacts(
            model_type=str(loaded.config["model_type"]),
            backend=backend.kind,
            dtype=loaded.dtype,
            weight_bytes=loaded.weight_bytes,
            max_context=loaded.max_context,
            vocab_size=batch.vocab_size,
        )

    def _go_down(self, error: MlxliteError) -> None:
        with self._lock:
            self._state = EngineState.DOWN
            self._error = error
        self._take_inbox(wait=False)
        self._end_all(error, Finish.ERROR)
        self._settled.set()

    def _take_inbox(self, wait: bool = True) -> bool:
        """Take what came in; wait while there is nothing to do. False when the engine stops."""
        with self._lock:
            while wait and not (
                self._stopping
                or self._inbox
                or self._cancels
                or self._resumes
                or self._scheduler.has_work
                or self._jobs.count
            ):
                self._lock.wait()
            arrived, self._inbox = self._inbox, []
            cancels, self._cancels = self._cancels, set()
            resumes, self._resumes = self._resumes, set()
            stopping = self._stopping
        for row in arrived:
            self._scheduler.submit(row)
        for row in self._scheduler.rows if cancels or resumes else []:
            if row.id in resumes:
                row.is_held = False
            if row.id in cancels:
                self._end(row, Finish.CANCELLED, error=Cancelled("the client left"))
        return not stopping

    def _advance(self) -> None:
        """One step of the plan. Failures end the rows they touched and nothing else."""
        assert self._batch is not None
        step = self._scheduler.plan()
        if step.is_idle:
            return
        started = time.perf_counter()
        if step.prefill is not None:
            self._prefill(step.prefill, step.prefill_tokens)
        ready = [row for row in step.decode if row.phase is Phase.DECODE and self._opened(row)]
        if ready or self._batch.is_busy:
            try:
                self._batch.step(ready, self._accept)
            except Exception as error:
                log.exception("a decode step failed; its rows end")
                self._batch.drop_all()
                for row in step.decode:
                    self._end(row, Finish.ERROR, error=EngineFault(f"the engine failed: {error}"))
                return
            self._counters.decode_steps += 1
            if self._counters.decode_steps % _CLEAR_EVERY_STEPS == 0:
                mx.clear_cache()
            if step.prefill is None:
                self._step_s.append(time.perf_counter() - started)

    def _prefill(self, row: Row, tokens: int) -> None:
        assert self._batch is not None
        started = time.perf_counter()
        try:
            logprobs = self._batch.prefill(row, tokens)
        except Exception as error:
            log.exception("a prefill failed; its row ends")
            self._end(row, Finish.ERROR, error=EngineFault(f"the engine failed: {error}"))
            return
        self._counters.prefill_chunks += 1
        # A scored prompt is slow; its speed says nothing about other rows' chunks.
        seconds = 0.0 if row.spec.prompt_logprobs else time.perf_counter() - started
        self._scheduler.prefilled(row, tokens, seconds)
        if logprobs:
            try:
                row.is_held = bool(row.sink(Event(logprobs=tuple(logprobs))))
            except Exception as error:
                self._row_failed(row, error)

    def _opened(self, row: Row) -> bool:
        """Prepare a row for its first draw and hear its guide's opening word; once."""
        if row.is_open:
            return True
        assert self._batch is not None
        try:
            self._batch.open(row)
            if row.spec.guide is not None:
                verdict = row.spec.guide.observe(())
                self._steer(row, verdict.forced, verdict.mask)
                if verdict.stop:
                    self._end(row, Finish.GUIDE)
        except Exception as error:
            self._row_failed(row, error)
        return row.phase is Phase.DECODE

    def _accept(self, row: Row, token: int, logprob: TokenLogprob | None) -> None:
        """One token of one row reached the host: count it, ask the guide, tell the sink."""
        if row.first_at is None:
            row.first_at = time.perf_counter()
        row.last = token
        row.read += 1
        row.accepted += 1
        if token in row.spec.eos_ids:
            self._end(row, Finish.EOS)
            return
        ids: tuple[int, ...] = (token,)
        logprobs = () if logprob is None else (logprob,)
        finish: Finish | None = None
        try:
            if row.spec.guide is not None:
                verdict = row.spec.guide.observe(ids)
                self._steer(row, verdict.forced, verdict.mask)
                if verdict.keep == 0:
                    ids, logprobs = (), ()
                    row.accepted -= 1
                finish = Finish.GUIDE if verdict.stop else None
            # Not `accepted`: a token that the guide dropped has used up its draw all the same.
            if finish is None and row.read >= row.spec.max_tokens:
                finish = Finish.LENGTH
            if finish is None:
                row.is_held = bool(row.sink(Event(ids, logprobs=logprobs)))
        except Exception as error:
            self._row_failed(row, error)
            return
        if finish is not None:
            self._end(row, finish, ids, logprobs=logprobs)

    def _steer(self, row: Row, forced: tuple[int, ...], mask: Any) -> None:
        if (forced or mask is not None) and not row.is_steered:
            raise ValueError("the guide steers without having said that it may")
        assert self._batch is not None
        vocab_size = self._batch.vocab_size
        if forced:
            # An id outside the vocabulary would reach past the embedding, in the shared forward.
            if not 0 <= min(forced) <= max(forced) < vocab_size:
                raise ValueError(f"the guide forced an id outside 0..{vocab_size - 1}")
            row.forced.extend(forced)
        if mask is not None:
            row.mask = sample.allowed(mask, vocab_size) if len(mask) else None

    def _row_failed(self, row: Row, error: Exception) -> None:
        log.error("the guide or sink of row %d failed; the row ends", row.id, exc_info=error)
        self._end(row, Finish.ERROR, error=EngineFault(f"the request failed: {error}"))

    def _end(
        self,
        row: Row,
        finish: Finish,
        ids: tuple[int, ...] = (),
        error: MlxliteError | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """End a row once: out of the schedule, counted, its sink told."""
        if row.phase is Phase.ENDED:
            return
        self._scheduler.remove(row)
        counters = self._counters
        counters.prompt_tokens += row.fed
        counters.generated_tokens += row.accepted
        if finish is Finish.ERROR:
            counters.failed += 1
        elif finish is Finish.CANCELLED:
            counters.cancelled += 1
        else:
            counters.completed += 1
        with self._lock:
            self._open_rows -= 1
        try:
            row.end(finish, ids, error, logprobs)
        except Exception:
            log.exception("the sink of row %d failed at its end", row.id)

    def _end_all(self, error: MlxliteError, finish: Finish) -> None:
        """Answer every waiter; rows that come in meanwhile too."""
        with self._lock:
            arrived, self._inbox = self._inbox, []
        for row in arrived:
            self._scheduler.submit(row)
        for row in self._scheduler.rows:
            self._end(row, finish, error=error)
        self._jobs.end_all(error)

    def _ready_embedder(self) -> Embedder:
        assert self._embedder is not None
        return self._embedder
