"""Almost JSON -> JSON: the repair ladder (floor 1, column "text"; spec 30 section 5.4).

Small models write JSON with Python's habits, or run out of tokens inside it. The ladder is climbed
only after strict JSON failed; it tries to load after every rung and stops at the first success.

    ```json                          fenced_wrapper
    Sure: {"a": 1}                   prose_prefix
    {"pattern": "\\d+"}               bad_escapes       (F2: a single backslash means itself)
    {"a": True}                      python_literals
    {"a": 1,}                        trailing_commas
    {"a": [1, 2                      unbalanced_braces
    {'a': 'it\\'s'}                   single_quotes

The rung `name_in_args` belongs to envelopes and is in `hermes`. Tags are for logs and tests; they
never reach a client. Pure functions; a failure is a ValueError or None, whatever the text.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator
from typing import NoReturn

from mlxlite.types import JSON

# A guide repairs on the engine thread: 64 kB of broken code take 8 ms, of quotes alone 250 ms.
MAX_REPAIR_CHARS = 64_000
_LANGUAGE = string.ascii_letters + string.digits + "_-+"
_SURROGATE = re.compile("[\ud800-\udfff]")


# --------------------------------------------------------------------------- strict, both ways


def loads(text: str) -> JSON:
    """Strict JSON of finite numbers, but line ends may stand inside strings. Else ValueError."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)  # 1e999 loads as infinity
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def compact(value: JSON) -> str:
    """A loaded value as compact JSON text; half surrogates stay escaped, as no UTF-8 holds them."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# --------------------------------------------------------------------------------- the ladder


def repaired(text: str, *, may_close: bool = True) -> tuple[JSON, list[str]] | None:
    """The object that a text stands for, and the tags of the rungs that it needed; or None.

    may_close: the text may have been cut off, so open brackets are closed.
    """
    if len(text) > MAX_REPAIR_CHARS:
        return None
    tags: list[str] = []
    for tag, rung in _RUNGS:
        if rung is _closed and not may_close:
            continue
        try:
            better = rung(text)
        except RecursionError:
            return None
        if better != text and tag:
            tags.append(tag)
        text = better
        try:
            value = loads(text)
        except ValueError:
            continue
        return (value, tags) if isinstance(value, dict) else None
    return None


def _without_fence(text: str) -> str:
    if not text.lstrip().startswith("```"):
        return text
    return text.strip()[3:].lstrip(_LANGUAGE).removesuffix("```").strip()


def _without_prose(text: str) -> str:
    """The outermost object alone, if no other bracket stands before it."""
    start = text.find("{")
    if start < 0 or re.search(r"[\[\](<>]", text[:start]):
        return text
    return text[start : start + object_end(text[start:])]


def object_end(text: str) -> int:
    """Where the object that a text begins with ends; the length of the text if it does not."""
    depth = 0
    for at, token in _tokens(text):
        depth += (token in "{[") - (token in "}]")
        if token in "}]" and depth <= 0:
            return at + 1
    return len(text)


def _with_escapes(text: str) -> str:
    """Doubles the backslashes that begin no escape, as they mean themselves."""
    return "".join(
        _ESCAPE.sub(_escaped if token[0] == '"' else _escaped_in_single, token)
        for _, token in _tokens(text)
    )


_ESCAPE = re.compile(r"""\\(u[0-9a-fA-F]{4}|["\\/bfnrt]|\Z|')?""")


def _escaped(found: re.Match[str]) -> str:
    return "'" if found.group(1) == "'" else _escaped_in_single(found)


def _escaped_in_single(found: re.Match[str]) -> str:
    return "\\\\" if found.group(1) is None else found.group()


_LITERALS = {"True": "true", "False": "false", "None": "null"}


def _with_literals(text: str) -> str:
    return _outside_strings(
        text, lambda part: re.sub(r"\b(True|False|None)\b", lambda m: _LITERALS[m.group()], part)
    )


def _without_commas(text: str) -> str:
    return _outside_strings(text, lambda part: re.sub(r",(\s*[}\]])", r"\1", part))


def _closed(text: str) -> str:
    """Closes an open string, then the open brackets.

    What can no longer be completed is cut off: a comma that nothing followed, a key without value.
    """
    stack: list[str] = []
    last_string = 0
    open_quote = ""
    for at, token in _tokens(text):
        open_quote = ""
        if token in "{[":
            stack.append("}" if token == "{" else "]")
        elif token in "}]":
            if stack and stack[-1] == token:
                stack.pop()
        elif _is_string(token):
            last_string = at
            open_quote = "" if _is_closed(token) else token[0]
    if not stack:
        return text
    if open_quote:
        backslashes = len(text) - len(text.rstrip("\\"))
        text = (text[:-1] if backslashes % 2 else text) + open_quote
    tail = "".join(reversed(stack))
    whole = _without_commas(text + tail)
    try:
        loads(whole)
        return whole
    except ValueError:
        head = text.rstrip().removesuffix(":").rstrip()
        if stack[-1] == "}" and head.endswith(('"', "'")):
            return text[:last_string].rstrip().removesuffix(",") + tail
        return whole


def _with_double_quotes(text: str) -> str:
    """Single-quoted strings as JSON strings; an apostrophe inside a word ends none."""
    out: list[str] = []
    for _, token in _tokens(text):
        if token[0] != "'" or not _is_string(token):
            out.append(token)
            continue
        inner = token[1:-1] if _is_closed(token) else token[1:]
        inner = inner.replace("\\'", "'").replace('\\"', '"').replace('"', '\\"')
        out.append(f'"{inner}"' if _is_closed(token) else f'"{inner}')
    return "".join(out)


_RUNGS: list[tuple[str, Callable[[str], str]]] = [
    ("", lambda text: text),  # as it is
    ("fenced_wrapper", _without_fence),
    ("prose_prefix", _without_prose),
    ("bad_escapes", _with_escapes),
    ("python_literals", _with_literals),
    ("trailing_commas", _without_commas),
    ("unbalanced_braces", _closed),
    ("single_quotes", _with_double_quotes),
    ("bad_escapes", _with_escapes),
    ("trailing_commas", _without_commas),
    ("unbalanced_braces", _closed),
]


# ----------------------------------------------------------------------------------- scanning

# A single-quoted string starts where a value or key can start, and ends where one can end; an
# unclosed string runs to the end of the text.
_TOKEN = re.compile(
    r"""
      "(?:[^"\\]++|\\.)*+(?:"|\\?\Z)
    | (?<=[{\[,:\s])'(?:[^'\\]++|\\.|'(?!\s*(?:[,:}\]]|\Z)))*+(?:'|\\?\Z)
    | [{}\[\]]
    | [^"'{}\[\]]+
    | '
    """,
    re.VERBOSE | re.DOTALL,
)


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Strings, single brackets and the stretches between them, with their places, in order."""
    for found in _TOKEN.finditer(text):
        yield found.start(), found.group()


def _is_string(token: str) -> bool:
    return token[0] == '"' or (token[0] == "'" and len(token) > 1)


def _is_closed(token: str) -> bool:
    """True if a string token has its closing quote."""
    if len(token) < 2 or token[-1] != token[0]:
        return False
    before = token[1:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 0


def _outside_strings(text: str, change: Callable[[str], str]) -> str:
    """Changes the stretches between strings; brackets count among them."""
    out: list[str] = []
    between: list[str] = []
    for _, token in _tokens(text):
        if _is_string(token):
            out += [change("".join(between)), token]
            between = []
        else:
            between.append(token)
    out.append(change("".join(between)))
    return "".join(out)
