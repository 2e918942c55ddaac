"""The prompt cache's tree against a naive model that has no tree: random histories, fixed seeds.

The model keeps a flat set of prefixes, those where a node of the tree must end, and finds all else
by comparing whole keys with them. Two or three different tokens make edges split all the time,
small limits make something go at every other step. After each step the two agree on every figure,
and what a lookup gives are the very tokens that were asked for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from mlxlite.engine.prefix import PrefixTree
from tests.spans import RUN_BUFFERS, STATE_BUFFERS, STATE_BYTES, TOKEN_BYTES, Run, State

Key = tuple[str | int, ...]  # the namespace, then the ids


def shared(a: Key, b: Key) -> int:
    """How many tokens two keys have in common."""
    if a[0] != b[0]:
        return 0
    pairs = zip(a[1:], b[1:], strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) - 1)


@dataclass
class Naive:
    max_bytes: int
    max_buffers: int
    cut_anywhere: bool
    ends: set[Key] = field(default_factory=set)
    age: dict[Key, int] = field(default_factory=dict)  # of each end, or each checkpoint
    evictions: int = 0
    now: int = 0

    def sizes(self) -> tuple[int, int, int]:
        """Nodes, bytes, buffers."""
        tokens = 0
        for end in self.ends:  # a span begins where the end before it is
            tokens += len(end) - max((len(above) for above in self.above(end[:-1])), default=1)
        states = 0 if self.cut_anywhere else len(self.age)
        nbytes = tokens * TOKEN_BYTES + states * STATE_BYTES
        return len(self.ends), nbytes, len(self.ends) * RUN_BUFFERS + states * STATE_BUFFERS

    def above(self, key: Key) -> list[Key]:
        """The ends that are prefixes of a key, itself perhaps among them."""
        return [key[:n] for n in range(2, len(key) + 1) if key[:n] in self.ends]

    def held(self, key: Key) -> int:
        return max((shared(key, end) for end in self.ends), default=0)

    def reusable(self, key: Key) -> int:
        if self.cut_anywhere:
            return self.held(key)
        return max((len(end) - 1 for end in self.above(key) if end in self.age), default=0)

    def touch(self, key: Key) -> None:
        if not self.cut_anywhere:
            touched = [key]
        else:  # the end above or at the key's last token, and all before it
            beyond = [end for end in self.ends if end[: len(key)] == key]
            touched = sorted({min(beyond, key=len), *self.above(key)}, key=len, reverse=True)
        for end in touched:
            self.now += 1
            self.age[end] = self.now

    def match(self, key: Key) -> int:
        length = self.reusable(key)
        if length:
            self.touch(key[: length + 1])
        return length

    def insert(self, key: Key, has_state: bool) -> bool:
        held = self.held(key)
        is_kept = held == len(key) - 1 if self.cut_anywhere else key in self.age
        if is_kept and (self.cut_anywhere or not has_state):
            self.touch(key)
        if is_kept and self.cut_anywhere:
            return True
        if not self.cut_anywhere and not has_state:
            return is_kept
        ends = self.ends | {key}
        if held:
            ends.add(key[: held + 1])
        states = 0 if self.cut_anywhere else 1
        path = [end for end in ends if key[: len(end)] == end]
        nbytes = (len(key) - 1) * TOKEN_BYTES + states * STATE_BYTES
        buffers = len(path) * RUN_BUFFERS + states * STATE_BUFFERS
        if nbytes > self.max_bytes or buffers > self.max_buffers:
            return False
        self.ends = ends
        self.touch(key)
        while self.sizes()[1] > self.max_bytes or self.sizes()[2] > self.max_buffers:
            self.evict_oldest()
        return True

    def evict_oldest(self) -> None:
        oldest = min(self.age, key=lambda end: self.age[end])
        del self.age[oldest]
        self.evictions += 1
        if self.cut_anywhere:
            self.ends.remove(oldest)
        else:  # what leads to no checkpoint is of no use
            self.ends = {end for key in self.age for end in self.above(key)}

    def evict(self, nbytes: int) -> int:
        before = self.sizes()[1]
        while self.age and before - self.sizes()[1] < nbytes:
            self.evict_oldest()
        return before - self.sizes()[1]

    def clear(self, namespace: str | None) -> None:
        if namespace is None:
            self.ends, self.age = set(), {}
        self.ends = {end for end in self.ends if end[0] != namespace}
        self.age = {end: age for end, age in self.age.items() if end[0] != namespace}


class Trial:
    """One random history of a tree and its model."""

    def __init__(self, seed: int, cut_anywhere: bool, is_tight: bool) -> None:
        self.draw = random.Random(seed)
        room = self.draw.randint(8, 120) * TOKEN_BYTES if is_tight else 10**9
        buffers = self.draw.randint(8, 60) if is_tight else 10**9
        self.tree = PrefixTree(room, buffers, cut_anywhere)
        self.model = Naive(room, buffers, cut_anywhere)
        self.alphabet = range(self.draw.choice([2, 2, 3]))
        self.seen: list[tuple[int, ...]] = [()]
        self.counts = dict.fromkeys(("hits", "splits", "faults", "refused"), 0)

    def ids(self) -> tuple[int, ...]:
        """New ids, half of the time a continuation of earlier ones."""
        known = self.draw.choice(self.seen[-40:])
        known = known[: self.draw.randint(0, len(known))]
        if len(known) > 30 or self.draw.random() < 0.5:
            known = ()
        new = known + tuple(self.draw.choices(self.alphabet, k=self.draw.randint(0, 9)))
        self.seen.append(new)
        return new

    def step(self) -> None:
        namespace = self.draw.choice(["", "", "adapter"])
        kind = self.draw.choices(
            (self.insert, self.match, self.fail, self.evict, self.clear), (50, 35, 8, 5, 1)
        )[0]
        kind(namespace)
        self.tree.check()
        stats = self.tree.stats()
        assert (stats["nodes"], stats["bytes"], stats["buffers"]) == self.model.sizes()
        assert stats["evictions"] == self.model.evictions

    def insert(self, namespace: str) -> None:
        ids, has_state = self.ids(), self.draw.random() < 0.8
        held = self.model.held((namespace, *ids))
        splits = self.tree.stats()["nodes"]

        def make_span(start: int, stop: int) -> Run:
            assert (start, stop) == (held, len(ids)) and start < stop
            return Run(ids[start:stop])

        is_kept = self.tree.insert(ids, make_span, State(ids) if has_state else None, namespace)
        assert is_kept == (bool(ids) and self.model.insert((namespace, *ids), has_state))
        self.counts["splits"] += self.tree.stats()["nodes"] > splits + 1
        self.counts["refused"] += not is_kept

    def match(self, namespace: str) -> None:
        ids = self.ids()
        most = max(len(ids) - 1, 0)
        key: Key = (namespace, *ids[:most])
        assert self.tree.peek(ids, namespace) == self.model.reusable(key)
        match = self.tree.match(ids, len(ids) - 1, namespace)
        length = self.model.match(key)
        assert (match.length if match else 0) == length
        if match is None:
            return
        self.counts["hits"] += 1
        found: list[int] = []
        for span, tokens in match.pieces:
            assert isinstance(span, Run) and 0 < tokens <= span.tokens
            found += span.ids[:tokens]
        assert found == list(ids[:length])
        if self.tree.cut_anywhere:
            assert match.checkpoint is None
        else:
            assert isinstance(match.checkpoint, State) and match.checkpoint.ids == ids[:length]

    def fail(self, namespace: str) -> None:
        """An insert whose payload cannot be made changes nothing, its age included."""
        ids = self.ids()

        def make_span(start: int, stop: int) -> Run:
            raise MemoryError("no room")

        if self.model.held((namespace, *ids)) == len(ids):
            return
        try:
            is_kept = self.tree.insert(ids, make_span, State(ids), namespace)
            pytest.fail(f"no payload, yet kept: {is_kept}")
        except MemoryError:
            self.counts["faults"] += 1

    def evict(self, namespace: str) -> None:
        nbytes = self.draw.choice([0, 1, 50, 300])
        assert self.tree.evict(nbytes) == self.model.evict(nbytes)

    def clear(self, namespace: str) -> None:
        which = self.draw.choice([None, namespace])
        self.tree.clear(which)
        self.model.clear(which)


@pytest.mark.parametrize("is_tight", [True, False], ids=["tight", "roomy"])
@pytest.mark.parametrize("cut_anywhere", [True, False], ids=["cut", "whole"])
def test_the_tree_does_what_a_dictionary_of_prefixes_does(
    cut_anywhere: bool, is_tight: bool
) -> None:
    total: dict[str, int] = {}
    evictions = 0
    for seed in range(20):
        trial = Trial(seed, cut_anywhere, is_tight)
        for _ in range(200 if is_tight else 80):  # a roomy model only grows, and slows down
            trial.step()
        for name, count in trial.counts.items():
            total[name] = total.get(name, 0) + count
        evictions += trial.model.evictions
    assert min(total["hits"], total["splits"], total["faults"], evictions) > 50, "a dull history"
    assert not is_tight or total["refused"] > 100
