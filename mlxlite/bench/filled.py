"""What fill saves in a turn of two calls: decode steps, with the same ids (spec 50; floor 4).

One engine, two preparations: without fill and with it. The answers are greedy, so their ids must be
the same; what differs is how many steps the engine made of them, by its own count. The conversation
shows two such turns, which even the default model goes on with; its template knows no tools, so one
in the way of Hermes is used.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxlite import app, launch
from mlxlite.config import Settings
from mlxlite.models import library
from mlxlite.prepare import Preparation
from mlxlite.text.fill.guide import FillGuide
from mlxlite.types import JSON, Ask, Event

if TYPE_CHECKING:
    from mlxlite.engine.worker import Worker

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}A call is written as
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' if not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TOKENS = 120
_TURNS = 3


def _tool(name: str, key: str, about: str) -> dict[str, JSON]:
    schema = {
        "type": "object",
        "properties": {key: {"type": "string"}},
        "required": [key],
        "additionalProperties": False,
    }
    function = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("get_current_weather", "location", "The weather in a town."),
    _tool("convert_temperature_unit", "expression", "Celsius to Fahrenheit."),
)


def conversation() -> list[dict[str, JSON]]:
    """Turns of two calls each, and a question that asks for the next one."""
    messages: list[dict[str, JSON]] = []
    for town, degrees in (("London", 12), ("Madrid", 25), ("Berlin", 9)):
        messages += [
            {"role": "user", "content": f"What is the weather in {town}? Convert {degrees} C too."},
            {"role": "assistant", "content": "", "tool_calls": _calls(town, degrees)},
            {"role": "tool", "content": f"{degrees} C, {degrees * 9 / 5 + 32:g} F"},
            {"role": "assistant", "content": f"It is {degrees} C in {town}."},
        ]
    question = "What is the weather in Paris? Convert 18 C too."
    return [*messages, {"role": "user", "content": question}]


def _calls(town: str, degrees: int) -> list[dict[str, JSON]]:
    arguments = ({"location": town}, {"expression": f"{degrees} C"})
    return [
        {
            "id": f"{town}{n}",
            "type": "function",
            "function": {"name": tool["function"]["name"], "arguments": given},
        }
        for n, (tool, given) in enumerate(zip(TOOLS, arguments, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """steps, seconds: of the engine, from the submission of the row to its end. fill: what was
    filled, None if nothing could be."""

    ids: tuple[int, ...]
    text: str
    steps: int
    seconds: float
    fill: Mapping[str, JSON] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The turn without fill and with it."""

    plain: Answer
    filled: Answer

    @property
    def is_same(self) -> bool:
        return self.plain.ids == self.filled.ids

    @property
    def share(self) -> float:
        """Of the decode steps, those that were saved."""
        return 1 - self.filled.steps / self.plain.steps

    @property
    def time_share(self) -> float:
        return self.filled.seconds / self.plain.seconds

    def __str__(self) -> str:
        return (
            f"two calls: {self.plain.steps} decode steps, {self.filled.steps} with fill "
            f"({self.share:.0%} fewer), {self.time_share:.2f} of the time, ids "
            f"{'the same' if self.is_same else 'NOT the same'}"
        )


def measure(settings: Settings, model: library.LocalModel, *, mode: str = "strict") -> Found:
    """Ask one engine for the turn without fill and with it. mode: of the fill."""
    worker = launch.start_engine(settings, model)
    try:
        plain = app.open_model(replace(settings, fill="off", chat_template=TEMPLATE), worker)
        filled = app.open_model(replace(settings, fill=mode, chat_template=TEMPLATE), worker)
        messages = tuple(conversation())
        ask = Ask(messages=messages, tools=TOOLS, temperature=0.0, max_tokens=_TOKENS)
        found = []
        for turn in range(_TURNS + 1):
            pair = Found(answer(worker, plain, ask), answer(worker, filled, ask))
            if turn:  # the first one fills the prompt cache
                found.append(pair)
        return sorted(found, key=lambda pair: pair.time_share)[_TURNS // 2]
    finally:
        worker.stop()


def answer(worker: Worker, prepare: Preparation, ask: Ask) -> Answer:
    """Run one row alone to its end. Raises what it ended with."""
    (found,) = answers(worker, [prepare], ask)
    return found


def answers(worker: Worker, prepares: Sequence[Preparation], ask: Ask) -> list[Answer]:
    """Run a row for each preparation, all at once; each tells the steps of all. Raises what a row
    ended with."""
    before = worker.stats()["decode_steps"]
    forms = [prepare.constrain(ask) if ask.constraint else None for prepare in prepares]
    specs = [prepare(ask, form).spec for prepare, form in zip(prepares, forms, strict=True)]
    started = time.perf_counter()
    events: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in specs]
    for spec, each in zip(specs, events, strict=True):
        worker.submit(spec, each.put)
    ended = [_ids(each) for each in events]
    seconds = time.perf_counter() - started
    steps = worker.stats()["decode_steps"] - before
    found = []
    for prepare, spec, ids in zip(prepares, specs, ended, strict=True):
        guide = spec.guide
        fill = guide.counters.render() if isinstance(guide, FillGuide) else None
        found.append(
            Answer(ids, prepare.tokenizer.decode(ids, keep_special=True), steps, seconds, fill)
        )
    return found


def _ids(events: queue.SimpleQueue[Event]) -> tuple[int, ...]:
    ids: list[int] = []
    while True:
        event = events.get()
        ids += event.ids
        if event.done is None:
            continue
        if event.done.error is not None:
            raise event.done.error
        return tuple(ids)
