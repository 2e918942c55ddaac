"""The GGUF reader: what it reads, and that no damage gets past it or stops it."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import ModelError
from mlxlite.models.gguf_file import GgufFile, NotHere, read_gguf
from tests.gguf_writer import string, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "flag": True,
    "count": 7,
    "scale": 0.5,
    "names": ["a", "ü", ""],
    "ids": [3, -1],
    "nested": [[1, 2], [3]],
}
TENSORS = {
    "a.weight": ("F32", (2, 3), struct.pack("<6f", *range(6))),
    "b.weight": ("Q8_0", (1, 32), bytes(range(34))),
}


def written(folder: Path, **options: Any) -> Path:
    return write_gguf(folder / "t.gguf", METADATA, TENSORS, **options)


def touch_all(file: GgufFile) -> int:
    """Read every byte that the table promises."""
    return sum(len(bytes(file.tensor_bytes(entry))) for entry in file.tensors.values())


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64])
def test_reads_metadata_and_tensors(tmp_path: Path, version: int, alignment: int) -> None:
    metadata = METADATA | ({"general.alignment": alignment} if alignment != 32 else {})
    path = write_gguf(tmp_path / "t.gguf", metadata, TENSORS, version, alignment)
    with read_gguf(path) as file:
        assert file.version == version
        assert file.metadata == metadata
        assert {name: entry.shape for name, entry in file.tensors.items()} == {
            "a.weight": (2, 3),
            "b.weight": (1, 32),
        }
        for name, (kind, _, raw) in TENSORS.items():
            assert file.tensors[name].block_type.name == kind
            assert bytes(file.tensor_bytes(file.tensors[name])) == raw


def test_every_scalar_type(tmp_path: Path) -> None:
    values = [
        (0, "<B", 200), (1, "<b", -100), (2, "<H", 60000), (3, "<h", -30000), (4, "<I", 1 << 31),
        (5, "<i", -5), (6, "<f", 1.5), (7, "<?", True), (10, "<Q", 1 << 60), (11, "<q", -1),
        (12, "<d", 0.1),
    ]  # fmt: skip
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for kind, form, content in values:
        raw += string(f"k{kind}") + struct.pack("<I", kind) + struct.pack(form, content)
    path = tmp_path / "t.gguf"
    path.write_bytes(raw)
    with read_gguf(path) as file:
        assert file.metadata == {f"k{kind}": content for kind, _, content in values}


def test_each_byte_flipped_is_an_error_or_a_sound_file(tmp_path: Path) -> None:
    raw = written(tmp_path).read_bytes()
    path = tmp_path / "flipped.gguf"
    n_errors = 0
    for at in range(len(raw)):
        for mask in (0x01, 0x80, 0xFF):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
            try:
                with read_gguf(path) as file:
                    touch_all(file)
            except ModelError as error:
                n_errors += 1
                assert str(path) in error.message and "\n" not in error.message
    assert n_errors > len(raw) / 2


def test_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    raw = written(tmp_path).read_bytes()
    padding = -34 % 32  # after the last tensor; a file without it is whole
    path = tmp_path / "cut.gguf"
    for length in range(len(raw) - padding):
        path.write_bytes(raw[:length])
        with pytest.raises(ModelError, match="cut.gguf"):
            read_gguf(path)


def test_one_that_is_still_arriving(tmp_path: Path) -> None:
    """Its header is good as soon as it is whole; until then nothing is said against it."""
    whole = written(tmp_path)
    raw = whole.read_bytes()
    with read_gguf(whole) as file:
        first = min(file.tensors.values(), key=lambda entry: entry.start)
        wanted = {name: entry.start for name, entry in file.tensors.items()}
    path = tmp_path / "coming.gguf"
    n_waits = 0
    for length in range(4, len(raw) + 1):
        path.write_bytes(raw[:length])
        try:
            with read_gguf(path, len(raw)) as file:
                assert {name: entry.start for name, entry in file.tensors.items()} == wanted
                if length < first.start + first.n_bytes:
                    with pytest.raises(NotHere, match="has not arrived yet"):
                        file.tensor_bytes(first)
                else:
                    assert len(file.tensor_bytes(first)) == first.n_bytes
        except NotHere:
            n_waits += 1
            assert length < first.start
    assert first.start - 32 < n_waits + 4 <= first.start  # but for the padding
    path.write_bytes(raw[:-40])
    with pytest.raises(ModelError, match="the file is cut short"):
        read_gguf(path, len(raw) - 40)


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ({0: b"GGML"}, "not a GGUF file"),
        ({4: struct.pack("<I", 1)}, "version 1 is not supported"),
        ({4: struct.pack(">I", 3)}, "big-endian"),
        ({8: struct.pack("<Q", 1 << 60)}, "tensors, more than the file can hold"),
        ({16: struct.pack("<Q", 1 << 60)}, "metadata keys, more than the file can hold"),
        ({24: struct.pack("<Q", 1 << 62)}, "ends inside a metadata key"),
    ],
)
def test_reasons(tmp_path: Path, patch: dict[int, bytes], reason: str) -> None:
    path = written(tmp_path)
    raw = bytearray(path.read_bytes())
    for at, new in patch.items():
        raw[at : at + len(new)] = new
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=reason):
        read_gguf(path)


def test_overlapping_tensors_and_missing_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = path.read_bytes()
    at = raw.index(b"b.weight") + 8 + 4 + 16 + 4  # name, rank, dimensions, type: then the offset
    path.write_bytes(raw[:at] + struct.pack("<Q", 0) + raw[at + 8 :])
    with pytest.raises(ModelError, match="'a.weight' and 'b.weight' overlap|overlap"):
        read_gguf(path)
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_large_vocabulary_is_quick(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", {"tokens": [f"token{i}" for i in range(150_000)]}, {})
    started_s = time.perf_counter()
    with read_gguf(path) as file:
        assert len(file.metadata["tokens"]) == 150_000
    assert time.perf_counter() - started_s < 1
