"""What OpenAI's chat and completions surfaces share: usage and the frames of a stream.

data: {"id":"cmpl-…","object":"text_completion",…}
(empty line)
data: [DONE]
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from mlxlite.errors import EngineFault, MlxliteError
from mlxlite.http.routing import encode_json, json_template, render_error
from mlxlite.types import JSON, Usage

log = logging.getLogger(__name__)


def render_usage(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "lane": usage.lane,
    }
    return found if usage.fill is None else {**found, "fill": usage.fill}


def template(chunk: JSON) -> bytes:
    """The frame of a chunk, to be filled: see `json_template`."""
    return b"data: " + json_template(chunk) + b"\n\n"


async def frames(
    name: str, chunks: AsyncGenerator[JSON | bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of an answer. An error after the opening is a frame, then the end.

    name: of the answer, for the log. chunks: as values or as frames; started at once and closed
    exactly once.
    """
    try:
        async for chunk in chunks:
            yield chunk if isinstance(chunk, bytes) else frame(chunk)
    except MlxliteError as error:
        yield frame(render_error(error))
        return
    except Exception:
        log.exception("%s failed in mid-stream", name)
        yield frame(render_error(EngineFault("internal error")))
        return
    finally:
        await chunks.aclose()
    yield b"data: [DONE]\n\n"


def frame(value: JSON) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
