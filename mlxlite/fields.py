"""Request fields: one table from which parsing, limits, error texts and docs come (floor 0).

Each field that clients may send is one line here: its JSON type, its range, what its absence means.
`take` reads one out of a body; null means absent (decision D12). The wording of the refusals is
that of mlx_lm.server (`<name> must be of type <t>`, spec 10 section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxlite.errors import BadRequest
from mlxlite.types import JSON


@dataclass(frozen=True, slots=True)
class Field:
    """kind: bool, int, float (any number), str, list or dict. low, high: inclusive limits.

    absent: in words, what happens without it.
    """

    name: str
    kind: type
    doc: str
    absent: str = "off"
    low: float | None = None
    high: float | None = None


MODEL = Field("model", str, "ignored; the served id is echoed", "the served model")
MESSAGES = Field("messages", list, "the conversation", "refused")
STREAM = Field("stream", bool, "send the answer as server-sent events", "false")
STREAM_OPTIONS = Field("stream_options", dict, "include_usage: one more chunk with the usage", "{}")
INCLUDE_USAGE = Field("include_usage", bool, "send usage in a chunk of its own", "false")
MAX_COMPLETION_TOKENS = Field(
    "max_completion_tokens", int, "most tokens to generate", "max_tokens", low=0
)
MAX_TOKENS = Field("max_tokens", int, "most tokens to generate", "the room left", low=0)
TEMPERATURE = Field(
    "temperature", float, "0 is greedy", "--temperature, the model's own, 0.7", low=0
)
TOP_P = Field("top_p", float, "nucleus; off at 0 and 1", "--top-p, the model's own", low=0, high=1)
TOP_K = Field("top_k", int, "keep the k likeliest; 0 is off", "--top-k, the model's own", low=0)
MIN_P = Field("min_p", float, "drop what is less likely than this share of the best", low=0, high=1)
SEED = Field("seed", int, "makes the draws repeatable", "fresh for each request")
N = Field("n", int, "how many answers", "1", low=1)
TEMPLATE_OPTIONS = Field("chat_template_kwargs", dict, "options for the chat template", "{}")

CHAT = (
    MODEL,
    MESSAGES,
    STREAM,
    STREAM_OPTIONS,
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    SEED,
    N,
    TEMPLATE_OPTIONS,
)

_NAMES: dict[type, str] = {
    bool: "bool", int: "int", float: "number", str: "string", list: "list", dict: "object",
}  # fmt: skip


def take(body: Mapping[str, JSON], field: Field) -> Any:
    """The field's value, or None if it is absent or null. Raises BadRequest naming it."""
    value = body.get(field.name)
    if value is None:
        return None
    if not _is(value, field.kind):
        raise BadRequest(f"{field.name} must be of type {_NAMES[field.kind]}", param=field.name)
    if field.kind in (int, float):
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"{field.name} must be a finite number", param=field.name)
        if field.low is not None and value < field.low:
            raise BadRequest(f"{field.name} must be at least {field.low:g}", param=field.name)
        if field.high is not None and value > field.high:
            raise BadRequest(f"{field.name} must be at most {field.high:g}", param=field.name)
    if field.kind is float:
        try:
            return float(value)
        except OverflowError:
            raise BadRequest(f"{field.name} must be a finite number", param=field.name) from None
    return value


def _is(value: JSON, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
