"""INT8 per channel: error bounds, silent channels, and slabs that change nothing."""

from __future__ import annotations

import tracemalloc

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile.errors import ModelError
from compile.quantize import per_channel
from compile.quantize.per_channel import quantize_channels
from tests.support.models import Array, normal

shapes = arrays.array_shapes(min_dims=1, max_dims=5, max_side=5)
weights = arrays.arrays(np.float32, shapes, elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False))


@settings(deadline=None, max_examples=150)
@given(weights, st.data())
def test_every_weight_is_within_half_a_step(weight: Array, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, weight.ndim - 1))
    codes, scales = quantize_channels("w", weight, axis)
    assert codes.shape == weight.shape
    assert scales.shape == (weight.shape[axis],)
    assert np.abs(codes.astype(int)).max() <= 127
    shape = [1] * weight.ndim
    shape[axis] = -1
    step = scales.reshape(shape)
    assert (np.abs(codes * step - weight) <= step / 2 + 1e-6 * np.abs(weight)).all()
    assert (codes[weight == 0] == 0).all()


def test_a_silent_channel_stays_silent_and_its_neighbour_keeps_its_precision() -> None:
    weight = normal(3, 4, 3, 3)
    weight[1] = 0
    weight[2] *= 1e-6
    codes, scales = quantize_channels("w", weight, 0)
    assert scales[1] == 1
    assert not codes[1].any()
    assert np.abs(codes[2]).max() == 127


@pytest.mark.parametrize("axis", [0, 1])
def test_slabs_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch, axis: int) -> None:
    weight = normal(13, 29)
    whole = quantize_channels("w", weight, axis)
    for slab_bytes in (1, 200, 1000):
        monkeypatch.setattr(per_channel, "SLAB_BYTES", slab_bytes)
        for part, expected in zip(quantize_channels("w", weight, axis), whole, strict=True):
            np.testing.assert_array_equal(part, expected)


def test_temporaries_do_not_grow_with_the_weight() -> None:
    weight = normal(4096, 4096)
    tracemalloc.start()
    try:
        quantize_channels("w", weight, 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < weight.size + 4 * per_channel.SLAB_BYTES


def test_nan_is_named() -> None:
    weight = normal(4, 4)
    weight[3, 3] = np.nan
    with pytest.raises(ModelError, match="'w' holds 1 NaN"):
        quantize_channels("w", weight, 0)
