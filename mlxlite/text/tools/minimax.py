"""Calls as invoke elements: MiniMax M2 (spec 30 section 7).

    <minimax:tool_call>
    <invoke name="add">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>

One block may hold several elements; each is judged alone. Parameters are those of `qwen_xml`.
"""

from __future__ import annotations

from mlxlite.text.tools.elements import Elements
from mlxlite.text.tools.format import Broken, Markers, Reader, Reading
from mlxlite.text.tools.qwen_xml import TAG_NAME, read_function
from mlxlite.text.tools.writing import Slot

_BLOCK, _BLOCK_END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE = "<invoke name="
_TAGS = Markers("<parameter name=", "</invoke>", _BLOCK_END)
_NEXT = Markers(_INVOKE)
_END = Markers(_BLOCK_END)


class MiniMax:
    """See the module."""

    openers = (_BLOCK, _INVOKE)
    starters = ()
    markers = (_BLOCK, _BLOCK_END, "</invoke>", "</parameter>")

    def read(self, r: Reader, opener: str) -> Reading[None]:
        if opener == _BLOCK and not (yield from r.accept(_NEXT)):
            raise Broken
        yield from read_function(r, _TAGS)
        while (yield from r.accept(_NEXT)):
            yield from read_function(r, _TAGS)
        if (yield from r.accept(_END)):
            r.spend()


WRITING = Elements(
    markers=MiniMax.markers,
    openers=(_BLOCK,),
    opening=f"{_BLOCK}\n",
    closing=_BLOCK_END,
    names=TAG_NAME,
    head=(f'{_INVOKE}"', Slot.NAME, '">\n'),
    before=('<parameter name="', Slot.NAME, '">'),
    end="</parameter>",
    after=("\n",),
    tail="</invoke>\n",
    keys=TAG_NAME,
)
