"""A client's JSON schema, before it is compiled (floor 1, column "text"; spec 40 section 1).

    closed     no property comes that an object's schema does not name, unless it says otherwise.
               That only narrows what is allowed, so an answer still fits the schema as it was sent
    separated  in words that llguidance keeps (`schema_words`); and a `oneOf` whose branches exclude
               each other by a tag is an `anyOf`, which compiles
    pointed    what a reference within a schema refers to
    doubts     what llguidance takes and does not keep
    endless    whether a part allows nothing, since it contains itself: rows would be stuck there

Everything here copies; what was sent is not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from mlxlite.text.schema_words import (
    EXCLUSIVE,
    is_close,
    mapped,
    reworded,
    unkept,
    within,
)
from mlxlite.types import JSON

# How llguidance reads a schema: compact JSON; what it does not know is told as a warning, where by
# default it would be an error.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "lenient": True,
    "coerce_one_of": True,
    # Letters after a backslash. Without `u`: the name of a property could be spelled in two ways
    # (`"a"`, `"\\u0061"`), and an open object would take the second for another one.
    "json_allowed_escapes": '"\\bfnrt',
}
MOST_LEVELS = 100  # of nesting; llguidance's reader ends at 128
MOST_REACH = 600  # the same with references followed; 1,000 fit 8 MB of stack, 2,000 do not

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


def reach(schema: JSON) -> int:
    """How deep a compiler gets that follows each reference where it first meets it, counted up to
    one more than is allowed. llguidance does so by recursion: 5,000 references in a row end the
    process."""
    deepest, followed = 0, set[int]()
    waiting: list[tuple[JSON, int]] = [(schema, 1)]
    while waiting and deepest <= MOST_REACH:
        each, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(each, list):
            waiting += [(one, depth + 1) for one in reversed(each)]
        elif isinstance(each, Mapping):
            inside = list(within(each))
            if (target := _target(each, schema)) is not None and id(target) not in followed:
                followed.add(id(target))
                inside.insert(0, target)
            waiting += [(one, depth + 1) for one in reversed(inside)]
    return deepest


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
    """The schema in words that llguidance keeps, with `anyOf` for each `oneOf` that a tag tells
    apart: a property that is another string in each branch, as Pydantic's and OpenAPI's
    discriminators are; it is required then. It allows nothing that the schema does not."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping):
        return schema
    out = mapped(schema, lambda each: separated(each, root))
    branches = out.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in out and (tag := _tag(branches, root)):
        out["anyOf"] = [_with_tag(branch, tag, root) for branch in out.pop("oneOf")]
    return reworded(out, functools.partial(_resolved, root=root))


def _tag(branches: Sequence[JSON], root: JSON) -> str | None:
    """The property by which no value can be of two branches, once it is there."""
    tables = [_tags(_resolved(branch, root)) for branch in branches]
    shared = set.intersection(*(set(table) for table in tables)) if tables else set()
    for name in sorted(shared):
        values = [table[name] for table in tables]
        if sum(map(len, values)) == len(frozenset[str]().union(*values)):
            return name
    return None


def _tags(branch: JSON) -> dict[str, frozenset[str]]:
    """The properties of an object that are one of some strings."""
    found: dict[str, frozenset[str]] = {}
    if not isinstance(branch, Mapping) or branch.get("type") != "object":
        return found
    named = branch.get("properties")
    for name, schema in named.items() if isinstance(named, Mapping) else ():
        if isinstance(schema, Mapping):
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(values, list) and all(isinstance(value, str) for value in values):
                found[name] = frozenset(values)
    return found


def _with_tag(branch: JSON, tag: str, root: JSON) -> JSON:
    """A branch that requires its tag; within an `allOf` objects would stay open."""
    required = _resolved(branch, root).get("required", [])
    if not isinstance(required, list) or tag in required:
        return branch
    if "$ref" in branch:
        return {"allOf": [branch], "required": [tag]}
    return {**branch, "required": [*required, tag]}


def _resolved(schema: JSON, root: JSON) -> JSON:
    """A schema, or what it refers to by a JSON pointer, such as `#/$defs/Cat`."""
    target = _target(schema, root)
    return schema if target is None else target


def _target(schema: JSON, root: JSON) -> JSON:
    return pointed(schema.get("$ref"), root) if isinstance(schema, Mapping) else None


def pointed(target: JSON, root: JSON) -> JSON:
    """What a reference into `root` refers to, as `#/$defs/Cat` does; None if nothing."""
    if not isinstance(target, str) or target[:1] != "#" or target[1:2] not in ("", "/"):
        return None
    found = root
    for key in unquote(target).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key[:9]) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def endless(schema: JSON) -> bool:
    """Whether a part of a schema can hold nothing but endlessly nested values, or only refers to
    itself. The compiler finds that at the very beginning alone."""
    parts, inside = list[Mapping[str, JSON]](), [schema]
    while inside:
        each = inside.pop()
        if isinstance(each, list):
            inside += each
        elif isinstance(each, Mapping):
            parts.append(each)
            inside += within(each)
    if not any("$ref" in each for each in parts):
        return False
    # What ends is found from the leaves up: each part that does may let those end that need it.
    known = {id(each) for each in parts}
    # What is no part ends: true, false (which the compiler refuses), and what is malformed.
    needs = [
        [group for group in _needs(each, schema) if all(id(one) in known for one in group)]
        for each in parts
    ]
    needed_by: dict[int, list[int]] = {}
    for n, groups in enumerate(needs):
        for each in (each for group in groups for each in group):
            needed_by.setdefault(id(each), []).append(n)
    ends: set[int] = set()
    waiting = list(range(len(parts)))
    while waiting:
        n = waiting.pop()
        part = id(parts[n])
        if part not in ends and all(any(id(e) in ends for e in group) for group in needs[n]):
            ends.add(part)
            waiting += needed_by.get(part, [])
    return any(id(each) not in ends for each in parts)


def _needs(schema: Mapping[str, JSON], root: JSON) -> list[list[JSON]]:
    """Groups of schemas, of each of which one at least must end for a value of this one to end."""
    groups: list[list[JSON]] = []
    if (target := _target(schema, root)) is not None:
        groups.append([target])
    parts = schema.get("allOf")
    groups += [[each] for each in parts] if isinstance(parts, list) else []
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list):
            groups.append(branches)
    named, required = schema.get("properties"), schema.get("required")
    if schema.get("type") == "object" and isinstance(named, Mapping) and isinstance(required, list):
        groups += [[named[n]] for n in required if isinstance(n, str) and n in named]
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        first = schema.get("prefixItems")
        each = first[0] if isinstance(first, list) and first else schema.get("items")
        groups.append([each])
    return groups


def doubts(schema: JSON) -> tuple[str, ...]:
    """What an answer may break although llguidance raises nothing (1.9)."""
    found: list[str] = []
    ends: list[Mapping[str, JSON]] = []  # schemas with bounds
    is_combined = False  # bounds of several schemas may meet
    inside = [schema]
    while inside:
        each = inside.pop()
        if isinstance(each, list):
            inside += each
        elif isinstance(each, Mapping):
            inside += within(each)
            found += unkept(each)
            if any(isinstance(each.get(word), int | float) for word in _BOUNDS):
                ends.append(each)
            is_combined |= "allOf" in each or any(
                word in each and any(bound in each for bound in _BOUNDS)
                for word in ("$ref", "anyOf", "oneOf")
            )
    for n, each in enumerate(ends):
        for name in EXCLUSIVE:
            # In a long list only neighbours are compared; that is a matter of time.
            others = ends[:_MOST_ENDS] if is_combined else ends[n : n + 1]
            if name in each and any(is_close(each, name, other) for other in others):
                found.append(f"{name} of a range that is narrower than 1")
    return tuple(dict.fromkeys(found))


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MOST_ENDS = 1000


def is_open(schema: JSON) -> bool:
    """Whether properties may come beside those that some object of a schema names."""
    inside = [schema]
    while inside:
        each = inside.pop()
        if isinstance(each, list):
            inside += each
        elif isinstance(each, Mapping):
            has_names = "properties" in each or "patternProperties" in each
            if has_names and each.get("additionalProperties", True) is not False:
                return True
            inside += within(each)
    return False
