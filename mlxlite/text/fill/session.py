"""Fill session: one answer's history, its proposals and what became of them (spec 50 section 6).

    push(token)           a drawn token came; what is known to follow it, if anything
    observe(ids)          ids that others forced came
    commit(proposal, n)   so many of a proposal's ids came to be the next ones

It touches neither text nor model: sources propose, a guard consents, the guide carries proposals to
the engine. Owned by its row; used on the engine thread once the row runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from mlxlite.text.fill.echo import EchoSource, PromptIndex
from mlxlite.text.fill.plan import (
    FEWEST,
    PATIENCE,
    UNLIMITED,
    FillPlan,
    Origin,
    Policy,
    Proposal,
    Row,
    Source,
    StrictPlan,
    View,
)
from mlxlite.types import JSON, Took


class Consent(Protocol):
    """What a session asks of its guard."""

    @property
    def is_lost(self) -> bool:
        """It will allow nothing any more."""

    def observe(self, ids: Sequence[int]) -> None: ...

    def allows(self, row: Row) -> bool: ...


@dataclass(slots=True)
class Counters:
    """What a session did; the names of spec 50 section 10, which go out in camel case.

    wasted_samples is 0 here: a draw is made after the guide spoke.
    """

    events: int = 0
    injected: int = 0
    strict: int = 0
    echo: int = 0
    span_lens: list[int] = field(default_factory=list)
    wasted_samples: int = 0
    parse_fallback: int = 0
    index_truncated: int = 0
    decode_steps: int = 0
    verify_events: int = 0
    verify_accepted: int = 0
    verify_rejected: int = 0
    verify_unsupported: int = 0
    checkpoint_ms: float = 0.0
    branch_stops: int = 0

    def add(self, other: Counters) -> None:
        """Those of another answer to the same request."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def render(self) -> dict[str, JSON]:
        """As `usage.fill` has them."""
        return {_camel(each.name): getattr(self, each.name) for each in fields(self)}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


class StrictSource:
    """Rows whose trigger has just been written. guard: without one, rows that need it never fire,
    but for those that may be checked instead."""

    name = "strict"

    def __init__(self, plan: StrictPlan, guard: Consent | None) -> None:
        rows = [row for row in plan.rows if row.trigger and row.emit]
        self.window_needed = max((len(row.trigger) for row in rows), default=0)
        self.is_disabled = False
        self._guard = guard
        self._all_need_context = all(row.requires_context for row in rows)
        self._may_check = any(row.may_check for row in rows)
        self._idle = 0  # ids since the beginning, or since a row fired
        self._by_last: dict[int, list[Row]] = {}
        for row in sorted(rows, key=lambda row: -len(row.trigger)):  # stable: then the plan's order
            self._by_last.setdefault(row.trigger[-1], []).append(row)

    @property
    def is_over(self) -> bool:
        """Whether no row can fire any more."""
        if self.is_disabled or not self._by_last:
            return True
        is_lost = self._guard is None or self._guard.is_lost
        if self._may_check:  # without a guard nothing tells prose from what comes before a call
            return is_lost and self._idle > PATIENCE
        return self._all_need_context and is_lost

    def observe(self, ids: Sequence[int]) -> None:
        """The history is the session's; only how long nothing fired is counted here."""
        self._idle += len(ids)

    def propose(self, view: View) -> Proposal | None:
        last = view.tail(1)
        if self.is_over or not last:
            return None
        for row in self._by_last.get(last[0], ()):
            if view.tail(len(row.trigger)) != row.trigger:
                continue
            is_sure = self._may_fire(row)
            if is_sure or row.may_check:
                self._idle = 0
                policy = Policy.ASSERT if is_sure else Policy.VERIFY
                return Proposal(row.emit, policy, row.origin)
        return None

    def _may_fire(self, row: Row) -> bool:
        if not row.requires_context:
            return True
        return self._guard is not None and self._guard.allows(row)


class Session:
    """See the module. guard: fresh, of this answer. extras: sources asked after all others.
    indexed: the prompt, where echo looks; made here if other rows have no use for it."""

    def __init__(
        self,
        plan: FillPlan,
        prompt_ids: Sequence[int],
        guard: Consent | None = None,
        extras: Sequence[Source] = (),
        indexed: PromptIndex | None = None,
    ) -> None:
        self.counters = Counters()
        self._eos_ids = plan.eos_ids
        self._max_span = plan.max_span
        self._delimiters = plan.strict.delimiters
        self._guard = guard
        self._strict = StrictSource(plan.strict, guard)
        self._sources: list[Source] = [self._strict]
        if (echo := plan.echo) is not None:
            prompt = indexed or PromptIndex(prompt_ids, echo.k, echo.index_max)
            self._sources.append(EchoSource(echo, self._delimiters, plan.max_span, prompt))
        self._sources += extras
        window = max(source.window_needed for source in self._sources)
        self._view = _History(prompt_ids, window)
        self._open: Proposal | None = None  # returned and not committed

    @property
    def is_over(self) -> bool:
        """Whether nothing can be proposed any more."""
        return len(self._sources) == 1 and self._strict.is_over

    def push(self, token: int, budget: float = UNLIMITED) -> Proposal | None:
        """A drawn token came. budget: tokens that may still follow it. What is returned must be
        committed, once, before the next push."""
        assert self._open is None, "the last proposal was not committed"
        self.counters.decode_steps += 1
        self.observe((token,))
        self._view.budget = budget
        for source in self._sources:
            proposal = source.propose(self._view)
            if proposal is None:
                continue
            self.counters.branch_stops += proposal.branch_stop
            if (clamped := self._clamped(proposal, budget)) is not None:
                self._open = clamped
                return clamped
        return None

    def observe(self, ids: Sequence[int]) -> None:
        """Ids came that were neither drawn nor proposed here."""
        self._view.extend(ids)
        if self._guard is not None:
            self._guard.observe(ids)
        for source in self._sources:
            source.observe(ids)

    def commit(self, proposal: Proposal, count: int, last: Took | None = None) -> None:
        """So many ids of the open proposal are the next ones of the answer; 0: it was declined.
        last: what the engine said of it, or of its last part."""
        assert proposal is self._open, "not the proposal that is open"
        self._open = None
        count = min(max(count, 0), len(proposal.ids))
        counters = self.counters
        last = last or Took(count)
        counters.checkpoint_ms += last.checkpoint_s * 1000
        if proposal.policy is Policy.VERIFY and not last.is_supported:
            counters.verify_unsupported += 1
        elif proposal.policy is Policy.VERIFY and last.is_tried:
            counters.verify_events += count > 0
            counters.verify_accepted += count
            counters.verify_rejected += len(proposal.ids) - count
        if not count:
            return
        counters.events += 1
        counters.injected += count
        if proposal.origin is Origin.ECHO:
            counters.echo += count
        else:
            counters.strict += count
        counters.span_lens.append(count)
        self.observe(proposal.ids[:count])

    def note_parse_failure(self) -> None:
        """What looked like a call was none. Strict rows end then, if they had a part in it."""
        if self.counters.strict:
            self.counters.parse_fallback += 1
            self._strict.is_disabled = True

    def _clamped(self, proposal: Proposal, budget: float) -> Proposal | None:
        """What may be put in of a proposal, or None if that saves nothing."""
        is_echo = proposal.origin is Origin.ECHO
        ids = proposal.ids
        end = next((n for n, token in enumerate(ids) if token in self._eos_ids), len(ids))
        if is_echo:  # not strict rows: a scaffold is full of quotes
            closed = (n for n, token in enumerate(ids[:end], 1) if token in self._delimiters)
            end = next(closed, end)
        end = min(end, self._max_span)
        if math.isfinite(budget):
            end = min(end, math.floor(budget))
        if end < FEWEST:
            return None
        policy = proposal.policy
        if end < len(ids):
            self.counters.index_truncated += 1
            if is_echo and ids[end - 1] not in self._delimiters:
                policy = Policy.VERIFY
        return Proposal(ids[:end], policy, proposal.origin, proposal.branch_stop)


class _History:
    """The end of a sequence, as sources see it."""

    def __init__(self, prompt_ids: Sequence[int], window: int) -> None:
        self.length = len(prompt_ids)
        self.budget: float = UNLIMITED
        self._window = window
        self._ids = list(prompt_ids[max(len(prompt_ids) - window, 0) :])

    def extend(self, ids: Sequence[int]) -> None:
        self.length += len(ids)
        self._ids += ids
        if len(self._ids) > 2 * self._window + len(ids):  # not at each token
            del self._ids[: len(self._ids) - self._window]

    def tail(self, count: int) -> tuple[int, ...]:
        return tuple(self._ids[max(len(self._ids) - count, 0) :])
