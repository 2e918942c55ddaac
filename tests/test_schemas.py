"""Each schema of the table: what comes out is valid, or the client is told (decision D7).

Four ways. Walks by the grammar alone; answers that are nearly right, of which it must refuse the
wrong ones; the engine with the tiny model at temperature 1, many schemas in a batch; and schemas
made at random.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlxlite.errors import BadRequest
from mlxlite.text.grammar import Grammar, Grammars, Unsupported
from tests import schema_table as table
from tests.grammars import ENDS, EOS, VOCAB, form, takes, walk
from tests.live import LiveApp, Reply
from tests.prepared import TOKENIZER
from tests.schema_random import random_schema
from tests.schema_variants import EVERYWHERE, variants
from tests.validity import validate, validator

WALKS, NEAR = 5, 15  # answers by a schema, and texts that are nearly each of them
LIMIT = 700
# Ends of strings, objects and answers are likelier than a random model has them.
BIAS = {str(n): 9 for n in {*ENDS, *EOS}}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB)


def test_the_table_is_large() -> None:
    every = [*table.SCHEMAS.values(), *table.UNSUPPORTED.values(), *table.MALFORMED.values()]
    assert len({json.dumps(schema, sort_keys=True) for schema in every}) == len(every) > 400
    assert set(table.DRAFTS) <= set(table.SCHEMAS)


def without_strings(text: str) -> str:
    return re.sub(r'"(\\.|[^"\\])*"', '""', text)


@pytest.mark.parametrize("name", table.SCHEMAS)
def test_what_a_schema_lets_through_is_valid(grammars: Grammars, name: str) -> None:
    schema, draft = table.SCHEMAS[name], table.DRAFTS.get(name)
    made = grammars.compile(form("json", schema))
    assert made.notes == ()
    near = set(EVERYWHERE)
    for seed in range(WALKS):
        text = walk(made.matcher(), seed, most=3000)
        validate(text, schema, draft)
        assert not re.search(r"(?<=[\[{,:])[ \n\t]", without_strings(text)), "compact"
        if len(text) < 300:
            near.update(variants(text, seed, NEAR))
    let_through(made, near, validator(schema, draft))


def let_through(made: Grammar, texts: set[str], judge: Any) -> None:
    """What of these texts is taken must be valid."""
    for text in sorted(texts):
        if takes(made.matcher(), text):
            judge.validate(json.loads(text))


def test_schemas_made_at_random(grammars: Grammars) -> None:
    draw, enforced = random.Random(7), 0
    for seed in range(200):
        schema = random_schema(draw)
        try:
            made = grammars.compile(form("json", schema, is_closed=seed % 3 > 0))
        except (BadRequest, Unsupported):
            continue
        if made.notes:
            continue
        enforced += 1
        texts = {walk(made.matcher(), n, most=3000) for n in range(2)}
        near = {each for text in texts if len(text) < 200 for each in variants(text, seed, 20)}
        let_through(made, texts | near, validator(schema))
    assert enforced > 75


@pytest.mark.parametrize("name", table.UNSUPPORTED)
def test_what_is_not_enforced_is_told(grammars: Grammars, name: str) -> None:
    try:
        assert grammars.compile(form("json", table.UNSUPPORTED[name])).notes
    except Unsupported as error:
        assert str(error)


@pytest.mark.parametrize("name", table.MALFORMED)
def test_malformed_schemas_are_refused(grammars: Grammars, name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammars.compile(form("json", table.MALFORMED[name]))
    assert caught.value.param == "field" and caught.value.message.startswith("field ")
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


# ------------------------------------------------------------------------- through the engine


def as_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


@pytest.fixture(scope="module")
def replies(tiny_server: LiveApp) -> Mapping[str, Reply]:
    """Two answers to each schema, strict, at temperature 1; eight requests at a time."""

    def ask(name: str) -> Reply:
        return tiny_server.chat(
            temperature=1, seed=5, n=2, max_tokens=LIMIT, logit_bias=BIAS,
            response_format=as_schema(table.SCHEMAS[name], strict=True),
        )  # fmt: skip

    with ThreadPoolExecutor(8) as threads:
        return dict(zip(table.SCHEMAS, threads.map(ask, table.SCHEMAS), strict=True))


@pytest.mark.parametrize("name", table.SCHEMAS)
def test_answers_are_valid(replies: Mapping[str, Reply], name: str) -> None:
    reply = replies[name]
    assert reply.status == 200, reply.body
    assert "warning" not in reply.headers
    for choice in reply.json()["choices"]:
        assert choice["finish_reason"] == "stop", choice
        validate(choice["message"]["content"], table.SCHEMAS[name], table.DRAFTS.get(name))


def test_schemas_shared_their_steps(replies: Mapping[str, Reply]) -> None:
    lanes = [reply.json()["usage"]["lane"] for reply in replies.values()]
    assert lanes.count("batched") > len(lanes) * 0.9


@pytest.mark.parametrize("name", table.UNSUPPORTED)
def test_what_cannot_be_enforced_is_flagged_or_refused(tiny_server: LiveApp, name: str) -> None:
    schema = table.UNSUPPORTED[name]
    reply = tiny_server.chat(max_tokens=8, response_format=as_schema(schema))
    assert reply.status == 200 and "json_schema" in reply.headers["warning"]
    reply = tiny_server.chat(response_format=as_schema(schema, strict=True))
    at = "response_format.json_schema.schema"
    assert (reply.status, reply.error["param"]) == (400, at)
    assert "cannot be enforced" in reply.error["message"]


@pytest.mark.parametrize("name", [name for name in table.MALFORMED if "half" not in name])
def test_malformed_schemas_are_a_400(tiny_server: LiveApp, name: str) -> None:
    reply = tiny_server.chat(guided_json=table.MALFORMED[name])
    assert (reply.status, reply.error["param"]) == (400, "guided_json"), reply.body
