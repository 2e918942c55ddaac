"""Structured output of the real default model: it says what it likes, in the form it was told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.live import Child

pytestmark = pytest.mark.real
T = TypeVar("T")

HOME = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
MODEL = "smollm2-135m"
TIMES = 50
TOWN = "Describe Paris, the capital of France."


class Town(BaseModel):
    name: str = Field(max_length=30)
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool
    population: int = Field(ge=0, le=50_000_000)


class Rating(BaseModel):
    """Short, as 50 answers must not take long."""

    country: Literal["France", "Italy", "Spain"]
    is_capital: bool
    stars: int = Field(ge=1, le=5)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    assert (HOME / "models" / MODEL).is_dir(), f"run `mlxlite get {MODEL}` first"
    with Child(HOME, "serve", MODEL, "--port", "0", "--batch", "64", deadline_s=300) as child:
        yield child.wait_ready()
        child.signal(signal.SIGTERM)
        assert child.wait() == 0
        assert "Traceback" not in child.errors()


async def all_at_once(ask: Callable[[int], Awaitable[T]]) -> list[T]:
    """One request a seed; they share the forwards of the model."""
    return await asyncio.gather(*(ask(seed) for seed in range(TIMES)))


def test_parse(child: Child) -> None:
    """By Pydantic's model, at temperature 1, each time."""
    messages: Any = [{"role": "user", "content": TOWN}]

    async def run() -> list[Town]:
        async with openai.AsyncOpenAI(
            base_url=child.url + "/v1", api_key="x", max_retries=0
        ) as client:

            async def ask(seed: int) -> Town:
                found = await client.chat.completions.parse(
                    model="any", messages=messages, response_format=Town, temperature=1, seed=seed
                )
                (choice,) = found.choices
                assert choice.finish_reason == "stop" and choice.message.parsed is not None
                return choice.message.parsed

            return await all_at_once(ask)

    countries = [town.country for town in asyncio.run(run())]
    assert len(countries) == TIMES
    assert countries.count("France") > TIMES / 2, "it still is the model that speaks"


def test_a_strict_tool(child: Child) -> None:
    """By Anthropic's package: the one call that was asked for, by its schema, each time."""
    tools: Any = [{"name": "rate", "input_schema": Rating.model_json_schema(), "strict": True}]
    messages: Any = [{"role": "user", "content": TOWN}]

    async def run() -> list[Rating]:
        async with anthropic.AsyncAnthropic(
            base_url=child.url, api_key="x", max_retries=0
        ) as client:

            async def ask(seed: int) -> Rating:
                found = await client.messages.create(
                    model="any", max_tokens=300, messages=messages, tools=tools,
                    tool_choice={"type": "any", "disable_parallel_tool_use": True},
                    extra_body={"temperature": 1, "seed": seed},
                )  # fmt: skip
                (block,) = found.content
                assert block.type == "tool_use" and found.stop_reason == "tool_use"
                return Rating.model_validate_json(json.dumps(block.input))

            return await all_at_once(ask)

    assert len(asyncio.run(run())) == TIMES
