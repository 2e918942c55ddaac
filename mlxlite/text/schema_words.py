"""One schema's words, in those that llguidance keeps (floor 1, column "text"; decision D7).

    within     the schemas that stand in a schema
    reworded   a schema without words that ask for nothing, and with others for those that the
               compiler takes wrongly or not at all: what it allows then is allowed by the schema as
               it was sent, too
    unkept     what neither helps with, although the compiler raises nothing (1.9)

Both look at one schema, whatever stands in it; `json_schema` walks. Nothing is changed in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from mlxlite.types import JSON

# Tables of schemas by name, which are none themselves.
TABLES = (
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
)  # fmt: skip
VALUES = ("const", "enum", "default", "examples", "required")  # data, in which no schema is

_MOST_ALTERNATIVES = 64  # objects of one property at least: one branch a property

# Bounds are read as 64-bit floats, and an integer's range is built from 64-bit integers.
_LARGEST_INTEGER = 2**63 - 1024
_LARGEST_NUMBER = 2**53 - 1

_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = (
    r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"  # not 0000
)
_DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
# The compiler has 29 February in each year, leap seconds at any time, and no end of digits.
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

_DRAFT = re.compile(
    r"https?://json-schema\.org/(?:(draft-0[4-7]/schema)|(draft/20(?:19-09|20-12)/schema))#?"
)


def within(schema: Mapping[str, JSON]) -> Iterator[JSON]:
    """The schemas that stand directly in one; what an unknown word holds is taken for one too,
    since references point anywhere."""
    for key, value in schema.items():
        if key in VALUES:
            continue
        if key in TABLES and isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list):
            yield from value
        elif isinstance(value, Mapping):
            yield value


def mapped(schema: Mapping[str, JSON], change: Callable[[JSON], JSON]) -> dict[str, Any]:
    """A copy of a schema with each one that `within` finds changed."""
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in VALUES:
            out[key] = value
        elif key in TABLES and isinstance(value, Mapping):
            out[key] = {name: change(each) for name, each in value.items()}
        elif isinstance(value, list):
            out[key] = [change(each) for each in value]
        else:
            out[key] = change(value) if isinstance(value, Mapping) else value
    return out


def reworded(schema: Mapping[str, JSON], resolved: Callable[[JSON], JSON]) -> dict[str, Any]:
    """A schema in words that are kept. resolved: a reference -> what it refers to."""
    out = dict(schema)
    _name_draft(out)
    for word in _idle(out):
        del out[word]
    _reword_names(out, resolved)
    _reword_counts(out)
    _reword_bounds(out)
    if isinstance(out.get("format"), str) and out["format"] in _FORMATS:
        pattern = _FORMATS[out.pop("format")]
        if "pattern" not in out:
            out["pattern"] = pattern
        elif isinstance(out.get("allOf", []), list):
            out["allOf"] = [*out.get("allOf", []), {"pattern": pattern}]
    return out


def _name_draft(out: dict[str, Any]) -> None:
    """A draft as the compiler knows it; one that it does not know is the newest."""
    named = out.get("$schema")
    if not isinstance(named, str):
        return
    found = _DRAFT.fullmatch(named)
    if found is None:
        del out["$schema"]
    elif found[1]:
        out["$schema"] = f"http://json-schema.org/{found[1]}#"
    else:
        out["$schema"] = f"https://json-schema.org/{found[2]}"


def _idle(schema: Mapping[str, Any]) -> set[str]:
    """Words that ask for nothing, which the compiler does not know all the same."""
    found = set()
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (
        schema.get("uniqueItems") is True and _is_number(most) and most <= 1
    ):
        found.add("uniqueItems")
    for word in ("unevaluatedProperties", "unevaluatedItems"):
        if schema.get(word) is True or schema.get(word) == {}:
            found.add(word)
    for word in ("dependencies", "dependentRequired", "dependentSchemas"):
        if schema.get(word) == {}:
            found.add(word)
    if "contains" not in schema:
        found |= {"minContains", "maxContains"} & schema.keys()
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        found |= {"contains", "minContains"}
    if "if" not in schema:
        found |= {"then", "else"} & schema.keys()
    elif not {"then", "else"} & schema.keys():
        found.add("if")
    if schema.get("not") is False:
        found.add("not")
    return found


def _reword_names(out: dict[str, Any], resolved: Callable[[JSON], JSON]) -> None:
    """`propertyNames` with a list or a pattern as properties of these names: how Pydantic and zod
    write a table whose keys are an enumeration."""
    if "propertyNames" not in out:
        return
    names = resolved(out["propertyNames"])
    if names is True:
        del out["propertyNames"]
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return
    asked = names.keys() - {"type", "title", "description", "$comment"}
    if not asked:
        del out["propertyNames"]
        return
    if {"properties", "patternProperties", "unevaluatedProperties", "$ref", "allOf"} & out.keys():
        return
    values = [names["const"]] if asked == {"const"} else names.get("enum")
    value = out.get("additionalProperties", True)
    if asked <= {"const", "enum"} and isinstance(values, list):
        out["properties"] = {name: value for name in values if isinstance(name, str)}
    elif asked == {"pattern"}:
        out["patternProperties"] = {names["pattern"]: value}
    else:
        return
    del out["propertyNames"]
    out["additionalProperties"] = False


def _reword_counts(out: dict[str, Any]) -> list[str]:
    """`minProperties` and `maxProperties` beside properties that may be left out, where the
    compiler would allow none of these; the words that are lost."""
    names, required = _names_of(out)
    least = out.get("minProperties")
    if _is_number(least) and least <= len(required):
        del out["minProperties"]
    elif least == 1 and 0 < len(names) <= _MOST_ALTERNATIVES and not _is_combined(out):
        del out["minProperties"]
        # Closed, if nothing is said: `closed` leaves what has an `anyOf` as it is.
        out["anyOf"] = [{"required": [name]} for name in sorted(names)]
        out.setdefault("additionalProperties", False)
    if names <= required:
        return []
    most, may_more = out.get("maxProperties"), out.get("additionalProperties", False) is not False
    if _is_number(most) and most >= len(names) and not may_more and not _is_combined(out):
        del out["maxProperties"]
        out["additionalProperties"] = False
    # One at most is a case of its own, which works.
    is_bad = {"minProperties": True, "maxProperties": may_more or not _is_number(most) or most > 1}
    lost = [word for word in is_bad if word in out and is_bad[word]]
    for word in lost:
        del out[word]
    return lost


def _names_of(schema: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """The properties that a schema names, and those that it requires."""
    names, required = schema.get("properties"), schema.get("required")
    return (
        set(names) if isinstance(names, Mapping) else set(),
        {each for each in required if isinstance(each, str)}
        if isinstance(required, list)
        else set(),
    )


def _is_combined(schema: Mapping[str, Any]) -> bool:
    words = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
    return any(word in schema for word in words)


def _reword_bounds(out: dict[str, Any]) -> None:
    """Bounds that a float holds and the compiler bears, moved inwards where they are not."""
    most = _LARGEST_INTEGER if out.get("type") == "integer" else _LARGEST_NUMBER
    for word, sign in (
        ("maximum", 1), ("exclusiveMaximum", 1), ("minimum", -1), ("exclusiveMinimum", -1),
    ):  # fmt: skip
        bound = out.get(word)
        if not _is_number(bound):
            continue
        if sign * bound > most:
            out[word] = sign * most
        elif sign * bound >= -most and float(bound) != bound:
            nearest = float(bound)
            if sign * nearest > sign * bound:
                nearest = math.nextafter(nearest, -sign * math.inf)
            out[word] = int(nearest)


def unkept(schema: Mapping[str, JSON]) -> list[str]:
    """What an answer may break of a schema as it was sent, by its own words."""
    lost = _reword_counts(dict(schema))
    found = [f"{word} beside properties that may be left out" for word in lost]
    least, (_, required) = schema.get("minProperties"), _names_of(schema)
    # A name that no property has may come twice, and counts once.
    if _is_number(least) and least > len(required) + 1 and not lost:
        found.append("minProperties of names that are not given")
    if any(_is_inexact(schema[word]) for word in ("const", "enum") if word in schema):
        found.append("a number that a 64-bit float does not hold")
    return found


def _is_inexact(value: JSON) -> bool:
    inside = [value]
    while inside:
        each = inside.pop()
        if isinstance(each, Mapping):
            inside += each.values()
        elif isinstance(each, list):
            inside += each
        elif isinstance(each, int) and (abs(each) >= 2**1023 or float(each) != each):
            return True
    return False


EXCLUSIVE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


def is_close(schema: Mapping[str, JSON], name: str, other: Mapping[str, JSON]) -> bool:
    """Whether a bound that is a whole number and excluded is less than 1 away from the other end:
    there it is let through, 0 for a number above 0 and below 0.5."""
    bound = schema.get(name)
    ends = [other.get(word) for word in EXCLUSIVE[name]]
    if not _is_number(bound) or bound != bound // 1 or schema.get("type") == "integer":
        return False
    return any(_is_number(end) and abs(end - bound) < 1 for end in ends)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
