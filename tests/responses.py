"""The streams of OpenAI's Responses: read byte by byte, judged by a written grammar and the types.

    stream    = created queued? in_progress item* end    queued: in the background only
    item      = added body done
    reasoning = summary_part.added summary_text.delta+ summary_text.done summary_part.done
    message   = content_part.added output_text.delta* output_text.done content_part.done
    call      = arguments.delta* arguments.done
    end       = completed | incomplete | failed          after an item at least, unless it failed

A failure may also come inside an item, and is the last frame; nothing follows an end.
"""

from __future__ import annotations

import json
import re
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxlite.types import Finish
from tests.live import LiveApp, Reply
from tests.scripted import ScriptedApp

RESPONSES = "/v1/responses"
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)

_SHORT = {
    "response.created": "created",
    "response.queued": "queued",
    "response.in_progress": "in_progress",
    "response.output_item.added": "added",
    "response.output_item.done": "done",
    "response.reasoning_summary_part.added": "part+",
    "response.reasoning_summary_text.delta": "summary",
    "response.reasoning_summary_text.done": "summary!",
    "response.reasoning_summary_part.done": "part-",
    "response.content_part.added": "content+",
    "response.output_text.delta": "text",
    "response.output_text.done": "text!",
    "response.content_part.done": "content-",
    "response.function_call_arguments.delta": "arguments",
    "response.function_call_arguments.done": "arguments!",
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
}
_ITEM = (
    r"(?:added:reasoning part\+ (?:summary )+summary! part- done "
    r"|added:message content\+ (?:text )*text! content- done "
    r"|added:function_call (?:arguments )*arguments! done )"
)
_OPEN = (
    r"(?:added:reasoning part\+ (?:summary )*|added:message content\+ (?:text )*"
    r"|added:function_call (?:arguments )*)?"
)
COMPLETE = re.compile(rf"created in_progress {_ITEM}+(?:completed|incomplete) ")
QUEUED = re.compile(rf"created queued in_progress {_ITEM}+(?:completed|incomplete) ")
BROKEN = re.compile(rf"created in_progress {_ITEM}*{_OPEN}failed ")
ID = re.compile("(resp|rs|msg|fc)_[0-9a-f]{24}")


def post(app: LiveApp, **body: Any) -> Reply:
    """A Responses request; greedy and short unless it says otherwise."""
    asked = {"model": "m", "input": "hello world", "temperature": 0, **body}
    return app.ask("POST", RESPONSES, asked)


def plain(app: LiveApp, **body: Any) -> dict[str, Any]:
    reply = post(app, **body)
    assert reply.status == 200, reply.body
    whole: dict[str, Any] = reply.json()
    _RESPONSE.validate_python(whole)
    return whole


def streamed(app: LiveApp, **body: Any) -> list[dict[str, Any]]:
    reply = post(app, stream=True, **body)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream"
    return read(reply.body)


def read(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream; fails unless each is one `event:` and one `data:` line (no [DONE])
    and of the type that the official package has for it."""
    found = []
    rest = body.decode()
    while rest:
        if rest.startswith(": keep-alive\n"):
            rest = rest.removeprefix(": keep-alive\n")
            continue
        frame, blank, rest = rest.partition("\n\n")
        assert blank and "\r" not in frame
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and data.startswith("data: ")
        _EVENT.validate_python(event)
        found.append(event)
    return found


def words(events: list[dict[str, Any]]) -> str:
    """The stream as the grammar has it."""
    found = []
    for event in events:
        is_item = event["type"] == "response.output_item.added"
        found.append(_SHORT[event["type"]] + (f":{event['item']['type']}" if is_item else ""))
    return " ".join(found) + " "


def check(events: list[dict[str, Any]], grammar: re.Pattern[str] = COMPLETE) -> dict[str, Any]:
    """Judge a stream by the grammar, its numbers, ids and joined deltas; the final object."""
    assert grammar.fullmatch(words(events)), words(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final: dict[str, Any] = events[-1]["response"]
    assert final["status"] == events[-1]["type"].removeprefix("response.")
    for event in events[:2]:
        opening = event["response"]
        assert (opening["status"], opening["output"]) == ("in_progress", [])
        same = ("model", "instructions", "tools", "metadata", "created_at", "text")
        assert [opening[name] for name in same] == [final[name] for name in same]
        assert opening["id"] == final["id"] and set(opening) == set(final)
    index = -1
    texts: dict[int, str] = {}
    for event in events[2:-1]:
        kind = event["type"]
        item = final["output"][event["output_index"]]
        if kind == "response.output_item.added":
            index += 1
            texts[index] = ""
            assert event["item"]["id"] == item["id"] and event["item"]["status"] == "in_progress"
            assert ID.fullmatch(item["id"])
            empty = {"reasoning": "summary", "message": "content", "function_call": "arguments"}
            assert not event["item"][empty[item["type"]]]
        elif kind == "response.output_item.done":
            assert event["item"] == item
        else:
            assert event["item_id"] == item["id"]
            assert event.get("content_index", 0) == event.get("summary_index", 0) == 0
            assert ("content_index" in event) == (item["type"] == "message")
            assert ("summary_index" in event) == (item["type"] == "reasoning")
        assert event["output_index"] == index, "one item after the other"
        if kind.endswith(".delta"):
            texts[index] += event["delta"]
            assert event["delta"] and (item["type"] != "message" or "logprobs" in event)
        elif kind.endswith(("_text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == texts[index]
    assert [text_of(item) for item in final["output"]] == list(texts.values())
    assert len({item["id"] for item in final["output"]}) == len(final["output"])
    return final


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        found: str = item["arguments"]
        return found
    return "".join(part["text"] for part in item.get("content", item.get("summary")))


def shape(item: dict[str, Any]) -> tuple[Any, ...]:
    """An item without its ids."""
    named = (item["name"],) if item["type"] == "function_call" else ()
    return (item["type"], *named, text_of(item))


def both(
    app: ScriptedApp, text: str, end: Finish = Finish.EOS, **body: Any
) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Shapes of the items and the object; the plain answer is the last object of the stream."""
    app.engine.says(text, 1, end)
    whole = plain(app, **body)
    final = check(streamed(app, **body))
    assert without_ids(whole) == without_ids(final)
    return [shape(item) for item in final["output"]], final


def without_ids(whole: Any) -> Any:
    """The object without what differs from one answer to the next."""
    if isinstance(whole, list):
        return [without_ids(value) for value in whole]
    if not isinstance(whole, dict):
        return whole
    varies = ("id", "call_id", "created_at", "completed_at")
    return {key: without_ids(value) for key, value in whole.items() if key not in varies}
