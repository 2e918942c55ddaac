"""What became of each proposal, for diagnosis (spec 50 section 10; MLXLITE_FILL_TRACE).

    {"ts": "2026-01-02T03:04:05.678+00:00", "origin": "schema", "policy": "assert", "generated": 9,
     "proposedLen": 2, "accepted": 2, "firstMismatch": -1, "proposed": [5, 6], "actual": [], …}

`actual` is what the model drew: under verify the accepted ids and the one that came instead of the
next, under assert nothing, as nothing was drawn. Records are written by the engine's thread, so do
not take times with it on. Best effort: a disk that is full costs the trace, not the answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlxlite.text.fill.plan import Policy, Proposal

log = logging.getLogger(__name__)

_OFF = ("", "0", "off", "false")
_LOG = ("1", "true")


class Trace:
    """path: a file of JSON lines; None: a line in the log for each event. decode: ids → text."""

    def __init__(self, path: Path | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._path = path
        self._decode = decode
        self._is_broken = False

    @classmethod
    def of(cls, word: str | None, decode: Callable[[Sequence[int]], str]) -> Trace | None:
        """By the setting: off, `1` for the log, else the path of a file."""
        if word is None or word.lower() in _OFF:
            return None
        return cls(None if word.lower() in _LOG else Path(word).expanduser(), decode)

    def write(self, record: Record) -> None:
        if self._path is None:
            log.info(  # without the texts: a log is read by others than who asked
                "fill: %s %s after %d tokens, %d of %d taken",
                record.proposal.origin.value,
                record.proposal.policy.value,
                record.generated,
                record.accepted,
                len(record.proposal.ids),
            )
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._line(record) + "\n")
        except OSError as error:
            if not self._is_broken:
                log.warning("the fill trace cannot be written: %s", error)
            self._is_broken = True

    def _line(self, record: Record) -> str:
        proposal, actual = record.proposal, record.actual
        return json.dumps(
            {
                "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "origin": proposal.origin.value,
                "policy": proposal.policy.value,
                "generated": record.generated,
                "proposedLen": len(proposal.ids),
                "accepted": record.accepted,
                "firstMismatch": record.first_mismatch,
                "proposed": list(proposal.ids),
                "actual": list(actual),
                "proposedText": self._decode(proposal.ids),
                "actualText": self._decode(actual),
            },
            ensure_ascii=False,
        )


@dataclass(slots=True)
class Record:
    """One proposal. generated: tokens of the answer before it. drawn: the token that came after the
    accepted ones, if one did."""

    proposal: Proposal
    generated: int
    accepted: int
    drawn: int | None = None

    @property
    def first_mismatch(self) -> int:
        """The index of the first proposed id that was not drawn; -1: there is none, or nothing was
        drawn against it."""
        ids = self.proposal.ids
        if self.drawn is None or self.accepted == len(ids) or ids[self.accepted] == self.drawn:
            return -1
        return self.accepted

    @property
    def actual(self) -> tuple[int, ...]:
        if self.proposal.policy is Policy.ASSERT:
            return ()
        drawn = (
            () if self.drawn is None or self.accepted == len(self.proposal.ids) else (self.drawn,)
        )
        return (*self.proposal.ids[: self.accepted], *drawn)
