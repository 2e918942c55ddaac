"""The guide of a filled row: text decides as ever, and known tokens are proposed (floor 1, D24).

    observe(<tool_call>)  →  Verdict(keep=1, run=Run((198, 4913, …), is_sure=True))
    took(9)               →  the nine ids come to `observe` next, one by one

The engine is free to take a run or not, and draws against those that are not sure by itself; what
it took is told here, and here alone (spec 50 section 8 in the engine's words).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mlxlite.text.fill.plan import FEWEST, Policy, Proposal
from mlxlite.text.fill.session import Counters, Session
from mlxlite.text.fill.trace import Record, Trace
from mlxlite.text.guides import TextGuide
from mlxlite.types import Run, Took, Verdict

_UNTOLD = Took(0, is_tried=False)  # the row ended before its run's turn came


class FillGuide:
    """text: what is decided on text besides, or None if nothing is. limit: most tokens of the
    answer. trace: None without; with one, ids that come otherwise than they were taken are a fault.
    chunk: ids of a proposal that is sure in one run, 0: all; with 1 they are forced, a step each
    (spec 50 section 8.4). One that is not sure is a single run: it is checked in one forward.

    It steers: what is known to follow a token is told before the next one is drawn. But it gives
    the engine its step of lead back once nothing can be proposed any more, as in prose.
    """

    def __init__(
        self,
        text: TextGuide | None,
        session: Session,
        limit: int,
        trace: Trace | None = None,
        chunk: int = 0,
    ) -> None:
        self.session = session
        self._text = text
        self._limit = limit
        self._trace = trace
        self._chunk = chunk
        self.may_steer = True
        self._seen = 0  # ids of the answer
        self._open: Proposal | None = None  # some of its ids are still to be taken or declined
        self._began = 0  # ids of the answer before it
        self._count = 0  # how many of it were taken
        self._piece: tuple[int, ...] = ()  # the run of it that `took` answers
        self._taken: deque[int] = deque()  # ids of a run that have not come yet
        self._forced = 0  # and of those that text forces
        self._record: Record | None = None  # not written yet: it waits for the next draw

    @property
    def counters(self) -> Counters:
        """What was filled so far; the row's end makes it final."""
        return self.session.counters

    def observe(self, ids: Sequence[int]) -> Verdict:
        if not ids:
            return Verdict(0) if self._text is None else self._decided(self._text.observe(()))
        for n, token in enumerate(ids, 1):
            verdict = Verdict(1) if self._text is None else self._text.observe((token,))
            self._seen += 1
            if verdict.stop:
                self._settle()
                self._end_record()
                return Verdict(n - 1 + verdict.keep, stop=True)
            # Nothing is proposed where the next token is given, or here already.
            is_open = n == len(ids) and not verdict.forced
            self._take(token, self._limit - self._seen if is_open else 0)
            if verdict.forced:
                return self._decided(Verdict(n, forced=verdict.forced))
        if self.may_steer and self.session.is_over:
            self.may_steer = self._text is not None and self._text.may_steer
        return self._next_piece(len(ids))

    def took(self, what: Took) -> None:
        assert self._open is not None and self._piece, "no run was proposed"
        piece, self._piece = self._piece, ()
        self._count += what.count
        self._taken.extend(piece[: what.count])
        left = len(self._open.ids) - self._count
        if what.count < len(piece) or left < FEWEST:  # a single id saves nothing
            self._settle(what)
        else:
            self.session.counters.checkpoint_ms += what.checkpoint_s * 1000

    def _next_piece(self, keep: int) -> Verdict:
        """The verdict on what was seen, with the next run of the open proposal, if one is due."""
        if self._open is None or self._taken:
            return Verdict(keep)
        ids = self._open.ids[self._count :]
        is_sure = self._open.policy is Policy.ASSERT
        if is_sure and self._chunk == 1:
            self._count = len(ids)
            self._taken.extend(ids)
            self._settle()
            return Verdict(keep, forced=ids)
        self._piece = ids[: self._chunk] if is_sure and self._chunk else ids
        return Verdict(keep, run=Run(self._piece, is_sure))

    def _settle(self, last: Took = _UNTOLD) -> None:
        """Nothing more of the open proposal will be taken. last: what became of its last run."""
        proposal, self._open = self._open, None
        if proposal is None:
            return
        self.session.commit(proposal, self._count, last)
        if self._trace is not None:
            self._record = Record(proposal, self._began, self._count)
            if proposal.policy is Policy.ASSERT or self._count == len(proposal.ids):
                self._end_record()

    def ended(self, calls: int) -> None:
        """The row is over, and so many calls came of it. Not on the engine's thread."""
        self._settle()
        self._end_record()
        if not calls:
            self.session.note_parse_failure()

    def _take(self, token: int, budget: int) -> None:
        """Tells the session of a token, by where it came from."""
        if self._taken:
            expected = self._taken.popleft()
            if self._trace is not None and token != expected:
                raise ValueError(f"token {token} came where {expected} was taken")
        elif self._forced:
            self._forced -= 1
            self.session.observe((token,))
        else:
            self._end_record(token)
            self._open = self.session.push(token, budget)
            self._began, self._count = self._seen, 0

    def _decided(self, verdict: Verdict) -> Verdict:
        self._forced += len(verdict.forced)
        return verdict

    def _end_record(self, drawn: int | None = None) -> None:
        if self._record is not None and self._trace is not None:
            self._record.drawn = drawn
            self._trace.write(self._record)
        self._record = None
