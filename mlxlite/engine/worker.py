"""The worker: the engine's border, and the life of its thread.

One thread owns MLX. Only plain values cross its border: row specs and cancels in, through one
inbox; events out, through each row's sink; the engine never waits for a reader. Every row that was
submitted is told its end, whatever happens: what the loop cannot contain starts it afresh, and a
watchdog does the same for a step that makes no progress (D19). If that happens too often the engine
is down, and says so.
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
from pathlib import Path
from typing import Any

from mlxlite.engine.jobs import Jobs
from mlxlite.engine.loop import Counters, Loop, WorkerOptions
from mlxlite.engine.row import Row
from mlxlite.errors import Busy, EngineDown, EngineFault, MlxliteError
from mlxlite.types import EmbedSpec, EngineState, Finish, ModelFacts, RowSpec, Sink

import mlx.core as mx  # isort: skip  (after `loop`, whose backend chose its BLAS)

__all__ = ["Worker", "WorkerOptions"]

log = logging.getLogger(__name__)

# A step takes half a second at most; a kernel that is compiled at its first use, a minute (D23).
HANG_S = 120.0
MOST_RESTARTS = 3  # within RESTARTS_WITHIN_S; then something is wrong for good
RESTARTS_WITHIN_S = 600.0


class Worker:
    """An `Engine` (types.py) around one model. `start()` returns at once; `wait_ready()` waits.

    hang_s: after how long a step counts as stuck. most_restarts: within RESTARTS_WITHIN_S.
    """

    def __init__(
        self, options: WorkerOptions, hang_s: float = HANG_S, most_restarts: int = MOST_RESTARTS
    ) -> None:
        self._options = options
        self._hang_s = hang_s
        self._lock = threading.Condition()
        self._inbox: list[Row] = []  # guarded by _lock, as are the next six
        self._cancels: set[int] = set()
        self._resumes: set[int] = set()
        self._open_rows = 0  # submitted and not yet told their end
        self._stopping = False
        self._state = EngineState.LOADING
        self._error: MlxliteError | None = None
        self._facts: ModelFacts | None = None
        self._settled = threading.Event()  # loaded for the first time, or failed to
        self._ids = itertools.count(1)
        self._counters = Counters()
        self._jobs = Jobs(options.max_rows + options.max_waiting)  # added to under _lock
        self._most_restarts = most_restarts
        self._restarted_at: deque[float] = deque(maxlen=max(most_restarts, 1))
        self._step_began: float | None = None  # of the step that runs now
        self._loop, self._thread = self._new_life()
        self._watchdog = threading.Thread(target=self._watch, name="mlxlite-watchdog", daemon=True)
        self._over = threading.Event()  # the worker has stopped for good

    def _new_life(self) -> tuple[Loop, threading.Thread]:
        loop = Loop(self._options, self._counters, self._jobs, self._row_ended)
        name = "mlxlite-engine"
        return loop, threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)

    # ------------------------------------------------------------------- from any thread

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()
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
            self._check_runs()
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
            self._check_runs()
            future = self._jobs.add(lambda: self._embedder().run(spec))
            self._lock.notify()
        return future

    def _check_runs(self) -> None:
        if self._stopping or self._state in (EngineState.DOWN, EngineState.STOPPED):
            raise EngineDown("the engine is not running")

    def stop(self, timeout_s: float = 30.0) -> None:
        """End every row, let go of MLX and end the thread. Safe to call twice."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._over.set()
        atexit.unregister(self.stop)

    def stats(self) -> dict[str, Any]:
        loop, counters = self._loop, self._counters
        steps = list(loop.step_s)
        prompts = loop.prompts
        live = list(loop.scheduler.live)
        active = len(live)
        return {
            "state": self._state.value,
            "active_rows": active,
            "held_rows": sum(row.is_held for row in live),
            "pending_rows": max(self._open_rows - active, 0),
            "max_rows": self._options.max_rows,
            "submitted_rows": counters.submitted,
            "completed_rows": counters.completed,
            "cancelled_rows": counters.cancelled,
            "failed_rows": counters.failed,
            "rejected_rows": counters.rejected,
            "prompt_tokens": counters.prompt_tokens,
            "cached_tokens": counters.cached_tokens,
            "generated_tokens": counters.generated_tokens,
            "prefill_chunks": counters.prefill_chunks,
            "decode_steps": counters.decode_steps,
            "restarts": counters.restarts,
            "retreats": counters.retreats,
            "run_tokens": counters.run_tokens,
            "shares_forwards": loop.shares_forwards,
            "prompt_cache": prompts.stats() if prompts is not None else {},
            "admission": loop.memory_stats(),
            "jobs": self._jobs.stats(),
            "memory": dict(
                zip(("active_bytes", "peak_bytes", "cache_bytes"), loop.memory, strict=True)
            ),
            "decode_step_ms": round(statistics.median(steps) * 1000, 3) if steps else None,
        }

    def take_step_times(self) -> list[float]:
        """Seconds of the newest decode-only steps, oldest first, and forget them (decision D25)."""
        steps = list(self._loop.step_s)
        self._loop.step_s.clear()
        return steps

    # ------------------------------------------------------------------- the engine thread

    def _run(self, loop: Loop) -> None:
        try:
            self._live(loop)
        finally:
            loop.close()
            mx.clear_streams()  # a thread that ends with streams of its own aborts the process

    def _live(self, loop: Loop) -> None:
        """Load, then step until the engine stops or this life is over."""
        try:
            facts = loop.open()
        except MlxliteError as error:
            self._go_down(loop, error)
            return
        except BaseException as error:
            log.exception("the model could not be loaded")
            self._go_down(loop, EngineDown(f"the model could not be loaded: {error}"))
            return
        with self._lock:
            if loop.is_abandoned:
                return
            self._facts, self._state = facts, EngineState.READY
        self._settled.set()
        try:
            while self._take_inbox(loop):
                self._step_began = time.monotonic()
                loop.advance()
                self._step_began = None
        except BaseException as error:
            log.exception("the engine failed")
            self._begin_again(loop, EngineFault(f"the engine failed: {error}"))
            return
        if not loop.is_abandoned:
            loop.end_all(EngineDown("the server is stopping"), Finish.CANCELLED)
            self._state = EngineState.STOPPED

    def _take_inbox(self, loop: Loop, wait: bool = True) -> bool:
        """Take what came in; wait while there is nothing to do. False when the engine stops."""
        with self._lock:
            while wait and not (
                self._stopping
                or self._inbox
                or self._cancels
                or self._resumes
                or loop.is_abandoned
                or loop.has_work
                or self._jobs.count
            ):
                self._lock.wait(loop.patience_s)
            if loop.is_abandoned:
                return False
            arrived, self._inbox = self._inbox, []
            cancels, self._cancels = self._cancels, set()
            resumes, self._resumes = self._resumes, set()
            stopping = self._stopping
        for row in arrived:
            loop.submit(row)
        if resumes:
            loop.resume(resumes)
        if cancels:
            loop.give_up(cancels)
        return not stopping

    def _row_ended(self, row: Row) -> None:
        with self._lock:
            self._open_rows -= 1

    def _embedder(self) -> Any:
        embedder = self._loop.embedder
        assert embedder is not None, "jobs run once the model is loaded"
        return embedder

    # -------------------------------------------------------------------- when it goes wrong

    def _watch(self) -> None:
        """Give up a step that makes no progress: its thread cannot be stopped, only left behind."""
        while not self._over.wait(min(self._hang_s / 4, 1.0)):
            began = self._step_began
            if began is None or time.monotonic() - began < self._hang_s:
                continue
            self._step_began = None
            log.error("a step made no progress for %g s; the engine starts afresh", self._hang_s)
            self._begin_again(self._loop, EngineFault("the engine made no progress"))

    def _begin_again(self, loop: Loop, error: MlxliteError) -> None:
        """Answer every row of a life that is over, and begin another one."""
        with self._lock:
            if loop.is_abandoned:
                return
            loop.is_abandoned = True
            now = time.monotonic()
            recent = sum(now - then < RESTARTS_WITHIN_S for then in self._restarted_at)
            self._restarted_at.append(now)
            self._step_began = None
            goes_on = not self._stopping and recent < self._most_restarts
            self._state = EngineState.LOADING if goes_on else EngineState.DOWN
        if not goes_on:
            self._go_down(loop, EngineDown(error.message))
            return
        loop.end_all(error, Finish.ERROR)
        self._counters.restarts += 1
        self._loop, self._thread = self._new_life()
        self._thread.start()

    def _go_down(self, loop: Loop, error: MlxliteError) -> None:
        with self._lock:
            self._state = EngineState.DOWN
            self._error = error
            arrived, self._inbox = self._inbox, []
        for row in arrived:
            loop.submit(row)
        loop.end_all(error, Finish.ERROR)
        self._settled.set()
