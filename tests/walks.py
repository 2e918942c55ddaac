"""Random answers that a guide allows: what a model may write at most, and so must be read back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np

from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Guide, Mask
from tests import tiny

EOS_ID = 2
# What a walk tries to write now and then, so that texts and numbers come to an end, and what could
# break the form around it if it were let through.
ENDS = (
    *('"', "}", "]", ")", ",", ":", '"}', "1", "a", "\n"),
    *(
        "</think>",
        "\n</parameter>\n",
        "</parameter>",
        "</PARAMETER>",
        "</arg_value>",
        "</param>",
        "]]></param>",
    ),
    *("</tool_call>", "</invoke>", "</function>", '<|"|>', "<escape>", "<tool_call|>", "<|end|>"),
)
NASTY = (
    *(
        "<![CDATA[",
        "&quot;",
        "&lt;",
        "é",
        "한🙂",
        "\\",
        '\\"',
        "\\n",
        "'",
        " <",
        "{",
        "[",
        "</",
        "null",
    ),
    *("007", "true", "<|tool_call_end|>", "[TOOL_CALLS]", "```", "<tool_call>", "  ", "\n\n"),
)


@cache
def tokenizer(*specials: str) -> Tokenizer:
    """The tiny model's, with these special tokens besides."""
    backend = tiny.make_tokenizer()
    backend.add_special_tokens(list(specials))
    return Tokenizer(
        backend, eos_ids=[0, EOS_ID], bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )


def ids_in(mask: Mask) -> set[int]:
    """The ids that a packed mask allows, 32 a word."""
    words = np.array(mask() if callable(mask) else mask, dtype="<u4")
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


class Stuck(Exception):
    """A walk that came to no end."""


def walk(
    guide: Guide, words: Tokenizer, seed: int, *, start: Sequence[int] = (), most: int = 4000
) -> list[int]:
    """The ids of an answer, drawn from what the guide allows. start: what it begins with."""
    rng = random.Random(seed)
    verdict = guide.observe(())
    allowed: set[int] | None = None
    script = list(start)
    found: list[int] = []
    while True:
        if verdict.mask is not None:
            allowed = ids_in(verdict.mask) or None
        if allowed is None and not script:
            return found
        if len(found) > most:
            raise Stuck(words.decode(found, keep_special=True)[-300:])
        token = _next(words, rng, allowed, script, len(found))
        if token in words.eos_ids:
            return found
        found.append(token)
        verdict = guide.observe((token,))
        if verdict.stop:
            return found[: len(found) - 1 + verdict.keep]


def _next(
    words: Tokenizer, rng: random.Random, allowed: set[int] | None, script: list[int], at: int
) -> int:
    if not script and rng.random() < 0.25:
        text = rng.choice(ENDS if at > 40 or rng.random() < 0.6 else NASTY)
        script += words.encode(text, add_special_tokens=False)
    if script:
        token = script.pop(0)
        if allowed is None or token in allowed:
            return token
        script.clear()
    assert allowed is not None
    special = [token for token in allowed if token in words.special_ids]
    if special and rng.random() < (0.5 if at > 20 else 0.1):
        return rng.choice(sorted(special))
    return rng.choice(sorted(allowed))
