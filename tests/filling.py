"""What tests of fill share: a tokenizer that merges over markup, templates of the three shapes of
`<tool_call>`, compiled plans, and an engine that takes runs in every way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mlxlite.text.fill.compiler import ToolFacts, compile_plan
from mlxlite.text.fill.plan import Kind, Row, StrictPlan
from mlxlite.text.fill.probes import Probes
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.strict import Markup, markup_of
from mlxlite.types import JSON, Guide, Run, Took, Verdict

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
(EOS,) = TOKENIZER.eos_ids

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


@dataclass
class Engine:
    """Writes a script, and keeps to the protocol of guides. take: how many ids of a run; by default
    all that are sure, and of the others those that the script agrees with."""

    script: Sequence[int]
    take: Callable[[Run, int], int] = lambda run, agreed: len(run.ids) if run.is_sure else agreed
    most: int = 10_000
    tell: Callable[[int], Took] = Took  # what is said of a run of which so many were taken
    ids: list[int] = field(default_factory=list)
    runs: list[tuple[Run, int]] = field(default_factory=list)
    draws: int = 0
    is_stopped: bool = False

    def run(self, guide: Guide) -> list[int]:
        self._obey(guide, guide.observe(()))
        while not self.is_stopped and len(self.ids) < min(self.most, len(self.script)):
            token = self.script[len(self.ids)]
            self.draws += 1
            if token == EOS:
                break
            self._give(guide, token)
        return self.ids

    def _give(self, guide: Guide, token: int) -> None:
        self.ids.append(token)
        self._obey(guide, guide.observe((token,)))

    def _obey(self, guide: Guide, verdict: Verdict) -> None:
        if verdict.stop:
            del self.ids[len(self.ids) - 1 + verdict.keep :]
            self.is_stopped = True
            return
        for token in verdict.forced:
            self._give(guide, token)
        if (run := verdict.run) is None:
            return
        assert guide.may_steer and not verdict.forced and len(run.ids) >= 2 and EOS not in run.ids
        assert len(self.ids) + len(run.ids) <= self.most, "over the budget"
        rest = list(self.script[len(self.ids) :])
        pairs = zip(run.ids, rest, strict=False)
        agreed = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(run.ids), len(rest)))
        count = self.take(run, agreed)
        self.runs.append((run, count))
        guide.took(self.tell(count))
        for n, token in enumerate(run.ids[:count], 1):
            if self.is_stopped:
                return
            self.ids.append(token)
            inner = guide.observe((token,))
            assert inner.run is None or n == count, "not another one meanwhile"
            self._obey(guide, inner)
