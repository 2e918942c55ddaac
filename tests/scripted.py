"""An engine that says what a test wants, so that what a model writes is under control.

It delivers given ids in given portions from a thread of its own, and asks the row's guide before
each token like the real one: forced ids come first, a stop ends the row.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import openai

from mlxlite.errors import MlxliteError
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import (
    Done,
    EngineState,
    Event,
    Finish,
    ModelFacts,
    RowSpec,
    Sink,
    TokenLogprob,
    Took,
)
from tests import tiny
from tests.live import LiveApp

TOKENIZER = Tokenizer(tiny.make_tokenizer(), eos_ids=[0, 2])
FACTS = ModelFacts("llama", "cpu", "float32", 1, 4096, 512)
CACHED_TOKENS = 2

# Tools and their history in Qwen's way, on ChatML.
QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ScriptedEngine:
    """Delivers `portions` of ids, then the end. specs: of the rows it was given."""

    def __init__(
        self,
        portions: Sequence[Sequence[int]] = (),
        finish: Finish = Finish.EOS,
        error: MlxliteError | None = None,
        end_apart: bool = False,
        is_endless: bool = False,
    ) -> None:
        self.portions = portions
        self.finish = finish
        self.error = error
        self.end_apart = end_apart
        self.is_endless = is_endless
        self.cancelled: list[int] = []
        self.specs: list[RowSpec] = []
        self.threads: list[threading.Thread] = []

    def says(self, text: str, portion: int = 1, finish: Finish = Finish.EOS) -> None:
        """The next answers are this text, so many tokens at a time."""
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        self.portions = [ids[at : at + portion] for at in range(0, len(ids), portion)]
        self.finish = finish

    # ------------------------------------------------------------------- the engine's border

    state = EngineState.READY
    facts = FACTS

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        self.specs.append(spec)
        thread = threading.Thread(target=self._deliver, args=(spec, sink))
        self.threads.append(thread)
        thread.start()
        return 41

    def cancel(self, row_id: int) -> None:
        self.cancelled.append(row_id)

    def resume(self, row_id: int) -> None:
        """A script is not held, so there is nothing to let go on."""

    def stats(self) -> dict[str, Any]:
        return {}

    def _deliver(self, spec: RowSpec, sink: Sink) -> None:
        finish, sent = self.finish, 0
        forced: deque[int] = deque()

        def ends(ids: tuple[int, ...]) -> bool:
            """Asks the guide; True if the row is over."""
            if spec.guide is None:
                return False
            verdict = spec.guide.observe(ids)
            assert verdict.keep == len(ids) and (spec.guide.may_steer or not verdict.forced)
            forced.extend(verdict.forced)
            if (run := verdict.run) is not None and not verdict.stop:
                # Taken as far as the script has it in the portion at hand.
                pairs = zip(run.ids, waiting, strict=False)
                same = takewhile(lambda pair: pair[0] == pair[1], pairs)
                spec.guide.took(Took(sum(1 for _ in same)))
            return verdict.stop

        waiting: deque[int] = deque()
        assert not ends(())
        portions = list(self.portions) or [()]
        for n, portion in enumerate(portions):
            waiting = deque(portion)
            ids: list[int] = []
            is_over = False
            while (waiting or forced) and not is_over:
                ids.append(forced.popleft() if forced else waiting.popleft())
                if ends((ids[-1],)):
                    finish, is_over = Finish.GUIDE, True
                elif sent + len(ids) >= spec.max_tokens:
                    finish, is_over = Finish.LENGTH, True
            logprobs = self._logprobs(spec, ids, sent)
            sent += len(ids)
            is_last = is_over or n == len(portions) - 1
            if is_last and not self.end_apart and not self.is_endless:
                sink(Event(tuple(ids), self._done(spec, finish, sent), logprobs))
                return
            sink(Event(tuple(ids), logprobs=logprobs))
            if is_last:
                break
        if not self.is_endless:
            sink(Event(done=self._done(spec, finish, sent)))

    def _logprobs(self, spec: RowSpec, ids: list[int], at: int) -> tuple[TokenLogprob, ...]:
        """Made up, a different one for each token."""
        count = spec.top_logprobs
        if count is None:
            return ()
        found = []
        for n, token in enumerate(ids, at):
            top = tuple(((token + k) % 512, -(n + k) / 8) for k in range(count))
            found.append(TokenLogprob(token, -n / 8, top))
        return tuple(found)

    def _done(self, spec: RowSpec, finish: Finish, sent: int) -> Done:
        counted = sent + 1 if finish is Finish.EOS else sent  # EOS counts, and is never delivered
        prompt = len(spec.prompt_ids)
        return Done(finish, prompt, CACHED_TOKENS, counted, 0.1, 0.2, 0.3, self.error)

    # ------------------------------------------------------------------- what `app` needs more

    folder: Path

    def wait_ready(self) -> None:
        """It always is."""

    def stop(self) -> None:
        for thread in self.threads:
            thread.join(10)


class ScriptedApp(LiveApp):
    """The whole server, but for the engine."""

    def __init__(self, folder: Path, template: str, **flags: Any) -> None:
        self.engine = ScriptedEngine()
        self.engine.folder = folder
        super().__init__(folder, chat_template=template, **flags)

    def _start_engine(self, folder: Path) -> Any:
        return self.engine

    @cached_property
    def client(self) -> openai.OpenAI:
        """The official client; one for all tests, since making it takes longer than an answer."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0)

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()
        super().close()
