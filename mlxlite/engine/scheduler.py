"""The scheduler: who runs next. A value machine without MLX, clock or threads.

`admit()` lets rows in, `plan()` says what one step does, the worker does it, and `prefilled`,
`remove` tell what came of it. Rows are admitted first come, first served; one that has no room yet
is not overtaken. A step holds at most one chunk of one prompt and one decode of every row that is
past its own, so a long prompt delays the running streams by one chunk, not by the whole of it
(spec 60 section 8). Prompts take turns: every other chunk goes to whoever came first, the others to
whoever has least left, so neither a long prompt nor many short ones starve anybody.

Owned by the engine thread; fuzzed by `tests/test_scheduler.py` with a fake forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlxlite.engine.row import Phase, Row

CHUNK_BUDGET_S = 0.5  # the longest that a chunk should take, so that a cancel is seen in time
SHARED_CHUNK_BUDGET_S = 0.3  # the same while other rows wait for their next token
_WHOLE = 1.5  # so much longer may a chunk be that way, if it is the last: two cost more than one
_LEAST_FILLED = 0.75  # of a forward of several prompts, whose rest is padding
_FIRST_CEILING = 256  # tokens of the first chunk at most: its speed is only guessed


@dataclass(frozen=True, slots=True)
class Step:
    """What one step does: `prefill_tokens` of the row `prefill`, a token for each of `decode`.

    beside: rows whose whole rest of a prompt (or up to a mark) runs in the same forward.
    """

    prefill: Row | None
    prefill_tokens: int
    decode: tuple[Row, ...]
    beside: tuple[Row, ...] = ()

    @property
    def is_idle(self) -> bool:
        return self.prefill is None and not self.decode


class ChunkSizer:
    """How many prompt tokens fit into a time budget, from the speed of the chunks so far.

    smallest, largest: bounds in tokens. A chunk may be twice the size of the longest so far at
    most: the first ones are short and their speed says little about long ones.
    """

    def __init__(self, smallest: int, largest: int, tokens_per_s: float = 100.0) -> None:
        self.smallest = smallest
        self.largest = largest
        self.tokens_per_s = tokens_per_s
        self._ceiling = min(max(_FIRST_CEILING, smallest), largest)

    def room(self, budget_s: float) -> int:
        """Tokens that fit into the time."""
        fits = min(int(self.tokens_per_s * budget_s), self._ceiling, self.largest)
        return max(fits, self.smallest)

    def size(self, left: int, budget_s: float) -> int:
        fits = self.room(budget_s)
        # As many chunks as it takes, of one size: a crumb at the end would cost a whole pass over
        # the weights. Sizes are coarse, since each new shape may have to be compiled.
        even = -(-left // -(-left // fits))
        coarse = -(-even // 32) * 32 if even >= 64 else even
        return min(coarse, fits, left)

    def measured(self, tokens: int, seconds: float) -> None:
        # A tail is dominated by its fixed cost. But an even split makes halves of the smallest, and
        # from nothing else than these would a sizer that began too low ever learn.
        if tokens < self.smallest // 2 or seconds <= 0:
            return
        rate = tokens / seconds
        self.tokens_per_s += 0.5 * (rate - self.tokens_per_s)
        self._ceiling = min(max(self._ceiling, 2 * tokens), self.largest)


class Scheduler:
    """max_rows: rows that run at the same time. How many may wait is checked at the engine's
    border. has_room: whether memory suffices for a row beside those that run.
    """

    def __init__(
        self,
        max_rows: int,
        sizer: ChunkSizer,
        has_room: Callable[[Row, Iterable[Row]], bool] = lambda row, running: True,
    ) -> None:
        self.max_rows = max_rows
        self.sizer = sizer
        self.has_room = has_room
        self.waiting: deque[Row] = deque()
        self.live: list[Row] = []
        self.may_group = False  # whether several prompts may share a forward
        self._is_turn_of_shortest = True
        self._lacks_room = False  # for the first that waits, as long as no row is removed

    def submit(self, row: Row) -> None:
        self.waiting.append(row)

    def admit(self) -> list[Row]:
        """Let in whoever has a place and room; they are live now."""
        admitted = []
        while self._has_place:
            self._lacks_room = not self.has_room(self.waiting[0], self.live)
            if self._lacks_room:
                break
            row = self.waiting.popleft()
            row.start()
            self.live.append(row)
            admitted.append(row)
        return admitted

    def plan(self) -> Step:
        """Choose this step's work."""
        free = [row for row in self.live if not row.rests]
        for row in free:
            if row.phase is Phase.PREFILL and row.prompt_left == 0:
                row.phase = Phase.DECODE
        decode = tuple(row for row in free if row.phase is Phase.DECODE)
        prompts = [row for row in free if row.phase is Phase.PREFILL and row.waits_for is None]
        if not prompts:
            return Step(None, 0, decode)
        prefill = prompts[0]
        if self._is_turn_of_shortest:
            prefill = min(prompts, key=lambda row: row.prompt_left)
        # Whoever comes while one prompt is run has the next turn, if its own is short.
        self._is_turn_of_shortest = len(prompts) == 1 or not self._is_turn_of_shortest
        # Where most wait for their first token, that comes before the others' next one.
        budget_s = CHUNK_BUDGET_S if len(prompts) >= len(decode) else SHARED_CHUNK_BUDGET_S
        left = prefill.chunk_left
        if left <= self.sizer.room(min(budget_s * _WHOLE, CHUNK_BUDGET_S)):
            budget_s = min(budget_s * _WHOLE, CHUNK_BUDGET_S)
        tokens = self.sizer.size(left, budget_s)
        beside = self._beside(prefill, prompts, budget_s) if tokens == left else ()
        return Step(prefill, tokens, decode, beside)

    def _beside(self, first: Row, prompts: list[Row], budget_s: float) -> tuple[Row, ...]:
        """Other prompts that can end in the same forward: as long as the first, about, so that
        little of it is padding."""
        if not self.may_group or first.spec.prompt_logprobs:
            return ()
        found: list[Row] = []
        longest, total = first.chunk_left, first.chunk_left
        for row in prompts:
            if row is first or row.fed != first.fed or row.spec.prompt_logprobs:
                continue
            most = max(longest, row.chunk_left)
            padded = most * (len(found) + 2)
            if padded > self.sizer.room(budget_s):
                continue
            if total + row.chunk_left < _LEAST_FILLED * padded:
                continue
            found.append(row)
            longest, total = most, total + row.chunk_left
        return tuple(found)

    def prefilled(self, row: Row, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` is in the row's cache; it took `seconds`."""
        row.fed += tokens
        self.sizer.measured(tokens, seconds)
        if row.prompt_left == 0:
            row.phase = Phase.DECODE

    def send_back(self, row: Row) -> None:
        """A live row retreats to the head of the queue."""
        self.live.remove(row)
        row.retreat()
        self.waiting.appendleft(row)

    def remove(self, row: Row) -> None:
        """Forget a row wherever it is."""
        self._lacks_room = False
        if row in self.live:
            self.live.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)

    @property
    def has_prompts(self) -> bool:
        """Whether the next step runs a chunk of a prompt, or may."""
        return self._has_place or any(
            row.phase is Phase.PREFILL and not row.rests and row.waits_for is None
            for row in self.live
        )

    @property
    def has_work(self) -> bool:
        """Whether a row wants a step, now: one that is held does not."""
        return (self._has_place and not self._lacks_room) or any(not row.rests for row in self.live)

    @property
    def _has_place(self) -> bool:
        # A held row keeps its cache and not its place: a silent client must not stop the others.
        return bool(self.waiting) and sum(not row.rests for row in self.live) < self.max_rows

    @property
    def rows(self) -> list[Row]:
        return [*self.live, *self.waiting]
