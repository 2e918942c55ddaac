"""Block decoding against two oracles: scalar loops written from the layouts, and `mx.load`."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxlite.models import gguf_blocks
from mlxlite.models.gguf_blocks import DECODERS, dequantise, pack_bits, quantise, repack
from mlxlite.models.gguf_file import BLOCK_TYPES
from tests.gguf_writer import NUMBERS, random_blocks, write_gguf

pytestmark = pytest.mark.slow

ROWS, BLOCKS = 6, 3  # blocks in a row


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def scalar_simple(kind: str, block: bytes) -> list[float]:
    """The kinds of 32: element j is in the low half of byte j, element j + 16 in the high half."""
    d = half(block, 0)
    if kind == "Q8_0":
        return [d * x for x in struct.unpack_from("32b", block, 2)]
    has_min, has_fifth = kind.endswith("1"), kind.startswith("Q5")
    at = 4 if has_min else 2
    fifths = struct.unpack_from("<I", block, at)[0] if has_fifth else 0
    at += 4 if has_fifth else 0
    out = []
    for i in range(32):
        level = block[at + i % 16] >> (4 if i >= 16 else 0) & 15
        level |= (fifths >> i & 1) << 4
        middle = 16 if has_fifth else 8
        out.append(d * level + half(block, 2) if has_min else d * (level - middle))
    return out


def k4_scale(j: int, packed: bytes) -> tuple[int, int]:
    """`get_scale_min_k4` of ggml-quants.c."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
    return scale, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def scalar_k(kind: str, block: bytes) -> list[float]:
    """The kinds of 256, element by element."""
    out = []
    for e in range(256):
        part, run, i = e // 128, e % 128 // 32, e % 32  # half, run of 32 in it, place in the run
        if kind == "Q2_K":
            level = block[16 + part * 32 + i] >> 2 * run & 3
            scale = block[e // 16]
            out.append(half(block, 80) * (scale & 15) * level - half(block, 82) * (scale >> 4))
        elif kind == "Q3_K":
            level = block[32 + part * 32 + i] >> 2 * run & 3
            level -= 0 if block[i] >> (part * 4 + run) & 1 else 4
            g, packed = e // 16, block[96:108]
            scale = packed[g % 8] >> (4 if g >= 8 else 0) & 15
            scale |= (packed[8 + g % 4] >> 2 * (g // 4) & 3) << 4
            out.append(half(block, 108) * (scale - 32) * level)
        elif kind in ("Q4_K", "Q5_K"):
            sub = e // 32
            scale, minimum = k4_scale(sub, block[4:16])
            start = 16 if kind == "Q4_K" else 48
            level = block[start + sub // 2 * 32 + i] >> (4 if sub % 2 else 0) & 15
            if kind == "Q5_K":
                level |= (block[16 + i] >> sub & 1) << 4
            out.append(half(block, 0) * scale * level - half(block, 2) * minimum)
        else:  # Q6_K
            low = block[part * 64 + i + (32 if run % 2 else 0)] >> (4 if run >= 2 else 0) & 15
            level = low | (block[128 + part * 32 + i] >> 2 * run & 3) << 4
            scale = struct.unpack_from("b", block, 192 + e // 16)[0]
            out.append(half(block, 208) * scale * (level - 32))
    return out


def blocks_of(kind: str) -> tuple[bytes, int, int]:
    """Raw blocks of ROWS rows, block bytes, columns."""
    block_type = BLOCK_TYPES[NUMBERS[kind]]
    raw = random_blocks(kind, ROWS * BLOCKS, seed=NUMBERS[kind])
    return raw, block_type.block_bytes, BLOCKS * block_type.block_elements


def as_rows(raw: bytes) -> Any:
    return np.frombuffer(raw, np.uint8).reshape(ROWS, -1)


def unpacked(parts: tuple[Any, Any, Any], bits: int) -> Any:
    """The values of an MLX triple, by MLX."""
    triple = [mx.array(part) for part in parts]
    return np.array(mx.dequantize(*triple, group_size=32, bits=bits).astype(mx.float32))


@pytest.mark.parametrize("kind", DECODERS)
def test_values_equal_the_scalar_loops(kind: str) -> None:
    raw, block_bytes, columns = blocks_of(kind)
    decode = scalar_k if kind.endswith("K") else scalar_simple
    expected = [
        decode(kind, raw[start : start + block_bytes]) for start in range(0, len(raw), block_bytes)
    ]
    values = dequantise(kind, as_rows(raw), block_bytes)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, np.reshape(expected, (ROWS, columns)), atol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K"])
def test_equals_what_mlx_reads(kind: str, tmp_path: Path) -> None:
    raw, block_bytes, columns = blocks_of(kind)
    path = write_gguf(tmp_path / "t.gguf", {"a": 1}, {"t.weight": (kind, (ROWS, columns), raw)})
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    if kind.endswith("K"):
        ours = dequantise(kind, as_rows(raw), block_bytes).astype(np.float16).reshape(-1, 8, 32)
        theirs = np.array(loaded["t.weight"]).reshape(-1, 8, 32)
        if kind == "Q4_K":
            # mlx 0.32.4 (its gguflib) scales every odd run of 32 like the one before it; ggml does
            # not, and the scalar loops above follow ggml. Compare whole blocks once MLX is mended.
            ours, theirs = ours[:, ::2], theirs[:, ::2]
        np.testing.assert_array_equal(ours, theirs)
        return
    for part, ours in zip(
        ("weight", "scales", "biases"), repack(kind, as_rows(raw), block_bytes), strict=True
    ):
        theirs = np.array(loaded[f"t.{part}"])
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", DECODERS)
def test_repacked_values_stay(kind: str) -> None:
    """Groups of 32 keep their levels exactly; groups of 16 gain an error that is bounded here."""
    raw, block_bytes, _ = blocks_of(kind)
    exact = dequantise(kind, as_rows(raw), block_bytes)
    decoder = DECODERS[kind]
    ours = unpacked(repack(kind, as_rows(raw), block_bytes), decoder.bits)
    error = np.sqrt(np.mean((ours - exact) ** 2)) / exact.std()
    # A group of 32 loses only what float16 rounds off scale and bias.
    limit = 2e-3 if decoder.group_size == 32 else {"Q2_K": 0.13, "Q3_K": 0.08, "Q6_K": 0.02}[kind]
    assert error < limit, error


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantise_is_as_good_as_mlx(bits: int) -> None:
    values = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
    values[0] = 0
    values[1] = 0.25
    levels, scales, biases = quantise(values.reshape(-1, 32), bits)
    parts = pack_bits(levels.reshape(8, -1), bits), scales.reshape(8, -1), biases.reshape(8, -1)
    ours = unpacked(parts, bits)
    theirs = unpacked(
        tuple(np.array(a) for a in mx.quantize(mx.array(values), group_size=32, bits=bits)), bits
    )
    assert np.square(ours - values).mean() <= np.square(theirs - values).mean() * 1.02
    np.testing.assert_allclose(ours[:2], values[:2], atol=1e-3)


def test_dense_kinds_round_to_nearest() -> None:
    values = np.array([[1.0, -2.5, 1e30, 3.14159265, 1.00390625]], np.float32)
    assert (
        np.frombuffer(gguf_blocks.dense_bytes(values, "F32"), "<f4").tolist() == values[0].tolist()
    )
    as_half = np.frombuffer(gguf_blocks.dense_bytes(values, "F16"), "<f2")
    assert as_half[2] == 65504 and as_half[3] == np.float16(3.14159265)
    as_bf16 = gguf_blocks.dense_bytes(values, "BF16")
    expected = np.array(mx.array(values[0]).astype(mx.bfloat16).view(mx.uint16))
    assert np.frombuffer(as_bf16, "<u2").tolist() == expected.tolist()
    back = dequantise("BF16", np.frombuffer(as_bf16, np.uint8).reshape(1, -1), 2)
    np.testing.assert_allclose(back, values, rtol=2**-8)
