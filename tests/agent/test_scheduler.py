"""The queue, without a clock: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.scheduler import Scheduler


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
