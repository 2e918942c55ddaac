"""What every family of tool calls is made of (floor 1, column "text"; spec 30 sections 4, 5).

A family is a `Format`: the markers that open a block, and a grammar that reads one. Grammars are
generators over a `Reader`: each `yield` waits for more text, so a grammar reads like the format's
definition although its text comes in portions of any size.

    r.text      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    pieces      NAME add   ARGUMENTS {"a":   ARGUMENTS 1   ARGUMENTS }   END

Invariants:
- What a grammar decides depends on the text alone, never on how it was cut.
- A grammar takes text and may announce a call from it; text that it took without doing so is
  *unspent*. If the grammar breaks off, exactly the unspent text goes back to the client (D11).
- The fragments of an announced call always join to one JSON object: whoever breaks off closes it.
- Text is looked at a bounded number of times; nothing grows with the square of a block.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from mlxlite.types import JSON

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of a grammar that reads a T; it yields where it needs more text."""


class Kind(Enum):
    """What a piece of a routed answer is."""

    TEXT = "text"
    REASONING = "reasoning"
    NAME = "name"  # announces a call
    ARGUMENTS = "arguments"  # a fragment of the announced call's arguments
    END = "end"  # that call is complete


Piece = tuple[Kind, str]


class Broken(Exception):
    """The block is no call. What is unspent is content, a marker inside may open a new block."""


class Refused(Broken):
    """The block is whole but no call (an unknown tool): all of it is content, markers too."""


class Ended(Exception):
    """The output ended inside the block."""


# ------------------------------------------------------------------------------------------ tools


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request: the schemas of their parameters by the tool's exact name."""

    schemas: Mapping[str, Mapping[str, JSON]]

    @classmethod
    def of(cls, tools: Iterable[Mapping[str, JSON]]) -> Tools:
        """From OpenAI-shaped tools; what is no function has no name and is left out."""
        schemas: dict[str, Mapping[str, JSON]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                continue
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
        return cls(schemas)

    def __contains__(self, name: object) -> bool:
        return name in self.schemas

    def schema(self, name: str, key: str) -> JSON:
        """The schema of one parameter, or None if the tool does not declare it."""
        return self.schemas.get(name, {}).get(key)


# ---------------------------------------------------------------------------------------- markers


class Markers:
    """A few fixed strings to find in a stream; the case of ASCII letters is ignored."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        # Of two that begin alike the longer one is tried first.
        ordered = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)), re.IGNORECASE | re.ASCII)
        self._longest = max(map(len, texts))
        self._beginnings = {text[:n].lower() for text in texts for n in range(1, len(text))}
        self._firsts = {first for text in texts for first in (text[0].lower(), text[0].upper())}

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        return self._pattern.match(text, at)

    def begins(self, text: str) -> bool:
        """True if a marker begins with the text, which is shorter than the marker."""
        return text.lower() in self._beginnings

    def tail(self, text: str, at: int = 0) -> int:
        """How many characters at the end of text[at:] may still grow into a marker."""
        first = max(at, len(text) - self._longest + 1)
        for start in range(first, len(text)):
            if text[start] in self._firsts and text[start:].lower() in self._beginnings:
                return len(text) - start
        return 0


# ----------------------------------------------------------------------------------------- reader

_SPACE = re.compile(r"\s*")
_MOST_LAYOUT_CHARS = 1000


class Reader:
    """The text of one block, and the pieces that its grammar makes of it.

    text[at:] is unread. Grammars read by the generators below and by `take`.
    """

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.text = ""
        self.at = 0
        self.ended = False  # the output ended: no more text will come
        self.pieces: list[Piece] = []  # made and not yet collected by the router
        self.is_reasoning = False  # what is being read is reasoning
        self.closers: list[str] = []  # what would close the JSON that was sent, outermost first
        self.has_spent = False  # some of the block's text was delivered
        self.call: str | None = None  # the name of the announced, unfinished call
        self._past: list[str] = []  # everything taken, in order
        self._spent = 0  # how many entries of it need not go back
        self._sent: list[str] = []  # fragments of the announced call
        self._held: list[str] | None = None  # fragments in doubt, see `hold`
        self._closers_at_hold: list[str] = []

    # ------------------------------------------------------------------------------ the text

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, count: int) -> str:
        """The next characters, which must have come already."""
        taken = self.text[self.at : self.at + count]
        self.at += count
        self._past.append(taken)
        return taken

    def put_back(self, count: int) -> None:
        """Makes the last few characters of the last `take` unread again."""
        last = self._past.pop()
        if len(last) > count:
            self._past.append(last[:-count])
        self._spent = min(self._spent, len(self._past))
        self.text = last[len(last) - count :] + self.unread()
        self.at = 0

    def put_back_all(self) -> None:
        """Makes everything unread again, the opener included. Nothing was spent."""
        self.text = self.since(0) + self.unread()
        self.at = 0
        self._past.clear()

    def unread(self) -> str:
        return self.text[self.at :]

    def more(self) -> Reading[None]:
        if self.ended:
            raise Ended
        yield

    def look(self, count: int) -> Reading[str]:
        """The next characters without taking them."""
        while len(self.text) - self.at < count:
            yield from self.more()
        return self.text[self.at : self.at + count]

    def solid(self) -> Reading[str]:
        """Takes white space; the character after it, which is not taken."""
        while True:
            found = _SPACE.match(self.text, self.at)
            if found and found.end() > self.at:
                self.take(found.end() - self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            yield from self.more()

    def run(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Takes the longest run of a pattern of single characters; Broken if it is too long."""
        taken = ""
        while True:
            found = pattern.match(self.text, self.at)
            if found and found.end() > self.at:
                taken += self.take(found.end() - self.at)
            if len(taken) > most:
                raise Broken
            if self.at < len(self.text) or self.ended:
                return taken
            yield

    def starts(self, markers: Markers, skip: int = 0) -> Reading[str]:
        """The marker that the unread text (after `skip` characters) starts with, or ""."""
        while True:
            found = markers.match(self.text, self.at + skip)
            if found:
                return found.group()
            rest = self.text[self.at + skip :]
            if self.ended or (rest and not markers.begins(rest)):
                return ""
            yield

    def accept(self, markers: Markers) -> Reading[str]:
        """Takes white space and a marker after it; takes nothing and is "" if none comes."""
        while True:
            found = _SPACE.match(self.text, self.at)
            skip = found.end() - self.at if found else 0
            if skip > _MOST_LAYOUT_CHARS:
                return ""  # no model's layout; it would be looked at again with each token
            if self.at + skip < len(self.text) or self.ended:
                break
            yield
        marker = yield from self.starts(markers, skip)
        if marker:
            self.take(skip + len(marker))
        return marker

    def until(self, markers: Markers, most: int | None = None) -> Reading[str]:
        """Takes the text before the next marker. Ended or Broken (too long) if none comes."""
        taken: list[str] = []
        count = 0
        while True:
            found = markers.search(self.text, self.at)
            end = found.start() if found else len(self.text) - markers.tail(self.text, self.at)
            if self.ended and not found:
                end = len(self.text)
            if end > self.at:
                count += end - self.at
                taken.append(self.take(end - self.at))
            if most is not None and count > most:
                raise Broken
            if found:
                return "".join(taken)
            yield from self.more()

    def rest(self) -> Reading[str]:
        """Takes everything up to the end of the output."""
        taken: list[str] = []
        while True:
            taken.append(self.take(len(self.text) - self.at))
            if self.ended:
                return "".join(taken)
            yield

    def stream(self, kind: Kind, enders: Markers) -> Reading[str]:
        """Sends text on as it comes, up to a marker (which is not taken) or the end ("")."""
        while True:
            found = enders.search(self.text, self.at)
            held = 0 if found or self.ended else enders.tail(self.text, self.at)
            end = found.start() if found else len(self.text) - held
            if end > self.at:
                self.pieces.append((kind, self.take(end - self.at)))
                self.spend()
            if found or self.ended:
                return found.group() if found else ""
            yield

    # --------------------------------------------------------------- what was taken, and spent

    def mark(self) -> int:
        """A place in the text, for `since` and `rewind`."""
        return len(self._past)

    def since(self, mark: int) -> str:
        return "".join(self._past[mark:])

    def rewind(self, mark: int, count: int) -> bool:
        """Makes unread what was taken later than `count` characters after a mark.

        False if some of that text was spent, which cannot be undone.
        """
        spent = sum(map(len, self._past[mark : max(mark, self._spent)]))
        if count < spent:
            return False
        taken = self.since(mark)
        self.text = taken[count:] + self.unread()
        self.at = 0
        spent_entries = self._past[: max(mark, self._spent)]
        self._past = [*spent_entries, taken[spent:count]]
        return True

    def spend(self) -> None:
        """What was taken so far has been delivered, or is markup: it need not go back."""
        self._spent = len(self._past)
        self.has_spent = True

    def unspent(self) -> str:
        return "".join(self._past[self._spent :])

    # ------------------------------------------------------------------------------- the call

    def begin(self, name: str) -> None:
        """Announces a call. The caller has checked the name."""
        assert self.call is None and name in self.tools
        self.call = name
        self._sent = []
        self.pieces.append((Kind.NAME, name))

    def send(self, fragment: str) -> None:
        """The next fragment of the arguments; what it was made of is spent."""
        if self._held is not None:
            self._held.append(fragment)
            return
        self._sent.append(fragment)
        self.pieces.append((Kind.ARGUMENTS, fragment))
        self.spend()

    def hold(self) -> None:
        """Sends nothing until `end`: the text of the closing marker came inside a string.

        If the JSON goes on to its end, it was data; if not, the block ended there.
        """
        if self._held is None:
            self._held = []
            self._closers_at_hold = list(self.closers)

    def end(self) -> None:
        """The call is complete: closes it, and releases what was held."""
        held, self._held = self._held, None
        if held:
            self.send("".join(held))
        if self.closers:
            self.send("".join(reversed(self.closers)))
            self.closers.clear()
        self.pieces.append((Kind.END, ""))
        self.call = None
        self.spend()

    def whole(self, name: str, arguments: str) -> None:
        """A call at once, its arguments as compact JSON text. Refused if no such tool."""
        if name not in self.tools:
            raise Refused
        self.begin(name)
        self.send(arguments)
        self.end()

    def mend(self, name: str, arguments: str | None, fault: Exception) -> None:
        """Ends a call whose text broke, by what its repair gave: JSON text, or None.

        Was nothing announced, this is `whole`. Else what was sent cannot be taken back: the repair
        counts only if it goes on from there, otherwise the object is closed as it is, and Broken
        says that the text left over is content. fault: what broke the text.
        """
        if self.call is None:
            if arguments is None:
                raise Broken
            self.whole(name, arguments)
            return
        if self._held is not None:
            self._held = None
            self.closers[:] = self._closers_at_hold
        sent = "".join(self._sent)
        if arguments is not None and name == self.call and arguments.startswith(sent):
            self.closers.clear()
            if len(arguments) > len(sent):
                self.send(arguments[len(sent) :])
            self.end()
            return
        left_over = self._past[self._spent :]
        self.end()
        # A key without its value, where the output was cut off, goes with its call.
        is_cut = isinstance(fault, Ended) and not self.unread()
        if left_over and not is_cut:
            self._past = left_over
            self._spent = 0
            raise Broken


class Format(Protocol):
    """One family of markup.

    openers: markers that open a block anywhere. starters: further ones that do so only where the
    answer has not begun. markers: every text of the family that a vocabulary may hold as a special
    token, so that the detokenizer keeps it.
    """

    @property
    def openers(self) -> Sequence[str]: ...

    @property
    def starters(self) -> Sequence[str]: ...

    @property
    def markers(self) -> Sequence[str]: ...

    def read(self, r: Reader, opener: str) -> Reading[None]:
        """Reads one block; the opener (in lower case) was taken already.

        Returns at its end, or raises Broken, Refused or Ended.
        """
