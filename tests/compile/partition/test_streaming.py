"""Bytes a pass: the caches against plain readings of them, and against every choice there is."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from compile.partition.streaming import belady_bytes, lru_bytes, segment_bytes

USES = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(lambda names: [(f"w{name}", 1) for name in names])


def fewest_reads(uses: list[tuple[str, int]], capacity: int, passes: int) -> int:
    """Of weights of one byte: by trying every eviction."""
    sequence = [name for name, _ in uses] * passes

    @functools.cache
    def from_here(at: int, cache: frozenset[str]) -> int:
        if at == len(sequence):
            return 0
        name = sequence[at]
        if name in cache:
            return from_here(at + 1, cache)
        if len(cache) < capacity:
            return 1 + from_here(at + 1, cache | {name})
        return 1 + min(from_here(at + 1, (cache - {out}) | {name}) for out in cache)

    return from_here(0, frozenset())


@given(USES, st.integers(1, 5))
def test_belady_reads_fewest(uses: list[tuple[str, int]], capacity: int) -> None:
    assert sum(belady_bytes(uses, capacity, 3)) == fewest_reads(uses, capacity, 3)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=8).map(
        lambda pairs: [(f"w{name}", dict(pairs)[name]) for name, _ in pairs]
    ),
    st.integers(1, 150),
)
def test_no_cache_beats_belady_and_none_is_beaten_by_lru(uses: list[tuple[str, int]], capacity: int) -> None:
    total = sum(dict(uses).values())
    passes = 4
    best = belady_bytes(uses, capacity, passes)
    assert best[0] >= total
    assert sum(best) <= passes * sum(nbytes for _, nbytes in uses)
    largest = max(nbytes for _, nbytes in uses)
    if capacity >= largest:
        assert sum(best[1:]) <= (passes - 1) * lru_bytes(uses, capacity)
        # What does not fit beside the rest is read again, whatever stays.
        assert all(read >= total - capacity for read in best[1:-1])
    if total <= capacity:
        assert lru_bytes(uses, capacity) == sum(best[1:]) == 0


def test_lru_reads_everything_as_soon_as_one_weight_does_not_fit() -> None:
    uses = [(f"w{at}", 10) for at in range(10)]
    assert lru_bytes(uses, 100) == 0
    assert lru_bytes(uses, 99) == 100
    # Nine stay but for the room that each of the others needs while it is used.
    assert sum(belady_bytes(uses, 90, 10)[1:]) <= 9 * 12
    pinned = {f"w{at}" for at in range(8)}
    assert segment_bytes([dict(uses[at : at + 1]) for at in range(10)], pinned) == 20


def test_a_weight_of_several_segments_is_loaded_for_each_unless_it_is_pinned() -> None:
    segments = [{"table": 50, "a": 10}, {"b": 10}, {"table": 50}]
    assert segment_bytes(segments) == 120
    assert segment_bytes(segments, {"table"}) == 20
