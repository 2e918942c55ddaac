"""What text decides between two steps of the engine (floor 1, column "text"; decision D24).

    TextGuide     stop strings, the only call, the end of thinking over its budget
    GrammarGuide  the same, and a grammar that the answer follows, once the thinking is over

`prepare` builds a guide from a request and gives it to the row; the engine calls it on its own
thread with each new id and knows nothing of text. A guide has a sink of its own: what the client
sees is rendered later and elsewhere (`stream`), from the ids that the guide kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from mlxlite.text.channels import Thinking
from mlxlite.text.grammar import Grammar, Grammars, Matcher
from mlxlite.text.sink import Sink
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.watched import Watch, spelled_ids
from mlxlite.types import Mask, Run, Took, Verdict


class TextGuide:
    """Ends a row at a stop string or after its only call, and ends thinking over its budget.

    sink: made like the one that renders the answer, and this guide's own. most_calls: the row ends
    at the id that completes the last of so many; its closing marker need not have come by then.
    budget_tokens: ids of reasoning after which `closing`, the ids of the markup that ends it, is
    forced (decision D10); 0 closes as soon as it opens.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        most_calls: int | None = None,
        budget_tokens: int | None = None,
        closing: Sequence[int] = (),
    ) -> None:
        self._sink = sink
        self._most_calls = most_calls
        self._budget_tokens = budget_tokens
        self._closing = tuple(closing)
        self._due = 0  # forced ids that have not come back yet
        self.may_steer = budget_tokens is not None and bool(closing)

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._sink.is_thinking

    def observe(self, ids: Sequence[int]) -> Verdict:
        for n, token_id in enumerate(ids):
            self._sink.push((token_id,))
            self._due = max(0, self._due - 1)
            if self._is_over():
                return Verdict(keep=n + 1, stop=True)
            if self._must_close():
                return Verdict(keep=n + 1, forced=self._force())
        if not ids and self._must_close():
            return Verdict(keep=0, forced=self._force())
        return Verdict(keep=len(ids))

    def took(self, what: Took) -> None:
        """It proposes no runs."""

    def _is_over(self) -> bool:
        if self._sink.stopped is not None:
            return True
        return self._most_calls is not None and self._sink.completed_calls >= self._most_calls

    def _must_close(self) -> bool:
        # After a call the turn is about to end: there is no answer to make room for.
        if not self.may_steer or self._due or self._sink.calls:
            return False
        assert self._budget_tokens is not None
        return self._sink.is_thinking and self._sink.reasoning_tokens >= self._budget_tokens

    def _force(self) -> tuple[int, ...]:
        self._due = len(self._closing)
        return self._closing


@dataclass(frozen=True, slots=True)
class Start:
    """How an answer of a row with a grammar may begin.

    thought_id: the id that opens a thought, call_id: a call, both allowed beside the grammar's own
    first ones. prefix: what the model writes ahead of its answer and cannot do without; all is free
    until then. eos_ids: not allowed while the answer has not begun: it was promised.
    """

    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    thought_id: int | None = None
    call_id: int | None = None
    prefix: str = ""


class Calls:
    """Keeps the calls that a model makes by itself to a grammar; all else is free.

    grammar: of a call, its opening marker included. watch: finds that marker, which the model may
    write in pieces; the last piece must end where the marker does. tokenizer, grammars: of the
    model.
    """

    def __init__(
        self, grammar: Grammar, watch: Watch, tokenizer: Tokenizer, grammars: Grammars
    ) -> None:
        self._grammar = grammar
        self._watch = watch
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._matcher: Matcher | None = None  # of the open call
        self._is_apart = False  # ids that go on after a marker are masked

    @property
    def matcher(self) -> Matcher | None:
        """Of the call that is open."""
        return self._matcher

    def take(self, token_id: int) -> Mask | None:
        """Takes an id; the next mask, empty where all is free, or None if it stays as it is."""
        if self._matcher is None:
            begun = self._watch.take(self._tokenizer.bytes_of(token_id))
            if begun is None:
                return self._kept_apart()
            self._is_apart = False
            self._matcher = self._grammar.matcher()
            for each in spelled_ids(begun, self._tokenizer):
                self._matcher.consume(each)
        else:
            self._matcher.consume(token_id)
        if self._matcher.is_finished:
            self._matcher = None
            self._watch.ended()
            return ()
        return self._matcher.mask

    def _kept_apart(self) -> Sequence[int] | None:
        """The mask without the ids that end a marker and say more: the grammar could refuse it."""
        missing = self._watch.pending()
        ids = {token for text in missing for token in self._grammars.ids_past(text)}
        if not ids:
            was_apart, self._is_apart = self._is_apart, False
            return () if was_apart else None
        self._is_apart = True
        words = array("I", [0xFFFFFFFF]) * ((self._grammars.vocab_size + 31) // 32)
        for token in ids:
            words[token >> 5] &= ~(1 << (token & 31)) & 0xFFFFFFFF
        return words


class Phase(Enum):
    START = "start"
    THOUGHT = "thought"  # free; the grammar comes after it
    GRAMMAR = "grammar"
    FREE = "free"  # no grammar, but for calls


class GrammarGuide:
    """Lets a row write only what its grammar allows (decision D7).

    text: what is decided on text besides. The thinking is free, but for its end: an answer comes
    after it. The row ends where the grammar is complete and nothing can follow; where something
    could, EOS is among what is allowed and the model decides. matcher: None if only calls have a
    grammar. spell: an id -> its bytes.

    Ids that `text` forces, the end of a thought, come before the grammar and are no part of it.

    jumps: what the grammar leaves no choice about is proposed as a run (spec 40 section 6). It is
    one way to spell that text, so it is in doubt: the engine takes what the row draws anyhow.
    """

    may_steer = True

    def __init__(
        self,
        text: TextGuide,
        matcher: Matcher | None,
        start: Start,
        spell: Callable[[int], bytes],
        calls: Calls | None = None,
        *,
        jumps: bool = True,
    ) -> None:
        self._text = text
        self._calls = calls
        self._jumps = jumps
        self._due = 0  # ids of a run that have not come yet
        self._matcher = matcher
        self._start = start
        self._spell = spell
        if matcher is None:
            self._phase = Phase.FREE
        else:
            self._phase = Phase.THOUGHT if text.is_thinking else Phase.START
        self._seen = b""  # the last bytes, while the prefix is awaited

    def observe(self, ids: Sequence[int]) -> Verdict:
        if not ids:
            return self._jumping(replace(self._text.observe(()), mask=self._first_mask()))
        kept = 0
        forced: tuple[int, ...] = ()
        mask: Mask | None = None
        for token_id in ids:
            self._due = max(0, self._due - 1)
            verdict = self._text.observe((token_id,))
            kept += verdict.keep
            if verdict.stop:
                return Verdict(kept, stop=True)
            forced = verdict.forced or forced
            changed = self._take(token_id)
            mask = mask if changed is None else changed
            if self._phase is Phase.GRAMMAR and self._answer.is_finished:
                return Verdict(kept, stop=True)
        return self._jumping(Verdict(kept, forced=forced, mask=mask))

    def took(self, what: Took) -> None:
        self._due = what.count

    def _jumping(self, verdict: Verdict) -> Verdict:
        """The verdict, with the run that the grammar leaves no choice about."""
        matcher = self._deciding
        if not self._jumps or self._due or verdict.forced or matcher is None:
            return verdict
        ids = tuple(matcher.forced())
        if len(ids) < 2:
            return verdict
        return replace(verdict, run=Run(ids, masks=lambda count: matcher.masks_along(ids[:count])))

    @property
    def _deciding(self) -> Matcher | None:
        """The matcher that all of what comes next is up to."""
        if self._phase is Phase.GRAMMAR:
            return self._matcher
        if self._phase is Phase.FREE:
            return None if self._calls is None else self._calls.matcher
        start = self._start
        may_turn = start.prefix or start.thought_id is not None or start.call_id is not None
        return self._matcher if self._phase is Phase.START and not may_turn else None

    @property
    def _answer(self) -> Matcher:
        assert self._matcher is not None
        return self._matcher

    def _first_mask(self) -> Mask | None:
        if self._phase is Phase.FREE:
            return None
        if self._phase is Phase.THOUGHT or self._start.prefix:
            return self._all_but_eos()
        return self._start_mask

    def _start_mask(self) -> Sequence[int]:
        words = array("I", self._answer.mask())
        for token_id in (self._start.thought_id, self._start.call_id):
            if token_id is not None:
                words[token_id >> 5] |= 1 << (token_id & 31)
        return words

    def _take(self, token_id: int) -> Mask | None:
        """Goes on by an id; the next mask, or None if it stays as it is."""
        start = self._start
        if self._phase is Phase.FREE:
            return None if self._calls is None else self._calls.take(token_id)
        if self._phase is Phase.THOUGHT:
            if self._text.is_thinking:
                return None
            self._phase = Phase.START if start.prefix else Phase.GRAMMAR
            return None if start.prefix else self._answer.mask
        if self._phase is Phase.START:
            if start.prefix:
                return self._await_prefix(token_id)
            if token_id == start.call_id:
                self._phase = Phase.FREE
                return () if self._calls is None else self._calls.take(token_id)
            if token_id == start.thought_id:
                self._phase = Phase.THOUGHT
                return self._all_but_eos()
            self._phase = Phase.GRAMMAR
        self._answer.consume(token_id)
        return None if self._answer.is_finished else self._answer.mask

    def _await_prefix(self, token_id: int) -> Mask | None:
        mask = None if self._calls is None else self._calls.take(token_id)
        prefix = self._start.prefix.encode()
        self._seen = (self._seen + self._spell(token_id))[-len(prefix) :]
        if self._seen != prefix:
            return mask
        self._phase = Phase.GRAMMAR
        return self._answer.mask

    def _all_but_eos(self) -> Sequence[int]:
        words = array("I", [0xFFFFFFFF]) * ((self._start.vocab_size + 31) // 32)
        for token_id in self._start.eos_ids:
            words[token_id >> 5] &= ~(1 << (token_id & 31)) & 0xFFFFFFFF
        return words


def closing_ids(
    tokenizer: Tokenizer, thinking: Thinking, *, trims: bool = False
) -> tuple[int, ...]:
    """The ids that end a model's thinking, for `TextGuide`; without the blanks after it if told."""
    text = thinking.closing.rstrip() if trims else thinking.closing
    return tuple(tokenizer.encode(text, add_special_tokens=False))
