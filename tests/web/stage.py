"""The server that the browser meets: everything is real but the engine, which says what a test
wants, token by token, as fast or as slow as it wants."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxlite.types import Event, RowSpec, Sink
from tests.live import Reply
from tests.scripted import FACTS, QWEN, ScriptedApp, ScriptedEngine

THINKER = QWEN + "{# <think> #}"
CONTEXT = 1 << 20  # the tiny tokenizer takes a token for a few bytes


class PacedEngine(ScriptedEngine):
    """pace_s: seconds between two pieces. hold_after: stops after so many, until `let_go`."""

    facts = replace(FACTS, max_context=CONTEXT)

    def __init__(self) -> None:
        super().__init__()
        self.pace_s = 0.0
        self.hold_after: int | None = None
        self._gone = threading.Event()

    def submit(self, spec: RowSpec, sink: Sink) -> int:
        sent = 0
        self._gone.clear()

        def slow(event: Event) -> None:
            nonlocal sent
            sent += 1
            if self.hold_after is not None and sent > self.hold_after:
                self._gone.wait(20)
            elif self.pace_s:
                self._gone.wait(self.pace_s)
            sink(event)

        return super().submit(spec, slow)

    def cancel(self, row_id: int) -> None:
        super().cancel(row_id)
        self._gone.set()

    def let_go(self) -> None:
        self._gone.set()

    def stop(self) -> None:
        self._gone.set()
        super().stop()


class Stage(ScriptedApp):
    """home: where this server keeps its chats."""

    engine: PacedEngine

    def __init__(self, folder: Path, home: Path, **flags: Any) -> None:
        self.script = PacedEngine()
        super().__init__(folder, THINKER, home=str(home), **flags)

    def _start_engine(self, folder: Path) -> Any:
        self.script.folder = folder
        self.engine = self.script
        return self.engine

    def reset(self) -> None:
        """No chats, an engine that says one thing at once."""
        self.engine.pace_s = 0.0
        self.engine.hold_after = None
        self.engine.error = None
        self.engine.specs.clear()
        self.engine.says("Paris is the capital of France.")
        for session in self.sessions():
            self.ask("DELETE", f"/api/sessions/{session['id']}")

    def sessions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/api/sessions").json()["sessions"]
        return found

    def session(self, session_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/api/sessions/{session_id}").json()["session"]
        return found

    def store(self, *texts: str, title: str = "Stored") -> str:
        """A chat of these messages, by turns the user's and the model's; its id."""
        lines = [{"type": "session_info", "name": title}]
        for n, text in enumerate(texts):
            lines.append({"type": "message", "role": ("user", "assistant")[n % 2], "content": text})
        body = "\n".join(json.dumps(line) for line in lines).encode()
        reply: Reply = self.ask("POST", "/api/sessions/import", body)
        assert reply.status == 200, reply.body
        found: str = reply.json()["session"]["id"]
        return found
