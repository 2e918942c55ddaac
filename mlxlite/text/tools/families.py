"""Which family a model speaks, told by its chat template (spec 30 section 7).

A template that was trained with tools writes the model's own markup, so its text tells the format:
the first row of the table whose words it holds. The order matters where one family's words occur in
another's template: GLM, Qwen3-Coder and Kimi all have something called `tool_call`.

A template that shows nothing gets the generic format: `<tool_call>` blocks and bare envelopes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxlite.text.tools import (
    deepseek,
    functiongemma,
    gemma4,
    glm,
    harmony,
    hermes,
    kimi,
    llama3,
    minicpm,
    minimax,
    mistral,
    pythonic,
    qwen_xml,
)
from mlxlite.text.tools.deepseek import DeepSeek
from mlxlite.text.tools.format import Format, Tools
from mlxlite.text.tools.functiongemma import FunctionGemma
from mlxlite.text.tools.gemma4 import Gemma4
from mlxlite.text.tools.generic import Generic
from mlxlite.text.tools.harmony import Harmony
from mlxlite.text.tools.kimi import Kimi
from mlxlite.text.tools.llama3 import Llama3
from mlxlite.text.tools.minimax import MiniMax
from mlxlite.text.tools.mistral import Mistral
from mlxlite.text.tools.pythonic import Llama4, Pythonic
from mlxlite.text.tools.watched import Watched
from mlxlite.text.tools.writing import Writing
from mlxlite.types import JSON


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: the template holds all of `words`, or the model type begins so.

    writing: how its calls are written. other: a word, and how they are where the template holds it.
    """

    name: str
    make: Callable[[], Format]
    writing: Writing
    words: tuple[str, ...]
    model_type: str = ""
    other: tuple[str, Writing] | None = None

    def fits(self, template_source: str, model_type: str) -> bool:
        if self.model_type and model_type.startswith(self.model_type):
            return True
        return bool(self.words) and all(word in template_source for word in self.words)

    def writing_in(self, template_source: str) -> Writing:
        """The writing that a template shows."""
        if self.other is not None and self.other[0] in template_source:
            return self.other[1]
        return self.writing

    def watched(self, writing: Writing, names: Sequence[str]) -> Format:
        """The format whose blocks open only where a grammar of this writing begins, for a request
        with tools of these names: what no grammar saw is no call."""
        if self.make is Harmony:
            return Harmony(harmony.HEADS)
        return Watched(self.make(), writing.openers, writing.starters(names))


FAMILIES = (
    Family("minimax", MiniMax, minimax.WRITING, ("<minimax:tool_call>",)),
    Family("gemma4", Gemma4, gemma4.WRITING, ("<|tool_call>", "<tool_call|>"), "gemma4"),
    Family("functiongemma", FunctionGemma, functiongemma.WRITING, ("<start_function_call>",)),
    Family("harmony", Harmony, harmony.WRITING, ("<|channel|>", "<|message|>"), "gpt_oss"),
    Family("glm", Generic, glm.WRITING, ("<arg_key>",)),
    Family("pythonic", Pythonic, pythonic.WRITING, ("<|tool_list_start|>",)),
    Family("pythonic", Pythonic, pythonic.WRITING, ("<|tool_call_start|>",)),
    Family("qwen_xml", Generic, qwen_xml.WRITING, ("<tool_call>", "<function=")),
    Family("kimi", Kimi, kimi.WRITING, ("<|tool_calls_section_begin|>",)),
    Family(
        "deepseek",
        DeepSeek,
        deepseek.WRITING,
        ("<｜tool▁call▁begin｜>",),
        other=("```json", deepseek.WRITING_FENCED),
    ),
    Family("minicpm", Generic, minicpm.WRITING, ('<function name="', '<param name="')),
    Family(
        "mistral",
        Mistral,
        mistral.WRITING_OF_LISTS,
        ("[TOOL_CALLS]",),
        other=("[ARGS]", mistral.WRITING),
    ),
    Family("hermes", Generic, hermes.WRITING, ("<tool_call>",)),
    Family("llama4", Llama4, pythonic.WRITING_BARE, ("<|python_start|>",), "llama4"),
    Family("llama4", Llama4, pythonic.WRITING_BARE, ("<|header_start|>",)),
    Family("llama3", Llama3, llama3.WRITING, ("<|start_header_id|>", "parameters")),
    Family("llama3", Llama3, llama3.WRITING, ("<|python_tag|>",)),
)
_GENERIC = Family("generic", Generic, hermes.WRITING, ())


@dataclass(frozen=True, slots=True)
class ToolRouting:
    """How the calls of one request are found: the family's format and the request's tools."""

    family: str
    format: Format
    tools: Tools


def family_of(template_source: str, model_type: str = "") -> Family:
    """The family that a model speaks; `generic` if nothing tells."""
    fitting = (family for family in FAMILIES if family.fits(template_source, model_type))
    return next(fitting, _GENERIC)


def route(
    template_source: str,
    model_type: str,
    tools: Sequence[Mapping[str, JSON]],
    *,
    is_watched: bool = False,
) -> ToolRouting | None:
    """The routing for a request's tools (OpenAI's shape), or None without any function.

    is_watched: calls follow a grammar (`Family.watched`).
    """
    known = Tools.of(tools)
    if not known.schemas:
        return None
    family = family_of(template_source, model_type)
    if is_watched:
        writing = family.writing_in(template_source)
        return ToolRouting(family.name, family.watched(writing, tuple(known.schemas)), known)
    return ToolRouting(family.name, family.make(), known)
