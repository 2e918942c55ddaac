"""Calls as a name and key/value elements: GLM 4.5 and later (spec 30 section 5.3).

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

Anything between the pairs makes it another format, so the block is judged as a whole.
"""

from __future__ import annotations

import re

from mlxlite.text.tools.elements import Elements
from mlxlite.text.tools.format import Tools
from mlxlite.text.tools.repair import compact
from mlxlite.text.tools.values import decode_value
from mlxlite.text.tools.writing import Slot

_NAME = re.compile(r"\s*([^\s<>]+)\s*")
_PAIR = re.compile(
    r"<arg_key>(?P<key>[^<>]*)</arg_key>\s*<arg_value>(?>(?P<value>.*?)</arg_value>)\s*",
    re.DOTALL | re.IGNORECASE,
)


def key_value_call(body: str, tools: Tools) -> tuple[str, str] | None:
    """Name and compact arguments of a block's body, or None if it is not of this format."""
    head = _NAME.match(body)
    if head is None:
        return None
    name, at = head.group(1), head.end()
    arguments = {}
    while at < len(body):
        pair = _PAIR.match(body, at)
        if pair is None or not pair["key"].strip():
            return None
        key = pair["key"].strip()
        arguments[key] = decode_value(pair["value"], tools.schema(name, key))
        at = pair.end()
    return name, compact(arguments)


# Its newest models write no line ends between the elements: the model decides.
WRITING = Elements(
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
    + ("</arg_value>",),
    openers=("<tool_call>",),
    between="\n",
    names=r"[^\s<>{\[]{1,200}",
    head=("<tool_call>", Slot.NAME, Slot.LINE),
    before=("<arg_key>", Slot.NAME, "</arg_key>", Slot.LINE, "<arg_value>"),
    end="</arg_value>",
    after=(Slot.LINE,),
    tail="</tool_call>",
    keys=r"[^\s<>](?:[^<>]{0,200}[^\s<>])?",
    without=("</tool_call>",),
)
