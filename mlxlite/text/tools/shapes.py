"""What a client's schema says, as far as a grammar can follow it (floor 1, column "text"; D8).

    deciding, words_of   its words that are no annotations; those of one type of value
    resolved             without the references around it
    members              the properties of an object
    given_values         those of `enum` and `const`
    lengths, text_bounds  strings: as numbers, as expressions

What is not followed raises Inexpressible, whose text names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxlite.text.json_schema import pointed
from mlxlite.text.tools.writing import Inexpressible
from mlxlite.types import JSON

OF_TYPES = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    },
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
        *("unevaluatedProperties", "dependencies"),
    },
}  # fmt: skip
# Further words that decide what is valid; any other is an annotation.
_DECIDING = {
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    *("$ref", "$dynamicRef", "$recursiveRef"),
    *set().union(*OF_TYPES.values()),
}
LENGTHS = {"minLength", "maxLength"}
MOST_TIMES = 1000  # of a repetition in a grammar; what is longer is left to llguidance


@dataclass(frozen=True, slots=True)
class Member:
    """A property that is named. schema: its own."""

    key: str
    schema: JSON
    is_required: bool


@dataclass(frozen=True, slots=True)
class Members:
    """The properties of an object. extra: the schema of those without a name here, None if there
    are none. most_extra: how many of them."""

    named: tuple[Member, ...]
    extra: JSON = None
    most_extra: int = MOST_TIMES


def deciding(schema: Mapping[str, JSON]) -> set[str]:
    """The words of a schema that decide what is valid by it."""
    return _DECIDING & set(schema)


def words_of(schema: Mapping[str, JSON], *types: str) -> set[str]:
    """The words of a schema that decide about values of these types."""
    others = set().union(*(words for name, words in OF_TYPES.items() if name not in types))
    return deciding(schema) - others


def resolved(schema: JSON, root: JSON) -> JSON:
    """A schema without the references and the single `allOf` around it; itself if it has none."""
    for _ in range(100):  # references may go in circles
        if not isinstance(schema, Mapping):
            break
        words = deciding(schema)
        if words == {"$ref"} and (found := pointed(schema["$ref"], root)) is not None:
            schema = found
        elif words == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        else:
            break
    return schema


def members(schema: JSON, root: JSON) -> Members:
    """The properties of an object by its schema. Raises Inexpressible."""
    schema = resolved(schema, root)
    if schema is True or schema == {}:
        return Members((), {})
    if not isinstance(schema, Mapping):
        raise Inexpressible("parameters that are no object")
    unknown = words_of(schema, "object") - {"type", "properties", "required"}
    unknown -= {"additionalProperties", "minProperties", "maxProperties"}
    if unknown:
        raise Inexpressible(f"parameters by {sorted(unknown)[0]}")
    named = schema.get("properties", {})
    required = schema.get("required", [])
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    is_sound = isinstance(named, Mapping) and isinstance(required, list)
    is_sound &= isinstance(least, int) and isinstance(most, int | None)
    if not is_sound or not all(isinstance(key, str) for key in required):
        raise Inexpressible("parameters by a malformed schema")
    extra = schema.get("additionalProperties", {} if not named else False)
    found = [Member(key, each, key in required) for key, each in named.items() if each is not False]
    for key in required:
        if named.get(key, extra) is False:
            raise Inexpressible(f"the required parameter {str(key)[:64]!r}, which nothing allows")
        if key not in named:
            found.append(Member(key, extra, True))
    if least > sum(member.is_required for member in found):
        raise Inexpressible("parameters by minProperties")
    if most is None or (extra is False and most >= len(found)):
        return Members(tuple(found), None if extra is False else extra)
    most_extra = most - len(found)
    if most_extra < 0 or not all(member.is_required for member in found):
        raise Inexpressible("parameters by maxProperties")
    if most_extra == 0:
        return Members(tuple(found))
    return Members(tuple(found), extra, min(most_extra, MOST_TIMES))


def lengths(schema: Mapping[str, JSON]) -> tuple[int, str]:
    """The least and the most characters of a string; the latter empty if there is no bound. Raises
    Inexpressible."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not isinstance(least, int) or not (isinstance(most, int) or most == "") or least < 0:
        raise Inexpressible("a string by malformed words")
    if most != "" and most < least:
        raise Inexpressible("a string of no length")
    return least, str(most)


TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
    "array": list, "object": Mapping,
}  # fmt: skip


def given_values(schema: Mapping[str, JSON]) -> list[JSON]:
    """The values of `enum` and `const` that the schema's type allows."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise Inexpressible("values by a malformed enum")
    if "const" in schema and "enum" in schema:
        values = [value for value in values if same(value, schema["const"])]
    kinds = schema.get("type")
    if kinds is None:
        return values
    names = kinds if isinstance(kinds, list) else [kinds]
    return [value for value in values if any(_is_of(value, name) for name in names)]


def same(one: JSON, other: JSON) -> bool:
    """Equal as JSON values: true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_of(value: JSON, name: JSON) -> bool:
    if isinstance(value, bool):
        return bool(name == "boolean")
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    kinds: Any = TYPES.get(name, ()) if isinstance(name, str) else ()
    return isinstance(value, kinds)


# ------------------------------------------------------------------------- text outside of quotes

_DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": f"{_BYTE}(\\.{_BYTE}){{3}}",
}
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|^$]|[^\\\[()|^$]+", re.DOTALL)


def text_bounds(schema: Mapping[str, JSON]) -> list[str]:
    """Expressions that a string without quotes must match all, by its schema; none if it is free.
    Raises Inexpressible."""
    words = words_of(schema, "string") - {"type"}
    if not words <= OF_TYPES["string"]:
        raise Inexpressible(f"a text by {sorted(words - OF_TYPES['string'])[0]}")
    found = []
    if words & LENGTHS:
        least, most = lengths(schema)
        found.append(f"/(?s:.{{{least},{most}}})/")
    if "pattern" in schema:
        found.append(_searched(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in list(_FORMATS):
            raise Inexpressible(f"a text by the format {str(schema['format'])[:64]!r}")
        found.append(f"/{_FORMATS[schema['format']]}/")
    return found


def _searched(pattern: JSON) -> str:
    """A pattern that is to be found somewhere in a text, as an expression for all of it."""
    if not isinstance(pattern, str):
        raise Inexpressible("a text by a malformed pattern")
    parts = _PARTS.findall(pattern)
    if "".join(parts) != pattern:
        raise Inexpressible("a text by a malformed pattern")
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = parts[1 if begins else 0 : -1 if ends else None]
    depth = 0
    for part in inner:
        depth += (part == "(") - (part == ")")
        if part in "^$" or (part == "|" and depth == 0 and (begins or ends)):
            raise Inexpressible("a text by a pattern with anchors inside")
    before, after = "" if begins else "(?s:.*)", "" if ends else "(?s:.*)"
    escaped = "".join(p.replace("/", "\\/") if p != "\\/" else p for p in inner)
    return f"/{before}({escaped}){after}/".replace("\n", "\\n")
