"""Echo: what followed the last few tokens when they were written before (spec 50 section 7).

    … "path": "src/app.py" … "path": "src/        the last k ids, found again
                                        app.py"   what followed them there, as far as all agree

The index holds the whole sequence, prompt and answer, and for each k-gram the chain of its places.
It is built once from the prompt, in the prepare pool, and grows by a token at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mlxlite.text.fill.plan import (
    FEWEST,
    EchoConfig,
    Origin,
    Policy,
    Proposal,
    View,
)

_NOWHERE = -1


class EchoIndex:
    """The places of every k-gram. is_frozen: it is full, and stays as it is."""

    def __init__(self, k: int, most: int) -> None:
        self.ids: list[int] = []
        self.is_frozen = False
        self._k = k
        self._most = most
        # The latest place by the gram's hash, and from each place the one before: a list for each
        # gram would take 300 bytes a token, this takes a third of it.
        self._latest: dict[int, int] = {}
        self._before = array("q")

    def extend(self, ids: Sequence[int]) -> None:
        ids = ids[: self._most - len(self.ids)]
        start = max(len(self.ids) - self._k + 1, 0)
        self.ids.extend(ids)
        k, all_ids, latest, before = self._k, self.ids, self._latest, self._before
        for at in range(start, len(all_ids) - k + 1):
            key = hash(tuple(all_ids[at : at + k]))
            before.append(latest.get(key, _NOWHERE))
            latest[key] = at
        self.is_frozen = len(self.ids) >= self._most

    def places(self, gram: Sequence[int], most: int) -> list[int]:
        """Where a gram stands with a token after it; the latest places first."""
        wanted = list(gram)
        found: list[int] = []
        at = self._latest.get(hash(tuple(gram)), _NOWHERE)
        while at != _NOWHERE and len(found) < most:
            # Compared: two grams may have one hash.
            if at + self._k < len(self.ids) and self.ids[at : at + self._k] == wanted:
                found.append(at)
            at = self._before[at]
        return found


class EchoSource:
    """See the module. prompt_ids are indexed at once."""

    name = "echo"

    def __init__(
        self,
        config: EchoConfig,
        delimiters: frozenset[int],
        max_span: int,
        prompt_ids: Sequence[int],
    ) -> None:
        self.window_needed = config.k
        self.index = EchoIndex(config.k, config.index_max)
        self.index.extend(prompt_ids)
        self._config = config
        self._delimiters = delimiters
        self._max_span = max_span

    def observe(self, ids: Sequence[int]) -> None:
        if not self.index.is_frozen:
            self.index.extend(ids)

    def propose(self, view: View) -> Proposal | None:
        k = self._config.k
        gram = view.tail(k)
        if len(gram) < k:
            return None
        all_ids = self.index.ids
        live = [at + k for at in self.index.places(gram, self._config.candidates)]
        found: list[int] = []
        agreed = 0
        is_forked = False
        while live and len(found) < self._max_span:
            token = all_ids[live[0]]
            if any(all_ids[at] != token for at in live):
                is_forked = True
                break
            found.append(token)
            agreed = len(live)
            if token in self._delimiters:
                break
            live = [at + 1 for at in live if at + 1 < len(all_ids)]
        if len(found) < FEWEST:
            return None
        # A single earlier place would replay whatever followed it, a tool's result among it.
        is_sure = not is_forked and found[-1] in self._delimiters and agreed >= 2
        policy = Policy.ASSERT if is_sure else Policy.VERIFY
        return Proposal(tuple(found), policy, Origin.ECHO, is_forked)
