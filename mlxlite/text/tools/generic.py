"""The block `<tool_call>` with any body, and calls without markers (spec 30 sections 4, 5, 5.6).

Models stray from their own format: Qwen writes XML where its template shows JSON, and the other way
round (F1). So everything between `<tool_call>` and `</tool_call>` is judged by what it looks like,
whatever the template says:

    {"name": "add", "arguments": {"a": 1}}      hermes, also in a fence or after a few words
    <function=add><parameter=a>1</parameter>    qwen_xml
    add<arg_key>a</arg_key><arg_value>1<...     glm

Function elements count without the block too. An answer that begins with a bare envelope, fenced or
not, is a call if its name is a tool's and it has arguments; a flat object with a name is content.
This one format serves the families Hermes, Qwen, GLM and MiniCPM, and every unknown template.
"""

from __future__ import annotations

import re

from mlxlite.text.tools.format import Broken, Ended, Markers, Reader, Reading
from mlxlite.text.tools.glm import key_value_call
from mlxlite.text.tools.hermes import read_ending, read_envelope
from mlxlite.text.tools.minicpm import OPENER as ATTRIBUTE_FUNCTION
from mlxlite.text.tools.minicpm import read_attribute_function
from mlxlite.text.tools.qwen_xml import read_function

_BLOCK = "<tool_call>"
_FUNCTION = "<function="
_CLOSER = Markers("</tool_call>")
_INSIDE = Markers(_BLOCK, "</tool_call>", _FUNCTION, ATTRIBUTE_FUNCTION, "<arg_key>")
_PREAMBLE = re.compile(r"[^<{\[]*")
_BRACE = Markers("{")
_FENCE = "```"
_FENCE_HEAD = re.compile(r"[a-zA-Z_]*")
_FENCE_END = Markers("```")
# Words before the JSON are forgiven, a paragraph is prose that mentions the marker.
_MOST_PREAMBLE_CHARS = 400


class Generic:
    """See the module."""

    openers: tuple[str, ...] = (_BLOCK, _FUNCTION, ATTRIBUTE_FUNCTION)
    starters: tuple[str, ...] = ("{", _FENCE)
    markers = (
        *("<tool_call>", "</tool_call>", "<function", "</function>", "<parameter", "</parameter>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<param", "</param>"),
        *("<function=", "<parameter=", "<function name=", "<param name="),
    )

    def read(self, r: Reader, opener: str) -> Reading[None]:
        if opener == _BLOCK:
            yield from self._block(r)
        elif opener == _FUNCTION:
            yield from read_function(r)
            # Qwen3-Coder often leaves out the opening tag of the block, and closes it all the same.
            if (yield from r.accept(_CLOSER)):
                r.spend()
        elif opener == ATTRIBUTE_FUNCTION:
            yield from read_attribute_function(r)
        else:
            yield from self._bare(r, opener)

    def _block(self, r: Reader) -> Reading[None]:
        start = r.mark()
        preamble = yield from r.run(_PREAMBLE, _MOST_PREAMBLE_CHARS)
        if (yield from r.look(1)) == "{":
            while True:
                yield from read_envelope(r, _CLOSER)
                # Some put several objects into one block.
                if (yield from r.accept(_BRACE)) == "":
                    break
                r.put_back(1)
        else:
            tag = (yield from r.starts(_INSIDE)).lower()
            if tag == _FUNCTION and not preamble.strip():
                r.take(len(tag))
                yield from read_function(r)
            elif tag == ATTRIBUTE_FUNCTION and not preamble.strip():
                r.take(len(tag))
                yield from read_attribute_function(r)
            elif tag in ("<arg_key>", "</tool_call>"):
                try:
                    yield from r.until(_CLOSER)
                except Ended:
                    if tag != "<arg_key>":
                        raise
                call = key_value_call(r.since(start), r.tools)
                if call is None:
                    raise Broken
                r.whole(*call)
            else:
                raise Broken
        yield from read_ending(r, _CLOSER)

    def _bare(self, r: Reader, opener: str) -> Reading[None]:
        if opener == _FENCE:
            word = yield from r.run(_FENCE_HEAD, 16)
            if word.lower() not in ("", "json", "tool_call") or (yield from r.solid()) != "{":
                raise Broken
        else:
            r.put_back(1)
        yield from read_envelope(r, _FENCE_END if opener == _FENCE else None, is_bare=True)
        if opener == _FENCE:
            yield from read_ending(r, _FENCE_END)
