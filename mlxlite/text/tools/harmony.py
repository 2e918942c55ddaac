"""Harmony: channels and calls of gpt-oss in one format (floor 1, column "text").

    <|channel|>analysis<|message|>Let me add.<|end|><|start|>assistant
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is 1.<|return|>

A message has a header and a body. The header names the channel, and the recipient if it has one
(which may also stand before the channel). The channel `analysis` is reasoning; a message to
`functions.NAME` is a call if it is a known tool and its body an object; everything else is content.
The prompt ends with `<|start|>assistant`, so the output begins at the channel. Closing markers are
often missing: the model's end-of-turn tokens are EOS, which is never delivered.

Markup never leaks, with or without tools in the request.
"""

from __future__ import annotations

import re

from mlxlite.text.tools.format import Broken, Ended, Kind, Markers, Reader, Reading
from mlxlite.text.tools.hermes import read_arguments

_CLOSERS = ("<|end|>", "<|call|>", "<|return|>")
_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_HEADER_END = Markers("<|message|>", *_CLOSERS)
_BODY_END = Markers(*_CLOSERS, "<|start|>", "<|channel|>")
_CLOSER = Markers(*_CLOSERS)
_MARKUP = re.compile(r"<\|\w+\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_MOST_HEADER_CHARS = 400


class Harmony:
    """See the module."""

    openers = (*_HEADERS, *_CLOSERS)
    starters = (" to=", "to=")  # the recipient of the first message, before its channel
    markers = (*_HEADERS, *_CLOSERS)

    def read(self, r: Reader, opener: str) -> Reading[None]:
        header = opener
        if opener in _CLOSERS:  # after a message whose end was seen by another marker
            r.spend()
            return
        if opener != "<|message|>":
            try:
                header += yield from r.until(_HEADER_END, _MOST_HEADER_CHARS)
            except (Broken, Ended) as fault:
                if opener in _HEADERS:  # words without the markup around them are content
                    words = _MARKUP.sub("", r.unspent()) if isinstance(fault, Broken) else ""
                    if words:
                        r.pieces.append((Kind.TEXT, words))
                    r.spend()
                raise
            marker = yield from r.starts(_HEADER_END)
            r.take(len(marker))
            if marker.lower() != "<|message|>":
                r.spend()
                return
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient and recipient.group(1).startswith(_FUNCTIONS):
            name = recipient.group(1).removeprefix(_FUNCTIONS)
            if name in r.tools:
                r.spend()
                yield from read_arguments(r, name, _BODY_END)
                yield from self._close(r)
                return
        r.spend()
        r.is_reasoning = channel is not None and channel.group(1) == "analysis"
        yield from r.stream(Kind.REASONING if r.is_reasoning else Kind.TEXT, _BODY_END)
        yield from self._close(r)

    def _close(self, r: Reader) -> Reading[None]:
        if (yield from r.accept(_CLOSER)):
            r.spend()
