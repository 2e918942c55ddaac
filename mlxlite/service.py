"""Service: one running model, as every surface uses it (floor 2).

It joins what a request needs on its way: the prepare pool, the preparation, the engine, the stream.
It exists before the model is loaded; requests that come early wait for it. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from mlxlite import __version__, colours, heap
from mlxlite.background import Jobs
from mlxlite.chats import Chats
from mlxlite.config import Settings
from mlxlite.constrain import OFF, Constrained, wants_form
from mlxlite.embedding import Embedding
from mlxlite.errors import BadRequest, Busy, EngineDown
from mlxlite.http import static
from mlxlite.lease import Leases
from mlxlite.metrics import Metrics
from mlxlite.prepare import Preparation, Prepared
from mlxlite.session import Sessions
from mlxlite.store import ResponseStore
from mlxlite.stream import deltas
from mlxlite.together import Indexed, together
from mlxlite.types import Ask, Delta, EmbedSpec, Engine, EngineState

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_POOL_THREADS = 2  # templates and tokenisers; they free the GIL only in part, so more gain nothing

WEB = Path(__file__).parent / "web"
_COMPILERS = 2  # threads for grammars
_COMPILE_S = 5
_COMPILE_STACK = 64 * 1024 * 1024  # bytes of address space; memory only where it is used
_BEGIN_S = 10  # far more than a thread takes to begin
_QUIET_S = 0.5  # without an answer under way: who just started the server asks at once, if at all


def _compilers() -> ThreadPoolExecutor:
    """Threads with more stack than others: compiling follows references and rules by recursion.
    They begin here, since the size is one of all threads that do."""
    before = threading.stack_size(_COMPILE_STACK)
    try:
        pool = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="mlxlite-compile")
        all_begun = threading.Barrier(_COMPILERS + 1)
        for _ in range(_COMPILERS):
            pool.submit(all_begun.wait, _BEGIN_S)
        all_begun.wait(_BEGIN_S)
    finally:
        threading.stack_size(before)
    return pool


class Serving:
    """Whose turn it is to answer: a service, or the one that came in its place."""

    def __init__(self, service: Service) -> None:
        self.now = service


class Service:
    """model_id: what clients see. `opened` is called once, with the preparation or an error.

    A request stays with the service that it came to. Another model gets a service of its own, made
    by `successor`; `swap` says when it takes over, `leases` when this one is no longer needed.
    """

    def __init__(
        self, settings: Settings, engine: Engine, model_id: str, responses: ResponseStore
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.sessions = Sessions(engine)
        self.leases = Leases()
        self.model_id = model_id
        self.responses = responses
        self.chats = Chats(settings.home / "chats.sqlite3")
        self.jobs = Jobs()
        self.created = int(time.time())
        self.owns_process = False  # set by `app`: nobody else's objects are in it
        self.metrics = Metrics()
        self.endpoints: tuple[str, ...] = ()  # paths, once there is a router
        self.model_folder: Path | None = None
        self.serving = Serving(self)
        self._parts: dict[type, object] = {}
        self.http_stats: Callable[[], dict[str, int]] = dict  # the server's, once there is one
        self.pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="mlxlite-prepare")
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="mlxlite-render")
        self._compilers = _compilers()
        loop = asyncio.get_running_loop()
        self._preparation: asyncio.Future[Preparation] = loop.create_future()
        self._site = loop.run_in_executor(
            self.pool, static.load, WEB, {"hljs.css": colours.STYLE_SHEET}
        )

    def add_part(self, part: object) -> None:
        """Attach what some surfaces need and this file need not know."""
        self._parts[type(part)] = part

    def part(self, kind: type[T]) -> T:
        """What was attached."""
        part = self._parts[kind]
        assert isinstance(part, kind)
        return part

    def successor(self) -> Service:
        """The service of another model, not opened yet. It shares with this one all that belongs
        to no model: settings, stores, jobs, counters, threads. `take` gives it its engine."""
        other = copy.copy(self)
        other.leases = Leases()
        other._preparation = asyncio.get_running_loop().create_future()
        return other

    def take(self, engine: Engine, model_id: str, folder: Path | None) -> None:
        """Set the engine of a service that is not opened yet."""
        self.engine, self.model_id, self.model_folder = engine, model_id, folder
        self.sessions = Sessions(engine)

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

    async def site(self) -> static.Site:
        """The files of the web page, as soon as they are read."""
        return await asyncio.shield(self._site)

    async def prepare(self, ask: Ask) -> Prepared:
        """Resolve a request in the pool. Raises BadRequest, TooLong, Busy, EngineDown."""
        preparation = await self.preparation()
        return await self.in_pool(preparation, ask, await self._form(preparation, ask))

    async def prepare_choices(self, ask: Ask) -> list[Prepared]:
        """The `n` rows of a request, in the pool. Raises BadRequest, TooLong, Busy, EngineDown."""
        preparation = await self.preparation()
        return await self.in_pool(preparation.choices, ask, await self._form(preparation, ask))

    async def _form(self, preparation: Preparation, ask: Ask) -> Constrained | None:
        """The form of an answer, compiled on threads of its own; None if none is asked for.

        A compile cannot be stopped (decision D7): one that takes too long goes on behind a 400.
        Raises BadRequest, and Busy if such ones hold all threads.
        """
        if not wants_form(ask):
            return None
        work = self._compilers.submit(preparation.constrain, ask)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), _COMPILE_S)
        except TimeoutError:
            if work.running() or work.done():
                field = ask.constraint.field if ask.constraint is not None else "tools"
                raise BadRequest(
                    f"{field} takes more than {_COMPILE_S} s to compile", param=field
                ) from None
            raise Busy("other grammars are being compiled; try again later") from None

    async def get_ready(self) -> None:
        """Do what stalls all answers as soon as nobody waits for one: the vocabulary of grammars
        (`vocabulary.whole`; a form that is asked for earlier makes it itself), and `heap.keep`.
        """
        preparation = await self.preparation()
        while True:
            await self.leases.drained()
            await asyncio.sleep(_QUIET_S)  # nothing tells that nothing comes
            if not self.leases.held:
                break
        loop = asyncio.get_running_loop()
        if self.settings.grammar not in OFF:
            try:
                await loop.run_in_executor(self._compilers, preparation.grammars.prepare)
            except Exception:
                # Whoever asks for a form is told then.
                log.warning("the vocabulary of grammars cannot be made", exc_info=True)
        if self.owns_process:
            await loop.run_in_executor(self._compilers, heap.keep)

    async def fingerprint(self) -> str:
        """Changes when the same request and seed may give another answer."""
        facts = (await self.preparation()).facts
        parts = (self.model_id, __version__, facts.model_type, facts.dtype, facts.backend)
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    async def count(self, ask: Ask) -> int:
        """Tokens of a request's prompt, whether or not it fits. Raises BadRequest, EngineDown."""
        preparation = await self.preparation()
        return len((await self.in_pool(preparation.prompt, ask)).ids)

    async def in_pool(self, work: Callable[[*Ts], T], *given: *Ts) -> T:
        """Run what is too slow for the event loop, and touches no array, in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *given)

    async def in_renderer(self, work: Callable[[*Ts], T], *given: *Ts) -> T:
        """The same on the thread that renders, so that a slow text holds up no prompt."""
        return await asyncio.get_running_loop().run_in_executor(self._renderer, work, *given)

    async def run(self, prepared: Prepared, label: str) -> AsyncGenerator[Delta, None]:
        """Give a prepared request to the engine; its deltas. Raises Busy or EngineDown at once."""
        pieces = deltas(self.sessions, prepared, label, self.metrics)
        await anext(pieces)  # the engine took it
        return pieces

    async def run_together(self, rows: Sequence[Prepared], label: str) -> Indexed:
        """The same for the rows of one request; their deltas with the index of their row."""
        pieces = together(self.sessions, rows, label, self.settings.batch, self.metrics)
        await anext(pieces)
        return pieces

    async def embedding(self) -> Embedding:
        """Which vectors the model gives. Raises BadRequest if none; and what loading raised."""
        found = (await self.preparation()).embedding
        if found is None:
            raise BadRequest(f"{self.model_id} gives no embeddings", param="model")
        return found

    async def embed(self, spec: EmbedSpec, label: str) -> tuple[bytes, ...]:
        """The vectors of a spec, logged and counted; a client that leaves takes its work along.

        Raises Busy, EngineDown, EngineFault and what the engine has against the model.
        """
        began, began_s = time.perf_counter(), time.time()
        outcome, inputs, tokens = "left", 0, 0
        try:
            # Cancelling this task cancels the engine's future, which drops the rest of the job.
            vectors = await asyncio.wrap_future(self.engine.embed(spec))
            outcome, inputs, tokens = "done", len(spec.inputs), spec.count_tokens()
            return vectors
        except Exception:
            outcome = "error"
            raise
        finally:
            seconds = time.perf_counter() - began
            self.metrics.embedded(label.rpartition(" ")[2], outcome, inputs, tokens)
            self.metrics.recent.embedded(label, began_s, outcome, tokens)
            log.info(
                "%s: %d texts, in %d, %.0f ms, %.0f tok/s, %s",
                label,
                len(spec.inputs),
                tokens,
                seconds * 1000,
                tokens / seconds,
                outcome,
            )

    async def stored(self, outcome: Future[T]) -> T:
        """What a store found; the event loop goes on meanwhile. Raises StoreFault."""
        return await asyncio.wrap_future(outcome)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._renderer.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)
