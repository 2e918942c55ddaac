"""Kernels that MLX compiles for replayed layers on a CPU, in a process of its own.

MLX writes C++ for what `mx.compile` joined and has g++ make a library of it: half a second each, a
dozen for a model, while the thread that asked waits. So a child (`compiling`) does it once a
machine, at the lowest priority. What it made is moved beside the engine's other kernels when it is
whole. Without g++ MLX records nothing.

    fused/mlx/<version>/cpu/lib….so        MLX looks where TMPDIR points
    fused/.building-…                      the child's own, until it is done
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Of a model's weights. Below, nobody waits for a step; above, the child's copy takes too much.
_LEAST_BYTES = 32 * 2**20
_MOST_BYTES = 2**30


def has_compiler() -> bool:
    """As MLX asks."""
    return shutil.which("g++") is not None


def settle(kernel_folder: Path) -> Path | None:
    """Have MLX keep and look for its libraries in our folder; None if it cannot be made. Python's
    own temporary files stay where they were."""
    folder = kernel_folder / "fused"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.debug("no kernels can be kept: %s", error)
        return None
    tempfile.gettempdir()  # Python looks it up once
    if os.environ.get("TMPDIR") != str(folder):
        os.environ["TMPDIR"] = str(folder)
    return folder


def present(folder: Path, names: Iterable[str]) -> bool:
    """Whether these libraries are there, each named by its path in the folder."""
    return all((folder / name).is_file() for name in names)


class Build:
    """A child that compiles what a model needs.

    what: the model's folder, dense folder and dtype, and which products are turned.
    """

    def __init__(self, kernel_folder: Path, what: dict[str, Any]) -> None:
        package = Path(__file__).resolve().parent.parent.parent
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlxlite.engine.compiling"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "TMPDIR": tempfile.gettempdir(),
            },
            start_new_session=True,  # a Ctrl-C is the server's
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**what, "kernels": str(kernel_folder)}).encode())
        self._process.stdin.close()

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def made(self) -> list[str] | None:
        """The libraries that were made, once it is over; None if MLX could not make them. Raises
        OSError if it was ended from outside."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            said = stream.read()
        status = self._process.wait()
        if status < 0:
            raise OSError(f"signal {-status}")
        if status > 0:
            return None
        return [str(name) for name in json.loads(said)]

    def stop(self) -> None:
        """It may be running still."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def is_worth_it(weight_bytes: int) -> bool:
    """Whether a child for a model of this size is no burden."""
    return _LEAST_BYTES <= weight_bytes <= _MOST_BYTES and _free_bytes() > 3 * weight_bytes


def _free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration, ValueError):
        return 0
