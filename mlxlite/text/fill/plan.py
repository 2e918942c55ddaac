"""Rows, plans, proposals: what the parts of fill say to each other (spec 50 sections 3, 4.3).

    row        trigger <tool_call>   emit \\n{"name": "get_weather", "arguments": {"city":
    proposal   what a source expects next: sure (assert), or to be checked by the model (verify)

Plain frozen values; whoever makes one decides what is in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

MOST_TOOLS = 32  # of a request; probing a part of them would take the others for impossible
MOST_SPAN = 64  # tokens of a determined span and of a close
MOST_CHOICE = 8  # tokens that tell one tool's name from the others'
PATIENCE = 256  # ids of an answer after which rows without a guard are not waited for
FEWEST = 2  # tokens of a fill: the next one is in flight already, so that one saves nothing


class Kind(Enum):
    """What a row completes."""

    SCAFFOLD = "scaffold"  # from the opening marker to where the tools part
    NAME = "name"  # the rest of a tool's name, and what is fixed after it
    KEY = "key"
    CLOSE = "close"  # from the end of the only value to the end of the call
    TURN_END = "turn-end"


class Policy(Enum):
    ASSERT = "assert"  # put in as it is
    VERIFY = "verify"  # kept as far as the model draws the same


class Origin(Enum):
    SCHEMA = "schema"
    TEMPLATE = "template"
    ECHO = "echo"


_ORIGINS = {Kind.NAME: Origin.SCHEMA, Kind.KEY: Origin.SCHEMA}


@dataclass(frozen=True, slots=True)
class Row:
    """After the ids of `trigger` come those of `emit`; neither may be empty.

    requires_context: a guard has to agree as well. may_check: where it does not, or there is none,
    the row fires all the same, to be checked by the model.
    """

    trigger: tuple[int, ...]
    emit: tuple[int, ...]
    kind: Kind
    requires_context: bool = True
    may_check: bool = False

    @property
    def origin(self) -> Origin:
        return _ORIGINS.get(self.kind, Origin.TEMPLATE)


@dataclass(frozen=True, slots=True)
class StrictPlan:
    """The rows of one set of tools; requests share it. delimiters: ids that end an argument's
    value."""

    rows: tuple[Row, ...] = ()
    delimiters: frozenset[int] = frozenset()


EMPTY = StrictPlan()


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """k: tokens that an anchor is long. candidates: earlier occurrences that vote, nearest first.
    index_max: tokens after which nothing more is indexed."""

    k: int = 8
    candidates: int = 24
    index_max: int = 131_072


@dataclass(frozen=True, slots=True)
class FillPlan:
    """What a session works with. max_span: tokens of one fill. echo: None without it."""

    strict: StrictPlan = EMPTY
    echo: EchoConfig | None = None
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    max_span: int = 32


@dataclass(frozen=True, slots=True)
class Proposal:
    """branch_stop: earlier occurrences went on differently after the last id."""

    ids: tuple[int, ...]
    policy: Policy
    origin: Origin
    branch_stop: bool = False


class View(Protocol):
    """What a source sees of a sequence. length: of prompt and answer. budget: tokens that may still
    come."""

    @property
    def length(self) -> int: ...

    @property
    def budget(self) -> float: ...

    def tail(self, count: int) -> tuple[int, ...]:
        """The last ids, oldest first; fewer where there are not so many."""


class Source(Protocol):
    """Something that proposes. window_needed: ids at the end of the sequence that it must see."""

    @property
    def name(self) -> str: ...

    @property
    def window_needed(self) -> int: ...

    def propose(self, view: View) -> Proposal | None: ...

    def observe(self, ids: Sequence[int]) -> None:
        """Told every id that entered the answer, drawn or put in, once and in order."""


UNLIMITED = math.inf
