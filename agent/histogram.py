"""Counts by size, cheap enough for every request. Pure.

One thread adds while another reads: whatever it reads of the counts was there at one moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Exemplar(NamedTuple):
    """One value that was counted, and the trace in which one can see why; `wall_s` is when, after the epoch."""

    trace_id: str
    value: float
    wall_s: float


class Histogram:
    """How many values were at most each of `bounds`, which rise, and how many were more."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self.total = 0.0
        """The sum of the values."""

    def add(self, value: float, times: int = 1) -> None:
        """Count a value that came so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def show(self, exemplar: Exemplar) -> None:
        """Keep it as the example of values of its size, in place of the last one."""
        self._exemplars[bisect_left(self._bounds, exemplar.value)] = exemplar

    @property
    def count(self) -> int:
        return sum(self._counts)

    def counts(self) -> list[int]:
        """How many were at most each bound, but more than the one before; the last has no bound."""
        return list(self._counts)

    def cumulated(self) -> list[tuple[float, int, Exemplar | None]]:
        """(bound, how many were at most that, an example of those above the bound before); the last has no bound."""
        rows, count = [], 0
        for index, (bound, more) in enumerate(zip((*self._bounds, float("inf")), list(self._counts), strict=True)):
            count += more
            rows.append((bound, count, self._exemplars.get(index)))
        return rows


def histogram_of(bounds: Sequence[float], values: Mapping[int, int]) -> Histogram:
    """One of whole numbers, from how often each of them came."""
    histogram = Histogram(bounds)
    for value, count in values.items():
        histogram.add(value, count)
    return histogram
