"""The check of safetensors headers, and the writer against MLX's reader."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxlite.errors import ModelError
from mlxlite.models.safetensors_file import SafetensorsWriter, TensorSpec, check_safetensors


def file_with(path: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_the_writer_writes_mlx_reads(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    specs = {"a": TensorSpec("F32", (2, 2)), "b": TensorSpec("U32", (3,))}
    with SafetensorsWriter(path, specs) as writer:
        writer.write("b", 0, struct.pack("<3I", 7, 8, 9))
        writer.write("a", 8, struct.pack("<2f", 3, 4))
        writer.write("a", 0, struct.pack("<2f", 1, 2))
    assert check_safetensors(path) == specs
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    assert arrays["a"].tolist() == [[1, 2], [3, 4]]
    assert arrays["b"].tolist() == [7, 8, 9]


def test_reads_what_mlx_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    mx.save_safetensors(str(path), {"x": mx.ones((2, 3), mx.bfloat16)}, {"format": "mlx"})
    assert check_safetensors(path) == {"x": TensorSpec("BF16", (2, 3))}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([1], "not a JSON object"),
        ({"t": 5}, "is not an object"),
        ({"t": entry(dtype="F99")}, "unknown dtype 'F99'"),
        ({"t": entry(dtype=["F32"])}, "unknown dtype"),
        ({"t": entry(shape=[-1, 4])}, "bad shape"),
        ({"t": entry(shape="x")}, "bad shape"),
        ({"t": entry(offsets=[0])}, "bad data_offsets"),
        ({"t": entry(offsets=[0, 32], shape=[8])}, "the file holds 16 bytes"),
        ({"t": entry(offsets=[8, 0])}, "lies at 8..0"),
        ({"t": entry(shape=[3])}, r"has 16 bytes, F32 of shape \[3\] needs 12"),
        (
            {"t": entry(shape=[2], offsets=[0, 8]), "u": entry(shape=[2], offsets=[4, 12])},
            "'t' and 'u' overlap",
        ),
    ],
)
def test_damage_is_one_line(tmp_path: Path, header: Any, reason: str) -> None:
    path = file_with(tmp_path / "d.safetensors", header)
    with pytest.raises(ModelError, match=reason) as caught:
        check_safetensors(path)
    assert str(path) in caught.value.message and "\n" not in caught.value.message


def test_cut_and_flipped(tmp_path: Path) -> None:
    whole = file_with(tmp_path / "w.safetensors", {"t": entry()}).read_bytes()
    path = tmp_path / "d.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="d.safetensors"):
            check_safetensors(path)
    for at in range(len(whole) - 16):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(ModelError):
            check_safetensors(path)
    with pytest.raises(ModelError, match="cannot be read"):
        check_safetensors(tmp_path / "none.safetensors")
