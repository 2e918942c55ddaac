"""Everything between token ids and what a client sees (floor 1, column "text"; spec 30 section 1).

    ids -> detokenizer -> router -> stop matcher -> think tags -> Deltas: text, reasoning, calls

One `Sink` lives as long as its row; the plain answer is the fold of what it gives, so both are
equal by construction. A guide on the engine's thread may own a second one, fed with the same ids.

Invariants:
- The folded deltas do not depend on how the ids were cut into portions.
- Special tokens appear as text only where the model's own markup is made of them, and that markup
  never reaches the client: of valid calls and channels at all, of tags by the splitter.
- A stop string is found in what the client would see and in reasoning, never inside the markup of a
  call, and never across one. After it nothing follows; calls complete by then are kept.
- Nothing that a model writes raises.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxlite.text.channels import Thinking, ThinkTags
from mlxlite.text.detokenizer import Detokenizer
from mlxlite.text.stops import StopMatcher
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.families import ToolRouting
from mlxlite.text.tools.format import Format, Kind, Piece, Tools
from mlxlite.text.tools.router import Router
from mlxlite.types import CallPiece, Delta


def fresh_call_id() -> str:
    """`call_` and 8 hex digits (spec 30 section 4)."""
    return f"call_{secrets.token_hex(4)}"


class Sink:
    """The way of one row's ids to its client.

    stops: stop strings. thinking: how the model marks it, or None. starts_open: the prompt ended
    inside an open think block. tools: of the request, or None if it has none. most_calls: calls
    beyond so many are dropped (`parallel_tool_calls: false` is a promise, and some formats write
    several calls in one block).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        thinking: Thinking | None = None,
        starts_open: bool = False,
        tools: ToolRouting | None = None,
        most_calls: int | None = None,
        new_call_id: Callable[[], str] = fresh_call_id,
    ) -> None:
        self.stopped: str | None = None  # the stop string that was found
        self.calls = 0  # announced so far
        self.completed_calls = 0
        self.reasoning_tokens = 0  # ids that fell into reasoning, its markup included
        self._most_calls = most_calls
        self._new_call_id = new_call_id
        self._call: CallPiece | None = None  # the unfinished call, without arguments
        self._drops_call = False  # it is one too many
        self._stops = StopMatcher(stops)
        self._is_channel = False  # side of the router's last text

        channel = thinking.channel if thinking else None
        formats: list[Format] = [] if tools is None else [tools.format]
        if channel is not None and not any(type(each) is type(channel) for each in formats):
            formats.append(channel)
        self._tags = None
        tags: tuple[str, ...] = ()
        if thinking is not None and channel is None:
            tags = (thinking.opening, thinking.closing.strip())
            self._tags = ThinkTags(*tags, starts_open=starts_open)
        self._router = None
        if formats:
            self._router = Router(
                formats,
                tools.tools if tools else Tools({}),
                restart=tags[1] if tags else "",
                at_start=not (tags and starts_open),
            )
            if channel is not None and starts_open and thinking is not None:
                self._router.push(thinking.opening)  # the prompt's last words; nothing is shown

        wanted = {*tags, *(marker for each in formats for marker in each.markers)}
        kept = {tokenizer.token_id(text) for text in wanted}
        self._dropped = tokenizer.special_ids - kept
        self._detokenizer = Detokenizer(tokenizer, keep_special=True)

    @property
    def is_thinking(self) -> bool:
        """True inside the reasoning now; not inside a call, wherever it stands."""
        if self._router is not None and self._router.in_block:
            return self._router.is_reasoning
        return self._tags is not None and self._tags.is_inside

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Takes the next ids; returns what they settle, in order, no piece of it empty."""
        out = _Deltas()
        for token_id in ids:
            if self.stopped is not None:
                break
            was_thinking = self.is_thinking
            if token_id not in self._dropped:
                self._take(self._detokenizer.push((token_id,)), out)
            if was_thinking or self.is_thinking:
                self.reasoning_tokens += 1
        return out.made()

    def finish(self) -> list[Delta]:
        """Ends the answer: what was held is judged as it is."""
        out = _Deltas()
        if self.stopped is None:
            self._take(self._detokenizer.flush(), out)
            if self._router is not None:
                self._route(self._router.finish(), out)
        self._flush(out)
        return out.made()

    def _take(self, text: str, out: _Deltas) -> None:
        if not text:
            return
        if self._router is None:
            self._show(text, out)
        else:
            self._route(self._router.push(text), out)

    def _route(self, pieces: list[Piece], out: _Deltas) -> None:
        for kind, text in pieces:
            if self.stopped is not None:
                return
            if kind is Kind.TEXT or kind is Kind.REASONING:
                is_channel = kind is Kind.REASONING
                if is_channel is not self._is_channel:
                    self._flush(out)  # no stop string spans two channels
                    self._is_channel = is_channel
                self._show(text, out)
            elif kind is Kind.NAME:
                self._flush(out)
                self._announce(text)
            elif self._drops_call:
                continue
            elif kind is Kind.ARGUMENTS:
                assert self._call is not None
                out.add_call(self._call, text)
            else:
                self.completed_calls += 1

    def _announce(self, name: str) -> None:
        self._drops_call = self.calls == self._most_calls
        if not self._drops_call:
            self._call = CallPiece(self.calls, self._new_call_id(), name, "")
            self.calls += 1

    def _show(self, text: str, out: _Deltas) -> None:
        """Text on its way through the stop matcher and the splitter."""
        shown, self.stopped = self._stops.push(text)
        self._split(shown, out)

    def _split(self, text: str, out: _Deltas) -> None:
        if not text:
            return
        if self._is_channel or self._tags is None:
            out.add(self._is_channel, text)
            return
        for is_reasoning, part in self._tags.push(text):
            out.add(is_reasoning, part)

    def _flush(self, out: _Deltas) -> None:
        """Releases what the matcher and the splitter held: nothing continues it."""
        if self.stopped is None:
            self._split(self._stops.flush(), out)
        if self._tags is not None:
            for is_reasoning, part in self._tags.flush():
                out.add(is_reasoning, part)


@dataclass(slots=True)
class _Run:
    """Neighbouring pieces of one kind, to be joined."""

    is_reasoning: bool
    call: CallPiece | None
    parts: list[str]


class _Deltas:
    """The deltas of one push: neighbours of a kind become one."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def add(self, is_reasoning: bool, text: str) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and last.call is None and last.is_reasoning is is_reasoning:
            last.parts.append(text)
        else:
            self._runs.append(_Run(is_reasoning, None, [text]))

    def add_call(self, call: CallPiece, arguments: str) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and last.call is call:
            last.parts.append(arguments)
        else:
            self._runs.append(_Run(False, call, [arguments]))

    def made(self) -> list[Delta]:
        out = []
        for run in self._runs:
            text = "".join(run.parts)
            if run.call is not None:
                call = CallPiece(run.call.index, run.call.id, run.call.name, text)
                out.append(Delta(call=call))
            elif run.is_reasoning:
                out.append(Delta(reasoning=text))
            else:
                out.append(Delta(text=text))
        return out
