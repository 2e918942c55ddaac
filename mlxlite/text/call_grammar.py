"""The calls of a request as a grammar (floor 1, column "text"; decision D8).

    start: call
    call: "<tool_call>" "\\n" body "\\n" "</tool_call>"
    body: body0 | body1
    body0: "{\\"name\\": \\"add\\", \\"arguments\\": " arguments0 "}"
    arguments0: %json {"type": "object", ...}

The envelope of Hermes and Qwen, which is also what a model is asked for that has no format of its
own. Other families write no JSON, or not in such a block; theirs are not here yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from mlxlite.errors import BadRequest
from mlxlite.text.grammar import JSON_OPTIONS, schema_text
from mlxlite.text.json_schema import closed, separated
from mlxlite.types import JSON

FAMILIES = ("hermes", "generic")
OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_MOST_CALLS = 16  # of one answer that must be calls: weak models do not end by themselves


def call_grammar(
    tools: Sequence[Mapping[str, JSON]],
    literal: Callable[[str], str],
    *,
    is_opened: bool,
    most_calls: int | None,
    only_strict: bool,
    is_closed: bool = True,
) -> str:
    """A grammar in Lark of calls to these tools (OpenAI's shape). Raises BadRequest.

    literal: a text -> Lark. is_opened: the model has written the opening marker of a single call,
    which is not part of the grammar then. only_strict: arguments of tools that are not strict may
    be any object. is_closed: objects are closed (`json_schema`).
    """
    rules = []
    for n, tool in enumerate(tools):
        function = tool["function"]
        opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        schema: JSON = {"type": "object"}
        if not only_strict or function.get("strict") is True:
            schema = _arguments(function, f"tools[{n}].function.parameters", is_closed)
        rules.append(f'body{n}: {json.dumps(opening)} arguments{n} "}}"')
        rules.append(f"arguments{n}: %json {json.dumps(schema)}")
    bodies = " | ".join(f"body{n}" for n in range(len(tools)))
    head = "" if is_opened else literal(OPENER) + " "
    most = 1 if is_opened else min(most_calls or _MOST_CALLS, _MOST_CALLS)
    more = "" if most == 1 else f' ("\\n" call){{0,{most - 1}}}'
    call = f'call: {head}"\\n" body "\\n" {literal(_CLOSER)}'
    return "\n".join([f"start: call{more}", call, f"body: {bodies}", *rules])


def _arguments(function: Mapping[str, JSON], field: str, is_closed: bool) -> JSON:
    schema = json.loads(schema_text(function.get("parameters") or {}, field))
    if schema.setdefault("type", "object") != "object":
        raise BadRequest(f"{field} must describe an object", param=field)
    schema = separated(schema)
    return {**(closed(schema) if is_closed else schema), "x-guidance": JSON_OPTIONS}
