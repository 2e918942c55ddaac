"""Golden tables, first half: what a table is, and the families of `<tool_call>` blocks.

Templates, prompts and outputs are written by us in each family's shape. `CHAT` is what is rendered:
a question, a call, its result, and a second question, with one tool.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """An output of a model, and what its client sees."""

    output: str
    content: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Golden:
    """One family. specials: its markers that are special tokens. prompt: `CHAT`, rendered."""

    family: str
    template: str
    prompt: str
    cases: tuple[Case, ...]
    specials: tuple[str, ...] = ()
    model_type: str = ""
    starts_open: bool = False


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
TOOLS = [
    ADD,
    tool(
        "files.read-x",
        path={"type": "string"},
        zip={"type": "string"},
        limit={"type": ["string", "integer"]},
        note={"type": ["string", "null"]},
        where={"type": "object"},
    ),
]

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    {"role": "user", "content": "2+2?"},
]

ADDED = ("add", {"a": 1, "b": 2})
SHOWN = json.dumps(ADD)  # how `tojson` shows the tool


def chatml(call: str, words: str = "", primer: str = "") -> str:
    """A template in the shape of ChatML. call: how one call is written."""
    return (
        "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n"
        f"{{% endfor %}}{words}<|im_end|>\n{{% endif %}}"
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}"
        f"{call}{{% endfor %}}<|im_end|>\n{{% endfor %}}"
        f"{{%- if add_generation_prompt %}}<|im_start|>assistant\n{primer}{{% endif %}}"
    )


def chatml_prompt(call: str, words: str = "", primer: str = "") -> str:
    return (
        f"<|im_start|>system\n{SHOWN}\n{words}<|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{primer}"
    )


HERMES = Golden(
    "hermes",
    chatml(
        '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": '
        "{{ tool_call.arguments | tojson }}}\n</tool_call>",
        "<think>",
    ),
    chatml_prompt(
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "<think>"
    ),
    (
        Case(
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            "",
            (ADDED,),
        ),
        Case(
            "<think>Sum them.</think>\n\nLet me see.\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"path": "it\'s a, b"}, "name": "files.read-x"}\n'
            "</tool_call>",
            "\n\nLet me see.\n",
            (ADDED, ("files.read-x", {"path": "it's a, b"})),
            "Sum them.",
        ),
        Case(
            '<tool_call>{"name": "files.read-x", "arguments": {"where": {"a": {"b": 1}}, '
            '"path": "</tool_call> \\"quoted\\" \\\\ {[ 한🙂"}}</tool_call>',
            "",
            (
                (
                    "files.read-x",
                    {"where": {"a": {"b": 1}}, "path": '</tool_call> "quoted" \\ {[ 한🙂'},
                ),
            ),
        ),
        Case(
            'for i in a<b: x < y\n<tool_call>{"name": "who", "arguments": {}}</tool_call> end <',
            'for i in a<b: x < y\n<tool_call>{"name": "who", "arguments": {}}</tool_call> end <',
        ),
        Case(
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call> Done.',
            " Done.",
            (ADDED,),
        ),
        Case(
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        ),
        Case("Plain words.\n", "Plain words.\n"),
    ),
)

QWEN_XML = Golden(
    "qwen_xml",
    chatml(
        "<tool_call>\n<function={{ tool_call.name }}>\n{% for key, value in "
        "tool_call.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>",
        primer="<think>\n",
    ),
    chatml_prompt(
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        primer="<think>\n",
    ),
    (
        Case(
            "Sum them.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
            "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
            "\n\n",
            (ADDED,),
            "Sum them.\n",
        ),
        Case(
            "</think><tool_call><function=files.read-x><parameter=path>\n    if a < b:\n        c\n"
            "</parameter>\n<parameter=zip> 007 </parameter>\n<parameter=limit>7</parameter>"
            '<parameter=note>null</parameter><parameter=where>{"a": [1]}</parameter>'
            "<parameter=free>[1, 2]</parameter></function></tool_call>\n",
            "",
            (
                (
                    "files.read-x",
                    {
                        "path": "    if a < b:\n        c",
                        "zip": "007",
                        "limit": 7,
                        "note": "null",
                        "where": {"a": [1]},
                        "free": [1, 2],
                    },
                ),
            ),
        ),
        Case(
            "</think><function=add>\n<parameter=a>1</parameter>\n<parameter=b>2</parameter>\n"
            "</function>\n</tool_call>",
            "",
            (ADDED,),
        ),
        Case(
            "</think><tool_call><function=who></function></tool_call>",
            "<tool_call><function=who></function></tool_call>",
        ),
        Case(
            "</think><tool_call><function=files.read-x></function></tool_call>",
            "",
            (("files.read-x", {}),),
        ),
        Case("still thinking, cut", reasoning="still thinking, cut"),
    ),
    starts_open=True,
)

GLM = Golden(
    "glm",
    chatml(
        "<tool_call>{{ tool_call.name }}\n{% for key, value in tool_call.arguments | items %}"
        "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    chatml_prompt(
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ),
    (
        Case(
            "Sure.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>add</tool_call>",
            "Sure.",
            (ADDED, ("add", {})),
        ),
        Case(
            "<tool_call>files.read-x<arg_key>zip</arg_key><arg_value>007</arg_value>"
            "<arg_key>path</arg_key><arg_value><a> & </b></arg_value></tool_call>",
            "",
            (("files.read-x", {"zip": "007", "path": "<a> & </b>"}),),
        ),
        Case(
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value> and "
            "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value> and "
            "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        ),
    ),
)

MINICPM = Golden(
    "minicpm",
    chatml(
        '<function name="{{ tool_call.name }}">{% for key, value in tool_call.arguments | items %}'
        '<param name="{{ key }}">{{ value }}</param>{% endfor %}</function>'
    ),
    chatml_prompt(
        '<function name="add"><param name="a">1</param><param name="b">2</param></function>'
    ),
    (
        Case(
            '<function name="add"><param name="a">1</param><param name="b">2</param></function>\n'
            "<function name='files.read-x'>\n<param name=\"path\"><![CDATA[if a < b: </param>]]>"
            '</param>\n<param name="zip">a &lt; b</param></function>',
            "",
            (ADDED, ("files.read-x", {"path": "if a < b: </param>", "zip": "a < b"})),
        ),
        Case(
            '<function name="add"><param name="">1</param></function> x',
            '<function name="add"><param name="">1</param></function> x',
        ),
        Case(
            '<tool_call><function name="add"><param name="a">1</param><param name="b">2</param>'
            "</function></tool_call>",
            "",
            (ADDED,),
        ),
    ),
)

GENERIC = Golden(
    "generic",
    chatml("{{ tool_call | tojson }}"),
    chatml_prompt('{"name": "add", "arguments": {"a": 1, "b": 2}}'),
    (
        Case('{"name": "add", "arguments": {"a": 1, "b": 2}}', "", (ADDED,)),
        Case(
            '```json\n{"function": {"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}\n```',
            "",
            (ADDED,),
        ),
        Case('{"name": "add"}', '{"name": "add"}'),
        Case('{"name": "who", "arguments": {}}', '{"name": "who", "arguments": {}}'),
        Case('{"city": "Seoul", "arguments": {}}', '{"city": "Seoul", "arguments": {}}'),
        Case('```python\nprint({"name": 1})\n```', '```python\nprint({"name": 1})\n```'),
        Case('Here: {"name": "add", "arguments": {}}', 'Here: {"name": "add", "arguments": {}}'),
    ),
)

BLOCKS = (HERMES, QWEN_XML, GLM, MINICPM, GENERIC)
