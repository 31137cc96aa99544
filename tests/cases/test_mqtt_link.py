"""Rows of the failures that others had with MQTT: the connection to the broker. The numbers are those of the rows."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent.mqtt.backoff import Trouble
from agent.mqtt.packet import Incoming, Outgoing
from tests.support import mqtt_packets as packets
from tests.support.brokers import Mosquitto, Subscriber, fleet, free_port, mosquitto
from tests.support.fake_broker import fake_broker
from tests.support.links import MEASURE, STATE, Memory, linked, settings, until
from tests.support.proxy import proxy

COMMAND = "edge/v1/d1/agent/cmd/ping"


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 240))


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith(MEASURE)]


def test_e01_without_a_broker_nothing_is_kept_beside_the_source() -> None:
    async def main() -> None:
        source = Memory()
        for _ in range(50_000):
            source.add(b"x" * 1024)
        async with linked(settings(f"mqtt://127.0.0.1:{free_port()}"), source) as (link, _, ears):
            await until(lambda: len(ears.losses) >= 3)
            assert (link.state.inside, link.state.inside_bytes) == (0, 0)
            assert len(source.waiting) == 50_000
            assert not link.state.is_connected

    run(main())


def test_e02_e03_what_was_said_offline_arrives_once(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path)

    async def main() -> None:
        async with linked(settings(broker.url)) as (link, source, ears):
            source.add(7)
            # Neither raises nor waits, and nothing is handed to a library that would keep it.
            link.wake()
            await until(lambda: len(ears.losses) >= 2)
            broker.start()
            await until(lambda: link.state.is_connected)
            with Subscriber(broker) as subscriber:
                source.add(8)
                link.wake()
                await until(lambda: not source.waiting)
                await asyncio.to_thread(subscriber.until, 1)
            assert source.delivered_at == [0, 1]

    try:
        run(main())
        assert broker.log.count(f"'{MEASURE}'") == 3  # two from us, one to the subscriber
    finally:
        broker.stop()


def test_e04_what_a_broker_would_acknowledge_and_forget_is_not_sent(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url, message_kib=1)) as (link, source, _):
            with Subscriber(broker) as subscriber:
                large, small = source.add(b"x" * 2000), source.add(1)
                link.wake()
                await until(lambda: not source.waiting)
                assert numbers(await asyncio.to_thread(subscriber.until, 1)) == [1]
            assert source.rejections == {large: "too_large"}
            assert source.delivered_at == [small]
            assert link.state.rejected == {"too_large": 1}

    with mosquitto(tmp_path, "allow_anonymous true", "message_size_limit 1100") as broker:
        run(main(broker))


def test_e04_the_brokers_maximum_packet_size_is_honoured(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url)) as (link, source, ears):
            source.add(b"x" * 2000)
            source.add(1)
            await until(lambda: not source.waiting)
            assert source.rejections == {0: "too_large"}
            assert ears.connections[0].limits.maximum_packet == 1000
            assert link.state.connections == 1

    with mosquitto(tmp_path, "allow_anonymous true", "max_packet_size 1000") as broker:
        run(main(broker))


def test_e05_a_listener_that_fails_stops_nothing(tmp_path: Path) -> None:
    def fails(message: Incoming) -> None:
        raise RuntimeError("no JSON")

    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url)) as (link, source, ears):
            await until(lambda: link.state.is_connected)
            ears.at_command = fails
            for count in range(1, 4):
                await asyncio.to_thread(broker.publish, COMMAND, "no JSON")
                await until(lambda count=count: len(ears.commands) == count)  # type: ignore[misc]
            source.add(1)
            link.wake()
            await until(lambda: not source.waiting)
            assert link.state.connections == 1
            assert ears.losses == []

    with mosquitto(tmp_path) as broker:
        run(main(broker))


GARBAGE = [
    pytest.param(b"\x00\x00", id="no such packet"),
    pytest.param(b"\x40\x01\x00", id="half a PUBACK"),
    pytest.param(packets.packet(packets.PUBACK, b"\x00\x01\x55\x7f"), id="properties that are none"),
    pytest.param(packets.packet(packets.PUBLISH, b"\xff\xff"), id="a topic longer than its packet"),
    pytest.param(b"\x30\xff\xff\xff\xff\x01", id="a length without an end"),
    pytest.param(b"\x30\xff\xff\xff\x7f", id="256 MiB"),
    pytest.param(packets.packet(packets.PUBLISH, b"\x00\x01t\x00\x01\x00x", 4), id="QoS 2"),
    pytest.param(packets.packet(packets.CONNACK, b"\x00\x00\x00"), id="a second CONNACK"),
    pytest.param(packets.packet(packets.DISCONNECT, b"\x42"), id="a reason that is none"),
    pytest.param(packets.packet(packets.SUBACK, b""), id="SUBACK of nothing"),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_e05_whatever_a_broker_sends_the_thread_goes_on(garbage: bytes) -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.greets = [garbage]
            async with linked(settings(broker.url)) as (link, source, _):
                await until(lambda: link.state.connections >= 1)
                broker.greets = []
                broker.drop()
                source.add(1)
                await until(lambda: link.state.connections >= 2)
                link.wake()
                await until(lambda: not source.waiting)
                assert link.state.thread_restarts == 0

    run(main())


def test_e06_two_with_one_name_do_not_throw_each_other_out_for_ever(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        # This broker does not say why it ends the connection before.
        options = settings(broker.url, slow_first_wait_s=600.0)
        async with linked(options) as one, linked(options) as other:
            await until(lambda: one.ears.alarmed("flapping") or other.ears.alarmed("flapping"))
            left, stays = (one, other) if one.ears.alarmed("flapping") else (other, one)
            # A person has to see to it: he is told, and it is not tried again at once.
            assert left.ears.losses[-1].retry_s >= 300
            assert "'d1-agent'" in left.ears.alarms[-1][1]
            stays.source.add(1)
            stays.link.wake()
            await until(lambda: not stays.source.waiting)
            assert max(one.link.state.connections, other.link.state.connections) <= 6

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_e06_a_broker_that_says_that_another_has_our_name() -> None:
    async def main() -> None:
        with fake_broker() as broker:
            async with linked(settings(broker.url, slow_first_wait_s=600.0)) as (link, _, ears):
                await until(lambda: link.state.is_connected)
                broker.send(packets.disconnect(0x8E))
                await until(lambda: bool(ears.losses))
                assert (ears.losses[0].trouble, ears.losses[0].code) == (Trouble.TAKEN_OVER, 0x8E)
                assert ears.losses[0].retry_s >= 300
                assert ears.alarmed("taken_over")
                assert link.state.taken_over == 1

    run(main())


def test_e06_a_connection_that_did_not_hold_makes_the_next_wait_longer() -> None:
    async def main() -> None:
        with fake_broker() as broker:
            options = settings(broker.url, first_wait_s=0.01, most_wait_s=300.0, stable_s=3600.0)
            async with linked(options, draw=lambda: 1.0) as (link, _, ears):
                for count in range(1, 5):
                    await until(lambda count=count: link.state.connections == count)  # type: ignore[misc]
                    broker.drop()
                    await until(lambda count=count: len(ears.losses) == count)  # type: ignore[misc]
            assert [loss.retry_s for loss in ears.losses] == [0.01, 0.02, 0.04, 0.08]

    run(main())


def test_e07_the_will_is_said_of_one_that_vanished_and_not_of_one_that_is_back(tmp_path: Path) -> None:
    def said(subscriber: Subscriber) -> list[str]:
        return [line.split()[1] for line in subscriber.lines]

    async def main(broker: Mosquitto) -> None:
        with proxy(broker.port) as between, Subscriber(broker, STATE) as subscriber:
            async with linked(settings(between.url, keepalive_s=600, will_delay_s=0), greeting=True):
                await until(lambda: said(subscriber) == ["online"])
                between.hang()
                between.abandon()
            # It is back, while the broker still believes in the connection before.
            async with linked(settings(between.url, keepalive_s=5, will_delay_s=0), greeting=True) as (link, _, _):
                await until(lambda: link.state.delivered == 1)
                await until(lambda: said(subscriber)[1:] in (["online"], ["gone", "online"]))
                assert await asyncio.to_thread(broker.retained, STATE) == "online"
                between.hang()
                await until(lambda: said(subscriber)[-1] == "gone")
                between.flow()
                await until(lambda: said(subscriber)[-1] == "online")
                assert await asyncio.to_thread(broker.retained, STATE) == "online"
            # A stop says itself that it is one.
            assert await asyncio.to_thread(broker.retained, STATE) == "offline"

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_e07_one_that_was_killed_is_said_to_be_gone(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        with proxy(broker.port) as between, Subscriber(broker, STATE) as subscriber:
            async with linked(
                settings(between.url, will_delay_s=0, first_wait_s=60.0, most_wait_s=60.0), greeting=True
            ):
                await asyncio.to_thread(subscriber.until, 1)
                between.reset()
                lines = await asyncio.to_thread(subscriber.until, 2)
                assert [line.split()[1] for line in lines] == ["online", "gone"]

    with mosquitto(tmp_path) as broker:
        run(main(broker))


@pytest.mark.parametrize(("expiry_s", "kept"), [(3600, True), (0, False)])
def test_e08_commands_wait_at_the_broker_as_long_as_the_session(tmp_path: Path, expiry_s: int, kept: bool) -> None:
    async def main(broker: Mosquitto) -> None:
        options = settings(broker.url, session_expiry_s=expiry_s)
        async with linked(options) as (link, _, _):
            await until(lambda: "Sending SUBACK" in broker.log)
        await asyncio.to_thread(broker.publish, COMMAND, "before")
        async with linked(options) as (link, _, ears):
            await until(lambda: broker.log.count("Sending SUBACK") == 2)
            await asyncio.to_thread(broker.publish, COMMAND, "after")
            await until(lambda: any(each.payload == b"after" for each in ears.commands))
            assert [each.payload for each in ears.commands] == ([b"before"] if kept else []) + [b"after"]
            assert link.state.session_present is kept
        # Whoever took it acknowledged it: it does not come again.
        async with linked(options) as (link, _, ears):
            await until(lambda: broker.log.count("Sending SUBACK") == 3)
            await asyncio.to_thread(broker.publish, COMMAND, "last")
            await until(lambda: bool(ears.commands))
            assert [each.payload for each in ears.commands] == [b"last"]

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_e09_a_command_may_be_answered_where_it_comes(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url)) as (link, source, ears):

            def answers(message: Incoming) -> None:
                source.add(b"pong", "edge/v1/d1/agent/res/ping")
                link.wake()

            ears.at_command = answers
            await until(lambda: "Sending SUBACK" in broker.log)
            with Subscriber(broker, "edge/v1/d1/agent/res/#") as subscriber:
                await asyncio.to_thread(broker.publish, COMMAND, "{}")
                assert await asyncio.to_thread(subscriber.until, 1) == ["edge/v1/d1/agent/res/ping pong"]

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_e10_a_broker_that_acknowledges_nothing_is_noticed_and_left() -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.acknowledges = False
            source = Memory()
            for number in range(100):
                source.add(number)
            async with linked(settings(broker.url, window=20, stuck_s=0.5), source) as (link, _, ears):
                await until(lambda: link.state.stuck >= 2)
                assert ears.alarmed("stuck")
                assert link.state.inside <= 20
                assert broker.most_unanswered == 20
                assert source.delivered_at == []
                broker.acknowledges = True
                await until(lambda: not source.waiting)
                assert sorted(source.delivered_at) == list(range(100))

    run(main())


@pytest.mark.parametrize("topic", ["a/+/b", "a/#", "a\0b", "", "\ud800", "x" * 70_000], ids=range(6))
def test_e12_a_topic_that_cannot_be_is_told_and_stops_nothing(tmp_path: Path, topic: str) -> None:
    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url)) as (link, source, _):
            await until(lambda: link.state.is_connected)
            source.add(1, topic)
            source.add(2)
            link.wake()
            await until(lambda: not source.waiting)
            assert source.rejections == {0: "topic_invalid"}
            assert (link.state.connections, source.delivered_at) == (1, [1])

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_e14_a_clock_that_jumps_changes_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws, real = random.Random(1), time.time

    async def main(broker: Mosquitto) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + draws.choice([-1, 1]) * 365 * 86_400)
        source = Memory()
        for number in range(200):
            source.add(number)
        async with linked(settings(broker.url, stuck_s=60.0, replay_per_s=1000.0), source) as (link, _, ears):
            await until(lambda: not source.waiting)
            assert (link.state.connections, link.state.stuck, ears.losses) == (1, 0, [])

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_e16_a_command_that_is_too_large_ends_one_connection_and_not_the_agent() -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.greets = [packets.publish(Outgoing(COMMAND, b"x" * (1 << 20)))]
            async with linked(settings(broker.url, command_kib=1)) as (_, source, ears):
                await until(lambda: bool(ears.losses))
                assert ears.losses[0].trouble is Trouble.PROTOCOL
                assert "a packet of 10" in ears.losses[0].text
                broker.greets = []
                source.add(1)
                await until(lambda: not source.waiting)
                assert ears.commands == []

    run(main())


def test_e16_a_real_broker_is_told_how_large_a_command_may_be(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url, command_kib=1)) as (link, _, ears):
            await until(lambda: "Sending SUBACK" in broker.log)
            await asyncio.to_thread(broker.publish, COMMAND, "x" * 100_000)
            await asyncio.to_thread(broker.publish, COMMAND, "")
            await asyncio.to_thread(broker.publish, COMMAND, "{}", "-r")
            await until(lambda: len(ears.commands) == 2)
            assert [each.payload for each in ears.commands] == [b"", b"{}"]
            assert link.state.connections == 1
        # One that is retained is of long ago, and not asked for.
        async with linked(settings(broker.url, client_id="another")) as (link, _, ears):
            await until(lambda: broker.log.count("Sending SUBACK") == 2)
            await asyncio.to_thread(broker.publish, COMMAND, "new")
            await until(lambda: bool(ears.commands))
            assert [each.payload for each in ears.commands] == [b"new"]

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_commands_that_nobody_takes_are_bounded() -> None:
    def flood(topic: str, mid: int) -> bytes:
        return packets.publish(Outgoing(topic, b"x" * 1000), mid=mid)

    async def main() -> None:
        with fake_broker() as broker:
            async with linked(settings(broker.url)) as (link, _, ears):
                await until(lambda: link.state.is_connected)
                # The loop stands still while a thousand come; only so many are kept as the broker may send at once.
                broker.send(b"".join(flood(COMMAND, mid) for mid in range(1, 1001)))
                until_s = time.monotonic() + 60
                while link.state.commands_dropped < 984:
                    assert time.monotonic() < until_s
                    time.sleep(0.01)  # noqa: ASYNC251
                await until(lambda: len(ears.commands) == 16)
                assert link.state.commands_dropped == 984

    run(main())


@pytest.mark.parametrize("protocol", ["auto", "5"])
def test_a_broker_is_never_given_more_than_it_takes_at_once(protocol: str) -> None:
    async def main() -> None:
        with fake_broker({"receive_maximum": 5, "maximum_packet": 256}) as broker:
            source = Memory()
            for number in range(300):
                source.add(b"x" * 300 if number % 10 == 0 else number)
            async with linked(settings(broker.url, protocol=protocol), source) as (link, _, _):
                await until(lambda: len(source.waiting) < 200)
                broker.drop()
                await until(lambda: not source.waiting)
                assert link.state.connections == 2
            assert broker.most_unanswered <= 5
            assert broker.largest <= 256
            assert len(source.rejections) == 30
            assert set(source.rejections.values()) == {"too_large"}

    run(main())


def test_messages_without_an_answer_do_not_pile_up_for_a_peer_that_reads_nothing() -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.reads_after_connack = False
            source = Memory()
            for _ in range(30_000):
                source.add(b"x" * 1024, qos=0)
            async with linked(settings(broker.url, stuck_s=2.0), source) as (link, _, _):
                inside = []
                await until(lambda: inside.append(link.state.inside_bytes) or link.state.stuck >= 1)  # type: ignore[func-returns-value]
                assert max(inside) <= 1 << 20
                # What the kernels of both sides take counts as sent: QoS 0 promises no more.
                assert len(source.waiting) > 15_000

    run(main())


def test_answers_by_their_code() -> None:
    codes = {0: 0x10, 1: 0x87, 2: 0x99, 3: 0x00, 4: 0x90}

    async def main() -> None:
        with fake_broker() as broker:
            broker.code_of = lambda message: codes[int(message.payload)]
            async with linked(settings(broker.url)) as (link, source, _):
                for number in codes:
                    source.add(number)
                await until(lambda: not source.waiting)
                assert sorted(source.delivered_at) == [0, 3]
                assert source.rejections == {1: "not_authorized", 2: "payload_invalid", 4: "topic_invalid"}
                assert link.state.connections == 1

    run(main())


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(packets.disconnect(0x95), id="too large"),
        pytest.param(packets.puback(1, 0x95), id="a code that is none"),
    ],
)
def test_a_message_with_which_a_broker_always_ends_the_connection_does_not_stop_the_others(end: bytes) -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.ends_at = lambda message: end if message.payload == b"3" else b""
            async with linked(settings(broker.url)) as (link, source, _):
                for number in range(20):
                    source.add(number)
                await until(lambda: not source.waiting)
                assert source.rejections == {3: "broker_ends"}
                assert len(source.delivered_at) == 19
                assert link.state.connections <= 6

    run(main())


def test_what_the_broker_puts_off_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with fake_broker() as broker:
            asked: list[int] = []

            def once(message: packets.Published) -> int:
                asked.append(int(message.payload))
                return 0x97 if asked.count(3) == 1 and asked[-1] == 3 else 0

            broker.code_of = once
            async with linked(settings(broker.url, window=4)) as (link, source, _):
                for number in range(10):
                    source.add(number)
                await until(lambda: not source.waiting)
                assert sorted(source.delivered_at) == list(range(10))
                assert link.state.put_off == 1
                assert asked.count(3) == 2
                assert link.state.connections == 1

    run(main())


def test_an_acknowledgement_of_nothing_delivers_nothing() -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.acknowledges = False
            async with linked(settings(broker.url)) as (link, source, _):
                source.add(1)
                await until(lambda: bool(broker.published))
                broker.send(packets.puback(broker.published[0].mid + 100) + packets.puback(60_000))
                broker.acknowledge_withheld()
                source.add(2)
                link.wake()
                await until(lambda: not source.waiting)
                assert source.delivered_at == [0, 1]

    run(main())


def test_the_brokers_keepalive_holds() -> None:
    async def main() -> None:
        with fake_broker({"server_keepalive": 1}) as broker:
            broker.answers_pings = False
            async with linked(settings(broker.url, keepalive_s=3600)) as (link, _, ears):
                await until(lambda: link.state.is_connected)
                assert link.state.keepalive_s == 1
                # And a broker that does not answer is noticed within it.
                await until(lambda: bool(ears.losses))
                assert ears.losses[0].trouble is Trouble.NETWORK

    run(main())


def test_a_broker_that_sends_us_elsewhere_is_followed() -> None:
    async def main() -> None:
        with fake_broker() as here, fake_broker() as there:
            here.refusals = [packets.connack(0x9D, server_reference=f"127.0.0.1:{there.port}")]
            async with linked(settings(here.url, first_wait_s=600.0, most_wait_s=600.0)) as (link, source, _):
                source.add(1)
                await until(lambda: not source.waiting)
                assert link.state.broker == there.url
                assert (len(here.connects), len(there.connects)) == (1, 1)

    run(main())


def test_the_next_broker_is_asked_where_one_is_away() -> None:
    async def main() -> None:
        with fake_broker() as second:
            nobody = f"mqtt://127.0.0.1:{free_port()}"
            async with linked(settings(nobody, second.url)) as (link, source, ears):
                source.add(1)
                await until(lambda: not source.waiting)
                assert link.state.broker == second.url
                assert [str(each.broker) for each in ears.losses] == [nobody]

    run(main())


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (packets.connack(0x86), Trouble.AUTHENTICATION),
        (packets.connack(0x87, reason="no"), Trouble.AUTHENTICATION),
        (packets.connack(0x9F), Trouble.RATE),
        (packets.connack(0x88), Trouble.REFUSED),
    ],
)
def test_what_only_a_person_mends_is_tried_slowly(answer: bytes, trouble: Trouble) -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.refusals = [answer]
            async with linked(settings(broker.url, slow_first_wait_s=600.0)) as (_, _, ears):
                await until(lambda: bool(ears.losses))
                assert ears.losses[0].trouble is trouble
                assert (ears.losses[0].retry_s >= 300) is (trouble is not Trouble.REFUSED)
                assert ears.alarmed("authentication") is (trouble is Trouble.AUTHENTICATION)

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        packets.connack(0x84),
        # A broker that knows 3.1.1 alone answers in its own form, or closes the connection.
        packets.connack(1, protocol=4),
        b"",
    ],
    ids=["unsupported", "in 3.1.1", "closed"],
)
def test_a_broker_without_mqtt_5_is_spoken_to_in_3_1_1(answer: bytes) -> None:
    async def main() -> None:
        with fake_broker() as broker:
            broker.refusals = [answer]
            async with linked(settings(broker.url)) as (link, source, _):
                source.add(1)
                await until(lambda: not source.waiting)
                assert link.state.protocol == 4
                assert [each.protocol for each in broker.connects] == [5, 4]
                assert broker.published[0].payload == b"1"

    run(main())


def test_all_works_in_3_1_1(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url, protocol="3.1.1"), greeting=True) as (link, source, ears):
            await until(lambda: "Sending SUBACK" in broker.log)
            await asyncio.to_thread(broker.publish, COMMAND, "{}")
            source.add(1)
            link.wake()
            await until(lambda: not source.waiting and bool(ears.commands))
            assert await asyncio.to_thread(broker.retained, STATE) == "online"
        assert await asyncio.to_thread(broker.retained, STATE) == "offline"

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_nothing_is_lost_and_all_is_in_order_over_connections_that_are_reset(tmp_path: Path) -> None:
    draws, total = random.Random(9), 3000

    async def main(broker: Mosquitto) -> None:
        with proxy(broker.port) as between, Subscriber(broker, MEASURE, "-i", "reader") as subscriber:
            async with linked(settings(between.url, window=16, slow_first_wait_s=0.05, slow_most_wait_s=0.2)) as (
                link,
                source,
                _,
            ):
                for number in range(total):
                    source.add(number)
                    link.wake()
                    if draws.random() < 0.01:
                        await until(lambda: link.state.is_connected)
                        await asyncio.sleep(draws.random() * 0.02)
                        between.reset()
                await until(lambda: not source.waiting)
                assert link.state.connections > 10
                assert sorted(source.delivered_at) == list(range(total))
            got = numbers(await asyncio.to_thread(subscriber.until, total))
            first_seen = list(dict.fromkeys(got))
            assert sorted(first_seen) == list(range(total))
            # What was on its way may come again, and no more than that.
            assert len(got) - total <= 16 * link.state.connections
            assert len(got) - total <= link.state.resent

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_a_network_that_hangs_is_left_for_one_that_does_not(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        with proxy(broker.port) as between:
            between.delay_s = 0.05
            async with linked(settings(between.url, stuck_s=1.0)) as (link, source, ears):
                await until(lambda: link.state.is_connected)
                between.hang()
                source.add(1)
                link.wake()
                await until(lambda: ears.alarmed("stuck"))
                between.abandon()
                await until(lambda: not source.waiting)

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def test_a_broker_that_is_killed_and_back_has_it_all(tmp_path: Path) -> None:
    async def main(broker: Mosquitto) -> None:
        async with linked(settings(broker.url)) as (link, source, _):
            for round_ in range(3):
                await until(lambda: link.state.is_connected)
                for number in range(200):
                    source.add(round_ * 200 + number)
                link.wake()
                broker.stop(signal.SIGKILL)
                broker.start()
            await until(lambda: not source.waiting)
            assert sorted(source.delivered_at) == list(range(600))

    with mosquitto(tmp_path) as broker:
        run(main(broker))


def secured(tmp_path: Path, use: Callable[..., Coroutine[Any, Any, None]], *lines: str) -> None:
    with fleet(tmp_path, *lines) as made:
        run(use(made))


def identity(made: Any, pair: Any) -> dict[str, str]:
    return {"ca": str(made.authority.own.certificate), "certificate": str(pair.certificate), "key": str(pair.key)}


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_over_tls_with_a_certificate_only_its_own_topics_are_open(tmp_path: Path, protocol: str) -> None:
    async def main(made: Any) -> None:
        options = settings(made.broker.secure_url, protocol=protocol, **identity(made, made.device("d1")))
        async with linked(options) as (link, source, ears):
            source.add(1)
            source.add(2, "edge/v1/another/agent/m/x")
            await until(lambda: not source.waiting)
            assert source.rejections == ({1: "not_authorized"} if protocol == "5" else {})
            await asyncio.to_thread(made.broker.publish, COMMAND, "{}")
            await until(lambda: bool(ears.commands))
            assert link.state.connections == 1

    secured(tmp_path, main)


def test_a_certificate_that_expired_is_told_and_its_successor_is_used_at_once(tmp_path: Path) -> None:
    async def main(made: Any) -> None:
        old, new = made.device("d1", ends="20210101000000Z"), made.device("d1")
        own = tmp_path / "own.pem", tmp_path / "own.key"
        own[0].write_bytes(old.certificate.read_bytes())
        own[1].write_bytes(old.key.read_bytes())
        named = {"ca": str(made.authority.own.certificate), "certificate": str(own[0]), "key": str(own[1])}
        options = settings(made.broker.secure_url, watch_s=0.1, slow_first_wait_s=600.0, **named)
        async with linked(options) as (link, source, ears):
            source.add(1)
            # TLS 1.3 tells of it after the handshake, with the first bytes.
            await until(lambda: ears.alarmed("certificate"))
            assert any("certificate expired" in text for _, text in ears.alarms)
            own[0].write_bytes(new.certificate.read_bytes())
            own[1].write_bytes(new.key.read_bytes())
            await until(lambda: not source.waiting)
            assert link.state.protocol == 5
            before = link.state.connections
            another = made.device("d1")
            own[0].write_bytes(another.certificate.read_bytes())
            own[1].write_bytes(another.key.read_bytes())
            await until(lambda: link.state.connections == before + 1)
            # Files that belong to nothing change nothing.
            own[0].write_bytes(b"no certificate")
            assert link.reload() == [f"the certificate {own[0]} holds none in PEM form (convert it with openssl x509)"]
            assert link.state.is_connected

    secured(tmp_path, main)


def test_a_broker_that_is_not_the_one_it_says_is_not_told_anything(tmp_path: Path) -> None:
    async def main(made: Any) -> None:
        # An authority that did not sign the broker's certificate.
        strange = {**identity(made, made.device("d1")), "ca": str(made.authority.issue("x").certificate)}
        async with linked(settings(made.broker.secure_url, slow_first_wait_s=600.0, **strange)) as (_, source, ears):
            source.add(1)
            await until(lambda: ears.alarmed("certificate"))
            assert "the broker's certificate" in ears.losses[0].text
            assert len(source.waiting) == 1

    secured(tmp_path, main)


def test_a_password_from_a_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "broker").write_text("secret\n")

    async def main() -> None:
        with fake_broker() as broker:
            options = settings(broker.url, username="d1", password="credential:broker")  # noqa: S106
            async with linked(options) as (link, _, _):
                await until(lambda: link.state.is_connected)
            assert (broker.connects[0].username, broker.connects[0].password) == ("d1", b"secret")
            assert broker.goodbyes == [0]

    run(main())
