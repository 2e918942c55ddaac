"""A body of a request -> Ask: the one reading of fields that all surfaces share (floor 2).

Messages and Responses are translated into the shape of a chat request and read here too, so that a
field means the same everywhere. Every wrong value is a 400 naming its field, before the model is
touched (decision D12); a promise that is not built yet is a 400 that names it, a hint is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxlite import fields
from mlxlite.constraints import take_constraint
from mlxlite.errors import BadRequest
from mlxlite.text.stops import normalise_stops
from mlxlite.tool_choice import take_tool_choice
from mlxlite.types import JSON, Ask


def parse_chat(body: Mapping[str, JSON]) -> Ask:
    """A chat body as an Ask. Raises BadRequest naming the field."""
    for field in fields.CHAT:
        fields.take(body, field)  # every field is checked, used or not
    messages = fields.take(body, fields.MESSAGES)
    if not messages:
        raise BadRequest("messages required", param="messages")
    fields.refuse_promises(body, (*fields.PROMISES, *fields.CHAT_PROMISES))
    _refuse_adapter(body)
    template = fields.take(body, fields.TEMPLATE_OPTIONS) or {}
    thinking = fields.take(body, fields.THINKING) or {}
    tools, forced_call = take_tool_choice(body, fields.take_tools(body))
    return Ask(
        messages=tuple(messages),
        **_shared(body),
        top_logprobs=_top_logprobs(body),
        tools=tools,
        forced_call=forced_call,
        parallel_tool_calls=fields.take(body, fields.PARALLEL_TOOL_CALLS) is not False,
        enable_thinking=_flag(template, "enable_thinking"),
        preserve_thinking=_flag(template, "preserve_thinking"),
        thinking={"enabled": True, "disabled": False}.get(
            fields.take(thinking, fields.THINKING_TYPE, "thinking.")
        ),
        reasoning_effort=fields.take(body, fields.REASONING_EFFORT),
        thinking_budget=_thinking_budget(body, thinking),
    )


def parse_completion(body: Mapping[str, JSON]) -> list[Ask]:
    """A completions body: one Ask a prompt, alike but for it. Raises BadRequest naming the field.

    `logprobs` is a number here; true, which some clients send, means 1.
    """
    given = dict(body)
    if isinstance(logprobs := given.get("logprobs"), bool):
        given["logprobs"] = 1 if logprobs else None
    for field in fields.COMPLETIONS:
        fields.take(given, field)
    prompts = fields.take_prompts(given)
    fields.refuse_promises(given, fields.PROMISES)
    _refuse_adapter(given)
    if given.get("suffix"):
        raise BadRequest("suffix is not supported; leave it empty", param="suffix")
    n = fields.take(given, fields.N) or 1
    best_of = fields.take(given, fields.BEST_OF)
    if best_of is not None and best_of != n:
        why = "must be at least n" if best_of < n else "above n is not supported; leave it out"
        raise BadRequest(f"best_of {why}", param="best_of")
    if (answers := len(prompts) * n) > fields.MOST_ANSWERS:
        raise BadRequest(
            f"prompt and n ask for {answers} answers; at most {fields.MOST_ANSWERS} are given",
            param="prompt",
        )
    first = Ask(
        prompt=prompts[0],
        echo=bool(fields.take(given, fields.ECHO)),
        **_shared(given),
        top_logprobs=fields.take(given, fields.COUNTED_LOGPROBS),
    )
    return [replace(first, prompt=prompt) for prompt in prompts]


def _shared(body: Mapping[str, JSON]) -> dict[str, Any]:
    """What chat and completions read alike."""
    options = fields.take(body, fields.STREAM_OPTIONS) or {}
    max_tokens = fields.take(body, fields.MAX_COMPLETION_TOKENS)
    if max_tokens is None:
        max_tokens = fields.take(body, fields.MAX_TOKENS)
    return {
        "n": fields.take(body, fields.N) or 1,
        "stream": bool(fields.take(body, fields.STREAM)),
        "include_usage": bool(fields.take(options, fields.INCLUDE_USAGE, "stream_options.")),
        "max_tokens": max_tokens,
        "stop": normalise_stops(body.get("stop")),
        **{field.name: fields.take(body, field) for field in fields.SAMPLING},
        "logit_bias": fields.take_logit_bias(body),
        "constraint": take_constraint(body),
        "has_format": body.get(fields.RESPONSE_FORMAT.name) is not None,
        "hlg": _hlg(body),
    }


def _flag(options: Mapping[str, JSON], name: str) -> bool | None:
    """A boolean of the template options; any other type is ignored (spec 10 section 1)."""
    value = options.get(name)
    return value if isinstance(value, bool) else None


def _thinking_budget(body: Mapping[str, JSON], thinking: Mapping[str, JSON]) -> int | None:
    most = fields.take(body, fields.MAX_THINKING_TOKENS)
    budget = fields.take(thinking, fields.BUDGET_TOKENS, "thinking.")
    found: int | None = most if most is not None else budget
    return found


def _hlg(body: Mapping[str, JSON]) -> Mapping[str, JSON]:
    curve: Mapping[str, JSON] = fields.take(body, fields.HLG) or {}
    return {part.name: fields.take(curve, part, "hlg.") for part in fields.HLG_PARTS}


def _top_logprobs(body: Mapping[str, JSON]) -> int | None:
    """None without log-probabilities; -1 means that the client did not set a number."""
    wants = fields.take(body, fields.LOGPROBS)
    count: int = max(fields.take(body, fields.TOP_LOGPROBS) or 0, 0)
    if not wants and count and wants is not None:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return count if wants or count else None


def _refuse_adapter(body: Mapping[str, JSON]) -> None:
    if (adapter := body.get("adapter")) is not None and adapter.lower() != "none":
        raise BadRequest(f"adapter {adapter[:64]!r} is not mounted; none is", param="adapter")
