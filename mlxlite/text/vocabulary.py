"""What llguidance knows of a model's tokens: a tree of the bytes of each (spec 40 section 2).

It is given as bytes, as our tokenizer knows them: from the tokenizer's file llguidance would read
it in ten times the time. It is made with the GIL held, so in parts, and while nobody waits
(`Service.get_ready`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mlxlite.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_BLANK_SLICE = r"[\x20\x0A\x0D\x09]+"


class _Bytes:
    """A tokenizer in the shape that llguidance takes: the bytes of each id, and a way to ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        # What the model has no logit for is nothing; and what has no bytes is never allowed.
        self.tokens = tokenizer.all_bytes()
        self.tokens[vocab_size:] = [b""] * len(self.tokens[vocab_size:])
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < len(self.tokens))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(whole, add_special_tokens=False)


def whole(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    """llguidance's tree of all tokens. It is built with the GIL held, which stalls every stream for
    0.06 s with 50,000 ids: `Service` has it done while nobody waits."""
    import llguidance

    spelled = _Bytes(tokenizer, vocab_size)
    size = len(spelled.tokens)
    made = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(spelled),
        n_vocab=size,
        eos_token=sorted(token for token in tokenizer.eos_ids if token < size),
        slices=[],
    )
    spelled.tokens = []  # the tree has them
    return made


def sliced(tree: llguidance.LLTokenizer) -> llguidance.LLTokenizer:
    """The same tree, with parts of it by what strings may hold: masks inside of them take 0.1 ms,
    not 0.6. The part of blanks is left out: no mask is faster for it."""
    return tree.with_slices([each for each in tree.general_slices() if each != _BLANK_SLICE])


@functools.cache
def letters() -> llguidance.LLTokenizer:
    """A vocabulary of the single bytes and an end: enough to tell what is wrong with a form."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Letters()), n_vocab=257, slices=[])


class _Letters:
    """A tokenizer in the shape that llguidance takes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
