"""The official `anthropic` package: async, its helpers and loops, beyond tests/test_api_*.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mlxlite.types import Finish
from tests.clients.conftest import MODEL, UNCLOSED
from tests.live import HELLO
from tests.turns import Turn, TurnsApp, call

pytestmark = [pytest.mark.clients, UNCLOSED]

ROME, BONN = call("weather", town="Rome"), call("weather", town="Bonn")
TOOL: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 500, "messages": HELLO}


@pytest.fixture
def client(app: TurnsApp) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        yield client


@asynccontextmanager
async def opened(app: TurnsApp) -> AsyncIterator[Any]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=app.url, api_key="x", max_retries=0) as client:
        yield client


def test_the_async_stream_helper(app: TurnsApp) -> None:
    """Text as it comes, snapshots of inputs, and the message that a plain answer would be."""
    app.script(*[f"<think>hm, well</think>Let me see.{ROME}{BONN}"] * 2)

    async def run() -> tuple[Any, Any, list[Any]]:
        async with opened(app) as client:
            whole = await client.messages.create(**ASKED, tools=[TOOL])
            async with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
                events = [event async for event in stream]
                return whole, await stream.get_final_message(), events

    whole, final, events = asyncio.run(run())
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content[2:]] == [{"town": "Rome"}, {"town": "Bonn"}]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    text = "".join(event.text for event in events if event.type == "text")
    thought = "".join(event.thinking for event in events if event.type == "thinking")
    assert (text, thought) == ("Let me see.", "hm, well")
    inputs = [event.snapshot for event in events if event.type == "input_json"]
    assert {"town": "Rome"} in inputs and inputs[-1] == {"town": "Bonn"}


def test_text_stream(app: TurnsApp, client: Any) -> None:
    app.script("<think>hm</think>It is mild.")
    with client.messages.stream(**ASKED) as stream:
        pieces = list(stream.text_stream)
        assert stream.get_final_text() == "".join(pieces) == "It is mild."
    assert len(pieces) > 1 and stream.request_id


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_an_async_tool_runner(app: TurnsApp, is_stream: bool) -> None:
    """Two calls in one turn; their results come back in one message, in order."""
    import anthropic

    towns: list[str] = []

    @anthropic.beta_async_tool
    async def weather(town: str) -> str:
        """The weather in a town."""
        towns.append(town)
        return f"mild in {town}"

    app.script(f"<think>hm</think>Let me see.{ROME}{BONN}", "It is mild.")

    async def run() -> Any:
        async with opened(app) as client:
            runner = client.beta.messages.tool_runner(**ASKED, tools=[weather], stream=is_stream)
            return await runner.until_done()

    assert asyncio.run(run()).content[0].text == "It is mild."
    assert sorted(towns) == ["Bonn", "Rome"]
    history = app.prompts[-1].partition("hello world")[2]
    order = ["Let me see.", ROME, BONN, "mild in Rome", "mild in Bonn"]
    assert sorted(order, key=history.index) == order and "hm" not in history


def test_count_tokens_is_what_is_asked(app: TurnsApp) -> None:
    """Counted with system, tools and a history of blocks, as it is prefilled."""
    app.script(ROME, "ok")

    async def run() -> tuple[int, Any]:
        async with opened(app) as client:
            first = await client.messages.create(**ASKED, tools=[TOOL])
            result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "mild"}
            asked: dict[str, Any] = {
                "model": "m",
                "system": [{"type": "text", "text": "Be brief."}],
                "tools": [TOOL],
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": first.content},
                    {"role": "user", "content": [result]},
                ],
            }
            counted = await client.messages.count_tokens(**asked)
            return counted.input_tokens, await client.messages.create(**asked, max_tokens=50)

    counted, answer = asyncio.run(run())
    usage = answer.usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert counted == len(app.engine.specs[-1].prompt_ids)


def test_beta_streams(app: TurnsApp, client: Any) -> None:
    """`?beta=true` and a beta header that nobody knows (clients.md, Requests 5)."""
    app.script("<think>hm</think>ok")
    with client.beta.messages.stream(**ASKED, betas=["of-tomorrow-2030-01-01"]) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_errors(app: TurnsApp, client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        client.messages.create(**ASKED, extra_body={"temperature": -1})
    assert caught.value.request_id and caught.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        other: Any = {"type": "tool", "name": "none of them"}
        client.messages.create(**ASKED, tools=[TOOL], tool_choice=other)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()
    app.script(Turn("half", Finish.ERROR))

    async def run() -> None:
        async with opened(app) as client, client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()

    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        asyncio.run(run())


@pytest.mark.real
def test_real(real_url: str) -> None:
    """The async helper on real weights; plain answers of them are in tests/test_real.py."""
    import anthropic

    async def run() -> str:
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 12,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "extra_body": {"temperature": 0},
        }
        async with anthropic.AsyncAnthropic(base_url=real_url, api_key="x") as client:
            async with client.messages.stream(**asked) as stream:
                return str(await stream.get_final_text())

    assert "Paris" in asyncio.run(run())
