"""What clients send to Anthropic's Messages: checked, and translated to a chat request (floor 3).

`asks.parse_chat` reads the chat request, so that a field means the same on every surface. Whatever
has another name or form here is checked first: a refusal names the field that this client sent.

Sources: spec 70 section 5, clients.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxlite import fields
from mlxlite.asks import parse_chat
from mlxlite.errors import BadRequest
from mlxlite.fields import Field
from mlxlite.text.stops import normalise_stops
from mlxlite.types import JSON, Ask

Block = Mapping[str, JSON]
Turn = dict[str, Any]

TOOL_CHOICE = Field("tool_choice", dict, "type: auto or none", "auto")
CHOICE_TYPE = Field("type", str, "of the choice", choices=("auto", "any", "tool", "none"))
ONE_CALL = Field("disable_parallel_tool_use", bool, "true: end after one call", "false")
IS_ERROR = Field("is_error", bool, "the result says what went wrong", "false")
OUTPUT_CONFIG = Field("output_config", dict, "format; effort is a hint", "{}")
FORMAT = Field("format", dict, "type json_schema, schema", "text")
OUTPUT_FORMAT = Field("output_format", dict, "the same, by its earlier name", "none")
DESCRIPTION = Field("description", str, "what a tool is for", "none")
STRICT = Field(
    "strict", bool, "true: arguments follow the schema, if that can be enforced", "false"
)

_PASSED = (fields.MODEL, fields.STREAM, fields.MAX_TOKENS, fields.THINKING, *fields.SAMPLING)

# Differs from chat to chat ahead of thousands of constant tokens (clients.md, Requests 4).
_BILLING = "x-anthropic-billing-header:"
# `thread` asks to keep the conversation, and the package's tool runner then sends only what is new.
# At this code it goes on without (anthropic 2.14, lib/threads).
UNTHREADED = "thread_unsupported_request"
# Blocks that are words, by the key that holds them.
_WORDS = {"text": "text", "tool_reference": "tool_name"}
_MEDIA = ("image", "document", "audio", "video", "file", "upload")
# What Anthropic's own servers did in an earlier turn; it says nothing to another model.
_OPAQUE = ("redacted_thinking", "server_tool_use", "mcp_tool_use")


def parse_messages(body: Mapping[str, JSON], is_count: bool = False) -> Ask:
    """A Messages body as an Ask. Raises BadRequest naming the field.

    is_count: only the prompt is wanted, so no limit is needed and nothing is promised.
    """
    chat = {field.name: body.get(field.name) for field in _PASSED}
    if chat["max_tokens"] is None and not is_count:
        raise BadRequest("max_tokens required: most tokens to generate", param="max_tokens")
    if body.get("thread") is not None:
        why = "thread: chats are not kept here; send all messages"
        raise BadRequest(why, param="thread", code=UNTHREADED)
    chat["messages"] = _turns(body)
    chat["tools"] = _tools(body)
    chat["stop"] = list(normalise_stops(body.get("stop_sequences"), "stop_sequences"))
    chat["response_format"] = None if is_count else _format(body)
    try:
        return parse_chat({**chat, **_tool_choice(body, is_count)})
    except BadRequest as error:
        if not (error.param or "").startswith("response_format"):
            raise
        ours = str(error.param).replace("response_format", "output_config.format", 1)
        message = error.message.replace(str(error.param), ours, 1)
        raise BadRequest(message, param=ours) from None


def _format(body: Mapping[str, JSON]) -> JSON:
    """The form of the answer: `output_config: {format}`, before it had that name
    `output_format`."""
    config = fields.take(body, OUTPUT_CONFIG) or {}
    wanted = fields.take(config, FORMAT, "output_config.")
    return fields.take(body, OUTPUT_FORMAT) if wanted is None else wanted


def _turns(body: Mapping[str, JSON]) -> list[Turn]:
    """The messages of a chat request, the system prompt first.

    Neighbouring user messages are one turn, as Anthropic has it. System messages that come before
    any turn join the system prompt, later ones the user's turn where they stand: a prompt then only
    grows at its end from turn to turn, whatever the template thinks of roles (clients.md,
    Requests 3; F102).
    """
    given = fields.take(body, fields.MESSAGES)
    if not given:
        raise BadRequest("messages required", param="messages")
    system = _system(body["system"], "system") if body.get("system") is not None else []
    turns: list[Turn] = []
    for n, message in enumerate(given):
        at = f"messages[{n}]"
        if not isinstance(message, dict):
            raise _wrong(at, "object")
        role, content, path = message.get("role"), message.get("content"), f"{at}.content"
        if role == "assistant":
            turns.append(_assistant(content, path))
        elif role == "user":
            _hear(turns, content, path)
        elif role != "system":
            raise BadRequest(
                f"{at}.role must be one of user, assistant, system", param=f"{at}.role"
            )
        elif turns:
            _say(turns, _system(content, path))
        else:
            system += _system(content, path)
    if any(system):
        turns.insert(0, {"role": "system", "content": system})
    return [{**turn, "content": "\n".join(turn["content"])} for turn in turns]


def _system(content: JSON, at: str) -> list[str]:
    """The texts of a system prompt, without the block that is for Anthropic's accounts."""
    texts = [_words(block, here) for here, block in _blocks(content, at)]
    is_list = isinstance(content, list)
    return texts[1:] if is_list and texts and texts[0].startswith(_BILLING) else texts


def _say(turns: list[Turn], texts: Sequence[str]) -> None:
    """Words of the user's side, joined to its turn if that is still the last one."""
    if turns and turns[-1]["role"] == "user":
        turns[-1]["content"] += texts
    else:
        turns.append({"role": "user", "content": list(texts)})


def _hear(turns: list[Turn], content: JSON, at: str) -> None:
    """A user message: results of calls first, as templates want them beside the calls."""
    texts: list[str] = []
    has_results = False
    for here, block in _blocks(content, at):
        if block["type"] == "tool_result":
            has_results = True
            last = len(turns) - 1
            is_spoken = last > 0 and turns[last]["role"] == "user"  # a system message came between
            turns.insert(last if is_spoken else last + 1, _result(block, here))
        else:
            texts.append(_text(block, here))
    if texts or not has_results:
        _say(turns, texts)


def _result(block: Block, at: str) -> Turn:
    content = block.get("content")
    inner = [] if content is None else _blocks(content, f"{at}.content")
    texts = [_text(part, here) for here, part in inner]
    says_so = "".join(texts[:1]).lower().startswith("error")
    if fields.take(block, IS_ERROR, f"{at}.") and not says_so:
        texts = ["Error:", *texts]  # templates know no such flag
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": texts}


def _assistant(content: JSON, at: str) -> Turn:
    """An answer as we, or another server, once gave it; any signature will do (F101)."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Turn] = []
    for here, block in _blocks([] if content is None else content, at):
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", here))
        elif kind == "tool_use":
            calls.append(_call(block, here))
        elif kind not in _OPAQUE and not kind.endswith("_tool_result"):
            texts.append(_text(block, here))
    turn: Turn = {"role": "assistant", "content": texts}
    if thoughts:
        turn["reasoning"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: Block, at: str) -> Turn:
    given = block.get("input")
    if not isinstance(given, dict | None):
        raise _wrong(f"{at}.input", "object")
    function = {"name": _string(block, "name", at), "arguments": given or {}}
    return {"id": _string(block, "id", at), "type": "function", "function": function}


def _blocks(content: JSON, at: str) -> list[tuple[str, Block]]:
    """(path, block) of each block; a string is one text block, also inside a list."""
    if isinstance(content, str):
        return [(at, {"type": "text", "text": content})]
    if content is None:
        raise BadRequest(f"{at} is missing", param=at)
    if not isinstance(content, list):
        raise BadRequest(f"{at} must be a string or a list of blocks", param=at)
    found: list[tuple[str, Block]] = []
    for n, block in enumerate(content):
        here = f"{at}[{n}]"
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        if not isinstance(block, dict):
            raise _wrong(here, "object")
        _string(block, "type", here)
        found.append((here, block))
    return found


def _text(block: Block, at: str) -> str:
    """What a block says; a search result is its texts."""
    if block["type"] != "search_result":
        return _words(block, at)
    inner = _blocks(block.get("content"), f"{at}.content")
    return "\n".join(_words(part, here) for here, part in inner)


def _words(block: Block, at: str) -> str:
    kind = block["type"]
    if kind in _WORDS:
        return _string(block, _WORDS[kind], at)
    if any(word in kind for word in _MEDIA):
        raise BadRequest(f"{at}: this model reads text only, not {kind[:40]} blocks", param=at)
    at = f"{at}.type"
    raise BadRequest(f"{at}: blocks of type {kind[:40]!r} cannot stand here", param=at)


def _string(block: Block, name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{at}.{name}", "string")
    return value


def _wrong(at: str, kind: str) -> BadRequest:
    return BadRequest(f"{at} must be of type {kind}", param=at)


def _tools(body: Mapping[str, JSON]) -> list[Turn]:
    """The client's own tools as functions. Those that Anthropic's servers run are skipped
    (clients.md, Requests 7)."""
    found = []
    for n, tool in enumerate(fields.take(body, fields.TOOLS) or []):
        at = f"tools[{n}]"
        if not isinstance(tool, dict):
            raise _wrong(at, "object")
        schema = tool.get("input_schema")
        if schema is None and tool.get("type") not in (None, "custom"):
            continue
        if not _string(tool, "name", at).strip():
            raise BadRequest(f"{at}.name must not be empty", param=f"{at}.name")
        if not isinstance(schema, dict):
            raise _wrong(f"{at}.input_schema", "object")
        about = fields.take(tool, DESCRIPTION, f"{at}.")
        described = {} if about is None else {"description": about}
        function = {"name": tool["name"], **described, "parameters": schema}
        if fields.take(tool, STRICT, f"{at}.") is True:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(body: Mapping[str, JSON], is_count: bool) -> dict[str, JSON]:
    choice = fields.take(body, TOOL_CHOICE)
    if choice is None:
        return {}
    kind = fields.take(choice, CHOICE_TYPE, "tool_choice.")
    if kind is None:
        raise BadRequest("tool_choice.type is missing", param="tool_choice.type")
    found: dict[str, JSON] = {
        "parallel_tool_calls": fields.take(choice, ONE_CALL, "tool_choice.") is not True
    }
    if kind == "none":
        found["tool_choice"] = "none"
    elif kind == "any" and not is_count:
        found["tool_choice"] = "required"
    elif kind == "tool" and not is_count:
        named = {"name": _string(choice, "name", "tool_choice")}
        found["tool_choice"] = {"type": "function", "function": named}
    return found
