"""Work for the engine thread that is not a row: done a slice at a time, between decode steps.

A job is a generator. It is made and resumed on the engine thread; each resumption is told how many
seconds it may take, does about so much and yields; what it returns is the result of its future. An
exception ends the job it came from and nothing else. Jobs take turns, so a small one does not wait
for a big one to end. Nothing here knows MLX or a clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlxlite.errors import Busy, EngineFault, MlxliteError

log = logging.getLogger(__name__)

Work = Generator[None, float, Any]


@dataclass(slots=True)
class _Job:
    make: Callable[[], Work]
    future: Future[Any]
    work: Work | None = None


class Jobs:
    """most: jobs that may be open at once.

    `add` is safe from any thread, if its caller holds the lock that also guards against a stop;
    the rest belongs to the engine thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: deque[_Job] = deque()
        self.done = 0
        self.failed = 0
        self.cancelled = 0

    @property
    def count(self) -> int:
        """Jobs that run or wait."""
        return len(self._open)

    def stats(self) -> dict[str, int]:
        return {
            "open": self.count,
            "done": self.done,
            "failed": self.failed,
            "cancelled": self.cancelled,
        }

    def add(self, make: Callable[[], Work]) -> Future[Any]:
        """Queue a job. make: called on the engine thread. A cancelled future ends its job before
        the next slice. Raises Busy.
        """
        if len(self._open) >= self._most:
            raise Busy("admission queue is full")
        future: Future[Any] = Future()
        self._open.append(_Job(make, future))
        return future

    def step(self, budget_s: float) -> None:
        """One slice of the job whose turn it is; given-up jobs are dropped on the way."""
        while self._open:
            job = self._open[0]  # it stays there: whatever ends the loop finds it, and answers it
            if job.future.cancelled():
                self._open.popleft()
                self.cancelled += 1
                self._close(job)
                continue
            wants_more = self._slice(job, budget_s)
            if not self._open or self._open[0] is not job:
                return  # the watchdog gave this thread up and answered everybody
            self._open.popleft()
            if wants_more:
                self._open.append(job)
            return

    def end_all(self, error: MlxliteError) -> None:
        """Answer every waiter. The watchdog may call it while a slice hangs on its thread."""
        while self._open:
            job = self._open.popleft()
            self._close(job)
            self.failed += 1
            _answer(job.future, error=error)

    def _slice(self, job: _Job, budget_s: float) -> bool:
        """True if the job wants more."""
        try:
            if job.work is None:
                job.work = job.make()
                next(job.work)  # up to where it hears of its first budget
            job.work.send(budget_s)
            return True
        except StopIteration as end:
            self.done += 1
            _answer(job.future, end.value)
        except MlxliteError as error:
            self.failed += 1
            _answer(job.future, error=error)
        except Exception as error:
            log.exception("a job failed")
            self.failed += 1
            _answer(job.future, error=EngineFault(f"the engine failed: {error}"))
        return False

    def _close(self, job: _Job) -> None:
        if job.work is not None:
            with suppress(ValueError):  # it is running: see `end_all`
                job.work.close()


def _answer(future: Future[Any], value: Any = None, error: MlxliteError | None = None) -> None:
    """Settle a future, unless its waiter has left or was answered before."""
    if future.done() and not future.cancelled():
        return
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
