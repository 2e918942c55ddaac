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
from collections.abc import Sequence
from dataclasses import dataclass

from mlxlite.text.tools.format import Broken, Ended, Kind, Markers, Reader, Reading
from mlxlite.text.tools.hermes import read_arguments
from mlxlite.text.tools.writing import Function, Rules, Writing, is_token, quoted

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


def spoken_call(name: str, arguments: str) -> str:
    """A call as gpt-oss writes it. Its template has those of earlier turns otherwise: the recipient
    ahead of the channel."""
    head = f"<|channel|>commentary to={_FUNCTIONS}{name} <|constrain|>json"
    return f"{head}<|message|>{arguments}<|call|>"


def spoken_answer(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


ANSWER = "<|start|>assistant"  # what a message of the model's begins with, but for the first one


class Harmony:
    """See the module. heads: if any, a message is a call only if its header begins with one."""

    openers = (*_HEADERS, *_CLOSERS)
    starters = (" to=", "to=")  # the recipient of the first message, before its channel
    markers = (*_HEADERS, *_CLOSERS)

    def __init__(self, heads: Sequence[str] = ()) -> None:
        self._heads = tuple(head.lower() for head in heads)

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
        is_watched = not self._heads or header.lower().startswith(self._heads)
        if recipient and recipient.group(1).startswith(_FUNCTIONS) and is_watched:
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


# The recipient stands in the channel's header, or ahead of it.
_IN_CHANNEL = ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.")
_FIRST = " to=functions."
_AHEAD = f"{ANSWER}{_FIRST}"
HEADS = (*_IN_CHANNEL, _AHEAD, *(f"{ANSWER}{each}" for each in _IN_CHANNEL), _FIRST)


@dataclass(frozen=True, kw_only=True)
class _Writing(Writing):
    """A call ends with its arguments: the marker after them ends the model's turn."""

    def starters(self, names: Sequence[str]) -> tuple[str, ...]:
        return (_FIRST,)

    def call(self, rules: Rules, function: Function) -> str:
        self.check_name(function.name)
        name = quoted(function.name)
        channel = f'{rules.markup("<|channel|>")} ("commentary" | "analysis")'
        kind = rules.add(f'(" " ({rules.markup("<|constrain|>")} "json" | "json"))?')
        end = f"{kind} {rules.markup('<|message|>')} {rules.json(function.schema)}"
        recipient = quoted(f"to={_FUNCTIONS}")
        return rules.add(
            f'{channel} " " {recipient} {name} {end} | " " {recipient} {name} {channel} {end}'
        )

    def thought(self, rules: Rules) -> str:
        """One message of reasoning. Its end may be forced at any id, so it is made of ids, where
        the markers are special tokens."""
        head = rules.markup("<|channel|>analysis<|message|>")
        end = rules.markup("<|end|>")
        tokens = {rules.markup(each) for each in (*_HEADERS, *_CLOSERS)}
        if all(map(is_token, tokens)):
            others = ",".join(sorted(token.strip("<[]>") for token in tokens))
            text = f"<[^{others}]>* {end}"
        else:
            text = rules.up_to("<|end|>")
        return f"({head} {text} {rules.markup(ANSWER)})?"


WRITING = _Writing(
    markers=Harmony.markers,
    openers=(*_IN_CHANNEL, _AHEAD),
    leads=(ANSWER,),
    names=r"[^\s<]{1,200}",
    most_calls=1,
)
