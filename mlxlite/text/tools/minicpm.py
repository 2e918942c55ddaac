"""Calls as elements with attributes: MiniCPM5 (spec 30 section 5.5).

    <function name="add">
    <param name="a">1</param>
    <param name="text"><![CDATA[if a < b: </param> ]]></param>
    </function>

A value in a CDATA section may hold any text, closing tags too, so those sections are skipped when a
closing tag is looked for. Several functions in a row are several calls, one block each.
"""

from __future__ import annotations

import re

from mlxlite.text.tools.elements import Elements
from mlxlite.text.tools.format import Broken, Markers, Reader, Reading, Refused
from mlxlite.text.tools.repair import compact
from mlxlite.text.tools.values import decode_value
from mlxlite.text.tools.writing import Slot

OPENER = "<function name="
_HEAD = re.compile(r"""\s*(?:"(?P<double>[^">]*)"|'(?P<single>[^'>]*)')\s*>""")
_NEXT = Markers("<param name=", "</function>")
_OPEN_CDATA = Markers("<![CDATA[")
_CLOSE_CDATA = Markers("]]>")
_CLOSE_PARAM = Markers("</param>")
_GREATER = Markers(">")
_MOST_HEAD_CHARS = 300


def read_attribute_function(r: Reader) -> Reading[None]:
    """Reads the element, of which the opener was taken, to its closing tag; judged as a whole."""
    name = yield from _head(r)
    arguments = {}
    while True:
        between = yield from r.until(_NEXT)
        tag = yield from r.starts(_NEXT)
        r.take(len(tag))
        if between.strip():
            raise Broken
        if tag.lower() == "</function>":
            break
        key = yield from _head(r)
        if not key:
            raise Broken
        value = ""
        if (yield from r.solid()) == "<" and (yield from r.starts(_OPEN_CDATA)):
            value = yield from r.until(_CLOSE_CDATA)
        value += yield from r.until(_CLOSE_PARAM)
        r.take(len("</param>"))
        arguments[key] = decode_value(value, r.tools.schema(name, key))
    if name not in r.tools:
        raise Refused
    r.whole(name, compact(arguments))


def _head(r: Reader) -> Reading[str]:
    """The quoted name in an opening tag, which is taken to its end."""
    text = yield from r.until(_GREATER, _MOST_HEAD_CHARS)
    found = _HEAD.fullmatch(text + r.take(1))
    if found is None:
        raise Broken
    name: str = found["double"] if found["double"] is not None else found["single"]
    return name.strip()


_TAG_NAME = r'[^\s"<>](?:[^"<>]{0,200}[^\s"<>])?'
WRITING = Elements(
    markers=("<function", "</function>", "<param", "</param>", OPENER, "<param name="),
    openers=(OPENER,),
    between="\n",
    names=_TAG_NAME,
    head=(f'{OPENER}"', Slot.NAME, '">', Slot.LINE),
    before=('<param name="', Slot.NAME, '">'),
    end="</param>",
    after=(Slot.LINE,),
    tail="</function>",
    keys=_TAG_NAME,
    knows_cdata=True,
)
