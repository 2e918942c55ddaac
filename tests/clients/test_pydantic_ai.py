"""pydantic-ai: an agent with tools on its three models that can reach us.

The same agent on chat completions, Responses and Messages: run, streamed, and stepped by events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mlxlite.types import Finish
from tests.clients.conftest import MODEL, UNCLOSED
from tests.turns import Turn, TurnsApp, call, enforced_call

pytestmark = [pytest.mark.clients, UNCLOSED]

QUESTION = "What is the weather in Rome and Bonn?"
CALLS = call("weather", town="Rome") + call("weather", town="Bonn")
WAYS = pytest.mark.parametrize("way", ["chat", "responses", "messages"])


@pytest.fixture(scope="module")
def runner(nothing_left: None) -> Iterator[asyncio.Runner]:
    """One loop for all: the package keeps its connections and expects the loop to live on."""
    with asyncio.Runner() as runner:
        yield runner


def model(url: str, way: str, name: str = "m") -> Any:
    if way == "messages":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        claude = AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=claude))
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    kind = OpenAIChatModel if way == "chat" else OpenAIResponsesModel
    return kind(name, provider=OpenAIProvider(openai_client=client))


class Towns:
    """An agent with a tool. asked: the towns that it was called with.

    strict: the package's default, None, is strict wherever a schema can be.
    """

    def __init__(self, app: TurnsApp, way: str, strict: bool | None = False) -> None:
        from pydantic_ai import Agent

        self.asked: list[str] = []
        self.agent = Agent(model(app.url, way), instructions="Be brief.", retries=0)

        @self.agent.tool_plain(strict=strict)
        def weather(town: str) -> str:
            """The weather in a town."""
            self.asked.append(town)
            return f"mild in {town}"


@WAYS
def test_run(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    towns = Towns(app, way)
    app.script(f"<think>hm</think>Let me see.{CALLS}", "It is mild.", "You are welcome.")

    async def run() -> tuple[Any, Any]:
        first = await towns.agent.run(QUESTION)
        return first, await towns.agent.run("Thanks.", message_history=first.all_messages())

    first, second = runner.run(run())
    assert (first.output, second.output) == ("It is mild.", "You are welcome.")
    assert sorted(towns.asked) == ["Bonn", "Rome"]
    usage = first.usage
    assert (usage.requests, usage.tool_calls) == (2, 2)
    assert usage.input_tokens > 0 and usage.output_tokens > 0
    prompt = app.prompts[-1]
    order = ["Be brief.", QUESTION, "Let me see.", "mild in", "It is mild.", "Thanks."]
    assert sorted(order, key=prompt.index) == order
    assert prompt.count("Let me see.") == 1 and prompt.count("mild in Bonn") == 1


@WAYS
def test_stream(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """`run_stream`: the calls first, then the text as it comes."""
    towns = Towns(app, way)
    app.script(CALLS, "It is very mild.")

    async def run() -> tuple[list[str], Any]:
        async with towns.agent.run_stream(QUESTION) as answer:
            texts = [text async for text in answer.stream_text(delta=True, debounce_by=None)]
            return texts, answer.usage

    texts, usage = runner.run(run())
    assert "".join(texts) == "It is very mild." and len(texts) > 1
    assert sorted(towns.asked) == ["Bonn", "Rome"] and usage.output_tokens > 0


@WAYS
def test_thinking_is_a_part(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """Also in streams: a part that starts, grows and ends like any other."""
    from pydantic_ai import Agent

    agent = Agent(model(app.url, way))
    app.script(*["<think>hm, well</think>Mild."] * 2)

    async def run() -> tuple[Any, Any]:
        whole = await agent.run(QUESTION)
        async with agent.iter(QUESTION) as steps:
            async for node in steps:
                if Agent.is_model_request_node(node):
                    async with node.stream(steps.ctx) as events:
                        kinds = [event.event_kind async for event in events]
                    assert {"part_start", "part_delta", "part_end"} <= set(kinds)
        return whole, steps.result

    for answer in runner.run(run()):
        parts = [(part.part_kind, part.content) for part in answer.all_messages()[-1].parts]
        assert parts == [("thinking", "hm, well"), ("text", "Mild.")]


@WAYS
def test_errors(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """Refusals keep their status and words; a fault in mid-stream raises."""
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import ModelHTTPError

    agent = Agent(model(app.url, way), retries=0)
    with pytest.raises(ModelHTTPError, match="prompt is too long") as caught:
        runner.run(agent.run("word " * 5000))
    assert caught.value.status_code == 400
    app.script(Turn("half", Finish.ERROR))

    async def streamed() -> None:
        async with agent.run_stream(QUESTION) as answer:
            await answer.get_output()

    with pytest.raises(Exception, match="the step failed"):
        runner.run(streamed())


@pytest.mark.parametrize("strict", [True, None], ids=["strict", "default"])
@pytest.mark.parametrize("way", ["chat", "responses"])
def test_strict_tools(app: TurnsApp, runner: asyncio.Runner, way: str, strict: bool | None) -> None:
    """The engine is told to steer; the call itself is the script's."""
    towns = Towns(app, way, strict)
    app.script(
        "".join(enforced_call("weather", {"town": t}) for t in ("Rome", "Bonn")), "It is mild."
    )
    assert runner.run(towns.agent.run(QUESTION)).output == "It is mild."
    assert sorted(towns.asked) == ["Bonn", "Rome"]
    assert all(spec.guide is not None and spec.guide.may_steer for spec in app.engine.specs)


@pytest.mark.real
@WAYS
def test_real(real_url: str, runner: asyncio.Runner, way: str) -> None:
    from pydantic_ai import Agent

    limits: Any = {"max_tokens": 16, "temperature": 0.0}
    agent = Agent(model(real_url, way, MODEL), model_settings=limits)
    assert "Paris" in runner.run(agent.run("What is the capital of France?")).output
