"""Which MLX this is, and everything that depends on it (decisions D1, D3, D23).

Import this file before anything that imports `mlx`: on Linux it first loads a fast BLAS into the
process, because mlx-cpu's wheel carries a reference one (3 GFLOP/s where MKL gives 280 on the same
two cores) and takes whichever `cblas_sgemm` is already there. No other file asks which backend it
is on; they read the `Backend` value.

Owned by nobody after import; plain values only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlite.errors import BackendMissing


def _fast_blas_names() -> list[str]:
    """Where a fast BLAS may be, best first: MLXLITE_BLAS, the extra `mkl`, the system's."""
    chosen = os.environ.get("MLXLITE_BLAS")
    if chosen is not None:
        return [chosen] if chosen else []  # MLXLITE_BLAS= (empty) asks for none
    prefixes = dict.fromkeys([sys.prefix, sys.base_prefix])
    mkl = [str(p) for prefix in prefixes for p in Path(prefix, "lib").glob("libmkl_rt.so*")]
    return [*mkl, "libmkl_rt.so.2", "libopenblas.so.0", "libopenblas.so"]


def _load_fast_blas() -> str | None:
    """Load the first BLAS that works into the global namespace; its name, or None."""
    if platform.system() != "Linux":
        return None  # macOS has Accelerate
    for name in _fast_blas_names():
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None


blas = _load_fast_blas()
try:
    import mlx.core as mx
except ImportError as error:
    extras = "mlxlite[cpu], mlxlite[cuda12] or mlxlite[cuda13]"
    if platform.machine() == "x86_64":
        extras = "mlxlite[cpu,mkl], mlxlite[cuda12] or mlxlite[cuda13]"
    raise BackendMissing(f"no MLX backend is installed ({error}); install {extras}") from None


@dataclass(frozen=True, slots=True)
class Backend:
    """kind: metal, cuda or cpu. blas: the library preloaded on a CPU, or None.

    chunk_tokens: (smallest, largest) prefill chunk. On a CPU speed is flat in the chunk size, so
    small chunks cost nothing (engine-notes section 9); a GPU wants large ones.
    """

    kind: str
    blas: str | None
    chunk_tokens: tuple[int, int]
    prefers_dense: bool  # dequantise at load when it fits (D3)
    runs_ahead: bool  # whether a queued forward runs while Python goes on
    # Beside B rows a row gains by a forward of its own with more than run_share x B known tokens:
    # a CPU computes 5 tokens in twice the time of one and 16 in thrice (engine-notes section 2);
    # for a GPU, which waits for the weights, 16 are as quick as one.
    run_share: float
    memory_bytes: int  # RAM, or what the GPU says

    @property
    def fingerprint(self) -> list[Any]:
        """What a measured time or a rounding may depend on besides the model."""
        threads = [os.environ.get(name) for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS")]
        version = getattr(mx, "__version__", "")  # its stubs lack it
        return [self.kind, self.blas, os.cpu_count(), threads, version]

    def dtype(self, wanted: str) -> str | None:
        """The activations' dtype by name; None leaves the weights as they are."""
        if wanted != "auto":
            return wanted
        return "float32" if self.kind == "cpu" else None


def start(cache: Path) -> Backend:
    """Settle what belongs to the process: compile mode, kernel cache. Call once, on the engine
    thread.

    cache: a folder for compiled kernels.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        # Compiled CPU kernels need a C++ compiler at run time (8 s cold) and gain nothing here.
        mx.disable_compile()
        # `async_eval` waits there until all but ten of a forward's hundreds of tasks are done (a
        # constant of MLX's): tokens that are read after it would come a step late.
        return Backend("cpu", blas, (32, 512), True, False, 1.25, _ram_bytes())
    if mx.metal.is_available():
        return Backend("metal", None, (64, 2048), False, True, 0.4, _ram_bytes())
    os.environ.setdefault("MLX_PTX_CACHE_DIR", str(cache / "ptx"))  # D23: kernels compile once
    memory = mx.device_info().get("memory_size", 0)
    return Backend("cuda", None, (128, 2048), False, True, 0.4, int(memory) or _ram_bytes())


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
