"""Rows from a template, a tokenizer and tools (spec 50 section 4).

Nothing here knows how a call is written. Variants of one conversation are rendered, and what their
ids have in common is what a template fixes:

    get_weather, city = A     … "name": "get_weather", "arguments": {"city": "amber…
    get_weather, city = 41    … "name": "get_weather", "arguments": {"city": 41…
    the span of get_weather   … "name": "get_weather", "arguments": {"city":

Two rules stand behind all of it. The ids of a row come from a rendering that the model could really
write, with a real name and real keys: tokenizers merge across a template's punctuation, so a cut
that was found with a made-up name may fall into a token. And a row is armed only by a token with a
letter in it: blanks and brackets stand anywhere.

A compile takes some renderings a tool and belongs in the prepare pool. It never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlxlite.text.fill.plan import (
    EMPTY,
    FEWEST,
    MOST_CHOICE,
    MOST_SPAN,
    MOST_TOOLS,
    Kind,
    Row,
    StrictPlan,
)
from mlxlite.text.fill.probes import Ids, Probes, Spoken
from mlxlite.text.tools.strict import Markup
from mlxlite.types import JSON

log = logging.getLogger(__name__)

# What probes are made of. The values have no end and no beginning in common, nor have the contents.
_FAKE_NAME, _FAKE_KEY = "zq_probe_name", "zq_probe_key"
_VALUE_A, _VALUE_B, _NUMBER = "amber lantern", "quiet forest brook", 41
_CONTENT_A, _CONTENT_B = "Marble stairs lead up.", "Winding paths go down!"


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """What rows depend on of one tool. keys: declared, in order. is_closed: there are no others.
    required: the strings of the schema's list; is_listed: it is a list of strings."""

    name: str
    keys: tuple[str, ...]
    required: tuple[str, ...]
    is_closed: bool
    is_listed: bool = True

    @classmethod
    def of(cls, tool: Mapping[str, JSON]) -> ToolFacts:
        """From OpenAI's shape."""
        function = tool["function"]
        schema = function.get("parameters")
        schema = schema if isinstance(schema, Mapping) else {}
        properties = schema.get("properties")
        required = schema.get("required")
        listed = required if isinstance(required, list | tuple) else ()
        names = tuple(name for name in listed if isinstance(name, str))
        return cls(
            function["name"],
            tuple(properties) if isinstance(properties, Mapping) else (),
            names,
            schema.get("additionalProperties") is False and not schema.get("patternProperties"),
            isinstance(required, list | tuple) and len(names) == len(listed),
        )

    @property
    def determined_key(self) -> str | None:
        """The only key that there can be, and must be."""
        if self.is_closed and len(self.keys) == 1 and self.keys[0] in self.required:
            return self.keys[0]
        return None


def compile_plan(
    make_probes: Callable[[], Probes | Spoken],
    tools: Sequence[ToolFacts],
    spell: Callable[[int], bytes],
    markup: Markup | None,
) -> StrictPlan:
    """The plan for these tools; without rows where nothing is fixed, or anything goes wrong.

    make_probes: renders a first time, so it may fail as well. spell: an id -> its bytes. markup: of
    the model's family, None where no marker opens a call; only where a trigger begins and ends
    depends on it. Rows that no guard can vouch for may be checked.
    """
    if not tools or len(tools) > MOST_TOOLS:
        return EMPTY
    try:
        return _Compiler(make_probes(), tools, spell, markup).plan()
    except Exception:  # a template is a program of strangers; without rows the answer is the same
        log.debug("no fill rows: the template failed a probe", exc_info=True)
        return EMPTY


class _Compiler:
    def __init__(
        self,
        probes: Probes | Spoken,
        tools: Sequence[ToolFacts],
        spell: Callable[[int], bytes],
        markup: Markup | None,
    ) -> None:
        self._probes = probes
        self._tools = tools
        self._spell = spell
        self._markup = markup

    def plan(self) -> StrictPlan:
        if not self._shows_names():
            return EMPTY
        spans = [self._span(tool) for tool in self._tools]
        # A tool without a span would look as if it could not be called at all.
        if any(not span or len(span) > MOST_SPAN for span in spans):
            return EMPTY
        scaffold = _common_prefix(spans)
        if not scaffold:
            return EMPTY
        anchor, opened = self._opening(scaffold)
        rows = [
            *self._scaffold_row(scaffold, anchor, opened),
            *self._name_rows(spans, scaffold, anchor),
        ]
        # No guard without an opening marker; and without a closing one it allows a single call.
        if opened < 0 or self._markup is None or not self._markup.closer:
            rows = [replace(row, may_check=True) for row in rows]
        ending = self._ending()
        if ending is None:
            return StrictPlan(tuple(rows))
        suffix, shorter = ending
        rows += self._close_row(suffix, len(scaffold) + len(suffix) >= shorter)
        delimiter = next((token for token in suffix if not self._is_blank(token)), None)
        return StrictPlan(tuple(rows), frozenset() if delimiter is None else frozenset({delimiter}))

    # ---------------------------------------------------------------------------------- spans

    def _call(self, name: str, key: str | None = None, value: JSON = _VALUE_A) -> Ids | None:
        return self._probes.call(name, {} if key is None else {key: value})

    def _shows_names(self) -> bool:
        fake = self._call(_FAKE_NAME, _FAKE_KEY)
        real = self._call(self._tools[0].name, _FAKE_KEY)
        return fake is not None and real is not None and fake != real

    def _span(self, tool: ToolFacts) -> Ids:
        """What every call of a tool begins with, as far as that is fixed; empty: nothing is."""
        key = tool.determined_key
        if key is not None:
            first = self._call(tool.name, key, _VALUE_A)
            # A number has no quote, so that the opening one is left to the model.
            others = [self._call(tool.name, key, value) for value in (_VALUE_B, _NUMBER)]
            if first is None or any(other is None or other == first for other in others):
                return ()
            return _common_prefix([first, *others])
        first_key, second_key = (*tool.keys, None, None)[:2]
        found = [self._call(tool.name, first_key), self._call(tool.name, second_key or _FAKE_KEY)]
        if found[0] is None or found[0] == found[1]:
            return ()
        if not tool.is_closed and len(tool.keys) > 1:
            found.append(self._call(tool.name, _FAKE_KEY))
        if not tool.required and tool.keys:
            found.append(self._call(tool.name))
        return _common_prefix(found)

    # ----------------------------------------------------------------------------------- rows

    def _opening(self, scaffold: Ids) -> tuple[int, int]:
        """Where triggers begin in the scaffold, and the index of the token that completes the
        opening marker (-1 if it is not in there).

        Triggers begin at the marker, so that they also fit a second call, or one after thinking.
        Without it, after the blanks: those belong to what came before.
        """
        text = b""
        starts = []
        for token in scaffold:
            starts.append(len(text))
            text += self._spell(token)
        opener = b"" if self._markup is None else self._markup.opener.encode()
        at = text.find(opener) if opener else -1
        if at < 0:
            blanks = (n for n, token in enumerate(scaffold) if not self._is_blank(token))
            return next(blanks, len(scaffold)), -1
        end = at + len(opener)
        first = max(n for n, start in enumerate(starts) if start <= at)
        return first, max(n for n, start in enumerate(starts) if start < end)

    def _scaffold_row(self, scaffold: Ids, anchor: int, opened: int) -> Iterable[Row]:
        """The model's decision for a call is a part of the trigger, and so is the whole marker."""
        content = self._probes.content(_CONTENT_A)
        if content is None:
            return
        decided = len(_common_prefix([scaffold, content]))
        end = max(decided, opened) + 1
        while end < len(scaffold) and not self._arms(scaffold[anchor:end]):
            end += 1
        trigger, emit = scaffold[anchor:end], scaffold[end:]
        if decided < len(scaffold) and self._arms(trigger) and len(emit) >= FEWEST:
            yield Row(trigger, emit, Kind.SCAFFOLD)

    def _name_rows(self, spans: Sequence[Ids], scaffold: Ids, anchor: int) -> Iterable[Row]:
        start = len(scaffold)
        rests = [span[start:] for span in spans]
        for n, rest in enumerate(rests):
            others = rests[:n] + rests[n + 1 :]
            for k in range(1, min(MOST_CHOICE, len(rest)) + 1):
                # A shorter span goes on in ways that are not known: it must differ before its end.
                if all(other[:k] != rest[: len(other[:k])] for other in others):
                    trigger, emit = scaffold[anchor:] + rest[:k], rest[k:]
                    if self._arms(trigger) and len(emit) >= FEWEST:
                        yield Row(trigger, emit, Kind.NAME)
                    break

    def _ending(self) -> tuple[Ids, int] | None:
        """What follows the value in a call of the first tool, and the length of the shorter of two
        such calls."""
        tool = self._tools[0]
        key = tool.keys[0] if tool.keys else _FAKE_KEY
        a, b = (self._call(tool.name, key, value) for value in (_VALUE_A, _VALUE_B))
        if a is None or b is None or a == b:
            return None
        return _common_suffix(a, b), min(len(a), len(b))

    def _close_row(self, suffix: Ids, overlaps: bool) -> Iterable[Row]:
        if overlaps or any(tool.determined_key is None for tool in self._tools):
            return
        contents = [self._probes.content(text) for text in (_CONTENT_A, _CONTENT_B)]
        if contents[0] is None or contents[1] is None:
            return
        turn_end = _common_suffix(contents[0], contents[1])
        if turn_end and suffix[-len(turn_end) :] == turn_end:
            suffix = suffix[: -len(turn_end)]
        if len(suffix) > MOST_SPAN:
            return
        while suffix and self._is_blank(suffix[0]):
            suffix = suffix[1:]
        for end in range(1, len(suffix)):
            trigger, emit = suffix[:end], suffix[end:]
            if self._arms(trigger) and self._ends_value(trigger):
                if len(emit) >= FEWEST:
                    yield Row(trigger, emit, Kind.CLOSE)
                return

    def _ends_value(self, ids: Ids) -> bool:
        if self._markup is None:
            return False
        text = b"".join(map(self._spell, ids))
        return any(tag.encode() in text for tag in self._markup.value_closers)

    # --------------------------------------------------------------------------------- tokens

    def _arms(self, trigger: Ids) -> bool:
        """Whether one of its tokens holds an ASCII letter."""
        return any(byte < 0x80 and chr(byte).isalpha() for t in trigger for byte in self._spell(t))

    def _is_blank(self, token: int) -> bool:
        spelled = self._spell(token)
        return bool(spelled) and not spelled.strip()


def _common_prefix(many: Sequence[Ids | None]) -> Ids:
    """Of all; empty where one is missing."""
    whole = [ids for ids in many if ids is not None]
    if not whole or len(whole) < len(many):
        return ()
    first, rest = whole[0], whole[1:]
    count = 0
    for tokens in zip(*whole, strict=False):
        if any(token != tokens[0] for token in tokens[1:]):
            break
        count += 1
    return first[:count] if rest else first


def _common_suffix(a: Ids, b: Ids) -> Ids:
    return _common_prefix([a[::-1], b[::-1]])[::-1]
