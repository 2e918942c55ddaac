"""OpenAI's embeddings: texts or token ids in, one vector each out (spec 70 section 7).

    {"object": "list", "model": "m", "usage": {"prompt_tokens": 2, "total_tokens": 2},
     "data": [{"object": "embedding", "index": 0, "embedding": [0.1, …] or "zczMPQ…"}]}

Vectors have length 1. `usage` counts the tokens that the model saw, those of an instruction and of
the end of the text too (fault F94). A big answer takes long to write, so a pool thread does it, a
vector at a time.
"""

from __future__ import annotations

import base64
import json

from mlxlite import fields
from mlxlite.embedding import Embedding, cut, numbers
from mlxlite.http.routing import Request, Response
from mlxlite.service import Service


async def embed(service: Service, request: Request) -> Response:
    """POST /v1/embeddings"""
    body = await request.json()
    for field in fields.EMBEDDINGS:
        fields.take(body, field)
    inputs = await service.in_pool(fields.take_inputs, body)  # it may hold millions of ids
    dimensions = fields.take(body, fields.DIMENSIONS)
    is_base64 = fields.take(body, fields.ENCODING_FORMAT) == "base64"
    vectors_of = await service.embedding()
    vectors_of.check_embeds(dimensions)
    instruction = fields.take(body, fields.INSTRUCTION)
    spec = await service.in_pool(vectors_of.embed_spec, inputs, instruction)
    vectors = await service.embed(spec, f"{request.request_id} embeddings")
    Embedding.check_width(len(vectors[0]) // 4, dimensions)
    tokens = spec.count_tokens()

    def render() -> bytes:
        return _render(vectors, dimensions, is_base64, service.model_id, tokens)

    headers = {"content-type": "application/json"}
    return Response(200, await service.in_pool(render), headers)


def _render(
    vectors: tuple[bytes, ...], dimensions: int | None, is_base64: bool, model: str, tokens: int
) -> bytes:
    rows = []
    for index, vector in enumerate(vectors):
        part = cut(vector, dimensions)
        if is_base64:
            shown = '"' + base64.b64encode(part).decode() + '"'
        else:  # nine digits tell every float32 from its neighbours
            shown = "[" + ",".join([f"{x:.9g}" for x in numbers(part)]) + "]"
        rows.append(f'{{"object":"embedding","index":{index},"embedding":{shown}}}')
    usage = f'{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}'
    head = f'"object":"list","model":{json.dumps(model)},"usage":{usage}'
    return f'{{{head},"data":[{",".join(rows)}]}}'.encode()
