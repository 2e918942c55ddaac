"""Texts through a sink, cut in any way, and folded to what the client sees."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from mlxlite.text.channels import Thinking
from mlxlite.text.sink import Sink
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.families import ToolRouting
from mlxlite.types import Delta
from tests import tokenizers_made as made


@cache
def tokenizer_with(*specials: str) -> Tokenizer:
    """A byte-level tokenizer with these special tokens among others."""
    backend = made.byte_level()
    backend.add_special_tokens(list(specials))
    return Tokenizer(backend)


@dataclass
class Folded:
    """An answer: the deltas of a stream, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments

    def add(self, deltas: Iterable[Delta]) -> Folded:
        for delta in deltas:
            kinds = [bool(delta.text), bool(delta.reasoning), delta.call is not None]
            assert sum(kinds) == 1, "each delta has exactly one kind"
            self.content += delta.text
            self.reasoning += delta.reasoning
            if delta.call is not None:
                assert delta.call.arguments
                if delta.call.index == len(self.calls):
                    self.calls.append([delta.call.id, delta.call.name, ""])
                call = self.calls[delta.call.index]
                assert [delta.call.id, delta.call.name] == call[:2], "an announced call stays"
                call[2] += delta.call.arguments
        return self


def sink_of(
    tokenizer: Tokenizer,
    tools: ToolRouting | None = None,
    thinking: Thinking | None = None,
    starts_open: bool = False,
    stops: Sequence[str] = (),
    most_calls: int | None = None,
) -> Sink:
    numbers = itertools.count(1)
    return Sink(
        tokenizer,
        tools=tools,
        thinking=thinking,
        starts_open=starts_open,
        stops=stops,
        most_calls=most_calls,
        new_call_id=lambda: f"call_{next(numbers):08x}",
    )


def run(sink: Sink, tokenizer: Tokenizer, portions: Iterable[str]) -> Folded:
    """Each portion is tokenised alone, and pushed at once."""
    folded = Folded()
    for portion in portions:
        folded.add(sink.push(tokenizer.encode(portion, add_special_tokens=False)))
    return folded.add(sink.finish())
