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

import numpy as np
import numpy.typing as npt

from compile.errors import ModelError

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

# Rows are transformed in slabs of about this many bytes of float32: large enough for numpy to be efficient,
# small enough that the temporaries (about five times this) are nothing beside a runtime.
SLAB_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Bits (4 or 8), block length along K, and whether blocks carry zero points of their own."""

    bits: int
    block: int
    zero_point: bool

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
    """Quantize float32 [N, K]; K is padded to whole blocks with zeros, which code exactly."""
    n, k = rows.shape
    blocks, levels = form.blocks(k), (1 << form.bits) - 1
    padded = np.zeros((n, blocks * form.block), np.float32)
    padded[:, :k] = rows
    values = padded.reshape(n, blocks, form.block)
    if form.zero_point:
        low = np.minimum(values.min(axis=2), 0)
        high = np.maximum(values.max(axis=2), 0)
        scales = (high - low) / np.float32(levels)
        scales[scales == 0] = 1
        zeros = np.clip(np.rint(-low / scales), 0, levels)
    else:
        # A signed extreme takes the code that has no positive counterpart, so all codes are used.
        extreme = np.where(values.max(axis=2) > -values.min(axis=2), values.max(axis=2), values.min(axis=2))
        scales = extreme / np.float32(-(1 << (form.bits - 1)))
        scales[scales == 0] = 1
        zeros = np.full((n, blocks), 1 << (form.bits - 1), np.float32)
    codes = values / scales[:, :, None]
    codes += zeros[:, :, None]
    np.rint(codes, out=codes)
    np.clip(codes, 0, levels, out=codes)
    packed = _pack(codes.astype(np.uint8), form.bits)
    packed_zeros = _pack(zeros.astype(np.uint8), form.bits) if form.zero_point else None
    return BlockQuantized(packed, scales.astype(np.float32), packed_zeros)


def _pack(codes: UInt8, bits: int) -> UInt8:
    """Pack along the last axis; an odd last 4-bit code gets an empty upper half."""
    if bits == 8:
        return codes
    low, high = codes[..., 0::2], codes[..., 1::2]
    packed: UInt8 = low.copy()
    packed[..., : high.shape[-1]] |= high << 4
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
    for start, stop in _slabs(n, k):
        slab = weight[start:stop] if transposed else weight[:, start:stop].T
        rows = np.ascontiguousarray(slab, dtype=np.float32)
        check_finite(name, rows)
        part = quantize_rows(rows, form)
        codes[start:stop], scales[start:stop] = part.codes, part.scales
        if zeros is not None and part.zero_points is not None:
            zeros[start:stop] = part.zero_points
    return BlockQuantized(codes, scales, zeros)


def _slabs(n: int, k: int) -> Iterator[tuple[int, int]]:
    step = max(1, SLAB_BYTES // (4 * max(k, 1)))
    yield from ((start, min(start + step, n)) for start in range(0, n, step))


def check_finite(name: str, values: npt.NDArray[np.floating]) -> None:
    """Raise ModelError if a weight holds NaN or infinity."""
    if not np.isfinite(values).all():
        raise ModelError(f"weight {name!r} holds NaN or infinity", "repair the model, or compile with --scheme fp32")


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
