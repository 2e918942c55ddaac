"""Calls whose grammar is enforced: where they begin (floor 1, column "text"; decision D8).

A model that calls a tool by itself opens the call with its family's marker, and from there on it is
held to a grammar. So the marker is looked for twice, and both must find the same ones:

    Watch    in the guide, before the next token is drawn: the grammar begins
    Watched  in the reader: only such blocks may be calls, any other text is content
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.format import Format, Reader, Reading


class Watched:
    """A family's format with fewer markers. Each begins with one of those that the format knows."""

    def __init__(self, inner: Format, openers: Sequence[str], starters: Sequence[str]) -> None:
        self.openers = openers
        self.starters = starters
        self.markers = inner.markers
        self._inner = inner

    def read(self, r: Reader, opener: str) -> Reading[None]:
        known = (*self._inner.openers, *self._inner.starters)
        base = max((each for each in known if opener.startswith(each.lower())), key=len)
        if len(base) < len(opener):
            r.put_back(len(opener) - len(base))
        yield from self._inner.read(r, base.lower())


def spelled_ids(spelled: bytes, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text inside an answer. SentencePiece puts a blank ahead of a text that stands
    alone, so where that is so it does not stand alone."""
    text = spelled.decode("utf-8", "replace")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if b"".join(map(tokenizer.bytes_of, ids)) == spelled:
        return ids
    before = tokenizer.encode("\n", add_special_tokens=False)
    return tokenizer.encode(f"\n{text}", add_special_tokens=False)[len(before) :]


class Watch:
    """Finds where calls begin in an answer, token by token.

    openers: markers that open a call anywhere. starters: texts that open one where the answer has
    not begun: at its start, after a call, after `restart`, which is the end of its thinking.
    at_start: nothing but white space has come.
    """

    def __init__(
        self,
        openers: Sequence[str],
        starters: Sequence[str] = (),
        *,
        restart: str = "",
        at_start: bool = True,
    ) -> None:
        self._openers = {each.lower().encode(): each.encode() for each in openers}
        self._starters = {each.lower().encode(): each.encode() for each in starters}
        self._restart = restart.lower().encode() if starters else b""
        self._most = max(map(len, (*self._openers, self._restart, b"  "))) - 1
        self._seen = b""  # the last bytes, in which a marker may have begun
        self._first = b"" if starters and at_start else None  # all bytes, while one may start here

    def ended(self) -> None:
        """A call came to its end."""
        self._seen = b""
        self._first = b"" if self._starters else None

    def take(self, spelled: bytes) -> bytes | None:
        """Takes the bytes of a token. The call that it opened, from its marker on; or None."""
        found = self._started(spelled)
        if found is not None:
            return found
        text = self._seen + spelled
        lower = text.lower()
        places = [(at, each) for each in self._openers if (at := lower.find(each)) >= 0]
        if places:
            at, opener = min(places, key=lambda place: (place[0], -len(place[1])))
            return self._openers[opener] + text[at + len(opener) :]
        if self._restart and (at := lower.rfind(self._restart)) >= 0:
            self._first = b""
            self._seen = b""
            return self._started(text[at + len(self._restart) :])
        self._seen = text[-self._most :]
        return None

    def pending(self) -> set[bytes]:
        """What is missing of the markers that may have begun."""
        lower = self._seen.lower()
        found = {
            own[n:]
            for each, own in self._openers.items()
            for n in range(1, len(each))
            if lower.endswith(each[:n])
        }
        first = (self._first or b"").lower()
        for text in filter(None, (first, first.lstrip())):
            found |= {own[len(text) :] for e, own in self._starters.items() if e.startswith(text)}
        return found

    def _started(self, spelled: bytes) -> bytes | None:
        if self._first is None:
            return None
        self._first += spelled
        for text in (self._first, self._first.lstrip()):
            lower = text.lower()
            for starter, own in self._starters.items():
                if lower.startswith(starter):
                    return own + text[len(starter) :]
        if not any(each.startswith(t.lower()) for each in self._starters
                   for t in (self._first, self._first.lstrip())):  # fmt: skip
            self._first = None
        return None
