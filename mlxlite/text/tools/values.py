"""Parameter values of XML-like formats, decoded by the tool's schema (spec 30 section 5.7).

Such formats write every value as bare text. What `007` means, a number or three characters, only
the tool's own schema can say; without one, text that is JSON is taken for JSON.

    <parameter=zip>            schema of zip          value
    007                        {"type": "string"}     "007"
    </parameter>               {"type": "integer"}    007 is no JSON, so "007"; 7 is 7

Two rules keep values byte for byte (F5), where the numbered spec would change them:
- A value on lines of its own loses the two line ends of that layout and nothing else, so that
  code keeps its indentation. A value beside its tags is trimmed.
- Entities are decoded only in text that an escaping writer can have written: one without a bare
  `<`, `>` or `&`. A page of HTML in a parameter is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlxlite.text.tools.repair import loads
from mlxlite.types import JSON

_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_ENTITY = re.compile(r"&(quot|apos|lt|gt|amp);")
_BARE_MARKUP = re.compile(r"[<>]|&(?!(?:quot|apos|lt|gt|amp);)")
_CHARACTERS = {"quot": '"', "apos": "'", "lt": "<", "gt": ">", "amp": "&"}


def decode_value(text: str, schema: JSON) -> JSON:
    """The value that a parameter's text stands for. schema: of that parameter, or None."""
    written = text
    cdata = _CDATA.fullmatch(text)
    if cdata:
        text = cdata.group(1)
    else:
        text = _without_layout(text)
        if not _BARE_MARKUP.search(text):
            text = _ENTITY.sub(lambda found: _CHARACTERS[found.group(1)], text)
    if not text or is_text(schema):
        return text
    try:
        return loads(text)
    except ValueError:
        pass
    try:
        return loads(written)  # with entities inside its strings
    except ValueError:
        return text


def _without_layout(text: str) -> str:
    if text.startswith("\n"):
        return text[1:].removesuffix("\n") if text.strip() else ""
    return text.strip()


def is_text(schema: JSON) -> bool:
    """True if a schema's type is strings, or strings and null: a text is taken as it is."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(names, list | tuple):
        return False
    return "string" in names and all(name in ("string", "null") for name in names)
