"""Embeddings, rerank and score over HTTP, with the official package and by hand."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxlite.engine import backend, load
from mlxlite.text.tokenizer import Tokenizer
from tests import tiny
from tests.live import WAIT_S, Brake, LiveApp, chat_body, connect, post_bytes

import mlx.core as mx  # isort: skip

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TEXTS = ["hello world", "the quick brown fox jumps over the lazy dog", "word1 number7", "again"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[LiveApp]:
    """Of an embedding model."""
    with LiveApp(tiny.make_embedder(folders / "tiny-vectors")) as server:
        yield server


@pytest.fixture(scope="module")
def judge(folders: Path) -> Iterator[LiveApp]:
    """Of a reranker."""
    with LiveApp(tiny.make_reranker(folders / "tiny-reranker")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def single(values: list[float]) -> list[float]:
    return list(array("f", values))


def assert_same(found: list[Any], right: list[Any]) -> None:
    """Up to rounding: how inputs are grouped depends on how fast the machine is just now."""
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=3e-6)


def length(values: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in values))


def tokens(server: LiveApp, *texts: str) -> int:
    tokenizer = Tokenizer.load(server.worker.folder)
    return sum(len(tokenizer.encode(text)) for text in texts)


# ------------------------------------------------------------------------------- embeddings


def test_the_official_package(client: openai.OpenAI, server: LiveApp) -> None:
    """It asks for base64 by itself and decodes it."""
    packed = client.embeddings.create(model="any", input=TEXTS)
    plain = client.embeddings.create(model="any", input=TEXTS, encoding_format="float")
    assert packed.model == "tiny-vectors" and packed.object == "list"
    assert [(row.index, row.object) for row in packed.data] == [(n, "embedding") for n in range(4)]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert len(one.embedding) == 64 and length(one.embedding) == pytest.approx(1, abs=1e-6)
        assert one.embedding == pytest.approx(other.embedding, abs=2e-6)
    expected = tokens(server, *TEXTS) + len(TEXTS)  # each with its end
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == expected
    for text, row in zip(TEXTS, plain.data, strict=True):
        alone = client.embeddings.create(model="any", input=text, encoding_format="float")
        assert alone.data[0].embedding == pytest.approx(row.embedding, abs=2e-6)
        packed = client.embeddings.create(model="any", input=text)
        assert single(alone.data[0].embedding) == packed.data[0].embedding, "to the last bit"


def test_the_official_package_async(server: LiveApp) -> None:
    async def go() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
            asked = [client.embeddings.create(model="any", input=text) for text in TEXTS]
            together = client.embeddings.create(model="any", input=TEXTS)
            return await asyncio.gather(*asked, together)

    *alone, together = asyncio.run(go())
    for one, row in zip(alone, together.data, strict=True):
        assert one.data[0].embedding == pytest.approx(row.embedding, abs=2e-6)


def test_token_ids_are_as_good_as_text(client: openai.OpenAI, server: LiveApp) -> None:
    tokenizer = Tokenizer.load(server.worker.folder)
    ids = [tokenizer.encode(text) for text in TEXTS]
    right = client.embeddings.create(model="any", input=TEXTS)
    found = client.embeddings.create(model="any", input=ids)
    assert found.usage == right.usage
    assert_same(found.data, right.data)
    one = client.embeddings.create(model="any", input=ids[1])
    assert len(one.data) == 1 and one.usage.prompt_tokens == len(ids[1]) + 1


def test_fewer_dimensions(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="any", input="hello").data[0].embedding
    for count in (1, 8, 64):
        part = client.embeddings.create(model="any", input="hello", dimensions=count)
        size = length(whole[:count])
        assert part.data[0].embedding == pytest.approx([x / size for x in whole[:count]], abs=1e-6)
        plain = client.embeddings.create(
            model="any", input="hello", dimensions=count, encoding_format="float"
        )
        assert single(plain.data[0].embedding) == single(part.data[0].embedding)


def test_an_instruction_is_part_of_the_text(client: openai.OpenAI) -> None:
    extra = {"instruction": "find it"}
    told = client.embeddings.create(model="any", input="hello", extra_body=extra)
    spelled = client.embeddings.create(model="any", input="Instruct: find it\nQuery:hello")
    assert told == spelled


def test_what_is_sent_is_little_endian(server: LiveApp) -> None:
    body = {"input": "hello", "encoding_format": "base64", "user": "u", "model": "other"}
    reply = server.ask("POST", EMBEDDINGS, body)
    assert reply.headers["content-type"] == "application/json"
    raw = base64.b64decode(reply.json()["data"][0]["embedding"], validate=True)
    plain = server.ask("POST", EMBEDDINGS, {**body, "encoding_format": "float"}).json()
    assert list(struct.unpack("<64f", raw)) == single(plain["data"][0]["embedding"])


BAD = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 3]}, "input[1]"),
    ({"input": [[5], []]}, "input[1]"),
    ({"input": [[5], [True]]}, "input[1][0]"),
    ({"input": [5, "a"]}, "input[1]"),
    ({"input": [5, -1]}, "input[1]"),
    ({"input": [5, 2.5]}, "input[1]"),
    ({"input": [[5], [9999]]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 65}, "dimensions"),
    ({"input": "a", "dimensions": "8"}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "instruction": 5}, "instruction"),
    ({"input": "a", "model": 5}, "model"),
    ({"input": "a", "user": 5}, "user"),
]


@pytest.mark.parametrize(("body", "param"), [pytest.param(b, p, id=str(b)[:60]) for b, p in BAD])
def test_bad_input(server: LiveApp, body: dict[str, Any], param: str) -> None:
    reply = server.ask("POST", EMBEDDINGS, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["type"] == "invalid_request_error" and param in reply.error["message"]


def test_too_long_an_input(server: LiveApp) -> None:
    reply = server.ask("POST", EMBEDDINGS, {"input": ["a", [5] * 1024]})
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
    assert "1025" in reply.error["message"] and "1024" in reply.error["message"]
    assert reply.error["param"] == "input[1]"
    assert server.ask("POST", EMBEDDINGS, {"input": [5] * 1023}).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": "a"}),
        (RERANK, {"query": "a", "documents": ["b"]}),
        (SCORE, {"text_1": "a", "text_2": "b"}),
    ],
    ids=["embeddings", "rerank", "score"],
)
def test_a_chat_model_says_what_to_do(
    tiny_server: LiveApp, path: str, body: dict[str, Any]
) -> None:
    reply = tiny_server.ask("POST", path, body)
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "tiny" in reply.error["message"] and "--embedding-pooling" in reply.error["message"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_chat_model_with_the_flag(tiny_folder: Path, pooling: str) -> None:
    with LiveApp(tiny_folder, embedding_pooling=pooling) as server:
        reply = server.ask("POST", EMBEDDINGS, {"input": TEXTS}).json()
        assert reply["usage"]["prompt_tokens"] == tokens(server, *TEXTS)
        row = server.ask("GET", "/v1/models").json()["data"][0]
        assert row["embeddings"] is row["capabilities"]["embeddings"] is True
        chat = server.chat()
        assert chat.status == 200 and chat.json()["usage"]["completion_tokens"] > 0


def test_many_inputs_are_in_order(client: openai.OpenAI) -> None:
    texts = [f"word{n % 120} " * (1 + n * 7 % 40) for n in range(300)]
    found = client.embeddings.create(model="any", input=texts).data
    for n in (0, 17, 150, 299):
        alone = client.embeddings.create(model="any", input=texts[n]).data[0].embedding
        assert found[n].embedding == pytest.approx(alone, abs=3e-6)


def test_a_client_that_leaves_takes_its_work_along(server: LiveApp) -> None:
    embedder, before = server.worker._loop.embedder, server.batch()["jobs"]
    brake = Brake(embedder, "_measured")  # the engine stands after the first slice
    with connect(server.address) as sock:
        sock.sendall(post_bytes(EMBEDDINGS, {"input": [[5] * 900, [5] * 300, [5] * 20]}))
        brake.wait()
    asking = {"requests_active": 1}  # whoever asks for the statistics
    deadline_s = time.monotonic() + WAIT_S
    while not asking.items() <= server.ask("GET", "/stats").json()["http"].items():
        assert time.monotonic() < deadline_s
    brake.free()
    after = server.wait_batch(lambda stats: stats["jobs"]["open"] == 0)["jobs"]
    del embedder._measured
    assert after["cancelled"] == before["cancelled"] + 1 and after["done"] == before["done"]
    assert brake.calls == 1


def test_vectors_and_streams_do_not_change_each_other(tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, embedding_pooling="mean") as server:
        right = server.chat(max_tokens=150).text
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            asked = chat_body(max_tokens=150, model="any", stream=True)
            text, vectors = "", None
            before = client.embeddings.create(model="any", input=TEXTS * 20)
            for chunk in client.chat.completions.create(**asked):
                vectors = vectors or client.embeddings.create(model="any", input=TEXTS * 20)
                text += chunk.choices[0].delta.content or ""
        assert text == right and vectors is not None
        assert_same(vectors.data, before.data)


def test_metrics_count_them(server: LiveApp) -> None:
    def counts() -> dict[str, float]:
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
            if "embed" in name
        }

    before = counts()
    usage = server.ask("POST", EMBEDDINGS, {"input": TEXTS}).json()["usage"]
    after = counts()
    answers = 'mlxlite_answers_total{surface="embeddings",outcome="done"}'
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown[answers] == 1 and grown["mlxlite_embedded_inputs_total"] == len(TEXTS)
    assert grown["mlxlite_embedded_tokens_total"] == usage["prompt_tokens"]


# --------------------------------------------------------------------------- rerank and score


def probability_of_yes(folder: Path, query: str, document: str) -> float:
    """By the model itself, on the prompt of Qwen3-Reranker's card."""
    model = load.load(folder, backend.start(folder), "auto", folder / "dense").model
    text = (
        '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query '
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        f"answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )  # fmt: skip
    ids = Tokenizer.load(folder).encode(text, add_special_tokens=False)
    logits = model(mx.array([ids]))[0, -1, mx.array([512, 513])]
    return float(mx.softmax(logits)[0].item())


def test_a_reranker_judges(judge: LiveApp) -> None:
    documents: list[Any] = [TEXTS[0], {"text": TEXTS[1], "title": "t"}, TEXTS[2]]
    body = {"query": "a fox", "documents": documents}
    reply = judge.ask("POST", RERANK, body).json()
    results = reply["results"]
    assert reply["model"] == "tiny-reranker" and reply["id"].startswith("rerank-")
    assert sorted(row["index"] for row in results) == [0, 1, 2]
    scores = [row["relevance_score"] for row in results]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 3
    for row in results:
        assert set(row) == {"index", "relevance_score"}
        right = probability_of_yes(judge.worker.folder, "a fox", TEXTS[row["index"]])
        assert row["relevance_score"] == pytest.approx(right, rel=1e-4)
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 3 * 50
    best = judge.ask("POST", RERANK, {**body, "top_n": 1, "return_documents": True}).json()
    first = results[0]["index"]
    (found,) = best["results"]
    assert found["index"] == first and found["document"] == {"text": TEXTS[first]}
    assert found["relevance_score"] == pytest.approx(scores[0], rel=1e-4)
    told = judge.ask("POST", RERANK, {**body, "instruction": "other"}).json()["results"]
    assert {row["index"]: row["relevance_score"] for row in told} != dict(enumerate(scores))


def test_a_reranker_scores_pairs(judge: LiveApp) -> None:
    one = judge.ask("POST", SCORE, {"text_1": "a fox", "text_2": TEXTS[:3]}).json()
    assert one["object"] == "list" and one["model"] == "tiny-reranker"
    assert [(row["index"], row["object"]) for row in one["data"]] == [
        (n, "score") for n in range(3)
    ]
    scores = [row["score"] for row in one["data"]]
    ranked = judge.ask("POST", RERANK, {"query": "a fox", "documents": TEXTS[:3]}).json()["results"]
    for row in ranked:
        assert scores[row["index"]] == pytest.approx(row["relevance_score"], rel=1e-4)
    paired = judge.ask("POST", SCORE, {"text_1": ["a fox"] * 3, "text_2": TEXTS[:3]}).json()
    assert [row["score"] for row in paired["data"]] == pytest.approx(scores, rel=1e-4)
    single_pair = judge.ask("POST", SCORE, {"text_1": "a fox", "text_2": TEXTS[1]}).json()["data"]
    assert [row["score"] for row in single_pair] == pytest.approx(scores[1:2], rel=1e-4)
    row = judge.ask("GET", "/v1/models").json()["data"][0]
    assert (row["rerank"], row["embeddings"]) == (True, False)


def test_an_embedding_model_scores_by_cosine(server: LiveApp, client: openai.OpenAI) -> None:
    texts = [*TEXTS, TEXTS[0]]
    vectors = [row.embedding for row in client.embeddings.create(model="any", input=texts).data]
    right = [math.fsum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors]
    reply = server.ask("POST", SCORE, {"text_1": TEXTS[0], "text_2": texts}).json()
    scores = [row["score"] for row in reply["data"]]
    assert scores == pytest.approx(right, abs=1e-5) and scores[0] == scores[4] <= 1
    assert reply["usage"]["prompt_tokens"] == tokens(server, TEXTS[0], *TEXTS) + 5, "each once"
    ranked = server.ask("POST", RERANK, {"query": TEXTS[0], "documents": texts}).json()["results"]
    assert {row["index"] for row in ranked[:2]} == {0, 4}
    asked = "Instruct: find it\nQuery:" + TEXTS[0]
    told = {"text_1": TEXTS[0], "text_2": TEXTS[1], "instruction": "find it"}
    spelled = {"text_1": asked, "text_2": TEXTS[1]}
    one, other = (server.ask("POST", SCORE, body).json()["data"] for body in (told, spelled))
    assert one[0]["score"] == pytest.approx(other[0]["score"], abs=1e-5)


BAD_PAIRS = [
    (RERANK, {"documents": ["a"]}, "query"),
    (RERANK, {"query": "", "documents": ["a"]}, "query"),
    (RERANK, {"query": ["a"], "documents": ["a"]}, "query"),
    (RERANK, {"query": "a"}, "documents"),
    (RERANK, {"query": "a", "documents": []}, "documents"),
    (RERANK, {"query": "a", "documents": "b"}, "documents"),
    (RERANK, {"query": "a", "documents": ["b", 5]}, "documents[1]"),
    (RERANK, {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
    (RERANK, {"query": "a", "documents": ["b", "word " * 2000]}, "documents[1]"),
    (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    (RERANK, {"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents"),
    (SCORE, {"text_2": "a"}, "text_1"),
    (SCORE, {"text_1": "a"}, "text_2"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
    (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    (SCORE, {"text_1": ["a", 5], "text_2": ["b", "c"]}, "text_1[1]"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
]


@pytest.mark.parametrize("kind", ["judge", "server"])
@pytest.mark.parametrize(
    ("path", "body", "param"), [pytest.param(*row, id=str(row[:2])[4:64]) for row in BAD_PAIRS]
)
def test_bad_pairs(
    request: pytest.FixtureRequest, kind: str, path: str, body: dict[str, Any], param: str
) -> None:
    reply = request.getfixturevalue(kind).ask("POST", path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert param in reply.error["message"]
