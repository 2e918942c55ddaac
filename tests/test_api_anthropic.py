"""Messages: a live server, judged by the official `anthropic` package and byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.live import CHAT, HELLO, LiveApp
from tests.transcripts import COUNT, MESSAGES, ask, both, check, fold, plain, refused, stream

pytestmark = pytest.mark.slow

LONG = [{"role": "user", "content": "word " * 2000}]
INVALID = "invalid_request_error"
TOOL = {
    "name": "weather",
    "description": "Weather in a town. " * 10,
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def client(tiny_server: LiveApp) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny_server.url, api_key="x", max_retries=0) as client:
        yield client


# ------------------------------------------------------------------------ the official client


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.0, "extra_body": {"seed": 7}},
        {"temperature": 1.0, "top_p": 0.9, "extra_body": {"seed": 2**40}},
        {"temperature": 0.8, "top_k": 20, "extra_body": {"seed": 1, "min_p": 0.05}},
    ],
)
def test_streamed_is_plain(client: anthropic.Anthropic, sampling: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": HELLO, "max_tokens": 24, **sampling}
    extra = asked.pop("extra_body", {})
    # The package knows no temperature any more; servers do.
    known = {name: asked.pop(name) for name in ("temperature", "top_p", "top_k") if name in asked}
    asked["extra_body"] = {**extra, **known}
    whole, again = client.messages.create(**asked), client.messages.create(**asked)
    (block,) = whole.content
    assert block.type == "text" and block.text == again.content[0].text != ""
    assert whole.id != again.id and whole.role == "assistant"
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.stop_sequence is None
    assert 0 < whole.usage.output_tokens <= 24 and whole.usage.input_tokens > 0
    assert whole.usage.cache_creation_input_tokens == 0
    assert whole._request_id.startswith("req_")

    with client.messages.stream(**asked) as running:
        assert "".join(running.text_stream) == block.text
        final = running.get_final_message()
    assert (final.content[0].text, final.usage) == (block.text, whole.usage)
    assert (final.stop_reason, final.model) == (whole.stop_reason, whole.model)

    raw = list(client.messages.create(**asked, stream=True))
    assert raw[0].type == "message_start" and raw[-1].type == "message_stop"
    deltas = [event.delta for event in raw if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas) == block.text


def test_async_client_and_neighbours(tiny_server: LiveApp) -> None:
    """Many at once, streamed and plain, different seeds: each is as if it were alone."""

    async def run() -> tuple[list[str], list[str]]:
        async with anthropic.AsyncAnthropic(
            base_url=tiny_server.url, api_key="x", max_retries=0
        ) as client:

            def asked(seed: int) -> dict[str, Any]:
                extra = {"seed": seed, "temperature": 1.2}
                return {"model": "m", "messages": HELLO, "max_tokens": 10, "extra_body": extra}

            async def whole(seed: int) -> str:
                return (await client.messages.create(**asked(seed))).content[0].text

            async def streamed(seed: int) -> str:
                async with client.messages.stream(**asked(seed)) as running:
                    return await running.get_final_text()

            alone = [await whole(seed) for seed in range(4)]
            together = await asyncio.gather(*map(whole, range(4)), *map(streamed, range(4)))
            return alone * 2, list(together)

    alone, together = asyncio.run(run())
    assert alone == together and len(set(alone)) > 1


def test_errors_reach_the_client_as_its_own(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 5}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**asked, extra_body={"temperature": -1})
    assert caught.value.type == INVALID and "temperature" in str(caught.value.api_message)
    assert caught.value.request_id.startswith("req_")
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**asked, "messages": LONG}, stream=True)
    assert "prompt is too long" in str(caught.value.api_message)
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.list()
    assert caught.value.type == "not_found_error"


def test_beta_client(client: anthropic.Anthropic) -> None:
    """`?beta=true` and any beta name (F84)."""
    answer = client.beta.messages.create(
        model="m", messages=HELLO, max_tokens=3, betas=["context-management-2025-06-27", "no-such"]
    )
    assert answer.usage.output_tokens == 3
    assert client.beta.messages.count_tokens(model="m", messages=HELLO).input_tokens > 0


# ------------------------------------------------------------------------------------- bytes


def test_same_text_as_chat(tiny_server: LiveApp) -> None:
    message = both(tiny_server)
    assert message["content"] == [{"type": "text", "text": tiny_server.chat().text}]
    assert message["model"] == tiny_server.name and message["stop_reason"] == "max_tokens"
    usage = tiny_server.chat().json()["usage"]
    assert message["usage"] == {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
    }


def test_usage_in_streams(tiny_server: LiveApp) -> None:
    """At the start what is known then; the sums at the end (clients.md, Streams 5)."""
    found = stream(tiny_server)
    check(found)
    prompt = ask(tiny_server, COUNT).json()["input_tokens"]
    assert found[0]["message"]["usage"]["input_tokens"] == prompt
    assert found[-2]["usage"]["input_tokens"] == prompt
    assert found[-2]["usage"]["output_tokens"] == 12


def test_limits(tiny_server: LiveApp) -> None:
    """Far over the window is normal, and clamped; 0 is an empty answer."""
    message = plain(
        tiny_server, max_tokens=32_000, messages=[{"role": "user", "content": "a " * 400}]
    )
    assert message["stop_reason"] in ("max_tokens", "end_turn")
    assert sum(message["usage"].values()) <= 1024
    assert plain(tiny_server, max_tokens=1)["usage"]["output_tokens"] == 1
    nothing = both(tiny_server, max_tokens=0)
    assert nothing["content"] == [{"type": "text", "text": ""}]
    assert (nothing["stop_reason"], nothing["usage"]["output_tokens"]) == ("max_tokens", 0)
    for missing in ({"max_tokens": None}, {"max_tokens": None, "stream": True}):
        assert "max_tokens" in refused(ask(tiny_server, **missing), 400, INVALID)


def test_stop_sequences(tiny_server: LiveApp) -> None:
    whole = both(tiny_server, max_tokens=24)["content"][0]["text"]
    stop = whole[8:11]
    for given in ([stop], ["never there", stop], [stop, ""]):
        message = both(tiny_server, max_tokens=24, stop_sequences=given)
        assert message["content"][0]["text"] == whole[: whole.index(stop)]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    for given in (None, [], [""], ["never there"]):
        message = both(tiny_server, max_tokens=24, stop_sequences=given)
        assert message["content"][0]["text"] == whole
        assert message["stop_reason"] != "stop_sequence" and message["stop_sequence"] is None


# ------------------------------------------------------------------------------------- count


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"tools": [TOOL]},
        {"tools": [TOOL], "system": "Be brief.", "tool_choice": {"type": "none"}},
        {"messages": [*HELLO, {"role": "system", "content": "Be brief."}]},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    ],
)
def test_count_tokens(
    client: anthropic.Anthropic, tiny_server: LiveApp, body: dict[str, Any]
) -> None:
    """F99: the prompt tokens of the same message."""
    asked = {"model": "m", "messages": HELLO, **body}
    count = client.messages.count_tokens(**asked).input_tokens
    assert count == client.messages.create(**asked, max_tokens=1).usage.input_tokens > 0
    reply = ask(tiny_server, COUNT, **{"max_tokens": None, "temperature": None, **body})
    assert reply.json() == {"input_tokens": count}


def test_what_is_counted(tiny_server: LiveApp) -> None:
    def count(**body: Any) -> int:
        reply = ask(tiny_server, COUNT, **body)
        assert reply.status == 200
        return int(reply.json()["input_tokens"])

    assert count(system="Be brief.") > count()
    assert count(messages=LONG) > 1024  # what fits no window is counted too
    forced = {"type": "tool", "name": "weather"}
    assert count(tools=[TOOL], tool_choice=forced) == count(
        tools=[TOOL]
    )  # counting promises nothing


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_error_shapes(tiny_server: LiveApp, path: str) -> None:
    def told(method: str, body: Any = None, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return tiny_server.ask(method, path, body, named)

    assert refused(told("POST", b"{"), 400, INVALID) == "invalid JSON body"
    assert refused(told("POST", b"[]"), 400, INVALID) == "invalid JSON body"
    assert "messages" in refused(told("POST", {"max_tokens": 1}), 400, INVALID)
    reply = told("GET")
    refused(reply, 405, INVALID)
    assert reply.headers["allow"] == "OPTIONS, POST"
    refused(told("POST", {}, host="a.test"), 403, "permission_error")
    refused(told("POST", {}, origin="https://a.test"), 403, "permission_error")
    big = str((32 << 20) + 1)
    refused(told("POST", None, content_length=big), 413, "request_too_large")
    reply = tiny_server.ask("POST", f"{path}/no/such", {})
    assert "no such path" in refused(reply, 404, "not_found_error")


def test_other_paths_keep_their_shape(tiny_server: LiveApp) -> None:
    for method, path in (("GET", CHAT), ("POST", "/v1/message"), ("POST", "/v1/nothing/here")):
        reply = tiny_server.ask(method, path)
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert "request-id" not in reply.headers


def test_slash_and_query(tiny_server: LiveApp) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    for path in (f"{MESSAGES}/", f"{MESSAGES}?beta=true", f"{MESSAGES}/?beta=true&x"):
        assert tiny_server.ask("POST", path, body).status == 200


def test_the_key(tiny_folder: Path) -> None:
    """F88: on this surface as on any other, by either header."""
    with LiveApp(tiny_folder, api_key="secret") as server:
        for path in (MESSAGES, COUNT, f"{MESSAGES}/batches"):
            reply = server.ask("POST", path, {"messages": HELLO, "max_tokens": 1})
            refused(reply, 401, "authentication_error")
        with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(model="m", messages=HELLO, max_tokens=1)
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **given) as client:
                answer = client.messages.create(model="m", messages=HELLO, max_tokens=1)
                assert answer.usage.output_tokens == 1


def test_too_long(tiny_server: LiveApp) -> None:
    for is_stream in (False, True):
        message = refused(ask(tiny_server, messages=LONG, stream=is_stream), 400, INVALID)
        assert message.startswith("prompt is too long: ") and "1024" in message


def test_a_refusal_opens_no_stream(tiny_server: LiveApp) -> None:
    submitted = tiny_server.batch()["submitted_rows"]
    for body in ({"temperature": "hot"}, {"system": 5}, {"messages": [{"role": "king"}]}):
        reply = ask(tiny_server, stream=True, **body)
        refused(reply, 400, INVALID)
        assert reply.headers["content-type"] == "application/json"
    assert tiny_server.batch()["submitted_rows"] == submitted


def test_unicode(tiny_server: LiveApp) -> None:
    """Noise, split characters among it; the stream is still the text."""
    for seed in range(6):
        body = {"temperature": 2.0, "seed": seed, "max_tokens": 40}
        assert fold(stream(tiny_server, **body))["content"] == plain(tiny_server, **body)["content"]
