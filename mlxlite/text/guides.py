"""What text decides between two steps of the engine (floor 1, column "text"; decision D24).

`prepare` builds a guide from a request and gives it to the row; the engine calls it on its own
thread with each new id and knows nothing of text. A guide has its own detokenizer: what the client
sees is rendered later and elsewhere (`stream`), from the ids that the guide kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxlite.text.detokenizer import Detokenizer
from mlxlite.text.stops import StopMatcher
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Verdict


class StopGuide:
    """Ends a row at the id that completes a stop string; that id is the last one kept.

    keep_special must be as in the detokenizer that renders the answer, or the two would look for
    stop strings in different texts.
    """

    may_steer = False

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], keep_special: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, keep_special)
        self._matcher = StopMatcher(stops)

    def observe(self, ids: Sequence[int]) -> Verdict:
        for n, token_id in enumerate(ids):
            _, stop = self._matcher.push(self._detokenizer.push((token_id,)))
            if stop is not None:
                return Verdict(keep=n + 1, stop=True)
        return Verdict(keep=len(ids))
