"""What a model wrote, as HTML that a page can show (decision D17).

POST /api/render  {"text": "**Hi**"} -> {"html": "<p><strong>Hi</strong></p>\n"}
"""

from __future__ import annotations

from mlxlite import markdown
from mlxlite.errors import BadRequest, TooLarge
from mlxlite.fields import Field, take
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.service import Service

MOST_CHARS = 1 << 20

TEXT = Field("text", str, "Markdown")


async def render(service: Service, request: Request) -> Response:
    """POST /api/render: of a whole message; half-written Markdown is fine."""
    text = take(await request.json(), TEXT)
    if text is None:
        raise BadRequest("text required", param=TEXT.name)
    if len(text) > MOST_CHARS:
        raise TooLarge(f"text must be at most {MOST_CHARS} characters", param=TEXT.name)
    return await service.in_renderer(_render, text)


def _render(text: str) -> Response:
    return json_response({"html": markdown.render(text)})
