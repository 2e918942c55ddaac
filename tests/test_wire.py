"""wire: every request fed whole, byte by byte and cut anywhere; malformed ones by table."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from mlxlite.http import wire
from mlxlite.http.wire import End, Head, Headers, Limits, ProtocolError, RequestParser

HOST = b"Host: a\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST
POST = b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

# What it is, the bytes, the status that answers it.
MALFORMED: list[tuple[str, bytes, int]] = [
    ("no version (HTTP/0.9)", b"GET /\r\n\r\n", 400),
    ("two spaces", b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("a tab for a space", b"GET\t/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("space at the end", b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", 400),
    ("lower-case version", b"GET / http/1.1\r\n" + HOST + b"\r\n", 400),
    ("version without minor", b"GET / HTTP/1\r\n" + HOST + b"\r\n", 400),
    ("two-digit version", b"GET / HTTP/1.10\r\n" + HOST + b"\r\n", 400),
    ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ("HTTP/3", b"GET / HTTP/3.0\r\n" + HOST + b"\r\n", 400),
    ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ("method with a colon", b"GE:T / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("space before the method", b" GET / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("CR before the method", b"\rGET / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("CR in the target", b"GET /\rx HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("NUL in the target", b"GET /\x00 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("raw UTF-8 in the target", "GET /é HTTP/1.1\r\n".encode() + HOST + b"\r\n", 400),
    ("target without slash", b"GET x HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("asterisk for GET", b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("CONNECT", b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("other scheme", b"GET ftp://a/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("user in the target", b"GET http://u@a/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("fragment", b"GET /#a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("half an escape", b"GET /%4 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("no hex in an escape", b"GET /%zz HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("escaped NUL", b"GET /%00 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("escaped line feed", b"GET /%0a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("path not UTF-8", b"GET /%ff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("path over-long UTF-8", b"GET /%c0%af HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ("long request line", b"GET /" + b"a" * 8192 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    ("endless request line", b"GET /" + b"a" * 9000, 414),
    ("no Host", b"GET / HTTP/1.1\r\n\r\n", 400),
    ("two Hosts", GET + HOST + b"\r\n", 400),
    ("Host with a path", b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    ("Host with a user", b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
    ("Host list", b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
    ("space before the colon", GET + b"X : 1\r\n\r\n", 400),
    ("no colon", GET + b"X\r\n\r\n", 400),
    ("empty field name", GET + b": 1\r\n\r\n", 400),
    ("field name with brackets", GET + b"X[1]: 1\r\n\r\n", 400),
    ("field name not ASCII", GET + b"X\xe9: 1\r\n\r\n", 400),
    ("folded field", GET + b"X: 1\r\n 2\r\n\r\n", 400),
    ("fold ahead of all fields", b"GET / HTTP/1.1\r\n X: 1\r\n" + HOST + b"\r\n", 400),
    ("NUL in a value", GET + b"X: a\x00b\r\n\r\n", 400),
    ("CR in a value", GET + b"X: a\rb\r\n\r\n", 400),
    ("CR CR LF", GET + b"X: a\r\r\n\r\n", 400),
    ("control in a value", GET + b"X: a\x1bb\r\n\r\n", 400),
    ("101 fields", GET + b"X: 1\r\n" * 100 + b"\r\n", 431),
    ("head over 16 KiB", GET + (b"X: " + b"a" * 4100 + b"\r\n") * 4 + b"\r\n", 431),
    ("endless field", GET + b"X: " + b"a" * 20000, 431),
    ("Content-Length negative", POST + b"Content-Length: -1\r\n\r\n", 400),
    ("Content-Length signed", POST + b"Content-Length: +1\r\n\r\n", 400),
    ("Content-Length hex", POST + b"Content-Length: 0x1\r\n\r\n", 400),
    ("Content-Length fraction", POST + b"Content-Length: 1.0\r\n\r\n", 400),
    ("Content-Length empty", POST + b"Content-Length:\r\n\r\n", 400),
    ("Content-Length other digits", POST + b"Content-Length: \xb2\r\n\r\n", 400),
    ("two lengths", POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    ("two lengths in one", POST + b"Content-Length: 1, 2\r\n\r\n", 400),
    ("length and chunks", POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ("chunks in 1.0", b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ("gzip coding", POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
    ("chunked twice", POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n", 400),
    ("coding twice", POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n", 400),
    ("identity coding", POST + b"Transfer-Encoding: identity\r\n\r\n", 400),
    ("hidden coding", POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n", 400),
    ("length over the limit", POST + b"Content-Length: 33554433\r\n\r\n", 413),
    ("length of 5000 digits", POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
    ("other expectation", POST + b"Expect: 200-ok\r\n\r\n", 417),
    ("chunk size not hex", CHUNKED + b"g\r\n", 400),
    ("chunk size negative", CHUNKED + b"-1\r\n", 400),
    ("chunk size 0x", CHUNKED + b"0x1\r\n", 400),
    ("chunk size empty", CHUNKED + b"\r\n", 400),
    ("chunk size over 64 bits", CHUNKED + b"1" * 17 + b"\r\n", 400),
    ("chunk over the limit", CHUNKED + b"2000001\r\n", 413),
    ("chunks over the limit", CHUNKED + b"1\r\na\r\n2000000\r\n", 413),
    ("chunk longer than said", CHUNKED + b"1\r\nab\r\n", 400),
    ("chunk ended by LF", CHUNKED + b"1\r\na\n0\r\n\r\n", 400),
    ("chunk size ended by LF", CHUNKED + b"1\na\r\n0\r\n\r\n", 400),
    ("CR in a chunk extension", CHUNKED + b"1;a\rb\r\na\r\n", 400),
    ("long chunk extension", CHUNKED + b"1;" + b"a" * 1100, 400),
    ("trailer without colon", CHUNKED + b"0\r\nX\r\n\r\n", 400),
    ("trailer ended by LF", CHUNKED + b"0\r\nX: 1\n\r\n", 400),
    ("101 trailers", CHUNKED + b"0\r\n" + b"X: 1\r\n" * 101, 431),
    ("trailers over 16 KiB", CHUNKED + b"0\r\nX: " + b"a" * 17000, 431),
]

Outcome = list[Head | bytes | End | int]


def parse(pieces: list[bytes], limits: Limits | None = None) -> Outcome:
    """All parts, adjacent body bytes joined; a protocol error is its status, at the end."""
    parser = RequestParser(limits)
    outcome: Outcome = []
    for piece in pieces:
        parser.feed(piece)
        try:
            while (part := parser.next_part()) is not None:
                if isinstance(part, bytes) and outcome and isinstance(outcome[-1], bytes):
                    outcome[-1] += part
                else:
                    outcome.append(part)
        except ProtocolError as error:
            return [*outcome, error.status]
    return outcome


def cuts(data: bytes, count: int = 400) -> list[list[bytes]]:
    """The data byte by byte, cut in two at (up to `count`) positions, and at random in many."""
    positions = range(1, len(data))
    if len(data) > count:
        positions = sorted(random.Random(1).sample(positions, 40))
    ways = [[data[:at], data[at:]] for at in positions]
    if len(data) <= 2000:
        ways.append([data[i : i + 1] for i in range(len(data))])
    rng = random.Random(2)
    for _ in range(5):
        marks = sorted(rng.sample(range(len(data) + 1), min(6, len(data))))
        ways.append([data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)])
    return ways


def head(
    method: str = "GET", path: str = "/", query: str = "", minor: int = 1, host: str | None = "a",
    keep_alive: bool = True, has_body: bool = False, expects_continue: bool = False,
    **fields: str,
) -> Head:  # fmt: skip
    names = {name.replace("_", "-"): value for name, value in fields.items()}
    if host is not None:
        names.setdefault("host", host)
    return Head(method, path, query, minor, Headers(names), host, keep_alive, has_body,
                expects_continue)  # fmt: skip


GOOD: list[tuple[str, bytes, Outcome]] = [
    ("plain", GET + b"\r\n", [head(), End()]),
    ("empty lines first", b"\r\n\n\r\n" + GET + b"\r\n", [head(), End()]),
    ("lone line feeds", b"GET / HTTP/1.1\nHost: a\n\n", [head(), End()]),
    ("later minor version", b"GET / HTTP/1.9\r\n" + HOST + b"\r\n", [head(), End()]),
    ("empty Host", b"GET / HTTP/1.1\r\nHost:\r\n\r\n", [head(host=""), End()]),
    (
        "IPv6 Host",
        b"GET / HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n",
        [head(host="[::1]:8080"), End()],
    ),
    ("1.0", b"GET / HTTP/1.0\r\n\r\n", [head(minor=0, host=None, keep_alive=False), End()]),
    (
        "1.0 keep-alive",
        b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n",
        [head(minor=0, host=None, connection="Keep-Alive"), End()],
    ),
    (
        "1.0 ignores Expect",
        b"GET / HTTP/1.0\r\nExpect: x\r\n\r\n",
        [head(minor=0, host=None, keep_alive=False, expect="x"), End()],
    ),
    (
        "close among options",
        GET + b"Connection: x, CLOSE\r\n\r\n",
        [head(keep_alive=False, connection="x, CLOSE"), End()],
    ),
    (
        "values trimmed, bytes kept",
        GET + b"X-Y: \t a b\xe9 \t\r\nEmpty:\r\n\r\n",
        [head(x_y="a bé", empty=""), End()],
    ),
    ("repeated fields", GET + b"X: 1\r\nx: 2\r\n\r\n", [head(x="1, 2"), End()]),
    (
        "path decoded, query not",
        b"GET /a%2Fb%20%C3%A9?x=%2F?y HTTP/1.1\r\n" + HOST + b"\r\n",
        [head(path="/a/b é", query="x=%2F?y"), End()],
    ),
    (
        "absolute target",
        b"GET HTTP://b:1/x?y HTTP/1.1\r\n" + HOST + b"\r\n",
        [Head("GET", "/x", "y", 1, Headers({"host": "a"}), "b:1", True, False, False), End()],
    ),
    (
        "absolute target without path",
        b"GET http://b?y HTTP/1.1\r\n" + HOST + b"\r\n",
        [Head("GET", "/", "y", 1, Headers({"host": "a"}), "b", True, False, False), End()],
    ),
    (
        "asterisk",
        b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
        [head(method="OPTIONS", path="*"), End()],
    ),
    (
        "sized body",
        POST + b"Content-Length: 03\r\n\r\nabc",
        [head("POST", has_body=True, content_length="03"), b"abc", End()],
    ),
    (
        "equal lengths",
        POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        [head("POST", has_body=True, content_length="3, 3"), b"abc", End()],
    ),
    (
        "no body",
        POST + b"Content-Length: 0\r\nExpect: 100-continue\r\n\r\n",
        [head("POST", content_length="0", expect="100-continue"), End()],
    ),
    (
        "chunks, extensions, trailers",
        CHUNKED + b"3;x=y\r\nabc\r\n00A ; z\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n",
        [head("POST", has_body=True, transfer_encoding="chunked"), b"abc0123456789", End()],
    ),
    (
        "no chunks",
        CHUNKED + b"0\r\n\r\n",
        [head("POST", has_body=True, transfer_encoding="chunked"), End()],
    ),
    (
        "expectation",
        POST + b"Expect: 100-Continue\r\nContent-Length: 1\r\n\r\n!",
        [
            head("POST", has_body=True, expects_continue=True, content_length="1",
                 expect="100-Continue"),
            b"!", End(),
        ],
    ),
    (
        "three in a row, the last incomplete",
        GET + b"\r\n" + POST + b"Content-Length: 2\r\n\r\n{}" + GET,
        [head(), End(), head("POST", has_body=True, content_length="2"), b"{}", End()],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "expected"), [(d, e) for _, d, e in GOOD], ids=[n for n, *_ in GOOD]
)
def test_good_requests_at_every_cut(data: bytes, expected: Outcome) -> None:
    assert parse([data]) == expected
    for pieces in cuts(data):
        assert parse(pieces) == expected, pieces


@pytest.mark.parametrize(
    ("data", "status"), [(d, s) for _, d, s in MALFORMED], ids=[n for n, *_ in MALFORMED]
)
def test_malformed_requests_at_every_cut(data: bytes, status: int) -> None:
    expected = parse([data])
    assert expected[-1] == status
    for pieces in cuts(data):
        assert parse(pieces) == expected, pieces


def test_a_dead_parser_stays_dead() -> None:
    parser = RequestParser()
    parser.feed(b"GET\r\n")
    for _ in range(2):
        with pytest.raises(ProtocolError):
            parser.next_part()
        parser.feed(GET + b"\r\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PRI * HTTP/2.0\r\n", "HTTP/2 is not served; use HTTP/1.1"),
        (
            POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
            "the only Transfer-Encoding supported is chunked",
        ),
    ],
)
def test_what_is_not_spoken_is_told(data: bytes, message: str) -> None:
    parser = RequestParser()
    parser.feed(data)
    with pytest.raises(ProtocolError) as caught:
        parser.next_part()
    assert (caught.value.status, caught.value.message) == (400, message)


def test_pipelined_bytes_wait() -> None:
    parser = RequestParser()
    parser.feed(GET + b"\r\n" + GET)
    assert isinstance(parser.next_part(), Head)
    assert parser.next_part() == End()
    assert parser.buffered_bytes == len(GET) and not parser.is_between_requests
    assert parser.next_part() is None
    parser.feed(b"\r\n")
    assert isinstance(parser.next_part(), Head)
    assert parser.next_part() == End() and parser.is_between_requests


def test_limits_are_exact() -> None:
    limits = Limits(request_line_bytes=20, head_bytes=60, fields=3, body_bytes=4)

    def status(data: bytes) -> object:
        return parse([data], limits)[-1]

    line = b"GET /%b HTTP/1.1\r\n"
    assert status(line % b"aaaaa" + HOST + b"\r\n") == 414
    fits = b"GET /aa HTTP/1.1\r\n" + HOST
    assert len(fits) == 27
    assert status(fits + b"X: " + b"1" * 26 + b"\r\n\r\n") == End()  # 60 bytes
    assert status(fits + b"X: " + b"1" * 27 + b"\r\n\r\n") == 431
    assert status(fits + b"A: 1\r\nB: 1\r\n\r\n") == End()
    assert status(fits + b"A: 1\r\nB: 1\r\nC:1\r\n\r\n") == 431
    wide = Limits(body_bytes=4)
    assert parse([POST + b"Content-Length: 4\r\n\r\nabcd"], wide)[-1] == End()
    assert parse([POST + b"Content-Length: 5\r\n\r\n"], wide)[-1] == 413
    head, status_code = parse([POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n"], wide)
    assert isinstance(head, Head) and status_code == 413  # whose surface answers is known then
    assert not head.expects_continue
    assert parse([CHUNKED + b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"], wide)[-1] == End()
    assert parse([CHUNKED + b"2\r\nab\r\n3\r\n"], wide)[-1] == 413


def test_random_bytes_do_nothing_but_fail() -> None:
    rng = random.Random(3)
    pool = [
        GET,
        POST,
        CHUNKED,
        b"\r\n",
        b"\n",
        b"\r",
        b"0\r\n",
        b"5;x\r\n",
        b"hello",
        b"\x00",
        b":",
    ]
    for _ in range(1500):
        data = b"".join(rng.choices(pool, k=rng.randint(1, 8)))
        whole = parse([data])
        single = parse([data[i : i + 1] for i in range(len(data))])
        assert whole == single, data


def test_headers_ignore_case_and_hide_values() -> None:
    headers = Headers({"X-Api-Key": "secret"})
    assert headers["x-API-key"] == "secret" and "X-API-KEY" in headers
    assert headers.get("missing") is None and list(headers) == ["x-api-key"]
    assert "secret" not in repr(headers)


def test_answer_heads() -> None:
    assert wire.render_head(200, [("a", "1"), ("b", "é")]) == (
        b"HTTP/1.1 200 OK\r\na: 1\r\nb: \xe9\r\n\r\n"
    )
    assert wire.render_head(499, []) == b"HTTP/1.1 499 \r\n\r\n"
    for name, value in [("a", "1\r\nb: 2"), ("a", "1\n"), ("a", "\0"), ("a b", "1"), ("", "1"),
                        ("a:", "1"), ("a", "\u20ac")]:  # fmt: skip
        with pytest.raises(ValueError):
            wire.render_head(200, [(name, value)])


def test_answer_framing() -> None:
    assert wire.framing_fields(200, 0, 1) == [("content-length", "0")]
    assert wire.framing_fields(200, None, 1) == [("transfer-encoding", "chunked")]
    assert wire.framing_fields(200, None, 0) == []
    assert wire.framing_fields(204, 0, 1) == wire.framing_fields(304, 0, 1) == []
    assert wire.render_chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
    assert wire.render_chunk(b"") == b""
    assert wire.http_date(784111777) == "Sun, 06 Nov 1994 08:49:37 GMT"


def test_a_refusal_keeps_nothing_alive() -> None:
    """A parser in a cycle with its error would hold the connection until Python looks for cycles,
    and with it whatever the frames of that moment held."""
    parser = RequestParser()
    parser.feed(b"no request\r\n")
    gc.disable()
    try:
        for _ in range(2):
            try:
                parser.next_part()
            except ProtocolError as error:
                assert error.status == 400
        left = weakref.ref(parser)
        del parser
        assert left() is None
    finally:
        gc.enable()
