"""Token ids to text, piece by piece (floor 1, column "text"; spec 30 section 11 under D11).

One `Detokenizer` lives as long as its row. The engine's events bring it ids in whatever portions
the steps make; it gives back all text that later ids can no longer change.

Invariants:
- The concatenation of everything pushed out plus `flush()` does not depend on the portions.
- Nothing is trimmed or dropped: no leading space (F27), no tail. Bytes of an unfinished character
  wait for the rest (F23, F25); if the rest never comes, `flush` releases U+FFFD in their place.
- The cost is linear: an id is looked at once, or, for vocabularies whose decoder is not a map from
  ids to bytes, decoded within a window of bounded length.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mlxlite.text.tokenizer import Kind, Tokenizer

WINDOW_TOKENS = 32  # spec 30 section 11; a character never needs more than four
_REPLACEMENT = "\ufffd"
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Streaming decoder of one row. keep_special: control tokens appear as their literal text."""

    def __init__(self, tokenizer: Tokenizer, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._skipped = frozenset() if keep_special else tokenizer.special_ids
        self._is_exact = tokenizer.kind is not Kind.OTHER
        # The codec replaces a malformed sequence as a one-shot decode does, at every split.
        self._utf8 = _new_utf8_decoder("replace")
        self._window: list[int] = []  # kind OTHER: context ids, then ids not yet emitted
        self._context_tokens = 0  # how many of them are context
        self._context_text = ""  # their text alone

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they settle, possibly ""."""
        skipped = self._skipped
        if self._is_exact:
            bytes_of = self._tokenizer.bytes_of
            return self._utf8.decode(b"".join([bytes_of(i) for i in ids if i not in skipped]))
        return "".join([self._push_windowed(i) for i in ids if i not in skipped])

    def flush(self) -> str:
        """Ends the text: returns what was still held. The detokenizer is then as new."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        if self._window:
            text += self._decode(self._window)[len(self._context_text) :]
        self._window, self._context_tokens, self._context_text = [], 0, ""
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, keep_special=self._keep_special)

    def _push_windowed(self, token_id: int) -> str:
        """One id where a token's text depends on its neighbours (WordPiece: "##ing").

        The new ids are decoded together with the last settled ones, and the part by which the
        text grew is theirs. If a decoder revises text already sent, only the growth is sent.
        """
        self._window.append(token_id)
        text = self._decode(self._window)
        new_tokens = len(self._window) - self._context_tokens
        is_open = text.endswith(_REPLACEMENT) and new_tokens < WINDOW_TOKENS
        if is_open or len(text) <= len(self._context_text):
            # Ids without any text (outside the vocabulary) must not stretch the window for ever.
            if len(self._window) >= 2 * WINDOW_TOKENS:
                del self._window[self._context_tokens : self._context_tokens + WINDOW_TOKENS]
            return ""
        settled = text[len(self._context_text) :]
        self._window = self._window[self._context_tokens :][-WINDOW_TOKENS:]
        self._context_tokens = len(self._window)
        self._context_text = self._decode(self._window)
        return settled
