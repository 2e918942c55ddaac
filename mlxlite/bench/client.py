"""One streamed answer and when each piece of it came: a small client on asyncio (floor 4).

Our own, so that what is measured is the server and not a client library, and so that both servers
are read by the same code. Knows HTTP/1.x bodies of every kind (chunked, counted, until the end) and
server-sent events; nothing of any one server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_PART = 1 << 16
_MOST_ERROR_CHARS = 200


class RequestFailed(Exception):
    """A server did not answer a request as it should; the text is for the report."""


@dataclass(frozen=True, slots=True)
class Base:
    """Where a server is: `http://host:port` and the path that its API begins with."""

    host: str
    port: int
    path: str = "/v1"
    is_tls: bool = False
    key: str | None = None

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> Base:
        """Raises ValueError, one line, for what is no http(s) URL."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), path, is_tls, key)


@dataclass(slots=True)
class Answer:
    """at_s: when each piece of text came, seconds after the request was sent. Token counts are the
    server's own, None where it gives none."""

    at_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first piece of text. Raises RequestFailed if none came."""
        if not self.at_s:
            raise RequestFailed("an answer without text")
        return self.at_s[0]

    @property
    def tokens(self) -> int:
        return len(self.at_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def rate(self) -> float:
        """Tokens after the first a second. Raises RequestFailed for fewer than two pieces."""
        if len(self.at_s) < 2:
            raise RequestFailed(f"an answer of {len(self.at_s)} pieces has no rate")
        return (self.tokens - 1) / (self.at_s[-1] - self.at_s[0])

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0)


async def ask(base: Base, body: dict[str, Any], begun: asyncio.Event | None = None) -> Answer:
    """Send a chat completion, streamed, and read it to its end. begun: set at the first text.

    Raises RequestFailed; a cancel closes the connection, which is how a client leaves."""
    sent = {"stream": True, "stream_options": {"include_usage": True}, **body}
    answer = Answer()
    started = time.perf_counter()
    async with aclosing(_lines(base, "POST", "/chat/completions", sent)) as lines:
        async for line in lines:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                continue
            try:
                _take(answer, json.loads(data), time.perf_counter() - started)
            except (ValueError, AttributeError, TypeError, IndexError):
                raise RequestFailed(f"a chunk that is not OpenAI's: {data[:80]!r}") from None
            if begun is not None and answer.at_s:
                begun.set()
    answer.end_s = time.perf_counter() - started
    return answer


def _take(answer: Answer, chunk: dict[str, Any], now_s: float) -> None:
    if (error := chunk.get("error")) is not None:
        raise RequestFailed(f"an error in the stream: {str(error)[:_MOST_ERROR_CHARS]}")
    delta = (chunk.get("choices") or [{}])[0].get("delta") or {}
    # Both names of thinking may hold the same text.
    text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
    if text:
        answer.at_s.append(now_s)
        answer.text += text
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.completion_tokens = usage.get("completion_tokens")
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def get(base: Base, path: str, *, whole: bool = False) -> Any:
    """The JSON of a GET. whole: `path` is not below the API's. Raises RequestFailed."""
    parts = [line async for line in _lines(base, "GET", path, None, whole=whole)]
    try:
        return json.loads(b"\n".join(parts))
    except ValueError:
        raise RequestFailed(f"GET {path}: the answer is not JSON") from None


# -------------------------------------------------------------------------------------- HTTP


async def _lines(
    base: Base, method: str, path: str, body: dict[str, Any] | None, *, whole: bool = False
) -> AsyncGenerator[bytes, None]:
    """The lines of a response body as they come, without their ends."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {'' if whole else base.path}{path} HTTP/1.1\r\nHost: {base.host}\r\n"
    head += "Accept: text/event-stream, application/json\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    if base.key:
        head += f"Authorization: Bearer {base.key}\r\n"
    context = ssl.create_default_context() if base.is_tls else None
    try:
        reader, writer = await asyncio.open_connection(base.host, base.port, ssl=context)
    except OSError as error:
        raise RequestFailed(f"no connection: {error.strerror or error}") from None
    try:
        writer.write(f"{head}\r\n".encode() + data)
        await writer.drain()
        status, fields = await _head(reader)
        rest = b""
        async with aclosing(_body(reader, fields)) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                if status != 200:
                    rest = b"\n".join([*lines, rest])
                    continue
                for line in lines:
                    yield line.rstrip(b"\r")
        if status != 200:
            said = " ".join(rest.decode(errors="replace").split())[:_MOST_ERROR_CHARS]
            raise RequestFailed(f"{method} {path}: status {status}: {said}")
        if rest:
            yield rest
    except (OSError, EOFError, ValueError) as error:
        raise RequestFailed(f"{method} {path}: the connection broke: {error}") from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await reader.readline()).split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise RequestFailed("the server closed the connection without an answer")
    fields = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        fields[name.lower()] = value.strip()
    return int(words[1]), fields


async def _body(
    reader: asyncio.StreamReader, fields: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    if "chunked" in fields.get("transfer-encoding", "").lower():
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = int(fields.get("content-length", -1))
    while left and (part := await reader.read(_PART if left < 0 else min(left, _PART))):
        left -= len(part) if left > 0 else 0
        yield part
