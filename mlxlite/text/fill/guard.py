"""Guard: whether a row may fire where its trigger stands (spec 50 section 5).

The ids of a trigger may occur in reasoning, in a quoted example or inside an argument. So the whole
answer so far is looked at, as text: thinking that is over and sound, whole calls that parse without
any repair, then the call that is being written, and nothing else.

    <think>They want both.</think> <tool_call>{…}</tool_call> <tool_call>{"name": "
    closed reasoning               parsed, strictly           the row's trigger, exactly

In doubt it refuses: an apostrophe in the thinking is enough. That costs a fill, never an answer.
The markers and the parser are those of the model's family (`tools/strict`). What was once found
sound is not looked at again, so the work does not grow with the square of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from mlxlite.text.channels import Thinking
from mlxlite.text.fill.plan import Kind, Row
from mlxlite.text.tools.format import Tools
from mlxlite.text.tools.strict import Markup
from mlxlite.types import JSON

MOST_TOKENS = 65_536  # of an answer; after that it refuses

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
# What stands between the quotes of prose; a backslash takes the next character with it.
_TO_QUOTE = re.compile(r"(?:[^\"'`\\]++|\\.|\\\Z)*+", re.DOTALL)
_TO_END = {
    '"': re.compile(r'(?:[^"\\]++|\\.)*+"', re.DOTALL),
    "'": re.compile(r"[^']*+'"),
    "`": re.compile(r"(?:[^`\\]++|\\.)*+`", re.DOTALL),
}


class Guard:
    """The guard of one answer.

    spell: an id -> its bytes. markup: of the family's calls. thinking: how the model marks it.
    starts_open: the prompt ended inside an open thought. tools, required: of the request; by a
    tool's name what its schema requires, None if that is no list of names.
    """

    def __init__(
        self,
        spell: Callable[[int], bytes],
        markup: Markup,
        thinking: Thinking,
        tools: Tools,
        required: Mapping[str, Sequence[str] | None],
        *,
        starts_open: bool,
    ) -> None:
        self._spell = spell
        self._markup = markup
        self._tags = (thinking.opening.strip(), thinking.closing.strip())
        self._tools = tools
        self._required = required
        self._seen = bytearray()
        self._count = 0
        # How far the answer is known to be sound, in bytes; what is still to be looked at there.
        self._sound = 0
        self._thinks = starts_open
        self._may_think = True
        self._has_begun = False  # with a call
        self._searched = 0  # how far the end of the thinking was looked for
        self.is_lost = False
        """Nothing that comes can make it allow anything: the answer is prose, most often."""

    def observe(self, ids: Iterable[int]) -> None:
        for token_id in ids:
            self._count += 1
            self._seen += self._spell(token_id)
        if self._count > MOST_TOKENS:
            self.is_lost = True
            self._seen.clear()
            self._sound = 0
        elif not self._has_begun and not self.is_lost:
            self._look_at_beginning()

    def allows(self, row: Row) -> bool:
        """Asked when the ids of the row's trigger were the last ones."""
        if self.is_lost:
            return False
        text = self._open_call()
        if text is None or text.count(self._markup.opener) != 1:
            return False
        if row.kind is Kind.CLOSE:
            return self._closes(text + self._text(row.emit))
        if row.kind not in (Kind.SCAFFOLD, Kind.NAME, Kind.KEY):
            return False
        trigger = self._text(row.trigger)
        at = trigger.find(self._markup.opener)
        return at >= 0 and text == trigger[at:]

    def _look_at_beginning(self) -> None:
        """Whether the answer begins with a call, thinking aside; looked at until that is known."""
        if self._thinks:
            closing = self._tags[1].encode()
            start = max(self._sound, self._searched - len(closing))
            self._searched = len(self._seen)
            if self._seen.find(closing, start) < 0:
                return
        if not self._pass_thinking():
            return
        rest, opener = self._rest(), self._markup.opener.encode()
        self._has_begun = rest.startswith(opener)
        beginnings = (opener, self._tags[0].encode()) if self._may_think else (opener,)
        if not self._has_begun and not any(text.startswith(rest) for text in beginnings):
            self.is_lost = True

    def _text(self, ids: Iterable[int]) -> str:
        return _decoded(b"".join(map(self._spell, ids)))

    def _open_call(self) -> str | None:
        """The text of the call that is being written, from its opener on; None if there is no
        such call, or if what comes before it is not sound."""
        if not self._pass_thinking():
            return None
        opener, closer = self._markup.opener.encode(), self._markup.closer.encode()
        while True:
            rest = self._rest()
            if not rest.startswith(opener):
                return None
            end = rest.find(closer) if closer else -1
            if end < 0:
                return _decoded(rest)
            end += len(closer)
            if self._markup.parse(_decoded(rest[:end]), self._tools) is None:
                self.is_lost = True
                return None
            self._sound += end
            self._may_think = False

    def _pass_thinking(self) -> bool:
        """Whether the thinking is over and sound. There are at most two thoughts: one that the
        prompt opened, and one that the answer did, ahead of all calls."""
        opening, closing = (tag.encode() for tag in self._tags)
        while True:
            rest = self._rest()
            if not self._thinks:
                if not self._may_think or not rest.startswith(opening):
                    return True
                self._sound += len(opening)
                self._thinks, self._may_think = True, False
                continue
            end = rest.find(closing)
            if end < 0:
                return False
            if not is_closed_reasoning(_decoded(rest[:end]), self._tags[0]):
                self.is_lost = True
                return False
            self._sound += end + len(closing)
            self._thinks = False

    def _rest(self) -> bytes:
        """What has not been found sound yet; white space before it is."""
        rest = bytes(self._seen[self._sound :])
        stripped = rest.lstrip()
        self._sound += len(rest) - len(stripped)
        return stripped

    def _closes(self, text: str) -> bool:
        """Whether a text is one whole call with the only argument that there can be."""
        call = self._markup.parse(text, self._tools)
        if call is None:
            return False
        name, arguments = call
        required = self._required.get(name)
        if required is None or len(required) != 1 or set(arguments) != set(required):
            return False
        value: JSON = arguments[required[0]]
        return not isinstance(value, str) or has_closed_literals(value)


def _decoded(spelled: bytes) -> str:
    return spelled.decode("utf-8", "replace")


def is_closed_reasoning(text: str, opening: str) -> bool:
    """Whether nothing that a thought opened is open at its end: no tag, no fence, no quote."""
    if opening in text:
        return False
    prose: list[str] = []
    fence = ""
    for line in text.split("\n"):
        found = _FENCE.fullmatch(line)
        if fence:
            # Closed by the same character, at least as often, alone on its line.
            if found and found.group(1).startswith(fence) and not found.group(2).strip():
                fence = ""
        elif found and not (found.group(1)[0] == "`" and "`" in found.group(2)):
            fence = found.group(1)
        else:
            prose.append(line)
    return not fence and has_closed_literals("\n".join(prose))


def has_closed_literals(text: str) -> bool:
    """Whether no quote is left open; a backslash escapes, but for single quotes."""
    at = 0
    while True:
        before = _TO_QUOTE.match(text, at)
        assert before is not None  # it may be empty
        at = before.end()
        if at == len(text):
            return True
        literal = _TO_END[text[at]].match(text, at + 1)
        if literal is None:
            return False
        at = literal.end()
