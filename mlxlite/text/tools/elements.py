"""Calls of XML-like elements, one a parameter, as a grammar (floor 1, column "text"; decision D8).

    <parameter=town>          a string is bare text up to the closing tag
    New York
    </parameter>
    <parameter=days>          all else is JSON
    [1,2]
    </parameter>

The other way round of `values`, whose rules decide what a text stands for; so a given value (of an
enum) is written in the first way that is read back as that value. What those rules would change
(blanks at the ends, entities, CDATA) is kept out of strings of which the schema says more than that
they are strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlxlite.text.tools.notation import Notation
from mlxlite.text.tools.shapes import (
    Member,
    deciding,
    given_values,
    lengths,
    members,
    resolved,
    same,
    text_bounds,
    words_of,
)
from mlxlite.text.tools.values import decode_value, is_text
from mlxlite.text.tools.writing import (
    ANY_TEXT,
    Function,
    Inexpressible,
    Rules,
    Slot,
    Writing,
    holding,
    one_of,
    quoted,
)
from mlxlite.types import JSON

_BLANK = r"\s\x1c-\x1f"  # what Python's strip takes
_NO_CDATA = rf"~/[{_BLANK}]*(?i:<!\[CDATA\[)(?s:.*)/"
_CDATA = rf'("<![CDATA[" ({ANY_TEXT} & ~{holding("]]>")}) "]]>")'
# What is read as something shorter; and text that is not trimmed.
_CHANGED = ("&quot;", "&apos;", "&lt;", "&gt;", "&amp;", "<![CDATA[")
_TRIMMED = rf"/([^{_BLANK}]((?s:.*)[^{_BLANK}])?)?/"
# Text that is no JSON by how it begins, and a string in quotes.
_BARE = rf"/\p{{L}}(?s:.*)/ & ~/(true|false|null)([{_BLANK}](?s:.*))?/"
_WORD_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True, kw_only=True)
class Elements(Writing):
    """head, tail: around the parameters. before: a parameter's value, with its key; after: its
    closing tag, `end`. on_lines: a value stands on lines of its own. keys: which can be written.
    without: what ends a value besides its own tag. knows_cdata: the reader skips such sections when
    it looks for the tag, and drops blanks ahead of a value, line ends too.
    """

    head: tuple[str | Slot, ...]
    before: tuple[str | Slot, ...]
    end: str
    after: tuple[str | Slot, ...]
    tail: str
    keys: str
    on_lines: bool = False
    without: tuple[str, ...] = ()
    knows_cdata: bool = False

    def call(self, rules: Rules, function: Function) -> str:
        self.check_name(function.name)
        found = members(function.schema, function.schema)
        # A quote that is an entity would end a string of JSON.
        without = (self.end, *self.without, "&quot;")
        lark = [_lark(rules, self.head, function.name)]
        notation = Notation(rules, function.schema, without, function.is_strict)
        for member in found.named:
            try:
                each = self._parameter(rules, notation, member, function.told.get(member.key))
            except Inexpressible:
                if member.is_required:
                    raise
                continue  # it need not be there
            lark.append(each if member.is_required else f"({each})?")
        if found.extra is not None:
            names = one_of([member.key for member in found.named] or [""])
            key = rules.terminal(f"/{_WORD_KEY}/ & ~{names}")
            value = self._value(rules, notation, found.extra, None)
            each = _lark(rules, self.before, key, is_lark=True)
            each = f"{each} {value} {_lark(rules, self.after, '')}"
            lark.append(f"({each}){{0,{found.most_extra}}}")
        return " ".join([*lark, rules.markup(self.tail)])

    def _parameter(self, rules: Rules, notation: Notation, member: Member, told: JSON) -> str:
        if re.fullmatch(self.keys, member.key) is None:
            raise Inexpressible(f"this model's calls cannot write the key {member.key[:64]!r}")
        before = _lark(rules, self.before, member.key)
        value = self._value(rules, notation, member.schema, told)
        return rules.add(f"{before} {value} {_lark(rules, self.after, '')}")

    def _value(self, rules: Rules, notation: Notation, schema: JSON, told: JSON) -> str:
        """A value and its closing tag. told: the schema by which it will be read."""
        schema = resolved(schema, notation.root)
        layout = "\n" if self.on_lines else ""
        if isinstance(schema, Mapping) and {"enum", "const"} & set(schema):
            if deciding(schema) <= {"enum", "const", "type"}:
                texts = [self._written(value, told) for value in given_values(schema)]
                either = " | ".join(rules.markup(text) for text in texts if text is not None)
                if not either:
                    raise Inexpressible("this model's calls cannot write any of the given values")
                return f"({either}) {rules.markup(layout + self.end)}"
            if is_text(told):
                raise Inexpressible("this model's calls cannot write given texts by other words")
        if is_text(told):
            assert isinstance(told, Mapping)
            return self._text(rules, told)
        if _may_be_bare(schema, notation.root):
            words = '"null" | ' if isinstance(schema, Mapping) and "anyOf" in schema else ""
            string = r'/"([^"\\\x00-\x1f]|\\["\\\/bfnrt])*"/'
            bounds = f"({words}{string} | ({_BARE}))"
            return rules.up_to(self.end, within=(bounds,), without=self.without, before=layout)
        return f"{notation.value(schema)} {rules.markup(layout + self.end)}"

    def _text(self, rules: Rules, schema: Mapping[str, JSON]) -> str:
        """A string without quotes, by its schema."""
        layout = "\n" if self.on_lines else ""
        without = self.without
        if not (bounds := text_bounds(schema)):
            if self.knows_cdata:
                bare = f"{ANY_TEXT} & {_NO_CDATA} & ~{holding(self.end)}"
                return rules.ended(f"(({bare}) | {_CDATA})", self.end)
        elif "pattern" in schema or "format" in schema:
            bounds.append(_TRIMMED)
            without = (*without, *_CHANGED)
        elif (least := lengths(schema)[0]) > 0:
            bounds = [_at_least(least, lengths(schema)[1])]
        return rules.up_to(self.end, within=bounds, without=without, before=layout)

    def _written(self, value: JSON, told: JSON) -> str | None:
        """The text that is read as a value, without the line end behind it, or None."""
        texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":"))]
        if isinstance(value, str):
            texts = [value, f"<![CDATA[{value}]]>", *texts]
        if not self.on_lines:
            texts += [f"\n{text}\n" for text in texts]
        for text in texts:
            lower = text.lower()
            if any(end.lower() in lower for end in (self.end, *self.without)):
                continue
            whole = f"\n{text}\n" if self.on_lines else text
            if same(decode_value(whole.lstrip() if self.knows_cdata else whole, told), value):
                return text
        return None


def _at_least(least: int, most: str) -> str:
    """Texts of so many characters, of which as many are left whatever the reader makes shorter."""
    first, plain = f"[^<&{_BLANK}]", "[^<&]"
    begin = first + (f"{plain}{{{least - 2}}}{first}" if least > 1 else "")
    return f"/{begin}(?s:.{{0,{int(most) - least if most else ''}}})/"


def _may_be_bare(schema: JSON, root: JSON) -> bool:
    """Whether a schema takes any string, or any string and null: models write those bare."""
    if not isinstance(schema, Mapping):
        return False
    branches = schema.get("anyOf")
    if words_of(schema) != {"anyOf"} or not isinstance(branches, list):
        return schema.get("type") == "string" and words_of(schema, "string") == {"type"}
    kinds = [resolved(branch, root) for branch in branches]
    if not all(isinstance(kind, Mapping) for kind in kinds) or len(kinds) != 2:
        return False
    names = sorted(str(kind.get("type")) for kind in kinds)
    return names == ["null", "string"] and all(words_of(k, "string") == {"type"} for k in kinds)


def _lark(rules: Rules, pieces: tuple[str | Slot, ...], name: str, *, is_lark: bool = False) -> str:
    """Pieces as Lark; the name, a text or Lark itself, at its place."""
    found = []
    for piece in pieces:
        if isinstance(piece, str):
            found.append(rules.markup(piece))
        elif piece is Slot.LINE:
            found.append('"\\n"?')
        else:
            found.append(name if is_lark else quoted(name))
    return " ".join(found)
