"""Structured output of the real default model: it says what it likes, in the form it was told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.live import Child

pytestmark = pytest.mark.real

HOME = Path(os.environ.get("MLXLITE_HOME", "~/.cache/mlxlite")).expanduser()
MODEL = "smollm2-135m"
TIMES = 20
TOWN = "Describe Paris, the capital of France."


class Town(BaseModel):
    name: str = Field(max_length=30)
    country: Literal["France", "Italy", "Spain"]
    is_capital: bool
    population: int = Field(ge=0, le=50_000_000)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    assert (HOME / "models" / MODEL).is_dir(), f"run `mlxlite get {MODEL}` first"
    with Child(HOME, "serve", MODEL, "--port", "0", deadline_s=300) as child:
        yield child.wait_ready()
        child.signal(signal.SIGTERM)
        assert child.wait() == 0
        assert "Traceback" not in child.errors()


def test_parse(child: Child) -> None:
    """By Pydantic's model, at temperature 1, each time."""
    messages: Any = [{"role": "user", "content": TOWN}]
    countries = []
    with openai.OpenAI(base_url=child.url + "/v1", api_key="x", max_retries=0) as client:
        for seed in range(TIMES):
            found = client.chat.completions.parse(
                model="any", messages=messages, response_format=Town, temperature=1, seed=seed
            )
            (choice,) = found.choices
            assert choice.finish_reason == "stop" and choice.message.parsed is not None
            countries.append(choice.message.parsed.country)
    assert countries.count("France") > TIMES / 2, "it still is the model that speaks"


def test_a_forced_tool(child: Child) -> None:
    """By Anthropic's package, with a schema."""
    tool: Any = {"name": "describe", "input_schema": Town.model_json_schema()}
    with anthropic.Anthropic(base_url=child.url, api_key="x", max_retries=0) as client:
        for seed in range(TIMES // 2):
            found = client.messages.create(
                model="any", max_tokens=300, messages=[{"role": "user", "content": TOWN}],
                tools=[tool], tool_choice={"type": "tool", "name": "describe"},
                extra_body={"temperature": 1, "seed": seed},
            )  # fmt: skip
            (block,) = found.content
            assert block.type == "tool_use" and found.stop_reason == "tool_use"
            Town.model_validate_json(json.dumps(block.input))
