"""The child that has MLX compile the kernels of replayed layers (`kernels`): it runs the steps that
the engine will run, in a folder of its own, and then hands over what came to be there.

In: one JSON object, see `kernels.Build`. Out: the names of the libraries, JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlxlite.engine import backend as mlx_backend  # comes before what imports mlx
from mlxlite.engine import kernels, load, on_cpu, rehearsal
from mlxlite.engine.lanes import Lanes

_NICE = 19


def main() -> None:
    what = json.loads(sys.stdin.read())
    os.nice(_NICE)
    backend = mlx_backend.start(Path(what["kernels"]))
    folder = kernels.settle(Path(what["kernels"]))
    assert folder is not None
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
        os.environ["TMPDIR"] = scratch
        run(backend, what)
        made = [path.relative_to(scratch) for path in Path(scratch).rglob("*.so")]
        for name in made:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / name).replace(folder / name)
    print(json.dumps([str(name) for name in made]))


def run(backend: mlx_backend.Backend, what: dict[str, Any]) -> None:
    loaded = load.load(Path(what["model"]), backend, what["dtype"], Path(what["dense"]))
    changed = on_cpu.install(loaded.model)
    changed.turn.take(what["turned"])
    steps = rehearsal.try_out(
        loaded.model, Lanes(loaded.model), changed.replay, loaded.dtype, what["vocab_size"]
    )
    for _ in steps:
        pass


if __name__ == "__main__":
    main()
