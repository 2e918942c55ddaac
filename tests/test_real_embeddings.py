"""The real default model with `--embedding-pooling mean`: what belongs together is closer.

It was not made for this: its vectors all lie in one corner, and only clear differences show. So the
texts that must not win are far off.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.live import Child

pytestmark = pytest.mark.real

HOME = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
MODEL = "smollm2-135m"
# text, one that says the like, one that does not
TRIPLES = (
    (
        "A man is eating a plate of pasta.",
        "Someone is having spaghetti for dinner.",
        "The stock market fell sharply on Monday.",
    ),
    (
        "The stock market fell sharply on Monday.",
        "Shares dropped a lot at the start of the week.",
        "A man is eating a plate of pasta.",
    ),
    (
        "My cat sleeps on the sofa all day.",
        "The kitten naps on the couch.",
        "The stock market fell sharply on Monday.",
    ),
)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    assert (HOME / "models" / MODEL).is_dir(), f"run `mlxlite get {MODEL}` first"
    flags = ("--port", "0", "--embedding-pooling", "mean")
    with Child(HOME, "serve", MODEL, *flags, deadline_s=300) as child:
        yield child.wait_ready()
        child.signal(signal.SIGTERM)
        assert child.wait() == 0
        assert "Traceback" not in child.errors()


def test_what_belongs_together_is_closer(child: Child) -> None:
    with openai.OpenAI(base_url=child.url + "/v1", api_key="x", max_retries=0) as client:
        for text, like, unlike in TRIPLES:
            body = {"query": text, "documents": [unlike, like]}
            found: Any = client.post("/rerank", body=body, cast_to=object)
            best, worst = found["results"]
            assert best["index"] == 1, text
            assert best["relevance_score"] > worst["relevance_score"] + 0.1, text


def test_together_as_alone(child: Child) -> None:
    texts = [text for triple in TRIPLES for text in triple]
    with openai.OpenAI(base_url=child.url + "/v1", api_key="x", max_retries=0) as client:
        together = client.embeddings.create(model="any", input=texts).data
        for text, row in zip(texts[:2], together, strict=False):
            alone = client.embeddings.create(model="any", input=text).data[0].embedding
            assert len(alone) == 576 and row.embedding == pytest.approx(alone, abs=1e-5)
