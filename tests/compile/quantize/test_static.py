"""Static INT8: scales that are finite and positive whatever comes, and biases that stay in int32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.calibrate.collectors import Range
from compile.errors import ModelError
from compile.quantize.static import Affine, quantize_static
from tests.support.models import Array, normal


@given(st.floats(-(2.0**90), 0, width=32), st.floats(0, 2.0**90, width=32))
def test_every_range_has_a_scale_and_codes_zero_exactly(low: float, high: float) -> None:
    affine = Affine.of(Range(low, high))
    assert np.isfinite(affine.scale)
    assert affine.scale >= np.finfo(np.float32).tiny
    assert 0 <= affine.zero_point <= 255
    # Both ends are within one step of a code.
    step = float(affine.scale)
    assert (0 - int(affine.zero_point)) * step - step <= low
    assert (255 - int(affine.zero_point)) * step + step >= high


def restored(weight: Array, bias: Array | None, activation: float) -> tuple[Array, Array | None]:
    made = quantize_static("w", weight, bias, np.float32(activation), 0)
    scales = made.scales.astype(np.float64)
    codes = made.codes.astype(np.float64) * scales.reshape(-1, *[1] * (weight.ndim - 1))
    return codes, None if made.bias is None else made.bias * scales * activation


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1.0, 1e7])
def test_a_bias_never_leaves_int32(scale: float) -> None:
    bias = np.array([5, -4.5, 0], np.float32)
    weight = normal(3, 4, 2, 2) * np.float32(scale)
    made = quantize_static("w", weight, bias, np.float32(0.02), 0)
    assert made.bias is not None
    assert np.abs(made.bias.astype(np.int64)).max() < 1.001 * 2**30
    found = restored(weight, bias, 0.02)[1]
    assert found is not None
    # Off by half a step of the accumulator at most, or by what a digit of the scale is worth.
    np.testing.assert_allclose(found, bias, rtol=1e-6, atol=0.5 * float(made.scales.max()) * 0.02)


def test_silent_channels_keep_their_bias() -> None:
    weight = normal(3, 4)
    weight[1] = 0
    codes, bias = restored(weight, np.array([1, 2, 3], np.float32), 0.02)
    assert not codes[1].any()
    assert bias is not None
    np.testing.assert_allclose(bias[1], 2, rtol=1e-6)


def test_all_zero_without_bias() -> None:
    made = quantize_static("w", np.zeros((2, 3), np.float32), np.zeros(2, np.float32), np.float32(0.1), 0)
    assert np.isfinite(made.scales).all()
    assert (made.scales > 0).all()
    assert made.bias is not None
    assert not made.bias.any()


@pytest.mark.parametrize("largest", [127, 64])
def test_codes_stay_within_the_largest(largest: int) -> None:
    made = quantize_static("w", normal(8, 64), None, np.float32(1), 0, largest)
    assert np.abs(made.codes.astype(int)).max() == largest
    np.testing.assert_allclose(made.codes * made.scales[:, None], normal(8, 64), atol=float(made.scales.max()) * 0.51)


def test_nan_in_a_bias_is_named() -> None:
    with pytest.raises(ModelError, match="w's bias"):
        quantize_static("w", normal(2, 3), np.array([1, np.nan], np.float32), np.float32(1), 0)
