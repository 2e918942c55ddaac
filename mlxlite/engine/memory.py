"""Admission by memory: who may start, from arithmetic alone (decision D18).

    weights + kept prefixes + what the rows hold or are about to + a chunk's temporaries <= usable

Prefixes are evicted before a row waits, and a row waits before it is refused. Rows that outgrow
what they were billed push prefixes out, and then the youngest of them back into the queue. MLX
raises nothing when memory is short (engine-notes section 9), so nothing here is found out by
trying. No MLX here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlxlite.engine.row import Row
from mlxlite.kvplan import KVPlan

# A row is billed for so many tokens ahead of what it has. Clients ask for 32,000 tokens each turn
# and use some hundred, so reserving all of them would let one row run at a time.
AHEAD_TOKENS = 512
# Rows share a pool while its longest is at most SPREAD times its shortest, or short altogether: a
# forward of its own costs as much as some thousand columns more. A slot is as wide as its pool, so
# a short row pays for a longer neighbour.
SPREAD = 4
SHORT_COLUMNS = 2048
POOL_FACTOR = 2  # the most slots of a pool for each of its rows, between growing and shrinking


@dataclass(frozen=True, slots=True)
class Budget:
    """plan: bytes of a row's caches. room_bytes: for all rows and prefixes together.

    kept: bytes of the prefixes. evict: free so many of them; returns what it freed.
    """

    plan: KVPlan
    room_bytes: int
    kept: Callable[[], int]
    evict: Callable[[int], int]
    usable_bytes: int = 0  # weights included; only to be told

    def tokens_of(self, row: Row) -> int:
        """What a row has, and some more: what it is billed for."""
        expected = len(row.spec.prompt_ids) + min(row.spec.max_tokens, AHEAD_TOKENS)
        least = max(row.length, len(row.source)) + AHEAD_TOKENS // 2
        most = len(row.spec.prompt_ids) + row.spec.max_tokens
        return min(max(least, expected), most)

    def total(self, rows: Iterable[Row]) -> int:
        """Bytes that these rows hold, or will for their next tokens, in whatever pools."""
        tokens = [self.tokens_of(row) for row in rows]
        longest = max(tokens, default=0)
        widths = (max(n, min(longest, max(SHORT_COLUMNS, SPREAD * n))) for n in tokens)
        return sum(POOL_FACTOR * self.plan.row_bytes_allocated(width) for width in widths)

    def admits(self, row: Row, running: Iterable[Row]) -> bool:
        """Whether there is room for one more row; the first one always runs: `prepare` has
        refused what cannot fit by itself."""
        others = list(running)
        missing = self.total([*others, row]) + self.kept() - self.room_bytes
        if not others:
            self.evict(missing)
            return True
        if missing <= 0:
            return True
        if missing > self.kept():
            return False  # evicting all of them would not do
        return self.evict(missing) >= missing

    def keep_within(self, running: Sequence[Row]) -> Row | None:
        """Rows have grown: prefixes make room for them, and if that is not enough, the row that is
        returned has to. The first one always stays."""
        missing = self.total(running) + self.kept() - self.room_bytes
        if missing <= 0 or self.evict(missing) >= missing:
            return None
        may_go = [row for row in running[1:] if not row.spec.prompt_logprobs]
        return may_go[-1] if may_go else None
