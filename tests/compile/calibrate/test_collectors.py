"""Collectors: exact whatever the batches, bounded, and ranges that codes can be made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compile.calibrate.collectors import (
    LEVELS,
    METHODS,
    SIDE_BINS,
    Collector,
    Histogram,
    Range,
    Unfit,
    collect_range,
    mse,
    percentile,
)
from tests.support.models import Array, normal

ordinary = arrays.arrays(
    np.float32, st.integers(1, 60), elements=st.floats(-(2.0**66), 2.0**66, width=32, allow_subnormal=False)
)


def filled(*pieces: Array) -> Collector:
    collector = Collector()
    for piece in pieces:
        collector.add(piece)
    return collector


@given(ordinary, st.integers(0, 2**32 - 1))
def test_neither_order_nor_batches_change_the_histogram(values: Array, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(values)
    cuts = np.sort(rng.integers(0, values.size + 1, 3))
    whole, parts = filled(values), filled(*np.split(shuffled, cuts))
    first, second = whole.histogram(), parts.histogram()
    assert (whole.low, whole.high, whole.count, first.width, first.first, first.zeros) == (
        parts.low, parts.high, parts.count, second.width, second.first, second.zeros,
    )  # fmt: skip
    np.testing.assert_array_equal(first.counts, second.counts)


@given(ordinary)
def test_every_value_stands_in_its_bin(values: Array) -> None:
    values[np.abs(values) < 1e-12 * np.abs(values).max()] = 0
    histogram = filled(values).histogram()
    assert histogram.counts.sum() + histogram.zeros == values.size
    exact = values.astype(np.float64)
    inside = np.histogram(exact[values != 0], np.append(histogram.edges[:-1], np.inf))[0]
    np.testing.assert_array_equal(histogram.counts, inside)
    assert len(histogram.counts) <= 2 * SIDE_BINS


def test_ragged_batches_give_the_ranges_of_their_rows() -> None:
    rows = normal(11, 40, seed=1) * np.linspace(0.1, 30, 11, dtype=np.float32)[:, None]
    ragged, single = filled(rows[:4], rows[4:8], rows[8:]), filled(*rows)
    for method in METHODS.values():
        assert collect_range(ragged, method) == collect_range(single, method)


@pytest.mark.parametrize("method", METHODS)
@given(ordinary)
def test_a_range_lies_around_zero_and_within_the_extremes(method: str, values: Array) -> None:
    found = collect_range(filled(values), METHODS[method])
    if isinstance(found, Range):
        assert min(0.0, float(values.min())) <= found.low <= 0 <= found.high <= max(0.0, float(values.max()))
        assert found.high > found.low


def coded(values: Array, span: Range) -> Array:
    step = (span.high - span.low) / LEVELS
    zero = round(-span.low / step)
    return (np.clip(np.rint(values / step) + zero, 0, LEVELS) - zero) * step


@pytest.mark.parametrize("seed", range(3))
def test_mse_is_no_worse_than_the_extremes(seed: int) -> None:
    values = np.random.default_rng(seed).standard_t(3, 20000)
    collector = filled(values)
    error = {
        name: np.square(
            coded(values, METHODS[name](collector.histogram(), Range(collector.low, collector.high))) - values
        ).sum()
        for name in ("mse", "minmax")
    }
    assert error["mse"] <= error["minmax"]


def test_a_percentile_cuts_what_it_says() -> None:
    values = np.arange(1, 100001, dtype=np.float32)
    found = percentile(filled(values).histogram(), Range(0.0, 1e5), 0.99)
    assert found.low == 0
    assert 0.99e5 <= found.high <= 0.99e5 + 128


def test_a_percentile_lets_a_lone_outlier_go() -> None:
    values = np.append(normal(200000), np.float32(1000))
    found = collect_range(filled(values), percentile)
    assert isinstance(found, Range)
    assert found.high < 6


REASONS = {
    "NaN": (np.array([1.0, np.nan, -3.0]), "NaN"),
    "infinity": (np.array([1.0, -np.inf]), "masks"),
    "the lowest float": (np.array([0.0, -3.4e38, 1.0]), "masks"),
    "nothing but masks": (np.array([-np.inf, np.inf]), "masks"),
    "no values": (np.zeros((0, 4)), "empty"),
    "one value": (np.full(100, 2.5), "constant"),
    "zeros": (np.zeros(100), "constant"),
    "a few giants": (normal(64) * np.where(np.arange(64) % 8, 1, 1e5), "so large that 8 bits hold no others"),
}


@pytest.mark.parametrize("case", REASONS)
@pytest.mark.parametrize("method", METHODS)
def test_what_no_range_can_be_given_says_why(method: str, case: str) -> None:
    values, words = REASONS[case]
    found = collect_range(filled(values), METHODS[method])
    assert isinstance(found, Unfit)
    assert words in found.reason


def test_a_sparse_tensor_is_no_tensor_of_giants() -> None:
    values = np.maximum(normal(10000) - 2, 0)
    found = collect_range(filled(values), mse)
    assert isinstance(found, Range)
    assert found.low == 0


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (-2.0, -1.0), (-np.inf, 1.0), (0.0, np.nan)])
def test_a_range_without_zero_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="no range around zero"):
        Range(low, high)


@pytest.mark.parametrize("method", METHODS)
def test_ranges_are_tried_that_hold_no_bin(method: str) -> None:
    """Bins are few where values are so small that no narrower ones can be told apart."""
    found = METHODS[method](Histogram(1.0, -2, np.array([5, 1]), 0), Range(-1.5, 0.0))
    assert -1.5 <= found.low < 0 <= found.high
