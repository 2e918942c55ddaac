"""Several rows of one request, run together (floor 2): `n` answers, lists of prompts.

Their deltas come out of one stream, each with the index of its row. Rows of a request start in
order, at most `most` at a time, so that one request with a hundred of them does not fill the queue
for everybody else. The first fault of a row is the fault of all; however the stream ends, every row
that still runs is closed, exactly once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from mlxlite.errors import Busy
from mlxlite.metrics import Metrics
from mlxlite.prepare import Prepared
from mlxlite.session import Sessions
from mlxlite.stream import Answer, Fold, deltas
from mlxlite.types import JSON, Delta, Usage

_MOST_UNREAD = 256  # deltas that wait for the reader, of all rows
_RETRY_S = 0.1  # between two looks at a queue that is full of other requests' rows

Indexed = AsyncGenerator[tuple[int, Delta], None]


async def together(
    sessions: Sessions,
    rows: Sequence[Prepared],
    label: str,
    most: int,
    metrics: Metrics | None = None,
) -> Indexed:
    """Run prepared rows and yield (index, delta); like `stream.deltas`, which each goes through.

    The first pair is empty and says that the engine took the first row; Busy is raised only before
    it. A row that the full queue refuses later waits: half an answer is not thrown away.
    """
    if len(rows) == 1:  # the usual case, without a task between
        async with aclosing(deltas(sessions, rows[0], label, metrics)) as pieces:
            async for delta in pieces:
                yield 0, delta
        return
    crowd = _Crowd(sessions, rows, label, metrics)
    try:
        await crowd.start()
        yield 0, Delta()
        while not crowd.is_over:
            while crowd.waiting and len(crowd.running) < most:
                try:
                    await crowd.start()
                except Busy:
                    break
            if crowd.is_resting:
                await asyncio.sleep(_RETRY_S)
                continue
            for pair in await crowd.take():
                yield pair
    finally:
        await crowd.close()


class _Crowd:
    """The rows of one request: those to start, those that run, what came of them."""

    def __init__(
        self, sessions: Sessions, rows: Sequence[Prepared], label: str, metrics: Metrics | None
    ) -> None:
        self._sessions = sessions
        self._label = label
        self._metrics = metrics
        self.waiting = deque(enumerate(rows))
        self.running: dict[asyncio.Task[None], AsyncGenerator[Delta, None]] = {}
        self._came: deque[tuple[int, Delta]] = deque()
        self._failed: BaseException | None = None
        self._woken = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return not (self.running or self.waiting or self._came or self._failed)

    @property
    def is_resting(self) -> bool:
        """Whether nothing comes by itself: rows wait, and none runs that they could follow."""
        return not (self.running or self._came or self._failed)

    async def start(self) -> None:
        """Start the next row. Raises Busy or EngineDown; the row is still waiting then."""
        index, prepared = self.waiting[0]
        pieces = deltas(self._sessions, prepared, self._label, self._metrics)
        await anext(pieces)
        self.waiting.popleft()
        task = asyncio.ensure_future(self._pump(index, pieces))
        self.running[task] = pieces
        task.add_done_callback(self._ended)

    async def _pump(self, index: int, pieces: AsyncGenerator[Delta, None]) -> None:
        async for delta in pieces:
            while len(self._came) >= _MOST_UNREAD:  # then the sessions fill, and hold their rows
                self._room.clear()
                await self._room.wait()
            self._came.append((index, delta))
            self._woken.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = self._failed or error
        self._woken.set()

    async def take(self) -> list[tuple[int, Delta]]:
        """What came since; empty if a row ended. Raises what a row failed with, after that."""
        if not self._came:
            if self._failed is not None:
                raise self._failed
            await self._woken.wait()
        self._woken.clear()
        self._room.set()
        return [self._came.popleft() for _ in range(len(self._came))]

    async def close(self) -> None:
        """End the rows that run. A task that was cancelled before its first step never ran, so the
        streams are closed here; those that ended do not mind."""
        running = dict(self.running)
        for task in running:
            task.cancel()
        try:
            if running:
                await asyncio.wait(running)
        finally:
            for pieces in running.values():
                await pieces.aclose()


async def fold_together(pieces: Indexed, count: int) -> list[Answer]:
    """The whole answers of `count` rows, in order."""
    wholes = [Fold() for _ in range(count)]
    async with aclosing(pieces):
        async for index, delta in pieces:
            wholes[index].push(delta)
    return [whole.answer() for whole in wholes]


def total(usages: Sequence[Usage], n: int) -> Usage:
    """The usage of a request: tokens of each prompt once, of all its `n` answers."""
    firsts = usages[::n]
    return replace(
        usages[0],
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        lane=max((usage.lane for usage in usages), key=lambda lane: lane == "batched"),
        fill=_sum_fill(usages),
    )


def _sum_fill(usages: Sequence[Usage]) -> Mapping[str, JSON] | None:
    """What was filled in all answers: counts, and lists one after the other."""
    found: dict[str, JSON] | None = None
    for usage in usages:
        if usage.fill is not None:
            before = found or {}
            found = {
                name: before[name] + value if name in before else value
                for name, value in usage.fill.items()
            }
    return found
