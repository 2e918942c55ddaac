"""Chat completions: a live server, judged by the official `openai` package and byte by byte."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxlite.api import openai_shapes
from mlxlite.api.openai import Style, Texts, render_delta
from mlxlite.constrain import Constrained
from mlxlite.prepare import Preparation, Prepared
from mlxlite.types import Ask, Delta
from tests.live import CHAT, HELLO, LiveApp, Reply, chat_body, frames, stream_text

pytestmark = pytest.mark.slow

LONG = [{"role": "user", "content": "word " * 2000}]


@pytest.fixture(scope="module")
def client(tiny_server: LiveApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def stream(server: LiveApp, **body: Any) -> list[Any]:
    reply = server.chat(stream=True, **body)
    assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream"
    assert reply.headers["cache-control"] == "no-cache"
    return frames(reply.body)


def refused(reply: Reply, param: str | None, code: str | None = None) -> str:
    """Check a 400 in OpenAI's shape; its message."""
    assert reply.status == 400, reply.body
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        param,
        code,
    )
    message: str = error["message"]
    return message


# ------------------------------------------------------------------------ the official client


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 7},
        {"temperature": 1.0, "seed": 2**40, "top_p": 0.9},
        {"temperature": 0.8, "seed": 1, "extra_body": {"top_k": 20, "min_p": 0.05}},
    ],
)
def test_streamed_is_plain(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    def plain() -> Any:
        return client.chat.completions.create(
            model="any", messages=HELLO, max_tokens=24, **sampling
        )

    first, second = plain(), plain()
    text = first.choices[0].message.content
    assert text == second.choices[0].message.content != ""
    assert first.id != second.id and first.id.startswith("chatcmpl-")
    assert first.object == "chat.completion"
    assert first.choices[0].message.role == "assistant"
    assert first.choices[0].message.tool_calls is None
    assert first.choices[0].finish_reason in ("stop", "length")
    usage = first.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24
    assert usage.prompt_tokens_details.cached_tokens == 0

    chunks = list(
        client.chat.completions.create(
            model="any", messages=HELLO, max_tokens=24, stream=True, **sampling
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == first.choices[0].finish_reason
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_async_client_and_neighbours(tiny_server: LiveApp) -> None:
    """Many at once, streamed and plain, different seeds: each is as if it were alone."""

    async def run() -> tuple[list[str], list[str]]:
        url = tiny_server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:

            async def plain(seed: int) -> str:
                answer = await client.chat.completions.create(
                    model="m", messages=HELLO, max_tokens=10, seed=seed, temperature=1.2
                )
                return answer.choices[0].message.content

            async def streamed(seed: int) -> str:
                chunks = await client.chat.completions.create(
                    model="m",
                    messages=HELLO,
                    max_tokens=10,
                    seed=seed,
                    temperature=1.2,
                    stream=True,
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            alone = [await plain(seed) for seed in range(4)]
            both = await asyncio.gather(*map(plain, range(4)), *map(streamed, range(4)))
            return alone * 2, list(both)

    alone, together = asyncio.run(run())
    assert alone == together
    assert len(set(alone)) > 1


def test_unseeded_requests_differ(tiny_server: LiveApp) -> None:
    with ThreadPoolExecutor(4) as pool:
        replies = list(
            pool.map(lambda _: tiny_server.chat(temperature=2.0, max_tokens=30), range(4))
        )
    assert len({reply.text for reply in replies}) == 4


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HELLO, temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=LONG, stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


# ------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_without_asking(tiny_server: LiveApp, options: Any) -> None:
    found = stream(tiny_server, stream_options=options)
    assert found[-1] == "[DONE]"
    assert all("usage" not in frame for frame in found[:-1])
    assert found[-2]["choices"][0]["finish_reason"] == "length"


def test_include_usage(tiny_server: LiveApp) -> None:
    """One more chunk, last, without choices; usage null on all others (F20)."""
    found = stream(tiny_server, stream_options={"include_usage": True})
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"] == tiny_server.chat().json()["usage"]
    assert found[-2]["usage"]["completion_tokens"] == 12
    assert all(frame["usage"] is None for frame in found[:-2])
    finishes = [choice["finish_reason"] for f in found[:-1] for choice in f["choices"]]
    assert finishes == [None] * (len(finishes) - 1) + ["length"]


# ----------------------------------------------------------------------------- stop and limits


def test_stop_strings(tiny_server: LiveApp) -> None:
    whole = tiny_server.chat(max_tokens=24).text
    stop = whole[8:11]
    right = whole[: whole.index(stop)]
    for given in (stop, [stop], ["never there", stop, ""]):
        plain = tiny_server.chat(max_tokens=24, stop=given).json()
        assert plain["choices"][0]["message"]["content"] == right
        assert plain["choices"][0]["finish_reason"] == "stop"
        assert plain["usage"]["completion_tokens"] < 24
        found = stream(tiny_server, max_tokens=24, stop=given)
        assert stream_text(found) == right
        assert found[-2]["choices"][0]["finish_reason"] == "stop"
    for given in (None, "", [], [""], "never there"):
        assert tiny_server.chat(max_tokens=24, stop=given).text == whole


def test_max_tokens(tiny_server: LiveApp) -> None:
    def counted(**limits: Any) -> int:
        answer = tiny_server.chat(**{"max_tokens": None, **limits}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        return int(answer["usage"]["completion_tokens"])

    assert counted(max_tokens=1) == 1
    assert counted(max_completion_tokens=3) == 3
    assert counted(max_completion_tokens=3, max_tokens=9) == 3
    assert counted(max_tokens=0) == 0
    found = stream(tiny_server, max_tokens=0)
    assert stream_text(found) == "" and found[-1] == "[DONE]"


def test_room_is_the_limit(tiny_server: LiveApp) -> None:
    """32,000 on a context of 1,024 is normal (clients.md, Requests 1)."""
    messages = [{"role": "user", "content": "the quick brown fox jumps over " * 150}]
    answer = tiny_server.chat(messages=messages, max_tokens=32_000).json()
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert usage["total_tokens"] <= 1024 and usage["prompt_tokens"] > 800


def test_too_long(tiny_server: LiveApp) -> None:
    for is_stream in (False, True):
        reply = tiny_server.chat(messages=LONG, stream=is_stream)
        message = refused(reply, "messages", "context_length_exceeded")
        # Packages know the case by these words, since they drop the code.
        assert message.startswith("prompt is too long: it has 20")
        assert "this model's maximum context length is 1024" in message


def test_extreme_sampling_is_answered(tiny_server: LiveApp) -> None:
    """What validation lets through, the sampler bears (F52)."""
    for body in (
        {"top_k": 10**30},
        {"top_k": 513},
        {"top_k": 1},
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_p": 5e-324},
        {"top_p": 1, "min_p": 1},
        {"top_p": 0, "min_p": 0},
        {"seed": -(10**40)},
        {"max_tokens": 10**30, "stop": "a"},
        {"xtc_probability": 1, "xtc_threshold": 0},
        {"xtc_probability": 1, "xtc_threshold": 0.5, "min_p": 1, "top_k": 1},
        {"repetition_penalty": 1e6},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e-300, "repetition_context_size": 10**30},
        {"presence_penalty": 1e6, "frequency_penalty": -1e6, "frequency_context_size": 0},
        {"presence_penalty": -1e6, "presence_context_size": 0},
        {"logit_bias": {"5": 1e30, "6": -1e30}},
        {"logit_bias": {str(n): -1e30 for n in range(512)}},
        {"hlg": {"enabled": True, "width": 0, "shoulder": 0, "toe": 0, "pivot_offset": 0}},
        {"hlg": {"enabled": True, "width": 100, "shoulder": 100, "toe": 100}},
    ):
        asked = {"temperature": 1.0, "seed": 1, "logprobs": True, "top_logprobs": 20, **body}
        reply = tiny_server.chat(**asked)
        assert reply.status == 200, body
        assert reply.json()["usage"]["completion_tokens"] > 0
    greedy = tiny_server.chat().text
    assert tiny_server.chat(temperature=1.0, top_k=1, seed=3).text == greedy
    assert tiny_server.chat(temperature=1e-300, seed=3).text == greedy


# --------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([None], "messages[0]"),
        (["hi"], "messages[0]"),
        ([[]], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 1}], "messages[1].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": [1]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_wrong_messages(tiny_server: LiveApp, messages: Any, param: str) -> None:
    for is_stream in (False, True):
        message = refused(tiny_server.chat(messages=messages, stream=is_stream), param)
        assert message.startswith("messages[")


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{bad"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "system", "content": "a"}, *HELLO, *HELLO, {"role": "system", "content": "b"}],
        [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}],  # F35, F38
        [*HELLO, {"role": "assistant", "content": None}],
        [{"role": "tool", "content": "42", "tool_call_id": "c1"}],
        [{"role": "user", "content": "x", "name": "me", "unknown": [1]}],
        [{"role": "user", "content": "x", "name": None, "tool_calls": None}],
        [{"role": "user", "content": "\u0000\ufffe\U0001f642\u202e<|im_end|>"}],
    ],
)
def test_good_messages(tiny_server: LiveApp, messages: Any) -> None:
    assert tiny_server.chat(messages=messages, max_tokens=1).status == 200


def test_equal_messages_give_equal_prompts(tiny_server: LiveApp) -> None:
    """Part lists are their text (F37), `developer` is `system` (F33)."""

    def text(content: Any, role: str = "user") -> str:
        return tiny_server.chat(messages=[{"role": role, "content": content}], max_tokens=12).text

    whole = text("hello world")
    assert text([{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]) == whole
    assert text([{"type": "input_text", "text": "hello world"}]) == whole
    assert text([{"text": "hello world"}]) == whole
    assert text("be brief", "developer") == text("be brief", "system") != text("be brief")


# ------------------------------------------------------------------------- promises and hints


def test_promises_are_refused_on_the_wire(client: openai.OpenAI) -> None:
    """All of them are in test_fields; here are those that clients send, plain and streamed."""
    unknown = {"type": "object", "properties": {"a": {"not": {}}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": unknown, "strict": True}}
    promises: list[tuple[str, dict[str, Any]]] = [
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("tools", {"tools": [strict]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("adapter", {"extra_body": {"adapter": "mine"}}),
    ]
    for param, promise in promises:
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(
                    model="m", messages=HELLO, stream=is_stream, **promise
                )
            assert caught.value.param == param


WRONG = [
    ("stop", 5),
    ("xtc_threshold", 0.9),
    ("xtc_probability", -0.1),
    ("logit_bias", {"512": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", [1]),
    ("logit_bias", {"5": 10**40}),
    ("top_logprobs", 21),
    ("logprobs", 1),
    ("repetition_penalty", -1),
    ("presence_penalty", "1"),
    ("frequency_context_size", -1),
    ("hlg", [1]),
    ("tools", {"a": 1}),
    ("tool_choice", 5),
    ("parallel_tool_calls", "no"),
    ("reasoning_effort", "extreme"),
    ("thinking", True),
    ("max_thinking_tokens", -1),
    ("chat_template_kwargs", []),
    ("adapter", 5),
]


def test_a_wrong_value_harms_nobody(tiny_server: LiveApp) -> None:
    """A 400 that names the field, plain and streamed; nothing reaches the engine."""
    before, submitted = tiny_server.chat().text, tiny_server.batch()["submitted_rows"]
    for name, value in WRONG:
        for is_stream in (False, True):
            refused(tiny_server.chat(**{name: value}, stream=is_stream), name)
    for raw in (b'{"5": 1e999}', b'{"5": -1e999}'):
        body = b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": ' + raw + b"}"
        refused(tiny_server.ask("POST", CHAT, body), "logit_bias")
    assert tiny_server.batch()["submitted_rows"] == submitted
    assert tiny_server.chat().text == before


def test_hints_change_nothing(tiny_server: LiveApp) -> None:
    hints: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "user": "me",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "n": 1,
        "stream": False,
        "stream_options": {"continuous_usage_stats": True},
        "ignore_eos": False,
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logprobs": False,
        "frequency_penalty": 0,
        "logit_bias": {},
        "reasoning_effort": "low",
        "thinking": {"type": "adaptive"},
        "max_thinking_tokens": 5,
        "adapter": "none",
        "no_such_field": {"deep": [1]},
    }
    assert tiny_server.chat(**hints).text == tiny_server.chat().text


def test_null_fields_are_absent(tiny_server: LiveApp) -> None:
    names = (
        "stream stream_options max_completion_tokens top_p top_k min_p seed n stop model tools "
        "tool_choice response_format logprobs top_logprobs logit_bias frequency_penalty "
        "presence_penalty chat_template_kwargs user metadata functions audio adapter thinking hlg "
        "xtc_probability xtc_threshold repetition_penalty repetition_context_size adapter "
        "parallel_tool_calls reasoning_effort max_thinking_tokens structured_outputs guided_json"
    )
    assert tiny_server.chat(**dict.fromkeys(names.split())).text == tiny_server.chat().text


@pytest.mark.parametrize("model", ["gpt-4", "org/name:tag", "", None])
def test_model_is_echoed_not_read(tiny_server: LiveApp, model: Any) -> None:
    """F90: whatever is asked for, the served model answers and says so."""
    assert tiny_server.chat(model=model).json()["model"] == tiny_server.name
    assert {f["model"] for f in stream(tiny_server, model=model)[:-1]} == {tiny_server.name}


def test_preparation_runs_in_its_pool(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never on the engine's thread nor on the event loop."""
    seen: list[str] = []
    original = Preparation.__call__

    def spied(self: Preparation, ask: Ask, form: Constrained | None = None) -> Prepared:
        seen.append(threading.current_thread().name)
        return original(self, ask, form)

    monkeypatch.setattr(Preparation, "__call__", spied)
    with LiveApp(tiny_folder) as server:
        for is_stream in (False, True):
            assert server.chat(stream=is_stream).status == 200
    assert len(seen) == 2 and all(name.startswith("mlxlite-prepare") for name in seen)


# ------------------------------------------------------------------------------------- bytes


def test_stream_grammar(tiny_server: LiveApp) -> None:
    found = stream(tiny_server)
    assert found.count("[DONE]") == 1 and found[-1] == "[DONE]"
    first, *middle, last = found[:-1]
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]
    for frame in middle:
        assert set(frame) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert frame["object"] == "chat.completion.chunk"
        (choice,) = frame["choices"]
        assert set(choice["delta"]) == {"content"} and choice["finish_reason"] is None
    assert stream_text(found) == tiny_server.chat().text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 20_000]
    + [b'{"a":1}{"b":2}'],
)
def test_invalid_bodies(tiny_server: LiveApp, body: bytes) -> None:
    reply = tiny_server.ask("POST", CHAT, body)
    assert refused(reply, None) == "invalid JSON body"


def test_a_large_body_is_read_and_a_too_large_one_is_not(tiny_server: LiveApp) -> None:
    padding = {"role": "user", "content": "word " * 40_000}
    reply = tiny_server.chat(messages=[*HELLO, padding])
    refused(reply, "messages", "context_length_exceeded")
    reply = tiny_server.ask("POST", CHAT, headers={"Content-Length": str((32 << 20) + 1)})
    assert reply.status == 413 and reply.error["type"] == "invalid_request_error"


def test_unicode_body_both_ways(tiny_server: LiveApp) -> None:
    """Escaped or raw, the same prompt."""
    body = chat_body(messages=[{"role": "user", "content": "\U0001f642 한국어 é"}])
    raw = json.dumps(body, ensure_ascii=False).encode()
    escaped = tiny_server.ask("POST", CHAT, body)
    assert tiny_server.ask("POST", CHAT, raw).text == escaped.text


@pytest.mark.parametrize("text", ["a", "%", "%b %%", "\0", '"\\', "é😀\u2028", "\n", "x" * 9000])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_filled_frames_are_the_encoded_ones(text: str, wants_usage: bool) -> None:
    names = ("reasoning", "reasoning_content")
    style = Style("chatcmpl-1", 1, "50%", "fp_1", wants_usage, names, lambda _: b"")
    for delta in (Delta(text=text), Delta(reasoning=text)):
        (chunk,) = render_delta(style, 2, delta, set())
        assert Texts(style, 2).frame(delta) == openai_shapes.frame(chunk)
