"""Fuzzing below JSON: requests as bytes, broken in the ways that bytes can be, and a strict reader.

`byte_case` makes one connection's worth of bytes from a random generator, so that a case is the
same wherever it runs. How many answers it is owed is read off our own parser, which takes the bytes
whole, while the server gets them in pieces.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mlxlite.http import wire

STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [\x20-\x7e]*\r\n")
FIELD_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+): ([\x20-\x7e\x80-\xff]*)\r\n")
CHUNK_SIZE = re.compile(rb"[0-9a-f]+\r\n")


# -------------------------------------------------------------------------------------- answers


class Malformed(AssertionError):
    """An answer that a strict client could not read."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_last(self) -> bool:
        """No more comes on this connection."""
        is_framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        has_end = is_framed or not wire.has_body(self.status)
        return self.headers.get("connection") == "close" or not has_end

    def json(self) -> Any:
        return json.loads(self.body.decode("utf-8"), parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise Malformed(f"{name} in an answer")


class Line:
    """One connection of a client that believes nothing."""

    def __init__(self, address: tuple[str, int], deadline_s: float) -> None:
        self.sock = socket.create_connection(address, timeout=deadline_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.sock.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def answer(self, method: str, only_head: bool = False) -> Answer | None:
        """The next final answer; None if the server closed instead. only_head: leave its body."""
        status, headers = 100, {}
        while status < 200:  # 100 Continue comes before the answer
            line = self._file.readline()
            if not line:
                return None
            match = STATUS_LINE.fullmatch(line)
            if match is None:
                raise Malformed(f"status line {line!r}")
            status, headers = int(match[1]), self._fields()
        if only_head or method == "HEAD" or not wire.has_body(status):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, b"".join(iter(self._chunk, b"")))
        length = headers.get("content-length")
        if length is None:
            return Answer(status, headers, self._file.read())
        return Answer(status, headers, self._exactly(int(length)))

    def _fields(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while (line := self._file.readline()) != b"\r\n":
            match = FIELD_LINE.fullmatch(line)
            if match is None:
                raise Malformed(f"field line {line!r}")
            name = match[1].decode().lower()
            if name in found and name in ("content-length", "transfer-encoding", "connection"):
                raise Malformed(f"{name} twice")
            found[name] = match[2].decode("latin-1")
        return found

    def _chunk(self) -> bytes:
        line = self._file.readline()
        if not CHUNK_SIZE.fullmatch(line):
            raise Malformed(f"chunk size {line!r}")
        data = self._exactly(int(line, 16))
        if self._file.read(2) != b"\r\n":
            raise Malformed("a chunk without its end")
        return data

    def _exactly(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) != length:
            raise Malformed(f"{len(data)} of {length} bytes")
        return data


# ---------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class ByteCase:
    """pieces: what is sent, piece by piece. methods: of the heads in them. due: answers owed.

    reads: answers are read; else the client leaves once it has sent all.
    """

    pieces: list[bytes]
    reads: bool
    methods: list[str] = field(default_factory=list)
    due: int = 0


def byte_case(rng: Random) -> ByteCase:
    data = b"".join(_request(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 8))))
    if rng.random() < 0.9:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = rng.choice(MUTATIONS)(data, rng)
    data = data[:300_000]
    methods, due = _owed(data)
    return ByteCase(_pieces(data, rng), rng.random() < 0.85, methods, due)


def _owed(data: bytes) -> tuple[list[str], int]:
    parser = wire.RequestParser()
    parser.feed(data)
    methods: list[str] = []
    due, goes_on = 0, True
    try:
        while goes_on and (part := parser.next_part()) is not None:
            if isinstance(part, wire.Head):
                methods.append(part.method)
                keeps = part.keep_alive
            elif isinstance(part, wire.End):
                due, goes_on = due + 1, keeps
    except wire.ProtocolError:
        due += 1
    return methods, due


def _pieces(data: bytes, rng: Random) -> list[bytes]:
    if len(data) < 200 and rng.random() < 0.05:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 2, 5))))
    ends = [0, *cuts, len(data)]
    return [data[a:b] for a, b in zip(ends, ends[1:], strict=False) if b > a]


BODY = (
    b'{"messages":[{"role":"user","content":"hello"}],"max_tokens":2,"prompt":"hi",'
    b'"input":"hey","tokens":[3],"stream":%s}'
)
PATHS = (
    "/health", "/v1", "/v1/models", "/stats", "/metrics", "/v1/chat/completions", "/v1/completions",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/detokenize",
    "/apply-template", "/v1/models/tiny", "/v1/responses/resp_0", "/nothing", "*", "/",
    "/v1/models/a%2Fb", "/%ff", "/v1/models/%00", "//", "/v1/../health", "http://localhost/health",
    "http://other.example/health", "/health?" + "q" * 2000, "/v1/models/" + "é", "/health#x",
)  # fmt: skip
METHODS = ("GET", "GET", "POST", "POST", "POST", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "get")
FIELDS = (
    "Content-Type: application/json", "Accept: */*", "Connection: close", "Connection: keep-alive",
    "Connection: Upgrade\r\nUpgrade: h2c", "Expect: 100-continue", "Expect: nothing",
    "Origin: http://evil.example", "Authorization: Bearer x", "x-api-key: y", "Cookie: a=b; c=d",
    "X-Long: " + "z" * 5000, "X-Obs: \xe9\xff", "Accept-Encoding: gzip", "Content-Encoding: gzip",
    "Access-Control-Request-Method: POST", "Trailer: X", "TE: trailers", "Range: bytes=0-1",
)  # fmt: skip


def _request(rng: Random) -> bytes:
    """One request, valid for the most part."""
    method, path = rng.choice(METHODS), rng.choice(PATHS)
    version = rng.choice(("1.1",) * 12 + ("1.0", "1.9", "2.0", "0.9", "11", "1.1 "))
    fields = ["Host: " + rng.choice(("localhost",) * 9 + ("127.0.0.1:80", "evil.example", "a b"))]
    fields += rng.sample(FIELDS, rng.choice((0, 0, 1, 2, 5)))
    body = b""
    if method in ("POST", "PUT"):
        body = BODY % rng.choice((b"true", b"false"))
        if rng.random() < 0.3:
            fields.append("Transfer-Encoding: chunked")
            body = _chunked(body, rng)
        else:
            fields.append(f"Content-Length: {len(body)}")
    head = f"{method} {path} HTTP/{version}\r\n" + "".join(f"{each}\r\n" for each in fields)
    return head.encode("latin-1") + b"\r\n" + body


def _chunked(body: bytes, rng: Random) -> bytes:
    out, at = b"", 0
    while at < len(body):
        size = rng.choice((1, 7, 60, 1000))
        part = body[at : at + size]
        out += b"%x%s\r\n%s\r\n" % (len(part), rng.choice((b"", b"", b";a=b", b" ")), part)
        at += size
    return out + b"0\r\n" + rng.choice((b"", b"", b"X-Sum: 1\r\n")) + b"\r\n"


# ------------------------------------------------------------------------------------ mutations

Mutation = Callable[[bytes, Random], bytes]


def _flip(data: bytes, rng: Random) -> bytes:
    out = bytearray(data)
    for _ in range(min(rng.choice((1, 1, 2, 8)), len(out))):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _insert(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    what = rng.choice((
        b"\x00", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b"\xff", b":", b"0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", b"-1\r\n", b"\x7f", rng.randbytes(rng.choice((3, 40, 3000))),
    ))  # fmt: skip
    return data[:at] + what + data[at:]


def _delete(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 10, 80)) :]


def _repeat(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at : at + rng.choice((2, 30, 200))] * rng.choice((2, 3, 50)) + data[at:]


def _truncate(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _garbage(data: bytes, rng: Random) -> bytes:
    return rng.choice((
        rng.randbytes(rng.choice((1, 100, 5000))), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 500, b"A" * 20_000, b"GET " * 4000, b" ",
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n", b"SSH-2.0-x\r\n", b"{}", b"",
    )) + rng.choice((b"", data))  # fmt: skip


def _wrong_length(data: bytes, rng: Random) -> bytes:
    length = rng.choice((
        b"0", b"1", b"-1", b"+5", b"5, 5", b"5, 6", b"0x10", b"1e2", b"", b" ", b"9" * 30, b"99999",
        b"33554433", b"00000000000000000012", b"1 2", "٣".encode(), b"5\r\nContent-Length: 6",
    ))  # fmt: skip
    return re.sub(rb"Content-Length: \d+", b"Content-Length: " + length, data, count=1)


def _wrong_coding(data: bytes, rng: Random) -> bytes:
    coding = rng.choice((
        b"gzip", b"chunked, chunked", b"gzip, chunked", b"Chunked", b"identity", b"",
        b"chunked;q=1", b"xchunked", b" chunked ", b"chunked\r\nTransfer-Encoding: chunked",
        b"chunked\r\nContent-Length: 3",
    ))  # fmt: skip
    return re.sub(rb"Transfer-Encoding: chunked", b"Transfer-Encoding: " + coding, data, count=1)


def _wrong_chunk(data: bytes, rng: Random) -> bytes:
    size = rng.choice((
        b"ffffffffffffffff", b"fffffffffffffffff", b"-1", b"0x5", b"g", b"", b" 5", b"5 ;", b"\n5",
        b"5;" + b"x" * 2000, b"2000001", b"0",
    ))  # fmt: skip
    return re.sub(rb"\r\n[0-9a-f]+\r\n", b"\r\n" + size + b"\r\n", data, count=1)


def _many_fields(data: bytes, rng: Random) -> bytes:
    field = rng.choice(
        (b"X: y\r\n", b"X-%d: z\r\n" % rng.randrange(99), b" folded\r\n", b": v\r\n")
    )
    first, mark, rest = data.partition(b"\r\n")
    return first + mark + field * rng.choice((2, 101, 2500)) + rest


def _bare_feeds(data: bytes, rng: Random) -> bytes:
    return data.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\n\r", b"\r\r\n")))


MUTATIONS: tuple[Mutation, ...] = (
    _flip, _flip, _insert, _insert, _delete, _repeat, _truncate, _garbage, _wrong_length,
    _wrong_length, _wrong_coding, _wrong_chunk, _many_fields, _bare_feeds,
)  # fmt: skip
