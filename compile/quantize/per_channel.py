"""Symmetric INT8 with one scale per output channel, for convolution weights and dynamic INT8 matrices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from compile.quantize.blockwise import check_finite


def quantize_channels(
    name: str, weight: npt.NDArray[np.floating], axis: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """(codes int8 of the weight's shape, scales float32 [channels]); codes stay within -127..127.

    An all-zero channel gets scale 1. Raises ModelError when the weight holds NaN or infinity.
    """
    values = np.asarray(weight, np.float32)
    check_finite(name, values)
    others = tuple(i for i in range(values.ndim) if i != axis)
    scales = np.abs(values).max(axis=others) / np.float32(127)
    scales[scales == 0] = 1
    shape = [1] * values.ndim
    shape[axis] = -1
    codes = np.clip(np.rint(values / scales.reshape(shape)), -127, 127).astype(np.int8)
    return codes, scales.astype(np.float32)
