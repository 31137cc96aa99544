"""Counts by size."""

from __future__ import annotations

import bisect
import math

from hypothesis import given
from hypothesis import strategies as st

from agent.histogram import Exemplar, Histogram, histogram_of

BOUNDS = (1, 2, 5)


@given(st.lists(st.integers(0, 7)))
def test_as_many_are_at_most_a_bound_as_are(values: list[int]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.add(value)
    counted = {bound: count for bound, count, _ in histogram.cumulated()}
    assert counted == {bound: sum(value <= bound for value in values) for bound in (*BOUNDS, math.inf)}
    assert (histogram.total, histogram.count) == (sum(values), len(values))
    together = histogram_of(BOUNDS, {value: values.count(value) for value in set(values)})
    assert together.cumulated() == histogram.cumulated()
    assert together.total == histogram.total


@given(st.floats(0, 9))
def test_an_example_stands_with_values_of_its_size(value: float) -> None:
    histogram = Histogram(BOUNDS)
    histogram.show(Exemplar("a", value, 1.0))
    latest = Exemplar("b", value, 2.0)
    histogram.show(latest)
    shown = [exemplar for *_, exemplar in histogram.cumulated()]
    assert shown[bisect.bisect_left(BOUNDS, value)] is latest
    assert shown.count(None) == len(BOUNDS)
