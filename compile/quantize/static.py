"""Scales and zero points for kernels with quantized activations: uint8 codes times symmetric int8 weights.

activation  uint8, scale = (high - low) / 255, zero point = the code of 0
weight      int8 in -127..127, one scale per output channel
bias        int32, scale = activation scale * weight scale, so that it adds to the accumulator
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from compile.calibrate.collectors import LEVELS, Range
from compile.finite import refuse_nonfinite
from compile.quantize.per_channel import channel_codes, channel_scales

Floats = npt.NDArray[np.floating]

# The accumulator is an int32 that also holds the products; a bias of half its range leaves them room for
# 33 000 weights of largest magnitude.
LARGEST_BIAS = 1 << 30
# Below this products of two scales leave the normal range of float32.
SMALLEST_SCALE = 1e-18


@dataclasses.dataclass(frozen=True)
class Affine:
    """float = scale * (code - zero_point), for uint8 codes."""

    scale: np.float32
    zero_point: np.uint8

    @classmethod
    def of(cls, span: Range) -> Affine:
        """For a range around zero; the scale is finite and positive whatever the range is."""
        # Six significant digits: what is left differs between machines and says nothing.
        scale = np.float32(f"{max((span.high - span.low) / LEVELS, SMALLEST_SCALE):.6g}")
        zero = np.clip(np.rint(-span.low / float(scale)), 0, LEVELS)
        return cls(scale, np.uint8(zero))


@dataclasses.dataclass(frozen=True)
class StaticWeight:
    """Codes in the weight's own shape, float32 scales [channels], int32 bias [channels] or None."""

    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    bias: npt.NDArray[np.int32] | None


def quantize_static(
    name: str, weight: Floats, bias: Floats | None, activation: np.float32, axis: int, largest: int = 127
) -> StaticWeight:
    """Quantize a weight along `axis`, and its bias to the scale of the products with `activation`-scaled codes.

    A channel whose bias would leave int32 gets a larger scale: its weights are so small beside the bias that their
    lost digits do not show. Raises ModelError when the weight or the bias holds NaN or infinity.
    """
    scales = channel_scales(name, weight, axis, largest)
    if bias is not None:
        refuse_nonfinite(f"{name}'s bias", bias, bias)
        least = np.abs(bias.astype(np.float64)) / (float(activation) * LARGEST_BIAS)
        silent = ~np.moveaxis(weight, axis, 0).reshape(len(scales), -1).any(axis=1)
        scales = np.where(silent & (least > 0), least, np.maximum(scales, least)).astype(np.float32)
    np.maximum(scales, np.float32(SMALLEST_SCALE), out=scales)
    codes = channel_codes(weight, scales, axis)
    if bias is None:
        return StaticWeight(codes, scales, None)
    steps = np.rint(bias.astype(np.float64) / (scales.astype(np.float64) * float(activation)))
    limit = float(np.iinfo(np.int32).max)
    return StaticWeight(codes, scales, np.clip(steps, -limit, limit).astype(np.int32))
