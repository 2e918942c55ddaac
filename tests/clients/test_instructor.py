"""instructor: typed answers, in the modes that need no grammar and in those that do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.conftest import MODEL, UNCLOSED
from tests.turns import TurnsApp, enforced_call

pytestmark = [pytest.mark.clients, UNCLOSED]

FENCED = 'Here it is.\n```json\n{"name": "Rome", "degrees": 21}\n```'
ASKED: list[Any] = [{"role": "user", "content": "It is 21 degrees in Rome."}]


class Town(BaseModel):
    name: str
    degrees: int


ROME: dict[str, Any] = {"name": "Rome", "degrees": 21}  # what it returns is of a subclass
COMPACT = json.dumps(ROME, separators=(",", ":"))


@pytest.fixture
def client(app: TurnsApp) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=app.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def test_markdown_json(app: TurnsApp, client: Any) -> None:
    """The schema goes into the prompt, the answer is read out of its fence."""
    import instructor

    patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    app.script(FENCED)
    found, raw = patched.chat.completions.create_with_completion(
        model="m", messages=ASKED, response_model=Town, max_retries=0
    )
    assert found.model_dump() == ROME and raw.usage.completion_tokens > 0
    assert "degrees" in app.prompts[0].partition("It is 21")[0], "the schema"


def test_a_wrong_answer_is_asked_again(app: TurnsApp, client: Any) -> None:
    """Its repair loop: our answer goes back with what was wrong with it."""
    import instructor

    patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    app.script('```json\n{"name": "Rome", "degrees": "warm"}\n```', FENCED)
    found = patched.chat.completions.create(
        model="m", messages=ASKED, response_model=Town, max_retries=1
    )
    assert found.model_dump() == ROME
    assert '"warm"' in app.prompts[1] and "valid integer" in app.prompts[1]


def test_partial_objects(app: TurnsApp, client: Any) -> None:
    """Streamed: the object grows with the text."""
    import instructor

    patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    app.script(FENCED)
    asked = {"model": "m", "messages": ASKED, "response_model": Town, "max_retries": 0}
    grown = list(patched.chat.completions.create_partial(**asked))
    assert grown[-1].model_dump() == ROME and len(grown) > 1


def test_the_async_client(app: TurnsApp) -> None:
    import instructor
    import openai

    app.script(FENCED)

    async def run() -> Town:
        async with openai.AsyncOpenAI(base_url=app.url + "/v1", api_key="x") as client:
            patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
            found: Town = await patched.chat.completions.create(
                model="m", messages=ASKED, response_model=Town, max_retries=0
            )
            return found

    assert asyncio.run(run()).model_dump() == ROME


def test_on_messages(app: TurnsApp) -> None:
    """By Anthropic's package, with the JSON asked for in the prompt."""
    import anthropic
    import instructor

    app.script('{"name": "Rome", "degrees": 21}')
    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        patched = instructor.from_anthropic(client, mode=instructor.Mode.JSON)
        found = patched.messages.create(
            model="m", max_tokens=300, messages=ASKED, response_model=Town, max_retries=0
        )
    assert found.model_dump() == ROME


@pytest.mark.parametrize(
    ("mode", "answer"),
    [
        ("TOOLS", enforced_call("Town", ROME)),
        ("JSON", COMPACT),
        ("JSON_SCHEMA", COMPACT),
    ],
    ids=["TOOLS", "JSON", "JSON_SCHEMA"],
)
def test_modes_that_are_promises(app: TurnsApp, client: Any, mode: str, answer: str) -> None:
    """The engine is told to steer; the answer itself is the script's."""
    import instructor

    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    app.script(answer)
    found = patched.chat.completions.create(
        model="m", messages=ASKED, response_model=Town, max_retries=0
    )
    assert found.model_dump() == ROME
    (spec,) = app.engine.specs
    assert spec.guide is not None and spec.guide.may_steer


@pytest.mark.real
def test_real(real_url: str) -> None:
    """The small model writes no JSON: what is judged is that the exchange works."""
    import instructor
    import openai

    with openai.OpenAI(base_url=real_url + "/v1", api_key="x", max_retries=0) as client:
        patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
        answer = patched.chat.completions.create(
            model=MODEL,
            response_model=None,
            temperature=0,
            max_tokens=16,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
        )
    assert "Paris" in answer.choices[0].message.content
