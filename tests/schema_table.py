"""Schemas for structured output, by what they try: each answer must validate by `jsonschema`."""

from __future__ import annotations

from typing import Any

S: dict[str, Any] = {"type": "string", "maxLength": 4}
I: dict[str, Any] = {"type": "integer", "minimum": -99, "maximum": 99}  # noqa: E741  (a table of them)


def obj(required: Any = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": names}


def ref(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"$defs": {name: schema}, **more}


TREE = ref(
    "node",
    obj(["v"], v=I, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}),
    **{"$ref": "#/$defs/node"},
)

SCHEMAS: dict[str, Any] = {
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
    # objects
    "object-empty": {"type": "object", "properties": {}, "additionalProperties": False},
    "required-none": obj([], a=I, b=S),
    "required-some": obj(["b"], a=I, b=S, c={"type": "null"}),
    "required-order": obj(["z", "a"], a=I, m=S, z=I),
    "required-unnamed": {"type": "object", "required": ["x"], "additionalProperties": I,
                         "maxProperties": 1},
    "closed": {**obj(a=I), "additionalProperties": False},
    "open-typed": {"type": "object", "additionalProperties": I, "maxProperties": 2},
    "open-beside": {**obj(a=I), "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "names-odd": obj(**{"a b": I, 'q"uote': I, "ü": I, "": I, "$ref": I}),
    "names-keyword": obj(properties=I, enum=I, type=I, items=I),
    "names-prefixes": obj([], a=I, ab=I, abc=I),
    "nested": obj(a=obj(b=obj(c=obj(d=I)))),
    "nested-optional": obj([], a=obj([], b=I)),
    "object-array": obj(tags={"type": "array", "items": S, "maxItems": 2}),
    "object-nullable": obj(a={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    "patternProperties": {
        "type": "object", "patternProperties": {"^a": {"type": "integer", "maximum": 9,
        "minimum": 0}}, "additionalProperties": False, "maxProperties": 2,
    },
    "patternProperties-two": {
        "type": "object", "additionalProperties": False, "maxProperties": 2,
        "patternProperties": {"^n[0-9]$": I, "^s[0-9]$": S},
    },
    "maxProperties": {"type": "object", "additionalProperties": I, "maxProperties": 1},
    "twenty": obj(**{f"field_{n}": {"type": "boolean"} for n in range(20)}),
    "forty": obj(**{f"f{n}": [I, {"type": "boolean"}, {"enum": ["a"]}][n % 3] for n in range(40)}),
    "optional-many": obj([], **{f"k{n}": I for n in range(12)}),
    # combinations
    "anyOf": {"anyOf": [I, {"type": "boolean"}]},
    "anyOf-objects": {"anyOf": [obj(a=I), obj(b=S)]},
    "anyOf-tagged": {"anyOf": [obj(k={"const": "a"}, x=I), obj(k={"const": "b"}, y=S)]},
    "anyOf-nested": {"anyOf": [{"anyOf": [I, {"type": "null"}]}, {"enum": ["a"]}]},
    "anyOf-beside": {"type": "object", "properties": {"a": I}, "required": ["a"],
                     "anyOf": [{"required": ["a"]}], "additionalProperties": False},
    "anyOf-property": obj(v={"anyOf": [S, {"type": "null"}]}),
    "oneOf-disjoint": {"oneOf": [I, {"type": "boolean"}]},
    "oneOf-tagged": {"oneOf": [obj(k={"const": "a"}, x=I), obj(k={"const": "b"}, y=S)]},
    "oneOf-discriminated": {"$defs": {"A": obj(k={"enum": ["a", "b"]}), "B": obj(k={"const": "c"})},
        **obj(v={"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
                 "discriminator": {"propertyName": "k"}})},
    "oneOf-null": obj(v={"oneOf": [{"type": "null"}, I]}),
    "allOf-one": {"allOf": [obj(a=I)]},
    "allOf-objects": {"allOf": [obj(a=I), obj(b=S)], "additionalProperties": True,
                      "maxProperties": 2},
    "allOf-ranges": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "allOf-ref": {"$defs": {"base": obj(id=I)},
                  "allOf": [{"$ref": "#/$defs/base"}, obj(n={"type": "boolean"})],
                  "maxProperties": 2},
    "allOf-enum": {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["b", "c", "d"]}]},
    # references
    "ref": ref("n", I, **{"$ref": "#/$defs/n"}),
    "ref-definitions": {"definitions": {"n": I}, "$ref": "#/definitions/n"},
    "ref-chain": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": I}, "$ref": "#/$defs/a"},
    "ref-union-item": {"$defs": {"u": {"anyOf": [{"enum": ["only"]}]}},
                       "$ref": "#/$defs/u/anyOf/0"},
    "ref-array-item": {"$defs": {"t": {"prefixItems": [I, {"const": 5}]}},
                       "$ref": "#/$defs/t/prefixItems/1"},
    "ref-escaped": {"$defs": {"a/b~c": I}, "$ref": "#/$defs/a~1b~0c"},
    "ref-percent": {"$defs": {"a b": I}, "$ref": "#/$defs/a%20b"},
    "ref-property": {"type": "object", "properties": {"a": I, "b": {"$ref": "#/properties/a"}},
                     "required": ["a", "b"]},
    "ref-twice": {"$defs": {"p": obj(x=I)},
                  **obj(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    "ref-beside": {"$defs": {"n": {"type": "integer"}},
                   "$ref": "#/$defs/n", "minimum": 1, "maximum": 9},
    "ref-recursive": TREE,
    "ref-root": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"},
                 "maxItems": 1}}, "required": ["c"]},
    "ref-mutual": {"$defs": {"a": obj(b={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}),
                             "b": obj(a={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]})},
                   "$ref": "#/$defs/a"},
    # words that change nothing
    "annotations": {**obj(a={**I, "title": "t", "description": "d", "default": 1,
                    "examples": [1], "deprecated": True, "readOnly": True}), "$schema":
                    "https://json-schema.org/draft/2020-12/schema", "$comment": "c"},
    "id": {"$id": "https://example.com/a", **obj(a=I)},
    "unknown-word": {**obj(a=I), "x-order": ["a"], "nullable": True},
    "keyword-of-other-type": {"type": "integer", "maxLength": 1, "minimum": 1, "maximum": 3},
    "guidance-options": {**obj(a=I), "x-guidance": {"lenient": True, "item_separator": ";"}},
    # what Pydantic and clients write
    "pydantic": {"$defs": {"Step": {"properties": {"n": {**I, "title": "N"}, "done": {"type":
        "boolean"}}, "required": ["n", "done"], "title": "Step", "type": "object"}},
        "properties": {"steps": {"items": {"$ref": "#/$defs/Step"}, "maxItems": 2, "type": "array"},
        "note": {"anyOf": [S, {"type": "null"}], "default": None}},
        "required": ["steps"], "title": "Plan", "type": "object"},
    "openai-strict": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]},
        "unit": {"type": ["string", "null"], "enum": ["C", "F", None]}},
        "required": ["city", "unit"], "additionalProperties": False},
    "zod": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number",
        "minimum": 0, "maximum": 9}, "maxItems": 2}}, "required": ["a"], "additionalProperties":
        False, "$schema": "http://json-schema.org/draft-07/schema#"},
    "any": {},
    "any-property": obj(a={}),
    "true-property": obj(a=True),
}  # fmt: skip

# What llguidance does not know: told, never silently wrong.
UNSUPPORTED: dict[str, Any] = {
    "not": {**I, "not": {"const": 3}},
    "if": {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 9}},
    "else": {**I, "if": {"minimum": 3}, "else": {"maximum": 1}},
    "uniqueItems": {"type": "array", "items": I, "uniqueItems": True, "maxItems": 2},
    "contains": {"type": "array", "contains": {"const": 1}, "maxItems": 2, "items": I},
    "minContains": {"type": "array", "minContains": 1, "contains": {}, "maxItems": 2, "items": I},
    "propertyNames": {**obj(a=I), "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {**obj([], a=I, b=I), "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**obj([], a=I, b=I), "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {**obj(a=I), "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "items": I, "maxItems": 1, "unevaluatedItems": False},
    "dynamicRef": {"$dynamicRef": "#x", **I},
    "oneOf-overlap": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9},
                                {"type": "integer", "minimum": 5, "maximum": 14}]},
    "oneOf-tag-shared": {"oneOf": [obj(k={"enum": ["a", "b"]}), obj(k={"enum": ["b", "c"]})]},
    "exclusive-in-one": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    "exclusive-below": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
    "format-unknown": {**S, "format": "phone"},
    "pattern-lookahead": {"type": "string", "pattern": "^(?=a)a$"},
    "pattern-backreference": {"type": "string", "pattern": "^(a)\\1$"},
    "remote": {"$ref": "https://example.com/schema.json"},
}  # fmt: skip

MALFORMED: dict[str, Any] = {
    "type-unknown": {"type": "strin"},
    "type-number": {"type": 5},
    "pattern-open": {"type": "string", "pattern": "("},
    "pattern-number": {"type": "string", "pattern": 5},
    "properties-list": {"type": "object", "properties": []},
    "required-string": {"type": "object", "required": "a"},
    "enum-object": {"enum": {"a": 1}},
    "enum-empty": {"enum": []},
    "maxLength-negative": {"type": "string", "maxLength": -1},
    "maxLength-string": {"type": "string", "maxLength": "5"},
    "minimum-string": {"type": "integer", "minimum": "0"},
    "ref-missing": {"$ref": "#/$defs/nope"},
    "ref-number": {"$ref": 5},
    "anyOf-object": {"anyOf": {}},
    "allows-nothing": {"type": "integer", "minimum": 5, "maximum": 4},
    "items-nothing": {"type": "array", "minItems": 3, "maxItems": 2},
    "required-closed": {"type": "object", "required": ["a"], "additionalProperties": False},
    "holds-itself": obj(n={"$ref": "#"}),
    "refers-to-itself": {"$ref": "#"},
    "half-a-character": {"const": "\ud83d"},
}


def deep(levels: int) -> Any:
    schema: Any = I
    for _ in range(levels):
        schema = obj(a=schema)
    return schema


def unions(levels: int, word: str = "oneOf") -> Any:
    """Five branches at each level."""
    return I if levels == 0 else {word: [unions(levels - 1, word)] * 5}
