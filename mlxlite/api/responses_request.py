"""What clients send to OpenAI's Responses: checked, and translated to a chat request (floor 3).

    body -> check_body, responses_items.read_input -> items -> parse_response -> Ask

`asks.parse_chat` reads the chat request that the items of an input (`responses_items`) amount to,
so that a field means the same on every surface. Errors name the fields that the client wrote.
Everything here is pure and never changes its input.

Sources: spec 70 section 6.1, decision D12, clients.md (Requests 6 to 10).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mlxlite import fields
from mlxlite.api.responses_items import Item, wrong
from mlxlite.asks import parse_chat
from mlxlite.errors import BadRequest
from mlxlite.fields import Field
from mlxlite.http.routing import encode_json
from mlxlite.types import JSON, Ask

Told = Mapping[tuple[str, str], str]  # a function's name and namespace -> what the model is told

INSTRUCTIONS = Field("instructions", str, "opens the system message", "the previous response's")
PREVIOUS = Field("previous_response_id", str, "the response that this one continues", "none")
MAX_OUTPUT_TOKENS = Field("max_output_tokens", int, "most tokens", "the room left", low=0)
MAX_TOOL_CALLS = Field("max_tool_calls", int, "end after so many calls", "any number", low=1)
TOP_LOGPROBS = Field("top_logprobs", int, "likeliest tokens to report", "0", low=0, high=20)
INCLUDE = Field("include", list, "message.output_text.logprobs; others are hints", "[]")
STORE = Field("store", bool, "keep the response for an hour", "true")
BACKGROUND = Field("background", bool, "answer at once, work on", "false")
REASONING = Field("reasoning", dict, "effort; summary is a hint", "{}")
EFFORT = Field("effort", str, "as reasoning_effort", choices=fields.EFFORTS)
SUMMARY = Field("summary", str, "a hint: the reasoning goes out whole")
TEXT = Field("text", dict, "format; verbosity is a hint", "{}")
TEXT_FORMAT = Field("format", dict, "shape of the text", "text")
VERBOSITY = Field("verbosity", str, "a hint")
TRUNCATION = Field(
    "truncation", str, "a hint: nothing is ever cut", "disabled", choices=("auto", "disabled")
)
METADATA = Field("metadata", dict, "echoed", "{}")
ECHOED = tuple(
    Field(name, str, "echoed")
    for name in ("user", "prompt_cache_key", "safety_identifier", "service_tier")
)
LOGPROBS = "message.output_text.logprobs"  # the value of `include` that asks for them
FIELDS = (
    fields.STREAM,
    fields.TEMPERATURE,
    fields.TOP_P,
    fields.PARALLEL_TOOL_CALLS,
    fields.TOOLS,
    fields.TOOL_CHOICE,
    INSTRUCTIONS,
    PREVIOUS,
    MAX_OUTPUT_TOKENS,
    MAX_TOOL_CALLS,
    TOP_LOGPROBS,
    INCLUDE,
    STORE,
    BACKGROUND,
    REASONING,
    TEXT,
    TRUNCATION,
    METADATA,
    *ECHOED,
)
# Fields that a chat request has under the same name.
_SHARED = tuple(
    field.name
    for field in (
        fields.STREAM,
        *fields.SAMPLING,
        fields.LOGIT_BIAS,
        fields.HLG,
        fields.PARALLEL_TOOL_CALLS,
        fields.THINKING,
        fields.MAX_THINKING_TOKENS,
        fields.TEMPLATE_OPTIONS,
        fields.ADAPTER,
        fields.MAX_TOKENS,
    )
) + ("stop", "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs")

# What a chat request calls it -> what the client wrote.
_OUR_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


# ------------------------------------------------------------------------------------- fields


def check_body(body: Mapping[str, JSON]) -> None:
    """Check every field of its own, used or not. Raises BadRequest naming it."""
    for field in FIELDS:
        fields.take(body, field)
    for n, value in enumerate(fields.take(body, INCLUDE) or []):
        if not isinstance(value, str):
            raise wrong(f"include[{n}]", "a string")
    for name, value in (fields.take(body, METADATA) or {}).items():
        if not isinstance(value, str):
            raise wrong(f"metadata.{name}", "a string")
    reasoning = fields.take(body, REASONING) or {}
    fields.take(reasoning, SUMMARY, "reasoning.")
    fields.take(reasoning, EFFORT, "reasoning.")
    fields.take(fields.take(body, TEXT) or {}, VERBOSITY, "text.")
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise BadRequest(f"{name} is not supported", param=name)
    if body.get("response_format") not in (None, {"type": "text"}):
        raise BadRequest("response_format is not supported here; see text.format",
                         param="response_format")  # fmt: skip


def echo(body: Mapping[str, JSON], instructions: str | None) -> dict[str, JSON]:
    """The request's fields as the response object repeats them (decision D12). Raises BadRequest
    for what JSON could not repeat."""
    reasoning: Mapping[str, JSON] = body.get("reasoning") or {}
    text: Mapping[str, JSON] = body.get("text") or {}
    parallel = body.get("parallel_tool_calls")
    most = body.get("max_output_tokens")
    shown: dict[str, JSON] = {
        "background": bool(body.get("background")),
        "instructions": instructions,
        "max_output_tokens": body.get("max_tokens") if most is None else most,
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_shown_tool(tool) for tool in body.get("tools") or []],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation") or "disabled",
        **{field.name: body.get(field.name) for field in ECHOED},
    }
    if text.get("verbosity") is not None:
        shown["text"]["verbosity"] = text["verbosity"]
    for name in ("tools", "tool_choice", "text"):  # all that nobody looked through to its end
        try:
            encode_json(shown[name])
        except ValueError:  # 1e999 is read as infinity, which no answer can hold
            raise BadRequest(f"{name} holds a number that is too large", param=name) from None
    return shown


def _shown_tool(tool: Mapping[str, JSON]) -> JSON:
    """A tool with the fields that the response object demands; what was not said is not strict."""
    if tool.get("type") != "function":
        return tool
    shown = {**tool, "parameters": tool.get("parameters") or {}}
    return {"description": None, **shown, "strict": tool.get("strict") is True}


def told_names(tools: JSON) -> dict[str, tuple[str, str]]:
    """What the model is told -> a function's name and its namespace, empty for none. If the name is
    taken, as by another tool server behind codex, it is told `<namespace>__<name>`."""
    found: dict[str, tuple[str, str]] = {}
    owns = dict.fromkeys(_functions(tools, ""))
    for name, inside in sorted(owns, key=lambda own: own[1] != ""):
        told = f"{inside}__{name}" if inside and name in found else name
        found.setdefault(told, (name, inside))
    return found


def _functions(tools: JSON, inside: str) -> Iterator[tuple[str, str]]:
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and isinstance(tool.get("tools"), list):
            yield from _functions(tool["tools"], str(tool.get("name") or inside))
        elif isinstance(tool, dict) and isinstance(tool.get("name"), str):
            yield tool["name"], inside


# ---------------------------------------------------------------------------------------- ask


def parse_response(
    body: Mapping[str, JSON], items: Sequence[Item], instructions: str | None
) -> Ask:
    """A checked body and its resolved items as an Ask. Raises BadRequest in the client's words."""
    reasoning: Mapping[str, JSON] = body.get("reasoning") or {}
    text = fields.take(body, TEXT) or {}
    effort = reasoning.get("effort")
    chat: dict[str, JSON] = {name: body[name] for name in _SHARED if name in body}
    told = {own: name for name, own in told_names(body.get("tools")).items()}
    chat.update(
        messages=to_messages(items, instructions, told),
        max_completion_tokens=body.get("max_output_tokens"),
        reasoning_effort=effort,
        response_format=_nested_format(fields.take(text, TEXT_FORMAT, "text.")),
        tools=_nested_tools(body.get("tools"), told),
        tool_choice=_nested_choice(body.get("tool_choice")),
        top_logprobs=body.get("top_logprobs"),
        logprobs=LOGPROBS in (body.get("include") or []) or None,
    )
    try:
        ask = parse_chat(chat)
    except BadRequest as error:
        raise in_our_words(error) from None
    return dataclasses.replace(ask, max_tool_calls=body.get("max_tool_calls"))


def in_our_words(error: BadRequest) -> BadRequest:
    """An error of a chat request, named as the client wrote the field."""
    name = error.param or ""
    if name == "messages" and error.message == "messages required":
        return BadRequest("input required: there is nothing to answer", param="input")
    ours = _OUR_NAMES.get(name, name)
    if name.startswith("messages["):
        ours = "input"  # several items may have made one message
    elif name.startswith("tools["):
        ours = name.replace(".function", "")
    elif name.startswith("response_format."):
        ours = "text.format" + name.removeprefix("response_format").removeprefix(".json_schema")
    message = error.message.replace(name, ours, 1) if name else error.message
    return type(error)(message, param=ours or None, code=error.code)


def _nested_tools(tools: JSON, told: Told, inside: str = "") -> JSON:
    """Flat functions in a chat request's shape, each at its place; others stay, to be skipped."""
    if not isinstance(tools, list):
        return tools

    def nested(tool: JSON) -> JSON:
        if not isinstance(tool, dict):
            return tool
        if isinstance(tool.get("tools"), list):
            within = str(tool.get("name") or inside)
            return {**tool, "tools": _nested_tools(tool["tools"], told, within)}
        if tool.get("type", "function") != "function" or "function" in tool:
            return tool
        function = {key: value for key, value in tool.items() if key != "type"}
        if isinstance(name := tool.get("name"), str):
            function["name"] = told.get((name, inside), name)
        return {"type": "function", "function": function}

    return [nested(tool) for tool in tools]


def _nested_choice(choice: JSON) -> JSON:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _nested_format(wanted: Mapping[str, JSON] | None) -> JSON:
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") != "json_schema" or "json_schema" in wanted:
        return wanted
    schema = {key: value for key, value in wanted.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}


# ----------------------------------------------------------------------------------- messages


def to_messages(items: Iterable[Item], instructions: str | None, told: Told) -> list[Item]:
    """Items as chat messages.

    One system message leads: the instructions and all system and developer items, in order, with a
    blank line between. What a model said in one turn (reasoning, text, calls) is one assistant
    message, as it would be in a chat. Reasoning that nothing follows is dropped.
    """
    system = [instructions] if instructions else []
    messages: list[Item] = []
    turn: Item | None = None  # the assistant message that still grows

    def assistant(*filled: str) -> Item:
        """The open turn, or a new one if that already has one of these."""
        nonlocal turn
        if turn is None or any(name in turn for name in filled):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        return turn

    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            if text := _joined(item["summary"]):
                said = assistant("said", "tool_calls")
                said["reasoning"] = said.get("reasoning", "") + text
        elif kind == "function_call":
            name = told.get((item["name"], item.get("namespace", "")), item["name"])
            function = {"name": name, "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            turn = None
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(result)
        elif item["role"] == "assistant":
            # Text after a call belongs to the call's turn; two texts in a row are two turns.
            said = turn if turn is not None and "tool_calls" in turn else assistant("said")
            said["content"] = (said["content"] or "") + _joined(item["content"])
            said["said"] = True
        elif item["role"] == "user":
            turn = None
            messages.append({"role": "user", "content": _joined(item["content"])})
        else:
            system.append(_joined(item["content"]))
    messages = [message for message in messages if not _is_thought_only(message)]
    for message in messages:
        message.pop("said", None)
    if any(system):
        leading = "\n\n".join(text for text in system if text)
        messages.insert(0, {"role": "system", "content": leading})
    return messages


def _is_thought_only(message: Item) -> bool:
    is_assistant = message["role"] == "assistant"
    return is_assistant and "said" not in message and "tool_calls" not in message


def _joined(parts: Sequence[Mapping[str, JSON]]) -> str:
    return "".join(part["text"] for part in parts)
