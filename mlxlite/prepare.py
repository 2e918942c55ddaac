"""From what a client wants to what the engine runs: Ask -> Prepared (floor 2, spec 10).

The only place where text meets the engine on the way in. One `Preparation` is built once the model
is known and used by every surface, so that no two can disagree about a setting. It runs in the
prepare pool: it renders and tokenises, and never touches an array.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mlxlite.config import Settings
from mlxlite.errors import TooLong
from mlxlite.text.guides import StopGuide
from mlxlite.text.messages import normalise_messages
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import JSON, Ask, ModelFacts, RowSpec, Sampling

_COUNTER_STEP = 0x9E3779B9  # spec 10 section 5
_DEFAULT_TEMPERATURE = 0.7  # spec 10 section 1.2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run. spec: for the engine. stops: what the stream cuts at.

    limit: most tokens to generate; 0 asks for an empty answer, which the engine is not bothered
    with.
    """

    spec: RowSpec
    stops: tuple[str, ...]
    limit: int


class Preparation:
    """tokenizer, template: of the model. facts: from the engine. defaults:
    `generation_config.json`.
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        facts: ModelFacts,
        defaults: Mapping[str, JSON],
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.template = template
        self.facts = facts
        self._defaults = {
            name: value
            for name, value in defaults.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
            if 0 <= value < math.inf  # NaN too: Python's JSON reads what JSON does not have
        }
        self._seeds = itertools.count(1)

    def __call__(self, ask: Ask) -> Prepared:
        """Resolve a request. Raises BadRequest or TooLong; nothing has reached the engine then."""
        ids = self.prompt_ids(ask)
        room = self.facts.max_context - len(ids)
        if room < 1:
            raise TooLong(
                f"the prompt has {len(ids)} tokens, the context holds {self.facts.max_context} "
                "with the answer; shorten the prompt",
                param="messages" if ask.messages is not None else "prompt",
            )
        wanted = ask.max_tokens if ask.max_tokens is not None else self.settings.max_tokens
        limit = room if wanted is None else min(wanted, room)
        guide = StopGuide(self.tokenizer, ask.stop) if ask.stop else None
        spec = RowSpec(
            prompt_ids=tuple(ids),
            sampling=self.sampling(ask),
            max_tokens=max(limit, 1),
            eos_ids=self.tokenizer.eos_ids,
            guide=guide,
        )
        return Prepared(spec, ask.stop, limit)

    def prompt_ids(self, ask: Ask) -> list[int]:
        """Token ids of the prompt (spec 10 section 7); at least one."""
        if ask.messages is not None:
            messages = normalise_messages(
                list(ask.messages), knows_developer=self.template.knows_developer
            )
            text = self.template.render(messages, options=_template_options(ask))
        else:
            assert ask.prompt is not None
            text = ask.prompt
        ids = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]  # written by the template and by the tokenizer
        # A template may render nothing (no messages it cares for); a row needs one token to start.
        return ids or [bos if bos is not None else min(self.tokenizer.eos_ids, default=0)]

    def sampling(self, ask: Ask) -> Sampling:
        """Request, then server, then the model's generation config, then built-in (spec 10 section
        2).
        """
        settings, model = self.settings, self._defaults
        temperature = _first(
            ask.temperature, settings.temperature, model.get("temperature"), _DEFAULT_TEMPERATURE
        )
        return Sampling(
            temperature=float(temperature),
            top_p=float(_first(ask.top_p, settings.top_p, model.get("top_p"), 0.0)),
            top_k=int(_first(ask.top_k, settings.top_k, model.get("top_k"), 0)),
            min_p=float(_first(ask.min_p, 0.0)),
            seed=(ask.seed if ask.seed is not None else self._fresh_seed()) & (2**64 - 1),
        )

    def _fresh_seed(self) -> int:
        """Different for requests that arrive in the same millisecond (spec 10 section 5)."""
        counter = next(self._seeds) * _COUNTER_STEP
        return (counter ^ int(time.time() * 1000)) & 0xFFFFFFFF


def _template_options(ask: Ask) -> dict[str, bool]:
    """The options that a template may read, where the client gave booleans (spec 10 section 1)."""
    known = ("enable_thinking", "preserve_thinking")
    return {
        name: value for name in known if isinstance(value := ask.template_options.get(name), bool)
    }


def _first(*values: float | None) -> float:
    """The first value that is given."""
    return next(value for value in values if value is not None)
