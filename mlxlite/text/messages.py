"""What clients send as `messages`, turned into what chat templates read (floor 1, column "text").

Every surface translates its request into OpenAI-shaped messages; `normalise_messages` checks them
and gives them the one shape that templates are written for (spec 10 section 6, decision D12). It
runs before the model is touched: a wrong value is a BadRequest whose `param` is the path of the
field, such as `messages[2].content`. Unknown fields pass through: the template may read them.

    in   {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"text": "brief"}]}
    out  {"role": "system", "content": "Be brief"}

The second half holds the repairs for templates that refuse a sequence of roles; `template` tries
them. All functions are pure and never change their input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxlite.errors import BadRequest
from mlxlite.types import JSON

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_MEDIA = ("image", "audio", "video", "file")  # part types that hold one of these words are media
_CONTENT_FREE_ROLES = ("assistant", "tool")  # calls without words; a tool that says nothing
_PARAGRAPH = "\n\n"


# --------------------------------------------------------------------------------- normalisation


def normalise_messages(messages: JSON, *, knows_developer: bool = False) -> list[Message]:
    """Checked copies of the messages, ready for a template.

    - role: developer becomes system unless the template knows it (F33); the legacy `function`
      becomes tool.
    - content: parts are joined to one string (F37); null is "" (F35), as templates print None.
    - tool_calls: arguments become an object where they are JSON of one; else the raw string stays
      (F38 overrides spec 10 section 6.3). A legacy `function_call` becomes a call.
    - reasoning of the history goes out under both of its names (spec 30 section 9).
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRequest("messages required: a non-empty list of {role, content}", param="messages")
    return [
        _normalise(message, f"messages[{n}]", knows_developer) for n, message in enumerate(messages)
    ]


def _normalise(message: JSON, at: str, knows_developer: bool) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(at, "an object", message)
    # Null means absent (D12): clients send back our own answers with every unset field spelled out.
    out: Message = {key: value for key, value in message.items() if value is not None}

    # 1. Role
    role = out.get("role")
    if role == "function":
        role = "tool"
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"{at}.role must be one of {', '.join(ROLES)}, not {_show(message.get('role'))}",
            param=f"{at}.role",
        )
    if role == "developer" and not knows_developer:
        role = "system"
    out["role"] = role

    # 2. Content
    content = out.get("content")
    if content is None and role not in _CONTENT_FREE_ROLES:
        raise BadRequest(f"{at}.content is missing", param=f"{at}.content")
    out["content"] = _join_content(content, f"{at}.content")

    # 3. Names and reasoning
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if key in out and not isinstance(out[key], str):
            raise _wrong(f"{at}.{key}", "a string", out[key])
    if role == "assistant":
        reasoning = out.get("reasoning", out.get("reasoning_content"))
        if reasoning is not None:
            out["reasoning"] = out["reasoning_content"] = reasoning

    # 4. Calls. An empty list is left out: some templates take its presence for calls.
    calls = _normalise_calls(out.pop("tool_calls", []), f"{at}.tool_calls")
    if "function_call" in out:
        legacy = _normalise_function(out.pop("function_call"), f"{at}.function_call")
        calls.append({"type": "function", "function": legacy})
    if calls:
        out["tool_calls"] = calls
    return out


def _join_content(content: JSON, at: str) -> str:
    """Content as one string. Text parts of any name are concatenated; media is refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _wrong(at, "a string or a list of parts", content)
    return "".join(_part_text(part, f"{at}[{n}]") for n, part in enumerate(content))


def _part_text(part: JSON, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _wrong(at, "an object", part)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise _wrong(f"{at}.type", "a string", kind)
    medium = next((word for word in _MEDIA if word in kind), None)
    if medium is not None:
        raise BadRequest(
            f"{at}: this model reads text only, not {medium} parts", param=f"{at}.type"
        )
    # A refusal of an earlier answer is text under its own key.
    key = "refusal" if kind == "refusal" and "text" not in part else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise BadRequest(
            f"{at}: a part of type {_show(kind)} must have a string {key}", param=f"{at}.{key}"
        )
    return text


def _normalise_calls(calls: JSON, at: str) -> list[Message]:
    if not isinstance(calls, list | tuple):
        raise _wrong(at, "a list", calls)
    out = []
    for n, call in enumerate(calls):
        here = f"{at}[{n}]"
        if not isinstance(call, Mapping):
            raise _wrong(here, "an object", call)
        for key in ("id", "type"):
            if not isinstance(call.get(key) or "", str):
                raise _wrong(f"{here}.{key}", "a string", call[key])
        function = _normalise_function(call.get("function"), f"{here}.function")
        kept = {key: value for key, value in call.items() if value is not None}
        out.append({**kept, "type": "function", "function": function})
    return out


def _normalise_function(function: JSON, at: str) -> Message:
    if not isinstance(function, Mapping):
        raise _wrong(at, "an object", function)
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{at}.name", "a string", function.get("name"))
    arguments = _parse_arguments(function.get("arguments"), f"{at}.arguments")
    return {**function, "arguments": arguments}


def _parse_arguments(arguments: JSON, at: str) -> JSON:
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise _wrong(at, "a JSON string or an object", arguments)
    if not arguments.strip():  # a call without arguments (spec 30 section 5.1)
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # F38: what the model once wrote need not be JSON
        return arguments
    return value if isinstance(value, dict) else arguments


def _wrong(at: str, expected: str, given: JSON) -> BadRequest:
    return BadRequest(f"{at} must be {expected}, not {_show(given)}", param=at)


def _show(value: JSON) -> str:
    """A value in an error message: short, and never the client's whole text."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 40 else value[:40] + "...")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return "an object" if isinstance(value, Mapping) else "a list"


# ----------------------------------------------------------------------------------- tool schemas

_TYPE_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}


def typed_tool_schemas(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the tools in which every schema node says its `type` (spec 10 section 6).

    Templates upper-case the type and fail on a node without one. What is no schema is left as it
    is: judging tools is the surface's work.
    """
    try:
        return [_typed_tool(tool) for tool in tools]
    except RecursionError:
        raise BadRequest("tools: a schema is nested too deeply", param="tools") from None


def _typed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(tool)
    if isinstance(out.get("function"), Mapping):
        out["function"] = _typed_tool(out["function"])
    parameters = out.get("parameters")
    if isinstance(parameters, Mapping):
        typed = _typed(parameters)
        if typed["type"] == "string" and "type" not in parameters:
            typed["type"] = "object"  # arguments are an object, whatever else is unsaid
        out["parameters"] = typed
    return out


def _typed(schema: JSON) -> JSON:
    if not isinstance(schema, Mapping):
        return schema  # true and false are schemas too, and have no type
    out = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), Mapping):
            out[key] = _typed(out[key])
    for key in ("items", "prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(out.get(key), list | tuple):
            out[key] = [_typed(item) for item in out[key]]
    if isinstance(out.get("properties"), Mapping):
        out["properties"] = {name: _typed(node) for name, node in out["properties"].items()}
    if out.get("type"):
        return out
    out.pop("type", None)
    return {"type": _inferred_type(schema), **out}


def _inferred_type(schema: Mapping[str, Any]) -> JSON:
    """The type of a node that lacks one, from the first clue of spec 10 section 6."""
    values = schema.get("enum")
    if isinstance(values, list | tuple) and values:
        return _TYPE_NAMES.get(type(values[0]), "string")
    if "const" in schema:
        return _TYPE_NAMES.get(type(schema["const"]), "string")
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    for key in ("anyOf", "oneOf", "allOf"):
        options = [option for option in schema.get(key) or () if isinstance(option, Mapping)]
        for option in options:
            if option.get("type"):
                return option["type"]
        if options:
            return _inferred_type(options[0])
    return "string"


# ------------------------------------------------------------------ repairs for strict templates


def merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Joins neighbouring turns of one speaker by a blank line (F31). Calls stay apart."""
    out: list[Message] = []
    for message in messages:
        if out and _can_merge(out[-1], message):
            out[-1] = _merged(out[-1], message)
        else:
            out.append(message)
    return out


def _can_merge(first: Message, second: Message) -> bool:
    return (
        first["role"] == second["role"]
        and first["role"] != "tool"
        and "tool_calls" not in first
        and "tool_calls" not in second
    )


def _merged(first: Message, second: Message) -> Message:
    out = {**second, **first}
    for key in ("content", "reasoning", "reasoning_content"):
        texts = [message[key] for message in (first, second) if message.get(key)]
        if key in out:
            out[key] = _PARAGRAPH.join(texts)
    return out


def gather_system(messages: Sequence[Message]) -> list[Message]:
    """One system message, at the front, with the text of all of them."""
    system, others = _split_system(messages)
    if system is None:
        return others
    return [{"role": "system", "content": system}, *others]


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """No system message: its text opens the first user turn (F32), or is one if there is none."""
    system, others = _split_system(messages)
    if system is None:
        return others
    for n, message in enumerate(others):
        if message["role"] == "user":
            folded = _PARAGRAPH.join(text for text in (system, message["content"]) if text)
            others[n] = {**message, "content": folded}
            return others
    return [{"role": "user", "content": system}, *others]


def _split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    is_system = [message["role"] in ("system", "developer") for message in messages]
    others = [message for message, yes in zip(messages, is_system, strict=True) if not yes]
    if not any(is_system):
        return None, others
    texts = [message["content"] for message, yes in zip(messages, is_system, strict=True) if yes]
    return _PARAGRAPH.join(text for text in texts if text), others
