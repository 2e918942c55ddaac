"""Chat completions of models that think: which text is reasoning, and what it is called.

The model is a script (`scripted.py`), the rest is the live server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.types import Finish
from tests.live import HELLO, frames
from tests.scripted import QWEN, TOKENIZER, ScriptedApp

pytestmark = pytest.mark.slow

THINKER = QWEN + "{# <think> #}"
OPENS = QWEN.replace(
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking "
    "else '<think>\n' }}{% endif %}",
)
GEMMA = QWEN + "{# <|channel> #}"
NAMES = ("reasoning", "reasoning_content")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.fixture(scope="module")
def thinker(tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, THINKER) as app:
        yield app


@pytest.fixture(scope="module")
def opener(tiny_folder: Path) -> Iterator[ScriptedApp]:
    with ScriptedApp(tiny_folder, OPENS) as app:
        yield app


def both(app: ScriptedApp, text: str, end: Finish = Finish.EOS, **body: Any) -> dict[str, Any]:
    """The message of a plain answer, and its finish; checks that the stream folds to it."""
    app.engine.says(text, 1, end)
    asked = {"max_tokens": None, **body}
    choice = app.chat(**asked).json()["choices"][0]
    message = {**choice["message"], "finish": choice["finish_reason"]}
    folded: dict[str, Any] = {"role": "assistant"}
    for frame in frames(app.chat(stream=True, **asked).body)[:-1]:
        (part,) = frame["choices"]
        for name, piece in part["delta"].items():
            if name in ("content", *NAMES):
                folded[name] = folded.get(name, "") + piece
        folded["finish"] = part["finish_reason"]
    if message["content"] is None:
        message["content"] = ""
    assert {name: value for name, value in message.items() if name != "tool_calls"} == folded
    return message


# ------------------------------------------------------------------------------------- names


def test_both_names_by_default(thinker: ScriptedApp) -> None:
    message = both(thinker, "<think>hm</think>\n\nok")
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert message["content"] == "\n\nok" and message["finish"] == "stop"


@pytest.mark.parametrize("name", NAMES)
def test_one_name(tiny_folder: Path, name: str) -> None:
    with ScriptedApp(tiny_folder, THINKER, reasoning_field=name) as app:
        message = both(app, "<think>hm</think>ok")
        assert set(message) == {"role", "content", name, "finish"}
        assert message[name] == "hm"


def test_no_name_without_reasoning(thinker: ScriptedApp) -> None:
    for text in ("ok", "", "<think></think>ok", "a < b <thin"):
        assert set(both(thinker, text)) == {"role", "content", "finish"}


def test_the_official_client_reads_it(thinker: ScriptedApp) -> None:
    thinker.engine.says("<think>hm</think>ok")
    completions = thinker.client.chat.completions
    message = completions.create(model="m", messages=HELLO).choices[0].message
    assert message.reasoning_content == message.reasoning == "hm"
    chunks = completions.create(model="m", messages=HELLO, stream=True)
    found = [getattr(chunk.choices[0].delta, "reasoning_content", "") for chunk in chunks]
    assert "".join(found) == "hm"


# ------------------------------------------------------------------------------------- sides


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hm</think>ok", "hm", "ok"),
        ("never closed", "never closed", ""),
        ("hm</think>a<think>b</think>c", "hmb", "ac"),
        ("hm</thi", "hm</thi", ""),
        ("\U0001f642</think>\U0001f642", "\U0001f642", "\U0001f642"),
    ],
)
def test_a_prompt_that_opens_the_block(
    opener: ScriptedApp, text: str, reasoning: str, content: str
) -> None:
    """F71: the closing tag alone comes, and does not leak."""
    for end in (Finish.EOS, Finish.LENGTH):
        message = both(opener, text, end)
        assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_thinking_switched_off(opener: ScriptedApp, body: dict[str, Any]) -> None:
    assert both(opener, "ok", **body) == {"role": "assistant", "content": "ok", "finish": "stop"}


def test_the_server_switches_thinking_off(tiny_folder: Path) -> None:
    with ScriptedApp(tiny_folder, OPENS, thinking="off") as app:
        assert both(app, "ok")["content"] == "ok"
        assert both(app, "hm</think>ok", reasoning_effort="low")["reasoning"] == "hm"


def test_channels(tiny_folder: Path) -> None:
    with ScriptedApp(tiny_folder, GEMMA) as app:
        message = both(app, "<|channel>thought\nhm<channel|>ok")
        assert (message["reasoning"], message["content"]) == ("\nhm", "ok")


def test_a_call_after_thinking(thinker: ScriptedApp) -> None:
    """And a stop string inside the thinking ends it all (spec 30 section 10)."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    message = both(thinker, f"<think>hm</think>{call}", tools=[TOOL])
    assert message["reasoning"] == "hm" and message["content"] == ""
    assert message["finish"] == "tool_calls" and len(message["tool_calls"]) == 1
    message = both(thinker, f"<think>hm END</think>{call}", tools=[TOOL], stop="END")
    assert (message["reasoning"], message["content"], message["finish"]) == ("hm ", "", "stop")
    assert "tool_calls" not in message


def test_reasoning_of_the_history_reaches_the_template(tiny_folder: Path) -> None:
    template = THINKER.replace(
        "{{ message.content }}", "{{ message.reasoning }}{{ message.content }}"
    )
    with ScriptedApp(tiny_folder, template) as app:
        for name in NAMES:
            app.engine.says("ok")
            old = {"role": "assistant", "content": "a", name: "I thought so. "}
            assert app.chat(messages=[*HELLO, old, *HELLO]).text == "ok"
            prompt = TOKENIZER.decode(app.engine.specs[-1].prompt_ids)
            assert "I thought so. a" in prompt


# ----------------------------------------------------------------------------- usage and budget


def usage(app: ScriptedApp, **body: Any) -> dict[str, Any]:
    asked = {"max_tokens": None, **body}
    whole = app.chat(**asked).json()["usage"]
    found = frames(app.chat(stream=True, stream_options={"include_usage": True}, **asked).body)
    assert found[-2]["usage"] == whole
    return whole


def test_reasoning_tokens(thinker: ScriptedApp, opener: ScriptedApp) -> None:
    def details(app: ScriptedApp, text: str) -> int:
        app.engine.says(text)
        found = usage(app)
        assert found["completion_tokens"] == len(TOKENIZER.encode(text)) + 1
        return int(found["completion_tokens_details"]["reasoning_tokens"])

    def count(text: str) -> int:
        return len(TOKENIZER.encode(text))

    thought = "hello world again"
    assert details(thinker, "ok") == details(thinker, "") == 0
    both_tags = details(thinker, f"<think>{thought}</think>ok")
    # Its own tokens, and the markup that it is known by.
    assert count(thought) <= both_tags <= count(f"<think>{thought}</think>")
    assert details(opener, thought) == count(thought)
    assert count(thought) <= details(opener, f"{thought}</think>ok") <= both_tags


@pytest.mark.parametrize(
    "budget",
    [
        {"max_thinking_tokens": 4},
        {"thinking": {"budget_tokens": 4}},
        {"thinking": {"type": "enabled", "budget_tokens": 4}},
        {"max_thinking_tokens": 4, "thinking": {"budget_tokens": 400}},
    ],
)
def test_the_budget_closes_the_block(opener: ScriptedApp, budget: dict[str, Any]) -> None:
    """D10: by force, in the model's own markup; what it says next is the answer."""
    text = "hello world again and again"
    message = both(opener, text, **budget)
    thought = TOKENIZER.decode(TOKENIZER.encode(text)[:4])
    assert message["reasoning"] == thought + "\n"
    assert message["content"] == "\n\n" + text.removeprefix(thought)
    closing = TOKENIZER.encode("\n</think>\n\n", add_special_tokens=False)
    found = usage(opener, **budget)
    assert found["completion_tokens"] == len(TOKENIZER.encode(text)) + len(closing) + 1
    assert 4 <= found["completion_tokens_details"]["reasoning_tokens"] <= 4 + len(closing)


def test_a_budget_of_nothing(opener: ScriptedApp, thinker: ScriptedApp) -> None:
    message = both(opener, "ok", max_thinking_tokens=0)
    assert (message["reasoning"], message["content"]) == ("\n", "\n\nok")
    message = both(thinker, "<think>hm", max_thinking_tokens=0)
    assert (message["reasoning"], message["content"]) == ("\n", "\n\nhm")


def test_a_budget_that_is_not_reached(opener: ScriptedApp, thinker: ScriptedApp) -> None:
    for body in ({"max_thinking_tokens": 10**30}, {"thinking": {"budget_tokens": 500}}):
        message = both(opener, "hm</think>ok", **body)
        assert (message["reasoning"], message["content"]) == ("hm", "ok")
    assert both(thinker, "ok", max_thinking_tokens=0)["content"] == "ok"
