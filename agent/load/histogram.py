"""Values in bounded memory: counts in buckets whose width grows with the value, after Gil Tene's HdrHistogram."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

# Buckets of an octave, as a power of two: each is narrower than 1/128 of the values in it.
_BITS = 7
_EXACT = 1 << (_BITS + 1)
# In nanoseconds this is 4.8 hours.
MAX_VALUE = (1 << 44) - 1


class Histogram:
    """Counts of whole numbers from 0 to MAX_VALUE (what is larger counts as that), in about 40 KiB.

    Below 256 each number is exact; above, what is read back is at most 0.8 % larger than what was recorded, and never
    smaller.
    """

    __slots__ = ("_counts", "count", "max", "total")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * (_index(MAX_VALUE) + 1)))
        self.count = 0
        self.max = 0
        self.total = 0

    def record(self, value: int) -> None:
        """Count one value. Raises ValueError for a negative one."""
        if value < 0:
            raise ValueError(f"{value} is negative")
        value = min(value, MAX_VALUE)
        self._counts[_index(value)] += 1
        self.count += 1
        self.max = max(self.max, value)
        self.total += value

    def merge(self, other: Histogram) -> None:
        """Count all that the other has counted."""
        self._counts = array("Q", map(int.__add__, self._counts, other._counts))
        self.count += other.count
        self.max = max(self.max, other.max)
        self.total += other.total

    def quantile(self, share: float, beyond: int = 0) -> int | None:
        """The least value that `share` (0 to 1) of all values do not exceed; None where there is none.

        `beyond` more values are larger than any that was recorded: those of requests that were never answered.
        """
        # Without the margin 0.07 x 100 would be the eighth.
        rank = max(math.ceil(share * (self.count + beyond) - 1e-9), 1)
        if rank > self.count:
            return None
        return next(value for value, below in self.steps() if below >= rank)

    def steps(self) -> Iterator[tuple[int, int]]:
        """(largest value of a bucket, how many values do not exceed it) for every bucket that is not empty."""
        below = 0
        for index, count in enumerate(self._counts):
            if count:
                below += count
                yield min(_top(index), self.max), below


def _index(value: int) -> int:
    if value < _EXACT:
        return value
    shift = value.bit_length() - _BITS - 1
    return (shift << _BITS) + (value >> shift)


def _top(index: int) -> int:
    """The largest value of a bucket."""
    if index < _EXACT:
        return index
    shift = (index >> _BITS) - 1
    return ((index - (shift << _BITS) + 1) << shift) - 1
