"""Service: one running model, as every surface uses it (floor 2).

It joins what a request needs on its way: the prepare pool, the preparation, the engine, the stream.
It exists before the model is loaded; requests that come early wait for it. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor

from mlxlite.config import Settings
from mlxlite.errors import EngineDown
from mlxlite.prepare import Preparation, Prepared
from mlxlite.stream import deltas
from mlxlite.types import Ask, Delta, Engine, EngineState

_POOL_THREADS = 2  # templates and tokenisers; they free the GIL only in part, so more gain nothing


class Service:
    """model_id: what clients see. `opened` is called once, with the preparation or an error."""

    def __init__(self, settings: Settings, engine: Engine, model_id: str) -> None:
        self.settings = settings
        self.engine = engine
        self.model_id = model_id
        self.created = int(time.time())
        self.http_stats: Callable[[], dict[str, int]] = dict  # the server's, once there is one
        self.pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="mlxlite-prepare")
        self._preparation: asyncio.Future[Preparation] = asyncio.get_running_loop().create_future()

    def opened(self, outcome: Preparation | Exception) -> None:
        if self._preparation.done():
            return
        if isinstance(outcome, Exception):
            self._preparation.set_exception(outcome)
            self._preparation.exception()  # read once: it is not news to whoever asks later
        else:
            self._preparation.set_result(outcome)

    @property
    def is_ready(self) -> bool:
        is_open = self._preparation.done() and self._preparation.exception() is None
        return is_open and self.engine.state is EngineState.READY

    async def preparation(self) -> Preparation:
        """The preparation, as soon as the model is loaded. Raises what loading raised."""
        if self.engine.state in (EngineState.DOWN, EngineState.STOPPED):
            raise EngineDown("the engine is not running")
        return await asyncio.shield(self._preparation)

    async def prepare(self, ask: Ask) -> Prepared:
        """Resolve a request in the pool. Raises BadRequest, TooLong, EngineDown."""
        preparation = await self.preparation()
        return await asyncio.get_running_loop().run_in_executor(self.pool, preparation, ask)

    async def run(self, prepared: Prepared, label: str) -> AsyncGenerator[Delta, None]:
        """Give a prepared request to the engine; its deltas. Raises Busy or EngineDown at once."""
        pieces = deltas(self.engine, prepared, label)
        await anext(pieces)  # the engine took it
        return pieces

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
