"""All that a model's forward does otherwise on a CPU, put in place in one order.

The engine and the child that compiles for it (`compiling`) install the same: with other operations
the child's kernels would be others, and the engine would have to compile in the middle of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxlite.engine import gated, replay, rotary, turned


@dataclass(frozen=True, slots=True)
class OnCpu:
    """What is off until it was found to pay (`findings`)."""

    turn: turned.Turn
    replay: replay.Replay


def install(model: Any) -> OnCpu:
    rotary.install(model)
    gated.install()
    return OnCpu(turned.install(model), replay.install(model))
