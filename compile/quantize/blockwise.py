"""Round-to-nearest weight quantization, in blocks along the reduced axis, a slab of rows at a time.

A matrix is looked at as rows [N, K]: one row holds all weights of one output. Blocks of `block` values along K
share a scale (and a zero point). The packed layout is that of onnxruntime's `MatMulNBits`, whose bytes
`GatherBlockQuantized` reads too, so that a tied embedding and output matrix is stored once:

    codes        uint8 [N, blocks, block * bits / 8], two 4-bit codes a byte, the first in the low half
    scales       float32 [N, blocks]
    zero_points  uint8 [N, ceil(blocks * bits / 8)], packed likewise
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from compile.finite import refuse_nonfinite

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

# Rows are transformed in slabs of about this many bytes of float32: large enough for numpy to be efficient,
# small enough that the temporaries (about five times this) are nothing beside a runtime.
SLAB_BYTES = 8 << 20
# Blocks are coded in tiles of about this many bytes of float32, which the second-level cache holds with their codes.
TILE_BYTES = 512 << 10
# Slabs at a time. Two reach what the memory of a small host gives; each more costs five slabs.
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


def quantize_rows(rows: Float32, form: BlockFormat) -> BlockQuantized:
    """Quantize float32 [N, K], one row per output; see `quantize_columns`."""
    return quantize_columns(np.ascontiguousarray(rows.T), form)


def quantize_columns(columns: Float32, form: BlockFormat) -> BlockQuantized:
    """Quantize float32 [K, N], one column per output, as MatMul stores it.

    K is padded to whole blocks with zeros, which code exactly. A block is `block` neighbouring values of one column,
    so all arithmetic runs along N, in tiles that stay in the cache, and only the packed bytes are transposed.
    """
    k, n = columns.shape
    blocks = form.blocks(k)
    if k % form.block:
        columns = np.concatenate([columns, np.zeros((blocks * form.block - k, n), np.float32)])
    values = columns.reshape(blocks, form.block, n)
    scales, offsets = _block_scales(values, form)
    inverse, shift = 1 / scales, offsets + np.float32(0.5)
    codes = np.empty((blocks, form.block * form.bits // 8, n), np.uint8)
    step = max(1, TILE_BYTES // (4 * form.block * max(n, 1)))
    for start in range(0, blocks, step):
        part = slice(start, start + step)
        # No code is below zero by more than rounding, so adding a half and cutting off rounds to nearest.
        tile = values[part] * inverse[part, None]
        tile += shift[part, None]
        np.minimum(tile, form.levels + np.float32(0.5), out=tile)
        codes[part] = _pack(tile.astype(np.uint8), form.bits)
    zeros = _pack(offsets.astype(np.uint8)[None], form.bits)[0] if form.zero_point else None
    return BlockQuantized(
        np.ascontiguousarray(codes.transpose(2, 0, 1)),
        np.ascontiguousarray(scales.T),
        None if zeros is None else np.ascontiguousarray(zeros.T),
    )


def _block_scales(values: Float32, form: BlockFormat) -> tuple[Float32, Float32]:
    """(scale, zero point as float) of every block, [blocks, N], for values [blocks, block, N]."""
    low, high = values.min(axis=1), values.max(axis=1)
    if form.zero_point:
        np.minimum(low, 0, out=low)
        np.maximum(high, 0, out=high)
        scale = high / np.float32(form.levels) - low / np.float32(form.levels)
        scale[scale < _TINY] = 1
        return scale, np.clip(np.rint(-low / scale), 0, form.levels)
    # A signed extreme takes the code that has no positive counterpart, so all codes are used.
    middle = 1 << (form.bits - 1)
    scale = np.where(high > -low, high, low) / np.float32(-middle)
    scale[np.abs(scale) < _TINY] = 1
    return scale, np.full(scale.shape, middle, np.float32)


def _pack(codes: UInt8, bits: int) -> UInt8:
    """Pack pairs along the axis before the last; an odd last 4-bit row gets an empty upper half."""
    if bits == 8:
        return codes
    packed: UInt8 = codes[:, 0::2].copy()
    packed[:, : codes.shape[1] // 2] |= codes[:, 1::2] << 4
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


def quantize_matrix(name: str, weight: npt.NDArray[np.floating], transposed: bool, form: BlockFormat) -> BlockQuantized:
    """Quantize a mapped weight slab by slab.

    `weight` is [K, N] (MatMul), or [N, K] when `transposed` (Gemm with transB, an embedding table).
    Raises ModelError when it holds NaN or infinity, which no code can stand for.
    """
    n, k = weight.shape if transposed else weight.shape[::-1]
    codes = np.empty(form.code_shape(n, k), np.uint8)
    scales = np.empty((n, form.blocks(k)), np.float32)
    zeros = np.empty(form.zero_point_shape(n, k), np.uint8) if form.zero_point else None

    def quantize_slab(bounds: tuple[int, int]) -> None:
        start, stop = bounds
        slab = weight[start:stop].T if transposed else weight[:, start:stop]
        columns = np.ascontiguousarray(slab, dtype=np.float32)
        refuse_nonfinite(name, columns, weight)
        part = quantize_columns(columns, form)
        codes[start:stop], scales[start:stop] = part.codes, part.scales
        if zeros is not None and part.zero_points is not None:
            zeros[start:stop] = part.zero_points

    slabs = list(_slabs(n, k))
    if len(slabs) == 1:
        quantize_slab(slabs[0])
    else:
        # numpy computes outside the interpreter lock; slabs write to rows of their own.
        with ThreadPoolExecutor(WORKERS, "quantize") as pool:
            for _ in pool.map(quantize_slab, slabs):
                pass
    return BlockQuantized(codes, scales, zeros)


def _slabs(n: int, k: int) -> Iterator[tuple[int, int]]:
    step = max(1, SLAB_BYTES // (4 * max(k, 1)))
    yield from ((start, min(start + step, n)) for start in range(0, n, step))


class Once:
    """Compute a quantized weight once for its several parts, and forget it when all have been written.

    The writer asks for codes, scales and zero points one after the other; keeping the result only that long
    bounds memory by one weight.
    """

    def __init__(self, compute: Callable[[], BlockQuantized], parts: int) -> None:
        self._compute = compute
        self._parts = parts
        self._left = 0
        self._value: BlockQuantized | None = None

    def get(self) -> BlockQuantized:
        """The result; computed at the first call of each round of `parts` calls."""
        value = self._value
        if value is None:
            value = self._value = self._compute()
            self._left = self._parts
        self._left -= 1
        if self._left == 0:
            self._value = None
        return value
