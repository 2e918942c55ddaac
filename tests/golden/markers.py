"""Golden tables, second half: families with markers of their own, most of them special tokens."""

from __future__ import annotations

from tests.golden.shapes import ADDED, BLOCKS, SHOWN, Case, Golden, chatml, chatml_prompt

_ITEMS = "{% for key, value in tool_call.arguments | items %}"

GEMMA4 = Golden(
    "gemma4",
    chatml(
        "<|tool_call>call:{{ tool_call.name }}{{ '{' }}"
        + _ITEMS
        + "{{ ',' if not loop.first }}{{ key }}:{{ value }}{% endfor %}}<tool_call|>"
    ),
    chatml_prompt("<|tool_call>call:add{a:1,b:2}<tool_call|>"),
    (
        Case("<|tool_call>call:add{a:1,b:2}<tool_call|>", "", (ADDED,)),
        Case(
            "<|channel>thought\nSum them.<channel|>Ok.<|tool_call>call:files.read-x{path:"
            '<|"|>a {b}, "c":\nd<|"|>,where:{deep:{x:[1,true,null]}}}call:add{}<tool_call|>',
            "Ok.",
            (
                (
                    "files.read-x",
                    {"path": 'a {b}, "c":\nd', "where": {"deep": {"x": [1, True, None]}}},
                ),
                ("add", {}),
            ),
            "\nSum them.",
        ),
        Case(
            '<|tool_call>call:files.read-x{path:<|"|>cut', "", (("files.read-x", {"path": "cut"}),)
        ),
        Case("<|channel>thought\n<channel|>Hello.", "Hello.", (), "\n"),
        Case("<|channel>thought\ncut at", reasoning="\ncut at"),
        Case(
            "<|tool_call>call:who{}<tool_call|> and <|tool_call>call:add{a:}<tool_call|>",
            "<|tool_call>call:who{}<tool_call|> and <|tool_call>call:add{a:}<tool_call|>",
        ),
    ),
    ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "gemma4_text",
)

FUNCTION_GEMMA = Golden(
    "functiongemma",
    chatml(
        "<start_function_call>call:{{ tool_call.name }}{{ '{' }}"
        + _ITEMS
        + "{{ ',' if not loop.first }}{{ key }}:{{ value }}{% endfor %}}<end_function_call>"
    ),
    chatml_prompt("<start_function_call>call:add{a:1,b:2}<end_function_call>"),
    (
        Case("<start_function_call>call:add{a:1,b:2}<end_function_call>", "", (ADDED,)),
        Case(
            "<start_function_call>call:files.read-x{path:<escape>it's, {b<escape>,"
            "where:{a:{b:1}},zip:Seoul}<end_function_call>",
            "",
            (("files.read-x", {"path": "it's, {b", "where": {"a": {"b": 1}}, "zip": "Seoul"}),),
        ),
        Case(
            "<start_function_call>add(1)<end_function_call>",
            "<start_function_call>add(1)<end_function_call>",
        ),
    ),
    ("<start_function_call>", "<end_function_call>", "<escape>"),
)

MISTRAL = Golden(
    "mistral",
    chatml("[TOOL_CALLS]{{ tool_call.name }}[ARGS]{{ tool_call.arguments | tojson }}"),
    chatml_prompt('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    (
        Case('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', "", (ADDED,)),
        Case(
            'Two:[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]files.read-x[CALL_ID]x1[ARGS]'
            '{"path": "[TOOL_CALLS] \\\\d+"}',
            "Two:",
            (ADDED, ("files.read-x", {"path": "[TOOL_CALLS] \\d+"})),
        ),
        Case(
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, '
            '{"name": "add", "arguments": {}, "id": "abc"}]',
            "",
            (ADDED, ("add", {})),
        ),
        Case('[TOOL_CALLS]who[ARGS]{"a": 1}', '[TOOL_CALLS]who[ARGS]{"a": 1}'),
        Case("a[1] = b[TOOL", "a[1] = b[TOOL"),
        Case('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2} Then prose.', " Then prose.", (ADDED,)),
    ),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)

LLAMA3 = Golden(
    "llama3",
    chatml(
        '{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}',
        "<|python_tag|>",
    ),
    chatml_prompt('{"name": "add", "parameters": {"a": 1, "b": 2}}', "<|python_tag|>"),
    (
        Case('{"name": "add", "parameters": {"a": 1, "b": 2}}', "", (ADDED,)),
        Case('<|python_tag|>{"name": "add", "parameters": {}}', "", (("add", {}),)),
        Case('{"name": "add"}', '{"name": "add"}'),
        Case('{"name": "who", "parameters": {}}', '{"name": "who", "parameters": {}}'),
        Case('{"name": "add", "parameters": [1]}', '{"name": "add", "parameters": [1]}'),
        Case('It is {"name": "add", "parameters": {}}', 'It is {"name": "add", "parameters": {}}'),
    ),
    ("<|python_tag|>",),
)

KIMI = Golden(
    "kimi",
    chatml(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ tool_call.name }}:0"
        "<|tool_call_argument_begin|>{{ tool_call.arguments | tojson }}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    chatml_prompt(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    (
        Case(
            "Two.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            '<|tool_call_argument_begin|>{"a": 1, "b": 2}<|tool_call_end|><|tool_call_begin|>'
            'functions.files.read-x:1<|tool_call_argument_begin|>{"path": "a:1"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            "Two.",
            (ADDED, ("files.read-x", {"path": "a:1"})),
        ),
        Case(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.who:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.who:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ),
    (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
)

DEEPSEEK = Golden(
    "deepseek",
    chatml(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ tool_call.name }}<｜tool▁sep｜>"
        "{{ tool_call.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    chatml_prompt(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    (
        Case(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}'
            "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            (ADDED, ADDED),
        ),
    ),
    (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
)

PYTHONIC = Golden(
    "pythonic",
    chatml(
        "<|tool_call_start|>[{{ tool_call.name }}("
        + _ITEMS
        + "{{ ', ' if not loop.first }}{{ key }}={{ value }}{% endfor %})]<|tool_call_end|>"
    ),
    chatml_prompt("<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"),
    (
        Case(
            "<|tool_call_start|>[add(a=1, b=2), files.read-x(path=\"it's, a)\", zip='x', "
            "where={'a': [True, None]})]<|tool_call_end|>Wait.",
            "Wait.",
            (
                ADDED,
                ("files.read-x", {"path": "it's, a)", "zip": "x", "where": {"a": [True, None]}}),
            ),
        ),
        Case(
            "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>",
            "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>",
        ),
        Case(
            "<|tool_call_start|>[who()]<|tool_call_end|>",
            "<|tool_call_start|>[who()]<|tool_call_end|>",
        ),
    ),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
)

LLAMA4 = Golden(
    "llama4",
    chatml(
        "[{{ tool_call.name }}("
        + _ITEMS
        + "{{ ', ' if not loop.first }}{{ key }}={{ value }}{% endfor %})]",
        "<|python_start|>",
    ),
    chatml_prompt("[add(a=1, b=2)]", "<|python_start|>"),
    (
        Case("[add(a=1, b=2), add()]", "", (ADDED, ("add", {}))),
        Case("<|python_start|>[add(a=1, b=2)]<|python_end|>", "", (ADDED,)),
        Case("[1, 2, add]", "[1, 2, add]"),
        Case("[who(a=1)]", "[who(a=1)]"),
    ),
    ("<|python_start|>", "<|python_end|>"),
)

MINIMAX = Golden(
    "minimax",
    chatml(
        '<minimax:tool_call>\n<invoke name="{{ tool_call.name }}">\n'
        + _ITEMS
        + '<parameter name="{{ key }}">{{ value }}</parameter>\n{% endfor %}</invoke>\n'
        "</minimax:tool_call>"
    ),
    chatml_prompt(
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    (
        Case(
            'Two.<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
            '<parameter name="b">2</parameter>\n</invoke>\n<invoke name="files.read-x">\n'
            '<parameter name="zip">007</parameter></invoke>\n</minimax:tool_call>',
            "Two.",
            (ADDED, ("files.read-x", {"zip": "007"})),
        ),
        Case(
            "<minimax:tool_call>oops</minimax:tool_call>",
            "<minimax:tool_call>oops</minimax:tool_call>",
        ),
    ),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)

_HARMONY_CALL = (
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)
HARMONY = Golden(
    "harmony",
    "{% for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>"
    "{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.tool_calls %}{% for tool_call in message.tool_calls %}"
    "<|channel|>commentary to=functions.{{ tool_call.function.name }} <|constrain|>json<|message|>"
    "{{ tool_call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    f"<|start|>developer<|message|>{SHOWN}<|end|><|start|>user<|message|>1+2?<|end|>"
    f"<|start|>assistant{_HARMONY_CALL}<|start|>tool<|message|>3<|end|>"
    "<|start|>user<|message|>2+2?<|end|><|start|>assistant",
    (
        Case(
            f"<|channel|>analysis<|message|>Sum them.<|end|><|start|>assistant{_HARMONY_CALL}",
            "",
            (ADDED,),
            "Sum them.",
        ),
        Case(
            "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final"
            "<|message|>It is 4.",
            "It is 4.",
            (),
            "Easy.",
        ),
        Case(
            "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant to=functions.add"
            '<|channel|>commentary json<|message|>{"a": 1, "b": 2}',
            "I add.",
            (ADDED,),
        ),
        Case("<|channel|>commentary to=functions.who<|message|>{}<|call|>", "{}"),
        Case("<|channel|>final<|message|>a <b <|end", "a <b <|end"),
    ),
    (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
)

FAMILIES = (
    *BLOCKS,
    *(GEMMA4, FUNCTION_GEMMA, MISTRAL, LLAMA3, KIMI, DEEPSEEK, PYTHONIC, LLAMA4, MINIMAX, HARMONY),
)
