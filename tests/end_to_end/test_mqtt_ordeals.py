"""Kills at random moments, connections that break, a broker that is away under load: nothing acknowledged is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.agents import serving, until
from tests.support.brokers import mosquitto
from tests.support.deliveries import faults_of
from tests.support.operators import Heard, of, operator
from tests.support.ordeals import Asking, configured, settle, suffer
from tests.support.proxy import proxy


@pytest.mark.parametrize("seed", [1])
def test_kills_and_broken_connections(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with (
        mosquitto(tmp_path / "broker", "allow_anonymous true", "max_queued_messages 0") as broker,
        operator(broker.port) as hearing,
        proxy(broker.port) as network,
    ):
        asking = suffer(tmp_path, network, hearing, draw, kills=3, breaks=5)
        hearing.until(lambda heard: heard.topic.endswith("/agent") and heard.body.get("clean") is True)
        assert faults_of(hearing.heard) == []
        # What was answered less than a tenth of a second before a kill was not durable yet.
        assert len({heard.key for heard in hearing.found(of("result/1"))}) > asking.answered / 2


def test_a_broker_that_is_away_under_load(tmp_path: Path) -> None:
    """Of more than may wait, what goes is told: all that was produced came, or is in a gap."""
    keep = '[mqtt.keep.m]\nmib = 0.25\ndrop = "oldest"'
    with (
        mosquitto(tmp_path / "broker", "allow_anonymous true", "max_queued_messages 0") as broker,
        operator(broker.port) as hearing,
        proxy(broker.port) as network,
        serving(None, tmp_path / "log", "--config", str(configured(tmp_path, network.url, keep))) as agent,
    ):
        hearing.until(of("birth/1"))
        network.refuse()
        network.reset()
        asking = Asking()
        with asking.on(agent.url):
            until(lambda: agent.metric("tightfit_mqtt_dropped_total", reason="oldest") > 100, 300)
        network.refuse(False)
        settle(agent)
        hearing.until(of("gap/1"))
        until(lambda: faults_of(hearing.heard) == [])
        assert agent.stop() == 0
    came, gone = results(hearing.heard), sum(told(each) for each in hearing.found(of("gap/1")))
    assert came + gone == asking.answered


def results(heard: list[Heard]) -> int:
    return len({each.key for each in heard if of("result/1")(each)})


def told(gap: Heard) -> int:
    return int(gap.body["count"]) if gap.body["stream"].endswith("/result") else 0
