"""Reads, checks and writes safetensors files in plain Python.

A file is a u64 header length, a JSON header `{name: {dtype, shape, data_offsets}}` and the data
(format: README of huggingface/safetensors). `check_safetensors` runs before MLX sees a weight file,
so that a damaged one is one clear line; `SafetensorsWriter` lays the file out first and lets the
caller fill tensors in any order and in slices, so that an import never holds a tensor whole.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from mlxlite.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a header says of one tensor."""

    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def check_safetensors(path: Path) -> dict[str, TensorSpec]:
    """Check the header against the file; give name -> spec. ModelError names file and reason."""

    def fail(reason: str) -> NoReturn:
        raise ModelError(f"{path}: damaged safetensors file: {reason}")

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                fail(f"only {size} bytes long")
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > MAX_HEADER_BYTES or header_bytes > size - 8:
                fail(f"its header claims {header_bytes} bytes, the file has {size}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        fail(f"its header is not JSON ({str(error)[:100]})")
    if not isinstance(header, dict):
        fail("its header is not a JSON object")

    data_bytes = size - 8 - header_bytes
    specs: dict[str, TensorSpec] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        spec, start, end = _parse_entry(name, entry, fail)
        if not 0 <= start <= end <= data_bytes:
            fail(
                f"tensor {name!r} lies at {start}..{end}, the file holds {data_bytes} bytes of data"
            )
        if end - start != spec.n_bytes:
            fail(
                f"tensor {name!r} has {end - start} bytes, "
                f"{spec.dtype} of shape {list(spec.shape)} needs {spec.n_bytes}"
            )
        specs[name] = spec
        spans.append((start, end, name))
    spans.sort()
    for (_, end, before), (start, _, name) in zip(spans, spans[1:], strict=False):
        if start < end:
            fail(f"tensors {before!r} and {name!r} overlap")
    return specs


def _parse_entry(name: str, entry: Any, fail: Any) -> tuple[TensorSpec, int, int]:
    if not isinstance(entry, dict):
        fail(f"the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        fail(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _is_sizes(shape):
        fail(f"tensor {name!r} has the bad shape {shape!r}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        fail(f"tensor {name!r} has the bad data_offsets {offsets!r}")
    return TensorSpec(dtype, tuple(shape)), offsets[0], offsets[1]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


class SafetensorsWriter:
    """Writes one file whose tensors are known beforehand; `write` fills a slice of one of them.

    The caller fills every byte; leaving the `with` block without an error syncs the file to disk.
    """

    def __init__(self, path: Path, specs: dict[str, TensorSpec]) -> None:
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        at = 0
        for name, spec in specs.items():
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.n_bytes],
            }
            self._starts[name] = at
            at += spec.n_bytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # aligned data, as the reference implementation writes it
        self._data_start = 8 + len(raw)
        self._file = open(path, "wb")  # closed in __exit__
        self._file.write(struct.pack("<Q", len(raw)) + raw)
        self._file.truncate(self._data_start + at)

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Put `data` at byte `offset` of tensor `name`."""
        self._file.seek(self._data_start + self._starts[name] + offset)
        self._file.write(data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
