"""openai-agents: its runner with tools and a handoff, on chat completions and on Responses."""

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
WAYS = pytest.mark.parametrize("way", ["chat", "responses"])


@pytest.fixture(scope="module")
def runner(nothing_left: None) -> Iterator[asyncio.Runner]:
    """One loop for all: the package keeps its connections and expects the loop to live on."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(autouse=True)
def quiet(attempts: list[Any]) -> None:
    import agents

    agents.set_tracing_disabled(True)


def model(url: str, way: str, name: str = "m") -> Any:
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    kind: Any = OpenAIChatCompletionsModel if way == "chat" else OpenAIResponsesModel
    return kind(model=name, openai_client=client)


def agent(app: TurnsApp, way: str, asked: list[str], strict: bool = False, **more: Any) -> Any:
    """An agent with one tool. asked: where the towns go that it was called with."""
    from agents import Agent, function_tool

    @function_tool(strict_mode=strict)
    def weather(town: str) -> str:
        """The weather in a town."""
        asked.append(town)
        return f"mild in {town}"

    return Agent(
        "towns", instructions="Be brief.", model=model(app.url, way), tools=[weather], **more
    )


@WAYS
def test_run(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """Two calls at once, their results, the answer, and one more turn on top of it."""
    from agents import Runner

    asked: list[str] = []
    towns = agent(app, way, asked)
    app.script(f"<think>hm</think>Let me see.{CALLS}", "It is mild.", "You are welcome.")

    async def run() -> tuple[Any, Any]:
        first = await Runner.run(towns, QUESTION)
        more = [*first.to_input_list(), {"role": "user", "content": "Thanks."}]
        return first, await Runner.run(towns, more)

    first, second = runner.run(run())
    assert (first.final_output, second.final_output) == ("It is mild.", "You are welcome.")
    assert sorted(asked) == ["Bonn", "Rome"]
    usage = first.context_wrapper.usage
    assert usage.requests == 2 and usage.input_tokens > 0 and usage.output_tokens > 0
    prompt = app.prompts[-1]
    order = ["Be brief.", QUESTION, "Let me see.", "mild in", "It is mild.", "Thanks."]
    assert sorted(order, key=prompt.index) == order
    assert prompt.count("mild in Rome") == prompt.count("mild in Bonn") == 1


@WAYS
def test_stream(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """Raw events and items of a streamed run; the deltas are the answer."""
    from agents import ModelSettings, Runner

    asked: list[str] = []
    towns = agent(app, way, asked, model_settings=ModelSettings(include_usage=True))
    app.script(CALLS, "It is very mild.")

    async def run() -> tuple[str, list[str], Any]:
        running = Runner.run_streamed(towns, QUESTION)
        text, names = "", []
        async for event in running.stream_events():
            if event.type == "raw_response_event":
                if event.data.type == "response.output_text.delta":
                    text += event.data.delta
            elif event.type == "run_item_stream_event":
                names.append(event.name)
        return text, names, running

    text, names, running = runner.run(run())
    assert text == running.final_output == "It is very mild."
    assert sorted(asked) == ["Bonn", "Rome"]
    assert names.count("tool_called") == names.count("tool_output") == 2
    assert names[-1] == "message_output_created"
    assert running.context_wrapper.usage.output_tokens > 0


@WAYS
def test_a_handoff(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """A call to another agent, which goes on with the whole history."""
    from agents import Agent, Runner, handoff

    poet = Agent("poet", instructions="Rhyme.", model=model(app.url, way))
    to_poet = handoff(poet)
    to_poet.strict_json_schema = False
    front = Agent("front", instructions="Delegate.", model=model(app.url, way), handoffs=[to_poet])
    app.script(call("transfer_to_poet"), "Rome, home.")
    answer = runner.run(Runner.run(front, "A poem, please."))
    assert (answer.final_output, answer.last_agent.name) == ("Rome, home.", "poet")
    first, second = app.prompts
    assert "Delegate." in first and "transfer_to_poet" in first
    assert "Rhyme." in second and "A poem, please." in second


def test_a_chain_by_id(app: TurnsApp, runner: asyncio.Runner) -> None:
    """The runner sends only what is new; the server knows the rest."""
    from agents import Runner

    towns = agent(app, "responses", [])
    app.script("Four.", "Five.")

    async def run() -> Any:
        first = await Runner.run(towns, "two and two?")
        return await Runner.run(towns, "and one?", previous_response_id=first.last_response_id)

    assert runner.run(run()).final_output == "Five."
    prompt = app.prompts[-1]
    assert prompt.count("two and two?") == prompt.count("Four.") == prompt.count("and one?") == 1


@WAYS
def test_errors(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """A promise is refused by name, a fault in mid-stream raises."""
    import openai
    from agents import ModelSettings, Runner

    refused = agent(app, way, [], model_settings=ModelSettings(tool_choice="no such tool"))
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        runner.run(Runner.run(refused, QUESTION))
    assert app.engine.specs == []
    app.script(Turn("half", Finish.ERROR))

    async def streamed() -> None:
        async for _ in Runner.run_streamed(agent(app, way, []), QUESTION).stream_events():
            pass

    with pytest.raises(Exception, match="the step failed"):
        runner.run(streamed())


@WAYS
def test_strict_and_forced_tools(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """The engine is told to steer; the call itself is the script's. The package forces one call."""
    from agents import ModelSettings, Runner

    for settings in (ModelSettings(), ModelSettings(tool_choice="required")):
        asked: list[str] = []
        towns = agent(app, way, asked, strict=True, model_settings=settings)
        app.script(enforced_call("weather", {"town": "Rome"}), "It is mild.")
        assert runner.run(Runner.run(towns, QUESTION)).final_output == "It is mild."
        first, _ = app.engine.specs
        assert asked == ["Rome"] and first.guide is not None and first.guide.may_steer


@pytest.mark.real
@WAYS
def test_real(real_url: str, runner: asyncio.Runner, way: str) -> None:
    from agents import Agent, ModelSettings, Runner

    settings = ModelSettings(max_tokens=16, temperature=0.0)
    plain = Agent("plain", model=model(real_url, way, MODEL), model_settings=settings)
    answer = runner.run(Runner.run(plain, "What is the capital of France?"))
    assert "Paris" in answer.final_output
