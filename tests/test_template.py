"""Chat templates: families, repairs, options, and where templates are found.

The templates here are our own, in the manner of the families that they are named after.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import BadRequest, ModelError
from mlxlite.text.messages import normalise_messages
from mlxlite.text.template import ChatTemplate, open_think

CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}
{%- for m in messages -%}
<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{{- bos_token }}
{%- set state = namespace(index=0) %}
{%- for m in turns if m.role in ('user', 'assistant') and m.tool_calls is not defined %}
{%- if (m.role == 'user') != (state.index % 2 == 0) %}
{{- raise_exception('After the optional system message, roles must alternate') }}
{%- endif %}
{%- set state.index = state.index + 1 %}
{%- endfor %}
{%- for m in turns %}
{%- if m.role == 'user' %}[INST]
{%- if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}
{{- m.content }}[/INST]
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- elif m.role == 'system' %}{{ raise_exception('Only user and assistant roles are supported') }}
{%- endif %}
{%- endfor %}"""

QWEN3 = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content is defined and preserve_thinking is defined and preserve_thinking %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""

# Knows no system role, and says nothing about it.
SILENT = """{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}
{% elif m.role == 'assistant' %}A:{{ m.content }}
{% endif %}{% endfor %}"""


def turns(*pairs: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


def render(source: str, *pairs: str, **options: Any) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(turns(*pairs), options=options)


# ------------------------------------------------------------------------------------- families


def test_chatml() -> None:
    assert render(CHATML, "s:be brief", "u:hi") == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    template = ChatTemplate(CHATML)
    assert template.render(turns("u:hi"), add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )
    # No rule against neighbours here: they must not be touched.
    assert render(CHATML, "u:a", "u:b").count("<|im_start|>user") == 2


def test_llama3_prints_its_bos() -> None:
    assert render(LLAMA3, "u: hi ").startswith("<s><|start_header_id|>user<|end_header_id|>\n\nhi<")


def test_gemma_has_its_system_text_folded_into_the_first_user_turn() -> None:
    assert render(GEMMA, "s:be brief", "u:hi", "a:yes", "u:go") == (
        "<s><start_of_turn>user\nbe brief\n\nhi<end_of_turn>\n<start_of_turn>model\nyes"
        "<end_of_turn>\n<start_of_turn>user\ngo<end_of_turn>\n<start_of_turn>model\n"
    )
    assert "user\nbe brief\n\na\n\nb<" in render(GEMMA, "s:be brief", "u:a", "u:b")


def test_mistral_has_its_neighbours_merged() -> None:
    assert render(MISTRAL, "s:rule", "u:a", "u:b") == "<s>[INST]rule\n\na\n\nb[/INST]"
    assert render(MISTRAL, "u:a", "a:b", "a:c", "u:d") == (
        "<s>[INST]a[/INST]b\n\nc</s>[INST]d[/INST]"
    )


def test_a_system_message_in_the_middle_goes_to_the_front() -> None:
    text = render(QWEN3, "u:a", "s:rule", "u:b")
    assert text.startswith("<|im_start|>system\nrule<|im_end|>\n<|im_start|>user\na<|im_end|>")
    assert "<s>[INST]a[/INST]b</s>[INST]rule\n\nc[/INST]" == render(
        MISTRAL, "u:a", "a:b", "s:rule", "u:c"
    )


def test_a_silently_dropped_system_text_is_folded() -> None:
    assert render(SILENT, "s:answer in French", "u:hi") == "U:answer in French\n\nhi\n"
    assert render(SILENT, "u:hi", "a:yes") == "U:hi\nA:yes\n"


def test_a_template_that_changes_system_text_is_left_alone() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content | upper }};{% endfor %}"
    assert render(source, "s:x", "u:y") == "system:X;user:Y;"


def test_what_no_repair_mends_is_a_400_with_the_first_words() -> None:
    with pytest.raises(BadRequest) as caught:
        render(GEMMA, "a:hello", "u:hi")
    assert caught.value.message == (
        "prompt build failed: Conversation roles must alternate user/assistant/user/assistant/..."
    )
    assert caught.value.param == "messages"
    with pytest.raises(BadRequest, match="prompt build failed: no .* ever"):
        render("{{ raise_exception('no ' ~ messages[0].role ~ ' ever') }}", "s:x", "u:y")


def test_a_long_refusal_is_cut() -> None:
    with pytest.raises(BadRequest) as caught:
        render("{{ raise_exception('x' * 100000) }}", "u:x")
    assert len(caught.value.message) < 1000


def test_the_repair_that_worked_goes_first_and_changes_nothing_else() -> None:
    template = ChatTemplate(GEMMA, bos_token="<s>")
    fresh = [
        ChatTemplate(GEMMA, bos_token="<s>").render(messages)
        for messages in (turns("u:a", "u:b"), turns("u:a"), turns("s:x", "u:a"))
    ]
    template.render(turns("s:x", "u:a", "u:b"))
    assert template._last_repair == "fold+merge"
    again = [
        template.render(messages)
        for messages in (turns("u:a", "u:b"), turns("u:a"), turns("s:x", "u:a"))
    ]
    assert again == fresh


def test_the_remembered_repair_saves_renders() -> None:
    calls: list[int] = []
    template = ChatTemplate(GEMMA, bos_token="<s>")
    inner = template._program
    assert inner is not None

    def counted(*args: Any) -> str:
        calls.append(1)
        return inner(*args)

    template._program = counted
    template.render(turns("s:x", "u:a", "u:b"))
    first = len(calls)
    template.render(turns("s:x", "u:a", "u:b"))
    assert len(calls) - first == 2 < first


# --------------------------------------------------------------------------- options and thinking


def test_options_that_nobody_set_are_not_passed() -> None:
    source = "{% for k in ['a', 'enable_thinking'] %}{% endfor %}{{ enable_thinking is defined }}"
    assert render(source, "u:x") == "False"
    assert render(source, "u:x", enable_thinking=None) == "False"
    assert render(source, "u:x", enable_thinking=False) == "True"
    assert render(QWEN3, "u:x").endswith("<think>\n")
    assert render(QWEN3, "u:x", enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_an_option_cannot_stand_for_the_messages() -> None:
    text = render(CHATML, "u:x", messages=[], bos_token="no", tools=[1], add_generation_prompt=0)
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_unset_special_tokens_are_undefined() -> None:
    assert ChatTemplate("{{ bos_token is defined }}{{ bos_token }}").render(turns("u:x")) == "False"
    template = ChatTemplate("{{ unk_token }}", tokens={"unk_token": "<unk>"})
    assert template.render(turns("u:x")) == "<unk>"


def test_tools_and_calls() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    call = {"function": {"name": "f", "arguments": '{"z": 1, "a": "é"}'}}
    messages = normalise_messages(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    text = ChatTemplate(QWEN3).render(messages, tools=tools)
    assert json.dumps(tools[0], ensure_ascii=False) + "\n" in text
    assert '<tool_call>{"name": "f", "arguments": {"z": 1, "a": "é"}}' in text
    assert ChatTemplate("{{ tools is none }}").render(messages, tools=[]) == "True"


def test_arguments_that_are_no_json_reach_the_template() -> None:
    call = {"function": {"name": "f", "arguments": "{bad"}}
    messages = normalise_messages([{"role": "assistant", "tool_calls": [call]}])
    assert '"arguments": "{bad"' in ChatTemplate(QWEN3).render(messages)


def test_flags() -> None:
    qwen = ChatTemplate(QWEN3)
    assert qwen.thinking_format == "think-tag" and qwen.supports_thinking
    assert qwen.reads_preserve_thinking and not qwen.reads_reasoning_effort
    assert not qwen.knows_developer
    plain = ChatTemplate(CHATML)
    assert plain.thinking_format is None and not plain.supports_thinking
    assert ChatTemplate("{{ enable_thinking }}<|channel>").thinking_format == "gemma-channel"
    assert ChatTemplate("<think>").thinking_format is None
    assert ChatTemplate("{{ reasoning_effort }}").reads_reasoning_effort
    assert ChatTemplate("{% if role == 'developer' %}{% endif %}").knows_developer
    assert not ChatTemplate("You are a developer").knows_developer


@pytest.mark.parametrize(
    ("rendered", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nFirst,", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("a <think>x</think> b <think>", True),
        ("<|im_start|>assistant\n", False),
        ("</think>", False),
    ],
)
def test_open_think(rendered: str, is_open: bool) -> None:
    assert open_think(rendered) is is_open


def test_a_message_about_the_tag_opens_nothing() -> None:
    messages = turns("u:what does <think> mean?")
    assert not open_think(ChatTemplate(CHATML).render(messages), messages)
    assert open_think(ChatTemplate(QWEN3).render(messages), messages)


def test_a_long_chat_is_quick() -> None:
    template = ChatTemplate(QWEN3)
    messages = turns(*(("u:" if n % 2 == 0 else "a:") + "word " * 80 for n in range(200)))
    best = 9.9
    for _ in range(5):
        start = time.perf_counter()
        template.render(messages)
        best = min(best, time.perf_counter() - start)
    assert best < 0.02


# ------------------------------------------------------------------------------------------ loading


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def loaded(folder: Path, **tools: Any) -> str:
    return ChatTemplate.load(folder).render(turns("u:x"), **tools)


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert not ChatTemplate.load(tmp_path).has_template
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert loaded(tmp_path) == "json"
    write(
        tmp_path, "tokenizer_config.json", {"chat_template": "{{ bos_token }}", "bos_token": "<s>"}
    )
    assert loaded(tmp_path) == "<s>"
    write(tmp_path, "chat_template.jinja", "file{{ bos_token }}")
    assert loaded(tmp_path) == "file<s>"
    assert ChatTemplate.load(tmp_path, "{{ 'own' }}").render(turns("u:x")) == "own"
    write(tmp_path, "own.jinja", "from a file")
    own = ChatTemplate.load(tmp_path, str(tmp_path / "own.jinja"))
    assert own.render(turns("u:x")) == "from a file"


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
        {"name": "default", "template": "plain"},
    ]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert loaded(tmp_path) == "plain"
    assert loaded(tmp_path, tools=[{}]) == "1 tools"
    write(tmp_path, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "r"}]})
    assert loaded(tmp_path) == "r"
    write(tmp_path, "chat_template.jinja", "file")
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "file with tools")
    assert loaded(tmp_path) == "file"
    assert loaded(tmp_path, tools=[{}]) == "file with tools"


def test_a_model_without_a_template_says_where_to_go() -> None:
    with pytest.raises(BadRequest, match="/v1/completions"):
        ChatTemplate(None).render(turns("u:x"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{% for %}"),
        ("chat_template.jinja", "{{ 'a' | nofilter }}"),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_broken_template_stops_the_start(tmp_path: Path, name: str, content: Any) -> None:
    write(tmp_path, name, content)
    with pytest.raises(ModelError, match=tmp_path.name):
        ChatTemplate.load(tmp_path)


def test_a_missing_override(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such chat template file"):
        ChatTemplate.load(tmp_path, "nowhere.jinja")
