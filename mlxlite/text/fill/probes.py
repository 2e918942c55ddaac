"""Renderings to compare: the ids of an answer that was never given (spec 50 sections 4.1, 4.2).

    base        <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    call(…)     what comes after it where the answer is this call: <tool_call>\\n{"name": …

The conversation is a fixed one: what an answer begins with does not depend on what was said before,
and a short one renders and encodes fast. Of a prompt with many tools only the end is encoded each
time, from its last special token on, if that gives the same ids.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from mlxlite.types import JSON

Ids = tuple[int, ...]

CONVERSATION: tuple[dict[str, Any], ...] = ({"role": "user", "content": "Hello there."},)


class Spoken:
    """The same from texts as the model writes them, for families whose templates write the calls
    of earlier turns in another way.

    encode: as of `Probes`. call: a name and its arguments' JSON -> text. content: a text -> text.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        call: Callable[[str, str], str],
        content: Callable[[str], str],
    ) -> None:
        self._encode = encode
        self._head = tuple(encode(""))  # BOS, for tokenizers that put it there
        self._call = call
        self._content = content

    def call(self, name: str, arguments: dict[str, JSON]) -> Ids | None:
        """The ids of an answer that is one call."""
        return self._ids(self._call(name, json.dumps(arguments, separators=(",", ":"))))

    def content(self, text: str) -> Ids | None:
        """The same of an answer that is plain text."""
        return self._ids(self._content(text))

    def _ids(self, text: str) -> Ids:
        ids = tuple(self._encode(text))
        return ids[len(self._head) :] if ids[: len(self._head)] == self._head else ids


class Probes:
    """render: (messages, whether to add the generation prompt) -> text. encode: a text -> ids, BOS
    once. bos_id: what the tokenizer puts ahead, or None. specials: texts of special tokens.
    thought: what opens the model's thinking.

    All methods raise what rendering and encoding raise.
    """

    def __init__(
        self,
        render: Callable[[Sequence[dict[str, Any]], bool], str],
        encode: Callable[[str], Sequence[int]],
        bos_id: int | None,
        specials: Sequence[str] = (),
        thought: str = "",
        conversation: Sequence[dict[str, Any]] = CONVERSATION,
    ) -> None:
        self._render = render
        self._encode = encode
        self._conversation = list(conversation)
        self._call_ids = itertools.count(1)
        empty = list(encode(""))
        self._bos_id = bos_id if bos_id is not None and empty == [bos_id] else None
        self._base_text = render(self._conversation, True)
        whole = tuple(encode(self._base_text))
        # Many templates open a thought in the prompt and print none in an answer.
        bare = self._base_text.rstrip()
        opens = bool(thought) and bare.endswith(thought)
        self._unopened = bare.removesuffix(thought) if opens else self._base_text
        # The head is left out of both sides of a comparison.
        self._head = ""
        self._base = whole
        cut = max((self._base_text.rfind(text) for text in specials if text), default=-1)
        if cut > 0:
            tail = self._encode_suffix(self._base_text[cut:])
            if tail and whole[-len(tail) :] == tail:
                self._head, self._base = self._base_text[:cut], tail

    def call(self, name: str, arguments: dict[str, JSON]) -> Ids | None:
        """The ids of an answer that is one call, or None where they cannot be told apart from the
        prompt's."""
        # A new id each time: where a template prints it, it must not look fixed.
        call_id = f"{next(self._call_ids) * 7919 % 100_003:05d}probe"
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        return self._after({"role": "assistant", "content": "", "tool_calls": [call]})

    def content(self, text: str) -> Ids | None:
        """The same of an answer that is plain text."""
        return self._after({"role": "assistant", "content": text})

    def _after(self, message: dict[str, Any]) -> Ids | None:
        text = self._render([*self._conversation, message], False)
        if text.startswith(self._head):
            encode = self._encode_suffix if self._head else self._encode
            ids = tuple(encode(text[len(self._head) :]))
            if ids[: len(self._base)] == self._base:
                return ids[len(self._base) :]
        # The primer may end with a line end and the answer begin with one: together one token.
        for start in (self._base_text, self._unopened):
            if text.startswith(start):
                return self._encode_suffix(text[len(start) :])
        return None

    def _encode_suffix(self, text: str) -> Ids:
        """The ids of a text that is no beginning."""
        ids = tuple(self._encode(text))
        return ids[1:] if self._bos_id is not None and ids[:1] == (self._bos_id,) else ids
