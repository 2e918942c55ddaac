"""What text decides between two steps of the engine (floor 1, column "text"; decision D24).

`prepare` builds a guide from a request and gives it to the row; the engine calls it on its own
thread with each new id and knows nothing of text. A guide has a sink of its own: what the client
sees is rendered later and elsewhere (`stream`), from the ids that the guide kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxlite.text.channels import Thinking
from mlxlite.text.sink import Sink
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Verdict


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


def closing_ids(tokenizer: Tokenizer, thinking: Thinking) -> tuple[int, ...]:
    """The ids that end a model's thinking, for `TextGuide`."""
    return tuple(tokenizer.encode(thinking.closing, add_special_tokens=False))
