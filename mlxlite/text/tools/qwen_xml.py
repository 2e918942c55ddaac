"""Calls as function and parameter elements: Qwen3-Coder, Qwen3.5 (spec 30 section 5.2).

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A call is announced with its first complete parameter, and each further one is sent when it is
complete: its value depends on the whole text (5.7). Text between the elements is ignored, a
repeated key is sent again (the last one wins, as in any JSON reader). MiniMax writes the same with
other tags.
"""

from __future__ import annotations

import re

from mlxlite.text.tools.elements import Elements
from mlxlite.text.tools.format import Broken, Ended, Markers, Reader, Reading, Refused
from mlxlite.text.tools.repair import compact
from mlxlite.text.tools.values import decode_value
from mlxlite.text.tools.writing import Slot

_TAGS = Markers("<parameter=", "</function>", "</tool_call>")
_NAME = re.compile(r"[^\s>]*")
_MOST_NAME_CHARS = 256
_QUOTES = "\"'"
_CLOSE_PARAMETER = Markers("</parameter>")


def read_function(r: Reader, tags: Markers = _TAGS) -> Reading[None]:
    """Reads the element after its `<function=`, to its closing tag, and makes a call of it.

    tags: the opening tag of a parameter, the closing tag of the function, then others that end it.
    """
    name = (yield from read_name(r)).strip(_QUOTES)
    if name not in r.tools:
        close = Markers(tags.texts[1])
        yield from r.until(close)
        r.take(len(close.texts[0]))
        raise Refused
    yield from _parameters(r, name, tags)


def read_name(r: Reader) -> Reading[str]:
    """A name up to `>`, which is taken."""
    name = yield from r.run(_NAME, _MOST_NAME_CHARS)
    if not name or (yield from r.look(1)) != ">":
        raise Broken
    r.take(1)
    return name


def _parameters(r: Reader, name: str, tags: Markers) -> Reading[None]:
    parameter, close_function = tags.texts[:2]
    lead = "{"
    try:
        while True:
            yield from r.until(tags)
            tag = (yield from r.starts(tags)).lower()
            if tag != parameter:
                break
            r.take(len(tag))
            key = (yield from read_name(r)).strip(_QUOTES)
            if not key:
                raise Broken
            text = yield from r.until(_CLOSE_PARAMETER)
            r.take(len("</parameter>"))
            value = compact(decode_value(text, r.tools.schema(name, key)))
            if r.call is None:
                r.begin(name)
                r.closers.append("}")
            r.send(f"{lead}{compact(key)}:{value}")
            lead = ","
    except (Broken, Ended) as fault:
        if r.call is None:
            raise
        r.mend(name, None, fault)
        return
    if tag == close_function:
        r.take(len(tag))
    if r.call is None:
        r.whole(name, "{}")
    else:
        r.end()


TAG_NAME = r"""[^\s<>"']{1,200}"""
WRITING = Elements(
    markers=("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=")
    + ("</parameter>",),
    openers=("<tool_call>",),
    between="\n",
    names=TAG_NAME,
    head=("<tool_call>", Slot.LINE, "<function=", Slot.NAME, ">\n"),
    before=("<parameter=", Slot.NAME, ">\n"),
    end="</parameter>",
    after=("\n",),
    tail="</function>\n</tool_call>",
    keys=TAG_NAME,
    on_lines=True,
)
