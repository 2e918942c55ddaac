"""prepare: whether a model thinks, how deeply, how warm, and on which side an answer begins."""

from __future__ import annotations

from typing import Any

import pytest

from mlxlite.prepare import Preparation, Prepared
from mlxlite.text.sink import Sink
from mlxlite.types import Ask
from tests import tiny
from tests.prepared import TOKENIZER, TOOLS, ask, make, rendered

SHOWS = (
    "{{ enable_thinking if enable_thinking is defined else 'undefined' }} "
    "{{ reasoning_effort if reasoning_effort is defined else 'undefined' }} "
    "{{ preserve_thinking if preserve_thinking is defined else 'undefined' }}"
    "{% for m in messages %}{% endfor %}"
)
DEEP = SHOWS + "{# low, medium, xhigh #}"
SHALLOW = SHOWS.replace("reasoning_effort", "depth")


def shown(preparation: Preparation, **fields: Any) -> list[str]:
    """enable_thinking, depth and preserve_thinking as the template sees them."""
    return rendered(preparation, ask(**fields)).split()


# --------------------------------------------------------------------- precedence (section 1)


@pytest.mark.parametrize(
    ("fields", "server", "model_type", "right"),
    [
        # 1. chat_template_kwargs
        ({"enable_thinking": True, "thinking": False, "reasoning_effort": "none"}, "off", "", True),
        ({"enable_thinking": False, "thinking": True, "reasoning_effort": "high"}, "on", "", False),
        # 2. thinking: {type}
        ({"thinking": True, "reasoning_effort": "none"}, "off", "minicpm5", True),
        ({"thinking": False, "reasoning_effort": "high"}, "on", "", False),
        # 3. reasoning_effort
        *[
            ({"reasoning_effort": effort}, "off", "minicpm5", True)
            for effort in ("minimal", "low", "medium", "high", "xhigh")
        ],
        ({"reasoning_effort": "none"}, "on", "", False),
        # 4. The server
        ({}, "on", "minicpm5", True),
        ({}, "off", "", False),
        # 5. The model
        ({}, None, "minicpm5", False),
        ({}, None, "minicpm5_moe", False),
        ({}, None, "glm_moe_dsa", False),
        ({}, None, "qwen3", None),
        ({}, None, "", None),
        # A budget says how long, not whether.
        ({"thinking_budget": 0}, None, "", None),
    ],
)
def test_precedence(
    fields: dict[str, Any], server: str | None, model_type: str, right: bool | None
) -> None:
    flags = {} if server is None else {"thinking": server}
    preparation = make(template=SHOWS, model_type=model_type, **flags)
    assert preparation.thinks(ask(**fields)) is right
    # What is undefined is not passed at all: not as null, not as false.
    assert shown(preparation, **fields)[0] == ("undefined" if right is None else str(right))


@pytest.mark.parametrize("value", [None, True, False])
def test_preserve_thinking_is_passed_if_given(value: bool | None) -> None:
    right = "undefined" if value is None else str(value)
    assert shown(make(template=SHOWS), preserve_thinking=value)[2] == right


# --------------------------------------------------------------------------- depth (section 1.1)


@pytest.mark.parametrize(
    ("effort", "deep", "own_words"),
    [
        (None, "undefined", "undefined"),
        ("none", "undefined", "undefined"),
        ("minimal", "low", "low"),
        ("low", "low", "low"),
        ("medium", "medium", "medium"),
        ("high", "xhigh", "high"),
        ("xhigh", "xhigh", "high"),
    ],
)
def test_depth(effort: str | None, deep: str, own_words: str) -> None:
    """Mapped for a template that knows xhigh; else its own word; nothing if it does not ask."""
    assert shown(make(template=DEEP), reasoning_effort=effort)[1] == deep
    assert shown(make(template=SHOWS), reasoning_effort=effort)[1] == own_words
    shallow = make(template=SHALLOW)
    assert shown(shallow, reasoning_effort=effort)[1] == "undefined"
    assert "reasoning_effort" not in shallow.template_options(ask(reasoning_effort=effort))


# --------------------------------------------------------------------- temperature (section 1.2)


@pytest.mark.parametrize(
    ("asked", "server", "model", "thinks", "right"),
    [
        (None, None, None, None, 0.7),
        (None, None, None, True, 0.7),
        (None, None, None, False, 0.7),
        (None, None, 1.0, None, 1.0),
        (None, None, 1.0, True, 1.0),
        (None, None, 1.0, False, 0.7),  # the cap
        (None, None, 0.3, False, 0.3),
        (None, None, 0.0, False, 0.0),
        (None, 1.2, 1.0, False, 1.2),  # whatever is explicit wins unchanged
        (1.5, None, 1.0, False, 1.5),
        (1.5, 0.2, 1.0, False, 1.5),
        (0.0, 1.2, 1.0, True, 0.0),
    ],
)
def test_no_think_temperature(
    asked: float | None,
    server: float | None,
    model: float | None,
    thinks: bool | None,
    right: float,
) -> None:
    flags = {} if server is None else {"temperature": str(server)}
    preparation = make(
        defaults={"top_p": 0.95, **({} if model is None else {"temperature": model})}, **flags
    )
    sampling = preparation.sampling(ask(temperature=asked, enable_thinking=thinks))
    assert sampling.temperature == right
    assert sampling.top_p == 0.95  # never affected


@pytest.mark.parametrize("how", ["effort", "server", "model", "thinking"])
def test_the_cap_follows_every_way_to_switch_off(how: str) -> None:
    defaults = {"temperature": 1.0}
    if how == "server":
        assert make(defaults=defaults, thinking="off").sampling(ask()).temperature == 0.7
    elif how == "model":
        assert make(defaults=defaults, model_type="minicpm5").sampling(ask()).temperature == 0.7
    elif how == "effort":
        assert make(defaults=defaults).sampling(ask(reasoning_effort="none")).temperature == 0.7
        assert make(defaults=defaults).sampling(ask(reasoning_effort="low")).temperature == 1.0
    else:
        assert make(defaults=defaults).sampling(ask(thinking=False)).temperature == 0.7


# -------------------------------------------------------------------- where an answer begins (7.4)

CHAT = tiny.TEMPLATE
OPEN = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CLOSED = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
CHOOSES = CHAT.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}",
)
GEMMA = CHAT.replace("assistant\n{% endif %}", "assistant\n{# <|channel> #}{% endif %}")


def answer(sink: Sink, text: str) -> tuple[str, str]:
    """Content and reasoning."""
    deltas = sink.push(TOKENIZER.encode(text, add_special_tokens=False)) + sink.finish()
    return "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas)


def says(prepared: Prepared, text: str) -> tuple[str, str]:
    return answer(prepared.make_sink(), text)


def test_open_think_reaches_the_sink() -> None:
    """F71: the answer holds the closing tag alone."""
    assert says(make(template=OPEN)(ask()), "hm</think>ok") == ("ok", "hm")
    assert says(make(template=OPEN)(ask()), "never closed") == ("", "never closed")
    assert says(make(template=CLOSED)(ask()), "ok") == ("ok", "")
    assert says(make(template=CLOSED)(ask()), "<think>hm</think>ok") == ("ok", "hm")
    choosing = make(template=CHOOSES)
    assert says(choosing(ask()), "hm</think>ok") == ("ok", "hm")
    assert says(choosing(ask(enable_thinking=False)), "ok") == ("ok", "")
    assert says(choosing(ask(reasoning_effort="none")), "ok") == ("ok", "")


def test_a_model_without_tags_keeps_them_as_text() -> None:
    assert says(make()(ask()), "<think>hm</think>ok") == ("<think>hm</think>ok", "")


def test_words_of_a_client_do_not_open_a_block() -> None:
    asked = ask(messages=({"role": "user", "content": "What does <think> mean?"},))
    assert says(make(template=CLOSED)(asked), "ok") == ("ok", "")
    assert says(make(template=CHAT + "{# <think> #}")(asked), "ok") == ("ok", "")
    assert says(make(template=OPEN)(asked), "hm</think>ok") == ("ok", "hm")


def test_gemma_channels() -> None:
    """The line end after the channel's name is the first character of the reasoning (spec 30)."""
    text = "<|channel>thought\nhm<channel|>ok"
    assert says(make(template=GEMMA)(ask()), text) == ("ok", "\nhm")
    assert says(make(model_type="gemma4_text")(ask()), text) == ("ok", "\nhm")


def test_raw_text_is_neither_split_nor_routed() -> None:
    """No template, no router, no splitter (section 7)."""
    call = '<think>hm</think><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    preparation = make(template=OPEN + "{# <tool_call> #}")
    assert says(preparation(Ask(prompt="<think>")), call) == (call, "")
    assert says(preparation(Ask(prompt="x", tools=TOOLS)), call) == (call, "")


def test_the_budget_closes_the_block_in_the_models_own_markup() -> None:
    for template, model_type, closing in (
        (OPEN, "", "\n</think>\n\n"),
        (GEMMA, "", "\n<channel|>"),
        (CHAT, "gemma4", "\n<channel|>"),
    ):
        preparation = make(template=template, model_type=model_type)
        guide = preparation(ask(thinking_budget=0)).spec.guide
        assert guide is not None and guide.may_steer
        forced = guide.observe(()).forced
        if template is not OPEN:
            assert forced == ()  # it has not opened yet
            opening = TOKENIZER.encode("<|channel>thought\n", add_special_tokens=False)
            forced = next(f for i in opening if (f := guide.observe((i,)).forced))
        assert TOKENIZER.decode(forced) == closing
