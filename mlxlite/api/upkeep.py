"""Upkeep: the hub's cache, the hub token, the tools that are always allowed (spec 70 section 9).

    GET  /api/gc/plan               -> {"ok", "superseded": [row], "reclaim_bytes"}
    POST /api/gc/execute {"yes": true} -> {"ok", "snapshots", "blobs", "reclaimed_bytes"}
    GET  /api/settings/hf-token     -> {"ok", "hasToken", "source": "stored" | "environment" | null}
    POST /api/settings/hf-token {"token": "..."}; DELETE forgets it
    GET  /api/settings/tool-approvals -> {"ok", "alwaysAllow": [name]}; POST {"tool": "..."} adds
         one, DELETE ?tool=... or {"tool": "..."} takes it back

The token goes into a file of the home that only its owner can read, and never into an answer or
the log.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxlite.approvals import Approvals
from mlxlite.downloads import Downloads
from mlxlite.errors import BadRequest, DiskFull
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.models import gc, hub_token
from mlxlite.models.library import hub_cache
from mlxlite.service import Service
from mlxlite.shelf import Shelf
from mlxlite.swap import Swaps


def _in_use(service: Service) -> list[Path]:
    fetched = service.part(Downloads).fetched_repositories()
    folders = [hub_cache() / ("models--" + name.replace("/", "--")) for name in fetched]
    return [*service.part(Swaps).folders, *folders]


async def plan(service: Service, request: Request) -> Response:
    """GET /api/gc/plan: a dry run."""
    found = await service.in_pool(gc.plan, hub_cache(), _in_use(service))
    rows = [
        {
            "repo_id": each.repository,
            "prune_snapshots": [path.name for path in each.snapshots],
            "skipped_snapshots": [path.name for path in each.skipped],
            "dead_blobs": len(each.blobs),
            "reclaim_bytes": each.n_bytes,
        }
        for each in found
    ]
    total_bytes = sum(each.n_bytes for each in found)
    return json_response({"ok": True, "superseded": rows, "reclaim_bytes": total_bytes})


async def execute(service: Service, request: Request) -> Response:
    """POST /api/gc/execute: deletes what a plan made now names."""
    if (await request.json()).get("yes") is not True:
        raise BadRequest('deleting needs {"yes": true}', param="yes")
    done = await service.in_pool(gc.execute, hub_cache(), _in_use(service))
    service.part(Shelf).changed()
    return json_response(
        {
            "ok": True,
            "snapshots": sum(len(each.snapshots) for each in done),
            "blobs": sum(len(each.blobs) for each in done),
            "reclaimed_bytes": sum(each.n_bytes for each in done),
        }
    )


async def show_token(service: Service, request: Request) -> Response:
    """GET /api/settings/hf-token: whether there is one, never which."""
    return await _token(service)


async def keep_token(service: Service, request: Request) -> Response:
    """POST /api/settings/hf-token"""
    token = (await request.json()).get("token")
    if not isinstance(token, str) or not token.strip():
        raise BadRequest("token required", param="token")
    try:
        await service.in_pool(hub_token.write, service.settings.home, token.strip())
    except OSError as error:
        raise DiskFull(f"the token cannot be kept: {error.strerror or 'no room'}") from None
    return await _token(service)


async def forget_token(service: Service, request: Request) -> Response:
    """DELETE /api/settings/hf-token"""
    await service.in_pool(hub_token.forget, service.settings.home)
    return await _token(service)


async def _token(service: Service) -> Response:
    source = await service.in_pool(hub_token.source, service.settings.home)
    return json_response({"ok": True, "hasToken": source is not None, "source": source})


async def show_approvals(service: Service, request: Request) -> Response:
    """GET /api/settings/tool-approvals: tools that whoever runs them need not ask about."""
    return _approvals(await service.in_pool(service.part(Approvals).names))


async def approve(service: Service, request: Request) -> Response:
    """POST /api/settings/tool-approvals"""
    tool = (await request.json()).get("tool")
    return await _changed(service, service.part(Approvals).allow, tool)


async def disapprove(service: Service, request: Request) -> Response:
    """DELETE /api/settings/tool-approvals: 400 without a tool; one that is not there is no fault"""
    body = await request.json() if request.content else {}
    tool = body.get("tool", request.query.get("tool"))
    return await _changed(service, service.part(Approvals).forget, tool)


async def _changed(service: Service, change: Callable[[Any], list[str]], tool: Any) -> Response:
    try:
        return _approvals(await service.in_pool(change, tool))
    except OSError as error:
        raise DiskFull(f"this cannot be kept: {error.strerror or 'no room'}") from None


def _approvals(names: list[str]) -> Response:
    return json_response({"ok": True, "alwaysAllow": names})
