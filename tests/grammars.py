"""Grammars for tests, on the tiny model's tokenizer: forms, walks, what is taken."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxlite.text import vocabulary
from mlxlite.text.grammar import Matcher
from mlxlite.types import Constraint
from tests.prepared import TOKENIZER
from tests.walks import ids_in

VOCAB = 512
EOS = {0, 2}
# Ids of what ends strings, lists and objects: without a weight random walks are long.
ENDS = {
    n for n in range(VOCAB) if TOKENIZER.bytes_of(n) and set(TOKENIZER.bytes_of(n)) <= set(b'"}]')
}


def form(kind: str, value: Any, **more: Any) -> Constraint:
    return Constraint(kind, value, "field", "label", **more)


def allowed(matcher: Matcher) -> list[int]:
    return sorted(ids_in(matcher.mask()))


def walk(matcher: Matcher, seed: int, most: int = 600) -> str:
    """What a model without any preference writes."""
    draw, ids = random.Random(seed), list[int]()
    while not matcher.is_finished:
        assert len(ids) < most
        choices = allowed(matcher)
        assert (set(choices) >= EOS) == matcher.is_accepting, "EOS exactly where it may end"
        weights = [9 if n in ENDS or n in EOS else 1 for n in choices]
        (token,) = draw.choices(choices, weights)
        if token in EOS:
            break
        assert token not in TOKENIZER.special_ids
        matcher.consume(token)
        ids.append(token)
    return TOKENIZER.decode(ids, keep_special=True)


def takes(matcher: Matcher, text: str) -> bool:
    """Whether a text is a whole answer. Asked of llguidance itself: its error for an id that a
    grammar refuses takes a millisecond to word."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher._inner.try_consume_tokens(ids) == len(ids) and matcher.is_accepting


def count_vocabularies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one for each vocabulary that is made."""
    made: list[int] = []
    original = vocabulary.whole

    def counted(*given: Any) -> Any:
        made.append(1)
        return original(*given)

    monkeypatch.setattr(vocabulary, "whole", counted)
    return made
