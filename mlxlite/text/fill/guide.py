"""The guide of a filled row: text decides as ever, and known tokens are proposed (floor 1, D24).

    observe(<tool_call>)  →  Verdict(keep=1, run=Run((198, 4913, …), is_sure=True))
    took(9)               →  the nine ids come to `observe` next, one by one

The engine is free to take a run or not, and draws against those that are not sure by itself; what
it took is told here, and here alone (spec 50 section 8 in the engine's words).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mlxlite.text.fill.plan import Policy, Proposal
from mlxlite.text.fill.session import Counters, Session
from mlxlite.text.fill.trace import Record, Trace
from mlxlite.text.guides import TextGuide
from mlxlite.types import Run, Verdict


class FillGuide:
    """text: what is decided on text besides, or None if nothing is. limit: most tokens of the
    answer. trace: None without; with one, ids that come otherwise than they were taken are a fault.

    It steers: what is known to follow a token is told before the next one is drawn. But it gives
    the engine its step of lead back once nothing can be proposed any more, as in prose.
    """

    def __init__(
        self, text: TextGuide | None, session: Session, limit: int, trace: Trace | None = None
    ) -> None:
        self.session = session
        self._text = text
        self._limit = limit
        self._trace = trace
        self.may_steer = True
        self._seen = 0  # ids of the answer
        self._open: Proposal | None = None  # told, and not yet answered by `took`
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
                self._end_record()
                return Verdict(n - 1 + verdict.keep, stop=True)
            # Nothing is proposed where the next token is given, or here already.
            is_open = n == len(ids) and not verdict.forced
            self._take(token, self._limit - self._seen if is_open else 0)
            if verdict.forced:
                return self._decided(Verdict(n, forced=verdict.forced))
        run = None
        if self.may_steer and self.session.is_over:
            self.may_steer = self._text is not None and self._text.may_steer
        if self._open is not None:
            run = Run(self._open.ids, is_sure=self._open.policy is Policy.ASSERT)
        return Verdict(len(ids), run=run)

    def took(self, count: int) -> None:
        proposal, self._open = self._open, None
        assert proposal is not None, "no run was proposed"
        self.session.commit(proposal, count)
        self._taken.extend(proposal.ids[:count])
        if self._trace is not None:
            self._record = Record(proposal, self._seen, count)
            if proposal.policy is Policy.ASSERT or count == len(proposal.ids):
                self._end_record()

    def ended(self, calls: int) -> None:
        """The row is over, and so many calls came of it. Not on the engine's thread."""
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

    def _decided(self, verdict: Verdict) -> Verdict:
        self._forced += len(verdict.forced)
        return verdict

    def _end_record(self, drawn: int | None = None) -> None:
        if self._record is not None and self._trace is not None:
            self._record.drawn = drawn
            self._trace.write(self._record)
        self._record = None
