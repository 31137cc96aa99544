"""Quantiles from buckets against those from all values."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.load.histogram import MAX_VALUE, Histogram

values = st.integers(0, 44).flatmap(lambda bits: st.integers(0, (1 << bits) - 1))
lists = st.lists(values, min_size=1, max_size=200)
shares = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999, 1.0]), st.floats(0, 1))


def filled(numbers: list[int]) -> Histogram:
    histogram = Histogram()
    for number in numbers:
        histogram.record(number)
    return histogram


def state(histogram: Histogram) -> tuple[int, int, int, list[tuple[int, int]]]:
    return histogram.count, histogram.max, histogram.total, list(histogram.steps())


@given(lists, shares)
def test_a_quantile_is_never_too_small_and_less_than_a_percent_too_large(numbers: list[int], share: float) -> None:
    exact = sorted(numbers)[max(math.ceil(share * len(numbers) - 1e-9), 1) - 1]
    found = filled(numbers).quantile(share)
    assert found is not None
    assert exact <= found <= min(exact * (1 + 1 / 128), max(numbers))


@given(lists, lists)
def test_merging_is_recording_all(first: list[int], second: list[int]) -> None:
    merged = filled(first)
    merged.merge(filled(second))
    assert state(merged) == state(filled(first + second))


@given(lists)
def test_steps_rise_to_all_values(numbers: list[int]) -> None:
    steps = list(filled(numbers).steps())
    assert steps == sorted(set(steps))
    assert steps[-1] == (max(numbers), len(numbers))


@pytest.mark.parametrize("percent", range(1, 101))
def test_whole_percents_of_a_hundred(percent: int) -> None:
    assert filled(list(range(1, 101))).quantile(percent / 100) == percent


def test_what_lies_beyond() -> None:
    histogram = filled([1] * 98)
    assert histogram.quantile(0.98, beyond=2) == 1
    assert histogram.quantile(0.99, beyond=2) is None
    assert Histogram().quantile(0.5) is None


def test_limits() -> None:
    histogram = filled([MAX_VALUE + 5, 0])
    assert (histogram.max, histogram.quantile(1.0), histogram.quantile(0.5)) == (MAX_VALUE, MAX_VALUE, 0)
    with pytest.raises(ValueError, match="negative"):
        histogram.record(-1)


def test_memory_does_not_grow() -> None:
    histogram = Histogram()
    before = sys.getsizeof(histogram._counts)
    for bits in range(60):
        histogram.record(1 << bits)
    assert sys.getsizeof(histogram._counts) == before < 48 << 10
