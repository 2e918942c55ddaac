"""Fuzzing of what the routes read: valid bodies of every POST route, bent in one or more places.

`json_case` makes the requests of one connection. A path may hold `{id}`: the runner puts the id of
the connection's last answer there, so that stored responses are read, continued and deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

from mlxlite import fields
from mlxlite.app import ROUTES


@dataclass(frozen=True)
class Ask:
    """reads: all of the answer; else the client leaves after its head. is_valid: must be a 200."""

    method: str
    path: str
    body: bytes | None
    reads: bool = True
    is_valid: bool = False


class Raw:
    """JSON text, or what is none, that goes into a body as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


# ---------------------------------------------------------------------------------- valid bodies

USER = {"role": "user", "content": "hello"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "tells the weather", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":1}'}}
SAMPLED = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.05, "seed": 3,
    "xtc_probability": 0.5, "xtc_threshold": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
BIASED = {
    "logit_bias": {"5": 3, "7": -100}, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "presence_context_size": 4, "hlg": {"enabled": True, "width": 3},
}  # fmt: skip
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

CHAT: list[dict[str, Any]] = [
    {"messages": [USER], "max_tokens": 2},
    {"messages": [USER], "max_tokens": 3, "stop": ["zq", "\n\n"], **STREAMED, **SAMPLED},
    {"messages": [USER], "max_completion_tokens": 2, "n": 3, "logprobs": True, "top_logprobs": 3},
    {"messages": [USER], "max_tokens": 2, "stream": True, "n": 2, "logprobs": True, **BIASED},
    {
        "model": "x",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "max_tokens": 3,
        "reasoning_effort": "low",
        "thinking": {"type": "enabled", "budget_tokens": 2},
        "chat_template_kwargs": {"enable_thinking": True},
    },
]
COMPLETION: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 2, **BIASED},
    {"prompt": ["hello", "you"], "max_tokens": 2, "n": 2, "best_of": 2, **STREAMED},
    {"prompt": [5, 9, 30], "max_tokens": 2, "echo": True, "logprobs": 3},
    {"prompt": [[5, 9], [7]], "max_tokens": 0, "echo": True, "logprobs": 1, "stream": True},
]
BLOCKS = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "8"}],
            },
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
MESSAGES: list[dict[str, Any]] = [
    {"messages": [USER], "max_tokens": 2},
    {"messages": [USER], "max_tokens": 3, "stream": True, "system": "short", **SAMPLED},
    {
        "messages": BLOCKS,
        "max_tokens": 3,
        "system": [{"type": "text", "text": "short"}],
        "tools": [{"name": "weather", "description": "tells it", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["zq"],
        "stream": True,
    },
]
RESPONSE: list[dict[str, Any]] = [
    {"input": "hello", "max_output_tokens": 2},
    {"input": "hello", "max_output_tokens": 2, "stream": True, "instructions": "short"},
    {"input": "hello", "max_output_tokens": 3, "background": True},
    {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "short"}]},
            {"type": "message", "role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "max_output_tokens": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "truncation": "disabled",
        "store": True,
        "temperature": 0.5,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "stream": True,
    },
]

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": [{**each, "stream": None} for each in MESSAGES],
    "/v1/responses": RESPONSE,
    "/tokenize": [{"prompt": "hello"}, {"content": "a", "add_special_tokens": False}, CHAT[4]],
    "/detokenize": [{"tokens": [5, 9, 300]}, {"tokens": []}],
    "/apply-template": CHAT,
    "/v1/embeddings": [
        {"input": ["hello", "you"], "encoding_format": "float", "dimensions": 8},
        {"input": [5, 9, 30], "encoding_format": "base64", "instruction": "find"},
    ],
    "/v1/rerank": [
        {"query": "hi", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True}
    ],
    "/v1/score": [{"text_1": "a", "text_2": ["b", "c"]}],
}
# What is no question to the model. `{id}` is the connection's last chat, upload or download.
TURN = {"parent": None, "role": "user", "content": "hello"}
CURVE = {"space": "logprob", "points": [{"x_pct": 1, "y_pct": 1}, {"x_pct": 100, "y_pct": 50}]}
OTHER_BODIES: dict[str, list[dict[str, Any]]] = {
    "/signal": [{"prompt": "hello"}],
    "/generate": [{"prompt": "hello", "n": 2, "seed": 7, "max_tokens": 3, "curve": CURVE}],
    "/api/sessions": [{"title": "hello"}, {"settings": {"temperature": 1}}],
    "/api/sessions/{id}/messages": [TURN, {**TURN, "role": "assistant", "tool_calls": [CALL]}],
    "/api/sessions/import": [{"session": {"title": "a"}}, TURN],
    "/api/render": [{"text": "**hello**\n\n```python\nx = 1\n```\n| a |\n|---|\n| b |"}],
    # Most name no model: one that may be there costs a process.
    "/downloads": [*[{"model": "name", "file": "x.gguf"}] * 15, {"model": "org/name"}],
    "/api/hub/download": [*[{"model": "name"}] * 15, {"model": "org/name", "file": "x.gguf"}],
    "/api/hub/search": [{"query": "tiny"}],
    "/api/hub/local": [{}],
    "/api/imports": [{"name": "x.gguf", "size": 40, "modified": 1}],
    "/api/models/serve": [{"model": "tiny"}, {"model": "absent"}],
    "/api/hub/serve": [{"model": "absent"}],
    "/api/gc/execute": [{"yes": True}],
    "/api/settings/hf-token": [{"token": "x"}],
    "/api/settings/tool-approvals": [{"tool": "weather"}],
}
# For routes that come to be and are not above: the usual names.
UNKNOWN = {"model": "x", "input": "hello", "prompt": "hello", "messages": [USER], "id": "x"}

ALL_BODIES = {**BODIES, **OTHER_BODIES}
ASKED = [(method, path) for method, path, _ in ROUTES]
POSTS = tuple(path for method, path in ASKED if method == "POST" and "{" not in path)
# The more bodies a route has, the more often it is asked: it has more to get wrong.
WEIGHTS = tuple(len(BODIES.get(path, [UNKNOWN])) for path in POSTS)
OTHERS = tuple(each for each in ASKED if each[0] != "POST" or "{" in each[1])
# What goes on from an answer, by what was asked before it.
NEXT: dict[str, tuple[tuple[str, str], ...]] = {
    "/api/sessions": (
        ("GET", "/api/sessions/{id}"), ("PATCH", "/api/sessions/{id}"),
        ("DELETE", "/api/sessions/{id}"), ("GET", "/api/sessions/{id}/export"),
        ("POST", "/api/sessions/{id}/messages"), ("POST", "/api/sessions/{id}/messages"),
        ("PATCH", "/api/sessions/{id}/messages/1"), ("GET", "/api/sessions/search?q=hello"),
    ),
    "/api/imports": (
        ("PUT", "/api/imports/{id}?offset=0"), ("PUT", "/api/imports/{id}?offset=7"),
        ("DELETE", "/api/imports/{id}"), ("GET", "/downloads"),
    ),
    "/downloads": (("GET", "/downloads"), ("DELETE", "/downloads/{id}")),
    "/api/models/serve": (("GET", "/api/models/serve"), ("DELETE", "/api/models/serve")),
}  # fmt: skip
PIECES = (b"GGUF", b"GGUF\x03\x00\x00\x00", b"GGUF" + bytes(36), bytes(40), b"", b"x" * 100)

# ----------------------------------------------------------------------------------------- junk

DEEP = 1_000
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 20, 21, 128, 129, 1024, 0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-9,
    1e30, 1e308, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30,
    Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("9" * 5000),
    Raw("01"), Raw("1."), Raw("0x10"), Raw("'a'"), Raw(""), Raw("1e5"), Raw("-0"), Raw("undefined"),
    "", " ", "a", "\x00", "\n", "\ufeff", "\ud800", "a\udfff\ud83d", "é", "😀", "\u202e", "x" * 300,
    "x" * 20_000, "word " * 3000, "😀" * 3000, "<|im_end|>", "<|im_start|>assistant", "<tool_call>",
    "{{ 7*7 }}", "{% for %}", "auto", "none", "required", "any", "user", "system", "assistant",
    "tool", "function", "developer", "text", "image_url", "tool_use", "tool_result", "5", "-1",
    "NaN", "true", "null", "low", "max", "json_object", "http://localhost/x.png", "file:///etc/x",
    [], [[]], [None], [{}], [0], [-1], ["a"], [1.5], [2**70], ["a"] * 100, [7] * 2000, [[5]] * 50,
    {}, {"a": None}, {"type": "text"}, {"type": "text", "text": "x"}, {"type": "function"},
    {"type": "function", "function": {"name": "weather"}}, {"type": "json_schema"}, {"": ""},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, {"id": "x"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, {"role": "user"},
    {"type": "item_reference", "id": "msg_1"}, {str(n): n for n in range(200)}, {"5": "a"}, USER,
    {"type": "enabled"}, {"type": "tool", "name": "weather"}, {"999999999": 1}, {"-1": 1}, [USER],
    Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("[" * 150_000),
    Raw('{"a":' * 90 + "[]" + "}" * 90), Raw("[" * 400 + "]" * 400), Raw("[" * 900 + "]" * 900),
)  # fmt: skip

NAMES = sorted(
    {each.name for each in vars(fields).values() if isinstance(each, fields.Field)}
    | {each.name for each in (*fields.PROMISES, *fields.CHAT_PROMISES)}
    | {name for bodies in BODIES.values() for body in bodies for name in body}
    | {"service_tier", "user", "metadata", "store", "functions", "function_call", "modalities"}
    | {"previous_response_id", "conversation", "max_tool_calls", "prompt_cache_key", "thread"}
    | {"include", "safety_identifier", "container", "mcp_servers", "context_management", "betas"}
    | {"instruction", "return_documents", "truncate_prompt_tokens", "priority", "__proto__", ""}
)


# ---------------------------------------------------------------------------------------- cases


def json_case(rng: Random) -> list[Ask]:
    """The requests of one connection, one to five."""
    if rng.random() < 0.08:
        return [_other(rng) for _ in range(rng.choice((1, 2, 4)))]
    path = rng.choices(POSTS, WEIGHTS)[0]
    asks = [_post(path, rng)]
    if path == "/v1/responses":
        while rng.random() < 0.5:
            asks.append(_follow_up(rng))
    while path in NEXT and rng.random() < 0.7:
        asks.append(_next(*rng.choice(NEXT[path]), rng))
    while rng.random() < 0.3:
        asks.append(_post(path, rng))
    return asks


def _post(path: str, rng: Random, **more: Any) -> Ask:
    body = {**deepcopy(rng.choice(ALL_BODIES.get(path, [UNKNOWN]))), **more}
    is_valid = rng.random() < 0.15
    if is_valid and not more and path in BODIES:
        return Ask("POST", path, encode(body).encode(), is_valid=True)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        body = rng.choice(BENDS)(body, rng)
    text = encode(body, rng.random() < 0.5)
    while rng.random() < 0.15:
        text = rng.choice(TEXT_BENDS)(text, rng)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.03:
        data = rng.choice(DATA_BENDS)(data, rng)
    return Ask("POST", path, data[:400_000], reads=rng.random() < 0.85)


def _other(rng: Random) -> Ask:
    """A route without a body, and what may stand in its path and query."""
    method, path = rng.choice(OTHERS)
    if rng.random() < 0.2:
        method = rng.choice(("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH"))
    junk = rng.choice(
        ("tiny", "{id}", "resp_0", "%20", "%F0%9F%98%80", "a/b", "..", "a" * 500, "-")
    )
    path = path.replace("{id}", junk).replace("{id:path}", junk)
    return Ask(method, path + rng.choice(("", "", "/", "?", _query(rng))), None)


def _follow_up(rng: Random) -> Ask:
    """What may be asked of a response that there is, with luck."""
    kind = rng.randrange(6)
    if kind == 0:
        return _post("/v1/responses", rng, previous_response_id="{id}")
    if kind == 1:
        return Ask("DELETE", "/v1/responses/{id}", None)
    if kind == 2:
        return Ask("POST", "/v1/responses/{id}/cancel", rng.choice((None, b"{}", b"[", b"\xff")))
    path = rng.choice(("/v1/responses/{id}", "/v1/responses/{id}/input_items"))
    return Ask("GET", path + rng.choice(("", _query(rng))), None)


def _next(method: str, path: str, rng: Random) -> Ask:
    """What may be asked of a chat, an upload, a download or a swap that there is, with luck."""
    if method == "PUT":
        return Ask(method, path, rng.choice(PIECES), reads=rng.random() < 0.85)
    if method == "POST":
        return _post(path, rng)
    if method == "PATCH":
        bent = _post("/api/sessions", rng) if path.endswith("{id}") else _post(NEXT_TURN, rng)
        return Ask(method, path, bent.body)
    return Ask(method, path, None)


NEXT_TURN = "/api/sessions/{id}/messages"


def _query(rng: Random) -> str:
    name = rng.choice(("stream", "starting_after", "limit", "order", "after", "include", "before"))
    value = rng.choice((
        "true", "false", "1", "0", "-1", "100", "101", "1e3", "9" * 30, "", "asc", "desc", "msg_1",
        "%FF", "%00", "%D9%A3", "a+b", "&&=", "null",
    ))  # fmt: skip
    return f"?{name}={value}&stream={rng.choice(('true', 'false', 'maybe'))}"


# --------------------------------------------------------------------------------------- bending


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside a body."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _pick(body: Any, rng: Random) -> tuple[Any, Any]:
    places = list(_places(body))
    return rng.choice(places) if places else (body, rng.choice(NAMES))


def _replace(body: Any, rng: Random) -> Any:
    container, key = _pick(body, rng)
    container[key] = deepcopy(rng.choice(JUNK))
    return body


def _remove(body: Any, rng: Random) -> Any:
    container, key = _pick(body, rng)
    if key in container or isinstance(container, list):
        del container[key]
    return body


def _add(body: Any, rng: Random) -> Any:
    """A field that some route knows, with a value that it does not have to."""
    body[rng.choice(NAMES)] = deepcopy(rng.choice(JUNK))
    return body


def _add_inside(body: Any, rng: Random) -> Any:
    inner = [c[k] for c, k in _places(body) if isinstance(c[k], dict)]
    (rng.choice(inner) if inner else body)[rng.choice(NAMES)] = deepcopy(rng.choice(JUNK))
    return body


def _wrap(body: Any, rng: Random) -> Any:
    container, key = _pick(body, rng)
    value = container[key] if key in container or isinstance(container, list) else None
    container[key] = rng.choice(([value], {"a": value}, [value] * 70, {"content": value}))
    return body


def _swap(body: Any, rng: Random) -> Any:
    """A value of another route's body in its place."""
    other = deepcopy(rng.choice(rng.choice(list(BODIES.values()))))
    source, name = _pick(other, rng)
    container, key = _pick(body, rng)
    container[key] = source[name]
    return body


def _merge(body: Any, rng: Random) -> Any:
    return {**body, **deepcopy(rng.choice(rng.choice(list(BODIES.values()))))}


Bend = Callable[[Any, Random], Any]
BENDS: tuple[Bend, ...] = (
    _replace, _replace, _replace, _replace, _remove, _add, _add, _add_inside, _wrap, _swap, _merge,
)  # fmt: skip


def _cut(text: str, rng: Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _double(text: str, rng: Random) -> str:
    """A name twice; the last one counts."""
    twice = f"{{{json.dumps(rng.choice(NAMES))}:{encode(rng.choice(JUNK))},"
    return text.replace("{", twice, 1)


def _stray(text: str, rng: Random) -> str:
    at = rng.randrange(len(text) + 1)
    return (
        text[:at] + rng.choice(list(',:[]{}"\\0-e. \x00\x1f\u2028') + ["\\ud800", "//"]) + text[at:]
    )


def _around(text: str, rng: Random) -> str:
    return rng.choice(
        (f"[{text}]", f" \n{text}\t", f"{text}{text}", "\ufeff" + text, "null", '"a"')
    )


TEXT_BENDS: tuple[Callable[[str, Random], str], ...] = (_cut, _double, _double, _stray, _around)


def _flip(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(1) + data[at + 1 :]


def _other_encoding(data: bytes, rng: Random) -> bytes:
    return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7")))


DATA_BENDS: tuple[Callable[[bytes, Random], bytes], ...] = (_flip, _flip, _other_encoding)


def encode(value: Any, is_ascii: bool = True) -> str:
    """JSON, with what is `Raw` as it is."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k)}:{encode(v, is_ascii)}" for k, v in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(encode(each, is_ascii) for each in value) + "]"
    return json.dumps(value, ensure_ascii=is_ascii)
