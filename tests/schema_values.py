"""Schemas of `schema_table` for values that are no objects, and what schemas are written with."""

from __future__ import annotations

from typing import Any

S: dict[str, Any] = {"type": "string", "maxLength": 4}
I: dict[str, Any] = {"type": "integer", "minimum": -99, "maximum": 99}  # noqa: E741  (a table of them)


def obj(required: Any = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": names}


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def number(**more: Any) -> dict[str, Any]:
    return {"type": "number", **more}


def integer(**more: Any) -> dict[str, Any]:
    return {"type": "integer", **more}


def array(items: Any = True, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def nested(levels: int) -> dict[str, Any]:
    return obj(n=nested(levels - 1)) if levels else I


def ref(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"$defs": {name: schema}, **more}


B: dict[str, Any] = {"type": "boolean"}
NULL: dict[str, Any] = {"type": "null"}
DIGIT: dict[str, Any] = integer(minimum=0, maximum=9)
DRAFT4, DRAFT7 = (f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 7))
DRAFT2019 = "https://json-schema.org/draft/2019-09/schema"

VALUES: dict[str, Any] = {
    # types
    "string": {"type": "string", "maxLength": 8},
    "integer": I,
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "array": {"type": "array", "items": I, "maxItems": 3},
    "object": obj(a=I),
    "types": {"type": ["boolean", "null"]},
    "types-mixed": {"type": ["integer", "string"], "maxLength": 3, "minimum": 0, "maximum": 9},
    "no-type-enum": {"enum": [1, "a", None, True, [1], {"a": 1}]},
    "type-list-of-one": {"type": ["integer"], "minimum": 0, "maximum": 9},
    "types-all": {"type": ["null", "boolean", "object", "array", "number", "string"]},
    "types-array-object": {"type": ["array", "object"], "items": I, "maxItems": 2,
                           "additionalProperties": I, "maxProperties": 2},
    "open-string": {"type": "string"},
    "open-number": {"type": "number"},
    "open-integer": {"type": "integer"},
    "open-array": {"type": "array"},
    "open-object": {"type": "object"},
    "no-type-minimum": {"minimum": 5, "maximum": 9},
    "no-type-maxLength": {"maxLength": 2},
    "no-type-items": {"items": I, "maxItems": 1},
    "no-type-required": {"required": ["a"]},
    "no-type-properties": {"properties": {"a": I}, "additionalProperties": False},
    "no-type-pattern": {"pattern": "^a$"},
    # enum, const
    "enum-strings": {"type": "string", "enum": ["red", "green", "blue"]},
    "enum-prefixes": {"enum": ["a", "ab", "abc"]},
    "enum-numbers": {"enum": [1, 2.5, -3, 1e3]},
    "enum-quotes": {"enum": ['say "hi"', "back\\slash", "line\nend", "tab\t"]},
    "enum-unicode": {"enum": ["Zürich", "東京", "😀"]},
    "enum-empty-string": {"enum": [""]},
    "enum-nested": {"enum": [{"a": [1, {"b": None}]}, [[], {}]]},
    "enum-typed": {"type": "integer", "enum": [1, "one", 2]},
    "const-string": {"const": "fixed"},
    "const-number": {"const": 3.25},
    "const-object": {"const": {"b": 1, "a": [True]}},
    "const-null": {"const": None},
    "const-property": obj(kind={"const": "x"}, n=I),
    "const-array": {"const": [1, "a", None]},
    "const-false": {"const": False},
    "const-empty": {"const": ""},
    "const-unicode": {"const": "naïve 😀"},
    "const-float": {"const": 0.1},
    "const-large": {"const": 1e20},
    "const-tiny": {"const": 5e-324},
    "const-nested": {"const": {"a": {"b": []}, "": {}}},
    "const-typed": string(const="x"),
    "const-in-enum": {"const": "a", "enum": ["a", "b"]},
    "enum-one": {"enum": [7]},
    "enum-bools-and-numbers": {"enum": [True, 1, 0, False]},
    "enum-floats": {"enum": [1.0, 0.1, 1e-7, -2.5e10, 1e21]},
    "enum-null-and-its-name": {"enum": [None, "null"]},
    "enum-300": {"enum": [f"choice-{n}" for n in range(300)]},
    "enum-long": {"enum": ["x" * 200]},
    "enum-controls": {"enum": ["\u0000", "\u001f", "\u007f", "\u2028", "\\u0041"]},
    "enum-of-numbers": number(enum=[1, 2.5, "x"]),
    "enum-maxLength": string(enum=["a", "bbb"], maxLength=1),
    "enum-pattern": string(enum=["a", "bbb"], pattern="^b"),
    "enum-format": string(enum=["x", "2020-01-01", "2021-02-29"], format="date"),
    "enum-minimum": {"enum": [1, 5, 9], "minimum": 4},
    "enum-multipleOf": integer(enum=[2, 3, 4], multipleOf=2),
    "enum-minItems": {"type": "array", "enum": [[1], [2, 3]], "minItems": 2},
    "enum-required": {"enum": [{"a": 1}, {"b": 2}], "required": ["a"]},
    "enum-that-looks-like-schemas": {"enum": [{"oneOf": [1]}, {"not": {}}, {"then": 0}]},
    # strings
    "minLength": {"type": "string", "minLength": 3, "maxLength": 6},
    "length-exact": {"type": "string", "minLength": 4, "maxLength": 4},
    "length-zero": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}$"},
    "pattern-open": {"type": "string", "pattern": "^ab", "maxLength": 5},
    "pattern-digits": {"type": "string", "pattern": "^\\d{3}-\\d{4}$"},
    "pattern-alternatives": {"type": "string", "pattern": "^(yes|no|maybe)$"},
    "pattern-optional": {"type": "string", "pattern": "^a?b+c{1,2}$", "maxLength": 6},
    "pattern-escapes": {"type": "string", "pattern": "^[\"\\\\/]{1,3}$"},
    "pattern-classes": {"type": "string", "pattern": "^[^a-z\\s]{2}$"},
    "format-date": {"type": "string", "format": "date"},
    "format-time": {"type": "string", "format": "time"},
    "format-date-time": {"type": "string", "format": "date-time"},
    "format-uuid": {"type": "string", "format": "uuid"},
    "format-ipv4": {"type": "string", "format": "ipv4"},
    "minLength-open": string(minLength=2),
    "length-two": string(minLength=2, maxLength=2),
    "pattern-and-lengths": string(pattern="^[a-z]+$", minLength=2, maxLength=4),
    "pattern-inside": string(pattern="a", maxLength=4),
    "pattern-end": string(pattern="b$", maxLength=3),
    "pattern-start-or-end": string(pattern="^a|b$", maxLength=3),
    "pattern-dot": string(pattern="^.{2}$"),
    "pattern-word": string(pattern="^\\w{1,3}$"),
    "pattern-digit": string(pattern="^\\d{1,3}$"),
    "pattern-neither": string(pattern="^\\D\\W$"),
    "pattern-space": string(pattern="^\\s{1,2}$"),
    "pattern-no-space": string(pattern="^\\S{1,2}$"),
    "pattern-han": string(pattern="^[\\u4e00-\\u9fff]{1,2}$"),
    "pattern-emoji": string(pattern="^[😀-😎]$"),
    "pattern-slash": string(pattern="^a\\/b$"),
    "pattern-dash-in-class": string(pattern="^[\\w.\\-]{1,3}@[a-z]{1,3}$"),
    "pattern-code-points": string(pattern="^\\x41\\u0042$"),
    "pattern-tab": string(pattern="^\\t\\n$"),
    "pattern-of-nothing": string(pattern="^$"),
    "pattern-empty": string(pattern="", maxLength=3),
    "pattern-group": string(pattern="^(?:ab){2}$"),
    "pattern-lazy": string(pattern="^a{1,3}?$"),
    "pattern-at-least": string(pattern="^a{2,}$", maxLength=4),
    "pattern-groups-in-groups": string(pattern="^(a(b|c)?){1,2}$"),
    "pattern-no-quote": string(pattern='^[^"]{2}$'),
    "pattern-dollar": string(pattern="^\\$[0-9]{1,2}$"),
    "pattern-backslashes": string(pattern="^\\\\{1,2}$"),
    "pattern-two": {"allOf": [string(pattern="^a"), string(pattern="b$", maxLength=4)]},
    "pattern-and-format": string(format="date", pattern="^20"),
    "format-and-length": string(format="ipv4", maxLength=9),
    "format-duration": string(format="duration", maxLength=12),
    "format-email": string(format="email", maxLength=24),
    "format-hostname": string(format="hostname", maxLength=24),
    "format-ipv6": string(format="ipv6"),
    "format-uri": string(format="uri", minLength=1, maxLength=24),
    "format-of-another-type": integer(format="int32", minimum=0, maximum=9),
    "format-in-items": array(string(format="date"), minItems=2, maxItems=2),
    "format-without-type": {"anyOf": [{"format": "date", "type": "string"}, NULL]},
    "content": string(contentMediaType="application/json", contentEncoding="base64", maxLength=4),
    # numbers
    "minimum": {"type": "integer", "minimum": 10, "maximum": 12},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "negative": {"type": "integer", "minimum": -5, "maximum": -1},
    "one-value": {"type": "integer", "minimum": 7, "maximum": 7},
    "number-range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "number-exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
    "multipleOf": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
    "multipleOf-one": {"type": "integer", "multipleOf": 1, "minimum": 0, "maximum": 5},
    "large": {"type": "integer", "minimum": 10**12, "maximum": 10**12 + 99},
    "integer-least": integer(minimum=5),
    "integer-most": integer(maximum=-5),
    "integer-between-floats": integer(minimum=1.5, maximum=3.5),
    "integer-between-excluded-floats": integer(exclusiveMinimum=1.5, exclusiveMaximum=4.5),
    "integer-both-kinds": integer(minimum=0, exclusiveMinimum=3, maximum=9, exclusiveMaximum=6),
    "integer-of-64-bits": integer(minimum=-(2**63), maximum=2**63 - 1),
    "integer-of-javascript": integer(minimum=1 - 2**53, maximum=2**53 - 1),
    "integer-inexact-bounds": integer(minimum=10**16 + 1, maximum=10**16 + 9),
    "number-least": number(minimum=0),
    "number-most": number(maximum=0),
    "number-above": number(exclusiveMinimum=0),
    "number-below": number(exclusiveMaximum=10),
    "number-tiny": number(minimum=0.001, maximum=0.002),
    "number-one-value": number(minimum=1.5, maximum=1.5),
    "number-zero": number(minimum=0, maximum=0),
    "number-large": number(minimum=1e3, maximum=1e6),
    "number-of-32-bits": number(minimum=-3.4028234663852886e38, maximum=3.4028234663852886e38),
    "number-of-64-bits": number(minimum=-1.7976931348623157e308, maximum=1.7976931348623157e308),
    "number-negative": number(minimum=-2.5, maximum=-1.25),
    "number-both-kinds": number(minimum=0, exclusiveMinimum=1, maximum=9),
    "number-between-excluded": number(exclusiveMinimum=0.5, exclusiveMaximum=2.5),
    "number-between-negative": number(exclusiveMinimum=-3, exclusiveMaximum=-1),
    "number-near": number(exclusiveMinimum=1.5, maximum=1.75),
    "exclusive-in-allOf": {"allOf": [number(exclusiveMinimum=0), number(maximum=1)]},
    "exclusive-elsewhere": obj(a=number(exclusiveMinimum=0), b=number(maximum=0.5, minimum=0)),
    "multipleOf-half": number(multipleOf=0.5, minimum=0, maximum=3),
    "multipleOf-quarter": number(multipleOf=0.25, minimum=-1, maximum=1),
    "multipleOf-in-range": integer(multipleOf=7, minimum=10, maximum=50),
    "multipleOf-negative": integer(multipleOf=3, minimum=-9, maximum=-1),
    "multipleOf-number": number(multipleOf=10, minimum=0, maximum=50),
    "multipleOf-both": {"allOf": [integer(multipleOf=2), integer(multipleOf=3, minimum=0,
                                                                 maximum=40)]},
    "multipleOf-fraction": integer(multipleOf=1.5, minimum=0, maximum=9),
    # arrays
    "items-empty": {"type": "array", "maxItems": 0},
    "minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "items-exact": {"type": "array", "items": I, "minItems": 3, "maxItems": 3},
    "items-enum": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 5},
    "items-array": {
        "type": "array", "maxItems": 2, "items": {"type": "array", "items": I, "maxItems": 2},
    },
    "items-object": {"type": "array", "items": obj(a=I), "minItems": 1, "maxItems": 2},
    "items-union": {"type": "array", "maxItems": 4, "items": {"anyOf": [I, {"type": "null"}]}},
    "prefixItems": {"type": "array", "prefixItems": [I, S], "items": False, "minItems": 2},
    "prefixItems-more": {
        "type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"},
        "minItems": 1, "maxItems": 3,
    },
    "prefixItems-fewer": {"type": "array", "prefixItems": [I, S, I], "items": False},
    "items-ref": {
        "$defs": {"n": I}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2,
    },
    "items-any": array({}, maxItems=2),
    "items-true": array(True, maxItems=1),
    "items-false": array(False),
    "items-none-named": {"type": "array", "minItems": 1, "maxItems": 1},
    "items-in-items": array(array(array(array(B, maxItems=1), maxItems=1), maxItems=1), maxItems=1),
    "items-ten": array(B, minItems=10, maxItems=10),
    "items-forty": array(B, maxItems=40),
    "items-least": array(B, minItems=2),
    "items-const": array({"const": "a"}, minItems=1, maxItems=2),
    "items-nullable": array({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, maxItems=3),
    "prefixItems-open": {"type": "array", "prefixItems": [I]},
    "prefixItems-and-maxItems": {"type": "array", "prefixItems": [I, S, B], "maxItems": 2},
    "prefixItems-and-minItems": {"type": "array", "prefixItems": [I], "items": B, "minItems": 3,
                                 "maxItems": 3},
    "prefixItems-nested": {"type": "array", "prefixItems": [array(I, maxItems=1), obj(a=I)],
                           "items": False, "minItems": 2},
    "uniqueItems-not": array(I, uniqueItems=False, maxItems=2),
    "uniqueItems-of-one": array(I, uniqueItems=True, maxItems=1),
    "contains-not": array(I, contains={"const": 1}, minContains=0, maxItems=2),
    "minContains-alone": array(I, minContains=2, maxItems=1),
    "additionalItems-alone": array(B, additionalItems=False, maxItems=1),
    "tuple-without-draft": {"type": "array", "items": [I, S], "additionalItems": False,
                            "minItems": 2},
}  # fmt: skip
