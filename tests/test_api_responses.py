"""Responses: stored state and chains, the object, errors; live servers and the official client."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxlite.types import Finish
from tests.live import CHAT, Child, LiveApp, Reply, ask
from tests.responses import RESPONSES, check, plain, post, streamed, without_ids
from tests.scripted import QWEN, TOKENIZER, ScriptedApp

pytestmark = pytest.mark.slow

THINKER = (QWEN + "{# <think> #}").replace(
    "{{ message.content }}",
    "{% if message.reasoning %}({{ message.reasoning }}) {% endif %}{{ message.content }}",
)
ADD = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def app(tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture(scope="module")
def client(tiny_server: LiveApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def prompt(app: ScriptedApp) -> str:
    """What the model saw last."""
    return TOKENIZER.decode(app.engine.specs[-1].prompt_ids, keep_special=True)


def says(app: ScriptedApp, text: str, **body: Any) -> dict[str, Any]:
    """A whole answer in which the model says this."""
    app.engine.says(text)
    return plain(app, **body)


def get(app: LiveApp, path: str, method: str = "GET") -> Reply:
    return app.ask(method, f"{RESPONSES}/{path}")


def refused(reply: Reply, status: int, param: str | None, code: str | None = None) -> str:
    assert reply.status == status, reply.body
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    message: str = error["message"]
    return message


# ------------------------------------------------------------------------ a real (tiny) model


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.3, "top_p": 0.9}])
def test_streamed_is_plain(
    tiny_server: LiveApp, client: openai.OpenAI, sampling: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"model": "any", "input": "hello world", "max_output_tokens": 16}
    asked |= {**sampling, "extra_body": {"seed": 7}}
    first = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert first.output_text == text != ""
    assert first.usage.output_tokens <= 16
    chat = tiny_server.chat(max_tokens=16, seed=7, **sampling)
    assert chat.text == text, "the same model behind each surface (F64)"


def test_the_official_client_and_a_chain(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="m", input="hello", instructions="be brief", max_output_tokens=6
    )
    second = client.responses.create(
        model="m", input="again", previous_response_id=first.id, max_output_tokens=6
    )
    assert second.instructions == "be brief" and second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id) == first
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].id == first.output[0].id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(
        model="m", input="more", previous_response_id=second.id, max_output_tokens=6
    )
    assert third.usage.input_tokens > second.usage.input_tokens  # the whole chain is in the last id
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(third.id)


def test_the_async_client(tiny_server: LiveApp) -> None:
    async def run() -> None:
        url = tiny_server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "m", "max_output_tokens": 8, "temperature": 0}
            whole = await client.responses.create(input="hello", **asked)
            many = await asyncio.gather(
                *(client.responses.create(input="hello", **asked) for _ in range(4))
            )
            assert {each.output_text for each in many} == {whole.output_text}
            assert len({each.id for each in many}) == 4
            assert await client.responses.retrieve(whole.id) == whole
            await client.responses.delete(whole.id)

    asyncio.run(run())


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    for is_stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="word " * 2000, stream=is_stream)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(
                model="m", input="x", text={"format": {"type": "xml"}}, stream=is_stream
            )
        assert caught.value.param == "text.format.type"
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(
                model="m", input="x", previous_response_id="resp_0", stream=is_stream
            )
        assert missing.value.code == "previous_response_not_found"


def test_too_long_is_never_cut(tiny_server: LiveApp) -> None:
    reply = post(tiny_server, input="word " * 2000, truncation="auto")
    assert "1024" in refused(reply, 400, "input", "context_length_exceeded")


def test_a_real_server_is_killed(tiny_folder: Path, tmp_path: Path) -> None:
    """D15: what was stored before SIGKILL goes on after it."""
    body = {"input": "hello", "instructions": "be brief", "max_output_tokens": 5, "temperature": 0}

    def asked(child: Child, **more: Any) -> Reply:
        return ask(child.address, "POST", RESPONSES, {**body, **more})

    with Child(tmp_path, str(tiny_folder), "--port", "0") as child:
        first = asked(child.wait_ready()).json()
        ask(child.address, "POST", RESPONSES, {**body, "stream": True})
        child.signal(signal.SIGKILL)
        child.wait()
    with Child(tmp_path, str(tiny_folder), "--port", "0") as child:
        child.wait_ready()
        reply = asked(child, previous_response_id=first["id"], input="again", instructions=None)
        assert reply.status == 200
        second = reply.json()
        assert second["instructions"] == "be brief"
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        path = f"{RESPONSES}/{first['id']}"
        assert ask(child.address, "GET", path).json() == first
        assert ask(child.address, "GET", "/stats").json()["response_store"]["entries"] == 3


# ----------------------------------------------------------------------------------- chains


def test_a_chain_is_the_conversation(app: ScriptedApp) -> None:
    """Three turns by id give the prompt that the same turns give when they are sent whole."""
    first = says(app, "<think>hm</think>one", input="a", instructions="be brief")
    second = says(app, "two", input="b", previous_response_id=first["id"])
    third = says(app, "three", input=[{"role": "user", "content": "c"}],
                 previous_response_id=second["id"])  # fmt: skip
    chained = prompt(app)
    user = [{"role": "user", "content": text} for text in "abc"]
    whole = [user[0], *first["output"], user[1], *second["output"], user[2]]
    says(app, "x", input=whole, instructions="be brief")
    assert prompt(app) == chained
    assert chained.count("<|im_start|>system\nbe brief<|im_end|>") == 1
    assert "(hm) one<|im_end|>" in chained
    assert [r["previous_response_id"] for r in (first, second, third)] == [
        None,
        first["id"],
        second["id"],
    ]


def test_instructions_are_inherited_until_others_come(app: ScriptedApp) -> None:
    first = says(app, "1", instructions="A")
    second = says(app, "2", instructions="B", previous_response_id=first["id"])
    third = says(app, "3", previous_response_id=second["id"])
    assert third["instructions"] == "B"
    assert "system\nB<|im_end|>" in prompt(app) and "system\nA" not in prompt(app)
    fourth = says(app, "4", instructions="", previous_response_id=third["id"])
    assert fourth["instructions"] == "" and "<|im_start|>system" not in prompt(app)


def test_streams_are_stored_too(app: ScriptedApp) -> None:
    app.engine.says("one")
    final = check(streamed(app, input="a"))
    assert get(app, final["id"]).json() == final
    says(app, "two", input="b", previous_response_id=final["id"])
    assert "user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>" in prompt(app)


def test_an_incomplete_answer_can_be_continued(app: ScriptedApp) -> None:
    first = says(app, "the quick brown fox", max_output_tokens=2)
    assert first["status"] == "incomplete"
    says(app, "ok", input="go on", previous_response_id=first["id"])
    assert first["output"][0]["content"][0]["text"] in prompt(app)


def test_not_stored(app: ScriptedApp) -> None:
    found = says(app, "one", store=False)
    assert found["store"] is False
    message = f"response '{found['id']}' not found or expired"
    assert refused(get(app, found["id"]), 404, None) == message
    reply = post(app, previous_response_id=found["id"])
    assert refused(reply, 404, "previous_response_id", "previous_response_not_found") == (
        f"previous_response_id '{found['id']}' not found or expired"
    )
    assert says(app, "one", store=True)["store"] is True


@pytest.mark.parametrize("path", ["resp_0", "resp_0/input_items", "x/y", "resp_0/cancel"])
def test_unknown_ids(app: ScriptedApp, path: str) -> None:
    method = "POST" if path.endswith("cancel") else "GET"
    refused(get(app, path, method), 404, None)
    refused(get(app, "resp_0", "DELETE"), 404, None)
    assert get(app, "resp_0", "PUT").status == 405


def test_delete(app: ScriptedApp) -> None:
    found = says(app, "one")
    assert get(app, found["id"], "DELETE").json() == {
        "id": found["id"],
        "object": "response",
        "deleted": True,
    }
    assert get(app, found["id"], "DELETE").status == 404
    assert get(app, found["id"]).status == 404


def test_retrieve_has_no_stream(app: ScriptedApp) -> None:
    found = says(app, "one")
    assert get(app, found["id"] + "?stream=false").json() == found
    refused(get(app, found["id"] + "?stream=true"), 400, "stream")


def test_input_items(app: ScriptedApp) -> None:
    given = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    found = says(app, "one", input=given)

    def page(query: str) -> dict[str, Any]:
        reply = get(app, f"{found['id']}/input_items?{query}")
        assert reply.status == 200
        listed: dict[str, Any] = reply.json()
        assert listed["object"] == "list"
        assert listed["first_id"] == listed["data"][0]["id"]
        assert listed["last_id"] == listed["data"][-1]["id"]
        return listed

    def texts(listed: dict[str, Any]) -> str:
        return "".join(item["content"][0]["text"] for item in listed["data"])

    assert texts(page("")) == "cba" and texts(page("order=asc")) == "abc"
    first = page("order=asc&limit=2&include=x")
    assert (texts(first), first["has_more"]) == ("ab", True)
    rest = page(f"order=asc&limit=2&after={first['last_id']}")
    assert (texts(rest), rest["has_more"]) == ("c", False)
    for query, param in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_0", "after"),
    ):
        refused(get(app, f"{found['id']}/input_items?{query}"), 400, param)
    empty = says(app, "one", input="", instructions="be brief")
    listed = get(app, f"{empty['id']}/input_items").json()
    assert listed["data"] == [] and listed["first_id"] is listed["last_id"] is None


def test_references(app: ScriptedApp) -> None:
    """An id stands for an item of any stored answer; what the chain holds is not said twice."""
    first = says(app, "<think>hm</think>one", input="a")
    given: list[Any] = [{"role": "user", "content": "a"}]
    given += [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    given += [{"role": "user", "content": "b"}]
    says(app, "two", input=given)
    by_reference = prompt(app)
    says(app, "two", input="b", previous_response_id=first["id"])
    assert prompt(app) == by_reference and "(hm) one" in by_reference
    says(app, "two", input=given[1:], previous_response_id=first["id"])
    assert prompt(app) == by_reference
    for missing in ({"type": "item_reference", "id": "msg_0"}, {"id": "msg_0"}):
        reply = post(app, input=[given[0], missing])
        assert "msg_0" in refused(reply, 404, "input[1].id")


def test_statistics(tiny_folder: Path, tmp_path: Path) -> None:
    with ScriptedApp(tiny_folder, QWEN, home=str(tmp_path)) as app:
        empty = {"entries": 0, "bytes": 0, "max_bytes": 32 << 20, "ttl_ms": 3_600_000}
        assert app.ask("GET", "/stats").json()["response_store"] == empty
        found = says(app, "one")
        stats = app.ask("GET", "/stats").json()["response_store"]
        assert stats["entries"] == 1 and stats["bytes"] > len(json.dumps(found["output"])) / 2
        assert (tmp_path / "responses.sqlite3").exists()


def test_a_damaged_file_does_not_stop_the_start(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite3").write_bytes(b"no database at all" * 100)
    with ScriptedApp(tiny_folder, QWEN, home=str(tmp_path)) as app:
        found = says(app, "one")
        assert get(app, found["id"]).json() == found
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


def test_an_answer_that_cannot_be_stored(
    app: ScriptedApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It still is an answer, and says that it was not stored."""
    from mlxlite import store

    def full(value: Any) -> bytes:
        raise store.sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_encoded", full)
    found = says(app, "one")
    assert found["status"] == "completed" and found["store"] is False
    assert "disk is full" in caplog.text
    assert check(streamed(app))["store"] is False
    monkeypatch.undo()
    assert get(app, found["id"]).status == 404


# ----------------------------------------------------------------------------------- the object


def test_fields_are_echoed(app: ScriptedApp) -> None:
    """D12: as asked, not constants."""
    asked: dict[str, Any] = {
        "instructions": "be brief",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "top_logprobs": 1,
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
    }
    hosted = {"type": "web_search"}
    app.engine.says("ok")
    final = check(streamed(app, tools=[ADD, hosted], **asked))
    whole = plain(app, tools=[ADD, hosted], **asked)
    assert without_ids(whole) == without_ids(final)
    assert {name: final[name] for name in asked} == asked
    assert final["tools"] == [{**ADD, "strict": False}, hosted]
    assert final["model"] == app.name and final["object"] == "response"
    assert abs(final["created_at"] - time.time()) < 60
    assert len(final["id"]) == 29


def test_fields_that_were_not_asked(app: ScriptedApp) -> None:
    found = says(app, "ok", temperature=None)
    expected = {
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_tool_loop(app: ScriptedApp) -> None:
    """By the official client: the call it got, sent back with its result, by id and whole."""
    asked: dict[str, Any] = {"model": "m", "tools": [ADD]}
    app.engine.says(f"<think>hm</think>{CALL}")
    first = app.client.responses.create(input="what is 1 + 2?", **asked)
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    app.engine.says("It is 3.")
    second = app.client.responses.create(
        input=[result],  # type: ignore[list-item]
        previous_response_id=first.id,
        **asked,
    )
    assert second.output_text == "It is 3."
    by_id = prompt(app)
    given = [{"role": "user", "content": "what is 1 + 2?"}]
    given += [item.model_dump() for item in first.output]  # every unset field spelled out as null
    app.engine.says("It is 3.")
    app.client.responses.create(input=[*given, result], **asked)  # type: ignore[list-item]
    assert prompt(app) == by_id
    turn = f"assistant\n(hm) {CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n"
    assert turn in by_id.replace("(hm) \n", "(hm) ")


def test_the_prompt_is_that_of_the_chat(app: ScriptedApp) -> None:
    app.engine.says("ok")
    function = {key: value for key, value in ADD.items() if key != "type"}
    messages = [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    tools = [{"type": "function", "function": function}]
    assert app.ask("POST", CHAT, {"messages": messages, "tools": tools}).status == 200
    chat = prompt(app)
    given = [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    plain(app, input=given, instructions="a", tools=[ADD])
    assert prompt(app) == chat
    plain(app, input=given, instructions="a", tools=[ADD], tool_choice="none")
    assert prompt(app) != chat and "# Tools" not in prompt(app)


def test_effort(tiny_folder: Path) -> None:
    """F75: the nested field has the effect of the flat one."""
    template = QWEN + "{# <think> #}{{ enable_thinking }}{{ reasoning_effort }}"
    with ScriptedApp(tiny_folder, template) as app:
        for effort in ("none", "low", "high"):
            app.engine.says("ok")
            app.chat(messages=[{"role": "user", "content": "x"}], reasoning_effort=effort)
            flat = prompt(app)
            says(app, "ok", input="x", reasoning={"effort": effort})
            assert prompt(app) == flat
            assert ("False" if effort == "none" else f"True{effort}") in flat


# ------------------------------------------------------------------------------------- errors


def test_wrong_bodies(app: ScriptedApp) -> None:
    for body in (b"", b"{", b"[]", b'"x"'):
        assert refused(app.ask("POST", RESPONSES, body), 400, None) == "invalid JSON body"
    for is_stream in (False, True):
        refused(post(app, background=True, store=False, stream=is_stream), 400, "background")
        refused(post(app, input=None, stream=is_stream), 400, "input")
        refused(post(app, tool_choice="required", stream=is_stream), 400, "tool_choice")
        refused(post(app, logit_bias={"512": 1}, stream=is_stream), 400, "logit_bias")
    images = [{"role": "user", "content": ["x", {"type": "input_image", "image_url": "x"}]}]
    assert "image" in refused(post(app, input=images), 400, "input[0].content[1].type")


def test_a_failed_answer_is_not_stored(app: ScriptedApp) -> None:
    from mlxlite.errors import EngineFault

    entries = app.ask("GET", "/stats").json()["response_store"]["entries"]
    app.engine.says("half", 1, Finish.ERROR)
    app.engine.error = EngineFault("no")
    try:
        assert post(app).status == 500
    finally:
        app.engine.error = None
    assert app.ask("GET", "/stats").json()["response_store"]["entries"] == entries
