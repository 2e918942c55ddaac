"""What the server says about itself: alive, ready, its model, its counters (spec 70 section 8)."""

from __future__ import annotations

import time
from typing import Any

from mlxlite import __version__
from mlxlite.errors import NotFound
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.metrics import CONTENT_TYPE, Family, single
from mlxlite.service import Service
from mlxlite.shelf import Shelf
from mlxlite.swap import Swaps
from mlxlite.types import EngineState


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 while the engine lives, loading included (decision D14)."""
    if service.engine.state in (EngineState.LOADING, EngineState.READY):
        return json_response({"status": "ok"})
    return json_response({"status": service.engine.state.value}, status=503)


async def ready(service: Service, request: Request) -> Response:
    """GET /ready: 200 once the model answers."""
    if service.is_ready:
        return json_response({"status": "ready"})
    return json_response({"status": service.engine.state.value}, status=503)


async def about(service: Service, request: Request) -> Response:
    """GET /v1"""
    return json_response(
        {
            "name": "mlxlite",
            "version": __version__,
            "model": service.model_id,
            "endpoints": list(service.endpoints),
        }
    )


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models: the loaded model, first and always (fault F91); then the other local ones."""
    loaded = await _model_row(service)
    return json_response({"object": "list", "data": [loaded, *await _other_rows(service)]})


async def model(service: Service, request: Request) -> Response:
    """GET /v1/models/{id}: the object or 404 (decision D13); nothing is ever fetched (F90)."""
    wanted = request.params["id"]
    if wanted == service.model_id:
        return json_response(await _model_row(service))
    for row in await _other_rows(service):
        if row["id"] == wanted:
            return json_response(row)
    raise NotFound(
        f"model {wanted!r} is not served here; {service.model_id!r} is", code="model_not_found"
    )


async def _other_rows(service: Service) -> list[dict[str, Any]]:
    """Local models that are not loaded (spec 70 section 8)."""
    shelf = service.part(Shelf)
    rows = await shelf.rows()
    served = {service.model_id, shelf.name_of(service.model_folder)}
    return [
        {
            "id": row["repo_id"],
            "object": "model",
            "created": row["modified"],
            "owned_by": "mlxlite",
            "loaded": False,
            "vision": row["vision"],
            "tier": row["support_tier"],
        }
        for row in rows
        if row["repo_id"] not in served
    ]


async def _model_row(service: Service) -> dict[str, Any]:
    preparation = await service.preparation()
    facts, vectors = preparation.facts, preparation.embedding
    capabilities = {
        "reasoning": preparation.knows_thinking,
        "tools": preparation.template.knows_tools,
        "vision": False,
        "audio": False,
        "structured_output": preparation.enforces_forms,
        "embeddings": vectors is not None and vectors.can_embed,
        "rerank": vectors is not None and vectors.can_score,
    }
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "mlxlite",
        "loaded": True,
        "context_window": facts.max_context,
        "model_type": facts.model_type,
        "backend": facts.backend,
        "dtype": facts.dtype,
        **capabilities,
        "batch_mode": _batch_mode(service),
        "adapters": [],
        "training": False,
        "dsa": False,
        "mtp": False,
        "capabilities": capabilities,
        "gen_defaults": preparation.sampling_defaults(),
    }


def _batch_mode(service: Service) -> str:
    """How rows decode: together, or each in a forward of its own."""
    return "serial" if service.engine.stats().get("shares_forwards") is False else "batch"


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics: counters and histograms of the answers, gauges of the moment."""
    rows, http = service.engine.stats(), service.http_stats()
    memory, cache = rows.get("memory", {}), rows.get("prompt_cache", {})
    states = [({"state": s.value}, float(s is service.engine.state)) for s in EngineState]
    kinds = [
        ({"kind": kind}, memory.get(f"{kind}_bytes", 0)) for kind in ("active", "peak", "cache")
    ]
    now = [
        Family("mlxlite_engine_state", "gauge", "1 for the state the engine is in.", states),
        Family("mlxlite_memory_bytes", "gauge", "MLX's, after the newest step.", kinds),
    ]
    for name, kind, doc, value in (
        ("active_rows", "gauge", "Rows that run.", rows.get("active_rows")),
        ("pending_rows", "gauge", "Rows that wait.", rows.get("pending_rows")),
        ("rejected_rows_total", "counter", "Refused: queue full.", rows.get("rejected_rows")),
        ("decode_steps_total", "counter", "Decode steps.", rows.get("decode_steps")),
        ("prefill_chunks_total", "counter", "Prefill chunks.", rows.get("prefill_chunks")),
        ("engine_restarts_total", "counter", "Lives after the first.", rows.get("restarts")),
        ("prompt_cache_bytes", "gauge", "Kept prefixes.", cache.get("bytes")),
        ("prompt_cache_hits_total", "counter", "Prompts that began there.", cache.get("hits")),
        ("prompt_cache_misses_total", "counter", "Those that did not.", cache.get("misses")),
        ("prompt_cache_evictions_total", "counter", "Let go of.", cache.get("evictions")),
        ("connections", "gauge", "Open connections.", http.get("connections")),
        ("http_requests_active", "gauge", "Being answered.", http.get("requests_active")),
        ("http_requests_total", "counter", "HTTP requests.", http.get("requests_total")),
    ):
        if value is not None:
            now.append(single(f"mlxlite_{name}", kind, doc, value))
    body = service.metrics.render(now).encode()
    return Response(200, body, {"content-type": CONTENT_TYPE})


async def stats(service: Service, request: Request) -> Response:
    """GET /stats: counters and gauges of this process (spec 70 section 8)."""
    rows = service.engine.stats()
    admission = dict(rows.get("admission", {}))
    if service.engine.state is EngineState.READY:
        facts = service.engine.facts
        admission |= {"max_safe_context": facts.max_context, "weights_bytes": facts.weight_bytes}
    return json_response(
        {
            "server": {
                "owner": "serve",
                "model": service.model_id,
                "started_at": service.created,
                "uptime_s": int(time.time()) - service.created,
                "version": __version__,
            },
            "batch": {**rows, "configured": service.settings.batch, "mode": _batch_mode(service)},
            "prompt_cache": rows.get("prompt_cache", {}),
            "admission": admission,
            "kv_quant": {"mode": "off"},
            "http": service.http_stats(),
            "sessions": {"open": len(service.sessions)},
            # This answer's own lease is among them; left: on a model that is being replaced.
            "leases": {"held": service.leases.held, "left": service.part(Swaps).answers_left},
            "response_store": await service.stored(service.responses.statistics()),
        }
    )


async def requests(service: Service, request: Request) -> Response:
    """GET /api/requests: those under way and the last hundred, without any text."""
    rows = service.metrics.recent.newest_first()
    return json_response({"ok": True, "requests": rows})
