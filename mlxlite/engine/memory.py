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
_POOL_FACTOR = 1.5  # a pool has up to half as many slots again as rows


@dataclass(frozen=True, slots=True)
class Budget:
    """plan: bytes of a row's caches. room_bytes: for all rows and prefixes together.

    kept: bytes of the prefixes. evict: free so many of them; returns what it freed.
    """

    plan: KVPlan
    room_bytes: int
    kept: Callable[[], int]
    evict: Callable[[int], int]

    def row_bytes(self, row: Row) -> int:
        """What a row holds, and will for its next tokens."""
        expected = len(row.spec.prompt_ids) + min(row.spec.max_tokens, AHEAD_TOKENS)
        least = max(row.length, len(row.source)) + AHEAD_TOKENS // 2
        least = max(least, expected)
        most = len(row.spec.prompt_ids) + row.spec.max_tokens
        return int(_POOL_FACTOR * self.plan.row_bytes_allocated(min(least, most)))

    def admits(self, row: Row, running: Iterable[Row]) -> bool:
        """Whether there is room for one more row; the first one always runs: `prepare` has
        refused what cannot fit by itself."""
        held = [self.row_bytes(other) for other in running]
        if not held:
            self.evict(self.row_bytes(row) + self.kept() - self.room_bytes)
            return True
        missing = sum(held) + self.row_bytes(row) + self.kept() - self.room_bytes
        if missing <= 0:
            return True
        if missing > self.kept():
            return False  # evicting all of them would not do
        return self.evict(missing) >= missing

    def keep_within(self, running: Sequence[Row]) -> Row | None:
        """Rows have grown: prefixes make room for them, and if that is not enough, the row that is
        returned has to. The first one always stays."""
        missing = sum(self.row_bytes(row) for row in running) + self.kept() - self.room_bytes
        if missing <= 0 or self.evict(missing) >= missing:
            return None
        may_go = [row for row in running[1:] if not row.spec.prompt_logprobs]
        return may_go[-1] if may_go else None
