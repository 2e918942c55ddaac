"""What becomes of the form that a request asks for: enforced, asked for in words, or refused.

Floor 2; spec 40 section 5, decision D7. A malformed form is a 400. One that cannot be enforced
(the extra is not installed, the switch is off, the compiler lacks a feature) is asked for in the
prompt, and the answer carries a `Warning` header; what of it can be enforced is enforced all the
same. A promise (`strict: true`, or `--grammar-fallback refuse`) is a 400 then.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlite.config import Settings
from mlxlite.errors import BadRequest
from mlxlite.text import call_grammar
from mlxlite.text.grammar import Grammar, Grammars, Unsupported
from mlxlite.text.json_schema import doubts
from mlxlite.text.tools.writing import Writing
from mlxlite.types import JSON, Ask, Constraint

log = logging.getLogger(__name__)

OFF = ("off", "0")  # of the setting `grammar`
_SWITCHED_OFF = "structured output is switched off (MLXLITE_GRAMMAR)"
_MOST_HINTED = 20_000  # characters of a schema in the prompt


@dataclass(frozen=True, slots=True)
class Constrained:
    """ask: with the form in its prompt if it is not enforced in full. grammar: of the answer.
    calls: of each call that the model makes by itself. warnings: for the header."""

    ask: Ask
    grammar: Grammar | None = None
    calls: Grammar | None = None
    warnings: tuple[str, ...] = ()


def wants_form(ask: Ask) -> bool:
    """Whether anything is to be compiled for a request."""
    return ask.constraint is not None or ask.forced_call is not None or has_strict(ask)


def has_strict(ask: Ask) -> bool:
    """Whether the arguments of a tool are to be enforced."""
    return any(tool["function"].get("strict") is True for tool in ask.tools)


def without_strict(ask: Ask, refused: BadRequest) -> tuple[Ask, str] | None:
    """An Ask whose strict tools are a hint, and what to warn of; None if it was refused for another
    reason. On Messages `strict` is never a 400 (clients.md, Requests 6)."""
    if not has_strict(ask) or not str(refused.param).startswith(("tools", "tool_choice")):
        return None
    functions = ({k: v for k, v in t["function"].items() if k != "strict"} for t in ask.tools)
    tools = tuple({"type": "function", "function": function} for function in functions)
    return replace(ask, tools=tools), f"strict tools are not enforced ({refused.message})"


def constrain(ask: Ask, grammars: Grammars, settings: Settings, writing: Writing) -> Constrained:
    """Compile what an Ask wants. Takes milliseconds to seconds. Raises BadRequest.

    writing: how the model writes its calls. A forced call wins over a form of the answer: clients
    send both (clients.md, Requests 9).
    """
    if ask.forced_call is not None:
        return Constrained(ask, _calls(ask, grammars, settings, writing, "tool_choice"))
    calls = None
    if has_strict(ask):
        calls = _calls(ask, grammars, settings, writing, "tools")
    return replace(_answer(ask, grammars, settings), calls=calls)


def _calls(
    ask: Ask, grammars: Grammars, settings: Settings, writing: Writing, field: str
) -> Grammar:
    """The grammar of calls, which are always a promise: kept or refused (decision D8)."""
    tools = [tool for tool in ask.tools if ask.forced_call in (None, "", tool["function"]["name"])]
    if settings.grammar in OFF:
        raise BadRequest(f"{field}: {_SWITCHED_OFF}", param=field)
    for tool in tools:
        is_strict = tool["function"].get("strict") is True
        if is_strict and (unsure := doubts(tool["function"]["parameters"])):
            name = tool["function"]["name"]
            told = f'the parameters of tool "{name}" cannot be enforced: {unsure[0]}'
            raise BadRequest(told, param="tools")
    most = ask.max_tool_calls if ask.parallel_tool_calls and not ask.forced_call else 1
    why = ""
    # What is not strict is enforced if it can be, and what is closed may allow nothing.
    for only_strict, is_closed in itertools.product((False, True), (True, False)):
        text = call_grammar.call_grammar(
            ask.tools,
            writing,
            grammars.literal,
            named=ask.forced_call or "",
            is_forced=ask.forced_call is not None,
            most_calls=most,
            only_strict=only_strict,
            is_closed=is_closed,
        )
        wanted = Constraint("lark", text, "tools", "tools")
        try:
            found = grammars.compile(wanted)
        except (Unsupported, BadRequest) as error:
            why = str(error)
            continue
        if not found.notes or not (only_strict or has_strict(ask)):
            return found
        why = "; ".join(found.notes)
    raise _blamed(tools, grammars, field, why)


def _blamed(
    tools: Sequence[Mapping[str, Any]], grammars: Grammars, field: str, why: str
) -> BadRequest:
    """The fault of a tool by its name, if it is one's: the grammar of all calls is nothing that a
    client wrote."""
    for tool in sorted(tools, key=lambda each: each["function"].get("strict") is not True):
        function = tool["function"]
        whose = f'the parameters of tool "{function["name"]}"'
        wanted = Constraint("json", function.get("parameters") or {}, whose, "tools")
        try:
            unsure = grammars.compile(wanted).notes
        except BadRequest as error:
            return BadRequest(error.message, param="tools", code=error.code)
        except Unsupported as error:
            unsure = (str(error),)
        if unsure and function.get("strict") is True:
            told = f"{whose} cannot be enforced: {'; '.join(unsure)}"
            return BadRequest(told, param="tools")
    return BadRequest(f"{field} cannot be enforced: {why}", param=field)


def _answer(ask: Ask, grammars: Grammars, settings: Settings) -> Constrained:
    wanted = ask.constraint
    if wanted is None:
        return Constrained(ask)
    grammar: Grammar | None = None
    if settings.grammar in OFF:
        why = _SWITCHED_OFF
    else:
        try:
            grammar = grammars.compile(wanted)
            why = "; ".join(grammar.notes)
        except Unsupported as error:
            why = str(error)
    if not why:
        return Constrained(ask, grammar)
    if wanted.is_strict or settings.grammar_fallback == "refuse":
        raise BadRequest(f"{wanted.field} cannot be enforced: {why}", param=wanted.field)
    log.info("%s is not enforced: %s", wanted.label, why)
    extent = "not enforced in full" if grammar is not None else "not enforced"
    instead = "" if ask.messages is None else "; prompt injection is used instead"
    warning = f"{wanted.label} is {extent} ({why}){instead}"
    if ask.messages is not None:
        ask = replace(ask, messages=_with_hint(ask.messages, hint(wanted)))
    return Constrained(ask, grammar, warnings=(warning,))


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """The header of an answer, in ASCII without controls; nothing without warnings."""
    if not warnings:
        return {}
    texts = ("".join(c for c in text if " " <= c <= "~").replace('"', "'") for text in warnings)
    return {"Warning": ", ".join(f'199 mlxlite "{text}"' for text in texts)}


def hint(wanted: Constraint) -> str:
    """The form in words, for a system message (spec 40 section 5)."""
    value = wanted.value
    if wanted.kind == "grammar":
        return f"Write your answer so that it follows this grammar exactly:\n\n{value}"
    if wanted.kind == "regex":
        return f"Your whole answer must match this regular expression:\n\n{value}"
    if wanted.kind == "choice":
        options = "\n".join(f"- {option}" for option in value)
        return f"Answer with exactly one of these options and nothing else:\n\n{options}"
    if "json_object" in wanted.label:
        return "Answer with one valid JSON object and nothing else."
    about = "".join(f"\n{text}" for text in (wanted.name, wanted.description) if text)
    schema = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    return (
        "Answer with JSON only: one value that is valid by this JSON schema, and nothing else."
        f"{about}\n\n{schema[:_MOST_HINTED]}"
    )


def _with_hint(messages: Sequence[Mapping[str, JSON]], text: str) -> tuple[Mapping[str, JSON], ...]:
    """The conversation with a text ahead of its first system message: many templates take one."""
    first: Any = messages[0]
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return ({"role": "system", "content": text}, *messages)
    content = first.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": text + "\n\n"}, *content]
    else:
        content = f"{text}\n\n{content}" if content else text
    return ({**first, "content": content}, *messages[1:])
