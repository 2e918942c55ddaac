"""What a token costs on its way from the engine's event to the socket.

An engine that has all tokens ready gives one to each row, waits until the event loop has sent them,
and goes on: as in a decode step, but without the step. Counted is the CPU time of the event loop's
thread, which other processes disturb less than the wall's: from the wake-up through the detokeniser
and the surface's frames to the kernel's send.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlxlite.bench.inside import Inside, serving
from mlxlite.config import Settings
from mlxlite.errors import BadRequest
from mlxlite.models import library
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import JSON, Done, EmbedSpec, EngineState, Event, Finish, ModelFacts, RowSpec
from mlxlite.types import Sink as RowSink

if TYPE_CHECKING:
    from mlxlite.engine.worker import Worker

# The wake-up, the task that it wakes and the send are a turn of the loop each.
_TURNS = 4
_TEXT = (
    "The keeper climbed the stairs each evening, lit the lamp and wrote down the weather: a wind "
    "from the west, a swell of two metres, gulls over the reef. At night the beam went round, and "
    "ships far out knew by it where they were. "
)
_CHAT = {"messages": [{"role": "user", "content": "Tell me of the sea."}]}
# Path, body, and the field that limits the answer.
SURFACES: dict[str, tuple[str, dict[str, JSON], str]] = {
    "chat": ("/v1/chat/completions", _CHAT, "max_tokens"),
    "completions": ("/v1/completions", {"prompt": "Tell me"}, "max_tokens"),
    "messages": ("/v1/messages", _CHAT, "max_tokens"),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}, "max_output_tokens"),
}


class Ready:
    """An engine that has its tokens ready. Rows wait until `step`."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self.facts = ModelFacts("none", "cpu", "float32", 0, 1 << 20, vocab_size)
        self.state = EngineState.READY
        self.rows: list[tuple[RowSpec, RowSink]] = []
        self._arrived = threading.Condition()

    def submit(self, spec: RowSpec, sink: RowSink) -> int:
        with self._arrived:
            self.rows.append((spec, sink))
            self._arrived.notify()
            return len(self.rows)

    def wait_for(self, rows: int) -> None:
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.rows) >= rows, 60):
                raise TimeoutError(f"{len(self.rows)} of {rows} requests came")

    def step(self, token: int, done: Done | None) -> None:
        for _, sink in self.rows:
            sink(Event((token,), done))

    def embed(self, spec: EmbedSpec) -> Future[tuple[bytes, ...]]:
        raise BadRequest("this engine only says what it was given")

    def stats(self) -> dict[str, Any]:
        return {}

    def cancel(self, row_id: int) -> None: ...
    def resume(self, row_id: int) -> None: ...
    def wait_ready(self) -> None: ...
    def stop(self) -> None: ...


def measure(
    settings: Settings, model: library.LocalModel, rows: int = 16, tokens: int = 400
) -> dict[str, float]:
    """Seconds of CPU a token, for each surface: the median over the steps of `rows` streams."""
    tokenizer = Tokenizer.load(model.folder)
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    ids = [ids[at % len(ids)] for at in range(tokens)]
    found = {}
    for name, (path, asked, limit) in SURFACES.items():
        engine = Ready(model.folder, tokenizer.vocab_size)
        body = {**asked, limit: tokens, "stream": True}
        with serving(settings, model.name, cast("Worker", engine)) as server:
            server.ask([(path, body)] * rows)
            engine.wait_for(rows)
            times = _run(engine, server, ids)
            server.wait()
        found[name] = statistics.median(times) / rows
    return found


def _run(engine: Ready, server: Inside, ids: Sequence[int]) -> list[float]:
    """Seconds of CPU of each step but the last one, which ends the streams."""
    marks = [server.cpu_s(_TURNS)]
    for at, token in enumerate(ids, 1):
        is_last = at == len(ids)
        done = Done(Finish.LENGTH, 8, 0, at, 0.0, 0.1, 1.0) if is_last else None
        engine.step(token, done)
        marks.append(server.cpu_s(_TURNS))
    return [after - before for before, after in zip(marks[1:], marks[2:-1], strict=False)]
