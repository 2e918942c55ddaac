"""One call, exactly, or nothing: the guard of the fill session (spec 30 section 6).

Unlike the streaming grammars this parser forgives nothing: the whole text is one block, the name is
known, no key comes twice, nothing stands between the tags, and no repair of any kind is made. What
it accepts can be replayed byte for byte.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from mlxlite.text.tools.format import Tools
from mlxlite.text.tools.values import decode_value
from mlxlite.types import JSON

_BLOCK = re.compile(r"\s*<tool_call>(.*)</tool_call>\s*", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?tool_call>", re.IGNORECASE)
_FUNCTION = re.compile(r"<function=([^\s>]+)>\s*(.*)</function>", re.DOTALL | re.IGNORECASE)
_PARAMETER = re.compile(r"<parameter=([^\s>]+)>(?>(.*?)</parameter>)\s*", re.DOTALL | re.IGNORECASE)
_NAME = re.compile(r"([^\s<>]+)\s*")
_PAIR = re.compile(
    r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(?>(.*?)</arg_value>)\s*",
    re.DOTALL | re.IGNORECASE,
)


def strict_call(text: str, tools: Tools) -> tuple[str, dict[str, JSON]] | None:
    """Name and arguments of the one call that a text is, or None."""
    block = _BLOCK.fullmatch(text)
    if block is None:
        return None
    body = block.group(1).strip()
    try:
        call = _json_call(body) if body.startswith("{") else _xml_call(body, tools)
    except (ValueError, RecursionError):
        return None
    return call if call is not None and call[0] in tools else None


def _json_call(body: str) -> tuple[str, dict[str, JSON]] | None:
    envelope = json.loads(body, object_pairs_hook=_unique, parse_constant=_refuse)
    if isinstance(envelope.get("function"), Mapping):
        envelope = {**envelope, **envelope["function"]}
    name, arguments = envelope.get("name"), envelope.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = json.loads(arguments, object_pairs_hook=_unique, parse_constant=_refuse)
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments


def _xml_call(body: str, tools: Tools) -> tuple[str, dict[str, JSON]] | None:
    if _TAG.search(body):  # a second block
        return None
    function = _FUNCTION.fullmatch(body)
    if function is not None:
        name, rest, element = function.group(1), function.group(2), _PARAMETER
    else:
        head = _NAME.match(body)
        if head is None:
            return None
        name, rest, element = head.group(1), body[head.end() :], _PAIR
    arguments: dict[str, JSON] = {}
    at = 0
    while at < len(rest):
        pair = element.match(rest, at)
        key = pair.group(1).strip() if pair else ""
        if pair is None or not key or key in arguments:
            return None
        arguments[key] = decode_value(pair.group(2), tools.schema(name, key))
        at = pair.end()
    return name, arguments


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key comes twice")
    return out


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
