"""How well texts go together: Cohere's and Jina's rerank, vLLM's score.

    POST /v1/rerank  {"query": "q", "documents": ["a", "b"], "top_n": 1}
        → {"id": …, "model": "m", "results": [{"index": 1, "relevance_score": 0.9}], "usage": …}
    POST /v1/score   {"text_1": "q", "text_2": ["a", "b"]}
        → {"id": …, "object": "list", "created": 1, "model": "m", "usage": …,
           "data": [{"index": 0, "object": "score", "score": 0.1}, …]}

A reranker judges each pair; a model that gives embeddings scores by their cosine. An instruction
goes to the judge, else before the query, as embedding models want it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from mlxlite import fields
from mlxlite.embedding import Embedding, cosine, probability
from mlxlite.errors import BadRequest
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.service import Service
from mlxlite.types import EmbedSpec

Named = tuple[str, str]  # what errors call it, text


async def rerank(service: Service, request: Request) -> Response:
    """POST /v1/rerank"""
    body = await request.json()
    for field in fields.RERANKS:
        fields.take(body, field)
    query = fields.take(body, fields.QUERY)
    if not query:
        raise BadRequest("query required: a string that is not empty", param="query")
    documents = fields.take_documents(body)
    top_n = fields.take(body, fields.TOP_N)
    pairs = [(("query", query), (f"documents[{at}]", text)) for at, text in enumerate(documents)]
    instruction = fields.take(body, fields.INSTRUCTION)
    scores, tokens = await _scores(service, f"{request.request_id} rerank", pairs, instruction)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in best
    ]
    if fields.take(body, fields.RETURN_DOCUMENTS):
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return json_response(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": service.model_id,
            "results": results,
            "usage": _usage(tokens),
        }
    )


async def score(service: Service, request: Request) -> Response:
    """POST /v1/score: one text against each of the others, or two lists pair by pair."""
    body = await request.json()
    for field in fields.SCORES:
        fields.take(body, field)
    firsts = fields.take_texts(body, fields.TEXT_1)
    seconds = fields.take_texts(body, fields.TEXT_2)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise BadRequest(
            f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}; "
            "text_1 must have one, or as many as text_2",
            param="text_1",
        )
    instruction = fields.take(body, fields.INSTRUCTION)
    pairs = list(zip(firsts, seconds, strict=True))
    scores, tokens = await _scores(service, f"{request.request_id} score", pairs, instruction)
    return json_response(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": service.model_id,
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores)
            ],
            "usage": _usage(tokens),
        }
    )


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def _scores(
    service: Service,
    label: str,
    pairs: Sequence[tuple[Named, Named]],
    instruction: str | None,
) -> tuple[list[float], int]:
    """A score for each query and document, and the tokens that they took."""
    embedding = await service.embedding()
    embedding.check_scores()
    if embedding.judges:
        judged = [(at, (query, text)) for (_, query), (at, text) in pairs]
        spec = await service.in_pool(embedding.judge_spec, judged, instruction)
        verdicts = await service.embed(spec, label)
        return [probability(verdict) for verdict in verdicts], spec.count_tokens()
    embedding.check_embeds()
    spec, places = await service.in_pool(_cosine_spec, embedding, pairs, instruction)
    vectors = await service.embed(spec, label)

    def compare() -> list[float]:
        return [cosine(vectors[one], vectors[other]) for one, other in places]

    return await service.in_pool(compare), spec.count_tokens()


def _cosine_spec(
    embedding: Embedding, pairs: Sequence[tuple[Named, Named]], instruction: str | None
) -> tuple[EmbedSpec, list[tuple[int, int]]]:
    """Each text once, queries apart from documents; and where the two of each pair are."""
    queries: dict[str, Named] = {}
    documents: dict[str, Named] = {}
    for query, document in pairs:
        queries.setdefault(query[1], query)
        documents.setdefault(document[1], document)
    spec = embedding.embed_spec(list(queries.values()), instruction)
    rest = embedding.embed_spec(list(documents.values()))
    of_query = {text: at for at, text in enumerate(queries)}
    of_document = {text: at for at, text in enumerate(documents, len(queries))}
    places = [(of_query[query], of_document[text]) for (_, query), (_, text) in pairs]
    return EmbedSpec(spec.inputs + rest.inputs, spec.pooling), places
