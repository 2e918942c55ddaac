"""From what a client wants to what the engine runs: Ask -> Prepared (floor 2, spec 10).

The only place where text meets the engine on the way in. One `Preparation` is built once the model
is known and used by every surface, so that no two can disagree about a setting. It runs in the
prepare pool: it renders and tokenises, and never touches an array.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlite import fields
from mlxlite.config import Settings
from mlxlite.constrain import Constrained, constrain, has_strict
from mlxlite.embedding import Embedding
from mlxlite.errors import BadRequest, TooLong
from mlxlite.text.channels import FINAL_CHANNEL, HARMONY, Thinking, thinking_of
from mlxlite.text.fill.arm import Fill, MakeGuide
from mlxlite.text.grammar import Grammar, Grammars
from mlxlite.text.guides import Calls, GrammarGuide, Start, TextGuide, closing_ids
from mlxlite.text.messages import Message, normalise_messages, typed_tool_schemas
from mlxlite.text.sink import Sink
from mlxlite.text.template import ChatTemplate, open_think
from mlxlite.text.tokenizer import Tokenizer, largest_id
from mlxlite.text.tools.families import family_of, route
from mlxlite.text.tools.harmony import ANSWER
from mlxlite.text.tools.watched import Watch
from mlxlite.types import JSON, Ask, Guide, ModelFacts, RowSpec, Sampling, Tone

log = logging.getLogger(__name__)

_COUNTER_STEP = 0x9E3779B9  # spec 10 section 5
_DEFAULT_TEMPERATURE = 0.7  # spec 10 section 1.2
_DEFAULT_WINDOW = 20  # spec 10 section 2
_LONGEST_PRIMER = 64  # tokens; a longer one says that the renders differ inside a message

# Models that answer without thinking unless asked (spec 10 section 1).
_THINKING_OFF = ("minicpm5", "glm_moe_dsa")
# What a template's depth variable knows, by the request's word (spec 10 section 1.1).
_PLAIN_DEPTHS = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high",
    "max": "high",
}  # fmt: skip
_DEPTHS = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh",
    "max": "xhigh",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run. spec: for the engine. make_sink: for the stream. make_guide: one more
    like the spec's, for another row.

    limit: most tokens to generate; 0 asks for an empty answer, which the engine is not bothered
    with. echo: the prompt as text, if the answer is to start with it. warnings: what of the form
    asked for is not enforced.
    """

    spec: RowSpec
    make_sink: Callable[[], Sink]
    limit: int
    echo: str | None = None
    warnings: tuple[str, ...] = ()
    make_guide: Callable[[], Guide | None] = lambda: None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """ids: at least one. boundary: how many of them every later turn keeps (spec 10 section 8)."""

    ids: list[int]
    boundary: int
    opens_thinking: bool


class Preparation:
    """tokenizer, template: of the model. facts: of the engine. defaults: generation_config.json.

    embedding: which vectors the model can give.
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        facts: ModelFacts,
        defaults: Mapping[str, JSON],
        embedding: Embedding | None = None,
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.template = template
        self.facts = facts
        self.embedding = embedding
        is_logged = settings.grammar_debug in ("on", "1")
        self.grammars = Grammars(tokenizer, facts.vocab_size, is_logged=is_logged)
        self._defaults = _sound_defaults(defaults)
        self._seeds = itertools.count(1)
        self._told_of_tools = False
        self._primers: dict[tuple[Any, ...], int] = {}  # mode -> tokens of the generation primer
        self._thinking = thinking_of(template.all_source, facts.model_type)
        family = family_of(template.tool_source, facts.model_type)
        self._writing = family.writing_in(template.tool_source)
        self._fill = Fill(
            settings, tokenizer, template, family.name, self._thinking, facts.vocab_size
        )
        newlines = tokenizer.encode("\n", add_special_tokens=False)
        self._xtc_special_ids = (*sorted(tokenizer.eos_ids), *newlines)

    def constrain(self, ask: Ask) -> Constrained:
        """Compile the form that a request asks for. Raises BadRequest. Not for the prepare pool: it
        may take seconds."""
        return constrain(ask, self.grammars, self.settings, self._writing)

    def __call__(self, ask: Ask, form: Constrained | None = None) -> Prepared:
        """Resolve a request. Raises BadRequest or TooLong; nothing has reached the engine then.

        form: what `constrain` made of the request, if it asks for one.
        """
        form = form or Constrained(ask)
        ask = form.ask
        prompt = self.prompt(ask)
        room = self.facts.max_context - len(prompt.ids)
        if room < 1:
            raise TooLong(  # agents compact their history at both of these phrases
                f"prompt is too long: it has {len(prompt.ids)} tokens, this model's maximum "
                f"context length is {self.facts.max_context} with the answer",
                param="messages" if ask.messages is not None else "prompt",
            )
        wanted = ask.max_tokens if ask.max_tokens is not None else self.settings.max_tokens
        limit = room if wanted is None else min(wanted, room)
        make_sink = self._sink_maker(ask, prompt)
        remake = self._guide_maker(form, prompt, make_sink, limit)
        spec = RowSpec(
            prompt_ids=tuple(prompt.ids),
            sampling=self.sampling(ask),
            max_tokens=max(limit, 1),
            eos_ids=self.tokenizer.eos_ids,
            guide=remake(),
            top_logprobs=ask.top_logprobs,
            snapshot_at=prompt.boundary,
            prompt_logprobs=ask.echo and ask.top_logprobs is not None,
        )
        echo = self._echo(ask) if ask.echo else None
        return Prepared(spec, make_sink, limit, echo, form.warnings, remake)

    def choices(self, ask: Ask, form: Constrained | None = None) -> list[Prepared]:
        """The `n` rows of a request: one preparation, seeds that count up, a guide of its own for
        each. Raises BadRequest or TooLong."""
        first = self(ask, form)
        found = [first]
        for i in range(1, ask.n):
            seed = (first.spec.sampling.seed + i) & (2**64 - 1)
            sampling = replace(first.spec.sampling, seed=seed)
            guide = first.make_guide()
            found.append(replace(first, spec=replace(first.spec, sampling=sampling, guide=guide)))
        return found

    # ------------------------------------------------------------------------------- thinking

    def thinks(self, ask: Ask) -> bool | None:
        """Whether the model is to think; None leaves it to the template (spec 10 section 1)."""
        if ask.enable_thinking is not None:
            return ask.enable_thinking
        if ask.thinking is not None:
            return ask.thinking
        if ask.reasoning_effort is not None:
            return ask.reasoning_effort != "none"
        if self.settings.thinking is not None:
            return self.settings.thinking == "on"
        return False if self.facts.model_type.startswith(_THINKING_OFF) else None

    def template_options(self, ask: Ask) -> dict[str, JSON]:
        """Variables for the template; what is undefined is not passed at all."""
        options: dict[str, JSON] = {}
        if (thinks := self.thinks(ask)) is not None:
            options["enable_thinking"] = thinks
        if ask.preserve_thinking is not None:
            options["preserve_thinking"] = ask.preserve_thinking
        effort = ask.reasoning_effort
        if self.template.reads_reasoning_effort and effort not in (None, "none"):
            # gpt-oss and its like know three words; only some templates know xhigh.
            names = _DEPTHS if "xhigh" in self.template.all_source else _PLAIN_DEPTHS
            options["reasoning_effort"] = names[str(effort)]
        return options

    # --------------------------------------------------------------------------------- prompt

    def prompt(self, ask: Ask) -> _Prompt:
        """Token ids of the prompt (spec 10 section 7)."""
        if ask.messages is None:
            assert ask.prompt is not None
            if isinstance(ask.prompt, str):
                ids = self._encoded(ask.prompt)
            else:
                ids = self._checked(ask.prompt)
            return _Prompt(ids, len(ids), False)
        messages, tools, options = self._template_values(ask)
        text = self.template.render(messages, tools=tools, options=options)
        ids = self._encoded(text)
        mode = (bool(tools), *sorted(options.items()))
        boundary = self._boundary(mode, messages, tools, options, ids)
        return _Prompt(ids, boundary, open_think(text, messages))

    def text(self, ask: Ask) -> str:
        """The prompt of a conversation as text."""
        messages, tools, options = self._template_values(ask)
        return self.template.render(messages, tools=tools, options=options)

    def _template_values(self, ask: Ask) -> tuple[list[Message], list[Any] | None, dict[str, JSON]]:
        """Messages, tools and options as the template takes them."""
        messages = normalise_messages(
            list(ask.messages or ()), knows_developer=self.template.knows_developer
        )
        tools = typed_tool_schemas(ask.tools) if ask.tools else None
        if tools and not self.template.knows_tools and not self._told_of_tools:
            self._told_of_tools = True
            log.warning("tools were sent, but this model's chat template does not show them")
        return messages, tools, self.template_options(ask)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Token ids of a client: outside the vocabulary they would read past the embedding."""
        if (largest := largest_id(ids)) >= self.facts.vocab_size:
            raise BadRequest(
                f"prompt names token {largest}; the vocabulary ends at {self.facts.vocab_size - 1}",
                param="prompt",
            )
        return list(ids)

    def _echo(self, ask: Ask) -> str:
        if isinstance(ask.prompt, str):
            return ask.prompt
        return self.tokenizer.decode(ask.prompt or (), keep_special=True)

    def _encoded(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]  # written by the template and by the tokenizer
        if (largest := largest_id(ids)) >= self.facts.vocab_size:
            # MLX does not check bounds: such an id would read past the embedding.
            raise BadRequest(
                f"the tokenizer gives token {largest}, the model's vocabulary ends at "
                f"{self.facts.vocab_size - 1}"
            )
        # A template may render nothing (no messages it cares for); a row needs one token to start.
        return ids or [bos if bos is not None else min(self.tokenizer.eos_ids, default=0)]

    def _boundary(
        self,
        mode: tuple[Any, ...],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, JSON],
        ids: list[int],
    ) -> int:
        """How many prompt tokens every later turn keeps: all but the generation primer.

        Found by rendering the conversation with an answer of one character. That costs a second
        render, so the primer's length is remembered for the mode. A wrong boundary costs a cache
        hit, never an answer.
        """
        if (primer := self._primers.get(mode)) is not None:
            return max(len(ids) - primer, 0)
        try:
            longer = [*messages, {"role": "assistant", "content": "x"}]
            probe = self._encoded(self.template.render(longer, tools=tools, options=options))
        except BadRequest:
            return len(ids)
        pairs = zip(ids, probe, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if len(ids) - common <= _LONGEST_PRIMER:
            self._primers[mode] = len(ids) - common
        return common

    # ------------------------------------------------------------------------------- sampling

    @property
    def enforces_forms(self) -> bool:
        """Whether the form of an answer can be enforced."""
        return self.settings.grammar in ("on", "1") and self.grammars.can_open

    @property
    def knows_thinking(self) -> bool:
        """Whether the model marks its reasoning, so that it can be told apart."""
        return self._thinking is not None

    def sampling_defaults(self) -> dict[str, float | None]:
        """What a request gets that says nothing; None is off."""
        resolved = self.sampling(Ask())
        return {
            "temperature": resolved.temperature,
            "top_p": resolved.top_p or None,
            "top_k": resolved.top_k or None,
        }

    def sampling(self, ask: Ask) -> Sampling:
        """Request, then server, then the model's config, then built-in (spec 10 section 2)."""
        settings, model = self.settings, self._defaults
        temperature = _first(ask.temperature, settings.temperature)
        if temperature is None:
            temperature = model.get("temperature", _DEFAULT_TEMPERATURE)
            if self.thinks(ask) is False:
                temperature = min(temperature, _DEFAULT_TEMPERATURE)
        xtc = ask.xtc_probability or 0.0
        for token, _ in ask.logit_bias:
            if token >= self.facts.vocab_size:
                raise BadRequest(
                    f"logit_bias names token {token}; the vocabulary ends at "
                    f"{self.facts.vocab_size - 1}",
                    param="logit_bias",
                )
        return Sampling(
            temperature=float(temperature),
            top_p=float(_first(ask.top_p, settings.top_p, model.get("top_p"), 0.0) or 0.0),
            top_k=int(_first(ask.top_k, settings.top_k, model.get("top_k"), 0) or 0),
            min_p=ask.min_p or 0.0,
            seed=(ask.seed if ask.seed is not None else self._fresh_seed()) & (2**64 - 1),
            xtc_probability=xtc,
            xtc_threshold=ask.xtc_threshold or 0.0,
            xtc_special_ids=self._xtc_special_ids if xtc else (),
            logit_bias=ask.logit_bias,
            repetition_penalty=_first(ask.repetition_penalty, model.get("repetition_penalty"), 0.0)
            or 0.0,
            repetition_context=self._window(ask.repetition_context_size),
            presence_penalty=ask.presence_penalty or 0.0,
            presence_context=self._window(ask.presence_context_size),
            frequency_penalty=ask.frequency_penalty or 0.0,
            frequency_context=self._window(ask.frequency_context_size),
            tone=self._tone(ask),
        )

    def _window(self, size: int | None) -> int:
        """Tokens that a penalty looks at; 0 is all, and so is a window that holds any sequence."""
        if size is None:
            return _DEFAULT_WINDOW
        return 0 if size >= self.facts.max_context else size

    def _tone(self, ask: Ask) -> Tone | None:
        """The tone curve, field by field: request, server, built-in (spec 20 section 6.1)."""
        settings = self.settings
        asked = ask.hlg.get("enabled")
        if not (settings.hlg_sampling == "on" if asked is None else asked):
            return None
        server = Tone(
            settings.hlg_width, settings.hlg_shoulder, settings.hlg_toe, settings.hlg_pivot_offset
        )
        names = ("width", "shoulder", "toe", "pivot_offset")
        return replace(server, **{n: ask.hlg[n] for n in names if ask.hlg.get(n) is not None})

    def _fresh_seed(self) -> int:
        """Different for requests that arrive in the same millisecond (spec 10 section 5)."""
        counter = next(self._seeds) * _COUNTER_STEP
        return (counter ^ int(time.time() * 1000)) & 0xFFFFFFFF

    # ------------------------------------------------------------------------------- way out

    def _sink_maker(self, ask: Ask, prompt: _Prompt) -> Callable[[], Sink]:
        """Sinks for this request: one for the stream, one more for a guide that must follow it."""
        is_chat = ask.messages is not None  # raw text has no calls and no channels
        tools = None
        thinking: Thinking | None = None
        if is_chat:
            tools = route(
                self.template.tool_source,
                self.facts.model_type,
                ask.tools,
                is_watched=has_strict(ask) or ask.forced_call is not None,
            )
            thinking = self._thinking

        def make() -> Sink:
            return Sink(
                self.tokenizer,
                stops=() if ask.forced_call is not None else ask.stop,
                thinking=thinking,
                starts_open=prompt.opens_thinking,
                tools=tools,
                most_calls=_most_calls(ask),
            )

        return make

    def _guide_maker(
        self, form: Constrained, prompt: _Prompt, make_sink: Callable[[], Sink], limit: int
    ) -> Callable[[], Guide | None]:
        """Guides for the rows of this request: what text decides between two steps (D24), and what
        is known to come (spec 50)."""
        fill: MakeGuide | None = None
        if form.grammar is None and form.calls is None and form.ask.tools:
            fill = self._fill.arm(form.ask, self.template_options(form.ask), prompt.ids)

        def make() -> Guide | None:
            guide = self._guide(form, prompt, make_sink)
            if fill is None:
                return guide
            assert guide is None or isinstance(guide, TextGuide)  # there is no grammar
            return fill(guide, limit)

        return make

    def _guide(
        self, form: Constrained, prompt: _Prompt, make_sink: Callable[[], Sink]
    ) -> TextGuide | GrammarGuide | None:
        """What must be decided on text, or None if nothing must."""
        ask, grammar = form.ask, form.grammar
        is_formed = grammar is not None or form.calls is not None
        most_calls = _most_calls(ask) if ask.tools else None
        thinking = self._thinking if ask.messages is not None else None
        budget = ask.thinking_budget if thinking is not None else None
        if not ask.stop and most_calls is None and budget is None and not is_formed:
            return None
        closing: tuple[int, ...] = ()
        if thinking is not None:
            if thinking is HARMONY and ask.forced_call is not None:
                thinking = replace(thinking, closing=f"<|end|>{ANSWER}")
            # Blanks after a thought would be part of an answer whose form is given.
            closing = closing_ids(self.tokenizer, thinking, trims=grammar is not None)
        text = TextGuide(make_sink(), most_calls=most_calls, budget_tokens=budget, closing=closing)
        if not is_formed:
            return text
        return GrammarGuide(
            text,
            grammar.matcher() if grammar is not None else None,
            self._start(ask, prompt, thinking),
            self.tokenizer.bytes_of,
            None if form.calls is None else self._calls(form.calls, ask, prompt, thinking),
            jumps=self.settings.grammar_jump in ("on", "1"),
        )

    def _calls(
        self, grammar: Grammar, ask: Ask, prompt: _Prompt, thinking: Thinking | None
    ) -> Calls:
        """What holds the calls that the model makes by itself to their grammar."""
        tag = thinking.closing.strip() if thinking is not None and thinking.channel is None else ""
        starters = self._writing.starters([tool["function"]["name"] for tool in ask.tools])
        for each in (*self._writing.openers, *starters):
            self.grammars.ids_past(each.encode())  # here, as it is slow the first time
        at_start = not (tag and prompt.opens_thinking)
        watch = Watch(self._writing.openers, starters, restart=tag, at_start=at_start)
        return Calls(grammar, watch, self.tokenizer, self.grammars)

    def _start(self, ask: Ask, prompt: _Prompt, thinking: Thinking | None) -> Start:
        """How an answer whose form is given may begin."""
        size = self.facts.vocab_size
        if thinking is HARMONY and ask.forced_call is not None:
            return Start(size, self._eos_ids)  # the grammar of the calls has its thinking in it
        if thinking is HARMONY:  # it names a channel before all that it says
            return Start(size, frozenset() if ask.tools else self._eos_ids, prefix=FINAL_CHANNEL)
        thought_id = call_id = None
        if thinking is not None and not prompt.opens_thinking and self.thinks(ask) is not False:
            thought_id = self._known_id(thinking.opening.split("thought")[0])
        if ask.tools and ask.forced_call is None:
            call_id = next(filter(None, map(self._known_id, self._writing.openers)), None)
        return Start(size, self._eos_ids, thought_id, call_id)

    def _known_id(self, text: str) -> int | None:
        found = self.tokenizer.token_id(text)
        return found if found is not None and found < self.facts.vocab_size else None

    @property
    def _eos_ids(self) -> frozenset[int]:
        size = self.facts.vocab_size
        return frozenset(token for token in self.tokenizer.eos_ids if token < size)


def _sound_defaults(given: Mapping[str, JSON]) -> dict[str, float]:
    """What of `generation_config.json` is a value that a request could have; the rest is ignored.

    Python's JSON reads NaN and Infinity, and such files are written by hand.
    """
    sound: dict[str, float] = {}
    for field in (fields.TEMPERATURE, fields.TOP_P, fields.TOP_K, fields.REPETITION_PENALTY):
        try:
            value = fields.take(given, field)
        except BadRequest:
            continue
        if value is not None:
            sound[field.name] = value
    return sound


def _most_calls(ask: Ask) -> int | None:
    """After how many calls the answer ends; None: after any number."""
    return ask.max_tool_calls if ask.parallel_tool_calls else 1


def _first(*values: float | None) -> float | None:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)
