"""Nobody is kept out by one client that has most of the places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.limits.places import Places
from agent.request import Refused


class Connection:
    def __init__(self, is_idle: bool = True) -> None:
        self.is_idle = is_idle

    def give_up(self) -> None:
        self.is_idle = False


def filled(places: Places, *clients: str, idle: bool = True) -> list[Connection]:
    holders = [Connection(idle) for _ in clients]
    for holder, client in zip(holders, clients, strict=True):
        places.add(holder, client)
    return holders


def reason(answer: object) -> Reason:
    assert isinstance(answer, Refused)
    return answer.reason


def test_the_greediest_gives_up_what_it_has_idle_longest() -> None:
    places = Places(4, 0)
    first, second, *_ = filled(places, "greedy", "greedy", "greedy", "other")
    assert places.ask("new") is first
    first.is_idle = False
    assert places.ask("new") is second


def test_nothing_that_goes_on_is_given_up_and_nobody_gains_by_it() -> None:
    places = Places(3, 0)
    filled(places, "a", "a", "a", idle=False)
    assert reason(places.ask("new")) is Reason.QUEUE_FULL
    places = Places(4, 0)
    filled(places, "a", "a", "b", "b")
    assert reason(places.ask("a")) is Reason.QUEUE_FULL
    assert reason(places.ask("b")) is Reason.QUEUE_FULL
    assert not isinstance(places.ask("c"), Refused)


def test_one_client_has_at_most_its_own_share() -> None:
    places = Places(10, 2)
    first, _ = filled(places, "a", "a")
    assert reason(places.ask("a")) is Reason.CLIENT_BUSY
    assert places.ask("b") is None
    places.remove(first)
    places.remove(first)
    assert places.ask("a") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60), st.integers(1, 8), st.integers(0, 4))
def test_never_more_than_may_be(comes: list[tuple[str, bool]], most: int, per_client: int) -> None:
    places = Places(most, per_client)
    there: list[tuple[str, Connection]] = []
    for client, idle in comes:
        found = places.ask(client)
        if isinstance(found, Refused):
            continue
        if found is not None:
            places.remove(found)
            there = [each for each in there if each[1] is not found]
        there.append((client, Connection(idle)))
        places.add(there[-1][1], client)
        assert len(places) == len(there) <= most
        assert not per_client or [name for name, _ in there].count(client) <= per_client
