"""What tests of fill share: a tokenizer that merges over markup, templates of the three shapes of
`<tool_call>`, and compiled plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mlxlite.text.fill.compiler import ToolFacts, compile_plan
from mlxlite.text.fill.plan import Kind, Row, StrictPlan
from mlxlite.text.fill.probes import Probes
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.strict import Markup, markup_of
from mlxlite.types import JSON

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
# Each is merged from left to right to one token, whatever stands around it; the first ones win.
WORDS = (
    *("=get", "=search", "search_docs", "_weather", "_docs", "get", "function", "parameter"),
    *(
        "arguments",
        "city",
        "query",
        "limit",
        "name",
        "tool",
        "call",
        "\n\n",
        '":',
        '{"',
        '"}}',
        "</",
    ),
)


def make_tokenizer(
    words: Sequence[str] = WORDS, tags: Sequence[str] = TAGS
) -> tokenizers.Tokenizer:
    """Byte-level BPE without a splitting rule, so that nothing keeps a merge from crossing from
    markup into a name: `=get` is one token, as it is in some real vocabularies."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: n for n, char in enumerate(alphabet)}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = []
    for word in words:
        ((pieces, _),) = spell.pre_tokenize_str(word)
        so_far = pieces[0]
        for char in pieces[1:]:
            if so_far + char not in vocab:
                merges.append((so_far, char))
                vocab[so_far + char] = len(vocab)
            so_far += char
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = spell
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens(list(tags))
    return made


def tokenizer(**made: Any) -> Tokenizer:
    return Tokenizer(make_tokenizer(**made), eos_token="<|im_end|>")


TOKENIZER = tokenizer()

_HEAD = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}"
    "{{ '\n' if not loop.first }}"
)
_TAIL = (
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# tools #}"
)
_ITEMS = "{% for key, value in tool_call.arguments | items %}"
XML = (
    _HEAD + "<tool_call>\n<function={{ tool_call.name }}>" + _ITEMS + "<parameter={{ key }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>" + _TAIL
)
HERMES = (
    _HEAD + '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": '
    "{{ tool_call.arguments | tojson }}}\n</tool_call>" + _TAIL
)
GLM = (
    _HEAD + "<tool_call>{{ tool_call.name }}" + _ITEMS + "<arg_key>{{ key }}</arg_key>"
    "<arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>" + _TAIL
)
FAMILY = {XML: "qwen_xml", HERMES: "hermes", GLM: "glm"}


def tool(name: str, *keys: str, required: Sequence[str] | None = None, **schema: JSON) -> JSON:
    """A function tool whose parameters are strings; all of them required unless told."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string"} for key in keys},
        "required": list(keys if required is None else required),
        **schema,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("get_weather", "city", additionalProperties=False)
DOCS = tool("search_docs", "query", "limit", required=["query"])


def markup(family: str) -> Markup:
    found = markup_of(family)
    assert found is not None
    return found


def make_probes(template: str, tools: Sequence[JSON], made: Tokenizer = TOKENIZER) -> Probes:
    chat = ChatTemplate(template)

    def render(messages: Sequence[dict[str, Any]], is_prompt: bool) -> str:
        return chat.render(messages, tools=tools, add_generation_prompt=is_prompt)

    specials = [made.token_text(token) for token in made.special_ids]
    return Probes(render, made.encode, made.bos_id, specials)


def compiled(
    template: str, *tools: JSON, made: Tokenizer = TOKENIZER, family: str | None = None
) -> StrictPlan:
    return compile_plan(
        lambda: make_probes(template, tools, made),
        [ToolFacts.of(each) for each in tools],
        made.bytes_of,
        markup(family or FAMILY.get(template, "generic")),
    )


def shown(plan: StrictPlan, made: Tokenizer = TOKENIZER) -> list[tuple[str, str, str]]:
    """The rows as (kind, trigger, emit), decoded."""
    return [(row.kind.value, *text_of(row, made)) for row in plan.rows]


def text_of(row: Row, made: Tokenizer = TOKENIZER) -> tuple[str, str]:
    return (
        made.decode(row.trigger, keep_special=True),
        made.decode(row.emit, keep_special=True),
    )


def row_of(plan: StrictPlan, kind: Kind) -> Row:
    return next(row for row in plan.rows if row.kind is kind)


def ids_of(text: str, made: Tokenizer = TOKENIZER) -> tuple[int, ...]:
    return tuple(made.encode(text, add_special_tokens=False))
