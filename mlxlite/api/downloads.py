"""Downloads, imports and the search for models (spec 70 sections 8 and 9).

    POST   /downloads {"model": "org/name", "file": "x.gguf"}  -> 202 {"ok", "download": row}
    GET    /downloads                                    -> {"ok", "downloads": [row], "uploads"}
    DELETE /downloads/{id}        stops it; one that is over leaves the list
    POST   /api/hub/search {"query": "qwen"}             -> {"ok", "models": [row]}
    POST   /api/imports {"name", "size", "modified"}     -> {"ok", "upload": {"id", "offset", ...}}
    PUT    /api/imports/{id}?offset=0   (bytes)          -> {"ok", "upload"}, at last "download" too
    DELETE /api/imports/{id}

Only what is asked for here goes out to the network, and only to the hub and the package index that
the user's environment names. To resume is to start again: what arrived is used.
"""

from __future__ import annotations

from mlxlite.downloads import Download, Downloads, Target, read_target
from mlxlite.errors import BadRequest
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.service import Service
from mlxlite.uploads import Uploads, is_whole

_MOST_QUERY = 200


async def show(service: Service, request: Request) -> Response:
    """GET /downloads: what runs, and the last five that ended; uploads that are not whole yet."""
    rows, uploads = service.part(Downloads).rows(), service.part(Uploads).rows()
    return json_response({"ok": True, "downloads": rows, "uploads": uploads})


async def start(service: Service, request: Request) -> Response:
    """POST /downloads and /api/hub/download; 409 while the same is under way."""
    body = await request.json()
    target = read_target(body.get("model"), body.get("file"))
    run = service.part(Downloads).start(target)
    return json_response({"ok": True, "download": run.row()}, status=202)


async def cancel(service: Service, request: Request) -> Response:
    """DELETE /downloads/{id}; answers once it has stopped."""
    run = await service.part(Downloads).cancel(request.params["id"])
    return json_response({"ok": True, "download": run.row()})


async def search(service: Service, request: Request) -> Response:
    """POST /api/hub/search: models of the hub by name; 502 if it does not answer."""
    query = (await request.json()).get("query")
    if not isinstance(query, str) or not query.strip() or len(query) > _MOST_QUERY:
        raise BadRequest(f"query must be a text of 1 to {_MOST_QUERY} characters", param="query")
    models = await service.part(Downloads).search(query.strip())
    return json_response({"ok": True, "models": models})


async def begin_import(service: Service, request: Request) -> Response:
    """POST /api/imports: a new upload of a GGUF file, or the same one again, to go on with."""
    body = await request.json()
    upload = await service.part(Uploads).begin(
        body.get("name"), body.get("size"), body.get("modified")
    )
    return json_response({"ok": True, "upload": upload.row()})


async def add_to_import(service: Service, request: Request) -> Response:
    """PUT /api/imports/{id}: the next piece; the last one starts the import."""
    text = request.query.get("offset", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise BadRequest("offset must be where the piece begins, in bytes", param="offset")
    if not request.content:
        raise BadRequest("the piece is empty", param="offset")
    uploads = service.part(Uploads)
    upload = await uploads.add(request.params["id"], int(text), request.content)
    answer = {"ok": True, "upload": upload.row()}
    if is_whole(upload):

        def ended(run: Download) -> None:
            uploads.imported(upload)

        upload.is_importing = True
        try:
            run = service.part(Downloads).start(Target(upload.name, upload=upload.path), ended)
        except BaseException:
            uploads.imported(upload)
            raise
        answer["download"] = run.row()
    return json_response(answer)


async def cancel_import(service: Service, request: Request) -> Response:
    """DELETE /api/imports/{id}: drop an upload that is not whole yet."""
    await service.part(Uploads).cancel(request.params["id"])
    return json_response({"ok": True})
