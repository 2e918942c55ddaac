"""Answers that are nearly right: values of all kinds, and valid answers with one thing changed.

What a grammar lets through of them must be valid; random walks alone seldom come near the edges of
a schema, such as 29 February, a name spelled with escapes or a number at its bound.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 5, 9, 10, 0.5, 1.5, -0.5, 100, 1e3, 2**53 + 1, 2**63,
    "", "a", "ab", "abc", "b", "é", "😀", "x" * 30, "red", "k", "foo", "a@b.c", "::1", "256.1.1.1",
    "2020-02-29", "2021-02-29", "2020-02-30", "2020-13-01", "0000-01-01", "25:00:00Z", "23:59:60Z",
    "12:00:00", "2020-01-01T24:00:00Z", "2021-02-29T00:00:00Z", "2020-01-01T00:00:00Z",
    [], [1], [1, 1], [1, "a"], [None], [True, True], [1, 2, 3], ["a"], [[]],
    {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"a": None}, {"a": 1, "z": True},
    {"k": "a"}, {"k": "a", "x": 1}, {"k": "b", "y": "s"}, {"ab": 3}, {"ab": 7}, {"x": 1},
    {"a": {}}, {"a": []},
)  # fmt: skip
_TEXTS = (
    '"\\u0061"', '"\\ud83d\\ude00"', '"\\/"', "1.0", "1e0", "-0", "-0.0", "0.0", "1.50", "00", "01",
    '{"a":1,"a":2}', '{"a":1,"\\u0061":"x"}', '{"\\u0061":1}', '{"a":1,"b":1,"c":1,"d":1}',
)  # fmt: skip
_REPLACED = (None, True, 3, 7, 99, "a", 0.5, [], {})


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


EVERYWHERE = (*map(compact, _VALUES), *_TEXTS)


def variants(text: str, seed: int, most: int) -> list[str]:
    """Some texts that differ from an answer in one place."""
    draw = random.Random(seed)
    found = [*_respelled(text), *map(compact, _changed(json.loads(text)))]
    return draw.sample(found, min(most, len(found)))


def _respelled(text: str) -> Iterator[str]:
    for at in re.finditer(r"[A-Za-z]", text):
        yield f"{text[: at.start()]}\\u{ord(at.group()):04x}{text[at.end() :]}"
    for at in re.finditer(r"\d", text):
        for digits in ("0", "9", ".5", ".0", "e1", "00", "-1"):
            yield text[: at.start()] + digits + text[at.end() :]
            yield text[: at.end()] + digits + text[at.end() :]
    for at in re.finditer('"', text):
        yield f'{text[: at.start()]}"a{text[at.end() :]}'
        yield f'{text[: at.start()]}a"{text[at.end() :]}'
    if text.startswith('{"'):
        yield f"{text[:-1]},{text[1:]}"  # each member twice


def _changed(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield {other: value[other] for other in value if other != name}
            yield {f"{name}z": each, **value}
            yield {**value, f"{name}z": each}
            for other in (*_REPLACED, *_changed(each)):
                yield {**value, name: other}
        for name in ("a", "b", "ab", "x", "zz"):
            for other in (1, "x", True, 50):
                yield {**value, name: other}
    elif isinstance(value, list):
        for n, each in enumerate(value):
            yield value[:n] + value[n + 1 :]
            yield [*value, each]
            for other in _changed(each):
                yield [*value[:n], other, *value[n + 1 :]]
        for other in (None, 1, 50, "a", True):
            yield [*value, other]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value + 1, value - 1, value * 10, -value, str(value))
        if abs(value) < 2**53:
            yield from (value + 0.5, value + 0.25)
    elif isinstance(value, str):
        yield from (value + "a", value[1:], value[:-1], value + "é", value.upper(), " " + value)
        yield from (value + "\n", "\n" + value)
