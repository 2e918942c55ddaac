"""JSON passed on while it is being written (floor 1, column "text"; decision D11).

A call's arguments may be a 20 kB file. The client gets them as the model writes them, but checked
and compact: white space between tokens is dropped, escapes are normalised, and nothing is sent
whose meaning later text could still change. A key is sent together with the start of its value, so
that closing the open brackets always gives valid JSON.

    model    { "path": "a.py", "text": "x = \\u00e9
    sent     {"path":"a.py","text":"x = é            and "} closes it

Repairs that need no second thought are made on the way: line ends inside strings, backslashes that
begin no escape (F2), Python's True, False and None, a comma before a closing bracket. Whatever else
is wrong is Broken; the grammar then collects the rest of its block and asks `repair`.

Recursion would follow the model's nesting, so an explicit stack does, of bounded depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from mlxlite.text.tools.format import Broken, Ended, Markers, Reader, Reading
from mlxlite.types import JSON

MAX_DEPTH = 100  # brackets; json.loads gives up near 1000
MAX_SCALAR_CHARS = 1000  # Python refuses to read integers of more than 4300 digits

_WORD = re.compile(r"[^\s,:{}\[\]\"'<>|`]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {
    **{word: word for word in ("true", "false", "null")},
    **{"True": "true", "False": "false", "None": "null"},
}
_PLAIN = re.compile(r'[^"\\<\[\x00-\x1f\ud800-\udfff]+')  # `<` and `[`: a marker may begin
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def _mute(text: str) -> None:
    pass


def copy_value(
    r: Reader, ending: Markers | None, send: Callable[[str], None] = _mute
) -> Reading[None]:
    """Reads one JSON value and sends its compact text. Keeps `r.closers` unless muted.

    ending: markers that may mean, inside a string, that the block ended (see `Reader.hold`).
    """
    closers = [] if send is _mute else r.closers
    lead = ""  # the comma and the key that are due before the next value
    while True:
        # 1. One value; after an opening bracket, its first item.
        char = yield from r.solid()
        if char in "{[":
            if len(closers) == MAX_DEPTH:
                raise Broken
            r.take(1)
            closers.append("}" if char == "{" else "]")
            send(lead + char)
            lead = ""
            if (yield from r.solid()) != closers[-1]:
                if closers[-1] == "}":
                    lead = yield from _key(r)
                continue
        elif char == '"':
            r.take(1)
            closers.append('"')
            send(lead + '"')
            yield from _string(r, ending, send)
            closers.pop()
            send('"')
        else:
            send(lead + (yield from _scalar(r)))
        # 2. What may follow it: closing brackets, then a comma and the next value.
        while True:
            if not closers:
                return
            char = yield from r.solid()
            if char == ",":
                r.take(1)
                char = yield from r.solid()
                if char != closers[-1]:
                    lead = "," + ((yield from _key(r)) if closers[-1] == "}" else "")
                    break
            if char != closers[-1]:
                raise Broken
            r.take(1)
            closers.pop()
            send(char)


def read_string(r: Reader) -> Reading[str]:
    """A JSON string, decoded."""
    value: JSON = json.loads((yield from _quoted(r)), strict=False)
    assert isinstance(value, str)
    return value


def _key(r: Reader) -> Reading[str]:
    """A key and its colon, as compact text."""
    key = yield from _quoted(r)
    if (yield from r.solid()) != ":":
        raise Broken
    r.take(1)
    return key + ":"


def _quoted(r: Reader) -> Reading[str]:
    if (yield from r.solid()) != '"':
        raise Broken
    r.take(1)
    parts: list[str] = []
    yield from _string(r, None, parts.append)
    return f'"{"".join(parts)}"'


def _scalar(r: Reader) -> Reading[str]:
    word = yield from r.run(_WORD, MAX_SCALAR_CHARS)
    if r.ended and r.at == len(r.text):
        raise Ended  # it may have been meant to go on: for the repair to decide
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    raise Broken


def _string(r: Reader, ending: Markers | None, send: Callable[[str], None]) -> Reading[None]:
    """The rest of a string after its opening quote, which is taken to the closing one."""
    while True:
        found = _PLAIN.match(r.text, r.at)
        if found:
            send(r.take(found.end() - r.at))
        char = yield from r.look(1)
        if _PLAIN.fullmatch(char):
            continue
        if char == '"':
            r.take(1)
            return
        if char == "\\":
            escape = yield from _escape(r)
            send(escape)
        else:
            if ending is not None and char in "<[" and (yield from r.starts(ending)):
                if send is not _mute:
                    r.hold()
            # A control character, or half a surrogate pair, is escaped.
            send(r.take(1) if char in "<[" else json.dumps(r.take(1))[1:-1])


def _escape(r: Reader) -> Reading[str]:
    """One escape in its canonical form; a backslash that begins none stands for itself."""
    char = (yield from r.look(2))[1]
    if char in '"\\bfnrt':
        return r.take(2)
    if char in "/'":  # a quote needs no escape, but is often given one
        return r.take(2)[1]
    if char != "u" or not _HEX.fullmatch((yield from r.look(6))[2:]):
        r.take(1)
        return "\\\\"
    code = int(r.take(6)[2:], 16)
    if 0xD800 <= code < 0xDC00:
        pair = yield from r.look(2)
        if pair == "\\u":
            low = (yield from r.look(6))[2:]
            if _HEX.fullmatch(low) and 0xDC00 <= int(low, 16) < 0xE000:
                r.take(6)
                return chr(0x10000 + (code - 0xD800) * 0x400 + int(low, 16) - 0xDC00)
    if 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"
    return json.dumps(chr(code), ensure_ascii=False)[1:-1]
