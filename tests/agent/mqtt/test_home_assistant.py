"""Documents for Home Assistant, held against what it has written down of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from agent.mqtt.home_assistant import ENTITIES, documents, identifier, of_model, removals
from agent.mqtt.packet import Outgoing

# <discovery_prefix>/<component>/[<node_id>/]<object_id>/config
TOPIC = re.compile(r"homeassistant/(sensor|binary_sensor)/[a-zA-Z0-9_-]+/[a-zA-Z0-9_-]+/config")
# Of the integration's lists of device classes, and the units that each may have.
UNITS: dict[str, dict[str | None, set[str | None]]] = {
    "sensor": {
        "temperature": {"\u00b0C", "\u00b0F", "K"},
        "data_size": {"bit", "kbit", "Mbit", "Gbit", "B", "kB", "MB", "GB", "TB"},
        "duration": {"d", "h", "min", "s", "ms", "\u00b5s"},
        None: {None, "%"},
    },
    "binary_sensor": {"connectivity": {None}, "problem": {None}},
}
STATE_CLASSES = {None, "measurement", "total", "total_increasing"}


def made(device: str = "car-1", *models: str) -> list[Outgoing]:
    entities = [*ENTITIES, *(each for model in models for each in of_model(model))]
    return documents(
        entities, "homeassistant", "edge", device, "1.0", "raspberry-pi-5-4gb", {"agent": 30, "device": 60}
    )


def test_each_is_by_the_rules() -> None:
    found = made("car 1/\u00e4", "door", "a b")
    texts: list[dict[str, Any]] = [json.loads(each.payload) for each in found]
    for message, text in zip(found, texts, strict=True):
        assert message.retain
        place = TOPIC.fullmatch(message.topic)
        assert place is not None, message.topic
        assert text["state_topic"].startswith("edge/v1/")
        classes = UNITS[place[1]]
        assert text.get("unit_of_measurement") in classes[text.get("device_class")]
        assert text.get("state_class") in (STATE_CLASSES if place[1] == "sensor" else {None})
        assert text.get("entity_category") in (None, "diagnostic")
        assert text["availability_topic"].endswith("/agent/state/agent")
        assert text["device"]["identifiers"]
        assert text["origin"]["name"]
        assert text.get("expire_after", 1) >= 1
        # A level of a topic may have no wildcards.
        assert not set("+#") & set(text["state_topic"])
    assert len({text["unique_id"] for text in texts}) == len(texts)
    assert len({each.topic for each in found}) == len(found)


def test_figures_expire_with_their_periods() -> None:
    by_name = {json.loads(each.payload)["name"]: json.loads(each.payload) for each in made("d", "door")}
    assert by_name["Temperature"]["expire_after"] == 180
    assert by_name["door latency (p99)"]["expire_after"] == 90
    assert "expire_after" not in by_name["Agent"]


@pytest.mark.parametrize("name", ["a/b", "a+b", "\u00e4", "", "x" * 200, "a b", "\ud800"])
def test_names_become_identifiers(name: str) -> None:
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", identifier(name))
    assert identifier(name) != identifier(name + "!")
    assert identifier("door-1_x") == "door-1_x"


def test_what_is_gone_is_taken_away() -> None:
    (message,) = removals(["homeassistant/sensor/d/x/config"])
    assert (message.payload, message.retain) == (b"", True)
