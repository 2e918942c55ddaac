"""What the server says about itself: alive, ready, its model, its counters (spec 70 section 8)."""

from __future__ import annotations

import time
from typing import Any

from mlxlite import __version__
from mlxlite.errors import NotFound
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.service import Service
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
    endpoints = ["/health", "/ready", "/stats", "/v1/chat/completions", "/v1/models"]
    return json_response(
        {
            "name": "mlxlite",
            "version": __version__,
            "model": service.model_id,
            "endpoints": endpoints,
        }
    )


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models: the loaded model, first and always (fault F91)."""
    return json_response({"object": "list", "data": [await _model_row(service)]})


async def model(service: Service, request: Request) -> Response:
    """GET /v1/models/{id}: the object or 404 (decision D13); nothing is ever fetched (F90)."""
    wanted = request.params["id"]
    if wanted != service.model_id:
        raise NotFound(
            f"model {wanted!r} is not served here; {service.model_id!r} is", code="model_not_found"
        )
    return json_response(await _model_row(service))


async def _model_row(service: Service) -> dict[str, Any]:
    facts = (await service.preparation()).facts
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "mlxlite",
        "context_window": facts.max_context,
        "model_type": facts.model_type,
        "backend": facts.backend,
        "dtype": facts.dtype,
    }


async def stats(service: Service, request: Request) -> Response:
    """GET /stats: counters and gauges of this process."""
    return json_response(
        {
            "server": {
                "owner": "serve",
                "model": service.model_id,
                "started_at": service.created,
                "uptime_s": int(time.time()) - service.created,
                "version": __version__,
            },
            "batch": service.engine.stats(),
            "http": service.http_stats(),
        }
    )
