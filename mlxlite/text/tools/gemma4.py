"""Calls between sentinels: Gemma 4 (spec 30 section 3).

    <|tool_call>call:add{a:1,note:<|"|>a {, a "quote"<|"|>,in:{deep:[true,null]}}<tool_call|>

Keys are bare, strings stand between `<|"|>` and may hold anything, all else is JSON. A segment may
hold several calls, and is judged as a whole; one that the end of the output cut off is closed.
FunctionGemma writes the same with other sentinels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxlite.text.tools.format import Broken, Ended, Markers, Reader, Reading, Refused
from mlxlite.text.tools.hermes import rest_of_block
from mlxlite.text.tools.notation import Notation
from mlxlite.text.tools.repair import compact, repaired
from mlxlite.text.tools.shapes import members, text_bounds
from mlxlite.text.tools.writing import Function, Inexpressible, Rules, Writing, one_of, quoted
from mlxlite.types import JSON

_HEAD = re.compile(r"\s*,?\s*call:\s*([\w.-]+)\s*(?=\{)")
_BARE_KEY = re.compile(r"""[^\s{}\[\],:"<]+""")


class Gemma4:
    """See the module. bare_text: an unquoted word that is no JSON counts as a string."""

    opener, closer, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    bare_text = False
    starters: Sequence[str] = ()

    def __init__(self) -> None:
        self.openers = (self.opener,)
        self.markers = (self.opener, self.closer, self.quote)
        self._closer = Markers(self.closer)
        self._stops = Markers(self.closer, self.quote)
        self._token = re.compile(
            rf"""
              {self.quote}(?P<quoted>.*?)(?:{self.quote}|\Z)
            | (?P<json>"(?:[^"\\]++|\\.)*+")
            | (?P<key>[^\s{{}}\[\],:"<]+)(?=\s*:)
            | (?P<word>[^\s{{}}\[\],:"<][^{{}}\[\],:"<]*)
            | (?P<other>.)
            """.replace("<|", r"<\|").replace("|>", r"\|>"),
            re.VERBOSE | re.DOTALL,
        )

    def read(self, r: Reader, opener: str) -> Reading[None]:
        start = r.mark()
        try:
            is_quoted = False
            while True:
                yield from r.until(self._stops)
                found = yield from r.starts(self._stops)
                if found.lower() == self.closer and not is_quoted:
                    break
                r.take(len(found))
                is_quoted ^= found.lower() == self.quote
            segment = r.since(start)
        except Ended:
            # Quotes that do not match up may have hidden the closing sentinel.
            segment = yield from rest_of_block(r, start, self._closer)
        calls = self.calls(segment)
        if not calls:
            raise Broken
        if any(name not in r.tools for name, _ in calls):
            raise Refused
        for name, arguments in calls:
            r.whole(name, arguments)
        if (yield from r.accept(self._closer)):
            r.spend()

    def calls(
        self, segment: str, load: Callable[[str], JSON] | None = None
    ) -> list[tuple[str, str]] | None:
        """Names and compact arguments of the calls between two sentinels, or None.

        load: reads an object's JSON, raising ValueError; without it what is broken is repaired.
        """
        calls = []
        at = 0
        while segment[at:].strip():
            head = _HEAD.match(segment, at)
            if head is None:
                return None
            text, at = self._object(segment, head.end())
            if load is not None:
                arguments = load(text)
            elif (found := repaired(text)) is not None:
                arguments = found[0]
            else:
                return None
            calls.append((head.group(1), compact(arguments)))
        return calls

    def _object(self, segment: str, start: int) -> tuple[str, int]:
        """The object at a place as JSON text, and where it ends; unclosed, it runs to the end."""
        parts: list[str] = []
        depth = 0
        at = start
        while at < len(segment):
            token = self._token.match(segment, at)
            assert token is not None  # the last branch takes any character
            at = token.end()
            kind, text = token.lastgroup, token.group(token.lastgroup or 0)
            if kind == "quoted" or kind == "key":
                parts.append(compact(text))
            elif kind == "word":
                word = text.rstrip()
                parts.append(compact(word) if self.bare_text and not _is_json(word) else text)
            else:
                parts.append(text)
                depth += (text in "{[") - (text in "}]") if kind == "other" else 0
                if depth <= 0:
                    break
        return "".join(parts), at


def _is_json(word: str) -> bool:
    return repaired(f'{{"v":{word}}}') is not None


class _Notation(Notation):
    """Keys are bare, and strings stand between quotes of its own. mark: such a quote."""

    def __init__(self, rules: Rules, function: Function, mark: str) -> None:
        super().__init__(rules, function.schema, (mark,), function.is_strict)
        self._mark = mark

    def string(self, schema: Mapping[str, JSON]) -> str:
        text = self.rules.up_to(self._mark, within=text_bounds(schema))
        return self.rules.add(f"{self.rules.markup(self._mark)} {text}")

    def text(self, value: str) -> str:
        return f"{self._mark}{value}{self._mark}"

    def key(self, name: str) -> str:
        if _BARE_KEY.fullmatch(name):
            return name
        if self._mark in name:
            raise Inexpressible(f"this model's calls cannot write the key {name[:64]!r}")
        return json.dumps(name, ensure_ascii=False)

    def other_key(self, named: Sequence[str]) -> str:
        return rf"/[\p{{L}}\p{{N}}_.$@\/+*-]{{1,64}}/ & ~{one_of(named or [''])}"


@dataclass(frozen=True, kw_only=True)
class GemmaWriting(Writing):
    """kind: of the models, for its sentinels."""

    kind: type[Gemma4]

    def call(self, rules: Rules, function: Function) -> str:
        self.check_name(function.name)
        notation = _Notation(rules, function, self.kind.quote)
        found = notation.row(members(function.schema, function.schema))
        arguments = f'"{{" {found} "}}"'
        head = rules.markup(f"{self.kind.opener}call:")
        return f"{head} {quoted(function.name)} {arguments} {rules.markup(self.kind.closer)}"


def writing_of(kind: type[Gemma4]) -> GemmaWriting:
    """The writing of these models."""
    markers = (kind.opener, kind.closer, kind.quote)
    return GemmaWriting(markers=markers, openers=(kind.opener,), names=r"[\w.-]+", kind=kind)


WRITING = writing_of(Gemma4)
