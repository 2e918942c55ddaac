"""A client's JSON schema, before it is compiled (floor 1, column "text"; spec 40 section 1).

    closed     no property comes that an object's schema does not name, unless it says otherwise.
               That only narrows what is allowed, so an answer still fits the schema as it was sent
    separated  a `oneOf` whose branches exclude each other by a tag is an `anyOf`, which compiles
    doubts     what llguidance takes and does not keep

Everything here copies; what was sent is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxlite.types import JSON

MOST_LEVELS = 100  # of nesting; llguidance's reader ends at 128

# Where schemas stand in a schema: under one name, in a list, in a table of names.
_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# An object beside one of these may get properties from elsewhere.
_OPENING = ("patternProperties", "additionalProperties", "unevaluatedProperties", "$ref", "allOf")
_OPENING_TOO = ("anyOf", "oneOf", "$dynamicRef", "if", "minProperties")


def levels(value: JSON) -> int:
    """How deep a JSON value is nested, counted up to one more than is allowed."""
    depth, inside = 0, [value]
    while inside and depth <= MOST_LEVELS:
        depth += 1
        inside = [
            child
            for each in inside
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def closed(schema: JSON) -> JSON:
    """The schema with its objects closed. Parts of an `allOf` stay open: they add up."""
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = dict(schema)
    for name in _ONE:
        if name in out:
            out[name] = _closed_all(out[name])
    for name in _LISTS:
        if isinstance(out.get(name), list):
            out[name] = [closed(each) for each in out[name]]
    for name in _TABLES:
        if isinstance(out.get(name), Mapping):
            out[name] = {key: closed(each) for key, each in out[name].items()}
    named = out.get("properties")
    required = out.get("required", [])
    if (
        isinstance(named, Mapping)
        and named
        and not any(name in out for name in (*_OPENING, *_OPENING_TOO))
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
    ):
        out["additionalProperties"] = False
    return out


def _closed_all(value: JSON) -> JSON:
    return [closed(each) for each in value] if isinstance(value, list) else closed(value)


def separated(schema: JSON, root: JSON | None = None) -> JSON:
    """The schema with `anyOf` for each `oneOf` that a tag tells apart: a required property that is
    another string in each branch, as Pydantic's and OpenAPI's discriminators are."""
    root = schema if root is None else root
    if isinstance(schema, list):
        return [separated(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {key: separated(value, root) for key, value in schema.items() if key not in _VALUES}
    out |= {key: value for key, value in schema.items() if key in _VALUES}
    branches = out.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in out and _have_tag(branches, root):
        out["anyOf"] = out.pop("oneOf")
    return out


_VALUES = ("const", "enum", "default", "examples")  # data, in which no schema is


def _have_tag(branches: Sequence[JSON], root: JSON) -> bool:
    tables = [_tags(_resolved(branch, root)) for branch in branches]
    shared = set.intersection(*(set(table) for table in tables)) if tables else set()
    return any(
        sum(len(table[name]) for table in tables) == len(set().union(*(t[name] for t in tables)))
        for name in shared
    )


def _tags(branch: JSON) -> dict[str, frozenset[str]]:
    """The required properties of an object that are one of some strings."""
    found: dict[str, frozenset[str]] = {}
    if not isinstance(branch, Mapping) or branch.get("type") != "object":
        return found
    named, required = branch.get("properties"), branch.get("required")
    if not isinstance(named, Mapping) or not isinstance(required, list):
        return found
    for name, schema in named.items():
        if name not in required or not isinstance(schema, Mapping):
            continue
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            found[name] = frozenset(values)
    return found


def _resolved(schema: JSON, root: JSON) -> JSON:
    """What a plain reference such as `#/$defs/Cat` refers to."""
    target = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(target, str) or not target.startswith("#/") or set(target) & set("~%"):
        return schema
    found = root
    for key in target[2:].split("/"):
        if not isinstance(found, Mapping) or key not in found:
            return schema
        found = found[key]
    return found


def doubts(schema: JSON) -> tuple[str, ...]:
    """What an answer may break although llguidance raises nothing (1.9).

    A bound that is a whole number and excluded is let through where the other one is less than 1
    away: 0 is taken for a number above 0 and below 0.5.
    """
    found: list[str] = []
    inside = [schema]
    while inside:
        each = inside.pop()
        if isinstance(each, list):
            inside += each
        elif isinstance(each, Mapping):
            inside += [value for key, value in each.items() if key not in _VALUES]
            found += [name for name in _EXCLUSIVE if _is_close(each, name)]
    return tuple(f"{name} of a range that is narrower than 1" for name in dict.fromkeys(found))


_EXCLUSIVE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


def _is_close(schema: Mapping[str, JSON], name: str) -> bool:
    bound = schema.get(name)
    ends = [schema.get(other) for other in _EXCLUSIVE[name]]
    if not isinstance(bound, int | float) or bound != bound // 1 or schema.get("type") == "integer":
        return False
    return any(isinstance(end, int | float) and abs(end - bound) < 1 for end in ends)
