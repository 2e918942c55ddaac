"""GET /fit: what the served model, or another local one, takes here (spec 70 section 8, D18).

    GET /fit?model=NAME&context=TOKENS -> {"model", "machine", "context_tokens", "report",
                                           "measured_decode_tps", "sku_matrix_ctx", "sku_matrix"}

A model is named as `mlxlite ls` shows it; a request never names a path.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from mlxlite.errors import BadRequest, ModelError, NotFound
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.models import fit, library
from mlxlite.models.fit_report import SKU_CONTEXT, report, sku_rows
from mlxlite.service import Service

log = logging.getLogger(__name__)


async def show(service: Service, request: Request) -> Response:
    """The report of one model; 404 for a name that is none of a local model's."""
    preparation = await service.preparation()
    facts = preparation.facts
    machine = fit.machine(facts.backend, facts.memory_bytes, service.settings.dtype)
    name = request.query.get("model") or service.model_id
    found, on_a_mac = await service.in_pool(_measured, service, name, machine)
    is_served = name == service.model_id
    if is_served:  # the engine knows, so nothing is guessed
        counted = dataclasses.replace(found.weights, n_bytes=facts.weight_bytes)
        found = dataclasses.replace(found, weights=counted)
    context = _context(request.query.get("context"), found.max_context)
    shown = report(found, context)
    sku_context = min(SKU_CONTEXT, found.max_context)
    return json_response(
        {
            "model": name,
            "machine": shown.pop("machine"),
            "context_tokens": context,
            "report": shown,
            "measured_decode_tps": _measured_tps(service) if is_served else None,
            "sku_matrix_ctx": sku_context,
            "sku_matrix": sku_rows(on_a_mac, sku_context),
        }
    )


def _measured(service: Service, name: str, machine: fit.Machine) -> tuple[fit.Fit, fit.Fit]:
    """Here, and on a Mac. Reads headers, so it runs in the pool. Raises NotFound, BadRequest."""
    if name == service.model_id and service.model_folder is not None:
        models = [library.describe(service.model_folder, name)]
    else:
        models = [m for m in library.local_models(service.settings.home) if m.name == name]
    if not models:
        raise NotFound(f"no local model is called {name!r}", code="model_not_found", param="model")
    try:
        found = library.fit_of(models[0], machine, service.settings.memory_budget)
        return found, library.fit_of(models[0], fit.machine("metal"))
    except ModelError as error:
        log.warning("GET /fit: %s", error.message)  # it names a file, which a client need not know
        raise BadRequest(f"the files of {name!r} do not tell its sizes", param="model") from None


def _context(given: str | None, most: int) -> int:
    if not given:
        return min(fit.TYPICAL_CONTEXT, most)
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise BadRequest(
            f"context must be a whole number from 1 to {most}, not {given[:40]!r}", param="context"
        )
    return int(given)


def _measured_tps(service: Service) -> float | None:
    """Of one row, by the engine's own step clock."""
    step_ms: Any = service.engine.stats().get("decode_step_ms")
    return round(1000 / step_ms, 1) if step_ms else None
