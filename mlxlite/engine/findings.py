"""What is found out about a model by trying, soon after its engine has started.

Whether its rows may share a forward (`judge`); on a CPU also which products to turn (`turned`), and
whether to replay layers (`rehearsal`), for which kernels are compiled meanwhile (`kernels`). It is
tried once a machine, a forward or a few products at a time between other work, and kept
(`verdicts`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxlite.engine import kernels
from mlxlite.engine.backend import Backend
from mlxlite.engine.judge import judge
from mlxlite.engine.lanes import Lanes
from mlxlite.engine.load import LoadedModel
from mlxlite.engine.on_cpu import OnCpu
from mlxlite.engine.rehearsal import rehearse
from mlxlite.engine.replay import Replay
from mlxlite.engine.turned import Turn
from mlxlite.engine.verdicts import Verdicts

log = logging.getLogger(__name__)

_OVER = object()
_WHILE_BUILDING_S = 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model came from, and where findings and kernels are kept."""

    folder: Path
    dense_folder: Path
    kernel_folder: Path
    dtype: str  # as it was asked for
    replays: bool = True  # whether layers may be replayed at all


class Findings:
    """Of one loaded model. Used on the engine thread only, but for `patience_s`.

    changed: what may be switched on, None where there is no such thing. lanes: told whether rows
    may pool.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        changed: OnCpu | None,
        lanes: Lanes,
        vocab_size: int,
        backend: Backend,
        source: Source,
    ) -> None:
        self._loaded, self._lanes, self._vocab_size = loaded, lanes, vocab_size
        self._source = source
        has_choice = changed is not None
        changed = changed or OnCpu(Turn(), Replay())  # of no layers
        self._turn, self._replay = changed.turn, changed.replay
        about = {"config": loaded.config, "dtype": loaded.dtype, "backend": backend.fingerprint}
        self._verdicts = Verdicts(source.kernel_folder, loaded.model, about)
        self._known = self._verdicts.read() or {}
        self._judging: Iterator[None] | None = None
        self._measuring: Iterator[None] | None = None
        self._building: kernels.Build | None = None
        self._rehearsing: Iterator[None] | None = None
        if self._known.get("may_pool") is True:
            lanes.may_pool = True
        else:
            self._judging = judge(loaded.model, lanes, loaded.dtype, vocab_size)
        if not self._turn.take(self._known.get("turned")):
            self._measuring = self._turn.measure()
        self._may_build = has_choice and source.replays and not self._recall_replay()

    def _recall_replay(self) -> bool:
        """Replay layers if that was found to pay before. False if there is more to find."""
        folder = kernels.settle(self._source.kernel_folder)
        found = self._known.get("replayed")
        if folder is None or not kernels.has_compiler():
            return True
        if not kernels.is_worth_it(self._loaded.weight_bytes):
            return True
        if not isinstance(found, dict):
            return False
        made = found.get("kernels")
        if not isinstance(made, list) or not kernels.present(folder, map(str, made)):
            return False
        self._replay.is_on = found.get("pays") is True and self._measuring is None
        return self._measuring is None

    @property
    def is_judged(self) -> bool:
        """Whether it is known if rows may share a forward."""
        return self._judging is None

    @property
    def patience_s(self) -> float | None:
        """How long to wait for work before asking again whether there is something to try."""
        return None if self._building is None else _WHILE_BUILDING_S

    def may_try(self, waiting: int, running: int) -> bool:
        """Whether there is something to try and it is time, with so many rows. If rows may share a
        forward: not while a single one runs, which would wait for it and gain nothing. All else:
        when there is none."""
        if self._judging is not None:
            return running != 1
        if waiting + running:
            return False
        if self._building is not None:
            return self._building.is_over
        return self._measuring is not None or self._may_build or self._rehearsing is not None

    def go_on(self) -> None:
        """Try a little more."""
        trying = self._judging or self._measuring
        if trying is not None:
            if next(trying, _OVER) is not _OVER:
                return
            if trying is self._judging:
                self._judging = None
                # The other verdict may be that of a fault.
                self._known = {"may_pool": True} if self._lanes.may_pool else {}
            else:
                self._measuring = None
                self._known["turned"] = self._turn.sizes
            self._keep()
        elif self._building is not None:
            self._take_kernels(self._building)
        elif self._rehearsing is not None:
            if next(self._rehearsing, _OVER) is _OVER:
                self._rehearsing = None
                self._known["replayed"]["pays"] = self._replay.is_on
                self._keep()
        else:
            self._may_build = False
            if self._lanes.may_pool:
                self._build()

    def _keep(self) -> None:
        if self._lanes.may_pool:
            self._verdicts.write(self._known)

    def _build(self) -> None:
        source = self._source
        what = {
            "model": str(source.folder),
            "dense": str(source.dense_folder),
            "dtype": source.dtype,
            "turned": self._turn.sizes,
            "vocab_size": self._vocab_size,
        }
        try:
            self._building = kernels.Build(source.kernel_folder, what)
        except OSError as error:
            log.debug("no kernels are compiled: %s", error)

    def _take_kernels(self, building: kernels.Build) -> None:
        """The child is over: what it made is tried, if it made it."""
        self._building = None
        try:
            made = building.made()
        except (OSError, ValueError) as error:  # not its fault: it is tried again another time
            log.debug("no kernels were compiled: %s", error)
            return
        self._known["replayed"] = {"pays": False, "kernels": made or []}
        if made is None:
            log.info("MLX cannot compile its kernels here; layers go the usual way")
            self._keep()
            return
        loaded, vocab_size = self._loaded, self._vocab_size
        self._rehearsing = rehearse(
            loaded.model, self._lanes, self._replay, loaded.dtype, vocab_size
        )

    def doubt(self) -> None:
        """A step has failed: go the usual way, as long as this engine lives."""
        self._replay.stop()

    def close(self) -> None:
        """Leave nothing running."""
        self._replay.stop()
        if self._building is not None:
            self._building.stop()
            self._building = None
