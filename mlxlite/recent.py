"""The last requests that a model was asked, for people to look at (floor 2, beside `metrics`).

Those under way first. Fed with the same record as the log line and `/metrics`: ids, figures and how
it ended, never a text. Owned by the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from mlxlite.types import JSON, Done, Finish

MOST = 100
_FEWEST_FOR_A_RATE = 8  # tokens


def decode_rate(done: Done) -> float | None:
    """Tokens a second; None of a few: the second was computed before the first was read."""
    return _rate(done.generated_tokens, done.decode_s)


def _rate(tokens: int, seconds: float) -> float | None:
    return (tokens - 1) / seconds if tokens >= _FEWEST_FOR_A_RATE and seconds > 0 else None


@dataclass(slots=True, eq=False)
class Running:
    """A row under way. label: `<request id> <surface>`. began_s: seconds since 1970. tokens: that
    came so far; first_s, last_s: when the first and the last did, from the beginning."""

    label: str
    began_s: float
    prompt_tokens: int
    tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0

    def came(self, tokens: int) -> None:
        self.last_s = time.time() - self.began_s
        if self.first_s is None:
            self.first_s = self.last_s
        self.tokens += tokens

    def figures(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {"prompt_tokens": self.prompt_tokens}
        found["completion_tokens"] = self.tokens
        if self.first_s is not None:
            found["ttft_s"] = round(self.first_s, 4)
            rate = _rate(self.tokens, self.last_s - self.first_s)
            found["decode_tok_s"] = round(rate, 2) if rate is not None else None
        return found


class Recent:
    """Those that run, and the last MOST that ended. A request of several rows is in it once for
    each."""

    def __init__(self) -> None:
        self._running: dict[Running, None] = {}  # in order
        self._rows: deque[dict[str, JSON]] = deque(maxlen=MOST)

    def newest_first(self) -> list[dict[str, JSON]]:
        """Those that run first; their `status` and `finish` are None."""
        running = [
            _row(row.label, row.began_s, None, None, row.figures())
            for row in reversed(self._running)
        ]
        return [*running, *reversed(self._rows)]

    def began(self, running: Running) -> None:
        """The engine took a row; `ended` takes it off again."""
        self._running[running] = None

    def ended(self, running: Running, done: Done | None) -> None:
        """A row ended; None: its client left before."""
        del self._running[running]
        label, began_s = running.label, running.began_s
        if done is None:
            self._add(label, began_s, 499, "left", **running.figures())
            return
        finish, status = done.finish.value, 200
        if done.finish is Finish.ERROR:
            status = done.error.status if done.error is not None else 500
        elif done.finish is Finish.CANCELLED:
            status = 499
        elif done.finish is Finish.GUIDE:
            finish = "stop"  # as the log has it
        rate = decode_rate(done)
        self._add(
            label,
            began_s,
            status,
            finish,
            prompt_tokens=done.prompt_tokens,
            cached_tokens=done.cached_tokens,
            completion_tokens=done.generated_tokens,
            ttft_s=round(done.queued_s + done.prefill_s, 4) if done.generated_tokens else None,
            decode_tok_s=round(rate, 2) if rate is not None else None,
        )

    def embedded(self, label: str, began_s: float, outcome: str, tokens: int) -> None:
        """A request for vectors or scores ended: done, error or left."""
        status = {"done": 200, "left": 499}.get(outcome, 500)
        self._add(label, began_s, status, outcome, prompt_tokens=tokens if status == 200 else None)

    def refused(self, label: str, status: int) -> None:
        """It was answered with an error; one that came from its row is here already."""
        request_id = label.partition(" ")[0]
        if not any(row["id"] == request_id for row in self._rows):
            self._add(label, time.time(), status, "refused")

    def _add(
        self, label: str, began_s: float, status: int, finish: str, **figures: float | None
    ) -> None:
        self._rows.append(_row(label, began_s, status, finish, figures))


_FIGURES = ("prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "decode_tok_s")


def _row(
    label: str,
    began_s: float,
    status: int | None,
    finish: str | None,
    figures: Mapping[str, float | None],
) -> dict[str, JSON]:
    """As `/api/requests` has it; figures that are absent are None."""
    request_id, _, surface = label.partition(" ")
    return {
        "id": request_id,
        "surface": surface,
        "started": round(began_s, 3),
        "status": status,
        **dict.fromkeys(_FIGURES),
        **figures,
        "finish": finish,
    }
