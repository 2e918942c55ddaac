"""Request fields: one table from which parsing, limits, error texts and docs come (floor 0).

Each field that clients may send is one line here: its JSON type, its range, what its absence means.
`take` reads one out of a body; null means absent (decision D12). The wording of the refusals is
that of mlx_lm.server (`<name> must be of type <t>`, spec 10 section 4). What no type and range can
say is checked by the functions at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlite.errors import BadRequest
from mlxlite.types import JSON

# No logit is a thousandth of that: beyond it a penalty decides alone, and float32 soon ends.
_MOST_PENALTY = 1e6
MOST_BIASES = 4096  # ids of one request; each costs every step of its row a little
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Field:
    """kind: bool, int, float (any number), str, list or dict; object is a string or an object,
    tuple a string or a list. low, high: inclusive limits.

    absent: in words, what happens without it. choices: all values of a string.
    """

    name: str
    kind: type
    doc: str
    absent: str = "off"
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Promise:
    """A field that the server would have to keep and cannot yet: a 400 that names it (D12).

    kept: the values that ask for nothing, and so are fine.
    """

    name: str
    kept: tuple[JSON, ...] = (None, [], {}, False, "", 0)
    why: str = "is not supported yet"


MODEL = Field("model", str, "ignored; the served id is echoed", "the served model")
PROMPT = Field("prompt", tuple, "one or several texts or lists of token ids", "refused")
CONTENT = Field("content", str, "the text, by its other name", "prompt")
TEXT = Field("prompt", str, "the text", "content, messages")
TOKENS = Field("tokens", list, "token ids", "refused")
ADD_SPECIAL_TOKENS = Field(
    "add_special_tokens", bool, "whether a text gets the tokens that open a prompt", "true"
)
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
XTC_PROBABILITY = Field(
    "xtc_probability", float, "how often XTC drops the top choices", low=0, high=1
)
XTC_THRESHOLD = Field("xtc_threshold", float, "what XTC takes for a top choice", low=0, high=0.5)
REPETITION_PENALTY = Field(
    "repetition_penalty",
    float,
    "divides seen tokens' logits; 0 and 1 are off",
    "the model's own",
    low=0,
    high=_MOST_PENALTY,
)
PRESENCE_PENALTY = Field(
    "presence_penalty",
    float,
    "subtracted once from tokens seen",
    low=-_MOST_PENALTY,
    high=_MOST_PENALTY,
)
FREQUENCY_PENALTY = Field(
    "frequency_penalty",
    float,
    "subtracted for each time a token was seen",
    low=-_MOST_PENALTY,
    high=_MOST_PENALTY,
)
REPETITION_CONTEXT = Field(
    "repetition_context_size", int, "last tokens it looks at; 0 is all", "20", low=0
)
PRESENCE_CONTEXT = Field(
    "presence_context_size", int, "last tokens it looks at; 0 is all", "20", low=0
)
FREQUENCY_CONTEXT = Field(
    "frequency_context_size", int, "last tokens it looks at; 0 is all", "20", low=0
)
LOGIT_BIAS = Field("logit_bias", dict, "token id -> number added to its logit", "{}")
HLG = Field(
    "hlg", dict, "tone curve: enabled, width, shoulder, toe, pivot_offset", "--hlg-sampling"
)
HLG_PARTS = (
    Field("enabled", bool, "whether the curve is used", "--hlg-sampling"),
    Field("width", float, "its straight part, nats", "--hlg-width", low=0, high=100),
    Field("shoulder", float, "how it bends above", "--hlg-shoulder", low=0, high=100),
    Field("toe", float, "how it bends below", "--hlg-toe", low=0, high=100),
    Field("pivot_offset", float, "where it turns, nats", "--hlg-pivot-offset", low=0, high=100),
)
LOGPROBS = Field("logprobs", bool, "report log-probabilities of the tokens", "false")
TOP_LOGPROBS = Field("top_logprobs", int, "and of so many of the likeliest", "0", low=-1, high=20)
COUNTED_LOGPROBS = Field(
    "logprobs", int, "log-probabilities of the tokens and of so many others", low=0, high=20
)
STOP = Field("stop", tuple, "end before any of these; 64 of 4,096 characters at most", "none")
N = Field("n", int, "how many answers; answer i is drawn with seed + i", "1", low=1, high=128)
BEST_OF = Field("best_of", int, "must equal n", "n", low=1)
ECHO = Field("echo", bool, "the answer starts with the prompt", "false")
SUFFIX = Field("suffix", str, "must be empty; text to fill up to is not supported", "none")
TOOLS = Field("tools", list, "functions that the model may call", "none")
TOOL_CHOICE = Field(
    "tool_choice", object, "auto, none, required, a function, or which are allowed", "auto"
)
PARALLEL_TOOL_CALLS = Field("parallel_tool_calls", bool, "false: end after one call", "true")
REASONING_EFFORT = Field(
    "reasoning_effort",
    str,
    "none switches thinking off, any other on",
    "--thinking, the template's own",
    choices=EFFORTS,
)
THINKING = Field("thinking", dict, "type enabled or disabled, budget_tokens", "--thinking")
THINKING_TYPE = Field("type", str, "enabled, disabled; others leave it open", "--thinking")
BUDGET_TOKENS = Field("budget_tokens", int, "tokens of thinking at most", low=0)
MAX_THINKING_TOKENS = Field("max_thinking_tokens", int, "tokens of thinking at most", low=0)
TEMPLATE_OPTIONS = Field(
    "chat_template_kwargs", dict, "enable_thinking, preserve_thinking for the template", "{}"
)
ADAPTER = Field("adapter", str, "a mounted adapter; none is mounted yet", "none")

RESPONSE_FORMAT = Field("response_format", dict, "type text, json_object or json_schema", "text")
GUIDED_JSON = Field("guided_json", object, "a JSON schema, or its text", "none")
GUIDED_REGEX = Field("guided_regex", str, "the whole answer matches it", "none")
GUIDED_GRAMMAR = Field("guided_grammar", str, "GBNF with a rule root, or Lark with start", "none")
GUIDED_CHOICE = Field("guided_choice", list, "the answer is one of these strings", "none")
STRUCTURED_OUTPUTS = Field(
    "structured_outputs",
    dict,
    "a JSON schema, or json, regex, grammar, choice in an object",
    "none",
)
STRUCTURED = (
    RESPONSE_FORMAT,
    GUIDED_JSON,
    GUIDED_REGEX,
    GUIDED_GRAMMAR,
    GUIDED_CHOICE,
    STRUCTURED_OUTPUTS,
)

PROMISES = (Promise("audio"),)
CHAT_PROMISES = (
    Promise("functions", why="is not supported; use tools"),
    Promise("function_call", (None, "auto", "none"), "is not supported; use tools"),
    Promise("modalities", (None, [], ["text"]), "with audio is not supported yet"),
)

SAMPLING = (
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    SEED,
    XTC_PROBABILITY,
    XTC_THRESHOLD,
    REPETITION_PENALTY,
    REPETITION_CONTEXT,
    PRESENCE_PENALTY,
    PRESENCE_CONTEXT,
    FREQUENCY_PENALTY,
    FREQUENCY_CONTEXT,
)
CHAT = (
    MODEL,
    MESSAGES,
    STREAM,
    STREAM_OPTIONS,
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    *SAMPLING,
    LOGIT_BIAS,
    HLG,
    LOGPROBS,
    TOP_LOGPROBS,
    STOP,
    N,
    *STRUCTURED,
    TOOLS,
    TOOL_CHOICE,
    PARALLEL_TOOL_CALLS,
    REASONING_EFFORT,
    THINKING,
    MAX_THINKING_TOKENS,
    TEMPLATE_OPTIONS,
    ADAPTER,
)
COMPLETIONS = (
    MODEL,
    PROMPT,
    STREAM,
    STREAM_OPTIONS,
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    *SAMPLING,
    LOGIT_BIAS,
    HLG,
    COUNTED_LOGPROBS,
    STOP,
    N,
    *STRUCTURED,
    BEST_OF,
    ECHO,
    SUFFIX,
    ADAPTER,
)
INPUT = Field(
    "input", tuple, "one or several texts or lists of token ids, 2,048 at most", "refused"
)
DIMENSIONS = Field("dimensions", int, "so many of the first numbers", "all of them", low=1)
ENCODING_FORMAT = Field(
    "encoding_format", str, "float, or base64 of little-endian float32", "float",
    choices=("float", "base64"),
)  # fmt: skip
INSTRUCTION = Field("instruction", str, "what the text is to be found for, or judged by", "none")
USER = Field("user", str, "ignored", "none")
EMBEDDINGS = (INPUT, MODEL, DIMENSIONS, ENCODING_FORMAT, INSTRUCTION, USER)
QUERY = Field("query", str, "what is looked for", "refused")
DOCUMENTS = Field("documents", list, "strings or objects with text, 2,048 at most", "refused")
TOP_N = Field("top_n", int, "answer only the best", "all of them", low=1)
RETURN_DOCUMENTS = Field("return_documents", bool, "give the documents back", "false")
RERANKS = (QUERY, DOCUMENTS, MODEL, TOP_N, RETURN_DOCUMENTS, INSTRUCTION, USER)
TEXT_1 = Field("text_1", tuple, "one text, or as many as text_2", "refused")
TEXT_2 = Field("text_2", tuple, "one or several texts, 2,048 at most", "refused")
SCORES = (TEXT_1, TEXT_2, MODEL, INSTRUCTION, USER)
MOST_INPUTS = 2048  # of one request for vectors or scores

TEXTS = (TEXT, CONTENT, MESSAGES)  # of /tokenize, one of them
MOST_ANSWERS = 1024  # of one request: prompts times n

KIND_NAMES: dict[type, str] = {
    bool: "bool", int: "int", float: "number", str: "string", list: "list", dict: "object",
    object: "string or object", tuple: "string or list",
}  # fmt: skip


def take(body: Mapping[str, JSON], field: Field, path: str = "") -> Any:
    """The field's value, or None if it is absent or null. Raises BadRequest naming it.

    path: of the object that holds the field, such as `thinking.`.
    """
    value = body.get(field.name)
    if value is None:
        return None
    name = path + field.name
    if not _is(value, field.kind):
        raise BadRequest(f"{name} must be of type {KIND_NAMES[field.kind]}", param=name)
    if field.choices and value not in field.choices:
        raise BadRequest(f"{name} must be one of {', '.join(field.choices)}", param=name)
    if field.kind in (int, float):
        _check_range(name, value, field)
    if field.kind is float:
        try:
            return float(value)
        except OverflowError:
            raise BadRequest(f"{name} must be a finite number", param=name) from None
    return value


def _is(value: JSON, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is object:
        return isinstance(value, str | dict)
    if kind is tuple:
        return isinstance(value, str | list)
    return isinstance(value, kind)


def _check_range(name: str, value: int | float, field: Field) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{name} must be a finite number", param=name)
    # -1 is how mlx_lm.server spells "unset" for top_logprobs; it is no value to recommend.
    low = 0 if field.low == -1 else field.low
    if field.low is not None and value < field.low:
        raise BadRequest(f"{name} must be at least {low:g}", param=name)
    if field.high is not None and value > field.high:
        raise BadRequest(f"{name} must be at most {field.high:g}", param=name)


def refuse_promises(body: Mapping[str, JSON], promises: Sequence[Promise]) -> None:
    """Raises BadRequest naming the first promise that a body asks for."""
    for promise in promises:
        if body.get(promise.name) not in promise.kept:
            raise BadRequest(f"{promise.name} {promise.why}", param=promise.name)


# ------------------------------------------------------------------- what a type cannot say


def take_logit_bias(body: Mapping[str, JSON]) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias. The ids are checked against the vocabulary later."""
    value = body.get(LOGIT_BIAS.name)
    if value is None:
        return ()
    wrong = "logit_bias must be a dict of int to float"
    if not isinstance(value, dict):
        raise BadRequest(wrong, param=LOGIT_BIAS.name)
    if len(value) > MOST_BIASES:
        raise BadRequest(
            f"logit_bias must hold {MOST_BIASES} tokens at most, not {len(value)}",
            param=LOGIT_BIAS.name,
        )
    pairs = []
    for key, bias in value.items():
        # isascii: int() also reads other scripts' digits, and "1_0".
        if not (key.isascii() and key.isdigit()) or len(key) > 18 or not _is(bias, float):
            raise BadRequest(wrong, param=LOGIT_BIAS.name)
        if abs(bias) > 1e30 or bias != bias:  # NaN is unequal to itself; float32 ends at 3e38
            raise BadRequest(wrong, param=LOGIT_BIAS.name)
        if str(int(key)) != key:
            raise BadRequest(
                wrong, param=LOGIT_BIAS.name
            )  # "05" and "5" would be one id with two biases
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def take_prompts(body: Mapping[str, JSON]) -> list[str | tuple[int, ...]]:
    """The prompts of a completion; ids are checked against the vocabulary later."""
    value = take(body, PROMPT)
    if not value:
        raise BadRequest("prompt required: a string, token ids, or a list of them", param="prompt")
    if isinstance(value, str) or _is(value[0], int):
        return [_prompt(value, "prompt")]
    return [_prompt(item, f"prompt[{index}]") for index, item in enumerate(value)]


def _prompt(value: JSON, at: str) -> str | tuple[int, ...]:
    if not isinstance(value, str | list):
        raise BadRequest(f"{at} must be a string or a list of token ids", param=at)
    if not value:
        raise BadRequest(f"{at} must not be empty", param=at)
    if isinstance(value, str):
        return value
    return take_ids(value, at)


def take_inputs(body: Mapping[str, JSON]) -> list[tuple[str, str | tuple[int, ...]]]:
    """The inputs to embed, each with its name; ids are checked against the vocabulary later."""
    value = take(body, INPUT)
    if value is None or value == []:
        raise BadRequest("input required: a string, token ids, or a list of them", param="input")
    if isinstance(value, str) or _is(value[0], int):
        return [("input", _prompt(value, "input"))]
    _check_count(value, INPUT.name)
    named = ((f"input[{index}]", item) for index, item in enumerate(value))
    return [(at, _prompt(item, at)) for at, item in named]


def take_documents(body: Mapping[str, JSON]) -> list[str]:
    """The documents to rank, which may be empty texts, but not none at all."""
    value = take(body, DOCUMENTS)
    if not value:
        raise BadRequest("documents required: a list of strings", param="documents")
    _check_count(value, DOCUMENTS.name)
    texts = []
    for index, item in enumerate(value):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            at = f"documents[{index}]"
            raise BadRequest(f"{at} must be a string or an object with a text", param=at)
        texts.append(text)
    return texts


def take_texts(body: Mapping[str, JSON], field: Field) -> list[tuple[str, str]]:
    """One text or several, none of them empty, each with its name."""
    value = take(body, field)
    if not value:
        raise BadRequest(f"{field.name} required: a string or a list of them", param=field.name)
    if isinstance(value, str):
        return [(field.name, value)]
    _check_count(value, field.name)
    named = [(f"{field.name}[{index}]", item) for index, item in enumerate(value)]
    for at, item in named:
        if not isinstance(item, str) or not item:
            raise BadRequest(f"{at} must be a string that is not empty", param=at)
    return named


def _check_count(value: Sequence[JSON], name: str) -> None:
    if len(value) > MOST_INPUTS:
        raise BadRequest(f"{name} has {len(value)} entries, at most {MOST_INPUTS}", param=name)


def take_ids(value: Sequence[JSON], at: str) -> tuple[int, ...]:
    """A list of token ids; 64 bits are more than any vocabulary has."""
    for index, token in enumerate(value):
        if not _is(token, int) or not 0 <= token < 2**63:
            where = f"{at}[{index}]"
            raise BadRequest(f"{where} must be a token id", param=where)
    return tuple(value)


def take_tools(body: Mapping[str, JSON]) -> tuple[Mapping[str, JSON], ...]:
    """Function tools, in OpenAI's nested shape.

    Namespaces are flattened and tools that are no functions skipped, since real clients send them
    to every server (clients.md, Requests 7). A function without a name is a 400.
    """
    found: list[Mapping[str, JSON]] = []

    def collect(tools: JSON, path: str) -> None:
        for index, tool in enumerate(tools):
            at = f"{path}[{index}]"
            if not isinstance(tool, dict):
                raise BadRequest(f"{at} must be of type object", param=at)
            if isinstance(tool.get("tools"), list):
                collect(tool["tools"], f"{at}.tools")
            elif tool.get("type", "function") == "function":
                found.append(_function(tool, at))

    collect(take(body, TOOLS) or [], "tools")
    return tuple(found)


def _function(tool: Mapping[str, JSON], at: str) -> Mapping[str, JSON]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{at}.function must be of type object", param=f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        path = f"{at}.function.name"
        raise BadRequest(f"{path} must be a string that is not empty", param=path)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        path = f"{at}.function.parameters"
        raise BadRequest(f"{path} must be of type object", param=path)
    if not isinstance(function.get("strict"), bool | None):
        path = f"{at}.function.strict"
        raise BadRequest(f"{path} must be of type bool", param=path)
    return {"type": "function", "function": {**function, "parameters": parameters or {}}}
