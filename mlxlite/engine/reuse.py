"""Reuse: no prefix is computed twice (spec 60 sections 1 and 2).

Rows leave what they computed in a prefix tree, at the end of their prompt and at their own end, and
start from what is there. A row that shares a long beginning with one whose prompt is just being run
waits for that part instead of computing it as well. What is stored is keyed by exactly the tokens
that went through the model.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from mlxlite.engine.lanes import Lanes
from mlxlite.engine.prefix import PrefixTree, common_tokens
from mlxlite.engine.row import Phase, Row
from mlxlite.engine.slots import is_cuttable, leaves
from mlxlite.engine.spans import KVSpan, restore, span_of, state_of

log = logging.getLogger(__name__)

FEWEST_TOKENS = 16  # what is shorter is computed sooner than looked after
FEWEST_BEFORE_BOUNDARY = 256  # spec 60 section 2
FEWEST_SHARED = 64  # tokens still to be computed, for which waiting is worth it
MOST_BUFFERS = 100_000  # Metal ends a process with some 500,000


class PromptCache:
    """max_bytes: of all that is kept; 0 keeps nothing. Owned by the engine thread."""

    def __init__(self, lanes: Lanes, max_bytes: int) -> None:
        self._lanes = lanes
        kinds = list(leaves(lanes.new_cache()))
        self._has_spans = any(is_cuttable(kind) for kind in kinds)
        cut_anywhere = bool(kinds) and all(is_cuttable(kind) for kind in kinds)
        self.tree = PrefixTree(max_bytes, MOST_BUFFERS, cut_anywhere)
        self._checks = os.environ.get("MLXLITE_CHECK") == "1"

    @property
    def is_on(self) -> bool:
        return self.tree.max_bytes > 0

    def begin(self, row: Row, others: list[Row]) -> None:
        """A row is admitted: take over what is there, or wait for a row that is about to compute
        it; and mark the places at which its own state will be worth keeping.

        others: the live rows in the order of their admission, the row among them.
        """
        if not self.is_on or row.spec.prompt_logprobs:  # those need every token to be run
            return
        self.take_over(row)
        self._wait_for_shared(row, others)
        last = len(row.source) - 1
        if not self.tree.cut_anywhere:  # there only these places can ever be reused
            boundary = min(row.spec.snapshot_at or last, last)
            if boundary >= FEWEST_BEFORE_BOUNDARY:
                row.mark(boundary)
        if last >= FEWEST_TOKENS:
            row.mark(last)

    def take_over(self, row: Row) -> None:
        """Start from the longest prefix that is kept, if it is longer than what the row has."""
        ids = row.source
        namespace = row.spec.namespace
        if self.tree.peek(ids, namespace) <= row.fed:
            if row.fed == 0:
                self.tree.misses += 1
            return
        match = self.tree.match(ids, len(ids) - 1, namespace)
        assert match is not None
        caches = self._lanes.new_cache()
        try:
            restore(match, caches)
        except Exception:  # then it computes that part itself
            log.exception("a kept prefix could not be restored")
            return
        row.cache = caches
        row.fed = row.cached = match.length

    def _wait_for_shared(self, row: Row, others: list[Row]) -> None:
        best: Row | None = None
        most = row.fed + FEWEST_SHARED - 1
        for other in others:
            if other is row:
                break  # those behind it wait for it, not the other way round
            if (
                other.phase is not Phase.PREFILL
                or other.spec.prompt_logprobs
                or other.spec.namespace != row.spec.namespace
            ):
                continue
            last = min(len(row.source), len(other.source)) - 1
            shared = min(common_tokens(row.source, other.source), last)
            if shared > most and other.fed < shared:
                best, most = other, shared
        if best is not None:
            best.mark(most)
            row.waits_for, row.waits_until = best, most

    def passed(self, row: Row, rows: list[Row]) -> None:
        """A chunk of a prompt is done: keep it if it ends at a mark, and tell who waits for it."""
        if row.fed in row.marks:
            row.marks.remove(row.fed)
            self.keep(row)
        self._release(row, rows, row.fed)

    def ended(self, row: Row, rows: list[Row], keeps: bool) -> None:
        """A row is about to end: keep what it computed, unless it failed."""
        if keeps and self.is_on and not row.spec.prompt_logprobs and row.length >= FEWEST_TOKENS:
            self.keep(row)
        self._release(row, rows, None)

    def _release(self, row: Row, rows: list[Row], reached: int | None) -> None:
        for other in rows:
            if other.waits_for is row and (reached is None or reached >= other.waits_until):
                other.waits_for = None
                self.take_over(other)
                if reached is None:  # it left: one of those that waited goes on in its place
                    self._wait_for_shared(other, rows)

    def keep(self, row: Row) -> None:
        """Keep the state of all tokens of a row that went through the model. What fails here is
        logged: it must not hurt the row."""
        count = row.length
        if row.cache is None and self._lanes.pool_of(row) is None:
            return
        if row.ahead and not self.tree.cut_anywhere:
            return  # its state is that of a later position
        ids = (*row.spec.prompt_ids, *row.ids)[:count]
        assert len(ids) == count, "a token that went through the model is not known"

        def make_span(start: int, stop: int) -> KVSpan:
            if not self._has_spans:
                return KVSpan(stop - start, ())
            return span_of(row, self._lanes, start, stop)

        try:
            state: Any = None if self.tree.cut_anywhere else state_of(row, self._lanes)
            self.tree.insert(ids, make_span, state, row.spec.namespace)
            if self._checks:
                self.tree.check()
        except Exception:
            log.exception("the state of a row could not be kept")
            if self._checks:
                raise

    def stats(self) -> dict[str, int]:
        return {**self.tree.stats(), "max_bytes": self.tree.max_bytes}
