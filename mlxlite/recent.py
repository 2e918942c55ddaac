"""The last requests that a model was asked, for people to look at (floor 2, beside `metrics`).

Fed with the same record as the log line and `/metrics`: ids, figures and how it ended,
never a text. Owned by the event loop.
"""

from __future__ import annotations

import time
from collections import deque

from mlxlite.types import JSON, Done, Finish

MOST = 100
_FEWEST_FOR_A_RATE = 8  # tokens


def decode_rate(done: Done) -> float | None:
    """Tokens a second; None of a few: the second was computed before the first was read."""
    if done.generated_tokens < _FEWEST_FOR_A_RATE or done.decode_s <= 0:
        return None
    return (done.generated_tokens - 1) / done.decode_s


class Recent:
    """The last MOST of them. A request of several rows is in it once for each."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, JSON]] = deque(maxlen=MOST)

    def newest_first(self) -> list[dict[str, JSON]]:
        return list(reversed(self._rows))

    def ended(self, label: str, began_s: float, done: Done | None) -> None:
        """A row ended; None: its client left before. label: `<request id> <surface>`. began_s:
        seconds since 1970."""
        if done is None:
            self._add(label, began_s, 499, "left")
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
        request_id, _, surface = label.partition(" ")
        absent = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "decode_tok_s")
        )
        self._rows.append(
            {
                "id": request_id,
                "surface": surface,
                "started": round(began_s, 3),
                "status": status,
                **absent,
                **figures,
                "finish": finish,
            }
        )
