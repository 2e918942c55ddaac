"""How a family's calls are written, as rules of a grammar (floor 1, column "text"; decision D8).

Beside the reader of each family stands its `Writing`, which makes a grammar in llguidance's Lark of
the calls to some tools. What it allows, the family's own reader reads back as just these calls.

    Rules    the rules of one grammar while they are made
    Writing  of a family: markup around the calls, and one call to a function
    Script   the writing of families whose arguments are one JSON object: a row of pieces

    start: r2 ("\\n" r2){0,15}                      opening, calls with something between, closing
    r1: %json {"type": "object", ...}
    r2: "<tool_call>" "\\n"? "{\\"name\\": \\"add\\", \\"arguments\\": " r1 "}\\n</tool_call>"

A marker that the model has a special token for is that token, spelled `<[17]>`; all else is text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mlxlite.text.json_schema import JSON_OPTIONS
from mlxlite.types import JSON

ANY_TEXT = "/(?s:.*)/"


class Inexpressible(Exception):
    """The family's markup has no way to write it. The text says what, for the client."""


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that may be called. schema: of its arguments. told: its parameters' schemas as the
    reader has them, by which it decodes XML-like values (`format.Tools`). is_strict: a promise."""

    name: str
    schema: Mapping[str, JSON]
    told: Mapping[str, JSON]
    is_strict: bool = False


class Rules:
    """The rules of a grammar. What they are made of are pieces of Lark: a name, a literal, several.

    literal: a text -> Lark, a special token if it is one. markers: texts that may be such tokens.
    """

    def __init__(self, literal: Callable[[str], str], markers: Sequence[str]) -> None:
        self._literal = literal
        special = [each for each in markers if is_token(literal(each))]
        ordered = map(re.escape, sorted(special, key=len, reverse=True))
        self._special = re.compile(f"({'|'.join(ordered)})") if special else None
        self._names: dict[str, str] = {}  # body -> name: what is alike is there once
        self._lines: list[str] = []
        self._count = 0

    def lines(self) -> list[str]:
        return self._lines

    def add(self, body: str) -> str:
        """A rule; its name."""
        return self._named(body, "r", "")

    def json(self, schema: Mapping[str, JSON]) -> str:
        """A rule for a value by a schema, as compact JSON."""
        return self.add(f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}")

    def terminal(self, body: str) -> str:
        """A terminal: one expression, which takes as much as it can."""
        return self._named(body, "T", "")

    def shortest(self, body: str) -> str:
        """A rule of one expression, which ends as soon as it can."""
        return self._named(body, "r", "[lazy]")

    def reserve(self) -> str:
        """The name of a rule that is to be defined, so that it can refer to itself."""
        self._count += 1
        return f"r{self._count}"

    def define(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def _named(self, body: str, letter: str, options: str) -> str:
        key = f"{letter}{options}: {body}"
        if key not in self._names:
            self._count += 1
            self._names[key] = f"{letter}{self._count}"
            self._lines.append(f"{self._names[key]}{options}: {body}")
        return self._names[key]

    # ------------------------------------------------------------------------------- the text

    def markup(self, text: str) -> str:
        """A text of ours, in which markers may be special tokens."""
        if self._special is None:
            return quoted(text)
        parts = self._special.split(text)  # every second one is a marker
        lark = [self._literal(p) if n % 2 else quoted(p) for n, p in enumerate(parts) if p]
        return " ".join(lark) or '""'

    def up_to(
        self,
        marker: str,
        *,
        within: Sequence[str] = (),
        without: Sequence[str] = (),
        before: str = "",
    ) -> str:
        """A text and the marker that ends it, as the reader finds it: the first one, in any case.

        within: expressions that must all match the text. without: further markers that it must not
        hold. before: what stands between such a text and its marker.
        """
        token = self._literal(marker)
        if not is_token(token) and not within and not without:
            return self.shortest(f"{ANY_TEXT} {_any_case(marker)}")
        body = " & ".join([*(within or [ANY_TEXT]), f"~{holding(marker, *without)}"])
        return self.ended(f"({body}) {quoted(before)}" if within and before else body, marker)

    def ended(self, body: str, marker: str) -> str:
        """An expression, and the marker after it, with which it ends where it first can."""
        token = self._literal(marker)
        if is_token(token):
            return f"{self.terminal(body)} {token}"
        return self.shortest(f"({body}) {quoted(marker)}")


def quoted(text: str) -> str:
    return json.dumps(text)


def is_token(lark: str) -> bool:
    """Whether a literal is a special token."""
    return lark.startswith("<[")


def expression(text: str) -> str:
    """A text inside a regular expression of Lark."""
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$/&~#-]", r"\\\g<0>", text)
    return escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def holding(*texts: str) -> str:
    """All texts that hold one of these, in any case. One complement of it costs much less than one
    for each."""
    return f"/(?s:.*)(?i:{'|'.join(map(expression, texts))})(?s:.*)/"


def one_of(texts: Sequence[str]) -> str:
    """These texts, as an expression."""
    return f"/({'|'.join(map(expression, texts))})/"


def _any_case(text: str) -> str:
    return f"/(?i:{expression(text)})/"


# ---------------------------------------------------------------------------------------- writings


@dataclass(frozen=True, kw_only=True)
class Writing(ABC):
    """How a family writes its calls.

    markers: texts that a vocabulary may hold as special tokens. openers: a call that the model
    makes by itself begins with one of these, or, where the answer begins, with one of `starters`.
    leads: what may stand ahead of such a call. opening, between, closing: around all calls of one
    block. names: which names of tools can be written. most_calls: that the model writes in a turn.
    """

    markers: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    opening: str = ""
    between: str = ""
    closing: str = ""
    names: str = r"[^\x00-\x1f]+"
    most_calls: int | None = None

    def starters(self, names: Sequence[str]) -> tuple[str, ...]:
        """For a request with tools of these names."""
        return ()

    @property
    def has_blocks(self) -> bool:
        """Whether one block holds several calls."""
        return bool(self.opening)

    def check_name(self, name: str) -> None:
        if re.fullmatch(self.names, name) is None:
            raise Inexpressible(f"this model's calls cannot write the name {name[:64]!r}")

    @abstractmethod
    def call(self, rules: Rules, function: Function) -> str:
        """One call to a function, as a piece of Lark. Raises Inexpressible."""

    def thought(self, rules: Rules) -> str:
        """What may come ahead of calls that must come, where no other part of the guide sees to
        it."""
        return ""


class Slot(Enum):
    """A place in a script."""

    NAME = "name"
    QUOTED = "quoted"  # the name as a JSON string
    ARGUMENTS = "arguments"
    LINE = "line"  # a line end, or none
    NUMBER = "number"


@dataclass(frozen=True, kw_only=True)
class Script(Writing):
    """pieces: of one call, in order; a text is markup."""

    pieces: tuple[str | Slot, ...]

    def call(self, rules: Rules, function: Function) -> str:
        self.check_name(function.name)
        lark: list[str] = []
        for piece in self.pieces:
            if isinstance(piece, str):
                lark.append(rules.markup(piece))
            elif piece is Slot.NAME:
                lark.append(quoted(function.name))
            elif piece is Slot.QUOTED:
                lark.append(quoted(json.dumps(function.name, ensure_ascii=False)))
            elif piece is Slot.LINE:
                lark.append('"\\n"?')
            elif piece is Slot.NUMBER:
                lark.append("/[0-9]{1,4}/")
            else:
                lark.append(rules.json(function.schema))
        return " ".join(lark)
