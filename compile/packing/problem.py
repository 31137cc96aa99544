"""The packing problem in numbers: lifetimes as ranges of sections, sizes in units. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Buffers that are live in the sections [begin, end) and take `size` units, int64 [buffers] each.

    A section is a largest set of buffers that are live together, in the order of time; two buffers may share units
    unless they have a section in common. `size` is positive.
    """

    begin: Ints
    end: Ints
    size: Ints

    @property
    def sections(self) -> int:
        """How many there are."""
        return int(self.end.max(initial=0))

    def load(self) -> Ints:
        """Units that are live in each section: the height of the arena is at least the largest."""
        change = np.zeros(self.sections + 1, np.int64)
        np.add.at(change, self.begin, self.size)
        np.subtract.at(change, self.end, self.size)
        return np.cumsum(change)[:-1]

    def height(self, offsets: Ints) -> int:
        """Of the arena with the buffers at these offsets."""
        return int((offsets + self.size).max(initial=0))

    def parts(self) -> Iterator[Ints]:
        """The buffers of each stretch of time that no buffer leaves: they can be packed apart."""
        order = np.argsort(self.begin, kind="stable")
        reached = np.maximum.accumulate(self.end[order])
        first = np.flatnonzero(self.begin[order][1:] >= reached[:-1]) + 1
        return iter(np.split(order, first))

    def part(self, buffers: Ints) -> Problem:
        """Some of the buffers, in this order, as a problem of their own."""
        start = self.begin[buffers].min(initial=self.sections)
        return Problem(self.begin[buffers] - start, self.end[buffers] - start, self.size[buffers])


def sections_of(lifetimes: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Half-open lifetimes as half-open ranges of sections: a new section starts at the first birth after a death.

    Sets of live buffers that are part of a neighbouring one say nothing of their own and get no section.
    """
    births = ((lower, 1, at) for at, (lower, _upper) in enumerate(lifetimes))
    deaths = ((upper, 0, at) for at, (_lower, upper) in enumerate(lifetimes))
    begin, end = np.zeros(len(lifetimes), np.int64), np.zeros(len(lifetimes), np.int64)
    section, born = 0, False
    for _time, is_birth, at in sorted(itertools.chain(births, deaths)):
        if is_birth:
            begin[at], born = section, True
        else:
            section += born
            end[at], born = section, False
    return begin, end
