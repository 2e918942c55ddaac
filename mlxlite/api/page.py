"""The web page and its files (spec 70 section 11); they need no key, their requests do (D13)."""

from __future__ import annotations

import re
from pathlib import Path

from mlxlite.errors import NotFound
from mlxlite.http.routing import Request, Response
from mlxlite.http.static import NEVER, POLICY, Asset, Site, filled
from mlxlite.service import Service

_VERSION = re.compile(r"\Av-[0-9a-f]{12}/")


async def index(service: Service, request: Request) -> Response:
    """GET /"""
    return await _fixed(service, request, "index.html")


async def worker(service: Service, request: Request) -> Response:
    """GET /sw.js: the service worker, never cached, so that a new one is seen."""
    return await _fixed(service, request, "sw.js")


async def _fixed(service: Service, request: Request, name: str) -> Response:
    page = (await service.site()).pages.get(name)
    return page.respond(request) if page is not None else _missing(name)


async def manifest(service: Service, request: Request) -> Response:
    """GET /manifest.webmanifest"""
    return await _asset(service, request, "manifest.webmanifest")


async def asset(service: Service, request: Request) -> Response:
    """GET /assets/{name}: one of the files that were there at the start, by its exact name.

    `/assets/v-<version>/<name>` is the same file. The page names its modules so, for a module asks
    for others beside itself: a browser that keeps files by address then never mixes two versions.
    """
    name = request.params["name"]
    return await _asset(service, request, _VERSION.sub("", name))


async def _asset(service: Service, request: Request, name: str) -> Response:
    found = (await service.site()).assets.get(name)
    if found is None:
        raise NotFound(f"no such asset: {name}")
    return found.respond(request)


async def artefact(service: Service, request: Request) -> Response:
    """GET /curves, /dag, /curve-terrain: read each time, so that an edit shows at once.

    A file that is gone since the start is served as it was then.
    """
    site = await service.site()
    name = request.path.strip("/") + ".html"
    page = await service.in_pool(_read, site, name)
    return page.respond(request) if page is not None else _missing(name)


def _read(site: Site, name: str) -> Asset | None:
    """A page as it is now, else as it was at the start; None if there never was one."""

    def read(part: str) -> bytes:
        return Path(site.folder, part).read_bytes()

    try:
        body = filled(name, read(name), read, site.version)
    except OSError:
        if name not in site.pages:
            return None
        body = site.pages[name].body
    return Asset.of(body, "text/html", NEVER)


def _missing(name: str) -> Response:
    text = f"{name} is not part of this installation\n"
    return Response(404, text.encode(), {"content-type": "text/plain; charset=utf-8", **POLICY})


async def moved(service: Service, request: Request) -> Response:
    """GET /status, /chat, ...: views of the one page, which tells them apart by the fragment."""
    view = request.path.rstrip("/")
    return Response(302, b"", {"location": f"/#{view}", **POLICY})
