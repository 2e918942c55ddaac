"""Finds blocks of markup in a stream of text (floor 1, column "text"; spec 30 section 4, D11).

Between the detokenizer and the stop matcher. Text flows through as it comes, but for an end that
may still grow into a marker. A marker opens a block, whose grammar then reads the text.

    text     Let me see.<tool_call>{"name": "add", ...}</tool_call>\\n<tool_call>oops</tool_call>
    pieces   TEXT Let me see.   NAME add  ARGUMENTS ...  END   TEXT \\n<tool_call>oops</tool_call>

Invariants:
- Every character leaves as text, or belongs to a call or to a channel's markup. The one exception
  is layout: white space alone between two calls, or between the last one and the end.
- A block that breaks off goes out as text, unchanged. A marker inside it may open a new block
  (prose that mentions `<tool_call>` must not swallow the call after it); once, so cost is linear.
- Nothing that a model writes raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlxlite.text.tools.format import (
    Broken,
    Ended,
    Format,
    Kind,
    Markers,
    Piece,
    Reader,
    Reading,
    Refused,
    Tools,
)

_SPACE = re.compile(r"\s*")


class Router:
    """The router of one row. restart: a text after which the answer is as if it had just begun
    (the end of its thinking), which matters to formats without markers."""

    def __init__(
        self, formats: Sequence[Format], tools: Tools, *, restart: str = "", at_start: bool = True
    ) -> None:
        self._tools = tools
        self._format_of = {
            opener.lower(): each for each in formats for opener in (*each.openers, *each.starters)
        }
        openers = [opener for each in formats for opener in each.openers]
        starters = [starter for each in formats for starter in each.starters]
        self._restart = restart.lower() if starters else ""
        if self._restart:
            openers.append(restart)
        self._openers = Markers(*openers) if openers else None
        self._starters = Markers(*starters) if starters else None
        self._at_start = at_start  # no text but white space has come
        self._text = ""  # not yet looked at, or held
        self._reader: Reader | None = None  # of the open block
        self._grammar: Reading[None] | None = None
        self._was_start = False  # the open block began as a starter
        # White space since a call; None if a call was not the last thing that came.
        self._layout: list[str] | None = None
        self._out: list[Piece] = []

    @property
    def is_reasoning(self) -> bool:
        """True inside a reasoning channel."""
        return self._reader is not None and self._reader.is_reasoning

    @property
    def in_block(self) -> bool:
        """True inside any block."""
        return self._reader is not None

    def push(self, text: str) -> list[Piece]:
        """Takes the next text; returns what it settles."""
        self._text += text
        while self._step(ended=False):
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Piece]:
        """Ends the text: what was held is judged as it is."""
        while self._step(ended=True):
            pass
        self._emit(self._text)
        self._text = ""
        out, self._out = self._out, []
        return out

    def _step(self, ended: bool) -> bool:
        """Goes on by one block or stretch of text; False where more text is needed."""
        return self._find() if self._reader is None else self._read(ended)

    # ------------------------------------------------------------------------- between blocks

    def _find(self) -> bool:
        """Sends text on, up to the next opener. True if it opened a block or made a restart."""
        if self._starters is not None and self._at_start:
            space = _match_end(self._text)
            for skip in (0, space):  # a starter may itself begin with white space
                found = self._starters.match(self._text, skip)
                if found:
                    self._release(skip)
                    self._open(found.group())
                    self._was_start = True
                    return True
                if self._starters.begins(self._text[skip:]):
                    self._release(skip)
                    return False
            if space == len(self._text):
                self._release(space)
                return False
        if self._openers is None:
            self._release(len(self._text))
            return False
        found = self._openers.search(self._text)
        if found is None:
            self._release(len(self._text) - self._openers.tail(self._text))
            return False
        self._release(found.start())
        if self._restart and found.group().lower() == self._restart:
            self._release(len(found.group()))
            self._at_start = True
        else:
            self._open(found.group())
        return True

    def _open(self, opener: str) -> None:
        reader = Reader(self._tools)
        reader.feed(self._text)
        reader.take(len(opener))
        self._text = ""
        self._was_start = False
        self._reader = reader
        self._grammar = self._format_of[opener.lower()].read(reader, opener.lower())

    def _release(self, count: int) -> None:
        text, self._text = self._text[:count], self._text[count:]
        self._emit(text)

    def _emit(self, text: str) -> None:
        """Text for the client; white space after a call waits for what follows."""
        if not text:
            return
        if self._at_start and not text.isspace():
            self._at_start = False
        if self._layout is not None:
            self._layout.append(text)
            if text.isspace():
                return
            text = "".join(self._layout)
            self._layout = None
        self._out.append((Kind.TEXT, text))

    # ------------------------------------------------------------------------- inside a block

    def _read(self, ended: bool) -> bool:
        """Lets the grammar read on. True if the block ended."""
        reader, grammar = self._reader, self._grammar
        assert reader is not None and grammar is not None
        reader.feed(self._text)
        self._text = ""
        reader.ended = ended
        rest = left_over = ""
        try:
            next(grammar)
            self._collect(reader)
            return False
        except StopIteration:
            rest = reader.unread()
            self._at_start = self._was_start  # calls without markers may follow each other
        except Refused:
            left_over, rest = reader.unspent(), reader.unread()
        except (Broken, Ended):
            left_over, rest = self._split(reader)
        self._collect(reader)
        self._reader = self._grammar = None
        self._emit(left_over)
        self._text = rest
        return True

    def _split(self, reader: Reader) -> tuple[str, str]:
        """What is text of a broken block, and what is to be looked at again."""
        text = reader.unspent()
        start = -1
        if self._openers is not None:
            # The block's own opener is not looked at again.
            found = self._openers.search(text, 0 if reader.has_spent else 1)
            while found is not None:
                start = found.start()
                found = self._openers.search(text, found.end())
        if start < 0:
            return text, reader.unread()
        return text[:start], text[start:] + reader.unread()

    def _collect(self, reader: Reader) -> None:
        for kind, text in reader.pieces:
            if kind is Kind.TEXT:
                self._emit(text)
                continue
            if kind is Kind.NAME:
                self._layout = None
            elif kind is Kind.END:
                self._layout = []
            elif kind is Kind.REASONING and self._layout is not None:
                self._emit_layout(self._layout)
            self._out.append((kind, text))
        reader.pieces.clear()

    def _emit_layout(self, layout: list[str]) -> None:
        self._layout = None
        if layout:
            self._out.append((Kind.TEXT, "".join(layout)))


def _match_end(text: str) -> int:
    found = _SPACE.match(text)
    return found.end() if found else 0
