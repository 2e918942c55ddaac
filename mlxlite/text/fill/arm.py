"""Whether a request is filled, and with what (floor 1, column "text"; spec 50 sections 2 and 9).

`prepare` asks once for each request, in its pool, and then for a guide for each of its rows. What
is refused is refused without a word: the answer is the same, but for `usage.fill`. The clauses of
section 9 that speak of a lane of its own do not hold here: a filled row shares its steps with all
others, and the engine declines a run that its caches cannot take (decision D6).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxlite.config import Settings
from mlxlite.text.channels import THINK_TAGS, Thinking
from mlxlite.text.fill.compiler import ToolFacts, compile_plan
from mlxlite.text.fill.echo import PromptIndex
from mlxlite.text.fill.guard import Guard
from mlxlite.text.fill.guide import FillGuide
from mlxlite.text.fill.plan import EMPTY, EchoConfig, FillPlan, StrictPlan
from mlxlite.text.fill.plans import Plans, plan_key
from mlxlite.text.fill.probes import Probes, Spoken
from mlxlite.text.fill.session import Session
from mlxlite.text.fill.trace import Trace
from mlxlite.text.guides import TextGuide
from mlxlite.text.messages import typed_tool_schemas
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.text.tools.format import Tools
from mlxlite.text.tools.strict import markup_of, spoken_of
from mlxlite.types import JSON, Ask

log = logging.getLogger(__name__)

MakeGuide = Callable[[TextGuide | None, int], FillGuide]
"""Makes the guide of one more row, with a session and a guard of its own. Takes what else is
decided on text, if anything, and the most tokens of the answer."""

_TAIL_TOKENS = 16  # of a prompt; more than any primer that opens a thought


class Fill:
    """Fill for one model. family: of its calls, by name. thinking: how it marks it. vocab_size: ids
    from there on are not the model's."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        family: str,
        thinking: Thinking | None,
        vocab_size: int,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._template = template
        self._markup = markup_of(family)
        self._spoken = spoken_of(family)
        self._thinking = thinking or THINK_TAGS
        self._vocab_size = vocab_size
        self._plans = Plans()
        self._trace = Trace.of(
            settings.fill_trace, lambda ids: tokenizer.decode(ids, keep_special=True)
        )

    def arm(
        self,
        ask: Ask,
        options: Mapping[str, JSON],
        prompt_ids: Sequence[int],
    ) -> MakeGuide | None:
        """What makes the guides of a request's rows; None: they are not filled.

        options: of the template. The first request with these tools waits for their rows.
        """
        settings = self._settings
        if settings.fill == "off" or not ask.tools or _is_refused(ask):
            return None
        strict = self._plan(ask, options)
        if ask.thinking_budget is not None:
            # Where a thought may be cut short, no run may lead across that point: a guard allows
            # nothing before the thought's end.
            rows = strict.rows if self._markup else ()
            strict = replace(strict, rows=tuple(replace(row, may_check=False) for row in rows))
        echo = indexed = None
        if settings.fill == "echo" and ask.thinking_budget is None:
            echo = EchoConfig(settings.fill_k, settings.fill_candidates, settings.fill_index_max)
            indexed = PromptIndex(prompt_ids, echo.k, echo.index_max)
        elif not strict.rows:
            return None
        plan = FillPlan(strict, echo, self._tokenizer.eos_ids, settings.fill_max_span)
        end = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], keep_special=True).rstrip()
        starts_open = end.endswith(self._thinking.opening.strip())

        def make(text: TextGuide | None, limit: int) -> FillGuide:
            guard = self._guard(ask.tools, starts_open) if strict.rows and self._markup else None
            session = Session(plan, prompt_ids, guard, indexed=indexed)
            return FillGuide(
                text, session, limit, self._trace, chunk=settings.fill_append_chunk_size
            )

        return make

    def _guard(self, tools: Sequence[Mapping[str, JSON]], starts_open: bool) -> Guard:
        assert self._markup is not None
        facts = [ToolFacts.of(tool) for tool in tools]
        return Guard(
            self._tokenizer.bytes_of,
            self._markup,
            self._thinking,
            Tools.of(tools),
            {each.name: each.required if each.is_listed else None for each in facts},
            starts_open=starts_open,
        )

    # ------------------------------------------------------------------------------------ rows

    def _plan(self, ask: Ask, options: Mapping[str, JSON]) -> StrictPlan:
        if not self._template.knows_tools:
            return EMPTY
        return self._plans.get(plan_key(options, ask.tools), lambda: self._compile(ask, options))

    def _compile(self, ask: Ask, options: Mapping[str, JSON]) -> StrictPlan:
        tools = typed_tool_schemas(ask.tools)

        def render(messages: Sequence[dict[str, Any]], is_prompt: bool) -> str:
            return self._template.render(
                messages, tools=tools, add_generation_prompt=is_prompt, options=options
            )

        began = time.perf_counter()
        specials = [self._tokenizer.token_text(token) for token in self._tokenizer.special_ids]
        facts = [ToolFacts.of(tool) for tool in ask.tools]
        thought = self._thinking.opening.strip()

        def probes() -> Probes | Spoken:
            if self._spoken is not None:
                return Spoken(self._encode, *self._spoken)
            return Probes(render, self._encode, self._tokenizer.bos_id, specials, thought)

        plan = compile_plan(probes, facts, self._tokenizer.bytes_of, self._markup)
        log.debug(
            "fill: %d rows for %d tools, %.0f ms",
            len(plan.rows),
            len(facts),
            (time.perf_counter() - began) * 1000,
        )
        return plan

    def _encode(self, text: str) -> list[int]:
        """As a prompt is encoded; raises ValueError for what the model has no row for."""
        ids = self._tokenizer.encode(text)
        bos = self._tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if max(ids, default=0) >= self._vocab_size:
            raise ValueError("the tokenizer gives an id that the model does not have")
        return ids


def _is_refused(ask: Ask) -> bool:
    """Whether a request asks for what a token that is put in does not have: a draw, a
    distribution; or for a form. Raw text has no calls."""
    return (
        ask.messages is None
        or ask.seed is not None
        or ask.top_logprobs is not None
        or ask.constraint is not None
        or ask.has_format
        or ask.forced_call is not None
    )
