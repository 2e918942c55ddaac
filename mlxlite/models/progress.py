"""Progress of downloads and imports: quiet by default, a bar on a terminal.

Code that moves bytes reports to a `Progress` and never prints. `for_terminal` gives the bar when
the stream is a terminal and the quiet one otherwise, so logs and pipes stay clean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

REDRAW_S = 0.1
BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Arrived:
    """What is on the disk of a download; file: the one that is coming."""

    n_bytes: int
    files: int = 0
    file: str | None = None


class Progress:
    """Takes reports and shows nothing. `is_visible` lets a child process decide about its own."""

    is_visible = False

    def start(self, label: str, total_bytes: int) -> None:
        """A stretch of work begins; `total_bytes` is what `advance` will add up to."""

    def advance(self, n_bytes: int) -> None:
        """So many bytes more are done."""

    def finish(self) -> None:
        """The stretch is over, done or failed."""

    def watch(
        self, total_bytes: int, total_files: int, look: Callable[[], Arrived], resumes: bool = True
    ) -> None:
        """Others move the bytes from here until the next `start`; `look` tells how many came.
        resumes: whether a later attempt would go on with them."""

    def say(self, line: str) -> None:
        """One line for whoever watches."""


class TerminalBar(Progress):
    """Draws `label [####....] 61.2/98.4 MB 45.1 MB/s` on one line, at most ten times a second."""

    is_visible = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._total_bytes = 0
        self._done_bytes = 0
        self._started_s = 0.0
        self._drawn_s = 0.0

    def start(self, label: str, total_bytes: int) -> None:
        self._label, self._total_bytes, self._done_bytes = label, total_bytes, 0
        self._started_s = time.monotonic()
        self._drawn_s = 0.0

    def advance(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        now_s = time.monotonic()
        if now_s - self._drawn_s >= REDRAW_S:
            self._drawn_s = now_s
            self._draw(now_s)

    def finish(self) -> None:
        if self._label:
            self._draw(time.monotonic())
            self._stream.write("\n")
            self._stream.flush()
            self._label = ""

    def say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _draw(self, now_s: float) -> None:
        share = min(1.0, self._done_bytes / max(1, self._total_bytes))
        filled = int(share * BAR_WIDTH)
        rate = self._done_bytes / max(1e-3, now_s - self._started_s)
        self._stream.write(
            f"\r{self._label} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] "
            f"{self._done_bytes / 1e6:.1f}/{self._total_bytes / 1e6:.1f} MB {rate / 1e6:.1f} MB/s "
        )
        self._stream.flush()


def for_terminal(stream: TextIO) -> Progress:
    """The bar when `stream` is a terminal, else the quiet one."""
    return TerminalBar(stream) if stream.isatty() else Progress()
