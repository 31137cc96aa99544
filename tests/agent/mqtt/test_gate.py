from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.gate import Fate, Gate, Lane, Limits, Options, answer_of
from agent.mqtt.packet import Outgoing, Properties, packet_bytes
from tests.support.mqtt_packets import publish

SMALL = Outgoing("t", b"x" * 100)


def opened(limits: Limits | None = None, now: float = 0.0, **options: float) -> Gate:
    gate = Gate(Options(**options))  # type: ignore[arg-type]
    gate.opened(limits or Limits(), now)
    return gate


def fill(gate: Gate, lane: Lane, now: float, message: Outgoing = SMALL) -> list[int]:
    """Tickets of as many as go in at once."""
    tickets: list[int] = []
    while gate.room(lane, now):
        ticket = gate.enter(lane, len(tickets), message, now)
        if ticket is None:
            return tickets
        tickets.append(ticket)
    return tickets


def test_no_more_goes_in_than_the_broker_takes_at_once() -> None:
    gate = opened(Limits(receive_maximum=5), window=64)
    tickets = fill(gate, Lane.LIVE, 0)
    assert len(tickets) == gate.inside == 5
    assert gate.settle(tickets[0], 0, 0) is not None
    assert gate.room(Lane.LIVE, 0) == 1


def test_no_more_goes_in_than_our_own_window() -> None:
    assert len(fill(opened(window=7), Lane.LIVE, 0)) == 7


def test_messages_without_an_answer_go_through_the_gate_as_well() -> None:
    assert len(fill(opened(window=7), Lane.LIVE, 0, Outgoing("t", b"", qos=0))) == 7


def test_bytes_are_bounded_but_one_message_always_goes() -> None:
    gate = opened(window_bytes=250)
    assert len(fill(gate, Lane.LIVE, 0)) == 2
    assert gate.inside_bytes <= 250
    gate = opened(window_bytes=10)
    assert len(fill(gate, Lane.LIVE, 0)) == 1


@pytest.mark.parametrize(("most", "fits"), [(0, True), (107, True), (106, False)])
def test_a_packet_is_measured_as_the_broker_does(most: int, fits: bool) -> None:
    # A byte, its length, a topic of one, an identifier, no properties, and 100 of payload; 3.1.1 has no properties.
    assert packet_bytes(SMALL, 5) == 108
    assert opened(Limits(protocol=4, maximum_packet=most)).fits(SMALL) is fits


def test_our_own_bound_holds_where_the_broker_has_none() -> None:
    # Some brokers acknowledge what is too large for them, and forget it.
    assert not opened(message_bytes=99).fits(SMALL)
    assert opened(message_bytes=100).fits(SMALL)


def test_the_past_goes_at_a_rate_and_what_happens_now_does_not() -> None:
    gate = opened(window=100, replay_per_s=10.0, replay_burst=3)
    tickets = fill(gate, Lane.REPLAY, 0)
    assert len(tickets) == 3
    assert gate.room(Lane.LIVE, 0) == 97
    assert gate.room(Lane.REPLAY, 0.05) == 0
    assert gate.wakeup(0.05) == pytest.approx(0.1)
    assert gate.room(Lane.REPLAY, 0.25) == 2
    # A burst is all that is saved up.
    assert gate.room(Lane.REPLAY, 1e6) == 3


def test_a_reconnect_is_no_way_around_the_rate() -> None:
    gate = opened(replay_per_s=10.0, replay_burst=3)
    fill(gate, Lane.REPLAY, 0)
    gate.closed()
    gate.opened(Limits(), 0.01)
    assert gate.room(Lane.REPLAY, 0.01) == 0


@pytest.mark.parametrize(
    ("code", "fate", "reason"),
    [
        (0x00, Fate.DELIVERED, "success"),
        (0x10, Fate.DELIVERED, "no_subscribers"),
        (0x11, Fate.DELIVERED, "success"),
        (0x80, Fate.LATER, "unspecified"),
        (0x83, Fate.LATER, "broker_error"),
        (0x87, Fate.NEVER, "not_authorized"),
        (0x90, Fate.NEVER, "topic_invalid"),
        (0x95, Fate.NEVER, "too_large"),
        (0x97, Fate.LATER, "quota"),
        (0x99, Fate.NEVER, "payload_invalid"),
        (0xFF, Fate.LATER, "unknown"),
    ],
)
def test_what_becomes_of_a_message_by_the_code(code: int, fate: Fate, reason: str) -> None:
    assert answer_of(code)[:2] == (fate, reason)


def test_what_the_broker_puts_off_keeps_its_lane_waiting() -> None:
    gate = opened(later_s=5.0)
    first, second = fill(gate, Lane.LIVE, 0)[:2]
    settled = gate.settle(first, 0x97, 1.0)
    assert settled is not None
    assert settled[1:] == (0, Fate.LATER, "quota")
    gate.settle(second, 0, 1.0)
    assert (gate.room(Lane.LIVE, 5.9), gate.room(Lane.LIVE, 6.0)) == (0, 2)
    assert gate.room(Lane.REPLAY, 1.0) == 2


def test_an_error_without_a_name_is_not_tried_for_ever() -> None:
    gate = opened()
    fates = []
    for now in range(0, 50, 10):
        ticket = gate.enter(Lane.LIVE, 7, SMALL, now)
        assert ticket is not None
        settled = gate.settle(ticket, 0x80, now)
        assert settled is not None
        fates.append(settled.fate)
    assert fates == [Fate.LATER] * 4 + [Fate.NEVER]


def test_a_quota_is_waited_for() -> None:
    gate = opened()
    for now in range(0, 1000, 10):
        ticket = gate.enter(Lane.LIVE, 7, SMALL, now)
        assert ticket is not None
        settled = gate.settle(ticket, 0x97, now)
        assert settled is not None
        assert settled.fate is Fate.LATER


def test_an_answer_that_comes_twice_or_for_nothing_is_passed_over() -> None:
    gate = opened()
    ticket = gate.enter(Lane.LIVE, 1, SMALL, 0)
    assert ticket is not None
    assert gate.settle(ticket, 0, 0) is not None
    assert gate.settle(ticket, 0, 0) is None
    assert gate.settle(99, 0, 0) is None
    assert (gate.inside, gate.inside_bytes) == (0, 0)


def test_a_broker_that_acknowledges_nothing_is_noticed() -> None:
    gate = opened(stuck_s=30.0)
    assert not gate.stuck(1e9)
    gate.enter(Lane.LIVE, 1, SMALL, 10.0)
    gate.enter(Lane.LIVE, 2, SMALL, 35.0)
    assert gate.wakeup(35.0) == 40.0
    assert (gate.stuck(39.9), gate.stuck(40.0)) == (False, True)


def test_what_was_inside_when_the_connection_ended_is_told_and_forgotten() -> None:
    gate = opened()
    ticket = gate.enter(Lane.LIVE, 1, SMALL, 0)
    assert ticket is not None
    gate.enter(Lane.REPLAY, 2, SMALL, 0)
    assert [(each.lane, each.position) for each in gate.closed()] == [(Lane.LIVE, 1), (Lane.REPLAY, 2)]
    gate.opened(Limits(), 1)
    # An answer of the connection before is not one of this one.
    assert gate.settle(ticket, 0, 1) is None
    assert gate.inside_bytes == 0


def test_after_an_end_for_something_that_we_sent_messages_go_one_by_one() -> None:
    gate = opened()
    fill(gate, Lane.LIVE, 0)
    assert gate.inside == 64
    assert all(each.fate is Fate.LATER for each in gate.closed(blamed=True))
    gate.opened(Limits(), 1)
    for position in range(64):
        (ticket,) = fill(gate, Lane.LIVE, 1)
        settled = gate.settle(ticket, 0, 1)
        assert settled is not None, position
    # All that could have been it were taken.
    assert len(fill(gate, Lane.LIVE, 1)) == 64


def test_what_is_alone_at_three_such_ends_is_given_up() -> None:
    gate = opened()
    fates = []
    for now in range(4):
        assert gate.enter(Lane.LIVE, 5, SMALL, now) is not None
        if not now:
            assert gate.enter(Lane.LIVE, 6, SMALL, now) is not None
        fates.append([(each.position, each.fate, each.reason) for each in gate.closed(blamed=True)])
        gate.opened(Limits(), now)
    assert fates[0] == [(5, Fate.LATER, "ended"), (6, Fate.LATER, "ended")]
    assert fates[1:] == [[(5, Fate.LATER, "ended")], [(5, Fate.LATER, "ended")], [(5, Fate.NEVER, "broker_ends")]]


def test_an_end_that_is_the_networks_blames_nothing() -> None:
    gate = opened()
    for now in range(10):
        assert gate.enter(Lane.LIVE, 5, SMALL, now) is not None
        assert [each.fate for each in gate.closed()] == [Fate.LATER]
        gate.opened(Limits(), now)
    assert gate.room(Lane.LIVE, 10) == 64


TEXTS = st.text(max_size=300)


@given(
    topic=st.text(st.characters(codec="utf-8", exclude_characters="+#\0"), min_size=1, max_size=200),
    size=st.one_of(st.integers(0, 300), st.integers(16_000, 17_000)),
    qos=st.integers(0, 1),
    properties=st.builds(
        Properties, TEXTS, st.booleans(), st.none() | st.integers(0, 2**32 - 1), TEXTS, st.binary(max_size=50),
        st.lists(st.tuples(TEXTS, TEXTS), max_size=4).map(tuple),
    ),
    protocol=st.sampled_from([4, 5]),
)  # fmt: skip
def test_packets_are_as_long_as_said(topic: str, size: int, qos: int, properties: Properties, protocol: int) -> None:
    message = Outgoing(topic, b"x" * size, qos, properties=properties)
    assert packet_bytes(message, protocol) == len(publish(message, protocol))
