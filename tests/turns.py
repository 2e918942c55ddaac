"""A scripted engine with an answer a turn, for clients that ask again by themselves.

A tool loop asks, runs the tool, asks again: what each request is answered with is queued before.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlite.errors import EngineFault
from mlxlite.types import Finish, RowSpec, Sink
from tests.scripted import QWEN, TOKENIZER, ScriptedApp, ScriptedEngine

THINKER = QWEN + "{# <think> #}"


@dataclass(frozen=True)
class Turn:
    """What a row writes and how it ends. portion: tokens at a time."""

    text: str
    finish: Finish = Finish.EOS
    portion: int = 1

    @property
    def error(self) -> EngineFault | None:
        return EngineFault("the step failed") if self.finish is Finish.ERROR else None


class TurnsEngine(ScriptedEngine):
    """Each row takes the next turn; one too many fails at once, and loudly."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: deque[Turn] = deque()
        self._lock = threading.Lock()

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        with self._lock:
            self.specs.append(spec)
            if not self.turns:
                raise EngineFault("the script has no further turn")
            turn = self.turns.popleft()
        one = ScriptedEngine(error=turn.error)  # of its own: rows do not share a script
        one.says(turn.text, turn.portion, turn.finish)
        row_id = one.submit(spec, sink)
        self.threads += one.threads
        return row_id


class TurnsApp(ScriptedApp):
    """The whole server around a `TurnsEngine`."""

    engine: TurnsEngine

    def _start_engine(self, folder: Path) -> Any:
        self.engine = TurnsEngine()
        self.engine.folder = folder
        return self.engine

    def script(self, *turns: str | Turn) -> None:
        """What the next requests are answered with; nothing may be left of an earlier script."""
        assert not self.engine.turns, "the last script was not used up"
        self.engine.specs.clear()
        self.engine.turns += [Turn(turn) if isinstance(turn, str) else turn for turn in turns]

    @property
    def prompts(self) -> list[str]:
        """Of all requests since the script began, as the model reads them."""
        return [TOKENIZER.decode(s.prompt_ids, keep_special=True) for s in self.engine.specs]

    def end(self) -> None:
        """Fails unless the script was used up, to the turn."""
        left, asked = len(self.engine.turns), len(self.engine.specs)
        self.engine.turns.clear()
        assert left == 0, f"{asked} requests came, {left} turns are left"


def call(name: str, **arguments: Any) -> str:
    """A call as the model of `QWEN` writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def enforced_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as a grammar has it: its arguments without blanks."""
    text = json.dumps(arguments, separators=(",", ":"))
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
