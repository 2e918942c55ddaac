"""The prompt cache's index: which prefixes of token ids have their state kept, and where.

A prefix tree with compressed edges. A node owns the ids of its edge, a span (keys and values of
exactly these tokens, for the layers that can be cut at any token) and perhaps a checkpoint (whole
state of the other layers: recurrent, wrapped windows; valid exactly at the node's end). What a
prompt shares with earlier ones is a path from the root. Payloads never change once they are here:
a row copies what it reuses, so donors cannot be hurt, and nodes are never merged.

What can be reused decides what is worth keeping, and in which order it goes:

- `cut_anywhere`: every layer can be cut, so each prefix of a path is of use. Using a path makes all
  its nodes recent, the top one most of all; so the oldest node has no children and goes first.
- otherwise: only a checkpoint's position is of use. Using one makes that one recent, not those that
  the path passes by: a chat leaves one a turn, and only its last ones matter. The oldest checkpoint
  goes first, and with it the spans that lead to no other; the rest of its path stays.

Limits count bytes and buffers, since Metal ends a process that owns too many buffers however small
they are (faults F48, F59). Spec 60 sections 1 and 2; engine-notes section 10, points 17 and 18.

Ids are compared as bytes, by `memcmp`: finding or storing a prompt costs its length once, plus a
dictionary access for each node on its path. No MLX here. Owned by the engine thread; no locks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

_WIDTH = array("I").itemsize  # bytes of a token id in an edge


class Payload(Protocol):
    """Something kept. Its sizes never change."""

    @property
    def nbytes(self) -> int: ...

    @property
    def buffers(self) -> int: ...


class Checkpoint(Payload, Protocol):
    """State that is valid at one position only."""


class Span(Payload, Protocol):
    """State of a run of tokens; of 0 bytes in a model with no layer that can be cut."""

    @property
    def tokens(self) -> int: ...

    def split(self, at: int) -> tuple[Span, Span]:
        """The first `at` tokens and the rest, at least one each, as spans that share no memory:
        either can be let go alone. This span stays as it is.
        """
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can start from: `length` tokens."""

    length: int
    pieces: list[tuple[Span, int]]  # in order: a span, how many of its first tokens to use
    checkpoint: Checkpoint | None  # valid at `length`; None in a tree that is cut anywhere


class _NoTokens:
    """The span of a root."""

    tokens = nbytes = buffers = 0

    def split(self, at: int) -> tuple[Span, Span]:
        raise AssertionError("a root has nothing to split")


@dataclass(eq=False, slots=True)
class _Node:
    """A run of tokens below `parent`. The roots, one a namespace, have no parent and no tokens."""

    edge: bytes
    span: Span
    parent: _Node | None
    checkpoint: Checkpoint | None = None
    children: dict[bytes, _Node] = field(default_factory=dict)  # by the first token of their edge
    nbytes: int = 0  # the span's, asked once; as are its buffers
    buffers: int = 0

    def __post_init__(self) -> None:
        self.hold(self.edge, self.span)

    def hold(self, edge: bytes, span: Span) -> None:
        """Own this run of tokens instead; a span of another length changes nothing."""
        tokens, nbytes, buffers = span.tokens, span.nbytes, span.buffers
        assert tokens * _WIDTH == len(edge), f"{tokens} tokens for an edge of {len(edge)} bytes"
        self.edge, self.span, self.nbytes, self.buffers = edge, span, nbytes, buffers

    def below(self) -> Iterator[_Node]:
        """Every node under this one, parents before their children."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


class PrefixTree:
    """max_bytes, max_buffers: what all payloads together may take; 0 keeps nothing.
    bytes_per_token: a span's size as far as it is known beforehand; what is too large by it is
    refused before it is built.

    Clear a tree before letting go of it: nodes know their parents, and such cycles live until
    Python looks for them.
    """

    def __init__(
        self, max_bytes: int, max_buffers: int, cut_anywhere: bool, bytes_per_token: float = 0
    ) -> None:
        self.max_bytes = max_bytes
        self.max_buffers = max_buffers
        self.cut_anywhere = cut_anywhere
        self.bytes_per_token = bytes_per_token
        self.nodes = self.nbytes = self.buffers = 0
        self.hits = self.misses = self.reused_tokens = self.inserts = self.evictions = 0
        self._roots: dict[str, _Node] = {}
        # What can be evicted, oldest first: every node, or every node with a checkpoint.
        self._recent: OrderedDict[_Node, None] = OrderedDict()

    # ---------------------------------------------------------------------------------- look up

    def match(self, ids: Sequence[int], most: int, namespace: str = "") -> Match | None:
        """The longest prefix of `ids` that can be reused, of `most` tokens at most; it becomes
        recent. The last token of a prompt is always run, so `most` is its length less one (F39).
        """
        path, length, left = self._reusable(ids, most, namespace)
        if not length:
            self.misses += 1
            return None
        self.hits += 1
        self.reused_tokens += length
        self._touch(path)
        last = path[-1]
        pieces = [(node.span, node.span.tokens) for node in path[1:-1]]
        pieces.append((last.span, last.span.tokens - left))
        return Match(length, pieces, last.checkpoint)

    def peek(self, ids: Sequence[int], namespace: str = "") -> int:
        """How many tokens a prompt of these ids would reuse; nothing is counted or refreshed."""
        return self._reusable(ids, len(ids) - 1, namespace)[1]

    def _reusable(
        self, ids: Sequence[int], most: int, namespace: str
    ) -> tuple[list[_Node], int, int]:
        """`_walk` along the first `most` ids, then back to the last place that can be reused."""
        path, held, left = self._walk(_key(ids[: max(most, 0)]), namespace)
        if not self.cut_anywhere:
            while len(path) > 1 and (left or path[-1].checkpoint is None):
                held -= path.pop().span.tokens - left
                left = 0
        return path, held, left

    def _walk(self, key: bytes, namespace: str) -> tuple[list[_Node], int, int]:
        """The nodes that a key runs through, the root first; how many tokens it shares with them;
        and how many it does not share of the last one's.
        """
        path = [self._roots.get(namespace) or _Node(b"", _NoTokens(), None)]
        at = 0  # bytes
        while (node := path[-1].children.get(key[at : at + _WIDTH])) is not None:
            path.append(node)
            if not key.startswith(node.edge, at):
                shared = _common_bytes(node.edge, key, at)
                return path, (at + shared) // _WIDTH, (len(node.edge) - shared) // _WIDTH
            at += len(node.edge)
        return path, at // _WIDTH, 0

    def _touch(self, path: list[_Node]) -> None:
        """Make a path's end the most recent; where all of it counts, its top even more so."""
        for node in reversed(path[1:] if self.cut_anywhere else path[-1:]):
            self._recent[node] = None
            self._recent.move_to_end(node)

    # ------------------------------------------------------------------------------------ store

    def insert(
        self,
        ids: Sequence[int],
        make_span: Callable[[int, int], Span],
        checkpoint: Checkpoint | None = None,
        namespace: str = "",
    ) -> bool:
        """Keep the state of all of `ids`. True: it is there now, and recent.

        make_span(start, stop): called once, for the ids that are not there yet, if there are any;
        it must not use the tree. checkpoint: replaces the one at the same place. Where every layer
        can be cut it has no use and is dropped; elsewhere ids without one could never be found
        again and are not kept (F48).

        What does not fit the limits by itself is refused and evicts nothing. Else the oldest make
        room, once the new payload is there: at its peak both are. If `make_span` or a span's
        `split` raises, the tree stays as it was.
        """
        if not ids or not self.max_bytes or not self.max_buffers:
            return False
        key = _key(ids)
        path, held, left = self._walk(key, namespace)
        is_whole = held == len(ids)
        if self.cut_anywhere:
            checkpoint, is_kept = None, is_whole
        else:
            is_kept = is_whole and not left and path[-1].checkpoint is not None
        if checkpoint is None and (is_kept or not self.cut_anywhere):
            if is_kept:
                self._touch(path)
            return is_kept

        # 1. What may be too large or fail comes before the first change.
        state = (0, 0) if checkpoint is None else (checkpoint.nbytes, checkpoint.buffers)
        if state[0] + len(ids) * self.bytes_per_token > self.max_bytes:
            return False
        new: list[_Node] = []
        if left:
            old = path.pop()
            first, rest = old.span.split(old.span.tokens - left)
            new.append(_Node(old.edge[: -left * _WIDTH], first, path[-1]))
        if not is_whole:
            above = (path + new)[-1]
            new.append(_Node(key[held * _WIDTH :], make_span(held, len(ids)), above))
        path += new
        if not self._fits(path, *state):
            return False

        # 2. New nodes take their places: in the middle of an edge, below the path.
        if left:
            self._lower(old, rest, new[0])
        for node in new:
            self._add(node)
        self._roots[namespace] = path[0]
        self._set_checkpoint(path[-1], checkpoint)
        self.inserts += 1

        # 3. All of the path is recent, so others make room.
        self._touch(path)
        while self.nbytes > self.max_bytes or self.buffers > self.max_buffers:
            self._evict_oldest()
        return True

    def _fits(self, path: list[_Node], nbytes: int, buffers: int) -> bool:
        """Whether these spans and so much more would fit if they were alone here."""
        nbytes += sum(node.nbytes for node in path)
        buffers += sum(node.buffers for node in path)
        return nbytes <= self.max_bytes and buffers <= self.max_buffers

    def _lower(self, node: _Node, rest: Span, upper: _Node) -> None:
        """Hang a node under `upper`, which takes its first tokens. It keeps the rest, its children,
        its checkpoint and its age.
        """
        nbytes, buffers = node.nbytes, node.buffers
        node.hold(node.edge[len(upper.edge) :], rest)
        self._count(0, node.nbytes - nbytes, node.buffers - buffers)
        node.parent = upper
        upper.children[node.edge[:_WIDTH]] = node

    def _add(self, node: _Node) -> None:
        assert node.parent is not None
        node.parent.children[node.edge[:_WIDTH]] = node
        self._count(1, node.nbytes, node.buffers)

    def _set_checkpoint(self, node: _Node, checkpoint: Checkpoint | None) -> None:
        if (old := node.checkpoint) is not None:
            self._count(0, -old.nbytes, -old.buffers)
        if checkpoint is not None:
            self._count(0, checkpoint.nbytes, checkpoint.buffers)
        node.checkpoint = checkpoint

    def _count(self, nodes: int, nbytes: int, buffers: int) -> None:
        self.nodes += nodes
        self.nbytes += nbytes
        self.buffers += buffers

    # ------------------------------------------------------------------------------------ let go

    def evict(self, bytes_needed: int) -> int:
        """Let go of the oldest until so many bytes are free, or nothing is left; the bytes freed.
        What a row still holds of them it holds until it has copied it.
        """
        before = self.nbytes
        while self._recent and before - self.nbytes < bytes_needed:
            self._evict_oldest()
        return before - self.nbytes

    def clear(self, namespace: str | None = None) -> None:
        """Let go of a namespace, or of everything. Counters stay."""
        for name in [*self._roots] if namespace is None else [namespace]:
            root = self._roots.pop(name, None)
            for node in () if root is None else root.below():
                self._set_checkpoint(node, None)
                self._count(-1, -node.nbytes, -node.buffers)
                self._recent.pop(node, None)
                node.parent = None  # no cycle is left: memory is free at once

    def _evict_oldest(self) -> None:
        """Drop the oldest checkpoint, or the oldest node, and the spans that are of no use then."""
        node = next(iter(self._recent))
        del self._recent[node]
        self.evictions += 1
        self._set_checkpoint(node, None)
        while node.parent is not None and not node.children and node.checkpoint is None:
            del node.parent.children[node.edge[:_WIDTH]]
            self._count(-1, -node.nbytes, -node.buffers)
            if self.cut_anywhere:
                return  # what is above is a prefix that can be reused
            node = node.parent

    # ------------------------------------------------------------------------------------- tell

    def stats(self) -> dict[str, int]:
        return {
            "nodes": self.nodes,
            "bytes": self.nbytes,
            "buffers": self.buffers,
            "hits": self.hits,
            "misses": self.misses,
            "reused_tokens": self.reused_tokens,
            "inserts": self.inserts,  # those that stored something
            "evictions": self.evictions,
        }

    def check(self) -> None:
        """Verify every invariant, in time of all nodes. Raises AssertionError."""
        age = {node: place for place, node in enumerate(self._recent)}
        nodes = nbytes = buffers = evictable = 0
        for root in self._roots.values():
            for node in root.below():
                span, parent, state = node.span, node.parent, node.checkpoint
                assert node.edge, "node without tokens"
                assert span.tokens * _WIDTH == len(node.edge), "span and edge differ in length"
                assert (span.nbytes, span.buffers) == (node.nbytes, node.buffers), "size changed"
                assert parent is not None, "node without a parent"
                assert parent.children.get(node.edge[:_WIDTH]) is node, "not under its first token"
                if self.cut_anywhere:
                    assert state is None, "checkpoint of no use"
                    assert node in age, "node that can never go"
                    assert parent is root or age[node] < age[parent], "older than what is below"
                else:
                    assert (node in age) == (state is not None), "only checkpoints have an age"
                    assert node.children or state is not None, "spans that nobody can reach"
                nodes += 1
                evictable += node in age
                nbytes += node.nbytes + (0 if state is None else state.nbytes)
                buffers += node.buffers + (0 if state is None else state.buffers)
        assert evictable == len(age), "something evictable is not in the tree"
        assert (nodes, nbytes, buffers) == (self.nodes, self.nbytes, self.buffers), "sums differ"
        assert nbytes <= self.max_bytes and buffers <= self.max_buffers, "over the limits"


def _key(ids: Sequence[int]) -> bytes:
    """Token ids as bytes that compare at the speed of memory. Raises OverflowError for an id that
    is none.
    """
    return array("I", ids).tobytes()


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts have in common from their start."""
    return _common_bytes(_key(one), _key(other), 0) // _WIDTH


def _common_bytes(edge: bytes, key: bytes, at: int) -> int:
    """Bytes, in whole tokens, that `edge` and `key` from `at` on have in common.

    By halves, so that all comparisons together read the length once, at `memcmp`'s speed.
    """
    low, high = 0, min(len(edge), len(key) - at)
    while low < high:
        half = (high - low + _WIDTH) // (2 * _WIDTH) * _WIDTH  # at least a token
        if edge[low : low + half] == key[at + low : at + low + half]:
            low += half
        else:
            high = low + half - _WIDTH
    return low
