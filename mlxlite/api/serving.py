"""Another model in place of the served one (spec 70 section 9, `mlxlite/swap.py`).

    POST /api/models/serve {"model": "name"} -> 202 {"ok", "restart_required": false, "serve": row}
    GET  /api/models/serve                   -> {"ok", "serve": {"model", "ready", "swap": {...}}}
    DELETE /api/models/serve                 -> the same; takes back a change that is under way

A model is named as `GET /library` shows it, never by a path. `/api/hub/serve` is the same.
"""

from __future__ import annotations

from mlxlite.errors import BadRequest
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.service import Service
from mlxlite.shelf import Shelf
from mlxlite.swap import Swaps


async def show(service: Service, request: Request) -> Response:
    """GET /api/models/serve: what is served, and the newest change."""
    return json_response({"ok": True, "serve": service.part(Swaps).row()})


async def serve(service: Service, request: Request) -> Response:
    """POST /api/models/serve: 404 for what is not here, 409 while a change is under way."""
    name = (await request.json()).get("model")
    if not isinstance(name, str) or not name:
        raise BadRequest("model must be the name of a local model", param="model")
    shelf, swaps = service.part(Shelf), service.part(Swaps)
    model = await shelf.find(name)
    shelf.served[model.name] = model
    await swaps.begin(model)
    row = swaps.row()
    return json_response({"ok": True, "restart_required": False, "serve": row}, status=202)


async def cancel(service: Service, request: Request) -> Response:
    """DELETE /api/models/serve: 404 if nothing is being changed; answers before it has stopped."""
    swaps = service.part(Swaps)
    swaps.cancel()
    return json_response({"ok": True, "serve": swaps.row()}, status=202)
