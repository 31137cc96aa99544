from __future__ import annotations

import random

import pytest

from agent.mqtt.backoff import SLOW, Backoff, Trouble, Waits, trouble_of
from agent.mqtt.brokers import Broker, Brokers, parse_broker, referred


def last() -> float:
    return 1.0


def test_waits_double_up_to_a_bound() -> None:
    backoff = Backoff(Waits(first_s=1, most_s=10), last)
    assert [backoff.failed(Trouble.NETWORK, now) for now in range(6)] == [1, 2, 4, 8, 10, 10]
    for now in range(2000):
        assert backoff.failed(Trouble.NETWORK, now) == 10


def test_a_fleet_does_not_come_back_at_once() -> None:
    draws = random.Random(1)
    waits = []
    for _ in range(1000):
        backoff = Backoff(Waits(first_s=8, most_s=300), draws.random)
        waits.append(backoff.failed(Trouble.NETWORK, 0))
    # As many in each second of the eight, within what chance does to 125.
    assert all(80 < sum(second <= wait < second + 1 for wait in waits) < 170 for second in range(8))


def test_only_a_connection_that_held_resets_it() -> None:
    backoff = Backoff(Waits(first_s=1, most_s=300, stable_s=60), last)
    waits, now = [], 0.0
    for held_s in (0, 1, 59, 60, 1):
        backoff.connected(now)
        now += held_s
        waits.append(backoff.failed(Trouble.NETWORK, now))
    assert waits == [1, 2, 4, 1, 2]


def test_that_no_connection_came_to_be_is_no_stable_one() -> None:
    backoff = Backoff(Waits(first_s=1, stable_s=60), last)
    assert [backoff.failed(Trouble.NETWORK, now) for now in (0, 1000, 2000)] == [1, 2, 4]


@pytest.mark.parametrize("trouble", sorted(SLOW, key=str))
def test_what_a_person_has_to_mend_is_tried_slowly_and_never_at_once(trouble: Trouble) -> None:
    backoff = Backoff(Waits(slow_first_s=30, slow_most_s=900), lambda: 0.0)
    assert [backoff.failed(trouble, now) for now in range(7)] == [15, 30, 60, 120, 240, 450, 450]


def test_a_broker_that_ends_it_soon_each_time_is_tried_slowly() -> None:
    # Before MQTT 5 that is how one learns that another client has the same name.
    backoff = Backoff(Waits(first_s=1, most_s=300, slow_first_s=600, stable_s=60), last)
    waits, now = [], 0.0
    for _ in range(6):
        backoff.connected(now)
        now += 1
        waits.append(backoff.failed(Trouble.CLOSED, now))
    assert waits == [1, 2, 4, 8, 600, 900]
    assert backoff.flaps
    backoff.connected(now)
    assert backoff.failed(Trouble.CLOSED, now + 60) == 1
    assert not backoff.flaps


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        (0x84, Trouble.PROTOCOL), (0x85, Trouble.AUTHENTICATION), (0x86, Trouble.AUTHENTICATION),
        (0x87, Trouble.AUTHENTICATION), (0x88, Trouble.REFUSED), (0x8B, Trouble.REFUSED), (0x8E, Trouble.TAKEN_OVER),
        (0x9C, Trouble.MOVED), (0x9D, Trouble.MOVED), (0x9F, Trouble.RATE), (0xFF, Trouble.REFUSED),
    ],
)  # fmt: skip
def test_codes_of_a_broker(code: int, trouble: Trouble) -> None:
    assert trouble_of(code) is trouble


ONE, TWO, THREE = (Broker(name, 8883, tls=True) for name in ("one", "two", "three"))


def test_brokers_are_asked_in_order_and_from_the_first_again() -> None:
    brokers = Brokers([ONE, TWO])
    assert brokers.current == ONE
    assert not brokers.failed()
    assert brokers.current == TWO
    assert brokers.failed()
    assert brokers.current == ONE
    brokers.failed()
    brokers.connected()
    assert brokers.current == TWO
    brokers.lost()
    assert brokers.current == ONE


def test_a_broker_may_send_us_elsewhere() -> None:
    brokers = Brokers([ONE, TWO])
    assert brokers.refer("three:1234 two")
    assert brokers.current == Broker("three", 1234, tls=True)
    brokers.connected()
    brokers.lost()
    assert brokers.current == ONE
    assert brokers.refer("three")
    # It is not there: the next one is that which was behind the one that named it.
    assert not brokers.failed()
    assert brokers.current == ONE


def test_brokers_that_name_each_other_are_left() -> None:
    brokers = Brokers([ONE])
    followed = [brokers.refer(each) for each in ("two", "one", "two", "one")]
    assert followed == [True, True, True, False]
    assert not brokers.refer("two")


@pytest.mark.parametrize("text", ["", "  ", "a b:0", "x:99999", "http://x", "mqtt://u@x", "[::1", "\0"])
def test_a_reference_to_nowhere_is_not_followed(text: str) -> None:
    found = referred(text, ONE)
    assert found is None or (found.port == 8883 and found.host in ("a", "b"))


def test_a_reference_does_not_take_encryption_away() -> None:
    assert referred("mqtt://two:1883", ONE) == Broker("two", 1883, tls=True)


@pytest.mark.parametrize(
    ("text", "broker"),
    [
        ("mqtts://b.example", Broker("b.example", 8883, True)),
        ("mqtt://127.0.0.1:1884", Broker("127.0.0.1", 1884, False)),
        ("mqtts://[fe80::1]:8884", Broker("fe80::1", 8884, True)),
    ],
)
def test_addresses_of_brokers(text: str, broker: Broker) -> None:
    assert parse_broker(text) == broker
    assert parse_broker(str(broker)) == broker


@pytest.mark.parametrize(
    "text",
    ["", "b.example", "b.example:1883", "http://b", "mqtts://", "mqtts://b:0", "mqtts://b:65536", "mqtt://u:p@b"],
)
def test_what_is_no_address_of_a_broker(text: str) -> None:
    with pytest.raises(ValueError, match="is no broker"):
        parse_broker(text)
