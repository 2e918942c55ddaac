"""Another model in the place of the served one, while requests go on (floor 2).

Each model has a service of its own; a request stays with the service that it came to. Two ways,
chosen by the arithmetic of `models/fit`:

    beside    both fit: the new model is loaded while the old one serves; then new requests go to
              it, the old one ends its answers, and is stopped
    in turn   they do not: new requests wait from now on, the old model ends its answers and is
              stopped, the new one is loaded, and who waits is answered by it

If the new model does not load, the old one stays (beside), or is loaded again and answers those
that wait (in turn); the same if the change is cancelled, which it can be until it is done. No
answer is cut off either way. While both are there, what the old one may still grow by is what it
admitted; the new one counts as if it were alone, so for that time the reserve of a quarter of the
memory bears the difference. Owned by the event loop; loading, stopping and reading happen on
threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlxlite.errors import BadRequest, Conflict, EngineDown, MlxliteError, NotFound
from mlxlite.models import fit, library
from mlxlite.models.library import LocalModel
from mlxlite.prepare import Preparation
from mlxlite.service import Service
from mlxlite.types import JSON, EmbedSpec, Engine, EngineState, ModelFacts, RowSpec, Sink

log = logging.getLogger(__name__)


class StartedEngine(Engine, Protocol):
    """What `engine/worker.Worker` is, seen from here."""

    @property
    def folder(self) -> Path: ...

    def wait_ready(self) -> None:
        """Block until the model answers. Raises what loading raised."""

    def stop(self) -> None:
        """End every row, let go of the memory. Blocks."""


@dataclass(frozen=True, slots=True)
class Loader:
    """How a model becomes an engine; all block.

    start: begins to load it. open: waits until it answers. name: the id that clients see.
    """

    start: Callable[[LocalModel], StartedEngine]
    open: Callable[[StartedEngine, LocalModel], Preparation]
    name: Callable[[LocalModel], str]


class Swap:
    """One change of the model. state: loading, draining, cancelling, stopping (the old one, which
    cannot be taken back); done, failed or cancelled."""

    def __init__(self, model: str, previous: str, way: str) -> None:
        self.model = model
        self.previous = previous
        self.way = way  # beside or in turn
        self.state = "loading"
        self.cancelled = asyncio.Event()
        self.error: str | None = None
        self.started_at = time.time()
        self.finished_at: float | None = None

    @property
    def is_under_way(self) -> bool:
        return self.state in ("loading", "draining", "cancelling", "stopping")


class _TakenBack(Exception):
    """A change was cancelled, and what it began is undone."""


class Swaps:
    """The served model of a server, and what it is changed to."""

    def __init__(
        self, service: Service, model: LocalModel, engine: StartedEngine, loader: Loader
    ) -> None:
        self._serving = service.serving
        self._loader = loader
        self._model = model  # that answers now, or did last
        self._engine = engine
        self._alive: list[StartedEngine] = [engine]
        self._leaving: Service | None = None  # whose answers are being waited for
        self.newest: Swap | None = None
        self._task: asyncio.Task[None] | None = None
        self._readying: asyncio.Task[None] | None = None  # what a model wants before it is asked
        self._is_choosing = False
        self._is_closed = False

    @property
    def model(self) -> LocalModel:
        return self._model

    @property
    def folders(self) -> list[Path]:
        """Of all models that are loaded."""
        return [engine.folder for engine in self._alive]

    @property
    def answers_left(self) -> int:
        """Of the model that is leaving."""
        return 0 if self._leaving is None else self._leaving.leases.held

    def row(self) -> dict[str, JSON]:
        """What goes on, for `GET /api/models/serve`."""
        swap, service = self.newest, self._serving.now
        row: dict[str, JSON] = {"model": service.model_id, "ready": service.is_ready, "swap": None}
        if swap is not None:
            row["swap"] = {
                "model": swap.model,
                "previous": swap.previous,
                "way": swap.way,
                "state": swap.state,
                "answers_left": self.answers_left,
                "started_at": round(swap.started_at, 3),
                "finished_at": None if swap.finished_at is None else round(swap.finished_at, 3),
                "error": swap.error,
            }
        return row

    async def begin(self, model: LocalModel) -> None:
        """Start to serve a model; nothing happens if it is served already.

        Raises Conflict while another one is being changed to, BadRequest for a model that cannot
        run here, EngineDown while the first one is loading or the server stops.
        """
        if self._is_closed:
            raise EngineDown("the server is stopping")
        if self._is_choosing or (self.newest is not None and self.newest.is_under_way):
            going = "another model" if self.newest is None else repr(self.newest.model)
            raise Conflict(f"the server is changing to {going} already", code="already_running")
        old = self._serving.now
        if old.engine.state is EngineState.LOADING:
            raise EngineDown("the model is still loading")
        if is_same(model.folder, self._engine.folder) and old.is_ready:
            return
        self._is_choosing = True
        try:
            way = await asyncio.to_thread(_way, model, old)
        finally:
            self._is_choosing = False
        if self._is_closed:
            raise EngineDown("the server is stopping")
        self.newest = swap = Swap(self._loader.name(model), old.model_id, way)
        change = self._beside if way == "beside" else self._in_turn
        log.info("serving %s instead of %s, loaded %s", swap.model, swap.previous, way)
        self._task = asyncio.create_task(self._run(swap, change(swap, model, old), model.folder))

    def cancel(self) -> None:
        """Take back the change that is under way; `row` tells when it has. Raises NotFound."""
        swap = self.newest
        if swap is None or not swap.is_under_way:
            raise NotFound("no change of the model is under way", code="no_change")
        if swap.state == "stopping":
            raise Conflict(f"{swap.model!r} is served already", code="too_late")
        swap.state = "cancelling"
        swap.cancelled.set()

    def begin_close(self) -> None:
        """No more changes; who waits for a model is told so."""
        self._is_closed = True
        self._stop_readying()
        self._serving.now.opened(EngineDown("the server is stopping"))

    async def close(self) -> None:
        """Stop all engines; rows that still run end with an error that their clients are told."""
        self.begin_close()
        if self._task is not None:
            self._task.cancel()
        # One that is loading stops as soon as it has.
        for engine in list(self._alive):
            await asyncio.to_thread(engine.stop)
        if self._task is not None:
            await asyncio.wait([self._task])
        for engine in self._alive:  # started in that moment
            await asyncio.to_thread(engine.stop)

    def _make_ready(self, service: Service) -> None:
        self._stop_readying()
        self._readying = asyncio.create_task(service.get_ready())

    def _stop_readying(self) -> None:
        if self._readying is not None:
            self._readying.cancel()

    # ----------------------------------------------------------------------------- the two ways

    async def _run(self, swap: Swap, change: Awaitable[None], folder: Path) -> None:
        try:
            await change
            swap.state = "done"
            self._make_ready(self._serving.now)
        except asyncio.CancelledError:
            swap.state, swap.error = "failed", "the server is stopping"
            raise
        except _TakenBack:
            swap.state = "cancelled"
            log.info("%s is not served: cancelled", swap.model)
        except Exception as error:
            swap.state, swap.error = "failed", _one_line(error)
            # A client need not know where models lie.
            swap.error = swap.error.replace(f"{folder}/", "").replace(str(folder), swap.model)
            if not isinstance(error, MlxliteError):
                log.exception("the change to %s failed", swap.model)
            log.warning("%s is not served: %s", swap.model, swap.error)
        finally:
            swap.finished_at = time.time()
            self._leaving = None

    async def _beside(self, swap: Swap, model: LocalModel, old: Service) -> None:
        engine, preparation = await self._load(model, swap)
        new = old.successor()
        new.take(engine, swap.model, engine.folder)
        new.opened(preparation)
        leaving = self._engine, self._model
        self._serving.now, self._engine, self._model = new, engine, model
        swap.state, self._leaving = "draining", old
        if not await _drained(swap, old):
            # The old model is still here and takes over again; the new one ends what it began.
            self._serving.now, (self._engine, self._model) = old, leaving
            self._leaving = new
            await new.leases.drained()
            await self._stop(engine)
            raise _TakenBack
        swap.state = "stopping"
        await self._stop(leaving[0])

    async def _in_turn(self, swap: Swap, model: LocalModel, old: Service) -> None:
        leaving_engine, leaving_model = self._engine, self._model
        new = old.successor()
        new.take(_Vacant(leaving_engine), swap.model, None)
        self._serving.now, self._leaving = new, old
        swap.state = "draining"
        if not await _drained(swap, old):
            # The old model still runs, and answers those that wait, too.
            new.take(leaving_engine, swap.previous, leaving_engine.folder)
            new.opened(await _outcome(old))
            self._serving.now, self._leaving = old, new
            await new.leases.drained()
            raise _TakenBack
        await self._stop(leaving_engine)
        if not swap.cancelled.is_set():
            swap.state = "loading"
        try:
            engine, preparation = await self._load(model, swap)
        except Exception as error:
            log.warning("%s is not loaded; going back to %s", swap.model, swap.previous)
            await self._go_back(new, leaving_model)
            raise error
        self._engine, self._model = engine, model
        new.take(engine, swap.model, engine.folder)
        new.opened(preparation)

    async def _go_back(self, service: Service, model: LocalModel) -> None:
        """Serve the model that was served before, to those that wait."""
        try:
            engine, preparation = await self._load(model)
        except Exception as error:
            service.take(_Vacant(self._engine, EngineState.DOWN), self._loader.name(model), None)
            service.opened(EngineDown(f"no model is loaded: {_one_line(error)}"))
            return
        self._engine = engine
        service.take(engine, self._loader.name(model), engine.folder)
        service.opened(preparation)
        self._make_ready(service)

    async def _load(
        self, model: LocalModel, swap: Swap | None = None
    ) -> tuple[StartedEngine, Preparation]:
        """Raises what keeps it from loading, which may be that the swap is cancelled; nothing of it
        is left then."""
        if swap is not None and swap.cancelled.is_set():
            raise _TakenBack
        starting = asyncio.ensure_future(asyncio.to_thread(self._loader.start, model))
        try:
            engine = await asyncio.shield(starting)
        except asyncio.CancelledError:  # a start cannot be: `close` ends what it gives
            self._alive.append(await starting)
            raise
        self._alive.append(engine)
        opening = asyncio.ensure_future(asyncio.to_thread(self._loader.open, engine, model))
        try:
            if swap is not None and not await _before_cancel(swap, opening):
                raise _TakenBack
            return engine, await opening
        except Exception:
            await self._stop(engine)
            await asyncio.wait([opening])  # it ends with its engine
            opening.exception()  # of no more interest
            raise
        except asyncio.CancelledError:
            opening.cancel()
            raise

    async def _stop(self, engine: StartedEngine) -> None:
        await asyncio.to_thread(engine.stop)
        self._alive.remove(engine)


async def _before_cancel(swap: Swap, work: asyncio.Future[Any]) -> bool:
    """Wait for the work, or until the swap is cancelled, which makes it False."""
    cancel = asyncio.create_task(swap.cancelled.wait())
    try:
        await asyncio.wait([work, cancel], return_when=asyncio.FIRST_COMPLETED)
    finally:
        cancel.cancel()
    return not swap.cancelled.is_set()


async def _drained(swap: Swap, service: Service) -> bool:
    """Wait until its answers are over, or until the swap is cancelled, which makes it False."""
    waiting = asyncio.create_task(service.leases.drained())
    try:
        return await _before_cancel(swap, waiting)
    finally:
        waiting.cancel()


async def _outcome(service: Service) -> Preparation | Exception:
    """What `opened` was told."""
    try:
        return await service.preparation()
    except Exception as error:
        return error


class _Vacant:
    """The engine of a service whose model is not there yet. Its figures are those of the engine
    that is leaving."""

    def __init__(self, leaving: Engine, state: EngineState = EngineState.LOADING) -> None:
        self._leaving = leaving
        self.state = state

    @property
    def facts(self) -> ModelFacts:
        raise EngineDown("the model is not loaded")

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        raise EngineDown("the model is not loaded")

    def cancel(self, row_id: int) -> None:
        """There are no rows."""

    def resume(self, row_id: int) -> None:
        """There are no rows."""

    def embed(self, spec: EmbedSpec) -> Any:
        raise EngineDown("the model is not loaded")

    def stats(self) -> dict[str, JSON]:
        return {**self._leaving.stats(), "state": self.state.value}


def _way(model: LocalModel, old: Service) -> str:
    """How the change can be made. Raises BadRequest for a model that cannot run here at all."""
    engine, settings = old.engine, old.settings
    held_bytes, machine = 0, fit.guessed_machine(settings.dtype)
    if old.is_ready:
        facts = engine.facts
        machine = fit.machine(facts.backend, facts.memory_bytes, settings.dtype)
        admission: Any = engine.stats().get("admission", {})
        held_bytes = facts.weight_bytes + sum(
            admission.get(name, 0) for name in ("rows_bytes", "kept_bytes")
        )
    try:
        found = library.fit_of(model, machine, settings.memory_budget)
    except MlxliteError as error:
        log.warning("%s cannot be served: %s", model.name, error.message)  # it names a file
        raise BadRequest(
            f"the files of {model.name!r} do not tell its sizes", param="model"
        ) from None
    if found.least_bytes > found.usable_bytes:
        raise BadRequest(
            f"{model.name} takes {found.least_bytes / 1e9:.2f} GB at least; "
            f"{found.usable_bytes / 1e9:.2f} GB may be used",
            param="model",
        )
    context = min(fit.TYPICAL_CONTEXT, found.max_context)
    fits = held_bytes + found.total_bytes(context) <= found.usable_bytes
    return "beside" if fits or not old.is_ready else "in turn"


def is_same(folder: Path, other: Path) -> bool:
    """Whether two paths lead to the same folder."""
    return folder.resolve() == other.resolve()


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, MlxliteError) else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:300]
