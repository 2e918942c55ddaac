"""Fake payloads of the prompt cache's tree: they know their tokens, so that a wrong cut shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

TOKEN_BYTES, RUN_BUFFERS = 10, 2
STATE_BYTES, STATE_BUFFERS = 7, 3


@dataclass(frozen=True, eq=False)
class Run:
    """A span that is its tokens."""

    ids: Sequence[int]
    cannot_split: bool = False

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return len(self.ids) * TOKEN_BYTES

    @property
    def buffers(self) -> int:
        return RUN_BUFFERS

    def split(self, at: int) -> tuple[Run, Run]:
        assert 0 < at < len(self.ids)
        if self.cannot_split:
            raise MemoryError("no room to split")
        return replace(self, ids=self.ids[:at]), replace(self, ids=self.ids[at:])


@dataclass(frozen=True, eq=False)
class State:
    """A checkpoint that knows where it was taken."""

    ids: Sequence[int]
    nbytes: int = STATE_BYTES
    buffers: int = STATE_BUFFERS
