"""Round-to-nearest weight quantization, in blocks along the reduced axis, a tile at a time.

A matrix is looked at as rows [N, K]: one row holds all weights of one output. Blocks of `block` values along K
share a scale (and a zero point). The packed layout is that of onnxruntime's `MatMulNBits`, whose bytes
`GatherBlockQuantized` reads too, so that a tied embedding and output matrix is stored once:

    codes        uint8 [N, blocks, block * bits / 8], two 4-bit codes a byte, the first in the low half
    scales       float32 [N, blocks]
    zero_points  uint8 [N, ceil(blocks * bits / 8)], packed likewise
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from compile.finite import refuse_nonfinite

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
Quantized = TypeVar("Quantized")

# A matrix is quantized in tiles of about this many bytes of float32, which the second-level cache of a core holds with
# all that is made of them: each weight then comes from memory once.
TILE_BYTES = 512 << 10
# Columns of a tile, enough for numpy to be efficient.
TILE_COLUMNS = 512
# Threads at a time; numpy computes outside the interpreter lock.
WORKERS = 2
# A scale below this may have no finite reciprocal; weights that small are coded as zero.
_TINY = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Bits (4 or 8), block length along K, and whether blocks carry zero points of their own."""

    bits: int
    block: int
    zero_point: bool

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def blocks(self, k: int) -> int:
        return -(-k // self.block)

    def code_shape(self, n: int, k: int) -> tuple[int, int, int]:
        return n, self.blocks(k), self.block * self.bits // 8

    def zero_point_shape(self, n: int, k: int) -> tuple[int, int]:
        return n, -(-self.blocks(k) * self.bits // 8)


@dataclasses.dataclass(frozen=True)
class BlockQuantized:
    """One quantized matrix; `zero_points` is None for symmetric blocks (codes centred on half the range)."""

    codes: UInt8
    scales: Float32
    zero_points: UInt8 | None


def quantize_matrix(name: str, weight: npt.NDArray[np.floating], transposed: bool, form: BlockFormat) -> BlockQuantized:
    """Quantize a mapped weight tile by tile; temporaries are a few tiles, however large it is.

    `weight` is [K, N] (MatMul), or [N, K] when `transposed` (Gemm with transB, an embedding table). K is filled up to
    whole blocks with zeros, which code exactly.
    Raises ModelError when it holds NaN or infinity, which no code can stand for.
    """
    columns = weight.T if transposed else weight
    k, n = columns.shape
    codes = np.empty(form.code_shape(n, k), np.uint8)
    scales = np.empty((n, form.blocks(k)), np.float32)
    zeros = np.empty(form.zero_point_shape(n, k), np.uint8) if form.zero_point else None
    tiles = _tiles(n, form.blocks(k), form.block, by_columns=transposed)

    def quantize_share(worker: int) -> None:
        scratch = np.empty(max(TILE_BYTES // 4, 2 * form.block * min(n, TILE_COLUMNS)), np.float32)
        for across, along in tiles[worker::WORKERS]:
            part = columns[along.start * form.block : along.stop * form.block, across]
            values = _in_blocks(part, form.block, scratch)
            block_scales, low = _block_scales(values, form)
            # NaN and infinity are the extremes of their block, so its scale has them too.
            refuse_nonfinite(name, block_scales, weight)
            tile = _quantize_tile(values, block_scales, low, form)
            codes[across, along], scales[across, along] = tile.codes.transpose(2, 0, 1), tile.scales.T
            if zeros is not None and tile.zero_points is not None:
                zeros[across, along.start * form.bits // 8 :][:, : len(tile.zero_points)] = tile.zero_points.T

    if len(tiles) == 1:
        quantize_share(0)
    else:
        # Tiles write to places of their own.
        with ThreadPoolExecutor(WORKERS, "quantize") as pool:
            for _ in pool.map(quantize_share, range(WORKERS)):
                pass
    return BlockQuantized(codes, scales, zeros)


def _tiles(n: int, blocks: int, block: int, by_columns: bool) -> list[tuple[slice, slice]]:
    """(columns, blocks) of every tile, in the order in which they stand in the file.

    The number of blocks is even, so that no byte of packed zero points belongs to two tiles.
    """
    width = min(n, TILE_COLUMNS)
    step = max(2, TILE_BYTES // (4 * block * max(width, 1)) // 2 * 2)
    across = [slice(start, min(start + width, n)) for start in range(0, n, max(width, 1))]
    along = [slice(start, min(start + step, blocks)) for start in range(0, blocks, step)]
    return [(c, b) for c in across for b in along] if by_columns else [(c, b) for b in along for c in across]


def _in_blocks(columns: npt.NDArray[np.floating], block: int, scratch: Float32) -> Float32:
    """A copy of [rows, n] in `scratch`, as float32 [blocks, block, n]."""
    rows, n = columns.shape
    filled = -(-rows // block) * block
    values = scratch[: filled * n].reshape(filled, n)
    values[:rows] = columns
    values[rows:] = 0
    return values.reshape(-1, block, n)


def _quantize_tile(values: Float32, scales: Float32, low: Float32, form: BlockFormat) -> BlockQuantized:
    """Quantize float32 [blocks, block, n], which is overwritten; all arithmetic, and every result, runs along n."""
    middle = 1 << (form.bits - 1)
    offsets = np.clip(np.rint(-low / scales), 0, form.levels) if form.zero_point else np.full_like(scales, middle)
    # No code is below zero by more than rounding, so adding a half and cutting off rounds to nearest.
    values *= (1 / scales)[:, None]
    values += (offsets + np.float32(0.5))[:, None]
    # A row of limits: numpy compares with a scalar at a fraction of the speed.
    np.minimum(values, np.full(values.shape[2], form.levels + np.float32(0.5), np.float32), out=values)
    zeros = _pack(offsets.astype(np.uint8)[None], form.bits)[0] if form.zero_point else None
    return BlockQuantized(_pack(values.astype(np.uint8), form.bits), scales, zeros)


def _block_scales(values: Float32, form: BlockFormat) -> tuple[Float32, Float32]:
    """(scale, lowest value) of every block, [blocks, n], for values [blocks, block, n]."""
    low, high = values.min(axis=1), values.max(axis=1)
    with np.errstate(invalid="ignore"):  # NaN and infinity are refused by their scales
        if form.zero_point:
            np.minimum(low, 0, out=low)
            np.maximum(high, 0, out=high)
            scales = high / np.float32(form.levels) - low / np.float32(form.levels)
        else:
            # A signed extreme takes the code that has no positive counterpart, so all codes are used.
            scales = np.where(high > -low, high, low) / np.float32(-(1 << (form.bits - 1)))
    scales[np.abs(scales) < _TINY] = 1
    return scales, low


def _pack(codes: UInt8, bits: int) -> UInt8:
    """Pack pairs along the axis before the last; an odd last 4-bit row gets an empty upper half."""
    if bits == 8:
        return codes
    packed: UInt8 = codes[:, 0::2].copy()
    packed[:, : codes.shape[1] // 2] |= codes[:, 1::2] * 16  # a shift, which numpy does one byte at a time
    return packed


def dequantize_rows(quantized: BlockQuantized, form: BlockFormat, k: int) -> Float32:
    """The float32 [N, K] that a kernel computes with; the reference for tests and error figures."""
    n, blocks, _ = quantized.codes.shape
    codes = _unpack(quantized.codes, form.bits).astype(np.float32)
    zeros = np.full((n, blocks), 1 << (form.bits - 1), np.float32)
    if quantized.zero_points is not None:
        zeros = _unpack(quantized.zero_points, form.bits)[:, :blocks].astype(np.float32)
    values = (codes - zeros[:, :, None]) * quantized.scales[:, :, None]
    return np.ascontiguousarray(values.reshape(n, -1)[:, :k])


def _unpack(packed: UInt8, bits: int) -> UInt8:
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return codes


class Once(Generic[Quantized]):
    """Compute a quantized weight once for its several parts, and forget it when all have been written.

    The writer asks for codes, scales and zero points one after the other; keeping the result only that long
    bounds memory by one weight.
    """

    def __init__(self, compute: Callable[[], Quantized], parts: int) -> None:
        self._compute = compute
        self._parts = parts
        self._left = 0
        self._value: Quantized | None = None

    def get(self) -> Quantized:
        """The result; computed at the first call of each round of `parts` calls."""
        value = self._value
        if value is None:
            value = self._value = self._compute()
            self._left = self._parts
        self._left -= 1
        if self._left == 0:
            self._value = None
        return value
