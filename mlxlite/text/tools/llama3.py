"""Calls of Llama 3: the whole answer is an envelope (spec 30 section 7).

    {"name": "add", "parameters": {"a": 1}}
    <|python_tag|>{"name": "add", "parameters": {"a": 1}}

Without markers an ordinary JSON answer must not be taken for a call: the object stands at the very
start, its name is a tool's, and its parameters are an object. The first key or name that does not
fit lets the text go.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mlxlite.text.tools.format import Broken, Reader, Reading
from mlxlite.text.tools.hermes import read_envelope
from mlxlite.text.tools.writing import Script, Slot

_TAG = "<|python_tag|>"


class Llama3:
    """See the module."""

    openers = ()
    starters = ("{", _TAG)
    markers = (_TAG,)

    def read(self, r: Reader, opener: str) -> Reading[None]:
        if opener == "{":
            r.put_back(1)
        elif (yield from r.solid()) != "{":
            raise Broken
        yield from read_envelope(r, None, is_bare=True)


@dataclass(frozen=True, kw_only=True)
class _Script(Script):
    """Without a marker a call is known by its name and the key after it."""

    def starters(self, names: Sequence[str]) -> tuple[str, ...]:
        quoted = (json.dumps(name, ensure_ascii=False) for name in names)
        return (_TAG, *(f'{{"name": {name}, "parameters":' for name in quoted))


WRITING = _Script(
    markers=(_TAG,),
    leads=(_TAG,),
    most_calls=1,
    pieces=('{"name": ', Slot.QUOTED, ', "parameters": ', Slot.ARGUMENTS, "}"),
)
