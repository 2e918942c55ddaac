"""Reads and checks a GGUF file: header, metadata and tensor table, in plain Python.

GGUF is llama.cpp's file format (specification: `docs/gguf.md` in the ggml repository). A file is

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:  key string | value type u32 | value
    tensors:   name string | rank u32 | dimensions u64 ... | type u32 | data offset u64
    padding up to the alignment | tensor data

all little-endian; a string is a u64 length and that many bytes. Versions 2 and 3 share this layout.

Invariant: a `GgufFile` handed out has every length, offset and dimension checked against the size
of the file, so that whoever slices `tensor_bytes` cannot leave it, whatever the file contains.
Damage of any kind is a ModelError that names the file and the reason on one line. The file stays
mapped, not read: a 5 GB model costs the memory of the pages that are looked at. One that is still
arriving is checked against the size that it will have; what is not here yet is `NotHere`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from mlxlite.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # "general.alignment" overrides it
MAX_RANK = 4  # GGML_MAX_DIMS
MAX_ARRAY_DEPTH = 4  # arrays of arrays occur in no known file; a bound keeps recursion finite


class NotHere(ModelError):
    """Nothing is wrong so far, but the file must grow before more can be told."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How ggml stores one kind of tensor: `block_bytes` hold `block_elements` values."""

    name: str
    block_elements: int
    block_bytes: int


# ggml's `enum ggml_type` with the block sizes of ggml-common.h. Numbers that are missing were
# withdrawn from the format; the file cannot be read when it uses one.
BLOCK_TYPES: dict[int, BlockType] = {
    number: BlockType(name, elements, size)
    for number, name, elements, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table. `shape` is row-major (the file lists dimensions reversed)."""

    name: str
    block_type: BlockType
    shape: tuple[int, ...]
    start: int  # absolute position in the file
    n_bytes: int


class GgufFile:
    """A checked GGUF file, mapped read-only. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        path: Path,
        mapped: mmap.mmap,
        version: int,
        metadata: dict[str, Any],
        tensors: dict[str, TensorEntry],
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self._mapped = mapped

    def tensor_bytes(self, entry: TensorEntry) -> memoryview:
        """The raw blocks of one tensor; valid until `close`. NotHere if it is yet to arrive."""
        if entry.start + entry.n_bytes > len(self._mapped):
            raise NotHere(f"{self.path}: tensor {entry.name!r} has not arrived yet")
        return memoryview(self._mapped)[entry.start : entry.start + entry.n_bytes]

    def close(self) -> None:
        # A view that is still alive (an array in a traceback, say) forbids unmapping; the mapping
        # then goes with the last view.
        try:
            self._mapped.close()
        except BufferError:
            pass

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_gguf(path: Path, full_bytes: int | None = None) -> GgufFile:
    """Map and check `path`; ModelError when it is not a whole GGUF file.

    full_bytes: how long it will be, if it is still arriving; NotHere until its header is.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 24 <= (full_bytes or 0):
                raise NotHere(f"{path}: only {size} bytes have arrived yet")
            if size < 24:
                raise ModelError(f"{path}: not a GGUF file: only {size} bytes long")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return _Reader(path, mapped, full_bytes).read()
    except BaseException:
        mapped.close()
        raise


class _Reader:
    """A cursor over the mapped bytes. Each `take` is checked before it is done."""

    def __init__(self, path: Path, mapped: mmap.mmap, full_bytes: int | None) -> None:
        self.path = path
        self.mapped = mapped
        self.here = len(mapped)
        self.size = full_bytes or self.here
        self.at = 0

    def read(self) -> GgufFile:
        if self.mapped[:4] != MAGIC:
            self.fail(f"not a GGUF file: it starts with {self.mapped[:4]!r}, not {MAGIC!r}")
        self.at = 4
        version = self.u32()
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                self.fail("big-endian GGUF is not supported")
            self.fail(f"GGUF version {version} is not supported (supported: 2 and 3)")
        n_tensors = self.u64()
        n_keys = self.u64()
        # The smallest entry of either table bounds the count that the file can really hold.
        if n_keys * 13 > self.size:
            self.fail(f"claims {n_keys} metadata keys, more than the file can hold")
        if n_tensors * 24 > self.size:
            self.fail(f"claims {n_tensors} tensors, more than the file can hold")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.string("a metadata key")
            if key in metadata:
                self.fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(key, self.u32(), 0)
        tensors = self.tensor_table(n_tensors, self.alignment(metadata))
        return GgufFile(self.path, self.mapped, version, metadata, tensors)

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: damaged or unsupported GGUF file: {reason}")

    def wait(self, what: str) -> NoReturn:
        raise NotHere(f"{self.path}: {what} has not arrived yet")

    def take(self, n_bytes: int, what: str) -> int:
        """Move over `n_bytes` and give where they start."""
        start = self.at
        if n_bytes > self.size - start:
            self.fail(f"ends inside {what} (byte {start} + {n_bytes} of {self.size})")
        if n_bytes > self.here - start:
            self.wait(what)
        self.at = start + n_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.mapped, self.take(4, "a 32-bit number"))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.mapped, self.take(8, "a 64-bit number"))[0])

    def string(self, what: str) -> str:
        n_bytes = self.u64()
        start = self.take(n_bytes, what)
        try:
            return str(self.mapped[start : start + n_bytes], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {start} is not UTF-8")

    def value(self, key: str, kind: int, depth: int) -> Any:
        if (scalar := _SCALARS.get(kind)) is not None:
            start = self.take(scalar.size, f"the value of {key!r}")
            return scalar.unpack_from(self.mapped, start)[0]
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY and depth < MAX_ARRAY_DEPTH:
            return self.array(key, depth + 1)
        self.fail(f"metadata key {key!r} has the unknown value type {kind}")

    def array(self, key: str, depth: int) -> list[Any]:
        kind = self.u32()
        length = self.u64()
        if (scalar := _SCALARS.get(kind)) is not None:
            start = self.take(scalar.size * length, f"the array {key!r}")
            form = f"<{length}{scalar.format[-1:]}"
            return list(struct.unpack_from(form, self.mapped, start))
        if kind == _STRING:
            return self.strings(key, length)
        if length * 12 > self.size - self.at:
            self.fail(f"the array {key!r} claims {length} entries, more than the file can hold")
        return [self.value(key, kind, depth) for _ in range(length)]

    def strings(self, key: str, length: int) -> list[str]:
        """An array of strings. Vocabularies have 50,000 to 260,000 of them: hence the tight loop
        over local names instead of `string`."""
        if length * 8 > self.size - self.at:
            self.fail(f"the array {key!r} claims {length} strings, more than the file can hold")
        mapped, here, at = self.mapped, self.here, self.at
        unpack: Callable[[mmap.mmap, int], tuple[int]] = _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(length):
                start = at + 8
                if start > here:
                    at = start
                    break
                at = start + unpack(mapped, at)[0]
                if at > here:
                    break
                append(str(mapped[start:at], "utf-8"))
        except UnicodeDecodeError:
            self.fail(f"entry {len(out)} of the array {key!r} is not UTF-8")
        if at > self.size:
            self.fail(f"ends inside the array {key!r} (entry {len(out)})")
        if at > here:
            self.wait(f"the array {key!r}")
        self.at = at
        return out

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        # Powers of two only, as ggml itself demands; the upper bound is ours, against nonsense.
        if (
            type(alignment) is not int
            or alignment.bit_count() != 1
            or not 1 <= alignment <= 1 << 20
        ):
            self.fail(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def tensor_table(self, n_tensors: int, alignment: int) -> dict[str, TensorEntry]:
        listed: list[tuple[str, BlockType, tuple[int, ...], int]] = []
        for _ in range(n_tensors):
            name = self.string("a tensor name")
            rank = self.u32()
            if not 1 <= rank <= MAX_RANK:
                self.fail(f"tensor {name!r} has {rank} dimensions (allowed: 1 to {MAX_RANK})")
            shape = tuple(self.u64() for _ in range(rank))[::-1]
            number = self.u32()
            if (block_type := BLOCK_TYPES.get(number)) is None:
                self.fail(f"tensor {name!r} has the unknown type {number}")
            listed.append((name, block_type, shape, self.u64()))
        data_start = -(-self.at // alignment) * alignment

        tensors: dict[str, TensorEntry] = {}
        for name, block_type, shape, offset in listed:
            if name in tensors:
                self.fail(f"tensor {name!r} is listed twice")
            if 0 in shape or shape[-1] % block_type.block_elements:
                self.fail(
                    f"tensor {name!r} of shape {shape} does not consist of whole "
                    f"{block_type.name} blocks of {block_type.block_elements}"
                )
            if offset % alignment:
                self.fail(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
            n_bytes = prod(shape) // block_type.block_elements * block_type.block_bytes
            start = data_start + offset
            if start + n_bytes > self.size:
                self.fail(
                    f"tensor {name!r} would end at byte {start + n_bytes} of {self.size}: "
                    f"the file is cut short"
                )
            tensors[name] = TensorEntry(name, block_type, shape, start, n_bytes)
        self._check_overlap(tensors)
        return tensors

    def _check_overlap(self, tensors: dict[str, TensorEntry]) -> None:
        end, before = 0, ""
        for entry in sorted(tensors.values(), key=lambda entry: entry.start):
            if entry.start < end:
                self.fail(f"tensors {before!r} and {entry.name!r} overlap")
            end, before = entry.start + entry.n_bytes, entry.name


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
# The numbers of `enum gguf_metadata_value_type`.
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
