"""Calls in a section of special tokens: DeepSeek V3, R1 and V3.1.

    <｜tool▁calls▁begin｜>
    <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>                        V3.1
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>add\\n```json\\n{"a": 1}\\n```<｜tool▁call▁end｜>  V3
    <｜tool▁calls▁end｜>

What comes after the separator tells which: an object at once, or the name on a line of its own.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mlxlite.text.tools.format import Broken, Reader, Reading
from mlxlite.text.tools.kimi import MOST_HEAD_CHARS, Sectioned
from mlxlite.text.tools.writing import Script, Slot

_BEFORE_OBJECT = re.compile(r"[^{<]*")
_NAME_AND_FENCE = re.compile(r"\s*(\S+)\s*(?:```(?:json)?)?\s*")


class DeepSeek(Sectioned):
    """See the module."""

    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"

    def read_head(self, r: Reader) -> Reading[str]:
        first = (yield from self.until_separator(r)).strip()
        between = yield from r.run(_BEFORE_OBJECT, MOST_HEAD_CHARS)
        if not between.strip():
            return first
        found = _NAME_AND_FENCE.fullmatch(between)
        if found is None:
            raise Broken
        return found.group(1)


WRITING = Script(
    markers=DeepSeek().markers,
    openers=(DeepSeek.section,),
    opening=DeepSeek.section,
    closing=DeepSeek.section_end,
    names=r"[^\s<{`]{1,200}",
    pieces=(
        *(DeepSeek.call, Slot.NAME, DeepSeek.separator),
        *(Slot.ARGUMENTS, DeepSeek.call_end),
    ),
)
WRITING_FENCED = replace(
    WRITING,
    between="\n",
    pieces=(
        *(f"{DeepSeek.call}function{DeepSeek.separator}", Slot.NAME, "\n```json\n"),
        *(Slot.ARGUMENTS, f"\n```{DeepSeek.call_end}"),
    ),
)
