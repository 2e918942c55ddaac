"""Echo: what followed the last few tokens when they were written before (spec 50 section 7).

    … "path": "src/app.py" … "path": "src/        the last k ids, found again
                                        app.py"   what followed them there, as far as all agree

The index holds the whole sequence, prompt and answer, and for each k-gram the chain of its places.
That of the prompt is built once, in the prepare pool, and shared by the rows of a request; each
row's own grows by a token at a time.
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


class PromptIndex:
    """The places of every k-gram of a prompt; immutable. most: ids that are looked at."""

    def __init__(self, ids: Sequence[int], k: int, most: int) -> None:
        self.ids = tuple(ids[:most])
        self.k = k
        self.most = most
        # The latest place by the gram's hash, and from each place the one before: a list for each
        # gram would take 300 bytes a token, this takes a third of it.
        self.latest: dict[int, int] = {}
        self.before = array("q")
        latest, before, all_ids = self.latest, self.before, self.ids
        for at in range(len(all_ids) - k + 1):
            key = hash(all_ids[at : at + k])
            before.append(latest.get(key, _NOWHERE))
            latest[key] = at


class EchoIndex:
    """A prompt's places and those of the answer to it. is_frozen: it is full, and stays as it
    is."""

    def __init__(self, prompt: PromptIndex) -> None:
        self._prompt = prompt
        self._start = len(prompt.ids)
        self._own: list[int] = []
        self._latest: dict[int, int] = {}
        self._before = array("q")  # of the places from the end of the prompt's on
        self.is_frozen = self._start >= prompt.most

    def __len__(self) -> int:
        return self._start + len(self._own)

    def __getitem__(self, at: int) -> int:
        return self._prompt.ids[at] if at < self._start else self._own[at - self._start]

    def append(self, token: int) -> None:
        if self.is_frozen:
            return
        self._own.append(token)
        self.is_frozen = len(self) >= self._prompt.most
        at = len(self) - self._prompt.k
        if at >= 0:
            key = hash(self._gram(at))
            latest = self._latest.get(key, self._prompt.latest.get(key, _NOWHERE))
            self._before.append(latest)
            self._latest[key] = at

    def places(self, gram: tuple[int, ...], most: int) -> list[int]:
        """Where a gram stands with a token after it; the latest places first."""
        key, k, length = hash(gram), self._prompt.k, len(self)
        at = self._latest.get(key, self._prompt.latest.get(key, _NOWHERE))
        found: list[int] = []
        of_prompt = len(self._prompt.before)
        while at != _NOWHERE and len(found) < most:
            # Compared: two grams may have one hash.
            if at + k < length and self._gram(at) == gram:
                found.append(at)
            at = self._prompt.before[at] if at < of_prompt else self._before[at - of_prompt]
        return found

    def _gram(self, at: int) -> tuple[int, ...]:
        end, start = at + self._prompt.k, self._start
        own = self._own[max(at - start, 0) : max(end - start, 0)]
        return (*self._prompt.ids[at:end], *own)


class EchoSource:
    """See the module. prompt: of the request."""

    name = "echo"

    def __init__(
        self,
        config: EchoConfig,
        delimiters: frozenset[int],
        max_span: int,
        prompt: PromptIndex,
    ) -> None:
        self.window_needed = config.k
        self.index = EchoIndex(prompt)
        self._config = config
        self._delimiters = delimiters
        self._max_span = max_span

    def observe(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.index.append(token)

    def propose(self, view: View) -> Proposal | None:
        k = self._config.k
        gram = view.tail(k)
        if len(gram) < k:
            return None
        index = self.index
        live = [at + k for at in index.places(gram, self._config.candidates)]
        found: list[int] = []
        agreed = 0
        is_forked = False
        while live and len(found) < self._max_span:
            token = index[live[0]]
            if any(index[at] != token for at in live):
                is_forked = True
                break
            found.append(token)
            agreed = len(live)
            if token in self._delimiters:
                break
            live = [at + 1 for at in live if at + 1 < len(index)]
        if len(found) < FEWEST:
            return None
        # A single earlier place would replay whatever followed it, a tool's result among it.
        is_sure = not is_forked and found[-1] in self._delimiters and agreed >= 2
        policy = Policy.ASSERT if is_sure else Policy.VERIFY
        return Proposal(tuple(found), policy, Origin.ECHO, is_forked)
