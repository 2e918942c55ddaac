"""HTTP/1.1 as pure functions: feed bytes, pull the parts of requests; build the bytes of answers.

`RequestParser.feed` takes bytes cut anywhere; `next_part` returns what they hold, one part at a
time, and None when more bytes are needed. A request is one `Head`, any number of `bytes` (its body,
decoded), one `End`. Bytes behind an `End` are the next, pipelined request: they stay in the buffer
until `next_part` is called again, so the caller decides when to go on.

    POST /v1/completions?x=1 HTTP/1.1      -> Head
    Host: localhost:8080
    Content-Length: 2

    {}                                     -> b"{}", End

Invariants: the parts, and the error if there is one, are the same however the bytes were cut. After
a `ProtocolError` the parser is dead: where the next request would start is unknown, so the caller
answers with the error's status and closes. That is a 4xx, also where RFC 9110 offers 501 or 505,
which clients repeat. What two parsers could read in two ways is refused rather than guessed (RFC
9112 section 11.2, request smuggling). No sockets, clock or threads; one parser, one connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum, auto
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from mlxlite.errors import MlxliteError

# RFC 9110 section 5.6.2: what methods and field names are made of.
TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Field values: visible characters, spaces, tabs and the obsolete bytes above 0x7f. RFC 9110 section
# 5.5 forbids CR, LF and NUL; the other controls have no use and are refused with them.
FIELD_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
REQUEST_LINE = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])" % TOKEN.pattern)
# RFC 9112 section 7.1; spaces before the extension are tolerated, the extension is ignored.
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
# RFC 3986 section 3.2.2 without user information: a name, an IPv4 or a bracketed IPv6 address.
AUTHORITY = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[0-9A-Za-z\-._~!$&'()*+,;=%]*)(?::[0-9]*)?")
ABSOLUTE_FORM = re.compile(r"https?://([^/?#]+)(.*)", re.IGNORECASE)
BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class ProtocolError(MlxliteError):
    """Bytes that are no request this server takes; the connection cannot go on after it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may hold.

    RFC 9112 section 3 asks for request lines of at least 8,000 bytes. 16 KiB of head is what Node
    allows, 100 fields what Apache and Python's http.client do.
    """

    request_line_bytes: int = 8 << 10
    head_bytes: int = 16 << 10  # request line, fields and the empty line; trailers once more
    fields: int = 100
    chunk_line_bytes: int = 1 << 10  # extensions included
    body_bytes: int = 32 << 20  # decoded


class Headers(Mapping[str, str]):
    """Field values by name, in any case; repeated fields are joined (RFC 9110 section 5.3)."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = {name.lower(): value for name, value in (values or {}).items()}

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Headers({sorted(self._values)})"  # names alone: values may hold keys


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request, already checked."""

    method: str
    path: str  # percent-decoded; "*" for OPTIONS *
    query: str  # as sent
    minor: int  # HTTP/1.<minor>, 0 or 1
    headers: Headers
    host: str | None  # of the target if it is absolute, else of the Host field
    keep_alive: bool
    has_body: bool
    expects_continue: bool


@dataclass(frozen=True, slots=True)
class End:
    """The request is whole."""


Part = Head | bytes | End


class _State(Enum):
    REQUEST_LINE = auto()
    FIELDS = auto()
    SIZED_BODY = auto()
    CHUNK_LINE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILERS = auto()


class RequestParser:
    """Reads the requests of one connection, in order."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer known to hold no line feed
        self._state = _State.REQUEST_LINE
        self._is_starved = False
        self._failure: tuple[int, str] | None = None  # as values: its traceback leads back here
        # The request being read:
        self._line: tuple[str, str, int] = ("", "", 1)  # method, target, minor version
        self._fields: dict[str, str] = {}
        self._field_count = 0
        self._head_left = 0  # bytes that the head, or the trailers, may still take
        self._data_left = 0  # bytes of the sized body, or of the current chunk
        self._body_left = 0  # bytes that chunks may still decode to

    @property
    def buffered_bytes(self) -> int:
        """Bytes fed and not yet returned."""
        return len(self._buffer)

    @property
    def is_between_requests(self) -> bool:
        """True if not a byte of a next request is here."""
        return self._state is _State.REQUEST_LINE and not self._buffer

    def feed(self, data: bytes | memoryview) -> None:
        """Take what was received; it is copied."""
        self._buffer += data

    def next_part(self) -> Part | None:
        """The next part, or None if more bytes are needed. Raises ProtocolError, then always."""
        if self._failure is not None:
            raise ProtocolError(*self._failure)
        self._is_starved = False
        try:
            while not self._is_starved:
                part = self._step()
                if part is not None:
                    return part
        except ProtocolError as error:
            self._failure = error.status, error.message
            self._buffer.clear()
            raise
        return None

    def _step(self) -> Part | None:
        """Do one thing: return a part, or go to another state, or find the buffer too short."""
        match self._state:
            case _State.REQUEST_LINE:
                return self._read_request_line()
            case _State.FIELDS:
                return self._read_field()
            case _State.SIZED_BODY:
                return self._read_data() if self._data_left else self._end()
            case _State.CHUNK_LINE:
                return self._read_chunk_line()
            case _State.CHUNK_DATA:
                if self._data_left:
                    return self._read_data()
                self._state = _State.CHUNK_END
                return None
            case _State.CHUNK_END:
                return self._read_chunk_end()
            case _State.TRAILERS:
                return self._read_trailer()

    # ------------------------------------------------------------------------------------ head

    def _read_request_line(self) -> Part | None:
        # RFC 9112 section 2.2: empty lines ahead of a request are ignored; old clients end a body
        # with one.
        if self._buffer.startswith((b"\r\n", b"\n")):
            del self._buffer[: 2 if self._buffer[0] == 0x0D else 1]
            return None
        if not self._buffer or self._buffer == b"\r":
            self._is_starved = True
            return None
        if not TOKEN.match(self._buffer):  # a TLS hello, say: answer now, no line feed may come
            raise ProtocolError(400, "this is no HTTP request; is the client using https?")
        limit = min(self._limits.request_line_bytes, self._limits.head_bytes)
        line = self._take_line(limit, 414, "the request line is too long")
        if line is None:
            return None
        match = REQUEST_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError(400, "malformed request line")
        method, target, major, minor = match.groups()
        if major != b"1":
            raise ProtocolError(400, f"HTTP/{int(major)} is not served; use HTTP/1.1")
        # RFC 9110 section 2.5: a higher minor version is served as the highest we know.
        self._line = (method.decode(), target.decode(), min(int(minor), 1))
        self._begin_fields(self._limits.head_bytes - len(line) - 2)
        self._state = _State.FIELDS
        return None

    def _begin_fields(self, limit: int) -> None:
        self._fields = {}
        self._field_count = 0
        self._head_left = limit

    def _read_field(self) -> Part | None:
        line = self._take_line(self._head_left, 431, "the request head is too large")
        if line is None:
            return None
        if not line:
            return self._finish_head()
        name, value = self._parse_field(line)
        if name not in self._fields:
            self._fields[name] = value
        elif name == "host":
            raise ProtocolError(400, "more than one Host field")
        else:
            self._fields[name] += ", " + value
        return None

    def _parse_field(self, line: bytes) -> tuple[str, str]:
        """Name in lower case and value of one field line (RFC 9112 section 5), counted."""
        self._head_left -= len(line) + 2
        self._field_count += 1
        if self._field_count > self._limits.fields:
            raise ProtocolError(431, f"more than {self._limits.fields} header fields")
        if line[:1] in (b" ", b"\t"):
            raise ProtocolError(400, "folded header fields are not accepted")
        name, colon, value = line.partition(b":")
        if not colon or not TOKEN.fullmatch(name):  # a space before the colon fails here
            raise ProtocolError(400, "malformed header field name")
        if not FIELD_VALUE.fullmatch(value):
            raise ProtocolError(400, "a header field value holds a control character")
        return name.decode().lower(), value.strip(b" \t").decode("latin-1")

    def _finish_head(self) -> Head:
        method, target, minor = self._line
        fields = self._fields
        host = fields.get("host")
        # RFC 9112 section 3.2: exactly one valid Host in 1.1.
        if host is None and minor == 1:
            raise ProtocolError(400, "the Host field is missing")
        if host is not None and not AUTHORITY.fullmatch(host):
            raise ProtocolError(400, "malformed Host field")
        authority, path, query = parse_target(method, target)
        connection = {
            option.strip(" \t") for option in fields.get("connection", "").lower().split(",")
        }
        has_body = self._choose_body(minor)
        is_too_large = self._data_left > self._limits.body_bytes
        return Head(
            method=method,
            path=path,
            query=query,
            minor=minor,
            headers=Headers(fields),
            host=host if authority is None else authority,
            # RFC 9112 section 9.3: persistent by default since 1.1.
            keep_alive="close" not in connection and (minor == 1 or "keep-alive" in connection),
            has_body=has_body,
            expects_continue=self._check_expectation(minor) and has_body and not is_too_large,
        )

    def _choose_body(self, minor: int) -> bool:
        """Decide how the body is framed (RFC 9112 section 6.3). True if there may be one."""
        coding = self._fields.get("transfer-encoding")
        length = self._fields.get("content-length")
        self._body_left = self._limits.body_bytes
        if coding is None:
            self._data_left = self._parse_length(length) if length is not None else 0
            self._state = _State.SIZED_BODY
            return self._data_left > 0
        # Both fields, or chunks in 1.0, are how requests are smuggled past a proxy (section 6.1).
        if length is not None:
            raise ProtocolError(400, "Content-Length and Transfer-Encoding exclude each other")
        if minor == 0:
            raise ProtocolError(400, "Transfer-Encoding needs HTTP/1.1")
        if coding.lower() != "chunked":
            raise ProtocolError(400, "the only Transfer-Encoding supported is chunked")
        self._state = _State.CHUNK_LINE
        return True

    def _parse_length(self, value: str) -> int:
        # RFC 9110 section 8.6: a list of equal values counts as one.
        values = {member.strip(" \t") for member in value.split(",")}
        digits = values.pop()
        if values or not (digits.isascii() and digits.isdigit()):
            raise ProtocolError(400, "malformed or conflicting Content-Length")
        digits = digits.lstrip("0")
        return int(digits or "0") if len(digits) <= 18 else 10**18

    def _check_expectation(self, minor: int) -> bool:
        """True if the client waits for 100 (RFC 9110 section 10.1.1; to be ignored in 1.0)."""
        expectation = self._fields.get("expect")
        if expectation is None or minor == 0:
            return False
        if expectation.lower() != "100-continue":
            raise ProtocolError(417, "the only expectation supported is 100-continue")
        return True

    # ------------------------------------------------------------------------------------ body

    def _read_data(self) -> Part | None:
        # Only after the head: the answer has the shape of the surface that was asked.
        if self._data_left > self._limits.body_bytes:
            raise self._body_too_large()
        if not self._buffer:
            self._is_starved = True
            return None
        data = bytes(self._buffer[: self._data_left])
        del self._buffer[: self._data_left]
        self._data_left -= len(data)
        return data

    def _read_chunk_line(self) -> Part | None:
        line = self._take_line(
            self._limits.chunk_line_bytes, 400, "a chunk's size line is too long", strict=True
        )
        if line is None:
            return None
        match = CHUNK_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError(400, "malformed chunk size")
        self._data_left = int(match[1], 16)
        self._body_left -= self._data_left
        if self._body_left < 0:
            raise self._body_too_large()
        if self._data_left:
            self._state = _State.CHUNK_DATA
        else:
            self._begin_fields(self._limits.head_bytes)
            self._state = _State.TRAILERS
        return None

    def _read_chunk_end(self) -> Part | None:
        # Nothing but CR LF: a lone LF here is read as data by some parsers, as an end by others.
        if not b"\r\n".startswith(self._buffer[:2]):
            raise ProtocolError(400, "a chunk is longer than its size")
        if len(self._buffer) < 2:
            self._is_starved = True
            return None
        del self._buffer[:2]
        self._state = _State.CHUNK_LINE
        return None

    def _read_trailer(self) -> Part | None:
        line = self._take_line(self._head_left, 431, "the trailers are too large", strict=True)
        if line is None:
            return None
        if line:
            self._parse_field(line)  # checked, then dropped: no trailer means anything to us
            return None
        return self._end()

    def _end(self) -> End:
        self._state = _State.REQUEST_LINE
        return End()

    def _body_too_large(self) -> ProtocolError:
        return ProtocolError(413, f"the body is over {self._limits.body_bytes} bytes")

    def _take_line(
        self, limit: int, status: int, message: str, *, strict: bool = False
    ) -> bytes | None:
        """The next line without its end, None if it is not whole; `status` if over `limit` bytes.

        A lone LF ends a line of the head (RFC 9112 section 2.2 allows it); inside a chunked body,
        where proxies differ, only CR LF does (strict).
        """
        end = self._buffer.find(b"\n", self._searched)
        if (len(self._buffer) if end < 0 else end + 1) > limit:
            raise ProtocolError(status, message)
        if end < 0:
            self._searched = len(self._buffer)
            self._is_starved = True
            return None
        self._searched = 0
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if line.endswith(b"\r"):
            return line[:-1]
        if strict:
            raise ProtocolError(400, "a line of a chunked body must end with CR LF")
        return line


def parse_target(method: str, target: str) -> tuple[str | None, str, str]:
    """Authority (absolute form only), decoded path and raw query (RFC 9112 section 3.2)."""
    if target == "*" and method == "OPTIONS":
        return None, "*", ""
    authority = None
    if not target.startswith("/"):
        match = ABSOLUTE_FORM.fullmatch(target)
        if match is None or not AUTHORITY.fullmatch(match[1]):
            raise ProtocolError(400, "malformed request target")
        authority, target = match[1], match[2]
        if not target.startswith("/"):
            target = "/" + target
    if "#" in target:
        raise ProtocolError(400, "a request target has no fragment")
    path, _, query = target.partition("?")
    return authority, decode_path(path), query


def decode_path(path: str) -> str:
    """Undo percent-encoding; what is not UTF-8 or holds a control character is refused."""
    if BAD_ESCAPE.search(path):
        raise ProtocolError(400, "malformed percent-encoding in the path")
    try:
        decoded = unquote_to_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(400, "the path is not UTF-8") from None
    if CONTROL.search(decoded):
        raise ProtocolError(400, "the path holds a control character")
    return decoded


# ------------------------------------------------------------------------------------- answers


def has_body(status: int) -> bool:
    """False for the statuses whose answer ends with its head (RFC 9112 section 6.3)."""
    return status >= 200 and status not in (204, 304)


def framing_fields(status: int, length: int | None, minor: int) -> list[tuple[str, str]]:
    """The field that says where a body ends; `length` None is a stream.

    A stream is chunked, but to an HTTP/1.0 client, where only the end of the connection ends it.
    """
    if not has_body(status):
        return []
    if length is not None:
        return [("content-length", str(length))]
    return [("transfer-encoding", "chunked")] if minor >= 1 else []


def check_field(name: str, value: str) -> None:
    """Raise ValueError for a field that would break the head apart, or that latin-1 lacks."""
    if not TOKEN.fullmatch(name.encode("latin-1")):
        raise ValueError(f"malformed header field name {name!r}")
    if not FIELD_VALUE.fullmatch(value.encode("latin-1")):
        raise ValueError(f"the header field {name} holds a control character")


def render_head(status: int, fields: Iterable[tuple[str, str]]) -> bytes:
    """Status line, fields and the empty line. Raises ValueError as `check_field` does.

    The version is ours, 1.1, whatever the client's is (RFC 9110 section 2.5).
    """
    lines = [f"HTTP/1.1 {status} {_reason(status)}"]
    for name, value in fields:
        check_field(name, value)
        lines.append(f"{name}: {value}")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("latin-1")


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""  # 499, say; the phrase may be empty, its space may not


def render_chunk(data: bytes) -> bytes:
    """One chunk (RFC 9112 section 7.1); nothing for no data, since an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


@lru_cache(maxsize=1)  # formatted once a second, then
def http_date(epoch_s: int) -> str:
    """The Date field (RFC 9110 section 5.6.7): `Sun, 06 Nov 1994 08:49:37 GMT`."""
    return formatdate(epoch_s, usegmt=True)
