"""Which family a model speaks, told by its chat template (spec 30 section 7).

A template that was trained with tools writes the model's own markup, so its text tells the format:
the first row of the table whose words it holds. The order matters where one family's words occur in
another's template: GLM, Qwen3-Coder and Kimi all have something called `tool_call`.

A template that shows nothing gets the generic format: `<tool_call>` blocks and bare envelopes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from mlxlite.types import JSON


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: the template holds all of `words`, or the model type begins so."""

    name: str
    make: Callable[[], Format]
    words: tuple[str, ...]
    model_type: str = ""

    def fits(self, template_source: str, model_type: str) -> bool:
        if self.model_type and model_type.startswith(self.model_type):
            return True
        return bool(self.words) and all(word in template_source for word in self.words)


FAMILIES = (
    Family("minimax", MiniMax, ("<minimax:tool_call>",)),
    Family("gemma4", Gemma4, ("<|tool_call>", "<tool_call|>"), "gemma4"),
    Family("functiongemma", FunctionGemma, ("<start_function_call>",)),
    Family("harmony", Harmony, ("<|channel|>", "<|message|>"), "gpt_oss"),
    Family("glm", Generic, ("<arg_key>",)),
    Family("pythonic", Pythonic, ("<|tool_list_start|>",)),
    Family("pythonic", Pythonic, ("<|tool_call_start|>",)),
    Family("qwen_xml", Generic, ("<tool_call>", "<function=")),
    Family("kimi", Kimi, ("<|tool_calls_section_begin|>",)),
    Family("deepseek", DeepSeek, ("<｜tool▁call▁begin｜>",)),
    Family("minicpm", Generic, ('<function name="', '<param name="')),
    Family("mistral", Mistral, ("[TOOL_CALLS]",)),
    Family("hermes", Generic, ("<tool_call>",)),
    Family("llama4", Llama4, ("<|python_start|>",), "llama4"),
    Family("llama4", Llama4, ("<|header_start|>",)),
    Family("llama3", Llama3, ("<|start_header_id|>", "parameters")),
    Family("llama3", Llama3, ("<|python_tag|>",)),
)
_GENERIC = Family("generic", Generic, ())


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
    template_source: str, model_type: str, tools: Sequence[Mapping[str, JSON]]
) -> ToolRouting | None:
    """The routing for a request's tools (OpenAI's shape), or None without any function."""
    known = Tools.of(tools)
    if not known.schemas:
        return None
    family = family_of(template_source, model_type)
    return ToolRouting(family.name, family.make(), known)
