"""Which tools an answer may call, and whether it must: `tool_choice` (floor 2, decision D8).

    "auto" | "none" | "required"
    {"type": "function", "function": {"name": "add"}}                      flat in Responses
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}  there too

Tools that are not allowed are as if they had not been sent: the model is not told of them. Tools
that are no functions are skipped, as they are in `tools`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxlite import fields
from mlxlite.errors import BadRequest
from mlxlite.fields import Field
from mlxlite.types import JSON

MODE = Field("mode", str, "of the allowed tools", choices=("auto", "required"))
TOOLS = Field("tools", list, "the allowed ones, by their names")

Functions = tuple[Mapping[str, JSON], ...]


def take_tool_choice(body: Mapping[str, JSON], tools: Functions) -> tuple[Functions, str | None]:
    """The tools of an answer, and the one that it must call: empty for any, None if it need not.

    tools: those of the body. Raises BadRequest naming the field.
    """
    name = fields.TOOL_CHOICE.name
    choice = fields.take(body, fields.TOOL_CHOICE)
    if choice in (None, "auto"):
        return tools, None
    if choice == "none":
        return (), None
    if choice == "required":
        return _needed(tools, name), ""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    wanted = _function_name(choice) if kind == "function" else None
    if not wanted:
        raise BadRequest(
            f"{name} must be auto, none, required, name a function, or allow some; other choices "
            "are not supported",
            param=name,
        )
    if wanted not in _names(_needed(tools, name)):
        raise BadRequest(f"{name} names {wanted[:64]!r}, which is none of the tools", param=name)
    return tools, wanted


def _allowed(choice: Mapping[str, Any], tools: Functions) -> tuple[Functions, str | None]:
    at = fields.TOOL_CHOICE.name
    if (given := choice.get("allowed_tools")) is not None:
        at += ".allowed_tools"
        if not isinstance(given, dict):
            raise BadRequest(f"{at} must be of type object", param=at)
        choice = given
    mode = fields.take(choice, MODE, f"{at}.")
    listed = fields.take(choice, TOOLS, f"{at}.")
    for field, value in ((MODE, mode), (TOOLS, listed)):
        if value is None:
            raise BadRequest(f"{at}.{field.name} is missing", param=f"{at}.{field.name}")
    known, names = _names(tools), set()
    for n, tool in enumerate(listed):
        where = f"{at}.tools[{n}]"
        if not isinstance(tool, dict):
            raise BadRequest(f"{where} must be of type object", param=where)
        if tool.get("type", "function") != "function":
            continue
        name = _function_name(tool)
        if not name:
            raise BadRequest(f"{where} must name a function", param=where)
        if name not in known:
            why = f"{where} names {name[:64]!r}, which is none of the tools"
            raise BadRequest(why, param=where)
        names.add(name)
    found = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if mode == "auto":
        return found, None
    return _needed(found, f"{at}.tools"), ""


def _function_name(choice: Mapping[str, Any]) -> str | None:
    """The name in Chat's shape, or flat."""
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _needed(tools: Functions, field: str) -> Functions:
    if not tools:
        raise BadRequest(f"{field} asks for a call, but there are no tools", param=field)
    return tools


def _names(tools: Sequence[Mapping[str, JSON]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}
