"""`mlxlite bench`: which servers, which weights, which legs; then the report (floor 4).

mlxlite beside `mlx_lm server`, as pip installs it and, on a CPU, once more with the BLAS that
mlxlite uses; or beside servers that run already (`--against`). All get the same weights and the
same requests, in turns.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import platform
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlxlite import __version__
from mlxlite.bench import figures, forms, inner, legs, report, weights
from mlxlite.bench.client import Base, RequestFailed, get
from mlxlite.bench.matrix import Matrix, run
from mlxlite.bench.servers import Server, run_once
from mlxlite.config import Settings
from mlxlite.engine import backend
from mlxlite.errors import ModelError
from mlxlite.models import fit, library

_ROWS = 16  # of mlxlite: as many as the widest leg has streams; the peer's own default is 32
_UNPACK_S = 300.0
_PEER, _SAME_BLAS = "mlx_lm.server", "mlx_lm.server, same BLAS"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. only: names of legs, empty: all. against: servers instead of mlx_lm's.
    is_alone: without any. is_packed: serve the folder as it is, not its dense copy."""

    model: library.LocalModel
    is_packed: bool = False
    only: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    key: str | None = None
    is_alone: bool = False
    budget_s: float = 180.0
    json_file: Path | None = None


def chosen(only: Sequence[str]) -> tuple[str, ...]:
    """The legs that these names mean: a name, or the beginning of several (`streams`).

    Raises ValueError, one line, for a name that means none."""
    found = []
    for name in only:
        meant = [leg for leg in legs.NAMES if leg == name] or [
            leg for leg in legs.NAMES if leg.rstrip("0123456789") == name
        ]
        if not meant:
            raise ValueError(f"no leg {name!r}; there are {', '.join(legs.NAMES)}")
        found += meant
    return tuple(name for name in legs.NAMES if name in found) if only else legs.NAMES


def make_shape(name: str, settings: Settings) -> library.LocalModel:
    """A model of random weights, in the dtype that this machine computes in."""
    return weights.make_shape(name, settings.home, "F32" if _machine().prefers_dense else "BF16")


@functools.cache
def _machine() -> backend.Backend:
    """What MLX runs on here. Asking leaves no setting behind that the servers would inherit."""
    before = dict(os.environ)
    found = backend.start(Path(tempfile.gettempdir()))
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    return found


def bench(wanted: Wanted, settings: Settings) -> int:
    """Measure, print the report, write the JSON; the exit code."""
    names = chosen(wanted.only)
    run_legs = [leg for leg in legs.LEGS if leg.name in names]
    with tempfile.TemporaryDirectory(prefix="mlxlite-bench-") as temporary:
        folder = _served(wanted, settings, Path(temporary) / wanted.model.name)
        served = library.describe(folder, wanted.model.name)
        servers = _servers(wanted, served)
        results = figures.Results([server.name for server in servers])
        about = _about(wanted, served, servers)
        print(_headline(about), flush=True)
        began = time.monotonic()
        # Whoever ends us ends the servers too, and learns what was measured until then.
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            if run_legs:
                matrix = Matrix(results, run_legs, wanted.budget_s, _say, uuid.uuid4().hex[:6])
                run(matrix, _groups(servers, served))
            if legs.INSIDE in names:
                results.inside = inner.measure(settings, served, _say)
            if legs.GRAMMAR in names:
                results.inside |= forms.measure(settings, served, _say)
        except KeyboardInterrupt:
            results.notes.append("the run was interrupted")
        finally:
            signal.signal(signal.SIGTERM, before)
        about["seconds"] = round(time.monotonic() - began)
    # 1. What the values say.
    peers = [name for name in results.servers[1:] if not wanted.against]
    peer = _PEER if _PEER in peers else None
    same_blas = _SAME_BLAS if _SAME_BLAS in peers else None
    judged = figures.judge(results, peer, same_blas, about["blas"])
    compared, differ = figures.differences(results)
    # 2. The report; the file first, since whoever reads the rest may leave.
    if wanted.json_file is not None:
        found = report.as_json(results, about, judged, compared, differ)
        wanted.json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if results.samples:
        print(f"\n{report.table(results)}\n")
        print(report.equality(compared, differ))
    if results.inside:
        print(f"\nInside one process: {json.dumps(results.inside)}")
    print(f"\n{report.verdicts(judged)}")
    for note in results.notes:
        print(f"- note: {note}")
    return 0 if results.samples or results.inside else 1


def _interrupt(number: int, frame: object) -> None:
    """Like Ctrl-C, but once: `timeout` sends it twice, and the way out must be free."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------- weights and servers


def _served(wanted: Wanted, settings: Settings, folder: Path) -> Path:
    """The folder that all servers get."""
    model = wanted.model
    if wanted.is_packed or model.bits is None or not _machine().prefers_dense:
        return model.folder
    if (copy := weights.dense_copy(settings, model)) is None:
        command = [sys.executable, "-m", "mlxlite", "generate", "--model", str(model.folder)]
        try:
            run_once([*command, "--home", str(settings.home), "--max-tokens", "1", "Hi"], _UNPACK_S)
        except RequestFailed as error:
            raise ModelError(f"{model.folder}: cannot be unpacked: {error}") from None
        copy = weights.dense_copy(settings, model)
    # None: too large to be unpacked here, so both run it as it is.
    return model.folder if copy is None else weights.dress(model, copy, folder)


def _servers(wanted: Wanted, served: library.LocalModel) -> list[Server]:
    """Ours first."""
    here = Base("127.0.0.1", 0)
    python, folder = sys.executable, str(served.folder)
    own = [python, "-m", "mlxlite", "serve", "--model", folder, "--batch", str(_ROWS)]
    servers = [Server("mlxlite", here, own, "/ready")]
    if wanted.is_alone:
        return servers
    if wanted.against:
        for url in wanted.against:
            base = Base.parse(url, wanted.key)
            servers.append(Server(url, base, model=_model_of(base)))
        return servers
    peer = [python, "-m", "mlx_lm", "server", "--model", folder]
    servers.append(Server(_PEER, here, peer, "/health"))
    if backend.blas is not None and _machine().prefers_dense:
        preload = {"LD_PRELOAD": backend.blas}
        servers.append(Server(_SAME_BLAS, here, peer, "/health", preload))
    return servers


def _model_of(base: Base) -> str:
    """The first model that a running server lists. Raises ModelError if it does not answer."""
    try:
        listed = asyncio.run(get(base, "/models"))
        return str(listed["data"][0]["id"])
    except RequestFailed as error:
        raise ModelError(f"{base.host}:{base.port}: {error}") from None
    except (KeyError, IndexError, TypeError):
        return "default_model"  # it lists none; most servers do not look


def _groups(servers: list[Server], served: library.LocalModel) -> list[list[Server]]:
    """All together, so that rounds alternate, if their weights take less than half the memory."""
    ours = [server for server in servers if server.is_ours]
    if served.size_bytes * len(ours) <= _machine().memory_bytes // 2:
        return [servers]
    others = [[server] for server in servers[1:]]
    return [[servers[0]], *others]


# ---------------------------------------------------------------------------------------- about


def _about(wanted: Wanted, served: library.LocalModel, servers: list[Server]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": {
            "name": wanted.model.name,
            "source": wanted.model.source,
            "bytes": served.size_bytes,
            "weights": f"{served.bits}-bit" if served.bits else "dense",
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": fit.ram_bytes(),
            "load": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {"mlxlite": __version__, "python": platform.python_version()},
        "blas": backend.blas,
        "servers": [{"name": s.name, "command": s.command, "environ": s.environ} for s in servers],
    }
    for package in ("mlx", "mlx-lm", "transformers", "tokenizers"):
        try:
            found["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _headline(about: dict[str, Any]) -> str:
    machine, versions = about["machine"], about["versions"]
    shown = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{about['model']['name']}, {about['model']['weights']} weights of "
        f"{about['model']['bytes'] / 1e6:.0f} MB; {machine['system']}, {machine['processor']}, "
        f"{machine['cores']} cores, load {machine['load'][0]}; {shown}"
    )


def _processor() -> str:
    """What the system calls the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
