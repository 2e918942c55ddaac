"""Messages to the text that a model was trained on (floor 1, column "text"; spec 10 sections 1, 7).

`prepare` normalises a request's messages and renders them here, in its pool: a render is pure
Python of a few milliseconds and must stay off the event loop. The template came with the model and
is not trusted; `sandbox` bounds what it may do.

Invariants:
- An option that nobody set is not passed: the template's own default applies (spec 10 section 1).
- Whatever a template does, the client gets text or a BadRequest that quotes the template's own
  words, never a 500.
- Messages that a template takes are rendered untouched. Only if it refuses them (roles must
  alternate, no system role: F31, F32) or silently drops a system text (F33), repairs are tried in a
  fixed order.

State: the compiled program and the name of the last repair that worked. Any thread may render.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlxlite.errors import BadRequest, ModelError
from mlxlite.text.folder import read_object, read_text, special_tokens
from mlxlite.text.messages import Message, fold_system, gather_system, merge_neighbours
from mlxlite.text.sandbox import (
    OUTPUT_LIMIT_CHARS,
    RENDER_LIMIT_S,
    OverLimit,
    Refused,
    Run,
    Sandbox,
    TemplateFault,
)

ThinkingFormat = Literal["think-tag", "gemma-channel"]
Repair = Callable[[Sequence[Message]], list[Message]]

_QUOTE_CHARS = 500  # of a template's own message, in ours

# From the least change to the greatest; each keeps every word that the client sent.
REPAIRS: dict[str, Repair] = {
    "merge": merge_neighbours,
    "gather": gather_system,
    "gather+merge": lambda messages: merge_neighbours(gather_system(messages)),
    "fold": fold_system,
    "fold+merge": lambda messages: merge_neighbours(fold_system(messages)),
}


class ChatTemplate:
    """The chat template of one model, compiled once.

    source: Jinja text, or None for a model without one: such a template only refuses.
    tool_source: the variant for requests with tools, where a model has two.
    tokens: further named special tokens that a template may print, e.g. {"unk_token": "<unk>"}.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        limit_s: float = RENDER_LIMIT_S,
        limit_chars: int = OUTPUT_LIMIT_CHARS,
    ) -> None:
        self.source = source or ""
        self.tool_source = tool_source or self.source  # what a request with tools is rendered by
        self.has_template = source is not None
        self._limits = (limit_s, limit_chars)
        named = {**(tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {key: text for key, text in named.items() if text is not None}
        self._program = _compiled(source)
        self._tool_program = self._program if tool_source is None else _compiled(tool_source)
        self._last_repair: str | None = None

        # What the template can do, by its text (spec 10 section 1.1).
        text = self.all_source = self.source + (tool_source or "")
        self.knows_tools = "tools" in text
        self.thinking_format: ThinkingFormat | None = None
        if "enable_thinking" in text:
            if "<think>" in text:
                self.thinking_format = "think-tag"
            elif "<|channel>" in text:
                self.thinking_format = "gemma-channel"
        self.supports_thinking = self.thinking_format is not None
        self.reads_reasoning_effort = "reasoning_effort" in text
        self.reads_preserve_thinking = "preserve_thinking" in text
        # Quoted: as the value of a role, not as a word in a system prompt.
        self.knows_developer = "'developer'" in text or '"developer"' in text

    @classmethod
    def load(cls, folder: str | Path, override: str | None = None) -> ChatTemplate:
        """The template in a model folder. override: template text, or the path of a file of it.

        Looked for in `chat_template.jinja`, `tokenizer_config.json` and `chat_template.json`; as
        in transformers, the file of its own wins.
        """
        folder = Path(folder)
        named = _from_override(override) if override else _from_folder(folder)
        texts = special_tokens(folder)
        try:
            return cls(
                named.get("default"),
                tool_source=named.get("tool_use"),
                bos_token=texts.pop("bos_token", None),
                eos_token=texts.pop("eos_token", None),
                tokens=texts,
            )
        except ModelError as exc:
            raise ModelError(f"{override or folder}: {exc.message}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for messages as `normalise_messages` makes them.

        options: variables for the template (`enable_thinking`, ...); None values are not passed.
        Raises BadRequest, quoting what the template said to the messages as they came.
        """
        program = self._tool_program if tools else self._program
        if program is None:
            raise BadRequest(
                "this model has no chat template: send a plain prompt to /v1/completions, "
                "or start the server with a template of your own (--chat-template)",
                param="messages",
            )
        variables = {key: value for key, value in (options or {}).items() if value is not None}
        variables.update(
            self._tokens,
            tools=list(tools) if tools else None,
            documents=variables.get("documents"),
            add_generation_prompt=add_generation_prompt,
        )

        def run(turns: Sequence[Message]) -> str:
            variables["messages"] = list(turns)
            return program(variables, *self._limits)

        text: str | None = None
        refusal: TemplateFault | None = None
        try:
            text = run(messages)
            if not _drops_system(messages, text):
                return text
        except Refused as exc:
            refusal = exc
        except TemplateFault as exc:  # no other messages would mend a fault of the template
            raise _failed(exc) from None

        repaired = self._repaired(messages, run)
        if repaired is not None:
            return repaired
        if text is None:
            assert refusal is not None
            raise _failed(refusal)
        return text

    def _repaired(
        self, messages: Sequence[Message], run: Callable[[Sequence[Message]], str]
    ) -> str | None:
        """The text of the first repair that the template takes, or None.

        The repair that worked last goes first: without it a strict template would be run several
        times in each request.
        """
        last = self._last_repair
        tried: list[list[Message]] = [list(messages)]
        for name in [last, *REPAIRS] if last is not None else list(REPAIRS):
            turns = REPAIRS[name](messages)
            if turns in tried:
                continue
            tried.append(turns)
            try:
                text = run(turns)
            except OverLimit as exc:
                raise _failed(exc) from None
            except TemplateFault:  # it refused these as well
                continue
            if not _drops_system(messages, text):
                self._last_repair = name
                return text
        return None


def open_think(rendered: str, messages: Sequence[Message] = ()) -> bool:
    """True if a prompt ends inside an open think block, so that the answer begins as reasoning.

    Spec 10 section 7.4: the last `<think>` comes after the last `</think>`. Where a message speaks
    of the tag itself ("what does <think> mean?") that proves nothing; then only a prompt that ends
    with the tag counts.
    """
    if rendered.rstrip().endswith("<think>"):
        return True
    if any("<think>" in message["content"] for message in messages):
        return False
    return rendered.rfind("<think>") > rendered.rfind("</think>")


def _drops_system(messages: Sequence[Message], text: str) -> bool:
    """True if the text of a system message does not appear in a rendered prompt (F33).

    Some templates skip roles they do not know without a word. Only for templates that print
    messages as they are; one that changes them fails this for its repairs too, and stays as it was.
    """
    for message in messages:
        if message["role"] in ("system", "developer"):
            words = message["content"].strip()
            if words and words not in text:
                return True
    return False


def _failed(fault: TemplateFault) -> BadRequest:
    """A template's fault as an answer to the client."""
    reason = str(fault)
    if len(reason) > _QUOTE_CHARS:
        reason = reason[:_QUOTE_CHARS] + "..."
    return BadRequest(f"prompt build failed: {reason}", param="messages")


# ------------------------------------------------------------------------------------- loading


def _compiled(source: str | None) -> Run | None:
    if source is None:
        return None
    try:
        return Sandbox().program(source)
    except TemplateFault as exc:
        raise ModelError(f"the chat template does not compile: {exc}") from None


def _from_override(override: str) -> dict[str, str]:
    if "{" in override:
        return {"default": override}
    text = read_text(Path(override).expanduser())
    if text is None:
        raise ModelError(f"{override}: no such chat template file")
    return {"default": text}


def _from_folder(folder: Path) -> dict[str, str]:
    """The templates of a model by name; most have one, called "default"."""
    text = read_text(folder / "chat_template.jinja")
    if text is not None:
        tool_text = read_text(folder / "additional_chat_templates" / "tool_use.jinja")
        return {"default": text} if tool_text is None else {"default": text, "tool_use": tool_text}
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = (read_object(folder / name) or {}).get("chat_template")
        if value is None:
            continue
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            value = {item.get("name"): item.get("template") for item in value if type(item) is dict}
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            shown = json.dumps(value)[:60]
            raise ModelError(f"{folder / name}: chat_template is {shown}, expected a string")
        if value:
            # Without a default any other is better than none.
            return {**value, "default": value.get("default", next(iter(value.values())))}
    return {}
