"""The items of a Responses request's `input`, checked (floor 3).

An item is what the Responses API calls one: a message, a call, its result, reasoning. Items are
what is stored and chained. Errors name the fields that the client wrote, such as
`input[2].content[0].type`. Everything here is pure and never changes its input.

Sources: spec 70 section 6.1, clients.md (Requests 6 to 10).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from mlxlite.errors import BadRequest
from mlxlite.types import JSON

Item = dict[str, Any]

_MEDIA = ("image", "audio", "video", "file")  # part types that hold one of these words are media
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# Traces of tools that run at OpenAI: they hold nothing that a model reads, as their tools do not.
_HOSTED = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "mcp_list_tools",
)  # fmt: skip
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def fresh_id(prefix: str) -> str:
    """`<prefix>_` and 24 hex digits (spec 70 section 6.2)."""
    return f"{prefix}_{secrets.token_hex(12)}"


def read_input(body: Mapping[str, JSON]) -> list[Item]:
    """The items of `input`, checked, each with a type and an id. Raises BadRequest naming a path.

    A reference to an item stays one, for the caller to resolve: it alone knows what is stored.
    """
    value = body.get("input")
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, "input")] if value else []
    if not isinstance(value, list):
        what = "is missing" if value is None else "is neither"
        raise BadRequest(f"input must be a string or a list of items, it {what}", param="input")
    found = []
    for n, item in enumerate(value):
        at = f"input[{n}]"
        if not isinstance(item, dict):
            raise wrong(at, "an object")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is not None:
            found.append(read(item, at))
        elif kind not in _HOSTED:
            known = ", ".join(_READERS)
            raise BadRequest(f"{at}.type must be one of {known}", param=f"{at}.type")
    return found


def _message(item: Item, at: str) -> Item:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        names = "user, assistant, system, developer"
        raise BadRequest(f"{at}.role must be one of {names}", param=f"{at}.role")
    content = item.get("content")
    if content is None and role != "assistant":
        raise BadRequest(f"{at}.content is missing", param=f"{at}.content")
    texts = _texts(content, f"{at}.content")
    if role == "assistant":
        parts: list[JSON] = [
            {"type": "output_text", "text": text, "annotations": []} for text in texts
        ]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    return _item(item, "message", role=role, content=parts, status="completed")


def _call(item: Item, at: str) -> Item:
    arguments = item.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        raise wrong(f"{at}.arguments", "a JSON string")
    namespace = item.get("namespace")
    return _item(
        item,
        "function_call",
        call_id=_string(item, "call_id", at),
        name=_string(item, "name", at),
        **({"namespace": namespace} if isinstance(namespace, str) else {}),
        arguments=arguments or "{}",
        status="completed",
    )


def _output(item: Item, at: str) -> Item:
    call_id = item.get("call_id")
    if not isinstance(call_id or "", str):
        raise wrong(f"{at}.call_id", "a string")
    if item.get("output") is None:
        raise BadRequest(f"{at}.output is missing", param=f"{at}.output")
    text = "".join(_texts(item["output"], f"{at}.output"))
    return _item(
        item, "function_call_output", call_id=call_id or "", output=text, status="completed"
    )


def _custom_call(item: Item, at: str) -> Item:
    """A call of a freeform tool, which earlier turns may hold: its text is the one argument."""
    text = item.get("input")
    if not isinstance(text, str):
        raise wrong(f"{at}.input", "a string")
    return _call({**item, "arguments": json.dumps({"input": text}, ensure_ascii=False)}, at)


def _reasoning(item: Item, at: str) -> Item:
    summary = _texts(item.get("summary"), f"{at}.summary")
    content = _texts(item.get("content"), f"{at}.content")
    text = "\n\n".join(content or summary)
    parts = [{"type": "summary_text", "text": text}] if text else []
    return _item(item, "reasoning", summary=parts)


def _reference(item: Item, at: str) -> Item:
    return {"type": "item_reference", "id": _string(item, "id", at)}


_READERS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "reasoning": _reasoning,
    "item_reference": _reference,
}


def _item(item: Item, kind: str, **content: JSON) -> Item:
    """What is kept of an item; it gets an id if it has none."""
    item_id = item.get("id")
    if not isinstance(item_id, str) or not item_id:
        item_id = fresh_id(_PREFIXES.get(kind, "msg"))
    return {"id": item_id, "type": kind, **content}


def _string(item: Item, name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        at = f"{at}.{name}"
        raise BadRequest(f"{at} must be a string that is not empty", param=at)
    return value


def _texts(content: JSON, at: str) -> list[str]:
    """The texts of content: a string, or a list of parts of any text type. Media is refused."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise wrong(at, "a string or a list of parts")
    return [_part_text(part, f"{at}[{n}]") for n, part in enumerate(content)]


def _part_text(part: JSON, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise wrong(at, "an object")
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise wrong(f"{at}.type", "a string")
    medium = next((word for word in _MEDIA if word in kind), None)
    if medium is not None:
        raise BadRequest(f"{at}.type: this model reads text only, no {medium}", param=f"{at}.type")
    key = "refusal" if kind == "refusal" else "text"
    if kind not in _TEXT_PARTS and kind != "refusal":
        raise BadRequest(f"{at}.type must be input_text or output_text", param=f"{at}.type")
    if not isinstance(part.get(key), str):
        raise wrong(f"{at}.{key}", "a string")
    text: str = part[key]
    return text


def wrong(at: str, expected: str) -> BadRequest:
    return BadRequest(f"{at} must be {expected}", param=at)
