"""GET /library: the models of this machine and of the catalogue, and what fits (spec 70 section 8).

    GET /library[?refresh=1] -> {"ok", "models": [row], "catalogue": [row], "disk_free_bytes"}

Remembered for 30 seconds; `refresh` looks again. `/api/hub/local` is the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mlxlite.http.routing import Request, Response, json_response
from mlxlite.models.catalogue import CATALOGUE
from mlxlite.service import Service
from mlxlite.shelf import Shelf


async def show(service: Service, request: Request) -> Response:
    """The local models, each with whether it is served, and the catalogue."""
    shelf = service.part(Shelf)
    rows = await shelf.rows(request.query.get("refresh", "0") not in ("", "0", "false"))
    served = shelf.name_of(service.model_folder)
    names = {row["repo_id"] for row in rows}
    return json_response(
        {
            "ok": True,
            "models": [{**row, "serving": row["repo_id"] == served} for row in rows],
            "catalogue": [
                {
                    "name": entry.name,
                    "about": entry.about,
                    "licence": entry.licence,
                    "download_bytes": entry.file_bytes,
                    "size_bytes": entry.snapshot_bytes,
                    "local": entry.name in names,
                }
                for entry in CATALOGUE.values()
            ],
            "disk_free_bytes": await service.in_pool(_free_bytes, service.settings.home),
        }
    )


def _free_bytes(home: Path) -> Any:
    """On the disk that downloads go to; None where nobody knows."""
    for folder in (home, *home.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue  # it is made at the first download
    return None
