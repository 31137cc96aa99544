"""Who waits for a slot, without a clock."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.scheduling.door import Door


@dataclass(frozen=True)
class Caller:
    id: int
    deadline: float = 100.0
    client: str = "a"
    priority: int = 0
    arrived: float = 0.0


def door_of(*callers: Caller, limit: int = 8, per_client: int = 8) -> Door[Caller]:
    door: Door[Caller] = Door(limit, per_client)
    for caller in callers:
        assert door.submit(caller, now=0) is None
    return door


def test_the_most_important_gets_the_slot_then_each_client_in_turn() -> None:
    door = door_of(Caller(1), Caller(2), Caller(3, client="b", deadline=200), Caller(4, priority=2))
    assert door.first(0) == Caller(4, priority=2)
    taken = [door.next(0) for _ in range(5)]
    assert [each.id if each else None for each in taken] == [4, 1, 3, 2, None]


def test_a_full_door_refuses_and_says_so() -> None:
    door = door_of(Caller(1), Caller(2), Caller(3, client="b"), limit=3, per_client=2)
    refused = [door.submit(Caller(4, client=client), now=0) for client in "ac"]
    assert [each.reason for each in refused if each] == [Reason.CLIENT_QUEUE_FULL, Reason.QUEUE_FULL]
    assert len(door) == 3


def test_what_is_late_on_arrival_is_refused() -> None:
    refused = door_of().submit(Caller(1, deadline=3), now=3)
    assert refused is not None
    assert refused.reason is Reason.DEADLINE


def test_the_late_get_no_slot_and_wait_for_expire() -> None:
    door = door_of(Caller(1, deadline=1), Caller(2, deadline=5))
    assert door.next_wakeup() == 1
    assert door.next(now=1) == Caller(2, deadline=5)
    assert door.expire(now=1) == [Caller(1, deadline=1)]
    assert door.next_wakeup() is None


def test_how_many_go_before() -> None:
    door = door_of(Caller(1, deadline=5), Caller(2, deadline=9), Caller(3, priority=200))
    assert door.before(Caller(4, deadline=7), 0) == 1
    assert door.before(Caller(4, priority=255), 0) == 3


steps = st.lists(st.tuples(st.sampled_from(["submit", "next", "expire", "cancel", "wait"]), st.integers(0, 9)))


@given(steps)
def test_every_caller_leaves_exactly_once(actions: list[tuple[str, int]]) -> None:
    door: Door[Caller] = Door(4, 3)
    now, number = 0.0, 0
    inside: dict[int, Caller] = {}
    for action, value in actions:
        if action == "wait":
            now += value
        elif action == "submit":
            number += 1
            caller = Caller(number, now + value, "ab"[number % 2], arrived=now)
            mine = sum(each.client == caller.client for each in inside.values())
            accepted = value > 0 and len(inside) < 4 and mine < 3
            assert (door.submit(caller, now) is None) == accepted
            if accepted:
                inside[number] = caller
        elif action == "next":
            taken = door.next(now)
            assert (taken is None) == all(each.deadline <= now for each in inside.values())
            if taken is not None:
                assert inside.pop(taken.id).deadline > now
        elif action == "expire":
            for caller in door.expire(now):
                assert inside.pop(caller.id).deadline <= now
            assert all(each.deadline > now for each in inside.values())
        else:
            assert door.cancel(value) == (inside.pop(value, None) is not None)
        assert len(door) == len(inside)
        assert door.next_wakeup() == min((each.deadline for each in inside.values()), default=None)
