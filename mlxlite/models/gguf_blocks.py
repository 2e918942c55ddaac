"""Decodes ggml's tensor blocks with numpy, and packs values the way MLX stores quantised weights.

ggml's kinds differ in how they store it, but all but the IQ kinds say the same: a value is
`scale * level + bias`, with one scale and bias for a group of 16 or 32 neighbours. `DECODERS` lists
how each kind yields (levels, scales, biases); everything else follows from that:

- Groups of 32 are MLX's affine quantisation with group size 32. Such a tensor is repacked: the same
  levels in MLX's bit order, no information lost but the rounding of a K-quant's product of block
  scale and group scale to float16.
- Groups of 16 (Q2_K, Q3_K, Q6_K) MLX does not have; they are decoded and quantised again, the
  first two with one bit more.

`mx.load` is no oracle for all of this: mlx 0.32.4 decodes every second run of a Q4_K block with its
neighbour's scale, and reads no Q3_K, Q5_K, Q5_0 or Q5_1 at all.

Block layouts: ggml-common.h and the `dequantize_row_*` functions of ggml-quants.c. MLX's packing:
level i of a row takes the bits [i*bits, (i+1)*bits) of the row's little-endian bit string.

numpy is imported here and in gguf_import only: both load when a GGUF file is imported, never on
the way to serving a model. Arrays: N blocks, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[Any]  # uint8; numpy's stubs call `uint8 << int` signed, which it is not
Floats = NDArray[np.float32]
Decoded = tuple[Bytes, Floats, Floats]  # levels (N, elements), scales (N, groups), biases

GROUP_SIZE = 32  # of everything we write: the smallest that MLX has, and most of ggml's own


@dataclass(frozen=True, slots=True)
class Decoder:
    """decode: (N, block bytes) -> Decoded. bits: levels as MLX will hold them, once packed."""

    decode: Callable[[Bytes], Decoded]
    group_size: int
    bits: int


# --- block kinds ------------------------------------------------------------------------------


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as (N, 1)."""
    raw = np.ascontiguousarray(blocks[:, at : at + 2])
    return raw.view(np.float16).astype(np.float32)


def _nibbles(qs: Bytes) -> Bytes:
    """(N, n) bytes -> (N, 2n): all low halves, then all high halves."""
    return np.concatenate([qs & 0x0F, qs >> 4], axis=1)


def _fifth_bits(qh: Bytes) -> Bytes:
    """(N, 4) bytes, read as 32 bits from the lowest -> (N, 32) of 0 or 16."""
    return np.unpackbits(qh, axis=1, bitorder="little") << 4


def _q4_0(blocks: Bytes) -> Decoded:  # d | 16 nibble bytes
    d = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), d, -8 * d


def _q4_1(blocks: Bytes) -> Decoded:  # d | m | 16 nibble bytes
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Decoded:  # d | 32 fifth bits | 16 nibble bytes
    d = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, -16 * d


def _q5_1(blocks: Bytes) -> Decoded:  # d | m | 32 fifth bits | 16 nibble bytes
    levels = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return levels, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Decoded:  # d | 32 signed bytes; flipping the sign bit adds 128
    d = _half(blocks, 0)
    return blocks[:, 2:] ^ 0x80, d, -128 * d


def _two_bits(qs: Bytes) -> Bytes:
    """(N, 64) bytes -> (N, 256). Each half of 32 bytes holds four runs of 32, lowest bits first."""
    halves = qs.reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (halves >> shifts & 3).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Decoded:  # 16 x (scale, min) nibbles | 64 bytes | d | dmin
    scales = _half(blocks, 80) * (blocks[:, :16] & 0x0F)
    mins = _half(blocks, 82) * (blocks[:, :16] >> 4)
    return _two_bits(blocks[:, 16:80]), scales, -mins


def _q3_k(blocks: Bytes) -> Decoded:  # 32 bytes of third bits | 64 bytes | 12 scale bytes | d
    thirds = np.unpackbits(blocks[:, :32, None], axis=2, bitorder="little")  # (N, 32, 8 runs)
    levels = _two_bits(blocks[:, 32:96]) | thirds.transpose(0, 2, 1).reshape(-1, 256) << 2
    # Sixteen 6-bit scales: the low four bits in 8 bytes, the high two in the 4 bytes after them.
    low = _nibbles(blocks[:, 96:104])
    high = blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1) & 3
    six = (low | high.reshape(-1, 16) << 4).astype(np.float32) - 32
    scales = _half(blocks, 108) * six
    return levels, scales, -4 * scales


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 bytes of Q4_K and Q5_K -> eight 6-bit scales and eight 6-bit mins, (N, 8) each."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 0x0F) | (a >> 6) << 4], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=1)
    return scales, mins


def _k_nibbles(qs: Bytes) -> Bytes:
    """(N, 128) bytes -> (N, 256): each 32 bytes hold a run of 32 in the low, then in the high."""
    quarters = qs.reshape(-1, 4, 32)
    return np.stack([quarters & 0x0F, quarters >> 4], axis=2).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Decoded:  # d | dmin | 12 scale bytes | 128 nibble bytes
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    return _k_nibbles(blocks[:, 16:]), _half(blocks, 0) * scales, -_half(blocks, 2) * mins


def _q5_k(blocks: Bytes) -> Decoded:  # d | dmin | 12 scale bytes | 32 fifth-bit bytes | 128 bytes
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    fifths = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")  # (N, 32, 8 runs)
    levels = _k_nibbles(blocks[:, 48:]) | fifths.transpose(0, 2, 1).reshape(-1, 256) << 4
    return levels, _half(blocks, 0) * scales, -_half(blocks, 2) * mins


def _q6_k(blocks: Bytes) -> Decoded:  # 128 low nibbles | 64 high pairs | 16 signed scales | d
    halves = blocks[:, :128].reshape(-1, 2, 64)
    low = np.concatenate([halves & 0x0F, halves >> 4], axis=2)
    levels = low.reshape(-1, 256) | _two_bits(blocks[:, 128:192]) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return levels, scales, -32 * scales


# The kinds in groups of 16 take as many bits as keep the file about its size: quantising again adds
# an error of at most 13 % (Q2_K), 8 % (Q3_K) and 2 % (Q6_K) of the weights' standard deviation, on
# blocks with random scales, the worst case (tests/test_gguf_blocks.py measures it).
DECODERS: dict[str, Decoder] = {
    "Q4_0": Decoder(_q4_0, 32, 4),
    "Q4_1": Decoder(_q4_1, 32, 4),
    "Q5_0": Decoder(_q5_0, 32, 5),
    "Q5_1": Decoder(_q5_1, 32, 5),
    "Q8_0": Decoder(_q8_0, 32, 8),
    "Q2_K": Decoder(_q2_k, 16, 3),
    "Q3_K": Decoder(_q3_k, 16, 4),
    "Q4_K": Decoder(_q4_k, 32, 4),
    "Q5_K": Decoder(_q5_k, 32, 5),
    "Q6_K": Decoder(_q6_k, 16, 6),
}


# --- dense values -----------------------------------------------------------------------------


def dequantise(kind: str, raw: Bytes, block_bytes: int) -> Floats:
    """Rows of blocks (R, row bytes) of any supported kind -> values (R, C)."""
    rows = raw.shape[0]
    if kind == "F32":
        return raw.view(np.float32)
    if kind == "F16":
        return raw.view(np.float16).astype(np.float32)
    if kind == "BF16":  # the upper half of a float32
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    decoder = DECODERS[kind]
    levels, scales, biases = decoder.decode(raw.reshape(-1, block_bytes))
    grouped = levels.reshape(len(levels), -1, decoder.group_size)
    values = grouped.astype(np.float32) * scales[..., None] + biases[..., None]
    return values.reshape(rows, -1)


def dense_bytes(values: Floats, dtype: str) -> bytes:
    """Values as safetensors bytes of dtype F32, F16 or BF16, rounded to the nearest (ties even).

    What float16 cannot hold is clipped to its largest value."""
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return np.clip(values, -65504, 65504).astype("<f2").tobytes()
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return rounded.astype("<u2").tobytes()


# --- MLX's quantised form ---------------------------------------------------------------------


def repack(kind: str, raw: Bytes, block_bytes: int) -> tuple[Any, Any, Any]:
    """Rows of blocks (R, row bytes) -> MLX's triple: weight (R, C*bits/32) uint32, scales and
    biases (R, C/32) float16, to be read with `DECODERS[kind].bits` and GROUP_SIZE."""
    decoder = DECODERS[kind]
    rows = raw.shape[0]
    if decoder.group_size == GROUP_SIZE:
        levels, scales, biases = decoder.decode(raw.reshape(-1, block_bytes))
    else:
        values = dequantise(kind, raw, block_bytes)
        levels, scales, biases = quantise(values.reshape(-1, GROUP_SIZE), decoder.bits)
    return (
        pack_bits(levels.reshape(rows, -1), decoder.bits),
        scales.astype("<f2").reshape(rows, -1),
        biases.astype("<f2").reshape(rows, -1),
    )


def quantise(groups: Floats, bits: int) -> Decoded:
    """Affine quantisation of each row: levels (G, 32), scales (G, 1), biases (G, 1).

    The rule of `mx.quantize`: the end of the range that is farther from zero is met exactly, and
    zero falls on a level. Scales are rounded to float16 first, so that levels fit what is stored.
    """
    top = float(2**bits - 1)
    low = groups.min(axis=1, keepdims=True)
    high = groups.max(axis=1, keepdims=True)
    low_is_edge = np.abs(low) > np.abs(high)
    edge = np.where(low_is_edge, low, high)
    # MLX's floor; it keeps a group of equal values from dividing by zero.
    step = np.maximum((high - low) / top, np.float32(1e-7))
    step = np.where(low_is_edge, step, -step)
    edge_level = np.rint(edge / step)
    nonzero = edge_level != 0
    scales = _as_half(np.where(nonzero, edge / np.where(nonzero, edge_level, 1), step))
    biases = _as_half(np.where(nonzero, edge, 0))
    levels = np.clip(np.rint((groups - biases) / scales), 0, top).astype(np.uint8)
    return levels, scales, biases


def _as_half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def pack_bits(levels: Bytes, bits: int) -> NDArray[np.uint32]:
    """Levels (R, C) -> (R, C*bits/32) uint32. C is a multiple of 32."""
    rows = levels.shape[0]
    if bits == 8:
        packed = np.ascontiguousarray(levels)
    elif bits == 4:
        packed = levels[:, 0::2] | levels[:, 1::2] << 4
    else:
        # Eight levels fill exactly `bits` bytes; build them in the low bytes of a 64-bit word.
        eights = levels.reshape(rows, -1, 8)
        words = np.zeros(eights.shape[:2], "<u8")
        for i in range(8):
            words |= eights[:, :, i].astype(np.uint64) << np.uint64(bits * i)
        octets = words[:, :, None].view(np.uint8)[:, :, :bits]
        packed = np.ascontiguousarray(octets).reshape(rows, -1)
    return packed.view("<u4")
