"""Schemas made at random from the words that are enforced, and some that are not."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("a", "b", "ab", "c", "x y", "é")
_PATTERNS = ("^a", "b$", "^[a-c]{1,3}$", "^\\d+$", "a|b", "^(x|yz)*$", "^.{0,2}$", "[^a]")
_FORMATS = ("date", "date-time", "time", "uuid", "ipv4")
_VALUES = (1, "a", "b", "ab", None, True, 0, 2.5, [1], {"a": 1}, "2020-01-01")


def random_schema(draw: random.Random) -> dict[str, Any]:
    """A schema of three levels at most, with two definitions."""
    make = _Maker(draw)
    return {"$defs": {"p": make.leaf(), "q": make.schema(1)}, **make.schema(3)}


class _Maker:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def _is(self, chance: float) -> bool:
        return self._draw.random() < chance

    def schema(self, levels: int) -> dict[str, Any]:
        choice = self._draw.choice
        kind = self._draw.random()
        if levels <= 0 or kind < 0.4:
            return self.leaf()
        if kind < 0.7:
            return self.object(levels)
        if kind < 0.8:
            made: dict[str, Any] = {"type": "array", "maxItems": choice((1, 2, 3))}
            if self._is(0.7):
                made["items"] = self.schema(levels - 1)
            if self._is(0.3):
                made["prefixItems"] = [self.schema(levels - 1)]
            if self._is(0.3):
                made["minItems"] = choice((0, 1))
            return made
        if kind < 0.9:
            word = choice(("anyOf", "anyOf", "oneOf", "allOf"))
            made = {word: [self.schema(levels - 1) for _ in range(choice((1, 2, 3)))]}
            return {**made, **self.leaf()} if self._is(0.2) else made
        return {"$ref": choice(("#/$defs/p", "#/$defs/q"))}

    def object(self, levels: int) -> dict[str, Any]:
        choice = self._draw.choice
        names = self._draw.sample(_NAMES, choice((1, 2, 3)))
        made: dict[str, Any] = {"type": "object"}
        if self._is(0.85):
            made["properties"] = {name: self.schema(levels - 1) for name in names}
        if self._is(0.7):
            made["required"] = names[: choice((0, 1, 3))]
        if self._is(0.35):
            made["additionalProperties"] = choice((True, False, False, self.leaf()))
        if self._is(0.15):
            made["patternProperties"] = {choice(("^a", "^b", "^z")): self.leaf()}
        if self._is(0.15):
            made["minProperties"] = choice((0, 1, 2))
        if self._is(0.5):
            made["maxProperties"] = choice((1, 2, 3))
        if self._is(0.05):
            made["propertyNames"] = choice(({"enum": ["a", "b"]}, {"pattern": "^a"}))
        return made

    def leaf(self) -> dict[str, Any]:
        choice = self._draw.choice
        kind = choice(("string", "string", "integer", "integer", "number", "data", "types"))
        if kind == "string":
            if self._is(0.15):
                return {"type": "string", "format": choice(_FORMATS)}
            made: dict[str, Any] = {"type": "string", "maxLength": choice((2, 3, 5))}
            if self._is(0.3):
                made["minLength"] = choice((0, 1, 2))
            if self._is(0.3):
                made["pattern"] = choice(_PATTERNS)
            return made
        if kind == "integer":
            made = {"type": kind, "minimum": choice((-10, 0, 3)), "maximum": choice((4, 9, 20))}
            if self._is(0.2):
                made["multipleOf"] = choice((2, 3, 1.5))
            return made
        if kind == "number":
            made = {"type": choice(("number", "number", ["number", "null"]))}
            made["minimum"] = choice((0, -1, 0.5, -2.5))
            made[choice(("maximum", "exclusiveMaximum"))] = choice((2, 1, 1.5, 10, 0.75))
            if self._is(0.4):
                made["exclusiveMinimum"] = choice((0, -1, 0.5, -2.5))
            if self._is(0.15):
                made["multipleOf"] = choice((0.5, 2, 0.25))
            return made
        if kind == "data":
            return {"enum": self._draw.sample(_VALUES, choice((1, 2, 3)))}
        return {
            "type": choice(("boolean", "null", ["boolean", "null"], ["string", "integer"])),
            "maxLength": 3, "minimum": 0, "maximum": 9,
        }  # fmt: skip
