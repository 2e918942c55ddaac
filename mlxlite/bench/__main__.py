"""Runs the parts and prints a report in Markdown (floor 4).

python -m mlxlite.bench [--model NAME] [--tokens 64] [--budget 180] [--only PART]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import replace
from importlib.metadata import version

from mlxlite import config
from mlxlite.bench import cost, crowd, peers
from mlxlite.models import library

PARTS = ("mlxlite", "peers", "tax", "crowd", "cost")
_ROWS = 16  # of the crowd
_TURNS = 12  # of the tax, a row each
_CROWD_TURNS = 3
_TOKENS = 32  # a row, of both


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlxlite.bench", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=64, help="of the long answer")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds a leg may take")
    parser.add_argument("--only", choices=PARTS, default=None)
    given = parser.parse_args(arguments)
    settings = config.build({"port": "0", "log_level": "error"})
    model = library.resolve(given.model, settings.home)
    print(
        f"{model.name}, {platform.machine()} with {os.cpu_count()} cores, mlx {version('mlx')}, "
        f"mlx-lm {version('mlx-lm')}, Python {platform.python_version()}\n"
    )
    parts = {given.only} if given.only else set(PARTS)
    if parts & {"mlxlite", "peers"}:
        legs = peers.compare(model, given.tokens, given.budget, given.only == "mlxlite")
        print(peers.table(legs, given.budget))
        for leg in legs:
            for note in leg.notes:
                print(f"\n{leg.name}: {note}")
    if "tax" in parts:
        print(f"\n{crowd.measure(settings, model, 1, _TOKENS, _TURNS)}")
    if "crowd" in parts:
        wide = replace(settings, batch=_ROWS)
        print(f"\n{crowd.measure(wide, model, _ROWS, _TOKENS, _CROWD_TURNS)}")
    if "cost" in parts:
        shown = ", ".join(f"{k} {v * 1e6:.0f}" for k, v in cost.measure(settings, model).items())
        print(f"\nCPU time from event to socket, µs a token: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
