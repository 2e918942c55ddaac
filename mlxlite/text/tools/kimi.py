"""Calls in a section of special tokens: Kimi K2 (spec 30 section 7).

    <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>
    {"a": 1}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}
    <|tool_call_end|><|tool_calls_section_end|>

The name stands between `functions.` and the number of the call. DeepSeek builds its sections in the
same way, from other tokens and with another head of a call.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from mlxlite.text.tools.format import Broken, Markers, Reader, Reading
from mlxlite.text.tools.hermes import read_arguments, read_ending
from mlxlite.text.tools.writing import Script, Slot

_HEAD = re.compile(r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*", re.DOTALL)
MOST_HEAD_CHARS = 300


class Sectioned(ABC):
    """Calls one after the other in a section; each is judged alone."""

    section: str
    section_end: str
    call: str
    call_end: str
    separator: str
    starters: Sequence[str] = ()

    def __init__(self) -> None:
        self.openers = (self.section, self.call)
        self.markers = (*self.openers, self.section_end, self.call_end, self.separator)
        self._call = Markers(self.call)
        self._call_end = Markers(self.call_end)
        self._section_end = Markers(self.section_end)
        # A call whose JSON is broken ends at the first of these.
        self._ending = Markers(self.call_end, self.section_end, self.call)
        self._head_end = Markers(self.separator, *self.markers)

    def read(self, r: Reader, opener: str) -> Reading[None]:
        if opener == self.section.lower() and not (yield from r.accept(self._call)):
            raise Broken
        while True:
            name = yield from self.read_head(r)
            yield from read_arguments(r, name, self._ending)
            yield from read_ending(r, self._call_end)
            if not (yield from r.accept(self._call)):
                break
        if (yield from r.accept(self._section_end)):
            r.spend()

    @abstractmethod
    def read_head(self, r: Reader) -> Reading[str]:
        """Takes what stands before the arguments; the name of the tool."""

    def until_separator(self, r: Reader) -> Reading[str]:
        """Takes the text before the separator, and the separator."""
        text = yield from r.until(self._head_end, MOST_HEAD_CHARS)
        marker = yield from r.starts(self._head_end)
        if marker.lower() != self.separator:
            raise Broken
        r.take(len(marker))
        return text


class Kimi(Sectioned):
    """See the module."""

    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"

    def read_head(self, r: Reader) -> Reading[str]:
        head = _HEAD.fullmatch((yield from self.until_separator(r)))
        if head is None:
            raise Broken
        return head.group(1)


WRITING = Script(
    markers=Kimi().markers,
    openers=(Kimi.section,),
    opening=Kimi.section,
    closing=Kimi.section_end,
    names=r"[^\s<]{1,200}",
    pieces=(
        *(f"{Kimi.call}functions.", Slot.NAME, ":", Slot.NUMBER),
        *(Kimi.separator, Slot.ARGUMENTS, Kimi.call_end),
    ),
)
