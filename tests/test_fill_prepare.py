"""What is filled and what is not, and how a client is told (spec 50 sections 2, 9, 10)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlxlite import config
from mlxlite.config import SettingError
from mlxlite.prepare import Preparation
from mlxlite.text.fill.guide import FillGuide
from mlxlite.types import Ask, Constraint
from tests import prepared, tiny
from tests.filling import DOCS, HERMES, TOKENIZER, WEATHER, XML, Engine, ids_of, tool
from tests.scripted import QWEN, ScriptedApp
from tests.turns import call

# ------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize(
    ("word", "mode"),
    [("off", "off"), ("0", "off"), ("strict", "strict"), ("1", "strict"), ("echo", "echo")],
)
def test_modes(word: str, mode: str) -> None:
    assert config.build({}, {"MLXLITE_FILL": word}).fill == mode
    assert config.build({"fill": word}, {}).fill == mode


def test_no_mode_is_off() -> None:
    assert config.build({}, {}).fill == config.build({}, {"MLXLITE_FILL": ""}).fill == "off"


@pytest.mark.parametrize("word", ["on", "true", "Strict", "2", "strict "])
def test_a_wrong_mode_is_an_error_at_start(word: str) -> None:
    with pytest.raises(SettingError) as caught:
        config.build({}, {"MLXLITE_FILL": word})
    assert caught.value.message == f"MLXLITE_FILL must be one of off, strict, echo, not {word!r}"


def test_floors_and_fractions() -> None:
    def built(**environ: str) -> config.Settings:
        return config.build({}, {f"MLXLITE_FILL_{key}": value for key, value in environ.items()})

    settings = built()
    assert (settings.fill_max_span, settings.fill_k, settings.fill_candidates) == (32, 8, 24)
    assert (settings.fill_index_max, settings.fill_append_chunk_size) == (131_072, 0)
    assert built(MAX_SPAN="2.9").fill_max_span == 2
    assert built(INDEX_MAX="1024.5").fill_index_max == 1024
    low = built(MAX_SPAN="1.9", K="1", CANDIDATES="0.5", INDEX_MAX="-7")
    assert (low.fill_max_span, low.fill_k, low.fill_candidates) == (2, 2, 1)
    assert low.fill_index_max == 1024
    for wrong in (
        {"MAX_SPAN": "wide"}, {"K": "inf"}, {"K": "nan"},
        {"APPEND_CHUNK_SIZE": "-1"}, {"APPEND_CHUNK_SIZE": "1.5"},
    ):  # fmt: skip
        with pytest.raises(SettingError, match="MLXLITE_FILL_"):
            built(**wrong)


# ------------------------------------------------------------------------------------ refusals


def made(template: str = XML, **flags: Any) -> Preparation:
    return prepared.make(
        TOKENIZER,
        template=template,
        vocab_size=flags.pop("vocab_size", TOKENIZER.vocab_size),
        **{"fill": "strict", **flags},
    )


def is_filled(preparation: Preparation, **fields: Any) -> bool:
    request = prepared.ask(**{"tools": (WEATHER,), **fields})
    return isinstance(preparation(request).spec.guide, FillGuide)


@pytest.mark.parametrize("mode", ["strict", "echo"])
def test_what_is_filled(mode: str) -> None:
    for fields in (
        {}, {"tools": (WEATHER, DOCS)}, {"n": 3}, {"stop": ("x",)}, {"temperature": 1.0},
        {"repetition_penalty": 1.1}, {"parallel_tool_calls": False}, {"logit_bias": ((5, 1.0),)},
    ):  # fmt: skip
        assert is_filled(made(fill=mode), **fields), fields


@pytest.mark.parametrize("mode", ["strict", "echo"])
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": ()},
        {"seed": 0},
        {"top_logprobs": 0},
        {"constraint": Constraint("json", {}, "response_format", "x")},
        {"forced_call": ""},
        {"messages": None, "prompt": "Hello"},
    ],
    ids=str,
)
def test_what_is_refused(mode: str, fields: dict[str, Any]) -> None:
    assert not is_filled(made(fill=mode), **fields)


def test_off_is_off() -> None:
    assert not is_filled(made(fill="off"))


def test_strict_without_rows_is_refused_and_echo_is_not() -> None:
    plain = tiny.TEMPLATE + "{# tools #}"
    assert not is_filled(made(plain))
    assert is_filled(made(plain, fill="echo"))
    many = tuple(tool(f"t{n}", "x") for n in range(33))
    assert not is_filled(made(), tools=many) and is_filled(made(fill="echo"), tools=many)


def test_no_echo_leads_across_the_end_of_a_thought_cut_short() -> None:
    """What is forced in the middle of a run could not be put into a cache that has its end."""
    plain = tiny.TEMPLATE + "{# tools <think> #}"
    assert is_filled(made(plain, fill="echo"))
    assert not is_filled(made(plain, fill="echo"), thinking_budget=100)


def test_families_whose_calls_cannot_be_told_are_checked() -> None:
    llama = HERMES.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    llama += "{# <|start_header_id|> parameters #}"
    bare = HERMES.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    for template in (llama, bare):
        guide = made(template)(prepared.ask(tools=(WEATHER, DOCS))).spec.guide
        assert isinstance(guide, FillGuide)
        script = ids_of('{"name": "get_weather", "arguments": {"city": "Rome"}}')
        engine = Engine(script)
        assert engine.run(guide) == [*script]
        assert engine.runs and not any(run.is_sure for run, _ in engine.runs)


def test_ids_that_the_model_does_not_have_are_not_put_in() -> None:
    tag = TOKENIZER.token_id("<tool_call>")
    assert tag is not None
    assert not is_filled(made(vocab_size=tag))


def test_a_plan_is_compiled_once_for_a_mode_and_its_tools() -> None:
    preparation = made(XML + "{{ '' if enable_thinking is defined else '' }}")
    plans = preparation._fill._plans
    for fields in ({}, {"n": 2}, {"messages": ({"role": "user", "content": "Other words."},)}):
        assert is_filled(preparation, **fields)
    assert len(plans._kept) == 1
    assert is_filled(preparation, enable_thinking=True)
    assert is_filled(preparation, tools=(DOCS, WEATHER))
    assert len(plans._kept) == 3


def test_a_plan_does_not_depend_on_the_conversation() -> None:
    """Nor does a conversation that a template refuses keep the next one from being filled."""
    picky = XML.replace(
        "{% for message in messages %}",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for message in messages %}",
        1,
    )
    preparation = made(picky)
    system = {"role": "system", "content": "Be brief."}
    assert is_filled(preparation, messages=(system, *prepared.MESSAGES))
    assert is_filled(preparation)


def test_a_prompt_that_opens_a_thought_is_told_to_the_guard() -> None:
    primed = XML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    preparation = made(primed)
    for text, fires in (("<tool_call>", False), ("a</think>\n\n<tool_call>", True)):
        guide = preparation(prepared.ask(tools=(WEATHER,))).spec.guide
        assert guide is not None
        verdict = None
        for token in TOKENIZER.encode(text):
            verdict = guide.observe((token,))
        assert verdict is not None and (verdict.run is not None) is fires


# --------------------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def app(tiny_folder: Any) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, QWEN, fill="strict") as app:
        yield app


ASKED: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "hello world"}],
    "tools": [WEATHER],
    "temperature": 0,
}
TEXT = call("get_weather", city="Rome") + "\n" + call("get_weather", city="Oslo")


def usage_of(app: ScriptedApp, **fields: Any) -> dict[str, Any]:
    asked = {**ASKED, **fields}
    whole = app.client.chat.completions.create(**asked).usage.to_dict()
    *_, last = app.client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **asked
    )
    streamed = last.usage.to_dict()
    assert streamed.get("fill") == whole.get("fill")
    return whole


def test_usage(app: ScriptedApp) -> None:
    app.engine.says(TEXT, portion=10_000)
    usage = usage_of(app)
    fill = usage["fill"]
    assert set(fill) == {
        *("events", "injected", "strict", "echo", "spanLens", "wastedSamples", "parseFallback"),
        *("indexTruncated", "decodeSteps", "verifyEvents", "verifyAccepted", "verifyRejected"),
        *("verifyUnsupported", "checkpointMs", "branchStops"),
    }
    assert fill["events"] == len(fill["spanLens"]) == 2
    assert fill["injected"] == fill["strict"] == sum(fill["spanLens"]) > 20
    assert fill["injected"] + fill["decodeSteps"] == usage["completion_tokens"] - 1  # EOS
    assert fill["parseFallback"] == 0


def test_usage_of_the_other_surfaces(app: ScriptedApp) -> None:
    app.engine.says(TEXT, portion=10_000)
    chat = usage_of(app)["fill"]
    function = WEATHER["function"]
    asked = {"model": "any", "input": "hello world", "tools": [{"type": "function", **function}]}
    found = app.ask("POST", "/v1/responses", {**asked, "temperature": 0}).json()
    assert found["usage"]["fill"] == chat
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    asked = {**ASKED, "tools": [tool], "max_tokens": 500}
    assert app.ask("POST", "/v1/messages", asked).json()["usage"]["fill"] == chat


def test_usage_of_several_answers(app: ScriptedApp) -> None:
    app.engine.says(TEXT, portion=10_000)
    one, two = usage_of(app)["fill"], usage_of(app, n=2)["fill"]
    assert two["spanLens"] == one["spanLens"] * 2 and two["events"] == 2 * one["events"]


def test_a_call_that_came_to_nothing_is_told(app: ScriptedApp) -> None:
    app.engine.says('<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>', 10_000)
    assert usage_of(app)["fill"]["parseFallback"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"tool_choice": "none"},
        {"tools": []},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
        {"extra_body": {"guided_choice": ["{}"]}},
    ],
    ids=str,
)
def test_a_refusal_is_silent(app: ScriptedApp, fields: dict[str, Any]) -> None:
    app.engine.says("{}")
    assert "fill" not in usage_of(app, **fields)


def test_completions_are_never_filled(app: ScriptedApp) -> None:
    app.engine.says("hello")
    found = app.client.completions.create(model="any", prompt="x")
    assert found.usage is not None and "fill" not in found.usage.to_dict()
    assert app.engine.specs[-1].guide is None


def test_other_surfaces_are_filled_as_well(app: ScriptedApp) -> None:
    app.engine.says(TEXT, portion=10_000)
    function = WEATHER["function"]
    flat = {"type": "function", "name": function["name"], "parameters": function["parameters"]}
    app.client.responses.create(model="any", input="hello", tools=[flat], store=False)
    guide = app.engine.specs[-1].guide
    assert isinstance(guide, FillGuide) and guide.counters.events == 2


def test_ask_has_what_refusals_need() -> None:
    """A field that is renamed must be renamed in `arm` too."""
    assert {"seed", "top_logprobs", "constraint", "forced_call"} <= set(Ask.__slots__)
