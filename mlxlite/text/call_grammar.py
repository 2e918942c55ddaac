"""The calls of a request as a grammar (floor 1, column "text"; decision D8).

    start: call (between call){0,15}           in the markup of the model's family (`tools/writing`)
    call: body0 | body1
    body0: "<tool_call>\\n{\\"name\\": \\"add\\", \\"arguments\\": " arguments0 "}\\n</tool_call>"
    arguments0: %json {"type": "object", ...}

The same grammar serves calls that must come, where it is the whole answer, and calls that the model
makes by itself, where it begins with the marker that the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from mlxlite.errors import BadRequest
from mlxlite.text.grammar import schema_text
from mlxlite.text.json_schema import closed, separated
from mlxlite.text.tools.writing import Function, Inexpressible, Rules, Writing
from mlxlite.types import JSON

_MOST_CALLS = 16  # of one answer that must be calls: weak models do not end by themselves
_ANY: Mapping[str, JSON] = {"type": "object"}


def call_grammar(
    tools: Sequence[Mapping[str, JSON]],
    writing: Writing,
    literal: Callable[[str], str],
    *,
    named: str = "",
    is_forced: bool,
    most_calls: int | None,
    only_strict: bool,
    is_closed: bool = True,
) -> str:
    """A grammar in Lark of calls to these tools (OpenAI's shape). Raises BadRequest.

    literal: a text -> Lark. named: the only one that may be called, if any. is_forced: the whole
    answer is calls; otherwise the grammar is of one block of them. only_strict: arguments of tools
    that are not strict may be any object; they may be so too where the family's markup cannot write
    what their schema says. is_closed: objects are closed (`json_schema`).
    """
    rules = Rules(literal, writing.markers)
    bodies = []
    for tool in tools:
        function = tool["function"]
        if named not in ("", function["name"]):
            continue
        # By name: surfaces have lists of their own, in which the place is another.
        whose = f'the parameters of tool "{function["name"]}"'
        is_strict = function.get("strict") is True
        schema = _ANY
        if is_strict or not only_strict:
            schema = _arguments(function, whose, is_closed)
        bodies.append(_body(rules, writing, function, schema, is_strict))
    call = rules.add(" | ".join(bodies))
    start = _start(rules, writing, call, is_forced, most_calls)
    return "\n".join([f"start: {start}", *rules.lines()])


def _start(
    rules: Rules, writing: Writing, call: str, is_forced: bool, most_calls: int | None
) -> str:
    most = min(most_calls or _MOST_CALLS, writing.most_calls or _MOST_CALLS, _MOST_CALLS)
    if not is_forced and not writing.opening:
        most = 1  # the next one has a marker of its own
    block = rules.markup(writing.opening) + " " if writing.opening else ""
    block += call
    if most > 1:
        between = rules.markup(writing.between) + " " if writing.between else ""
        block += f" ({between}{call}){{0,{most - 1}}}"
    if writing.closing:
        block += " " + rules.markup(writing.closing)
    if is_forced:
        return f"{writing.thought(rules)} {block}".lstrip()
    if writing.leads:
        leads = " | ".join(map(rules.markup, writing.leads))
        return f"({leads})? {block}"
    return block


def _body(
    rules: Rules,
    writing: Writing,
    function: Mapping[str, JSON],
    schema: Mapping[str, JSON],
    is_strict: bool,
) -> str:
    name = function["name"]
    parameters = function.get("parameters") or {}
    told = parameters.get("properties") if isinstance(parameters, Mapping) else None
    known = told if isinstance(told, Mapping) else {}
    try:
        return writing.call(rules, Function(name, schema, known, is_strict))
    except Inexpressible as error:
        why = f'calls of tool "{name}" cannot be enforced: {error}'
        if is_strict:
            raise BadRequest(why, param="tools") from None
    try:
        return writing.call(rules, Function(name, _ANY, known))
    except Inexpressible:
        raise BadRequest(why, param="tools") from None


def _arguments(function: Mapping[str, JSON], whose: str, is_closed: bool) -> Mapping[str, JSON]:
    try:
        schema = json.loads(schema_text(function.get("parameters") or {}, whose))
    except BadRequest as error:
        raise BadRequest(error.message, param="tools", code=error.code) from None
    if schema.setdefault("type", "object") != "object":
        raise BadRequest(f"{whose} must describe an object", param="tools")
    if is_closed and (schema.get("properties", schema) in ({}, _ANY)):
        schema.setdefault("additionalProperties", False)  # it has no parameters
    schema = separated(schema)
    found: Mapping[str, JSON] = closed(schema) if is_closed else schema
    return found
