"""Where a model's thinking is, in its text (floor 1, column "text"; spec 30 sections 3, 10).

Three ways to mark it:

    think tags   <think>Let me see.</think>\\n\\nIt is 4.
    Gemma 4      <|channel>thought\\nLet me see.<channel|>It is 4.
    Harmony      <|channel|>analysis<|message|>Let me see.<|end|> ...   (see tools/harmony)

Think tags are text like any other: they are split last, after the stop strings were looked for.
Channels are made of special tokens; the router reads them as blocks, so that no stop string and no
tool call can be found in their markup.

Nothing is trimmed: a line end after a closing tag is content.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxlite.text.tools.format import Format, Kind, Markers, Reader, Reading
from mlxlite.text.tools.harmony import ANSWER, Harmony

# ------------------------------------------------------------------------------------ think tags


class ThinkTags:
    """Splits text at think tags. is_inside: the side that the next text belongs to."""

    def __init__(self, opening: str, closing: str, starts_open: bool = False) -> None:
        self._opening, self._closing = Markers(opening), Markers(closing)
        self._held = ""
        self.is_inside = starts_open

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Takes the next text; returns (is reasoning, text) in order, tags removed."""
        out: list[tuple[bool, str]] = []
        text = self._held + text
        at = 0
        while True:
            tag = self._closing if self.is_inside else self._opening
            found = tag.search(text, at)
            end = found.start() if found else len(text) - tag.tail(text, at)
            if end > at:
                out.append((self.is_inside, text[at:end]))
            if found is None:
                self._held = text[end:]
                return out
            at = found.end()
            self.is_inside = not self.is_inside

    def flush(self) -> list[tuple[bool, str]]:
        """What was held for a tag that did not come, on the side where it stands."""
        held, self._held = self._held, ""
        return [(self.is_inside, held)] if held else []


# ------------------------------------------------------------------------------- Gemma's channel


class GemmaChannel:
    """Gemma 4's reasoning channel (spec 30 section 3).

    The channel's name is dropped, up to the first line end, which is the first character of the
    reasoning. A channel without a line end says nothing.
    """

    openers = ("<|channel>",)
    starters = ()
    markers = ("<|channel>", "<channel|>")

    _end = Markers("<channel|>")
    _name_end = Markers("\n", "<channel|>")

    def read(self, r: Reader, opener: str) -> Reading[None]:
        r.is_reasoning = True
        r.spend()
        while True:  # the name is not kept, however long it becomes
            found = self._name_end.search(r.text, r.at)
            end = found.start() if found else len(r.text) - self._name_end.tail(r.text, r.at)
            r.take((len(r.text) if r.ended and not found else end) - r.at)
            r.spend()
            if found or r.ended:
                break
            yield
        yield from r.stream(Kind.REASONING, self._end)
        if (yield from r.starts(self._end)):
            r.take(len("<channel|>"))
        r.spend()


# ------------------------------------------------------------------------------- what a model has


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its thinking.

    opening: what a prompt ends with that has opened it. closing: the markup that ends it, as the
    model would write it after a thought cut short (decision D10). channel: the format, where it is
    no pair of think tags.
    """

    opening: str
    closing: str
    channel: Format | None = None


THINK_TAGS = Thinking("<think>", "\n</think>\n\n")
BRACKET_TAGS = Thinking("[THINK]", "\n[/THINK]")  # Mistral's reasoning models
GEMMA = Thinking("<|channel>thought\n", "\n<channel|>", GemmaChannel())
FINAL_CHANNEL = "<|channel|>final<|message|>"  # what Harmony's answers begin with
HARMONY = Thinking(
    "<|channel|>analysis<|message|>",
    f"<|end|>{ANSWER}{FINAL_CHANNEL}",
    Harmony(),
)


def thinking_of(template_source: str, model_type: str = "") -> Thinking | None:
    """How a model marks its thinking, by the text of its chat template; None if it does not."""
    if model_type == "gpt_oss" or "<|channel|>" in template_source:
        return HARMONY
    if model_type.startswith("gemma4") or "<|channel>" in template_source:
        return GEMMA
    if "<think>" in template_source or "</think>" in template_source:
        return THINK_TAGS
    if "[THINK]" in template_source:
        return BRACKET_TAGS
    return None
