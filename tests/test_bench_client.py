"""The benchmark's own client: every kind of body, counts and times, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mlxlite.bench.client import Answer, Base, RequestFailed, ask, get

WAIT_S = 5.0
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def chunk(**delta: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 8},
}
EVENTS = [
    chunk(role="assistant"),
    b": keepalive 1/2\n\n",
    chunk(content="Ä b"),
    chunk(content="c"),
    chunk(),
    f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n".encode(),
    b"data: [DONE]\n\n",
]
STREAM = b"".join(EVENTS)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    whole = b"".join(b"%x;x=1\r\n%b\r\n" % (len(part), part) for part in parts)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + whole + b"0\r\n\r\n"


def counted(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def talk(reply: bytes, act: Callable[[Base], Coroutine[Any, Any, Any]]) -> tuple[Any, bytes]:
    """What `act` gives against a server that says `reply` and closes; and what that server read."""
    seen = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in seen.split(b"\r\n") if b": " in line)
        seen += await reader.readexactly(int(fields.get(b"Content-Length", 0)))
        writer.write(reply)
        await writer.drain()
        writer.close()

    async def both() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with asyncio.timeout(WAIT_S):
                return await act(Base("127.0.0.1", port, key="secret"))

    return asyncio.run(both()), seen


@pytest.mark.parametrize("reply", [
    pytest.param(chunked(STREAM), id="one chunk"),
    pytest.param(chunked(*EVENTS), id="a chunk an event"),
    pytest.param(chunked(*(STREAM[n : n + 1] for n in range(len(STREAM)))), id="a chunk a byte"),
    pytest.param(counted(STREAM), id="counted"),
    pytest.param(HEAD + b"\r\n" + STREAM, id="until the end"),
    pytest.param(HEAD + b"\r\n" + STREAM.replace(b"\n", b"\r\n"), id="carriage returns"),
    pytest.param(HEAD + b"\r\n" + STREAM.rstrip(b"\n"), id="no last newline"),
])  # fmt: skip
def test_streams(reply: bytes) -> None:
    answer, seen = talk(reply, lambda base: ask(base, BODY))
    assert answer.text == "Ä bc" and len(answer.at_s) == 2
    assert (answer.prompt_tokens, answer.cached_tokens, answer.tokens) == (9, 8, 5)
    assert 0 < answer.ttft_s <= answer.at_s[1] <= answer.end_s
    head, _, body = seen.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(body) == {**BODY, "stream": True, "stream_options": {"include_usage": True}}


def test_pieces_count_where_there_is_no_usage() -> None:
    stream = chunk(reasoning="a", reasoning_content="a") + chunk(content="b") + b"data: [DONE]\n\n"
    answer, _ = talk(counted(stream), lambda base: ask(base, BODY))
    assert answer.text == "ab" and answer.tokens == 2


def test_the_first_text_is_told_of() -> None:
    async def act(base: Base) -> bool:
        begun = asyncio.Event()
        await ask(base, BODY, begun)
        return begun.is_set()

    assert talk(counted(STREAM), act)[0] is True
    assert talk(counted(chunk() + b"data: [DONE]\n\n"), act)[0] is False


@pytest.mark.parametrize(("reply", "message"), [
    pytest.param(b"", "without an answer", id="closed"),
    pytest.param(b"HTTP/1.1 429 Busy\r\n\r\nfull\nhouse", "status 429: full house", id="status"),
    pytest.param(HEAD + b"Content-Length: 0\r\n\r\n", "without text", id="nothing"),
    pytest.param(chunked(chunk(content="a"))[:-9], "connection broke", id="cut"),
    pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "broke", id="no size"),
    pytest.param(counted(b"data: {oops\n\n"), "not OpenAI's: b'{oops'", id="no JSON"),
    pytest.param(counted(b"data: [1]\n\n"), "not OpenAI's", id="no object"),
    pytest.param(counted(b'data: {"error": "no"}\n\n'), "error in the stream: no", id="error"),
])  # fmt: skip
def test_failures_are_one_line(reply: bytes, message: str) -> None:
    async def act(base: Base) -> float:
        return (await ask(base, BODY)).ttft_s

    with pytest.raises(RequestFailed, match=message) as caught:
        talk(reply, act)
    assert "\n" not in str(caught.value)


def test_nobody_listens() -> None:
    async def act() -> Any:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await get(Base("127.0.0.1", port), "/models")

    with pytest.raises(RequestFailed, match="no connection"):
        asyncio.run(act())


def test_get() -> None:
    reply = counted(b'{"data":\n [1]}')
    found, seen = talk(reply, lambda base: get(base, "/models"))
    assert found == {"data": [1]} and seen.startswith(b"GET /v1/models ")
    assert talk(reply, lambda base: get(base, "/stats", whole=True))[1].startswith(b"GET /stats ")
    with pytest.raises(RequestFailed, match="not JSON"):
        talk(counted(b"<html>"), lambda base: get(base, "/models"))


@pytest.mark.parametrize(("url", "base"), [
    ("http://localhost:9000", Base("localhost", 9000)),
    ("localhost:9000", Base("localhost", 9000)),
    ("http://10.0.0.1/", Base("10.0.0.1", 80)),
    ("https://box/api/v1/", Base("box", 443, "/api/v1", is_tls=True)),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_urls(url: str, base: Base) -> None:
    assert Base.parse(url) == base


@pytest.mark.parametrize("url", ["ftp://box", "http://", "http://box:port"])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ValueError):
        Base.parse(url)


def test_rates() -> None:
    answer = Answer(at_s=[1.0, 1.5, 3.0], completion_tokens=9)
    assert (answer.rate, answer.longest_gap_s) == (4.0, 1.5)
    with pytest.raises(RequestFailed, match="1 pieces"):
        _ = Answer(at_s=[1.0]).rate
