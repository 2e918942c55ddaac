"""Values by a JSON schema, in a family's own notation (floor 1, column "text"; decision D8).

    JSON      {"to":"Oslo","n":[1,true]}            inside XML-like elements
    Gemma     {to:<|"|>Oslo<|"|>,n:[1,true]}
    Python    {"to": "Oslo", "n": [1, True]}

`Notation` is JSON; a family derives its own and changes what differs. A schema is followed as far
as it is made of the common words; a part of it that is not is left to llguidance, as plain JSON,
which all these readers take as well. What a schema allows is never widened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mlxlite.text.json_schema import pointed
from mlxlite.text.tools.shapes import (
    LENGTHS,
    MOST_TIMES,
    OF_TYPES,
    TYPES,
    Member,
    Members,
    deciding,
    given_values,
    lengths,
    members,
    resolved,
    words_of,
)
from mlxlite.text.tools.writing import Inexpressible, Rules, holding, one_of, quoted
from mlxlite.types import JSON

# A character of a JSON string, escaped or not; half a surrogate pair is none.
_CHARACTER = (
    r'([^"\\\x00-\x1f\x7f]|\\(["\\\/bfnrt]|u([0-9a-ceA-CE-F][0-9a-fA-F]{3}|[fF][0-9a-fA-F]{3}'
    r"|[dD][0-7][0-9a-fA-F]{2})))"
)

# More digits than a reader takes are a model that does not end.
_INTEGER = "/-?(0|[1-9][0-9]{0,98})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,98})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?/"


class Notation:
    """JSON. rules: that values are added to. root: of all schemas, which references are into.
    without: texts that no string may hold, as the reader would see the end in them. Where a part
    of a schema is left to llguidance and could hold them, any value of its type is allowed instead,
    or, is_strict, none.
    """

    null, true, false = "null", "true", "false"
    comma, colon = ",", ":"

    def __init__(
        self,
        rules: Rules,
        root: Mapping[str, JSON],
        without: Sequence[str] = (),
        is_strict: bool = False,
    ) -> None:
        self.rules = rules
        self.root = root
        self.without = without
        self.is_strict = is_strict
        self._references: dict[str, str] = {}
        self._any = ""

    # -------------------------------------------------------------------- what notations differ in

    def string(self, schema: Mapping[str, JSON]) -> str:
        """A string by a schema, as a piece of Lark. Raises Inexpressible."""
        if not words_of(schema, "string") <= {"type", *LENGTHS}:
            raise Inexpressible("a string by a pattern")
        return self.rules.terminal(self._json_string(*lengths(schema)))

    def text(self, value: str) -> str:
        """A given string, as text."""
        return json.dumps(value, ensure_ascii=False)

    def key(self, name: str) -> str:
        """A given key, as text. Raises Inexpressible."""
        return self.constant(name)

    def other_key(self, named: Sequence[str]) -> str:
        """An expression for keys but the named ones."""
        if not named:
            return self._json_string(0, "")
        # Not all strings: an escape could spell one of the named.
        return rf'/"[A-Za-z_][A-Za-z0-9_.-]{{0,63}}"/ & ~{one_of(list(map(self.key, named)))}'

    def _json_string(self, least: int, most: str) -> str:
        texts = f'/"{_CHARACTER}{{{least},{most}}}"/'
        return f"{texts} & ~{holding(*self.without)}" if self.without else texts

    # --------------------------------------------------------------------------------- values

    def value(self, schema: JSON) -> str:
        """A value by a schema, as a piece of Lark. Raises Inexpressible."""
        try:
            return self._own(schema)
        except Inexpressible:
            return self._foreign(schema)

    def constant(self, value: JSON) -> str:
        """A given value, as text. Raises Inexpressible."""
        if isinstance(value, Mapping):
            inner = (f"{self.key(k)}{self.colon}{self.constant(v)}" for k, v in value.items())
            return f"{{{self.comma.join(inner)}}}"
        if isinstance(value, list):
            return f"[{self.comma.join(map(self.constant, value))}]"
        if isinstance(value, str):
            lower = value.lower()
            if any(each.lower() in lower for each in self.without):
                raise Inexpressible("a string that holds markup")
            return self.text(value)
        words = {None: self.null, True: self.true, False: self.false}
        return words[value] if value is None or isinstance(value, bool) else json.dumps(value)

    def _foreign(self, schema: JSON) -> str:
        """The same, by llguidance and in JSON."""
        if not isinstance(schema, Mapping):
            raise Inexpressible("a value that nothing allows")
        if self.without and not _is_narrow(schema, self.without):
            if self.is_strict:
                raise Inexpressible(f"a value by {', '.join(sorted(deciding(schema)))[:64]}")
            kind = schema.get("type")
            return self._typed(kind, {"type": kind}) if kind in list(TYPES) else self._anything()
        tables: dict[str, JSON] = {}
        for reference in _references(schema):
            table = reference.split("/")[1] if reference.startswith("#/") else ""
            if table not in ("$defs", "definitions") or table not in self.root:
                raise Inexpressible(f"the reference {reference[:64]!r}")
            tables[table] = self.root[table]
        return self.rules.json({**schema, **tables})

    def _own(self, schema: JSON) -> str:
        if schema is True:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise Inexpressible("a value that nothing allows")
        words = deciding(schema)
        if "$ref" in words:
            if len(words) > 1:
                raise Inexpressible("a reference beside other words")
            return self._reference(schema["$ref"])
        if words & {"enum", "const"}:
            return self._one_of(schema, words)
        if branches := self._branches(schema, words):
            return self.rules.add(" | ".join(map(self.value, branches)))
        if words == {"allOf"} and resolved(schema, self.root) is not schema:
            return self._own(resolved(schema, self.root))
        if not words:
            return self._anything()
        kinds = schema.get("type", "object" if "properties" in schema else None)
        names = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(names, list) or not names:
            raise Inexpressible("a value of any type")
        found = [self._typed(name, schema) for name in names]
        return found[0] if len(found) == 1 else self.rules.add(" | ".join(found))

    def _branches(self, schema: Mapping[str, JSON], words: set[str]) -> Sequence[JSON]:
        """The branches of a union, empty if it is none. Those of a `oneOf` must exclude each other
        by their types."""
        branches = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(branches, list) or words == {"anyOf"}:
            return branches if isinstance(branches, list) else []
        types: list[JSON] = []
        for branch in (resolved(each, self.root) for each in branches):
            kind = branch.get("type") if isinstance(branch, Mapping) else None
            types.append("number" if kind == "integer" else kind)
        is_apart = all(isinstance(kind, str) for kind in types) and len(set(types)) == len(types)
        return branches if words == {"oneOf"} and is_apart else []

    def _anything(self) -> str:
        if not self._any:
            self._any = self.rules.reserve()
            pieces = [self._typed(name, {"type": name}) for name in TYPES if name != "integer"]
            self.rules.define(self._any, " | ".join(pieces))
        return self._any

    def _reference(self, reference: JSON) -> str:
        if not isinstance(reference, str) or (target := pointed(reference, self.root)) is None:
            raise Inexpressible("a reference to nothing")
        if reference not in self._references:
            name = self._references[reference] = self.rules.reserve()
            self.rules.define(name, self.value(target))
        return self._references[reference]

    def _one_of(self, schema: Mapping[str, JSON], words: set[str]) -> str:
        if not words <= {"enum", "const", "type"}:
            raise Inexpressible("given values beside other words")
        found = [self.constant(value) for value in given_values(schema)]
        if not found:
            raise Inexpressible("no value at all")
        return self.rules.add(" | ".join(self.rules.markup(text) for text in found))

    def _typed(self, name: JSON, schema: Mapping[str, JSON]) -> str:
        if name == "string":
            return self.string(schema)
        if name in ("integer", "number"):
            words = words_of(schema, "number")
            if not words <= {"type", *OF_TYPES["number"]}:
                raise Inexpressible("a number by other words")
            if words <= {"type"}:
                return self.rules.terminal(_INTEGER if name == "integer" else _NUMBER)
            return self.rules.json({**{word: schema[word] for word in words}, "type": name})
        if name in ("boolean", "null") and words_of(schema) == {"type"}:
            truths = f"{quoted(self.true)} | {quoted(self.false)}"
            return self.rules.add(truths) if name == "boolean" else quoted(self.null)
        if name == "array":
            return self._array(schema)
        if name == "object":
            return self._object(schema)
        raise Inexpressible("a value of another type")

    def _array(self, schema: Mapping[str, JSON]) -> str:
        words = words_of(schema, "array") - {"type", "items", "prefixItems"}
        if not words <= {"minItems", "maxItems"}:
            raise Inexpressible("a list by other words")
        first = schema.get("prefixItems", [])
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not (
            isinstance(first, list) and isinstance(least, int) and isinstance(most, int | None)
        ):
            raise Inexpressible("a list by malformed words")
        if schema.get("items") is False:
            most = min(len(first), len(first) if most is None else most)
        first = first[:most]
        if not 0 <= least <= (MOST_TIMES if most is None else most) <= MOST_TIMES:
            raise Inexpressible("a list of a size that is too large")
        comma, more = quoted(self.comma), ""
        if most is None or most > len(first):
            item = self.value(schema.get("items", True))
            fewest = max(least - max(len(first), 1), 0)
            upper = "" if most is None else most - max(len(first), 1)
            more = f"({comma} {item}){{{fewest},{upper}}}" if upper != 0 else ""
            if not first:
                return self.rules.add(f'"[" ({item} {more}){"" if least else "?"} "]"')
        for n, each in reversed(list(enumerate(first))):
            lead = f"{comma} " if n else ""
            more = f"({lead}{self.value(each)} {more}){'' if n < least else '?'}"
        return self.rules.add(f'"[" {more} "]"')

    def _object(self, schema: Mapping[str, JSON]) -> str:
        return self.rules.add(f'"{{" {self.row(members(schema, self.root))} "}}"')

    def row(self, found: Members, values: Notation | None = None) -> str:
        """Properties in their order with commas between them, the optional ones at will.

        values: the notation of what they hold, if it is another one. Raises Inexpressible.
        """
        comma, values = quoted(self.comma), values or self
        named: list[tuple[Member, str]] = []
        for each in found.named:
            try:
                head = self.rules.markup(self.key(each.key) + self.colon)
                named.append((each, f"{head} {values.value(each.schema)}"))
            except Inexpressible:
                if each.is_required:
                    raise  # what is optional need not be there
        more = ""  # what may follow once something stands there
        heads: list[str] = []
        if found.extra is not None:
            extra = self.rules.add(f"{self._other_key(found)} {values.value(found.extra)}")
            more = f"({comma} {extra}){{0,{found.most_extra}}}"
            rest = f" ({comma} {extra}){{0,{found.most_extra - 1}}}"
            if not any(member.is_required for member, _ in named):
                heads.append(extra + (rest if found.most_extra > 1 else ""))
        first_required = next((n for n, (m, _) in enumerate(named) if m.is_required), None)
        for n, (member, item) in reversed(list(enumerate(named))):
            if first_required is None or n <= first_required:
                heads.append(f"{item} {more}".rstrip())
            more = self.rules.add(f"({comma} {item}){'' if member.is_required else '?'} {more}")
        if first_required is None:
            heads.append('""')
        return self.rules.add(" | ".join(reversed(heads)))

    def _other_key(self, found: Members) -> str:
        key = self.rules.terminal(self.other_key([member.key for member in found.named]))
        return f"{key} {quoted(self.colon)}"


def _is_narrow(schema: Mapping[str, JSON], without: Sequence[str]) -> bool:
    """Whether a value is no text of its own: a number, a string by a pattern, one that is given."""
    if {"pattern", "format", "enum", "const"} & set(schema):
        given = json.dumps([schema.get("enum"), schema.get("const")], ensure_ascii=False).lower()
        is_string = schema.get("type", "string") == "string"
        return is_string and not any(text.lower() in given for text in without)
    return schema.get("type") in ("integer", "number", "boolean", "null")


def _references(schema: JSON) -> list[str]:
    found: list[str] = []
    inside = [schema]
    while inside:
        each = inside.pop()
        if isinstance(each, Mapping):
            inside += each.values()
            if isinstance(reference := each.get("$ref"), str):
                found.append(reference)
        elif isinstance(each, list):
            inside += each
    return found
