"""langchain-openai, on chat completions and on Responses, and langchain-anthropic.

One set of tests for the three: what an application sees must not depend on the surface.
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

QUESTION = "What is the weather in Rome?"
ROME = call("weather", town="Rome")
BONN = call("weather", town="Bonn")
THINKS = {"type": "enabled", "budget_tokens": 1024}
WAYS = pytest.mark.parametrize("way", ["chat", "responses", "messages"])
OPENAI_WAYS = pytest.mark.parametrize("way", ["chat", "responses"])


def model(url: str, way: str, name: str = "m", **options: Any) -> Any:
    """A chat model of LangChain on one of our surfaces, without retries."""
    if way == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            model_name=name,
            base_url=url,
            api_key="x",
            max_retries=0,
            **{"max_tokens": 500, **options},
        )
    from langchain_openai import ChatOpenAI

    options = {"use_responses_api": way == "responses", "stream_usage": True, **options}
    return ChatOpenAI(model=name, base_url=url + "/v1", api_key="x", max_retries=0, **options)


@pytest.fixture(scope="module")
def runner(nothing_left: None) -> Iterator[asyncio.Runner]:
    """One loop for all: the package keeps its connections and expects the loop to live on."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def weather() -> Iterator[Any]:
    """A tool; its plain function is what a model's call runs."""
    from langchain_core.tools import tool

    @tool
    def weather(town: str) -> str:
        """The weather in a town."""
        return f"mild in {town}"

    yield weather


def whole_of(parts: Any) -> Any:
    """A stream's chunks, added up by the package's own rules."""
    parts = list(parts)
    found = parts[0]
    for part in parts[1:]:
        found += part
    return found


def text_of(message: Any) -> str:
    """The text of a message, whose content is a string or a list of blocks."""
    found = message.text
    return str(found() if callable(found) and not isinstance(found, str) else found)


@WAYS
def test_invoke_and_stream(app: TurnsApp, runner: asyncio.Runner, way: str) -> None:
    """The same text and usage, plain, streamed, and by the async methods."""
    chat = model(app.url, way)
    app.script(*["It is mild."] * 4)
    whole = chat.invoke(QUESTION)
    streamed = whole_of(chat.stream(QUESTION))

    async def run() -> tuple[Any, Any]:
        return await chat.ainvoke(QUESTION), [part async for part in chat.astream(QUESTION)]

    answer, parts = runner.run(run())
    usage = whole.usage_metadata
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0
    for message in (whole, streamed, answer, whole_of(parts)):
        assert text_of(message) == "It is mild." and message.tool_calls == []
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            assert message.usage_metadata[name] == usage[name], name


@WAYS
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_a_tool_loop(app: TurnsApp, weather: Any, way: str, is_stream: bool) -> None:
    """`bind_tools`, two calls, their results, the answer: content goes back as the lists of parts
    that the package makes of it (Requests 10), calls with the ids that we gave."""
    from langchain_core.messages import HumanMessage

    chat = model(app.url, way).bind_tools([weather])

    def ask(messages: list[Any]) -> Any:
        return whole_of(chat.stream(messages)) if is_stream else chat.invoke(messages)

    app.script(f"<think>hm</think>Let me see.{ROME}{BONN}", "It is mild.")
    messages: list[Any] = [HumanMessage(QUESTION)]
    message = ask(messages)
    assert text_of(message) == "Let me see."
    calls = message.tool_calls
    assert [(c["name"], c["args"]) for c in calls] == [
        ("weather", {"town": "Rome"}),
        ("weather", {"town": "Bonn"}),
    ]
    assert message.invalid_tool_calls == []
    answer = ask([*messages, message, *map(weather.invoke, calls)])
    assert text_of(answer) == "It is mild." and answer.tool_calls == []
    first, second = app.prompts
    assert '"name": "weather"' in first and "mild in" not in first
    history = second.partition(QUESTION)[2]
    order = ["Let me see.", ROME, BONN, "mild in Rome", "mild in Bonn"]
    assert [history.count(piece) for piece in order] == [1] * 5
    assert sorted(order, key=history.index) == order


@OPENAI_WAYS
def test_a_chain_by_id(app: TurnsApp, way: str) -> None:
    """`use_previous_response_id`: the server keeps the turns; chat sends them all."""
    options = {"use_previous_response_id": True} if way == "responses" else {}
    chat = model(app.url, way, **options)
    app.script("Four.", "Five.")
    messages: list[Any] = [("user", "two and two?")]
    messages += [chat.invoke(messages), ("user", "and one?")]
    assert text_of(chat.invoke(messages)) == "Five."
    asked = app.prompts[-1]
    assert asked.count("two and two?") == asked.count("Four.") == asked.count("and one?") == 1


def test_reasoning(app: TurnsApp) -> None:
    """Thinking is a block of its own on Messages and a summary on Responses; chat has none."""
    text = "<think>hm, well</think>Mild."
    app.script(*[text] * 4)
    for way, kind, name, options in (
        ("messages", "thinking", "thinking", {"thinking": THINKS, "max_tokens": 2000}),
        ("responses", "reasoning", "summary", {"output_version": "responses/v1"}),
    ):
        chat = model(app.url, way, **options)
        for message in (chat.invoke(QUESTION), whole_of(chat.stream(QUESTION))):
            (thought,) = [block for block in message.content if block["type"] == kind]
            assert "hm, well" in str(thought[name]) and text_of(message) == "Mild."


@WAYS
def test_the_system_message(app: TurnsApp, way: str) -> None:
    """Content as lists of parts, also for system and assistant (Requests 10)."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    def part(text: str) -> list[Any]:
        return [{"type": "text", "text": text}]

    app.script("ok")
    turns = [SystemMessage(part("Be brief.")), HumanMessage(part("one")), AIMessage(part("two"))]
    assert text_of(model(app.url, way).invoke([*turns, HumanMessage(part("three"))])) == "ok"
    (prompt,) = app.prompts
    order = ["system\nBe brief.", "user\none", "assistant\ntwo", "user\nthree"]
    assert sorted(order, key=prompt.index) == order


@WAYS
def test_errors(app: TurnsApp, way: str) -> None:
    """Too long is the package's own class for it; a fault of ours in mid-stream raises."""
    from langchain_core.exceptions import ContextOverflowError

    chat = model(app.url, way)
    for ask in (chat.invoke, lambda text: list(chat.stream(text))):
        with pytest.raises(ContextOverflowError):
            ask("word " * 5000)
    app.script(Turn("half", Finish.ERROR))
    with pytest.raises(Exception, match="the step failed"):
        list(chat.stream(QUESTION))


@OPENAI_WAYS
def test_forced_calls_and_strict_tools(app: TurnsApp, weather: Any, way: str) -> None:
    """The engine is told to steer; the call itself is the script's."""
    chat = model(app.url, way)
    for bound in (
        chat.bind_tools([weather], tool_choice="any"),
        chat.bind_tools([weather], tool_choice="weather"),
        chat.bind_tools([weather], strict=True),
    ):
        app.script(enforced_call("weather", {"town": "Rome"}))
        (found,) = bound.invoke(QUESTION).tool_calls
        assert found["args"] == {"town": "Rome"}
        (spec,) = app.engine.specs
        assert spec.guide is not None and spec.guide.may_steer


@OPENAI_WAYS
def test_typed_answers(app: TurnsApp, way: str) -> None:
    from pydantic import BaseModel

    class Town(BaseModel):
        town: str

    for method in ("json_schema", "function_calling"):
        made = enforced_call("Town", {"town": "Rome"})
        app.script('{"town":"Rome"}' if method == "json_schema" else made)
        found = model(app.url, way).with_structured_output(Town, method=method).invoke(QUESTION)
        assert found.town == "Rome"


@pytest.mark.real
@WAYS
def test_real(real_url: str, way: str) -> None:
    limit = {"max_tokens": 12, "temperature": 0}
    chat = model(real_url, way, MODEL, **limit)
    answer = chat.invoke("What is the capital of France?")
    assert "Paris" in text_of(answer)
    assert text_of(whole_of(chat.stream("What is the capital of France?"))) == text_of(answer)
