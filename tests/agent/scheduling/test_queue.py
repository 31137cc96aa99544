"""The order of a queue, without a clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.scheduling.queue import AGE_S, HIGHEST, LOWEST, Queue


@dataclass(frozen=True)
class Entry:
    id: int
    client: str = "a"
    priority: int = 0
    deadline: float = 100.0
    arrived: float = 0.0


def queue_of(*entries: Entry, limit: int = 1000, per_client: int = 1000) -> Queue[Entry]:
    queue: Queue[Entry] = Queue(limit, per_client)
    for entry in entries:
        assert queue.full(entry.client) is None
        queue.add(entry)
    return queue


def drain(queue: Queue[Entry], now: float = 0) -> list[int]:
    """Numbers in the order in which they are served, one at a time."""
    served = []
    while len(queue):
        entry = queue.ordered(now)[0]
        queue.serve(entry)
        served.append(entry.id)
    return served


def test_priority_goes_first_and_no_priority_is_the_middle() -> None:
    queue = queue_of(
        Entry(1, priority=200), Entry(2), Entry(3, priority=127), Entry(4, priority=1), Entry(5, priority=128)
    )
    assert drain(queue) == [4, 3, 2, 5, 1]


def test_of_one_client_the_earliest_deadline_goes_first() -> None:
    assert drain(queue_of(Entry(1, deadline=9), Entry(2, deadline=5), Entry(3, deadline=7))) == [2, 3, 1]


def test_a_client_with_many_delays_the_first_of_another_by_one() -> None:
    queue = queue_of(*(Entry(number) for number in range(50)), Entry(50, client="b", deadline=200))
    assert drain(queue).index(50) == 1


def test_a_newcomer_is_level_with_whoever_had_least() -> None:
    """Not with nothing, or it would be owed all that the others had before it came."""
    queue = queue_of(*(Entry(number, client="ab"[number % 2]) for number in range(40)))
    for _ in range(20):
        queue.serve(queue.ordered(0)[0])
    for number in range(100, 110):
        queue.add(Entry(number, client="c", deadline=1))
    turns = ["c" if number >= 100 else "ab"[number % 2] for number in drain(queue)]
    assert all(turns[:30].count(client) == 10 for client in "abc")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_clients_that_wait_are_served_alike(clients: list[int]) -> None:
    """At any time the most served client that waits had at most one turn more than the least served."""
    queue = queue_of(*(Entry(number, client=str(client)) for number, client in enumerate(clients)))
    left = {str(client): clients.count(client) for client in clients}
    served = dict.fromkeys(left, 0)
    while len(queue):
        entry = queue.ordered(0)[0]
        queue.serve(entry)
        served[entry.client] += 1
        left[entry.client] -= 1
        turns = [served[client] for client in left if left[client]]
        assert not turns or max(turns) - min(turns) <= 1


def test_waiting_halves_a_priority_and_ends_before_all_others() -> None:
    queue = queue_of(Entry(1, priority=200), Entry(2, priority=150))
    entry = Entry(1, priority=200)
    assert [queue.level(entry, steps * AGE_S) for steps in (0, 0.9, 1, 2, 7, 8, 1000)] == [200, 200, 100, 50, 1, 0, 0]
    assert queue.level(Entry(3, priority=HIGHEST, arrived=8 * AGE_S), 8 * AGE_S) == 1


@given(st.integers(HIGHEST, LOWEST), st.integers(HIGHEST, LOWEST), st.floats(1, 1e5))
def test_nobody_starves(priority: int, others: int, deadline: float) -> None:
    """However important, urgent and new the others are, who waits is served once it has aged."""
    queue = queue_of(Entry(0, "patient", priority, deadline=1e9))
    step = 0.25
    for number in range(1, 1000):
        now = number * step
        queue.add(Entry(number, str(number), others, deadline=now + deadline * 1e-5, arrived=now))
        entry = queue.ordered(now)[0]
        queue.serve(entry)
        if entry.id == 0:
            break
    assert now <= 8 * AGE_S + 2 * step


def test_the_bounds_refuse_and_say_so() -> None:
    queue = queue_of(Entry(1), Entry(2), Entry(3, client="b"), limit=3, per_client=2)
    refused = queue.full("a")
    assert refused is not None
    assert refused.reason is Reason.CLIENT_QUEUE_FULL
    refused = queue.full("c")
    assert refused is not None
    assert refused.reason is Reason.QUEUE_FULL
    assert "3 are waiting" in refused.message
    queue.remove(2)
    assert queue.full("a") is None


@pytest.mark.parametrize(("limit", "per_client"), [(0, 1), (1, 0)])
def test_a_queue_needs_room(limit: int, per_client: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Queue(limit, per_client)


def test_a_number_is_queued_once() -> None:
    with pytest.raises(ValueError, match="already"):
        queue_of(Entry(1), Entry(1))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 3), st.integers(1, 50)), max_size=50))
def test_around_is_where_it_would_stand(actions: list[tuple[int, int, int, int]]) -> None:
    queue = queue_of()
    for number, (serve, client, priority, deadline) in enumerate(actions):
        entry = Entry(number, str(client), priority, deadline)
        before, after = queue.around(entry, 0)
        assert [*before, *after] == queue.ordered(0)
        queue.add(entry)
        ordered = queue.ordered(0)
        assert ordered.index(entry) == len(before)
        if serve < 4:
            queue.serve(ordered[0])


def test_who_is_gone_is_forgotten() -> None:
    """Memory does not grow with the clients that there ever were."""
    queue = queue_of()
    for number in range(1000):
        queue.add(Entry(number, client=str(number)))
        if number % 2:
            queue.serve(Entry(number, client=str(number)))
        else:
            queue.remove(number)
    assert not len(queue)
    assert not queue._flows
    assert not queue._clients
