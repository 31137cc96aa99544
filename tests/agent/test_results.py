"""Kept results: bounded, and without a gap that is not told of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.results import ENTRY_BYTES, Closed, Kept, Missed, Policy, Position, Results, parse_position
from targets.errors import ContractError

PATIENCE_S = 5.0


def results(entries: int = 4, limit_bytes: int = 1 << 20) -> Results[str]:
    return Results("e1", limit_bytes, entries, PATIENCE_S)


def fill(kept: Results[str], count: int, now: float = 0.0) -> None:
    for _ in range(count):
        assert kept.append(f"r{kept.newest + 1}", 10, now) == kept.newest


def drain(kept: Results[str], reader: Any, now: float = 0.0) -> list[Any]:
    """All that the reader can have now."""
    taken: list[Any] = []
    while (item := kept.take(reader, now)) is not None:
        taken.append(item)
        if isinstance(item, Closed):
            break
    return taken


def seqs(*numbers: int) -> list[Kept[str]]:
    return [Kept(number, f"r{number}") for number in numbers]


def test_a_reader_begins_with_the_next_result() -> None:
    kept = results()
    fill(kept, 2)
    reader = kept.subscribe(Policy.LATEST, 0.0)
    assert drain(kept, reader) == []
    fill(kept, 2)
    assert drain(kept, reader) == seqs(3, 4)


def test_a_reader_goes_on_behind_the_last_that_it_has() -> None:
    kept = results()
    fill(kept, 6)
    assert drain(kept, kept.subscribe(Policy.CLOSE, 0.0, Position("e1", 4))) == seqs(5, 6)
    assert drain(kept, kept.subscribe(Policy.CLOSE, 0.0, Position("", 6))) == []


@pytest.mark.parametrize("policy", Policy)
def test_what_went_before_a_reader_came_back_is_missed(policy: Policy) -> None:
    kept = results()
    fill(kept, 9)
    reader = kept.subscribe(policy, 0.0, Position("e1", 2))
    assert drain(kept, reader) == [Missed(3, 5), *seqs(6, 7, 8, 9)]
    assert reader.lost == 3


@pytest.mark.parametrize("since", [Position("e0", 2), Position("", 4000)])
def test_numbers_of_another_start(since: Position) -> None:
    kept = results()
    fill(kept, 5)
    assert drain(kept, kept.subscribe(Policy.CLOSE, 0.0, since)) == [Missed(1, 1, True), *seqs(2, 3, 4, 5)]


def test_a_restart_is_told_of_where_nothing_is_lost_since() -> None:
    assert drain(results(), results().subscribe(Policy.CLOSE, 0.0, Position("e0", 7))) == [Missed(1, 0, True)]


def test_latest_passes_over_what_is_old() -> None:
    kept = results()
    reader = kept.subscribe(Policy.LATEST, 0.0, backlog=2)
    fill(kept, 2)
    assert kept.take(reader, 0.0) == Kept(1, "r1")
    fill(kept, 5)
    assert drain(kept, reader) == [Missed(2, 5), *seqs(6, 7)]


def test_close_ends_when_something_is_gone() -> None:
    kept = results()
    reader = kept.subscribe(Policy.CLOSE, 0.0)
    fill(kept, 4)
    assert kept.take(reader, 0.0) == Kept(1, "r1")
    fill(kept, 2)
    assert drain(kept, reader) == [Closed(1)]
    kept.unsubscribe(reader)
    assert kept.readers == 0
    assert drain(kept, kept.subscribe(Policy.CLOSE, 0.0, Position("e1", 1))) == [Missed(2, 2), *seqs(3, 4, 5, 6)]


def test_block_keeps_results_until_they_are_taken_or_patience_ends() -> None:
    kept = results()
    reader = kept.subscribe(Policy.BLOCK, 0.0)
    fill(kept, 4, now=1.0)
    assert kept.wakeup() == 1.0 + PATIENCE_S
    assert kept.append("r5", 10, 2.0) is None
    assert kept.take(reader, 3.0) == Kept(1, "r1")
    fill(kept, 1, now=3.0)
    assert kept.append("r6", 10, 3.0 + PATIENCE_S - 0.01) is None
    assert kept.append("r6", 10, 3.0 + PATIENCE_S) == 6
    assert kept.wakeup() is None
    assert drain(kept, reader) == [Closed(1)]


def test_patience_counts_from_when_there_was_something_to_take() -> None:
    kept = results()
    kept.subscribe(Policy.BLOCK, 0.0)
    fill(kept, 4, now=100.0)
    assert kept.append("r5", 10, 104.0) is None


def test_a_result_larger_than_the_ring() -> None:
    with pytest.raises(ValueError, match="room for 1000"):
        results(limit_bytes=1000).append("r", 1001 - ENTRY_BYTES, 0.0)


@pytest.mark.parametrize(
    ("text", "position"), [("17", Position("", 17)), ("5f3a-17", Position("5f3a", 17)), (" 0 ", Position("", 0))]
)
def test_positions(text: str, position: Position) -> None:
    assert parse_position(text) == position


@pytest.mark.parametrize("text", ["", "-1", "1-", "a", "1_0", "٣", "9" * 19, "1-2-3", "x" * 5000])
def test_what_is_no_position(text: str) -> None:
    with pytest.raises(ContractError, match="there is no result"):
        parse_position(text)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 400)),
        st.tuples(st.just("take"), st.integers(0, 5)),
        st.tuples(st.just("subscribe"), st.sampled_from(Policy), st.none() | st.integers(0, 30), st.integers(1, 5)),
        st.tuples(st.just("sleep"), st.floats(0, 4)),
    ),
    max_size=80,
)


@given(st.integers(ENTRY_BYTES + 400, 3000), st.integers(1, 6), STEPS)
def test_every_number_comes_once_or_is_told_of(limit_bytes: int, entries: int, steps: list[tuple[Any, ...]]) -> None:
    kept = results(entries, limit_bytes)
    readers: list[Any] = []
    expected: dict[int, int] = {}
    now = 0.0

    def take(which: int) -> Any:
        reader = readers[which]
        was_closed = reader.closed
        item = kept.take(reader, now)
        if isinstance(item, Missed):
            assert item.first == (1 if item.restarted else expected[which])
            expected[which] = item.last + 1
        elif isinstance(item, Kept):
            assert item == Kept(expected[which], f"r{expected[which]}")
            expected[which] += 1
        elif isinstance(item, Closed):
            assert was_closed
            assert reader.policy is not Policy.LATEST
            assert item == Closed(expected[which] - 1)
        else:
            assert expected[which] == kept.newest + 1
        return item

    for step in steps:
        if step[0] == "append":
            seq = kept.append(f"r{kept.newest + 1}", step[1], now)
            if seq is None:
                assert any(r.policy is Policy.BLOCK and r.next <= kept.newest for r in readers)
                assert kept.wakeup() is not None
        elif step[0] == "take" and readers:
            take(step[1] % len(readers))
        elif step[0] == "subscribe":
            since = None if step[2] is None else Position("e1", step[2])
            expected[len(readers)] = kept.newest + 1 if since is None else since.seq + 1
            readers.append(kept.subscribe(step[1], now, since, step[3]))
        elif step[0] == "sleep":
            now += step[1]
        assert kept.nbytes <= limit_bytes
        assert len(kept) <= entries
    for which in range(len(readers)):
        while (item := take(which)) is not None and not isinstance(item, Closed):
            pass
