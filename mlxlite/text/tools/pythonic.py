"""Calls as a Python list: LFM2 between markers, Llama 4 without (spec 30 section 7).

    <|tool_call_start|>[add(a=1, note="it's, fine"), files.read(path='a.py')]<|tool_call_end|>
    [add(a=1)]                       Llama 4, also between <|python_start|> and <|python_end|>

Values are literals of Python or JSON, nothing is evaluated. Only keyword arguments have a name, so
positional ones make the list no call. The list is judged as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlxlite.text.tools.format import Broken, Ended, Markers, Reader, Reading, Refused
from mlxlite.text.tools.hermes import rest_of_block
from mlxlite.text.tools.notation import Notation
from mlxlite.text.tools.repair import compact, loads, repaired
from mlxlite.text.tools.shapes import members
from mlxlite.text.tools.writing import Function, Inexpressible, Rules, Writing, one_of, quoted
from mlxlite.types import JSON

_NAME = re.compile(r"[\w.-]*")
_CALL = re.compile(r"\s*([\w.-]+)\s*\(\s*")
_KEY = re.compile(r"\s*(\w+)\s*=\s*")
_AFTER_VALUE = re.compile(r"\s*([,)])\s*")
_AFTER_CALL = re.compile(r"\s*([,\]])\s*")
# One string, or a stretch without brackets, commas and quotes.
_STRING = r""""(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'"""
_PART = re.compile(rf"""{_STRING}|[^\[\](){{}}"',]+|(.)""", re.DOTALL)
_OUTSIDE = re.compile(r"""[^\[\](){}"']+""")
_INSIDE = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_MOST_NAME_CHARS = 128


class Pythonic:
    """See the module."""

    openers: tuple[str, ...] = ("<|tool_call_start|>",)
    starters: Sequence[str] = ()
    closer = "<|tool_call_end|>"

    def __init__(self) -> None:
        self.markers = (*self.openers, *self.starters, self.closer)
        self._closer = Markers(self.closer)

    def read(self, r: Reader, opener: str) -> Reading[None]:
        start = r.mark()
        try:
            if (yield from r.solid()) != "[":
                raise Broken
            yield from _take_balanced(r)
            text = r.since(start)
        except (Broken, Ended):
            text = yield from rest_of_block(r, start, self._closer)
        _make_calls(r, text)
        if (yield from r.accept(self._closer)):
            r.spend()


class Llama4(Pythonic):
    """The list at the start of an answer, mostly without markers."""

    openers = ("<|python_start|>",)
    starters = ("[",)
    closer = "<|python_end|>"

    def read(self, r: Reader, opener: str) -> Reading[None]:
        if opener != "[":
            yield from super().read(r, opener)
            return
        # A list of anything else is an ordinary answer, and must not be held.
        yield from r.solid()
        name = yield from r.run(_NAME, _MOST_NAME_CHARS)
        if name not in r.tools or (yield from r.solid()) != "(":
            raise Broken
        r.put_back_all()
        yield from _take_balanced(r)
        _make_calls(r, r.unspent())


def _take_balanced(r: Reader) -> Reading[None]:
    """Takes text from an opening bracket to the one that closes it, strings left aside."""
    depth = 0
    while True:
        found = _OUTSIDE.match(r.text, r.at)
        if found:
            r.take(found.end() - r.at)
        char = yield from r.look(1)
        if char in _INSIDE:
            r.take(1)
            yield from _take_string(r, char)
            continue
        if not _OUTSIDE.match(char):
            r.take(1)
            depth += 1 if char in "[({" else -1
            if depth <= 0:
                return


def _take_string(r: Reader, quote: str) -> Reading[None]:
    while True:
        found = _INSIDE[quote].match(r.text, r.at)
        if found:
            r.take(found.end() - r.at)
        char = yield from r.look(1)
        if char == quote:
            r.take(1)
            return
        if char == "\\":
            yield from r.look(2)
            r.take(2)


def _make_calls(r: Reader, text: str) -> None:
    calls = list_calls(text)
    if not calls:
        raise Broken
    if any(name not in r.tools for name, _ in calls):
        raise Refused
    for name, arguments in calls:
        r.whole(name, arguments)


def list_calls(text: str, *, is_strict: bool = False) -> list[tuple[str, str]] | None:
    """Names and compact arguments of the calls in a list, or None if it is no such list.

    is_strict: no key twice, and no value that has to be guessed at: raises ValueError.
    """
    literal = _plain_literal if is_strict else _literal
    text = text.strip()
    if not text.startswith("["):
        return None
    calls = []
    at = 1
    while True:
        head = _CALL.match(text, at)
        if head is None:
            return None
        name, at = head.group(1), head.end()
        arguments: dict[str, JSON] = {}
        if text[at : at + 1] == ")":
            at += 1
        else:
            while True:
                key = _KEY.match(text, at)
                if key is None:
                    return None
                end = _value_end(text, key.end())
                after = _AFTER_VALUE.match(text, end)
                if after is None or end == key.end():
                    return None
                if is_strict and key.group(1) in arguments:
                    return None
                value = text[key.end() : end].strip()
                arguments[key.group(1)] = literal(value)
                at = after.end()
                if after.group(1) == ")":
                    break
        calls.append((name, compact(arguments)))
        after = _AFTER_CALL.match(text, at)
        if after is None:
            return None
        at = after.end()
        if after.group(1) == "]":
            return calls if at == len(text) else None


def _value_end(text: str, at: int) -> int:
    depth = 0
    while at < len(text):
        part = _PART.match(text, at)
        assert part is not None
        char = part.group(1)
        if char is not None:
            if depth == 0 and char in ",)":
                return at
            depth += (char in "[({") - (char in "])}")
            if depth < 0:
                return at
        at = part.end()
    return at


def _literal(text: str) -> JSON:
    """A literal of JSON or Python; a bare word is text."""
    try:
        return loads(text)
    except ValueError:
        found = repaired(f'{{"v":{text}}}', may_close=False)
        return found[0]["v"] if found and "v" in found[0] else text


_CONSTANTS = {"True": True, "False": False, "None": None}
_PLAIN_STRING = re.compile(r"'([^'\\]*)'")


def _plain_literal(text: str) -> JSON:
    """JSON, a constant of Python or a string without escapes. Raises ValueError for the rest."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    plain = _PLAIN_STRING.fullmatch(text)
    return plain.group(1) if plain else loads(text)


class _Notation(Notation):
    null, true, false = "None", "True", "False"
    comma, colon = ", ", ": "


class _Keywords(_Notation):
    """The arguments themselves."""

    colon = "="

    def key(self, name: str) -> str:
        if re.fullmatch(r"\w+", name) is None:
            raise Inexpressible(f"this model's calls cannot write the key {name[:64]!r}")
        return name

    def other_key(self, named: Sequence[str]) -> str:
        return f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~{one_of(named or [''])}"


@dataclass(frozen=True, kw_only=True)
class _Writing(Writing):
    has_markers: bool

    def starters(self, names: Sequence[str]) -> tuple[str, ...]:
        return () if self.has_markers else tuple(f"[{name}(" for name in names)

    def call(self, rules: Rules, function: Function) -> str:
        self.check_name(function.name)
        found = members(function.schema, function.schema)
        values = _Notation(rules, function.schema)
        row = _Keywords(rules, function.schema).row(found, values)
        return f'{quoted(function.name + "(")} {row} ")"'


WRITING = _Writing(
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    openers=Pythonic.openers,
    opening="<|tool_call_start|>[",
    between=", ",
    closing="]<|tool_call_end|>",
    names=r"[\w.-]{1,128}",
    has_markers=True,
)
WRITING_BARE = _Writing(
    markers=("<|python_start|>", "<|python_end|>"),
    openers=Llama4.openers,
    leads=Llama4.openers,
    opening="[",
    between=", ",
    closing="]",
    names=r"[\w.-]{1,128}",
    has_markers=False,
)
