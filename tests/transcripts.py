"""The streams of Anthropic's Messages: read byte by byte, judged by a written grammar, and folded.

    stream    = message_start ping* block* ( end | error )
    block     = thinking | text | tool_use          indices 0, 1, 2, ...
    thinking  = start thinking_delta+ signature_delta stop
    text      = start text_delta* stop
    tool_use  = start input_json_delta+ stop        the fragments joined are the input
    end       = message_delta message_stop          after one block at least

An error may also come inside a block, and is the last frame; nothing follows `end`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
from pydantic import TypeAdapter

from tests.live import LiveApp, Reply

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"

_BLOCK = (
    r"(?:start:thinking (?:thinking_delta )+signature_delta stop "
    r"|start:text (?:text_delta )*stop "
    r"|start:tool_use (?:input_json_delta )+stop )"
)
_OPEN = (
    r"(?:start:thinking (?:thinking_delta )*(?:signature_delta )?"
    r"|start:text (?:text_delta )*|start:tool_use (?:input_json_delta )*)?"
)
COMPLETE = re.compile(rf"message_start (?:ping )*{_BLOCK}+message_delta message_stop ")
BROKEN = re.compile(rf"message_start (?:ping )*{_BLOCK}*{_OPEN}error ")

_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
_MESSAGE = TypeAdapter(anthropic.types.Message)
USAGE = {
    "input_tokens",
    "output_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
}


def ask(server: LiveApp, path: str = MESSAGES, **body: Any) -> Reply:
    """A Messages request; greedy and short unless it says otherwise."""
    hello = [{"role": "user", "content": "hello world"}]
    asked = {"model": "m", "messages": hello, "max_tokens": 12, "temperature": 0, **body}
    return server.ask("POST", path, asked)


def plain(server: LiveApp, **body: Any) -> dict[str, Any]:
    """A whole message, of the type that the official package has for it."""
    reply = ask(server, **body)
    assert reply.status == 200, reply.body
    message: dict[str, Any] = reply.json()
    _MESSAGE.validate_python(message, strict=False)
    assert re.fullmatch("msg_[0-9a-f]{24}", message["id"])
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert set(message["usage"]) - {"output_tokens_details"} == USAGE
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    return message


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream; fails unless each frame is an `event:` and a `data:` line."""
    found = []
    rest = body.decode()
    while rest:
        if rest.startswith(": keep-alive\n"):
            rest = rest.removeprefix(": keep-alive\n")
            continue
        frame, blank, rest = rest.partition("\n\n")
        assert blank and "\r" not in frame
        name, data = frame.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        event = json.loads(data.removeprefix("data: "))
        assert name.removeprefix("event: ") == event["type"]
        found.append(event)
    return found


def stream(server: LiveApp, **body: Any) -> list[dict[str, Any]]:
    reply = ask(server, stream=True, **body)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream"
    assert "request-id" in reply.headers
    return events(reply.body)


def _word(event: dict[str, Any]) -> str:
    kind: str = event["type"]
    if kind == "content_block_start":
        return f"start:{event['content_block']['type']}"
    if kind == "content_block_delta":
        return str(event["delta"]["type"])
    return "stop" if kind == "content_block_stop" else kind


def check(found: list[dict[str, Any]], grammar: re.Pattern[str] = COMPLETE) -> None:
    """The order of events, their types by the official package, and every index."""
    assert grammar.fullmatch("".join(f"{_word(event)} " for event in found)), found
    opened = -1
    for event in found:
        if event["type"] not in ("ping", "error"):
            _EVENT.validate_python(event, strict=False)
        if event["type"] == "content_block_start":
            opened += 1
        if event["type"].startswith("content_block"):
            assert event["index"] == opened
    start = found[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is start["stop_sequence"] is None
    assert set(start["usage"]) == USAGE and start["usage"]["output_tokens"] == 0


def fold(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as clients put it together."""
    check(found)
    message: dict[str, Any] = dict(found[0]["message"])
    content: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
            if content[-1]["type"] == "tool_use":
                assert content[-1]["input"] == {}
                content[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            piece = dict(event["delta"])
            piece.pop("type")
            ((key, value),) = piece.items()
            content[-1][{"partial_json": "input"}.get(key, key)] += value
        elif event["type"] == "message_delta":
            message.update(event["delta"], usage=event["usage"])
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return {**message, "content": content}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same request share."""
    content = [
        {name: value for name, value in block.items() if name != "id"}
        for block in message["content"]
    ]
    return {**message, "id": "", "content": content}


def both(server: LiveApp, **body: Any) -> dict[str, Any]:
    """A whole message; checks that the streamed one is the same."""
    whole = without_ids(plain(server, **body))
    assert without_ids(fold(stream(server, **body))) == whole
    return whole


def refused(reply: Reply, status: int, kind: str) -> str:
    """Check an error in Anthropic's shape; its message."""
    assert reply.status == status, reply.body
    error = reply.json()
    assert error["type"] == "error" and set(error) <= {"type", "error", "request_id"}
    assert set(error["error"]) == {"type", "message"}
    assert error["error"]["type"] == kind
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    message: str = error["error"]["message"]
    return message
