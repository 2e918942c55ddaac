"""Answers that are made without a client waiting for them (floor 2).

    POST /v1/responses {"background": true} -> Jobs.start -> the id, at once
    GET  /v1/responses/{id}                 -> Job.entry, as it is now; Job.read: its events again

A job lives in this process alone: once its answer is in the response store it is forgotten here,
and a restart ends it. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

from mlxlite.lease import Lease
from mlxlite.store import Entry

# Answers that are over and not in the store (failed, cancelled); the oldest is forgotten first.
MOST_ENDED = 64
_RUNS = ("queued", "in_progress")


class Job:
    """One answer in the making. entry: it, as far as it is. Every frame of its stream is kept until
    it is over: one frame an event, so the sequence number of an event is its place."""

    def __init__(
        self,
        entry: Entry,
        frames: AsyncGenerator[bytes, None],
        render_cancelled: Callable[[], bytes],
        ended: Callable[[Job], None],
        lease: Lease,
    ) -> None:
        self.entry = entry
        self._frames: list[bytes] = []
        self._is_over = False
        self._grown = asyncio.Event()  # a new one for each frame
        self._render_cancelled = render_cancelled
        self._ended = ended
        self._task = asyncio.create_task(self._run(frames))
        # Even if it is cancelled before its first step.
        self._task.add_done_callback(lambda _: lease.release())

    @property
    def runs(self) -> bool:
        return self.entry.response["status"] in _RUNS

    async def _run(self, frames: AsyncGenerator[bytes, None]) -> None:
        try:
            async for frame in frames:
                self._add(frame)
        except asyncio.CancelledError:
            self._add(self._render_cancelled())
        finally:
            await frames.aclose()
            self._is_over = True
            self._grown.set()
            self._ended(self)

    def _add(self, frame: bytes) -> None:
        self._frames.append(frame)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def read(self, at: int = 0) -> AsyncGenerator[bytes, None]:
        """The frames from one on, those that came and those to come. A reader may leave."""
        while True:
            grown = self._grown
            while at < len(self._frames):
                yield self._frames[at]
                at += 1
            if self._is_over:
                return
            if grown is self._grown:
                await grown.wait()

    async def cancel(self) -> None:
        """End it if it runs; what is being stored already is not cut off. Waits for the end."""
        if self.runs:
            self._task.cancel()
        await asyncio.wait([self._task])


class Jobs:
    """Those that run, and the last ones that ended without being stored."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(
        self,
        entry: Entry,
        frames: AsyncGenerator[bytes, None],
        render_cancelled: Callable[[], bytes],
        lease: Lease,
    ) -> Job:
        """frames: of the whole stream, errors included. render_cancelled: the last one of a job
        that is cancelled. lease: on the service that answers; given back at the end."""
        job = Job(entry, frames, render_cancelled, self._ended, lease)
        self._jobs[entry.id] = job
        return job

    def find(self, response_id: str) -> Job | None:
        return self._jobs.get(response_id)

    def forget(self, response_id: str) -> None:
        self._jobs.pop(response_id, None)

    def _ended(self, job: Job) -> None:
        response = job.entry.response
        if response["status"] in ("completed", "incomplete") and response["store"]:
            self.forget(job.entry.id)
            return
        if job.entry.id in self._jobs:
            self._jobs.move_to_end(job.entry.id)
        over = [each.entry.id for each in self._jobs.values() if not each.runs]
        for response_id in over[:-MOST_ENDED]:
            self.forget(response_id)
