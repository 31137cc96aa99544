"""Symmetric INT8 with one scale per output channel, for convolution weights and dynamic INT8 matrices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from compile.finite import refuse_nonfinite

Weight = npt.NDArray[np.floating]
Scales = npt.NDArray[np.float32]

# Channels are transformed in slabs of about this many bytes of float32: large enough for numpy to be efficient, small
# enough that the temporaries are nothing beside a runtime.
SLAB_BYTES = 8 << 20


def channel_scales(name: str, weight: Weight, axis: int, largest: int = 127) -> Scales:
    """float32 [channels]: the largest magnitude of each channel over `largest`, or 1 where a channel is all zero.

    Raises ModelError when the weight holds NaN or infinity.
    """
    channels = np.moveaxis(weight, axis, 0)
    scales = np.empty(len(channels), np.float32)
    for start, stop in _slabs(channels):
        values = channels[start:stop].reshape(stop - start, -1).astype(np.float32)
        refuse_nonfinite(name, values, weight)
        scales[start:stop] = np.abs(values, out=values).max(axis=1, initial=0) / np.float32(largest)
    scales[scales == 0] = 1
    return scales


def channel_codes(weight: Weight, scales: Scales, axis: int) -> npt.NDArray[np.int8]:
    """int8 of the weight's shape; codes stay within -127..127. Temporaries are a slab, however large the weight."""
    codes = np.empty(weight.shape, np.int8)
    channels, target = np.moveaxis(weight, axis, 0), np.moveaxis(codes, axis, 0)
    for start, stop in _slabs(channels):
        values = channels[start:stop].astype(np.float32)
        values /= scales[start:stop].reshape(-1, *[1] * (values.ndim - 1))
        np.clip(np.rint(values, out=values), -127, 127, out=values)
        target[start:stop] = values.astype(np.int8)
    return codes


def quantize_channels(name: str, weight: Weight, axis: int, largest: int = 127) -> tuple[npt.NDArray[np.int8], Scales]:
    """(codes, scales) of a weight, channel by channel along `axis`; the largest code is `largest`."""
    scales = channel_scales(name, weight, axis, largest)
    return channel_codes(weight, scales, axis), scales


def _slabs(channels: Weight) -> Iterator[tuple[int, int]]:
    """Ranges of channels of about SLAB_BYTES of float32 each."""
    count = len(channels)
    step = max(1, SLAB_BYTES * count // max(4 * channels.size, 1))
    yield from ((start, min(start + step, count)) for start in range(0, count, step))
