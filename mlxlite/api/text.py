"""Text and tokens without an answer: what a prompt becomes, and back (the model does not run).

    POST /tokenize        {"prompt": "Hi"} or {"messages": […]}  → {"tokens": [..], "count": 1, …}
    POST /detokenize      {"tokens": [17250]}                    → {"prompt": "Hi", "content": "Hi"}
    POST /apply-template  {"messages": […]}                      → {"prompt": "<|im_start|>…"}

Names of the fields are those of vLLM (`prompt`) and of llama.cpp (`content`). A conversation is
read like a chat request and gives the very ids that one would run.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxlite import fields
from mlxlite.asks import parse_chat
from mlxlite.errors import BadRequest
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.service import Service

_PORTION = 8192  # ids, of which millions may be asked for


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize"""
    body = await request.json()
    preparation = await service.preparation()
    adds_special = fields.take(body, fields.ADD_SPECIAL_TOKENS) is not False
    given = [field for field in fields.TEXTS if body.get(field.name) is not None]
    if len(given) != 1:
        raise BadRequest("exactly one of prompt, content and messages is needed", param="prompt")
    if given == [fields.MESSAGES]:
        ask = await service.in_pool(parse_chat, body)
        ids = (await service.in_pool(preparation.prompt, ask)).ids
    else:
        text = fields.take(body, given[0])
        ids = await service.in_pool(preparation.tokenizer.encode, text, adds_special)
    length = preparation.facts.max_context
    return await service.in_pool(_render_tokens, ids, length)


def _render_tokens(ids: Sequence[int], length: int) -> Response:
    """In portions: JSON's encoder would hold the GIL, and so all streams, for the whole list."""
    starts = range(0, len(ids), _PORTION)
    parts = [",".join(map(str, ids[at : at + _PORTION])) for at in starts]
    shown = f'{{"tokens":[{",".join(parts)}],"count":{len(ids)},"max_model_len":{length}}}'
    return Response(200, shown.encode(), {"content-type": "application/json"})


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize: control tokens are spelled out, nothing is trimmed."""
    body = await request.json()
    preparation = await service.preparation()
    given = fields.take(body, fields.TOKENS)
    if given is None:
        raise BadRequest("tokens required", param="tokens")

    def decode() -> str:
        ids = fields.take_ids(given, "tokens")
        if (largest := max(ids, default=0)) >= preparation.facts.vocab_size:
            last = preparation.facts.vocab_size - 1
            message = f"tokens has {largest}; the vocabulary ends at {last}"
            raise BadRequest(message, param="tokens")
        return preparation.tokenizer.decode(ids, keep_special=True)

    text = await service.in_pool(decode)
    return json_response({"prompt": text, "content": text})


async def apply_template(service: Service, request: Request) -> Response:
    """POST /apply-template"""
    ask = await service.in_pool(parse_chat, await request.json())
    preparation = await service.preparation()
    return json_response({"prompt": await service.in_pool(preparation.text, ask)})
