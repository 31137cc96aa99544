"""The queue, without a clock: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.scheduler import PATIENCE, Gathering, Scheduler


@dataclass(frozen=True)
class Entry:
    id: int
    deadline: float


def queue_of(*deadlines: float, limit: int = 8) -> Scheduler[Entry]:
    queue: Scheduler[Entry] = Scheduler(limit)
    for number, deadline in enumerate(deadlines):
        assert queue.submit(Entry(number, deadline), now=0) is None
    return queue


def test_first_come_first_served() -> None:
    queue = queue_of(9, 5, 7)
    assert [queue.next(0), queue.next(0), queue.next(0), queue.next(0)] == [
        Entry(0, 9), Entry(1, 5), Entry(2, 7), None,
    ]  # fmt: skip


def test_a_full_queue_refuses_and_says_so() -> None:
    queue = queue_of(9, 9, limit=2)
    refused = queue.submit(Entry(3, 9), now=0)
    assert refused is not None
    assert refused.reason is Reason.QUEUE_FULL
    assert "2 are waiting" in refused.message
    assert len(queue) == 2


def test_what_is_late_on_arrival_is_refused() -> None:
    refused = queue_of().submit(Entry(1, deadline=3), now=3)
    assert refused is not None
    assert refused.reason is Reason.DEADLINE


def test_late_entries_are_never_run_and_wait_for_expire() -> None:
    queue = queue_of(1, 5)
    assert queue.next_wakeup() == 1
    assert queue.next(now=1) == Entry(1, 5)
    assert queue.expire(now=1) == [Entry(0, 1)]
    assert queue.next_wakeup() is None


def test_cancel() -> None:
    queue = queue_of(5, 6)
    assert queue.cancel(0)
    assert not queue.cancel(0)
    assert queue.next(0) == Entry(1, 6)
    assert not queue.cancel(1)


def test_those_that_wait_are_taken_together_in_their_order() -> None:
    queue = queue_of(9, 1, 7, 8, 9)
    assert queue.take(3, now=2) == [Entry(0, 9), Entry(2, 7), Entry(3, 8)]
    assert queue.expire(now=2) == [Entry(1, 1)]
    assert queue.take(3, now=2) == [Entry(4, 9)]
    assert queue.take(3, now=2) == []


def test_who_comes_alone_does_not_wait() -> None:
    gathering = Gathering(4)
    gathering.ended(requests=1, waiting=0, took_s=10, now=100)
    assert gathering.begins_at(ready=0, coming=0, now=100) is None
    assert gathering.begins_at(ready=1, coming=0, now=100.5) == 100.5


def test_a_pass_waits_for_slots_that_are_being_filled_but_not_long() -> None:
    gathering = Gathering(3)
    gathering.ended(requests=1, waiting=0, took_s=10, now=100)
    late = 200 + PATIENCE * 10
    assert gathering.begins_at(ready=1, coming=2, now=200) == late
    assert gathering.begins_at(ready=2, coming=1, now=200.3) == late
    assert gathering.begins_at(ready=3, coming=0, now=200.4) == 200.4
    assert gathering.begins_at(ready=2, coming=0, now=200.5) == 200.5  # one has gone
    assert gathering.begins_at(ready=2, coming=1, now=203) <= 203


@pytest.mark.parametrize(("requests", "waiting"), [(2, 0), (1, 1)])
def test_those_that_had_company_are_waited_for(requests: int, waiting: int) -> None:
    """Else two clients that ask one request after another would take turns for ever."""
    gathering = Gathering(2)
    gathering.ended(requests, waiting, took_s=10, now=100)
    assert gathering.begins_at(ready=1, coming=0, now=100.1) == 100 + PATIENCE * 10
    assert gathering.begins_at(ready=2, coming=0, now=100.2) == 100.2
    assert gathering.begins_at(ready=1, coming=0, now=200) == 200


@given(st.integers(0, 3), st.booleans(), st.floats(0, 1e3), st.floats(0, 1e6))
def test_where_nothing_is_shared_nobody_waits(coming: int, company: bool, took_s: float, now: float) -> None:
    gathering = Gathering(1)
    gathering.ended(1, int(company), took_s, now)
    assert gathering.begins_at(1, coming, now) == now


def test_a_queue_needs_room() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Scheduler(0)


steps = st.lists(st.tuples(st.sampled_from(["submit", "next", "expire", "cancel", "wait"]), st.integers(0, 9)))


@given(steps)
def test_every_entry_leaves_exactly_once(actions: list[tuple[str, int]]) -> None:
    queue: Scheduler[Entry] = Scheduler(4)
    now, number = 0.0, 0
    inside: dict[int, Entry] = {}
    for action, value in actions:
        if action == "wait":
            now += value
        elif action == "submit":
            number += 1
            entry = Entry(number, now + value)
            accepted = value > 0 and len(inside) < 4
            assert (queue.submit(entry, now) is None) == accepted
            if accepted:
                inside[number] = entry
        elif action == "next":
            entry_or_none = queue.next(now)
            alive = [entry for entry in inside.values() if entry.deadline > now]
            assert entry_or_none == (alive[0] if alive else None)
            if alive:
                del inside[alive[0].id]
        elif action == "expire":
            for entry in queue.expire(now):
                assert inside.pop(entry.id).deadline <= now
            assert all(entry.deadline > now for entry in inside.values())
        else:
            assert queue.cancel(value) == (inside.pop(value, None) is not None)
        assert len(queue) == len(inside) <= 4
        assert queue.next_wakeup() == min((entry.deadline for entry in inside.values()), default=None)
