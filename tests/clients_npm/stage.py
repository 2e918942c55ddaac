"""A live server whose model plays a part, and which remembers who asked for what.

Agents send several kinds of requests, some at the same time, so what the model says depends on the
prompt: an `Actor` takes its lines from a function of it. Everything else is the whole product.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlxlite import app
from mlxlite.errors import MlxliteError
from mlxlite.http.routing import EventStream, Request, Response, Router
from mlxlite.types import Finish, RowSpec, Sink
from tests.scripted import FACTS, QWEN, TOKENIZER, ScriptedApp, ScriptedEngine

# Agents' first prompts are 50 kB and more, and the tiny tokenizer takes a token for a few bytes.
CONTEXT = 1 << 20
ASSISTANT = "<|im_start|>assistant\n"
PORTION = 3  # ids at a time: texts and arguments come in pieces


@dataclass(frozen=True)
class Line:
    """What the model says to one prompt, and how it ends."""

    text: str
    finish: Finish = Finish.EOS
    error: MlxliteError | None = None


Part = Callable[[str], "str | Line"]


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def last_turn(prompt: str) -> str:
    """What the model is asked to answer: all since it last spoke."""
    return prompt.removesuffix(ASSISTANT).rpartition(ASSISTANT)[2]


class Actor(ScriptedEngine):
    """Says to each prompt what its part has for it. prompts: those it was given, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Part = lambda prompt: "Paris."
        self.prompts: list[str] = []

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        prompt = TOKENIZER.decode(spec.prompt_ids, keep_special=True)
        self.prompts.append(prompt)
        line = self.part(prompt)
        line = Line(line) if isinstance(line, str) else line
        one = ScriptedEngine(error=line.error)  # rows run at the same time, each says its own
        one.says(line.text, PORTION, line.finish)
        self.specs.append(spec)
        row_id = one.submit(spec, sink)
        self.threads += one.threads
        return row_id


@dataclass
class Seen:
    """A request that reached the router, with the status it was answered with."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    status: int = 200


@dataclass
class Log:
    """What the server saw since the last `clear`."""

    all: list[Seen] = field(default_factory=list)

    def clear(self) -> None:
        self.all.clear()

    def to(self, *paths: str) -> list[Seen]:
        return [seen for seen in self.all if seen.path in paths]

    def refused(self) -> list[Seen]:
        return [seen for seen in self.all if seen.status >= 400]


class Stage(ScriptedApp):
    """The server with an actor. log: what it saw."""

    engine: Actor

    def __init__(
        self, folder: Path, template: str = QWEN, *, context: int = CONTEXT, **flags: Any
    ) -> None:
        self.log = Log()
        self._context = context
        with patch.object(app, "Router", recording(self.log)):
            super().__init__(folder, template, **flags)

    def _start_engine(self, folder: Path) -> Any:
        self.engine = Actor()
        self.engine.facts = replace(FACTS, max_context=self._context)
        self.engine.folder = folder
        return self.engine

    def plays(self, part: Part | str | Iterable[str | Line]) -> None:
        """From now on the model says this; forgets what was seen so far.

        part: a function of the prompt, a text, or texts of which each answer takes the next.
        """
        self.log.clear()
        self.engine.prompts.clear()
        if callable(part):
            self.engine.part = part
        elif isinstance(part, str):
            self.engine.part = lambda prompt: part
        else:
            lines = iter(part)
            self.engine.part = lambda prompt: next(lines)


def recording(log: Log) -> type[Router]:
    """A router that writes each request into the log."""

    class Recording(Router):
        async def __call__(self, request: Request) -> Response | EventStream:
            body = json.loads(request.body) if request.body else None
            headers = dict(request.headers.items())
            seen = Seen(request.method, request.path, request.query, headers, body)
            log.all.append(seen)
            try:
                found = await super().__call__(request)
            except MlxliteError as error:
                seen.status = error.status
                raise
            seen.status = found.status if isinstance(found, Response) else 200
            return found

    return Recording
