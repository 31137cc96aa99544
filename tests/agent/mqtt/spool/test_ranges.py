"""Ranges are a set, told shorter."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.spool.ranges import Ranges

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=30)


@given(RANGES, st.integers(0, 60), st.integers(0, 60))
def test_they_are_as_a_set(ranges: Sequence[tuple[int, int]], start: int, end: int) -> None:
    have, known = Ranges(), set[int]()
    for low, high in ranges:
        new = set(range(low, high)) - known
        assert have.add(low, high) == len(new)
        known |= new
    assert [number for number in range(62) if number in have] == sorted(known)
    missing = [number for low, high in have.missing(start, end) for number in range(low, high)]
    assert missing == sorted(set(range(start, end)) - known)
    assert all(one[1] < other[0] for one, other in zip(list(have), list(have)[1:], strict=False))
    assert [number for low, high in have for number in range(low, high)] == sorted(known)
