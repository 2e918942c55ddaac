"""One call, exactly, or nothing: the guard of the fill session (spec 30 section 6).

Unlike the streaming grammars these parsers forgive nothing: the whole text is one block, the name
is known, no key comes twice, nothing stands between the tags, and no repair of any kind is made.
What one accepts can be replayed byte for byte.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

`markup_of` gives the markers and the parser of a family. There are none for calls without an
opening marker (Llama 3), and for those that only a header tells from thinking (Harmony): what fill
expects of these is checked by the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from mlxlite.text.tools.format import Tools
from mlxlite.text.tools.functiongemma import FunctionGemma
from mlxlite.text.tools.gemma4 import Gemma4
from mlxlite.text.tools.harmony import spoken_answer, spoken_call
from mlxlite.text.tools.pythonic import list_calls
from mlxlite.text.tools.values import decode_value
from mlxlite.types import JSON

Call = tuple[str, dict[str, JSON]]  # name and arguments
Parser = Callable[[str, Tools], Call | None]

_BLOCK = re.compile(r"\s*<tool_call>(.*)</tool_call>\s*", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?tool_call>", re.IGNORECASE)
_FUNCTION = re.compile(r"<function=([^\s>]+)>\s*(.*)</function>", re.DOTALL | re.IGNORECASE)
_PARAMETER = re.compile(r"<parameter=([^\s>]+)>(?>(.*?)</parameter>)\s*", re.DOTALL | re.IGNORECASE)
_NAME = re.compile(r"([^\s<>]+)\s*")
_PAIR = re.compile(
    r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(?>(.*?)</arg_value>)\s*",
    re.DOTALL | re.IGNORECASE,
)
_INVOKE = re.compile(r'<invoke name="([^">]+)">\s*(.*)</invoke>', re.DOTALL)
_NAMED_PARAMETER = re.compile(r'<parameter name="([^">]+)">(?>(.*?)</parameter>)\s*', re.DOTALL)
_ATTRIBUTE_FUNCTION = re.compile(r'<function name="([^">]+)">\s*(.*)</function>', re.DOTALL)
_PARAM = re.compile(r'<param name="([^">]+)">(?>(.*?)</param>)\s*', re.DOTALL)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
    r"(.*)<\|tool_call_end\|>",
    re.DOTALL,
)
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\s<]+)\n```json\n(.*)\n```"
    r"|([^\s<]+)<｜tool▁sep｜>(.*))<｜tool▁call▁end｜>",
    re.DOTALL,
)
_MISTRAL = re.compile(r"([\w.-]+)\[ARGS\](.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Markup:
    """What frames a call of one family, and what reads it.

    closer: empty where a call ends with the answer. value_closers: tags that end an argument's
    value. parse: of a text from opener to closer.
    """

    opener: str
    closer: str
    parse: Parser
    value_closers: tuple[str, ...] = ()


def markup_of(family: str) -> Markup | None:
    """By the family's name in `families`; None if its calls are not served."""
    return _MARKUPS.get(family)


def spoken_of(family: str) -> tuple[Callable[[str, str], str], Callable[[str], str]] | None:
    """How a family's model writes a call and an answer, where its template cannot tell."""
    return (spoken_call, spoken_answer) if family == "harmony" else None


# ------------------------------------------------------------------------------ <tool_call> blocks


def strict_call(text: str, tools: Tools) -> Call | None:
    """Name and arguments of the one call that a text is, or None: JSON, function elements or
    key/value elements in `<tool_call>`."""
    block = _BLOCK.fullmatch(text)
    if block is None:
        return None
    body = block.group(1).strip()
    try:
        call = _json_call(body) if body.startswith("{") else _xml_call(body, tools)
    except (ValueError, RecursionError):
        return None
    return call if call is not None and call[0] in tools else None


def _json_call(body: str) -> Call | None:
    return _envelope_call(_loads(body))


def _envelope_call(envelope: JSON) -> Call | None:
    if not isinstance(envelope, dict):
        return None
    if isinstance(envelope.get("function"), Mapping):
        envelope = {**envelope, **envelope["function"]}
    name, arguments = envelope.get("name"), envelope.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _loads(arguments)
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments


def _xml_call(body: str, tools: Tools) -> Call | None:
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
    return _with_elements(name, rest, element, tools)


def _with_elements(name: str, rest: str, element: re.Pattern[str], tools: Tools) -> Call | None:
    """A call whose arguments are elements (groups: key, value), one after the other."""
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


def _loads(text: str) -> JSON:
    """Strict JSON. Raises ValueError."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key comes twice")
    return out


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# -------------------------------------------------------------------------------- other families


def _framed(opener: str, closer: str, parse: Parser, *value_closers: str) -> Markup:
    """A markup whose parser gets what stands between the markers, and may raise ValueError."""

    def parse_block(text: str, tools: Tools) -> Call | None:
        text = text.strip()
        if not text.startswith(opener) or not text.endswith(closer):
            return None
        body = text[len(opener) : len(text) - len(closer)].strip()
        if opener in body or (closer and closer in body):
            return None
        try:
            call = parse(body, tools)
        except (ValueError, RecursionError):
            return None
        return call if call is not None and call[0] in tools else None

    return Markup(opener, closer, parse_block, value_closers)


def _element_call(function: re.Pattern[str], element: re.Pattern[str]) -> Parser:
    """A parser of a function element (groups: name, rest) with elements in it."""

    def parse(body: str, tools: Tools) -> Call | None:
        found = function.fullmatch(body)
        if found is None:
            return None
        return _with_elements(found.group(1), found.group(2), element, tools)

    return parse


def _attribute_call(body: str, tools: Tools) -> Call | None:
    # The frame is a part of the element here: MiniCPM's function has no block around it.
    return _element_call(_ATTRIBUTE_FUNCTION, _PARAM)(f'<function name="{body}</function>', tools)


def _head_call(head: re.Pattern[str]) -> Parser:
    """A parser of a name and a JSON object (groups: both, in one of several shapes)."""

    def parse(body: str, tools: Tools) -> Call | None:
        found = head.fullmatch(body)
        if found is None:
            return None
        name, text = (part for part in found.groups() if part is not None)
        arguments = _loads(text)
        return (name, arguments) if isinstance(arguments, dict) else None

    return parse


def _mistral_call(body: str, tools: Tools) -> Call | None:
    if body.startswith("["):  # the older shape, a list
        calls = _loads(body)
        return _envelope_call(calls[0]) if len(calls) == 1 else None
    return _head_call(_MISTRAL)(body, tools)


def _gemma_call(reader: Gemma4) -> Parser:
    def parse(body: str, tools: Tools) -> Call | None:
        return _only(reader.calls(body, _loads))

    return parse


def _pythonic_call(body: str, tools: Tools) -> Call | None:
    return _only(list_calls(body, is_strict=True))


def _only(calls: list[tuple[str, str]] | None) -> Call | None:
    """The one call of a list whose arguments are JSON text."""
    if calls is None or len(calls) != 1:
        return None
    ((name, arguments),) = calls
    return name, json.loads(arguments)


class _PlainFunctionGemma(FunctionGemma):
    bare_text = False  # a bare word is no string here


_TOOL_CALL = Markup("<tool_call>", "</tool_call>", strict_call, ("</parameter>", "</arg_value>"))
_MARKUPS = {
    **dict.fromkeys(("hermes", "qwen_xml", "glm", "generic"), _TOOL_CALL),
    "minicpm": _framed('<function name="', "</function>", _attribute_call, "</param>"),
    "minimax": _framed(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _element_call(_INVOKE, _NAMED_PARAMETER),
        "</parameter>",
    ),
    "gemma4": _framed(Gemma4.opener, Gemma4.closer, _gemma_call(Gemma4())),
    "functiongemma": _framed(
        FunctionGemma.opener, FunctionGemma.closer, _gemma_call(_PlainFunctionGemma())
    ),
    "pythonic": _framed("<|tool_call_start|>", "<|tool_call_end|>", _pythonic_call),
    "llama4": _framed("<|python_start|>", "<|python_end|>", _pythonic_call),
    "kimi": _framed(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _head_call(_KIMI)
    ),
    "deepseek": _framed("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _head_call(_DEEPSEEK)),
    "mistral": _framed("[TOOL_CALLS]", "", _mistral_call),
}
