"""Text and tokens without an answer: what a prompt becomes, and back (the model does not run).

    POST /tokenize        {"prompt": "Hi"} or {"messages": […]}  → {"tokens": [..], "count": 1, …}
    POST /detokenize      {"tokens": [17250]}                    → {"prompt": "Hi", "content": "Hi"}
    POST /apply-template  {"messages": […]}                      → {"prompt": "<|im_start|>…"}

Names of the fields are those of vLLM (`prompt`) and of llama.cpp (`content`). A conversation is
read like a chat request and gives the very ids that one would run.
"""

from __future__ import annotations

from mlxlite import fields
from mlxlite.asks import parse_chat
from mlxlite.errors import BadRequest
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize"""
    body = await request.json()
    preparation = await service.preparation()
    adds_special = fields.take(body, fields.ADD_SPECIAL_TOKENS) is not False
    given = [field for field in fields.TEXTS if body.get(field.name) is not None]
    if len(given) != 1:
        raise BadRequest("exactly one of prompt, content and messages is needed", param="prompt")
    if given == [fields.MESSAGES]:
        ids = (await service.in_pool(preparation.prompt, parse_chat(body))).ids
    else:
        text = fields.take(body, given[0])
        ids = await service.in_pool(preparation.tokenizer.encode, text, adds_special)
    length = preparation.facts.max_context
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": length})


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize: control tokens are spelled out, nothing is trimmed."""
    body = await request.json()
    preparation = await service.preparation()
    given = fields.take(body, fields.TOKENS)
    if given is None:
        raise BadRequest("tokens required", param="tokens")
    ids = fields.take_ids(given, "tokens")
    if max(ids, default=0) >= preparation.facts.vocab_size:
        last = preparation.facts.vocab_size - 1
        raise BadRequest(f"tokens has {max(ids)}; the vocabulary ends at {last}", param="tokens")

    def decode() -> str:
        return preparation.tokenizer.decode(ids, keep_special=True)

    text = await service.in_pool(decode)
    return json_response({"prompt": text, "content": text})


async def apply_template(service: Service, request: Request) -> Response:
    """POST /apply-template"""
    ask = parse_chat(await request.json())
    preparation = await service.preparation()
    return json_response({"prompt": await service.in_pool(preparation.text, ask)})
