"""litellm: chat, Messages, Responses and text completions through its own translations.

It is what proxies and many agents speak through. Sources of the rows: clients.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mlxlite.types import Finish
from tests.clients.conftest import MODEL, UNCLOSED
from tests.live import HELLO
from tests.turns import Turn, TurnsApp, call

pytestmark = [
    pytest.mark.clients,
    UNCLOSED,
    # It replaces the answer's usage by a plain dict and then dumps it.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}
ROME = call("weather", town="Rome")
THOUGHT = "<think>hm, well</think>"


@pytest.fixture(scope="module", autouse=True)
def litellm(attempts: list[Any], nothing_left: None) -> Iterator[Any]:
    """The package, quiet; its clients, which it keeps for ever, are given up at the end."""
    import litellm

    litellm.suppress_debug_info = True
    litellm.num_retries = 0
    yield litellm
    asyncio.run(litellm.close_litellm_async_clients())
    litellm.in_memory_llm_clients_cache.flush_cache()


def ways(app: TurnsApp) -> dict[str, dict[str, Any]]:
    """How litellm is told which surface to speak."""
    return {
        "chat": {"model": "openai/m", "api_base": app.url + "/v1", "api_key": "x"},
        "messages": {"model": "anthropic/m", "api_base": app.url, "api_key": "x"},
    }


WAYS = pytest.mark.parametrize("way", ["chat", "messages"])


@WAYS
def test_chat(app: TurnsApp, litellm: Any, way: str) -> None:
    """Reasoning, text and usage, plain, streamed, and by the async client."""
    asked = {"messages": HELLO, "max_tokens": 500, **ways(app)[way]}
    app.script(*[f"{THOUGHT}Paris."] * 4)
    whole = litellm.completion(**asked)
    options = {"include_usage": True}
    chunks = list(litellm.completion(**asked, stream=True, stream_options=options))
    streamed = litellm.stream_chunk_builder(chunks)

    async def run() -> tuple[Any, Any]:
        answer = await litellm.acompletion(**asked)
        parts = await litellm.acompletion(**asked, stream=True, stream_options=options)
        return answer, litellm.stream_chunk_builder([part async for part in parts])

    for answer in (whole, streamed, *asyncio.run(run())):
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.reasoning_content) == ("Paris.", "hm, well")
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert answer.usage.prompt_tokens == whole.usage.prompt_tokens > 0
        assert answer.usage.completion_tokens == whole.usage.completion_tokens > 0
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0


@WAYS
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_a_tool_loop(app: TurnsApp, litellm: Any, way: str, is_stream: bool) -> None:
    """Its own message objects, sent back with the result, are read (Requests 10)."""
    asked = {"max_tokens": 500, "tools": [TOOL], **ways(app)[way]}

    def ask(messages: list[Any]) -> Any:
        answer = litellm.completion(messages=messages, stream=is_stream, **asked)
        whole = litellm.stream_chunk_builder(list(answer)) if is_stream else answer
        return whole.choices[0]

    app.script(f"{THOUGHT}Let me see.{ROME}{call('weather', town='Bonn')}", "It is mild.")
    choice = ask(HELLO)
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert [c.function.name for c in calls] == ["weather", "weather"]
    assert [litellm.utils.json.loads(c.function.arguments) for c in calls] == [
        {"town": "Rome"},
        {"town": "Bonn"},
    ]
    results = [{"role": "tool", "tool_call_id": c.id, "content": f"mild {c.id}"} for c in calls]
    again = ask([*HELLO, choice.message.model_dump(), *results])
    assert (again.message.content, again.finish_reason) == ("It is mild.", "stop")
    prompt = app.prompts[-1]
    assert ROME in prompt and all(result["content"] in prompt for result in results)


def test_responses(app: TurnsApp, litellm: Any) -> None:
    asked = {"input": "hello", "tools": [{"type": "function", **TOOL["function"]}]}  # type: ignore[dict-item]  # TOOL is untyped
    asked |= ways(app)["chat"]
    app.script(*[f"{THOUGHT}ok{ROME}"] * 2)
    whole = litellm.responses(**asked)
    events = list(litellm.responses(**asked, stream=True))
    for answer in (whole, events[-1].response):
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output[2].arguments.replace(" ", "") == '{"town":"Rome"}'
        assert answer.usage.input_tokens == whole.usage.input_tokens > 0
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "ok"


def test_text_completions(app: TurnsApp, litellm: Any) -> None:
    asked = {**ways(app)["chat"], "model": "text-completion-openai/m"}
    app.script("one", "two", "one")
    answer = litellm.text_completion(prompt=["hello", "world"], **asked)
    assert [choice.text for choice in answer.choices] == ["one", "two"]
    chunks = list(litellm.text_completion(prompt="hello", stream=True, **asked))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == "one"


@WAYS
def test_errors(app: TurnsApp, litellm: Any, way: str) -> None:
    """They arrive as its own classes: what a repeat cannot mend is no server error (clients.md,
    Errors 1), and too long is what makes its router try a longer context (Requests 2)."""
    asked = {"max_tokens": 500, **ways(app)[way]}
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HELLO, temperature=-1, **asked)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 5000}], **asked)
    broken = Turn("half", Finish.ERROR)
    app.script(broken, broken)
    with pytest.raises(litellm.InternalServerError, match="the step failed"):
        litellm.completion(messages=HELLO, max_retries=0, **asked)
    with pytest.raises(litellm.exceptions.MidStreamFallbackError, match="the step failed"):
        list(litellm.completion(messages=HELLO, stream=True, max_retries=0, **asked))


@pytest.mark.real
def test_real(real_url: str, litellm: Any) -> None:
    asked = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
        "api_key": "x",
    }
    for model, base in ((f"openai/{MODEL}", real_url + "/v1"), (f"anthropic/{MODEL}", real_url)):
        whole = litellm.completion(model=model, api_base=base, **asked)
        chunks = list(litellm.completion(model=model, api_base=base, stream=True, **asked))
        text = whole.choices[0].message.content
        assert "Paris" in text
        assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text
