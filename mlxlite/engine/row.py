"""Row: one sequence inside the engine, from the queue to its end. Plain Python, no MLX.

There is one object per sequence and no parallel lists: scheduler, batch and worker all hold the
same rows and each writes its own part of them. Owned by the engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mlxlite.errors import MlxliteError
from mlxlite.types import Done, Event, Finish, RowSpec, Run, Sink, TokenLogprob


class Phase(Enum):
    WAITING = "waiting"  # in the queue
    PREFILL = "prefill"  # its prompt is being run, chunk by chunk
    DECODE = "decode"  # one token a step
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Row:
    id: int
    spec: RowSpec
    sink: Sink
    phase: Phase = Phase.WAITING

    # prefill: all of `source` but its last token, which is the first input of decoding
    source: tuple[int, ...] = ()  # the prompt; after a retreat, with what was drawn before
    fed: int = 0  # tokens of it whose state is in the cache
    cached: int = 0  # of those, restored instead of computed
    cache: list[Any] | None = None  # one cache a layer, made at the first chunk

    marks: list[int] = field(default_factory=list)  # lengths at which its state is kept
    waits_for: Row | None = None  # it computes the same prefix just now ...
    waits_until: int = 0  # ... up to this length

    # decode
    stepped: int = 0  # forwards of one token that were queued
    ids: list[int] = field(default_factory=list)  # tokens on the host, EOS included
    sampled: int = 0  # tokens drawn, the one in flight included; the next draw's position
    is_leaving: bool = False  # it will retreat, as soon as its token in flight was read
    is_held: bool = False  # its reader is behind: no token is drawn for it
    accepted: int = 0  # of `ids`, the ones that belong to the answer, EOS included
    forced: deque[int] = field(default_factory=deque)  # what the guide wants next
    mask: Any = None  # (V,) of what the guide allows, see `sample.bound`, or None
    next_mask: Callable[[], Sequence[int]] | None = (
        None  # computes the one that is due, see `Verdict`
    )
    run: Run | None = None  # what the guide expects next, not yet taken or declined
    ahead: int = 0  # tokens past `length` whose state is in the cache all the same
    penalties: Any = None  # penalties.Penalties, or None
    is_open: bool = False  # penalties are made
    was_pooled: bool = False  # it shared a forward

    # clocks, seconds of time.perf_counter
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_at: float | None = None

    def __post_init__(self) -> None:
        self.source = self.spec.prompt_ids

    @property
    def prompt_left(self) -> int:
        """Tokens that prefill still has to run."""
        return len(self.source) - 1 - self.fed

    @property
    def chunk_left(self) -> int:
        """The same up to the next mark, where a chunk has to end."""
        stops = [mark - self.fed for mark in self.marks if mark > self.fed]
        return min([self.prompt_left, *stops])

    def mark(self, length: int) -> None:
        """Keep the row's state when so many tokens of its prompt are run."""
        if length > self.fed and length not in self.marks:
            self.marks.append(length)

    @property
    def next_input(self) -> int:
        """The id that is run next, of a row with no token in flight."""
        return self.ids[-1] if self.ids else self.spec.prompt_ids[-1]

    def newest(self, count: int) -> list[int]:
        """The last tokens on the host, of the prompt and of what was drawn; `count` at most."""
        drawn = self.ids[-count:] if count else []
        missing = count - len(drawn)
        return [*self.spec.prompt_ids[-missing:], *drawn] if missing else drawn

    @property
    def length(self) -> int:
        """Tokens whose state is in the cache, those of a queued forward included."""
        return self.fed + self.stepped

    @property
    def wants_another(self) -> bool:
        """Whether one more draw fits under max_tokens, counting the one in flight."""
        return self.sampled < self.spec.max_tokens

    @property
    def is_steered(self) -> bool:
        return self.spec.guide is not None and self.spec.guide.may_steer

    def start(self) -> None:
        self.phase = Phase.PREFILL
        if self.started_at is None:
            self.started_at = time.perf_counter()

    def retreat(self) -> None:
        """Go back to the queue and give all state up; it is computed again from the tokens. What is
        drawn next is the same: a draw depends on the seed and its position alone."""
        self.source = (*self.spec.prompt_ids, *self.ids)
        self.phase = Phase.WAITING
        self.cache = None
        self.fed = self.stepped = self.ahead = 0
        self.marks.clear()
        self.waits_for = None
        self.is_leaving = False

    @property
    def rests(self) -> bool:
        """Whether it takes no part in steps for now."""
        return self.is_held or self.is_leaving

    def end(
        self,
        finish: Finish,
        ids: tuple[int, ...] = (),
        error: MlxliteError | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """End the row: its last event goes out, once, and its memory is let go.

        A sink that raises here is not asked again; the exception is the caller's to log.
        """
        if self.phase is Phase.ENDED:
            return
        self.phase = Phase.ENDED
        self.cache = None
        self.mask = self.next_mask = None
        self.penalties = None
        now = time.perf_counter()
        started = self.started_at if self.started_at is not None else now
        first = self.first_at if self.first_at is not None else now
        done = Done(
            finish=finish,
            prompt_tokens=len(self.spec.prompt_ids),
            cached_tokens=self.cached,
            generated_tokens=self.accepted,
            queued_s=started - self.submitted_at,
            prefill_s=first - started,
            decode_s=now - first,
            error=error,
            lane="batched" if self.was_pooled else "serial",
        )
        self.sink(Event(ids, done, logprobs))
