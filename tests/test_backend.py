"""The backend: which BLAS is tried, what is said without one, and no traceback without MLX."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlxlite.engine import backend

import mlx.core as mx  # isort: skip


def run(code: str, **environ: str) -> str:
    """What a child prints; MLXLITE_BLAS of this process does not reach it."""
    clean = {name: value for name, value in os.environ.items() if name != "MLXLITE_BLAS"}
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


WITHOUT_MLX = """
import sys
sys.path.insert(0, "BROKEN")
try:
    import mlxlite.engine.backend
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("is_broken", [True, False], ids=["no library", "no core"])
def test_without_a_backend_the_extra_is_named(tmp_path: Path, is_broken: bool) -> None:
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").touch()
    if is_broken:  # as `pip install mlx` leaves it on Linux
        (package / "core.py").write_text("raise ImportError('libmlx.so: cannot open')")
    said = run(WITHOUT_MLX.replace("BROKEN", str(tmp_path)))
    assert said.startswith("BackendMissing no MLX backend is installed")
    assert "mlxlite[cpu" in said and "mlxlite[cuda12]" in said and "mlxlite[cuda13]" in said
    assert "\n" not in said


def test_mlxlite_itself_imports_without_mlx() -> None:
    assert run("import sys, mlxlite; print('mlx' in sys.modules)") == "False"


# ---------------------------------------------------------------------------------------- BLAS


def names(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> list[str]:
    monkeypatch.delenv("MLXLITE_BLAS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("MLXLITE_BLAS", chosen)
    return backend._fast_blas_names()


def test_the_users_choice_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(monkeypatch, "libmine.so") == ["libmine.so"]
    assert names(monkeypatch, "") == []


def test_mkl_of_the_extra_comes_first_and_openblas_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    mkl = tmp_path / "lib" / "libmkl_rt.so.3"
    mkl.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert names(monkeypatch, None) == [
        str(mkl),
        "libmkl_rt.so.2",
        "libopenblas.so.0",
        "libopenblas.so",
    ]


def test_the_first_library_that_loads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def load(name: str, mode: int) -> object:
        tried.append(name)
        if name != "third":
            raise OSError("not here")
        return object()

    monkeypatch.setattr(backend.platform, "system", lambda: "Linux")
    monkeypatch.setattr(backend.ctypes, "CDLL", load)
    monkeypatch.setattr(backend, "_fast_blas_names", lambda: ["first", "second", "third", "last"])
    assert backend._load_fast_blas() == "third" and tried == ["first", "second", "third"]
    monkeypatch.setattr(backend, "_fast_blas_names", lambda: ["first"])
    assert backend._load_fast_blas() is None
    tried.clear()
    monkeypatch.setattr(backend.platform, "system", lambda: "Darwin")
    assert backend._load_fast_blas() is None and not tried, "macOS has Accelerate"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs a BLAS")
@pytest.mark.parametrize("chosen", ["", "/nowhere/libnothing.so"])
def test_no_blas_is_no_failure(chosen: str) -> None:
    code = "from mlxlite.engine import backend; print(backend._load_fast_blas(), backend.blas)"
    assert run(code, MLXLITE_BLAS=chosen) == "None None"


# -------------------------------------------------------------------------------------- values


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a CPU's values")
def test_a_cpu_computes_in_float32_with_dense_weights(tmp_path: Path) -> None:
    found = backend.start(tmp_path)
    assert found.kind == "cpu" and found.prefers_dense and found.blas == backend.blas
    assert found.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    smallest, largest = found.chunk_tokens
    assert 0 < smallest < largest
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize(
    ("kind", "wanted", "dtype"),
    [
        ("cpu", "auto", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
        ("metal", "auto", None),
        ("cuda", "auto", None),
        ("cuda", "float16", "float16"),
    ],
)
def test_dtypes(kind: str, wanted: str, dtype: str | None, tmp_path: Path) -> None:
    assert replace(backend.start(tmp_path), kind=kind).dtype(wanted) == dtype
