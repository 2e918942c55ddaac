"""Rows for tests of the engine: sinks that remember, guides made of a function, a gate.

Sinks and guides run on the engine thread, so a test can stand at an exact place of a row's life: a
sink that waits at a gate holds the engine between two tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from mlxlite.errors import MlxliteError
from mlxlite.types import Done, Engine, Event, Finish, Guide, RowSpec, Sampling, Took, Verdict

PATIENCE_S = 10.0  # for a test that would wait for ever; all others take milliseconds
PROMPT = (5, 9, 200, 31)


class Heard:
    """A sink that remembers, and may do something at each event."""

    def __init__(self, at_event: Callable[[Heard], None] | None = None) -> None:
        self.events: list[Event] = []
        self.row_id = 0
        self._ended = threading.Event()
        self._at_event = at_event

    def __call__(self, event: Event) -> None:
        assert not self._ended.is_set(), "nothing comes after the end"
        self.events.append(event)
        if event.done is not None:
            self._ended.set()
        if self._at_event is not None:
            self._at_event(self)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events for token in event.ids]

    @property
    def done(self) -> Done:
        assert self._ended.wait(PATIENCE_S), "the row was never told its end"
        done = self.events[-1].done
        assert done is not None
        return done

    @property
    def finish(self) -> Finish:
        return self.done.finish

    @property
    def error(self) -> MlxliteError | None:
        return self.done.error


def start(
    engine: Engine,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 6,
    *,
    sampling: Sampling | None = None,
    guide: Guide | None = None,
    eos: Sequence[int] = (),
    at_event: Callable[[Heard], None] | None = None,
) -> Heard:
    heard = Heard(at_event)
    spec = RowSpec(tuple(prompt), sampling or Sampling(), max_tokens, frozenset(eos), guide)
    heard.row_id = engine.submit(spec, heard)
    return heard


def ask(engine: Engine, prompt: Sequence[int] = PROMPT, max_tokens: int = 6, **how: Any) -> Heard:
    heard = start(engine, prompt, max_tokens, **how)
    assert heard.done
    return heard


class Gate:
    """Holds the engine thread at the first event of a row until it is opened."""

    def __init__(self, engine: Engine, **how: Any) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        self.heard = start(engine, max_tokens=4, at_event=self._wait, **how)
        assert self._reached.wait(PATIENCE_S)

    def _wait(self, heard: Heard) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


class Scripted:
    """A guide made of a function from (all ids so far, newest ids) to a verdict or nothing."""

    def __init__(
        self,
        decide: Callable[[list[int], Sequence[int]], Verdict | None],
        may_steer: bool = True,
    ) -> None:
        self.may_steer = may_steer
        self.calls: list[tuple[int, ...]] = []
        self.taken: list[int] = []  # of each run that was proposed
        self.told: list[Took] = []
        self._decide = decide

    def observe(self, ids: Sequence[int]) -> Verdict:
        self.calls.append(tuple(ids))
        so_far = [token for call in self.calls for token in call]
        return self._decide(so_far, ids) or Verdict(keep=len(ids))

    def took(self, what: Took) -> None:
        self.taken.append(what.count)
        self.told.append(what)


def mask_of(ids: Sequence[int]) -> list[int]:
    words = [0] * 16
    for token in ids:
        words[token // 32] |= 1 << token % 32
    return words
