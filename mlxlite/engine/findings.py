"""What is found out about a model by trying, soon after its engine has started.

Whether its rows may share a forward (`judge`), and which products to turn (`turned`). It is tried
once a machine, a forward or a few products at a time between other work, and kept (`verdicts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlxlite.engine import turned
from mlxlite.engine.backend import Backend
from mlxlite.engine.judge import judge
from mlxlite.engine.lanes import Lanes
from mlxlite.engine.load import LoadedModel
from mlxlite.engine.verdicts import Verdicts

_OVER = object()


class Findings:
    """Of one loaded model; its layers are replaced by those that can be turned. Used on the engine
    thread only.

    lanes: told whether rows may pool. folder: where findings are kept.
    """

    def __init__(
        self, loaded: LoadedModel, lanes: Lanes, vocab_size: int, backend: Backend, folder: Path
    ) -> None:
        self._lanes = lanes
        self._turn = turned.install(loaded.model) if backend.kind == "cpu" else turned.Turn()
        about = {"config": loaded.config, "dtype": loaded.dtype, "backend": backend.fingerprint}
        self._verdicts = Verdicts(folder, loaded.model, about)
        known = self._verdicts.read() or {}
        self._judging: Iterator[None] | None = None
        self._measuring: Iterator[None] | None = None
        if known.get("may_pool") is True:
            lanes.may_pool = True
        else:
            self._judging = judge(loaded.model, lanes, loaded.dtype, vocab_size)
        if not self._turn.take(known.get("turned")):
            self._measuring = self._turn.measure()

    @property
    def is_judged(self) -> bool:
        """Whether it is known if rows may share a forward."""
        return self._judging is None

    def may_try(self, waiting: int, running: int) -> bool:
        """Whether there is something to try and it is time, with so many rows. If rows may share a
        forward: not while a single one runs, which would wait for it and gain nothing. What to
        turn: when there is none."""
        if self._judging is not None:
            return running != 1
        return self._measuring is not None and waiting + running == 0

    def go_on(self) -> None:
        """Try a little more."""
        trying = self._judging or self._measuring
        if trying is None or next(trying, _OVER) is not _OVER:
            return
        if trying is self._judging:
            self._judging = None
        else:
            self._measuring = None
        if self._lanes.may_pool:  # the other verdict may be that of a fault
            found = {"turned": self._turn.sizes} if self._measuring is None else {}
            self._verdicts.write({"may_pool": True, **found})
