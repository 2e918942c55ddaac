"""The server as a whole: routes, service and socket put together, one line an endpoint (floor 4).

By the time this file is imported the engine thread is already loading (see `launch`). While it
does, this thread reads the tokenizer and already answers `/health`; `/ready` follows when the model
answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxlite import __version__, embedding, launch
from mlxlite.api import (
    anthropic,
    completions,
    curves,
    downloads,
    embeddings,
    library,
    local,
    markup,
    memory,
    openai,
    page,
    rerank,
    responses,
    serving,
    sessions,
    text,
    upkeep,
)
from mlxlite.approvals import Approvals
from mlxlite.config import Settings
from mlxlite.downloads import Downloads
from mlxlite.errors import MlxliteError
from mlxlite.http.guard import Policy
from mlxlite.http.routing import EventStream, Handler, Request, Response, Route, Router, Surface
from mlxlite.http.server import Server
from mlxlite.lease import leased
from mlxlite.models import fit
from mlxlite.models.library import LocalModel, describe
from mlxlite.prepare import Preparation
from mlxlite.service import Service
from mlxlite.shelf import Shelf
from mlxlite.store import ResponseStore
from mlxlite.swap import Loader, StartedEngine, Swaps, is_same
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.uploads import Uploads

if TYPE_CHECKING:
    from mlxlite.engine.worker import Worker

log = logging.getLogger(__name__)

ServiceHandler = Callable[[Service, Request], Awaitable[Response | EventStream]]

ROUTES: tuple[tuple[str, str, ServiceHandler], ...] = (
    ("GET", "/health", local.health),
    ("GET", "/ready", local.ready),
    ("GET", "/stats", local.stats),
    ("GET", "/metrics", local.metrics),
    ("GET", "/fit", memory.show),
    ("GET", "/v1", local.about),
    ("GET", "/v1/models", local.models),
    ("GET", "/v1/models/{id:path}", local.model),
    ("POST", "/v1/chat/completions", openai.chat),
    ("POST", "/v1/completions", completions.complete),
    ("POST", "/v1/responses", responses.create),
    ("GET", "/v1/responses/{id}", responses.retrieve),
    ("DELETE", "/v1/responses/{id}", responses.delete),
    ("GET", "/v1/responses/{id}/input_items", responses.input_items),
    ("POST", "/v1/responses/{id}/cancel", responses.cancel),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/v1/embeddings", embeddings.embed),
    ("POST", "/v1/rerank", rerank.rerank),
    ("POST", "/v1/score", rerank.score),
    ("POST", "/tokenize", text.tokenize),
    ("POST", "/detokenize", text.detokenize),
    ("POST", "/apply-template", text.apply_template),
    ("POST", "/signal", curves.signal),
    ("POST", "/generate", curves.generate),
    ("GET", "/api/sessions", sessions.show_all),
    ("POST", "/api/sessions", sessions.create),
    ("GET", "/api/sessions/search", sessions.search),
    ("GET", "/api/sessions/export", sessions.export),
    ("POST", "/api/sessions/import", sessions.take_in),
    ("GET", "/api/sessions/{id}", sessions.show),
    ("PATCH", "/api/sessions/{id}", sessions.change),
    ("DELETE", "/api/sessions/{id}", sessions.delete),
    ("GET", "/api/sessions/{id}/export", sessions.download),
    ("POST", "/api/sessions/{id}/messages", sessions.add),
    ("PATCH", "/api/sessions/{id}/messages/{message}", sessions.edit),
    ("POST", "/api/render", markup.render),
    ("GET", "/api/requests", local.requests),
    ("GET", "/library", library.show),
    ("GET", "/downloads", downloads.show),
    ("POST", "/downloads", downloads.start),
    ("DELETE", "/downloads/{id}", downloads.cancel),
    ("POST", "/api/imports", downloads.begin_import),
    ("PUT", "/api/imports/{id}", downloads.add_to_import),
    ("DELETE", "/api/imports/{id}", downloads.cancel_import),
    ("GET", "/api/hub/local", library.show),
    ("POST", "/api/hub/local", library.show),
    ("POST", "/api/hub/search", downloads.search),
    ("POST", "/api/hub/download", downloads.start),
    ("POST", "/api/hub/serve", serving.serve),
    ("DELETE", "/api/hub/serve", serving.cancel),
    ("GET", "/api/models/serve", serving.show),
    ("POST", "/api/models/serve", serving.serve),
    ("DELETE", "/api/models/serve", serving.cancel),
    ("GET", "/api/gc/plan", upkeep.plan),
    ("POST", "/api/gc/execute", upkeep.execute),
    ("GET", "/api/settings/hf-token", upkeep.show_token),
    ("POST", "/api/settings/hf-token", upkeep.keep_token),
    ("DELETE", "/api/settings/hf-token", upkeep.forget_token),
    ("GET", "/api/settings/tool-approvals", upkeep.show_approvals),
    ("POST", "/api/settings/tool-approvals", upkeep.approve),
    ("DELETE", "/api/settings/tool-approvals", upkeep.disapprove),
)
# The web page: no API, so `/v1` does not list it, and open without the key (decision D13).
PAGES: tuple[tuple[str, str, ServiceHandler], ...] = (
    ("GET", "/", page.index),
    ("GET", "/assets/{name:path}", page.asset),
    ("GET", "/manifest.webmanifest", page.manifest),
    ("GET", "/sw.js", page.worker),
    ("GET", "/curves", page.artefact),
    ("GET", "/dag", page.artefact),
    ("GET", "/curve-terrain", page.artefact),
    ("GET", "/status", page.moved),
    ("GET", "/chat", page.moved),
    ("GET", "/models", page.moved),
    ("GET", "/sessions", page.moved),
)
# Whose shape the errors of a path, and of those below it, have; the others have OpenAI's.
SURFACES: dict[str, Surface] = {
    "/v1/messages": anthropic,
    "/v1/messages/count_tokens": anthropic,
    "/signal": curves.SIGNAL,
    "/generate": curves.GENERATION,
}
# What the model itself is asked by, and the names of it in the log.
ASKS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/signal": "signal",
    "/generate": "generate",
}
# How long a thread may keep the GIL from one that waits for it. With Python's own 5 ms an event of
# every stream waits 5 to 7 ms while a long chat is read or a message rendered, so 2 to 4.
SWITCH_S = 0.001
_LAST_WORDS_S = 2.0  # for the error events of answers that a stop cuts off
# No key needed (decision D13).
OPEN_PATHS = ("/health", "/ready", *(path.replace("{name:path}", "*") for _, path, _ in PAGES))


def open_model(settings: Settings, worker: StartedEngine, name: str | None = None) -> Preparation:
    """Read what belongs to text while the engine loads; wait for both. Raises ModelError.

    name: of the model; its folder's if there is none.
    """
    name = name or worker.folder.name
    tokenizer = Tokenizer.load(worker.folder)
    template = ChatTemplate.load(worker.folder, settings.chat_template)
    defaults = _generation_defaults(worker.folder / "generation_config.json")
    traits = embedding.read_traits(worker.folder, name, tokenizer, template)
    worker.wait_ready()
    vectors = embedding.Embedding(settings, tokenizer, worker.facts, traits, name)
    return Preparation(settings, tokenizer, template, worker.facts, defaults, vectors)


def _generation_defaults(path: Path) -> dict[str, Any]:
    """Sampling defaults of the model; an unreadable file means none (spec 10 section 2)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def routes(service: Service) -> list[Route]:
    """Each request goes to whoever serves when it comes, and holds a lease on that."""
    serving = service.serving

    def bound(handler: ServiceHandler) -> Handler:
        def hold(request: Request) -> Awaitable[Response | EventStream]:
            now = serving.now
            return leased(now.leases, handler)(now, request)

        return hold

    return [
        Route(method, path, bound(_noted(handler, method, path)), SURFACES.get(path))
        for method, path, handler in (*ROUTES, *PAGES)
    ]


def _noted(handler: ServiceHandler, method: str, path: str) -> ServiceHandler:
    """Requests for the model that are refused show up among the recent ones."""
    if method != "POST" or path not in ASKS:
        return handler

    async def noted(service: Service, request: Request) -> Response | EventStream:
        try:
            return await handler(service, request)
        except MlxliteError as error:
            service.metrics.recent.refused(f"{request.request_id} {ASKS[path]}", error.status)
            raise

    return noted


def _add_parts(
    service: Service, settings: Settings, model: LocalModel, worker: Worker
) -> tuple[Swaps, Downloads]:
    """What looks after models: those that are here, those that come, the one that is served."""
    # Loaded by now: the worker that is given has it.
    from mlxlite.engine.load import MODEL_FILES

    def machine() -> fit.Machine:
        now = service.serving.now
        if not now.is_ready:
            return fit.guessed_machine(settings.dtype)
        facts = now.engine.facts
        return fit.machine(facts.backend, facts.memory_bytes, settings.dtype)

    def is_first(other: LocalModel) -> bool:
        return is_same(other.folder, model.folder)

    def start(other: LocalModel) -> Worker:
        return launch.start_engine(settings, other)

    def open_other(engine: StartedEngine, other: LocalModel) -> Preparation:
        # A template that was given on the command line was meant for the model that was.
        own = settings if is_first(other) else dataclasses.replace(settings, chat_template=None)
        return open_model(own, engine, other.name)

    def name(other: LocalModel) -> str:
        return (is_first(other) and settings.served_name) or other.name

    shelf = Shelf(settings, MODEL_FILES, machine)
    shelf.served[model.name] = model
    swaps = Swaps(service, model, worker, Loader(start, open_other, name))
    home = settings.home
    downloads = Downloads(home, shelf.changed)
    for part in (shelf, swaps, downloads, Uploads(home), Approvals(home)):
        service.add_part(part)
    return swaps, downloads


async def serve(
    settings: Settings,
    name: str,
    worker: Worker,
    sock: socket.socket,
    announce: Callable[[str], None],
    until: asyncio.Event | None = None,
) -> None:
    """Serve a started engine on a bound socket until a signal (or `until`); then stop in order.

    name: of the model. announce: told the start lines once the model answers. Raises what loading
    raised.
    """
    stop = until or asyncio.Event()
    store = ResponseStore(settings.home / "responses.sqlite3")
    service = Service(settings, worker, settings.served_name or name, store)
    policy = Policy(
        bound_host=settings.host,
        allow_hosts=settings.allow_host,
        cors_origins=settings.cors_origin,
        api_key=settings.api_key,
        open_paths=OPEN_PATHS,
    )
    server = Server(Router(routes(service), policy))
    service.endpoints = tuple(dict.fromkeys(path.replace(":path", "") for _, path, _ in ROUTES))
    service.http_stats = server.stats
    service.model_folder = worker.folder
    model = describe(worker.folder, name)
    swaps, downloads = _add_parts(service, settings, model, worker)
    if until is None:  # the process is ours
        _stop_on_signals(stop)
        sys.setswitchinterval(SWITCH_S)
        service.owns_process = True
    await server.start(sock)
    opening = asyncio.get_running_loop().run_in_executor(
        service.pool, open_model, settings, worker, name
    )
    stopping = asyncio.ensure_future(stop.wait())
    readying: asyncio.Task[None] | None = None
    try:
        both: set[asyncio.Future[Any]] = {opening, stopping}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            try:
                service.opened(opening.result())
            except Exception as error:
                service.opened(error)
                raise
            for line in start_lines(settings, service, sock):
                announce(line)
            if settings.host in ("0.0.0.0", "::") and not settings.api_key:
                log.warning("open to the network without a key; --api-key sets one")
            readying = asyncio.create_task(service.get_ready())
            await stopping
    finally:
        stopping.cancel()
        if readying is not None:
            readying.cancel()
        swaps.begin_close()  # tells who waits for the load
        closing = asyncio.create_task(server.stop(settings.shutdown_s + _LAST_WORDS_S))
        await asyncio.wait({closing}, timeout=settings.shutdown_s)
        # Rows that still run end now, with an error that their clients are told.
        await swaps.close()
        await closing
        # It ends with the engine. If the stop came first, nobody wants to know how.
        await asyncio.gather(opening, return_exceptions=True)
        await downloads.close()
        service.close()
        await asyncio.to_thread(store.close)
        await asyncio.to_thread(service.chats.close)
        if settings.unix is not None:
            settings.unix.unlink(missing_ok=True)


def start_lines(settings: Settings, service: Service, sock: socket.socket) -> list[str]:
    """What a user needs to see: where it is, what it runs, and a request to copy."""
    facts = service.engine.facts
    via = where = ""
    if settings.unix is not None:
        base, via = "http://localhost", f"--unix-socket {settings.unix} "
    else:
        host, port = sock.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # no address that a client could use
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
            where = " and at all other addresses of this machine"
        shown = f"[{host}]" if ":" in host else host
        base = f"http://{shown}:{port}"
    body = '{"messages":[{"role":"user","content":"What is the capital of France?"}]}'
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key else ""
    return [
        f"mlxlite {__version__} at {base}/v1{where} | model {service.model_id} | {facts.backend} | "
        f"{facts.dtype} | context {facts.max_context}",
        f"try: curl {via}{base}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'",
    ]


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first SIGINT or SIGTERM stops in order, a second one at once."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("stopping; a second signal stops at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
