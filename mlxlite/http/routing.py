"""Request, Response and EventStream; path -> handler; error -> answer.

The life of a request here, all on the event loop:

    1. `admit`    when its head is in: guard, preflight; the body is not read yet
    2. `answer`   when it is whole: Router finds the handler, the handler answers
    3. the server sends the Response, or the frames of the EventStream

`admit` and `answer` are the only places where exceptions become answers: an MlxliteError is
rendered in the JSON shape of the route's surface, anything else is a bug, a 500 whose stack goes to
the log.
An EventStream leaves `answer` only with its first frame in hand, so what fails before that is an
ordinary error with its status.

Adding an endpoint is a `Route` in the table given to Router. Nothing here knows what a model is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl

from mlxlite.errors import BadRequest, MethodNotAllowed, MlxliteError, NotFound, UnsupportedCoding
from mlxlite.http import guard, wire

log = logging.getLogger(__name__)

# Bodies up to this size are parsed on the event loop. Token ids, the slowest JSON there is, take
# 4 ms for it (30 ms a megabyte, Python 3.11), messages 0.6 ms; a hop to a thread takes 0.1 ms.
INLINE_JSON_BYTES = 128 << 10
HEARTBEAT_S = 15.0
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class Surface(Protocol):
    """What an API surface tells routing; a module with this function is one.

    A surface may also have `request_id_field: str`, a second name for `x-request-id`.
    """

    def render_error(self, error: MlxliteError) -> dict[str, Any]:
        """The error as the JSON body that clients of this surface expect."""


# ------------------------------------------------------------------------------------- request


@dataclass(slots=True, eq=False)
class Request:
    """One request. `disconnected` is set when the client has gone; the handler is cancelled then.

    `content` is the body as it was collected, `body` the same as bytes. `reply_fields` go out with
    every answer to this request, errors included. `surface` renders its errors.
    """

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)  # the last of equal names
    headers: wire.Headers = field(default_factory=wire.Headers)
    content: bytes | bytearray = b""
    host: str | None = None
    minor: int = 1  # HTTP/1.<minor>
    peer_address: str | None = None
    local_address: str | None = None
    request_id: str = field(default_factory=lambda: "req_" + secrets.token_hex(12))
    params: dict[str, str] = field(default_factory=dict)  # of the path
    surface: Surface | None = None
    reply_fields: list[tuple[str, str]] = field(default_factory=list)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    _parsed: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.reply_fields.append(("x-request-id", self.request_id))

    @classmethod
    def from_head(
        cls, head: wire.Head, peer_address: str | None, local_address: str | None
    ) -> Request:
        return cls(
            method=head.method,
            path=head.path,
            query=dict(parse_qsl(head.query, keep_blank_values=True)),
            headers=head.headers,
            host=head.host,
            minor=head.minor,
            peer_address=peer_address,
            local_address=local_address,
        )

    @property
    def body(self) -> bytes:
        return bytes(self.content)

    async def json(self) -> dict[str, Any]:
        """The body as a JSON object, parsed once. Raises BadRequest("invalid JSON body").

        Large bodies are parsed in a thread, so that the event loop goes on.
        """
        if self._parsed is None:
            if len(self.content) <= INLINE_JSON_BYTES:
                self._parsed = parse_object(self.content)
            else:
                self._parsed = await asyncio.to_thread(_parse_in_thread, self.content)
        return self._parsed


def parse_object(content: bytes | bytearray, **hooks: Any) -> dict[str, Any]:
    """A JSON object, strictly (RFC 8259): UTF-8, no NaN or Infinity.

    Of equal names the last one counts. Half a surrogate pair becomes U+FFFD.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant, **hooks)
        if SURROGATE_ESCAPE.search(content):  # pairs are common, so look closer
            value = _mended(value)
    except (ValueError, RecursionError):  # JSON and Unicode errors are ValueErrors
        raise BadRequest("invalid JSON body") from None
    if not isinstance(value, dict):
        raise BadRequest("invalid JSON body")
    return value


def _mended(value: Any) -> Any:
    """The value with half surrogate pairs as U+FFFD: no later step could encode them, and clients
    that cut a history in the middle of an emoji send them in every turn."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
        return value
    except UnicodeEncodeError:
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return json.loads(whole)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_in_thread(content: bytes | bytearray) -> dict[str, Any]:
    # json's C code never lets go of the GIL by itself; calling back into Python for each object and
    # number does, at 1.5 to 2.5 times the cost. One very long string is still read in one go
    # (1.5 ms a megabyte): the way out would be a scanner of our own.
    return parse_object(
        content,
        object_pairs_hook=lambda pairs: dict(pairs),
        parse_int=lambda digits: int(digits),
        parse_float=lambda digits: float(digits),
    )


# -------------------------------------------------------------------------------------- answer


@dataclass(slots=True)
class Response:
    """An answer that is whole. Content-Length, Date and the request id are the server's to add."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            wire.check_field(name, value)  # here its stack shows who made it


def encode_json(value: Any) -> bytes:
    """Compact UTF-8 JSON; escaped ASCII if `value` holds half a surrogate pair. NaN: ValueError."""
    text = _COMPACT.encode(value)  # one encoder for all: json.dumps would make one each time
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


HOLE = "\0"  # a string that `json_template` leaves out


def json_template(value: Any) -> bytes:
    """JSON for `%`, which puts encoded JSON into each HOLE of `value`.

    Most frames of a stream differ in their text alone: to fill it in takes a tenth of the time that
    encoding the whole takes.
    """
    return encode_json(value).replace(b"%", b"%%").replace(encode_json(HOLE), b"%b")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        status, encode_json(value), {"content-type": "application/json", **(headers or {})}
    )


class EventStream:
    """An answer of server-sent events: frames, already encoded, sent as they come.

    data: {"choices": []}
    (empty line)
    : keep-alive

    The heartbeat comment is one line with a single newline (faults F17) and comes between frames,
    after the first one, whenever nothing was sent for `heartbeat_s`. `frames` is closed exactly
    once, whatever happens. It must end with its surface's own last frame: an exception that
    escapes it after the first frame breaks the connection, so that no client takes it for the end.
    """

    HEARTBEAT = b": keep-alive\n"

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        headers: Mapping[str, str] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.heartbeat_s = heartbeat_s
        self.headers: Mapping[str, str] = {
            "content-type": "text/event-stream",
            "cache-control": "no-cache",
            **(headers or {}),
        }
        self._frames = frames
        self._first: bytes | None = None
        self._is_open = False
        self._is_closed = False

    def over(self, frames: AsyncIterator[bytes]) -> EventStream:
        """The same head over other frames: those of whoever wraps this stream."""
        return EventStream(frames, headers=self.headers, heartbeat_s=self.heartbeat_s)

    async def open(self) -> None:
        """Wait for the first frame. Raises what `frames` raises, after closing it."""
        if self._is_open:
            return
        try:
            for name, value in self.headers.items():
                wire.check_field(name, value)
            self._first = await anext(self._frames, None)
        except BaseException:  # cancellation too: nobody else will close it
            await self.close()
            raise
        self._is_open = True

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    def __anext__(self) -> Awaitable[bytes]:  # no coroutine of its own: this runs for each token
        if self._first is None:
            return self._frames.__anext__()
        return self._take_first()

    async def _take_first(self) -> bytes:
        first, self._first = self._first, None
        assert first is not None
        return first

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        aclose = getattr(self._frames, "aclose", None)
        if aclose is not None:
            await aclose()


# -------------------------------------------------------------------------------------- errors


def render_error(error: MlxliteError) -> dict[str, Any]:
    """OpenAI's shape, which also serves paths that belong to no surface."""
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def error_response(error: MlxliteError, surface: Surface | None = None) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"  # RFC 9110 section 15.5.2 demands one
    if error.status == 415:
        headers["accept-encoding"] = "identity"  # RFC 9110 section 15.5.16: what would be taken
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allow)
    render = surface.render_error if surface is not None else render_error
    return json_response(render(error), error.status, headers)


def _bug_response(request: Request) -> Response:
    log.exception("%s %r failed (%s)", request.method, request.path, request.request_id)
    return error_response(MlxliteError("internal error"), request.surface)


Handler = Callable[[Request], Awaitable[Response | EventStream]]


def admit(app: Handler, request: Request) -> Response | None:
    """Judge a request by its head. None: go on and read the body; else the answer."""
    check = getattr(app, "admit", None)
    try:
        return check(request) if check is not None else None
    except MlxliteError as error:
        return error_response(error, request.surface)
    except Exception:
        return _bug_response(request)


async def answer(app: Handler, request: Request) -> Response | EventStream:
    """Run the application; what it raises becomes an answer. Only its cancellation passes."""
    try:
        result = await app(request)
        if isinstance(result, EventStream):
            await result.open()
        return result
    except MlxliteError as error:
        return error_response(error, request.surface)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _bug_response(request)  # something the handler waited for was cancelled, not it
    except Exception:
        return _bug_response(request)


# -------------------------------------------------------------------------------------- routes


@dataclass(frozen=True, slots=True)
class Route:
    """`{name}` in the path matches one segment, `{name:path}` several: ids hold slashes."""

    method: str
    path: str
    handler: Handler
    surface: Surface | None = None


_Matches = list[tuple[dict[str, Route], dict[str, str]]]


class Router:
    """The application: a table of routes behind a guard.

    A trailing slash and the query never decide. HEAD is GET, the server leaves the body out. Paths
    without parameters come first, then the others in the order of the table.
    """

    def __init__(self, routes: Sequence[Route], policy: guard.Policy | None = None) -> None:
        self._policy = policy
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        for path, methods in by_path.items():
            if "{" in path:
                self._patterns.append((_compile(path), methods))
            else:
                self._fixed[path] = methods

    def admit(self, request: Request) -> Response | None:
        """Guard, preflight, coding; remembers the route's surface, whose shape refusals have."""
        path = _without_slash(request.path)
        matches = self._matches(path)
        if matches:
            method = "GET" if request.method == "HEAD" else request.method
            chosen = [methods[method] for methods, _ in matches if method in methods]
            route = chosen[0] if chosen else next(iter(matches[0][0].values()))
            request.surface = route.surface
        else:
            request.surface = self._surface_above(path)
        second_name = getattr(request.surface, "request_id_field", None)
        if second_name is not None:
            request.reply_fields.append((second_name, request.request_id))
        refusal = self._guard(self._policy, request, path, matches) if self._policy else None
        if refusal is None:
            _check_coding(request.headers)
        return refusal

    def _guard(
        self, policy: guard.Policy, request: Request, path: str, matches: _Matches
    ) -> Response | None:
        """None: it may come in; else the answer to a preflight. Raises what the guard raises."""
        guard.check_host(policy, request.host, request.local_address)
        origin = request.headers.get("origin")
        request.reply_fields += guard.cors_fields(policy, origin)
        if guard.is_preflight(request.method, request.headers):
            allow = _allow(matches)
            fields = guard.preflight_fields(policy, request.headers, request.host, allow)
            return Response(204, headers={"allow": ", ".join(allow), **dict(fields)})
        guard.check_origin(policy, origin, request.local_address)
        guard.check_key(policy, request.method, path, request.headers)
        return None

    async def __call__(self, request: Request) -> Response | EventStream:
        matches = self._matches(_without_slash(request.path))
        allow = _allow(matches)
        if request.method == "OPTIONS" and (matches or request.path == "*"):
            return Response(204, headers={"allow": ", ".join(allow)})
        method = "GET" if request.method == "HEAD" else request.method
        for methods, params in matches:
            if method in methods:
                request.params = params
                return await methods[method].handler(request)
        if matches:
            raise MethodNotAllowed(f"{request.method} is not allowed here", allow)
        raise NotFound(f"no such path: {request.path}")

    def _surface_above(self, path: str) -> Surface | None:
        """Of the nearest route above a path that there is not: its clients asked for it."""
        while path := path.rpartition("/")[0]:
            if path in self._fixed:
                return next(iter(self._fixed[path].values())).surface
        return None

    def _matches(self, path: str) -> _Matches:
        """Every entry that the path fits: its routes by method, and the path's parameters."""
        matches: _Matches = []
        if path in self._fixed:
            matches.append((self._fixed[path], {}))
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                matches.append((methods, match.groupdict()))
        return matches


def _without_slash(path: str) -> str:
    return path.rstrip("/") or "/"


def _check_coding(headers: Mapping[str, str]) -> None:
    """Raise UnsupportedCoding for a compressed body, which would only be told to be no JSON."""
    codings = {coding.strip() for coding in headers.get("content-encoding", "").lower().split(",")}
    if refused := codings - {"", "identity"}:
        raise UnsupportedCoding(
            f"Content-Encoding {min(refused)!r} is not supported; send the body as it is"
        )


def _allow(matches: _Matches) -> tuple[str, ...]:
    allowed = {"OPTIONS"}.union(*(methods for methods, _ in matches))
    return tuple(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))


def _compile(path: str) -> re.Pattern[str]:
    pattern = ""
    for literal, name, kind in re.findall(r"([^{]*)(?:\{(\w+)(:path)?\})?", path):
        pattern += re.escape(literal)
        if name:
            pattern += f"(?P<{name}>{'.+' if kind else '[^/]+'})"
    return re.compile(pattern)
