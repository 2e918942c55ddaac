"""prepare: which ids a prompt becomes, and how many of them every later turn keeps."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tokenizers import processors

from mlxlite.errors import BadRequest
from mlxlite.prepare import Preparation
from mlxlite.text.channels import thinking_of
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.families import family_of
from mlxlite.types import Ask
from tests import tiny
from tests.prepared import BOS, EOS, MESSAGES, TOKENIZER, TOOLS, ask, make, rendered

CHAT = tiny.TEMPLATE
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# -------------------------------------------------------------------------------- prompt ids


def test_chat_prompt() -> None:
    spec = make()(ask()).spec
    text = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(spec.prompt_ids, keep_special=True) == text
    # Not spelled letter by letter.
    assert spec.prompt_ids[0] == TOKENIZER.token_id("<|im_start|>")


def test_raw_prompt() -> None:
    prepared = make(template="{{ raise_exception('not for raw text') }}")(Ask(prompt="hello world"))
    ids = prepared.spec.prompt_ids
    assert list(ids) == TOKENIZER.encode("hello world")
    assert prepared.spec.snapshot_at == len(ids)


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("added", [False, True])
def test_bos_is_there_once(written: str, added: bool) -> None:
    """Template and post-processor may both write it (spec 10 section 7.3)."""
    backend = tiny.make_tokenizer()
    if added:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    tokenizer = Tokenizer(backend, bos_token=BOS, eos_token=EOS)
    preparation = make(tokenizer, template=written + CHAT)
    ids = preparation(ask()).spec.prompt_ids
    assert ids.count(0) == (1 if written or added else 0)
    assert written == "" and not added or ids[0] == 0
    # The probe of the boundary is treated alike: nothing differs at the front.
    assert preparation.prompt(ask()).boundary == len(ids)


def test_a_prompt_is_never_empty() -> None:
    assert make(template="{# nothing #}")(ask()).spec.prompt_ids == (0,)
    assert make()(Ask(prompt="")).spec.prompt_ids == (0,)
    without_bos = Tokenizer(tiny.make_tokenizer(), eos_ids=[2])
    assert make(without_bos, template="")(ask()).spec.prompt_ids == (2,)
    with_nothing = Tokenizer(tiny.make_tokenizer())
    assert make(with_nothing, template="")(ask()).spec.prompt_ids == (0,)


# ----------------------------------------------------------------- what the template is shown

SHOWS = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '?' ~ m.reasoning if m.reasoning }}{{ '?' ~ m.reasoning_content if m.reasoning_content }};"
    "{% endfor %}{{ tools | tojson if tools else 'no tools' }}"
)


def shown(messages: list[dict[str, Any]], **fields: Any) -> str:
    return rendered(make(template=SHOWS), ask(messages=tuple(messages), **fields))


def test_messages_are_normalised() -> None:
    """Section 6 and F33, F35, F37, F38; each rule is tested in test_messages."""
    bad = {"type": "function", "function": {"name": "add", "arguments": "{bad"}}
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"text": "c"}]
    text = shown(
        [
            turn("developer", "be brief"),
            turn("user", parts),
            turn("assistant", None, tool_calls=[CALL, bad], reasoning_content="hm"),
            turn("tool", "3", tool_call_id="c1"),
        ]
    )
    assert text == ('system=be brief;user=abc;assistant=!{"a": 1}!"{bad"?hm?hm;tool=3;no tools')


def test_tool_schemas_are_typed() -> None:
    """Every node says its type, and the client's own object is not changed (section 6)."""
    parameters = {"properties": {"a": {"enum": [1]}, "b": {"items": {}}}}
    tools = ({"type": "function", "function": {"name": "f", "parameters": parameters}},)
    before = json.dumps(tools)
    (tool,) = json.loads(shown(list(MESSAGES), tools=tools).partition(";")[2])
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "enum": [1]},
            "b": {"type": "array", "items": {"type": "string"}},
        },
    }
    assert json.dumps(tools) == before


def test_wrong_messages() -> None:
    with pytest.raises(BadRequest) as caught:
        make()(ask(messages=({"role": "user"},)))
    assert caught.value.param == "messages[0].content"
    refusing = make(template="{{ raise_exception('no such role here') }}")
    with pytest.raises(BadRequest, match="^prompt build failed: no such role here") as caught:
        refusing(ask())
    assert caught.value.param == "messages"


# ------------------------------------------------------------------- stable boundary (section 8)

OPEN = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CHOOSES = CHAT.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
)
LONG = CHAT.replace("assistant\n{% endif %}", "assistant\n" + "think " * 80 + "{% endif %}")
CONVERSATION = (
    turn("system", "be brief"),
    turn("user", "hello"),
    turn("assistant", "hello world"),
    turn("user", "the quick brown fox"),
)


class Renders:
    """Counts the renders of a preparation."""

    def __init__(self, preparation: Preparation) -> None:
        self.count = 0
        original = preparation.template.render

        def render(*args: Any, **named: Any) -> str:
            self.count += 1
            return original(*args, **named)

        preparation.template.render = render  # type: ignore[method-assign]

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.mark.parametrize("template", [CHAT, OPEN, CHOOSES, LONG, "{{ bos_token }}" + OPEN])
@pytest.mark.parametrize("thinks", [None, False])
def test_every_later_turn_keeps_the_boundary(template: str, thinks: bool | None) -> None:
    """The oracle: the prompt of the next turn begins with exactly these ids."""
    preparation = make(template=template)
    for count in (2, 4):
        for reply in ("x", "well", "\n\nno", "<|im_end|>"):
            now = CONVERSATION[:count]
            prompt = preparation.prompt(ask(messages=now, enable_thinking=thinks))
            later = (*now, turn("assistant", reply), turn("user", "and then?"))
            after = preparation.prompt(ask(messages=later, enable_thinking=thinks)).ids
            assert 0 < prompt.boundary <= len(prompt.ids)
            assert after[: prompt.boundary] == prompt.ids[: prompt.boundary]


@pytest.mark.parametrize(
    ("template", "thinks", "primer"),
    [
        (CHAT, None, ""),  # a later turn begins with the same words
        (OPEN, None, "<think>\n"),
        (CHOOSES, None, ""),
        (CHOOSES, False, "<think>\n\n</think>\n\n"),
        (LONG, None, "think " * 80),
    ],
)
def test_boundary_and_primer_make_the_prompt(
    template: str, thinks: bool | None, primer: str
) -> None:
    preparation = make(template=template)
    for _ in range(2):  # found by the probe, then remembered
        prompt = preparation.prompt(ask(enable_thinking=thinks))
        assert TOKENIZER.decode(prompt.ids[prompt.boundary :], keep_special=True) == primer
        spec = preparation(ask(enable_thinking=thinks)).spec
        assert spec.snapshot_at == prompt.boundary


def test_the_primer_is_remembered_for_each_mode() -> None:
    preparation = make(template=OPEN + "{# reasoning_effort #}")
    renders = Renders(preparation)
    modes: list[dict[str, Any]] = [
        {},
        {"enable_thinking": True},
        {"enable_thinking": False},
        {"tools": TOOLS},
        {"preserve_thinking": True},
        {"preserve_thinking": False},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "high", "tools": TOOLS},
    ]
    for mode in modes:
        preparation.prompt(ask(**mode))
        assert renders.taken() == 2, mode
    for mode in modes:
        preparation.prompt(ask(messages=CONVERSATION, **mode))
        assert renders.taken() == 1, mode
    preparation.prompt(ask(temperature=0.5, stop=("a",), max_tokens=3))  # no mode of its own
    assert renders.taken() == 1


def test_a_long_primer_is_not_remembered() -> None:
    """Over 64 tokens the renders differ inside a message: true of this request only."""
    preparation = make(template=LONG)
    renders = Renders(preparation)
    for _ in range(3):
        preparation.prompt(ask())
        assert renders.taken() == 2


def test_a_probe_that_fails_costs_no_answer() -> None:
    """A template that refuses an answer at the end: the whole prompt is the boundary."""
    refuses = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    preparation = make(template=refuses + CHAT)
    prompt = preparation.prompt(ask())
    assert prompt.boundary == len(prompt.ids)
    assert preparation(ask()).spec.snapshot_at == len(prompt.ids)


def test_a_boundary_is_never_negative() -> None:
    once = "{{ messages[0].content }}{{ ' a b c d e f g h' if messages | length == 1 }}"
    preparation = make(template=once)
    assert preparation.prompt(ask()).boundary > 0
    short = (turn("user", "x"), turn("assistant", "y"))
    assert preparation.prompt(ask(messages=short)).boundary == 0


# ------------------------------------------------------------------------------------- figures


def test_a_long_chat_is_prepared_quickly() -> None:
    """16k tokens in under 60 ms on an idle machine; the limit here allows for a busy one."""
    words = "the quick brown fox jumps over the lazy dog and says hello to the world again " * 12
    messages = tuple(
        turn(role, f"{words} word{n}") for n in range(48) for role in ("user", "assistant")
    )
    preparation = make(context=1 << 20)
    preparation(ask(messages=messages))  # the probe
    took = []
    for n in range(5):
        request = ask(messages=(turn("system", f"word{n}"), *messages, turn("user", "so?")))
        began = time.perf_counter()
        prepared = preparation(request)
        took.append((time.perf_counter() - began) * 1000)
    tokens = len(prepared.spec.prompt_ids)
    print(f"{tokens} tokens: {min(took):.0f} ms, median {sorted(took)[2]:.0f} ms")
    assert tokens > 16_000
    assert min(took) < 250


def test_the_tool_variant_of_a_template_tells_how_calls_and_thinking_look() -> None:
    """A model with two templates writes its calls as the one that was shown the tools has it."""
    preparation = make()
    preparation.template = ChatTemplate(
        "{{ messages[0].content }}", tool_source="{{ tools | tojson }}[TOOL_CALLS]<think>"
    )
    assert preparation.template.knows_tools
    assert family_of(preparation.template.tool_source).name == "mistral"
    assert thinking_of(preparation.template.all_source) is not None
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    prepared = preparation(ask(tools=(tool,)))
    sink = prepared.make_sink()
    pieces = sink.push(preparation.tokenizer.encode("[TOOL_CALLS]f[ARGS]{}")) + sink.finish()
    assert [piece.call.name for piece in pieces if piece.call is not None][:1] == ["f"]
