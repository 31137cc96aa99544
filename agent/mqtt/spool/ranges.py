"""A set of whole numbers, kept as ranges: what is done of a queue takes little memory, in whatever order it came."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class Ranges:
    """Half-open ranges that neither touch nor overlap, in order."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def add(self, start: int, end: int) -> int:
        """Put a range in; how many of its numbers were not there."""
        if start >= end:
            return 0
        if self._ends and self._ends[-1] == start:
            # What comes in order, as most does.
            self._ends[-1] = end
            return end - start
        low, high = self._touching(start, end)
        before = sum(min(end, self._ends[at]) - max(start, self._starts[at]) for at in range(low, high))
        if low < high:
            first, last = min(start, self._starts[low]), max(end, self._ends[high - 1])
        else:
            first, last = start, end
        self._starts[low:high], self._ends[low:high] = [first], [last]
        return end - start - before

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges between `start` and `end` that are not there."""
        gaps = []
        low, high = self._touching(start, end)
        for at in range(low, high):
            if self._starts[at] > start:
                gaps.append((start, self._starts[at]))
            start = max(start, self._ends[at])
        if start < end:
            gaps.append((start, end))
        return gaps

    def _touching(self, start: int, end: int) -> tuple[int, int]:
        """Which ranges overlap that one, or touch it: from, to."""
        low = bisect_right(self._ends, start - 1)
        return low, max(bisect_right(self._starts, end), low)
