"""Calls of Mistral's models, old shape and new (spec 30 section 7).

    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]
    [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]xY1z[ARGS]{"a": 2}

Neither has an end marker: a call ends with its JSON. In the new shape the marker before a further
call may be missing. The call's id in the text is the model's own and is not used.
"""

from __future__ import annotations

import re

from mlxlite.text.tools.format import Broken, Ended, Markers, Reader, Reading
from mlxlite.text.tools.hermes import read_arguments, read_envelope
from mlxlite.text.tools.writing import Script, Slot

_OPENER = "[TOOL_CALLS]"
_ENDING = Markers(_OPENER)
_NAME = re.compile(r"[\w.-]*")
_SPACE = re.compile(r"\s*")
_ARGS = Markers("[ARGS]")
_TAGS = Markers("[ARGS]", "[CALL_ID]")
_MOST_NAME_CHARS = 128


class Mistral:
    """See the module."""

    openers = (_OPENER,)
    starters = ()
    markers = (_OPENER, "[ARGS]", "[CALL_ID]")

    def read(self, r: Reader, opener: str) -> Reading[None]:
        if (yield from r.solid()) == "[":
            yield from self._list(r)
            return
        if not (yield from self._named(r, needs_tag=False)):
            raise Broken
        while True:  # further calls without a marker
            start = r.mark()
            yield from r.run(_SPACE, _MOST_NAME_CHARS)
            if not (yield from self._named(r, needs_tag=True)):
                r.rewind(start, 0)
                return

    def _list(self, r: Reader) -> Reading[None]:
        while True:
            r.take(1)  # the bracket or the comma
            if (yield from r.solid()) != "{":
                raise Broken
            yield from read_envelope(r, _ENDING)
            try:
                char = yield from r.solid()
            except Ended:
                char = ""
            if char == "]":
                r.take(1)
                r.spend()
            if char != ",":
                return

    def _named(self, r: Reader, needs_tag: bool) -> Reading[bool]:
        """A name and its arguments. False, with the name taken, where there is no such thing."""
        name = yield from r.run(_NAME, _MOST_NAME_CHARS)
        tag = ""
        if name:
            tag = yield from r.starts(_TAGS)
            if tag.upper() == "[CALL_ID]":
                yield from r.until(_ARGS, _MOST_NAME_CHARS)
                tag = _ARGS.texts[0]
            r.take(len(tag))
        if not name or (needs_tag and not tag):
            return False
        if not tag and (yield from r.solid()) != "{":
            return False
        yield from read_arguments(r, name, _ENDING)
        return True


WRITING = Script(
    markers=Mistral.markers,
    openers=(_OPENER,),
    names=r"[\w.-]{1,128}",
    pieces=(_OPENER, Slot.NAME, "[ARGS]", Slot.ARGUMENTS),
)
WRITING_OF_LISTS = Script(
    markers=Mistral.markers,
    openers=(_OPENER,),
    opening=f"{_OPENER}[",
    between=", ",
    closing="]",
    pieces=('{"name": ', Slot.QUOTED, ', "arguments": ', Slot.ARGUMENTS, "}"),
)
