"""The official `openai` package: helpers and loops beyond what tests/test_api_*.py ask of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from mlxlite.types import Finish
from tests.clients.conftest import MODEL, UNCLOSED
from tests.live import HELLO
from tests.turns import Turn, TurnsApp, call, enforced_call

pytestmark = [pytest.mark.clients, UNCLOSED]

ROME, BONN = call("weather", town="Rome"), call("weather", town="Bonn")
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


class Town(BaseModel):
    town: str


def weather(arguments: str) -> str:
    return f"mild in {json.loads(arguments)['town']}"


def test_the_chat_stream_helper(app: TurnsApp) -> None:
    """Its accumulator: events of text, calls and their ends, and the same final message."""
    app.script(*[f"<think>hm</think>Let me see.{ROME}{BONN}"] * 2)
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": [TOOL]}
    whole = app.client.chat.completions.create(**asked)
    options = {"include_usage": True}
    with app.client.chat.completions.stream(**asked, stream_options=options) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert kinds.count("content.done") == 1
    assert kinds.count("tool_calls.function.arguments.done") == 2
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name) for event in done] == [(0, "weather"), (1, "weather")]
    assert [json.loads(event.arguments)["town"] for event in done] == ["Rome", "Bonn"]
    mine, other = final.choices[0], whole.choices[0]
    assert (mine.message.content, mine.finish_reason) == ("Let me see.", "tool_calls")
    assert mine.message.content == other.message.content
    calls = [
        [json.loads(c.function.arguments) for c in m.message.tool_calls] for m in (mine, other)
    ]
    assert calls[0] == calls[1] and final.usage == whole.usage


def test_the_stream_helper_with_log_probabilities_and_choices(app: TurnsApp) -> None:
    app.script("one two", "three")
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "n": 2, "logprobs": True}
    with app.client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"logprobs.content.delta", "logprobs.content.done"} <= kinds
    assert [choice.message.content for choice in final.choices] == ["one two", "three"]
    for choice in final.choices:
        assert "".join(e.token for e in choice.logprobs.content) == choice.message.content


def test_an_async_tool_loop(app: TurnsApp) -> None:
    """The message of a streamed turn goes back as the package holds it."""
    import openai

    app.script(f"Let me see.{ROME}{BONN}", "It is mild.")

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=app.url + "/v1", api_key="x") as client:
            messages: list[Any] = list(HELLO)
            while True:
                asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": [TOOL]}
                async with client.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
                if not message.tool_calls:
                    return str(message.content)
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": c.id, "content": weather(c.function.arguments)}
                    for c in message.tool_calls
                ]

    assert asyncio.run(run()) == "It is mild."
    order = ["Let me see.", ROME, BONN, "mild in Rome", "mild in Bonn"]
    history = app.prompts[-1].partition("hello world")[2]
    assert sorted(order, key=history.index) == order


def test_a_streamed_responses_loop(app: TurnsApp) -> None:
    """Turn after turn by the stream helper and `previous_response_id`; then read back."""
    app.script(f"<think>hm</think>{ROME}{BONN}", "It is mild.", "You are welcome.")
    given: list[Any] = [{"role": "user", "content": "weather?"}]
    previous: str | None = None
    answers: list[Any] = []
    for _ in range(3):
        asked: dict[str, Any] = {"model": "m", "input": given, "tools": [FLAT]}
        if previous is not None:
            asked["previous_response_id"] = previous
        with app.client.responses.stream(**asked) as stream:
            stream.until_done()
            answers.append(final := stream.get_final_response())
        previous = final.id
        given = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": weather(item.arguments),
            }
            for item in final.output
            if item.type == "function_call"
        ] or [{"role": "user", "content": "Thanks."}]
    assert [answer.output_text for answer in answers] == ["", "It is mild.", "You are welcome."]
    prompt = app.prompts[-1]
    order = ["weather?", ROME, BONN, "mild in Rome", "mild in Bonn", "It is mild.", "Thanks."]
    assert sorted(order, key=prompt.index) == order
    stored = app.client.responses.retrieve(answers[-1].id)
    assert stored.output_text == "You are welcome."
    kinds = [item.type for item in app.client.responses.input_items.list(stored.id, order="asc")]
    results = ["function_call_output"] * 2
    assert [k for k in kinds if k != "reasoning"] == [
        "message", "function_call", "function_call", *results, "message", "message",
    ]  # fmt: skip


def test_structured_output(app: TurnsApp) -> None:
    """`.parse` of an answer, of an item, of a strict call; the engine is told to steer."""
    import openai

    chat, responses = app.client.chat.completions, app.client.responses
    rome = Town(town="Rome")
    app.script(
        rome.model_dump_json(), rome.model_dump_json(), enforced_call("Town", {"town": "Rome"})
    )
    found = chat.parse(model="m", messages=HELLO, response_format=Town)
    assert found.choices[0].message.parsed == rome
    assert responses.parse(model="m", input="x", text_format=Town).output_parsed == rome
    tools = [openai.pydantic_function_tool(Town)]
    found = chat.parse(model="m", messages=HELLO, tools=tools)
    (made,) = found.choices[0].message.tool_calls or ()
    assert made.function.parsed_arguments == rome
    assert all(spec.guide is not None and spec.guide.may_steer for spec in app.engine.specs)
    with pytest.raises(openai.BadRequestError) as caught:
        chat.create(model="m", messages=HELLO, extra_body={"guided_regex": "("})
    assert caught.value.param == "guided_regex"


def test_parse_without_a_format_is_an_answer(app: TurnsApp) -> None:
    app.script("hello", "hello")
    chat = app.client.chat.completions.parse(model="m", messages=HELLO)
    assert (chat.choices[0].message.content, chat.choices[0].message.parsed) == ("hello", None)
    assert app.client.responses.parse(model="m", input="x").output_text == "hello"


def test_raw_answers_have_an_id(app: TurnsApp) -> None:
    """`_request_id`, which people quote, and the package's own timing headers pass."""
    app.script("hello", "hello")
    raw = app.client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    options = app.client.chat.completions.with_streaming_response
    with options.create(model="m", messages=HELLO, stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_leaving_a_stream_early(app: TurnsApp) -> None:
    """`break` and close: the connection goes, the row with it, and the next one is served."""
    app.script("word " * 200, "hello")
    stream = app.client.chat.completions.create(model="m", messages=HELLO, stream=True)
    for _ in stream:
        break
    stream.close()
    answer = app.client.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "hello"


@pytest.mark.parametrize("way", ["chat", "completions"])
def test_errors_in_mid_stream_raise(app: TurnsApp, way: str) -> None:
    import openai

    app.script(Turn("half", Finish.ERROR))
    texts = []
    with pytest.raises(openai.APIError, match="the step failed"):
        if way == "chat":
            for chunk in app.client.chat.completions.create(model="m", messages=HELLO, stream=True):
                texts.append(chunk.choices[0].delta.content or "")
        else:
            for part in app.client.completions.create(model="m", prompt="x", stream=True):
                texts.append(part.choices[0].text)
    assert "".join(texts) == "half"


@pytest.mark.real
def test_real(real_url: str) -> None:
    """The helpers on real weights; plain answers of them are in tests/test_real.py."""
    import openai

    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    with openai.OpenAI(base_url=real_url + "/v1", api_key="x", max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
        with client.chat.completions.stream(messages=question, max_tokens=12, **asked) as chat:
            first = chat.get_final_completion().choices[0].message.content
        with client.responses.stream(input=question, max_output_tokens=12, **asked) as response:
            second = response.get_final_response().output_text
    assert first == second and "Paris" in first
