"""routing: bodies, answers, streams, errors and routes, without a socket."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mlxlite.errors import (
    BadRequest,
    Busy,
    EngineDown,
    MethodNotAllowed,
    MlxliteError,
    NotFound,
    Unauthorized,
    UnsupportedCoding,
)
from mlxlite.http import routing
from mlxlite.http.guard import Policy
from mlxlite.http.routing import (
    EventStream,
    Request,
    Response,
    Route,
    Router,
    encode_json,
    error_response,
    json_response,
)
from mlxlite.http.wire import Headers


def ask(app: Any, method: str, path: str, content: bytes = b"", **headers: str) -> Any:
    """What the server does: admit, then answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = Request(
        method, path, headers=Headers(names), host="localhost", content=content,
        local_address="127.0.0.1",
    )  # fmt: skip
    result = routing.admit(app, request) or asyncio.run(routing.answer(app, request))
    return request, result


def parse(content: bytes) -> Any:
    return asyncio.run(Request("POST", "/", content=content).json())


# --------------------------------------------------------------------------------------- bodies


BAD_BODIES = [
    b"", b" ", b"x", b"[]", b"1", b'"a"', b"null", b"{", b"{}{}", b"{'a': 1}", b'{"a": 1,}',
    b"\xff", b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}", b'{"a": "\n"}',
    b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a": ' + b'{"a": ' * 50_000,
    "{}".encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize("content", BAD_BODIES, ids=range(len(BAD_BODIES)))
@pytest.mark.parametrize("is_large", [False, True])
def test_bad_bodies(content: bytes, is_large: bool) -> None:
    padding = b" " * routing.INLINE_JSON_BYTES if is_large else b""
    with pytest.raises(BadRequest, match="^invalid JSON body$"):
        parse(content + padding)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b'{"a": "\\ud800"}', {"a": "\ufffd"}),
        (b'{"\\uDC00": 1}', {"\ufffd": 1}),
        (b'{"a": "\\ud83d\\ud83d\\ude00"}', {"a": "\ufffd\U0001f600"}),
    ],
)
def test_half_surrogate_pairs_are_mended(content: bytes, value: dict[str, Any]) -> None:
    """Clients that cut a history inside an emoji send them; no later step could encode them."""
    assert parse(content) == value


def test_good_bodies() -> None:
    value = {"a": [1, -2.5e3, True, None, {"b": "é\U0001f642"}], "pair": "\U0001f642"}
    for padding in (b"", b" " * routing.INLINE_JSON_BYTES):
        assert parse(json.dumps(value).encode() + padding) == value
        assert parse(json.dumps(value, ensure_ascii=False).encode() + padding) == value
        assert parse(b'{"a": 1, "a": 2, "b": "\\\\ud800"}' + padding) == {"a": 2, "b": "\\ud800"}


def test_a_body_is_parsed_once_and_a_large_one_in_a_thread() -> None:
    async def main() -> None:
        threads: list[threading.Thread] = []
        original = routing.parse_object

        def spy(*args: Any, **hooks: Any) -> Any:
            threads.append(threading.current_thread())
            return original(*args, **hooks)

        routing.parse_object = spy
        try:
            for size in (0, routing.INLINE_JSON_BYTES):
                request = Request("POST", "/", content=bytearray(b"{}" + b" " * size))
                assert await request.json() is await request.json()
                assert request.body == bytes(request.content)
        finally:
            routing.parse_object = original
        assert len(threads) == 2
        assert threads[0] is threading.main_thread() and threads[1] is not threads[0]

    asyncio.run(main())


def test_json_answers() -> None:
    response = json_response({"a": "é", "b": [1]}, 201, {"x-y": "1"})
    assert response.body == '{"a":"é","b":[1]}'.encode()
    assert response.status == 201
    assert response.headers == {"content-type": "application/json", "x-y": "1"}
    assert encode_json({"a": "\ud83d é"}) == b'{"a":"\\ud83d \\u00e9"}'
    with pytest.raises(ValueError):
        encode_json(float("nan"))
    with pytest.raises(ValueError):
        Response(200, b"", {"a": "1\r\nb: 2"})


# --------------------------------------------------------------------------------------- errors


class Messages:
    """A surface with its own shape of errors."""

    request_id_field = "request-id"

    @staticmethod
    def render_error(error: MlxliteError) -> dict[str, Any]:
        return {"type": "error", "error": {"type": "api_error", "message": error.message}}


def test_what_is_missing_below_a_surface_is_its_own() -> None:
    async def fail(request: Request) -> Response:
        raise BadRequest("no")

    routes = [Route("POST", "/v1/messages", fail, Messages()), Route("GET", "/v1/{id:path}", fail)]
    router = Router(routes[:1])
    for path in ("/v1/messages/a", "/v1/messages/a/b/"):
        request, response = ask(router, "POST", path)
        assert response.status == 404 and json.loads(response.body)["type"] == "error"
        assert ("request-id", request.request_id) in request.reply_fields
    both = Router(routes)
    for each, path in ((router, "/v1/messagesx"), (router, "/v1"), (both, "/v1/a")):
        request, response = ask(each, "POST", path)
        assert response.status in (404, 405) and "type" not in json.loads(response.body)


def test_openai_shape() -> None:
    def kind(error: MlxliteError) -> Any:
        return json.loads(error_response(error).body)["error"]["type"]

    assert json.loads(error_response(BadRequest("no", param="n", code="c")).body) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert kind(NotFound("")) == kind(Unauthorized("")) == "invalid_request_error"
    assert kind(Busy("")) == "rate_limit_error"
    assert kind(EngineDown("")) == kind(MlxliteError("")) == "server_error"


def test_error_headers() -> None:
    assert error_response(Busy("")).headers["retry-after"] == "1"
    assert error_response(EngineDown("")).headers["retry-after"] == "1"
    assert error_response(Unauthorized("")).headers["www-authenticate"] == "Bearer"
    assert error_response(MethodNotAllowed("", ("GET", "HEAD"))).headers["allow"] == "GET, HEAD"
    assert error_response(UnsupportedCoding("")).headers["accept-encoding"] == "identity"
    assert set(error_response(BadRequest("")).headers) == {"content-type"}


def test_errors_are_rendered_by_the_surface() -> None:
    async def fail(request: Request) -> Response:
        raise BadRequest("no")

    router = Router(
        [Route("POST", "/v1/messages", fail, Messages()), Route("POST", "/other", fail)],
        Policy(api_key="k"),
    )
    for method, key, status in [
        ("POST", "k", 400), ("POST", "x", 401), ("GET", "k", 405), ("POST", "", 401)
    ]:  # fmt: skip
        request, response = ask(router, method, "/v1/messages", x_api_key=key)
        assert response.status == status
        assert json.loads(response.body)["type"] == "error"
        assert ("request-id", request.request_id) in request.reply_fields
        request, response = ask(router, method, "/other", x_api_key=key)
        assert response.status == status
        assert json.loads(response.body)["error"]["type"] == "invalid_request_error"
        assert [name for name, _ in request.reply_fields] == ["x-request-id"]


@pytest.mark.parametrize("cause", [ValueError("secret"), asyncio.CancelledError("secret")])
def test_bugs_are_500_and_logged(cause: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: Request) -> Response:
        raise cause

    with caplog.at_level(logging.ERROR):
        _, response = ask(Router([Route("GET", "/", fail)]), "GET", "/")
    assert response.status == 500
    assert json.loads(response.body)["error"]["message"] == "internal error"
    assert "secret" in caplog.text and b"secret" not in response.body


# --------------------------------------------------------------------------------------- streams


class Frames:
    """Frames that count how often they are closed."""

    def __init__(self, *frames: bytes | Exception) -> None:
        self._left = list(frames)
        self.closed = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        frame = self._left.pop(0)
        if isinstance(frame, Exception):
            raise frame
        return frame

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stream_yields_all_frames_and_closes_once(count: int) -> None:
    async def main() -> None:
        frames = Frames(*[b"%d" % i for i in range(count)])
        stream = EventStream(frames, headers={"warning": "x"})
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-cache"
        await stream.open()
        await stream.open()
        assert [frame async for frame in stream] == [b"%d" % i for i in range(count)]
        await stream.close()
        await stream.close()
        assert frames.closed == 1

    asyncio.run(main())
    assert EventStream.HEARTBEAT == b": keep-alive\n"  # faults F17


def test_an_error_before_the_first_frame_is_an_answer() -> None:
    frames = Frames(Busy("later"))

    async def handler(request: Request) -> EventStream:
        return EventStream(frames)

    _, response = ask(Router([Route("GET", "/", handler)]), "GET", "/")
    assert response.status == 429 and frames.closed == 1


def test_a_bad_stream_header_is_a_bug_and_closes_the_frames() -> None:
    frames = Frames(b"x")

    async def handler(request: Request) -> EventStream:
        return EventStream(frames, headers={"a": "\n"})

    _, response = ask(Router([Route("GET", "/", handler)]), "GET", "/")
    assert response.status == 500 and frames.closed == 1


def test_cancelled_while_waiting_for_the_first_frame() -> None:
    closed: list[int] = []

    async def frames() -> AsyncIterator[bytes]:
        try:
            await asyncio.get_running_loop().create_future()
            yield b""
        finally:
            closed.append(1)

    async def handler(request: Request) -> EventStream:
        return EventStream(frames())

    async def main() -> None:
        router = Router([Route("GET", "/", handler)])
        task = asyncio.create_task(routing.answer(router, Request("GET", "/")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert closed == [1]


# ---------------------------------------------------------------------------------------- routes


async def echo(request: Request) -> Response:
    return json_response({"path": request.path, "params": request.params})


async def other(request: Request) -> Response:
    return json_response({"other": request.params})


ROUTER = Router(
    [
        Route("GET", "/", echo),
        Route("POST", "/v1/messages", echo),
        Route("GET", "/v1/models", echo),
        Route("GET", "/v1/models/{id:path}", echo),
        Route("DELETE", "/v1/models/{id:path}", other),
        Route("GET", "/v1/responses/{id}", echo),
        Route("GET", "/v1/responses/{id}/items", echo),
        Route("POST", "/v1/responses/{id}/{verb}", other),
        Route("GET", "/a.b", echo),
    ]
)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/", {}),
        ("//", {}),
        ("/v1/models", {}),
        ("/v1/models/", {}),
        ("/v1/models/a", {"id": "a"}),
        ("/v1/models/org/name/", {"id": "org/name"}),
        ("/v1/responses/r", {"id": "r"}),
        ("/v1/responses/r/items", {"id": "r"}),
        ("/a.b", {}),
    ],
)
def test_paths(path: str, params: dict[str, str]) -> None:
    _, response = ask(ROUTER, "GET", path)
    assert response.status == 200
    assert json.loads(response.body)["params"] == params


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/messages", 405, "OPTIONS, POST"),
        ("BREW", "/", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/v1/models/a/b", 405, "DELETE, GET, HEAD, OPTIONS"),
        ("PUT", "/v1/responses/r/items", 405, "GET, HEAD, OPTIONS, POST"),
        ("HEAD", "/v1/messages", 405, "OPTIONS, POST"),
        ("OPTIONS", "/v1/messages", 204, "OPTIONS, POST"),
        ("OPTIONS", "/v1/models", 204, "GET, HEAD, OPTIONS"),
        ("OPTIONS", "*", 204, "OPTIONS"),
        ("OPTIONS", "/none", 404, None),
        ("GET", "/none", 404, None),
        ("GET", "/v1/responses/r/s/t", 404, None),
        ("GET", "/V1/models", 404, None),
        ("GET", "/axb", 404, None),
        ("HEAD", "/v1/models", 200, None),
        ("DELETE", "/v1/models/a", 200, None),
        ("POST", "/v1/responses/r/items", 200, None),
    ],
)
def test_methods(method: str, path: str, status: int, allow: str | None) -> None:
    _, response = ask(ROUTER, method, path)
    assert response.status == status
    assert response.headers.get("allow") == allow


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ("", None),
        ("identity", None),
        ("Identity, identity", None),
        ("gzip", "gzip"),
        ("GZIP", "gzip"),
        ("identity, br", "br"),
        ("identity;q=1", "identity;q=1"),
    ],
)
def test_compressed_bodies(value: str, refused: str | None) -> None:
    """Refused by their head, in the shape of the surface, behind the guard."""
    routes = [Route("POST", "/v1/messages", echo, Messages())]
    for router in (Router(routes), Router(routes, Policy(api_key="k"))):
        request = Request(
            "POST", "/v1/messages", headers=Headers({"content-encoding": value, "x-api-key": "k"})
        )
        answer = routing.admit(router, request)
        if refused is None:
            assert answer is None
            continue
        assert answer is not None and answer.status == 415
        error = json.loads(answer.body)
        assert (
            error["type"] == "error"
            and f"Content-Encoding {refused!r} is not" in error["error"]["message"]
        )
    if refused is not None:
        assert ask(router, "POST", "/v1/messages", content_encoding=value)[1].status == 401


def test_the_guard_in_order() -> None:
    router = Router(
        [Route("POST", "/v1/messages", echo), Route("GET", "/health", echo)],
        Policy(api_key="k", cors_origins=["https://a.test"], open_paths=["/health"]),
    )
    origin = {"origin": "https://a.test"}
    preflight = origin | {"access_control_request_method": "POST"}

    request, response = ask(router, "OPTIONS", "/v1/messages/", **preflight)
    fields = dict(request.reply_fields) | dict(response.headers)
    assert response.status == 204
    assert fields["access-control-allow-origin"] == "https://a.test"
    assert fields["access-control-allow-methods"] == "OPTIONS, POST"

    request, response = ask(router, "OPTIONS", "/v1/messages", **preflight | {"origin": "null"})
    assert response.status == 403
    assert "access-control-allow-origin" not in dict(request.reply_fields)

    request, response = ask(router, "POST", "/v1/messages", **origin)  # readable for the page
    assert response.status == 401
    assert dict(request.reply_fields)["access-control-allow-origin"] == "https://a.test"

    assert ask(router, "POST", "/v1/messages", **origin, x_api_key="k")[1].status == 200
    assert (
        ask(router, "POST", "/v1/messages", origin="https://b.test", x_api_key="k")[1].status == 403
    )
    assert (
        ask(router, "POST", "/v1/messages", x_api_key="k", sec_fetch_mode="cors")[1].status == 200
    )
    assert ask(router, "GET", "/health/")[1].status == 200
    assert ask(router, "OPTIONS", "/v1/messages")[1].status == 204
    assert ask(router, "GET", "/none")[1].status == 401
    assert ask(router, "GET", "/none", x_api_key="k")[1].status == 404

    stranger = Request("GET", "/health", host="a.test", local_address="127.0.0.1")
    refusal = routing.admit(router, stranger)
    assert refusal is not None and refusal.status == 403
