"""Structured output through the whole server, on every surface (decisions D7, D8).

The model is tiny and random, so what is valid is so by the grammar alone. A bias towards what ends
strings and objects keeps its answers short.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests import schema_table as table
from tests.live import HELLO, LiveApp, Reply, chat_body, frames, stream_text
from tests.prepared import TOKENIZER

_ENDS = {
    n for n in range(512) if TOKENIZER.bytes_of(n) and set(TOKENIZER.bytes_of(n)) <= set(b'"}]')
}
BIAS = {str(n): 9 for n in _ENDS}
SHORT = {"max_tokens": 600, "temperature": 1, "logit_bias": BIAS}
TOWN = table.obj(name=table.S, size=table.I, kind={"enum": ["town", "city"]})
NOT = {"type": "boolean", "not": {"const": False}}


class Town(BaseModel):
    name: str
    size: int
    kind: Literal["town", "city"]
    mayors: list[str] | None


@pytest.fixture(scope="module")
def client(tiny_server: LiveApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="x", max_retries=0) as found:
        yield found


def answered(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def as_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


# ----------------------------------------------------------------------------- other forms


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-x"}, r"[0-9]{3}-x"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"guided_json": {"enum": [1, 2]}}, "[12]"),
        ({"guided_json": '{"enum": [1, 2]}'}, "[12]"),
        ({"structured_outputs": {"enum": [1, 2]}}, "[12]"),
        ({"structured_outputs": {"regex": "ab?"}}, "ab?"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "x|y"),
        ({"structured_outputs": {"grammar": 'root ::= "c"'}}, "c"),
        ({"structured_outputs": {"json": {"enum": ["z"]}, "regex": None}}, '"z"'),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"response_format": {"type": "json_object", "schema": {"enum": [3]}}}, "3"),
        ({"response_format": {"type": "json_schema", "schema": {"enum": [4]}}}, "4"),
        ({"guided_regex": "r", "guided_choice": ["c"]}, "r"),
        ({"guided_json": {"const": 1}, "guided_grammar": 'root ::= "g"'}, "g"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["c"]}, r"\{.*\}"),
        ({"response_format": {"type": "text"}, "guided_choice": ["c"]}, "c"),
        ({"guided_regex": "", "guided_choice": [], "guided_grammar": 'root ::= "e"'}, "e"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_forms_and_their_precedence(
    tiny_server: LiveApp, body: dict[str, Any], pattern: str
) -> None:
    texts = set()
    for seed in range(4):
        reply = tiny_server.chat(**SHORT, **body, seed=seed)
        texts.add(answered(reply))
        assert "warning" not in reply.headers
    assert all(re.fullmatch(pattern, text, re.DOTALL) for text in texts), texts


def test_plain_is_streamed(tiny_server: LiveApp) -> None:
    body = {**SHORT, "seed": 3, "response_format": as_schema(TOWN)}
    plain = answered(tiny_server.chat(**body))
    reply = tiny_server.chat(**body, stream=True)
    assert stream_text(frames(reply.body)) == plain
    jsonschema.validate(json.loads(plain), TOWN)


def test_completions(tiny_server: LiveApp) -> None:
    body = {"prompt": "hello", **SHORT, "n": 2, "guided_choice": ["yes", "no"]}
    reply = tiny_server.ask("POST", "/v1/completions", body)
    assert {choice["text"] for choice in reply.json()["choices"]} <= {"yes", "no"}
    reply = tiny_server.ask("POST", "/v1/completions", {**body, "guided_json": NOT})
    assert "prompt injection" not in reply.headers["warning"]
    assert {choice["text"] for choice in reply.json()["choices"]} <= {"true", "false"}


def test_logprobs_are_of_what_was_allowed(tiny_server: LiveApp) -> None:
    body = {"guided_choice": ["yes", "no"], "logprobs": True, "top_logprobs": 4, "temperature": 0}
    (choice,) = tiny_server.chat(**body).json()["choices"]
    first = choice["logprobs"]["content"][0]
    assert first["token"] in "yesno" and first["logprob"] > -9000
    likely = [top["token"] for top in first["top_logprobs"] if top["logprob"] > -9000]
    assert likely and all(choice.startswith(tuple(likely)) for choice in ("yes", "no")) or likely


def test_the_end_at_the_limit_is_a_stop(tiny_server: LiveApp) -> None:
    size = len(TOKENIZER.encode("yes", add_special_tokens=False))
    reply = tiny_server.chat(guided_choice=["yes"], max_tokens=size, logit_bias=None)
    assert answered(reply) == "yes"
    (choice,) = tiny_server.chat(guided_regex="[a-z]{99}", max_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_a_stop_string_may_cut(tiny_server: LiveApp) -> None:
    assert answered(tiny_server.chat(guided_regex="abc", stop=["c"])) == "ab"


# ------------------------------------------------------------------------------ the packages


def test_openai_parse(client: openai.OpenAI) -> None:
    for seed in range(5):
        found = client.chat.completions.parse(
            model="m", messages=HELLO, response_format=Town, seed=seed,  # type: ignore[arg-type]
            max_tokens=600, temperature=1, logit_bias=BIAS,
        )  # fmt: skip
        town = found.choices[0].message.parsed
        assert town is not None and town.kind in ("town", "city")


def test_openai_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="m", messages=HELLO, response_format=Town, max_tokens=600, temperature=1,  # type: ignore[arg-type]
        logit_bias=BIAS, seed=1,
    ) as stream:  # fmt: skip
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed is not None


def test_responses_parse(client: openai.OpenAI) -> None:
    extra = {"logit_bias": BIAS, "seed": 4}
    found = client.responses.parse(
        model="m", input="hello", text_format=Town, max_output_tokens=600, temperature=1,
        extra_body=extra,
    )  # fmt: skip
    assert found.output_parsed is not None and found.text.format.type == "json_schema"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model="m", input="x",
            text={"format": {"type": "json_schema", "name": "a", "schema": NOT, "strict": True}},
        )  # fmt: skip
    assert caught.value.param == "text.format.schema"


def test_messages(tiny_server: LiveApp) -> None:
    with anthropic.Anthropic(base_url=tiny_server.url, api_key="x", max_retries=0) as client:
        for name in ("output_config", "output_format"):
            form: Any = {"type": "json_schema", "schema": TOWN}
            body = {"output_config": {"format": form}} if name == "output_config" else {name: form}
            found = client.messages.create(
                model="m", max_tokens=600, messages=HELLO,  # type: ignore[arg-type]
                extra_body={**body, "temperature": 1},
            )  # fmt: skip
            (block,) = found.content
            assert found.stop_reason == "end_turn"
            jsonschema.validate(json.loads(block.text), TOWN)  # type: ignore[union-attr]
        with pytest.raises(anthropic.BadRequestError, match="output_config.format.schema"):
            client.messages.create(
                model="m", max_tokens=9, messages=HELLO,  # type: ignore[arg-type]
                extra_body={"output_config": {"format": {"type": "json_schema", "schema": 5}}},
            )  # fmt: skip


# --------------------------------------------------------------------------------- the calls

ADD = {
    "type": "function",
    "function": {
        "name": "add", "strict": True,
        "parameters": {**table.obj(a=table.I, b=table.I), "additionalProperties": False},
    },
}  # fmt: skip
PAINT = {
    "type": "function",
    "function": {"name": "paint", "parameters": table.obj(colour={"enum": ["red", "blue"]})},
}
SCHEMA_OF = {each["function"]["name"]: each["function"]["parameters"] for each in (ADD, PAINT)}  # type: ignore[index]


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "paint"}),
        ({"type": "function", "function": {"name": "paint"}}, {"paint"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
    ],
    ids=["required", "paint", "add"],
)
def test_forced_calls(client: openai.OpenAI, choice: Any, names: set[str], is_stream: bool) -> None:
    for seed in range(4):
        asked: dict[str, Any] = {
            "model": "m", "messages": HELLO, "tools": [ADD, PAINT], "tool_choice": choice,
            "seed": seed, "stop": ["a", "{", "\n"], **SHORT,
        }  # fmt: skip
        if is_stream:
            with client.chat.completions.stream(**asked) as stream:
                (found,) = stream.get_final_completion().choices
        else:
            (found,) = client.chat.completions.create(**asked).choices  # type: ignore[assignment]
        assert found.finish_reason == "tool_calls" and not found.message.content
        assert found.message.tool_calls
        for call in found.message.tool_calls:
            assert call.function.name in names
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA_OF[call.function.name])
        if isinstance(choice, dict):
            assert len(found.message.tool_calls) == 1


def test_one_forced_call_if_told(tiny_server: LiveApp) -> None:
    for seed in range(6):
        reply = tiny_server.chat(
            **SHORT, seed=seed, tools=[ADD, PAINT], tool_choice="required",
            parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] in SCHEMA_OF


def test_a_forced_call_on_the_other_surfaces(tiny_server: LiveApp) -> None:
    flat = {"type": "function", **PAINT["function"]}  # type: ignore[dict-item]  # TOOL is untyped
    body = {"input": "x", "tools": [flat], "tool_choice": "required", "parallel_tool_calls": False}
    reply = tiny_server.ask("POST", "/v1/responses", body)
    (call,) = reply.json()["output"]
    assert json.loads(call["arguments"])["colour"] in ("red", "blue")
    body = {
        "messages": HELLO, "max_tokens": 200,
        "tools": [{"name": "paint", "input_schema": SCHEMA_OF["paint"]}],
        "tool_choice": {"type": "tool", "name": "paint"},
    }  # fmt: skip
    reply = tiny_server.ask("POST", "/v1/messages", body)
    (block,) = reply.json()["content"]
    assert block["type"] == "tool_use" and block["input"]["colour"] in ("red", "blue")
    assert reply.json()["stop_reason"] == "tool_use"


@pytest.mark.parametrize("name", ["allOf-ref", "pydantic", "ref-twice", "oneOf-tagged"])
def test_arguments_of_all_kinds(tiny_server: LiveApp, name: str) -> None:
    schema = table.SCHEMAS[name]
    tool = {"type": "function", "function": {"name": "größe", "strict": True, "parameters": schema}}
    reply = tiny_server.chat(**SHORT, seed=2, tools=[tool], tool_choice="required", n=2)
    assert reply.status == 200, reply.body
    for choice in reply.json()["choices"]:
        call = choice["message"]["tool_calls"][0]["function"]
        assert call["name"] == "größe"
        jsonschema.validate(json.loads(call["arguments"]), schema)


def test_what_forced_calls_cannot_be(tiny_server: LiveApp) -> None:
    unknown = {"name": "tools", "strict": True, "parameters": table.obj(a=NOT)}
    malformed = {**unknown, "parameters": table.obj(a={"type": "strin"})}
    text = {"name": "tools", "parameters": {"type": "string"}}
    for function in (unknown, malformed, text):
        tool = {"type": "function", "function": function}
        reply = tiny_server.chat(tools=[tool], tool_choice="required")
        assert (reply.status, reply.error["param"]) == (400, "tools"), reply.body
        assert reply.error["message"].startswith('the parameters of tool "tools" ')
        assert "start:" not in reply.error["message"], "our own grammar is nobody's business"
        # Elsewhere tools have other shapes and other places.
        listed = [{"type": "web_search"}, {"type": "function", **function}]
        body = json.dumps({"input": "hi", "tools": listed, "tool_choice": "required"}).encode()
        other = tiny_server.ask("POST", "/v1/responses", body)
        assert (other.status, other.error["message"]) == (400, reply.error["message"])
    # Of several the one that is to blame, not one of which nothing was promised.
    odd = {"name": "odd", "parameters": table.obj(a={"type": "strin"})}
    both = [{"type": "function", "function": function} for function in (odd, unknown)]
    reply = tiny_server.chat(tools=both, tool_choice="required")
    assert reply.error["message"].startswith('the parameters of tool "tools" ')
    loose = {"type": "function", "function": {**unknown, "strict": False}}
    assert tiny_server.chat(tools=[loose], tool_choice="required", max_tokens=9).status == 200


# ------------------------------------------------------------------------------- the bounds


def test_a_compile_that_takes_too_long(
    tiny_server: LiveApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in time, and others are served meanwhile (F70)."""
    monkeypatch.setattr("mlxlite.service._COMPILE_S", 0.05)
    many = table.obj([], **{f"k{n}": table.I for n in range(1200)})
    found: list[Reply] = []
    asking = threading.Thread(target=lambda: found.append(tiny_server.chat(guided_json=many)))
    asking.start()
    assert tiny_server.chat().status == 200
    asking.join()
    assert (found[0].status, found[0].error["param"]) == (400, "guided_json"), found[0].body
    assert "0.05 s" in found[0].error["message"]


def test_free_rows_beside_constrained_ones(tiny_folder: Any) -> None:
    """The same text as alone; and so are the constrained ones."""
    bodies = [chat_body(max_tokens=40, messages=[{"role": "user", "content": f"say {n}"}])
              for n in range(4)]  # fmt: skip
    bodies += [{**bodies[n % 4], "guided_regex": f"[a-z]{{{10 + n}}}[0-9]+x"} for n in range(8)]
    with LiveApp(tiny_folder, batch="12") as app:
        alone = [app.ask("POST", "/v1/chat/completions", body).text for body in bodies]
        together: list[str] = [""] * len(bodies)

        def ask(n: int) -> None:
            together[n] = app.ask("POST", "/v1/chat/completions", bodies[n]).text

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone
        stats = app.batch()
        assert (stats["active_rows"], stats["failed_rows"]) == (0, 0)


# --------------------------------------------------------------------------- the degrade path


@pytest.mark.parametrize(
    ("body", "label"),
    [
        ({"guided_json": {"type": "boolean"}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_grammar": 'root ::= "é"'}, "guided_grammar"),
        ({"guided_choice": ["yes", "nö"]}, "guided_choice"),
        ({"structured_outputs": {"type": "boolean"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format json_object"),
        ({"response_format": as_schema({"const": "ä"})}, "response_format json_schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else "asked",
)
def test_switched_off(tiny_folder: Any, body: dict[str, Any], label: str) -> None:
    with LiveApp(tiny_folder, grammar="off") as app:
        plain = app.chat()
        assert "warning" not in plain.headers
        assert "warning" not in app.chat(response_format={"type": "text"}).headers
        reply = app.chat(**body)
        warning = reply.headers["warning"]
        assert reply.status == 200 and warning.startswith(f'199 mlxlite "{label} is not enforced')
        assert "MLXLITE_GRAMMAR" in warning and warning.isascii()
        assert reply.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"]
        strict = app.chat(response_format=as_schema({}, strict=True))
        assert strict.status == 400 and "MLXLITE_GRAMMAR" in strict.error["message"]
        assert app.chat(tools=[ADD]).error["param"] == "tools"
        assert app.chat(tools=[PAINT], tool_choice="required").error["param"] == "tool_choice"


def test_refused_instead(tiny_folder: Any) -> None:
    with LiveApp(tiny_folder, grammar_fallback="refuse") as app:
        assert app.chat(guided_json=NOT).error["param"] == "guided_json"
        assert answered(app.chat(guided_choice=["ok"])) == "ok"


def test_the_warning_of_streams(tiny_server: LiveApp) -> None:
    for path, body in (
        ("/v1/chat/completions", chat_body(guided_json=NOT)),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5, "guided_json": NOT}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 5, "guided_json": NOT}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5,
                          "output_config": {"format": {"type": "json_schema", "schema": NOT}}}),
    ):  # fmt: skip
        for is_stream in (False, True):
            reply = tiny_server.ask("POST", path, {**body, "stream": is_stream})
            assert reply.status == 200 and "not enforced in full" in reply.headers["warning"], path
