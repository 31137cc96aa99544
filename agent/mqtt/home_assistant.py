"""Home Assistant's discovery: retained documents by which it finds what a device says, and shows it. Pure.

Source: Home Assistant, "MQTT discovery" (https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery). A document
is at PREFIX/COMPONENT/NODE/OBJECT/config, with NODE and OBJECT of letters, digits, `_` and `-`; an empty one takes the
entity away. It says where the state is, and how it is read from the JSON there (a Jinja template). When Home Assistant
starts it says `online` at PREFIX/status, and wants to be told again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.mqtt import topics
from agent.mqtt.message import Kind
from agent.mqtt.packet import Outgoing, Properties

ONLINE = b"online"
_PLAIN = re.compile(r"[a-zA-Z0-9_-]{1,48}", re.ASCII)
# A figure that did not come for so many periods is not known any more.
_PERIODS = 3
_JSON = Properties(content_type="application/json", text=True)


class Entity(NamedTuple):
    """Something that is shown: what it is of, and where in the body of that topic. `of` are (component, kind, name)."""

    component: str
    key: str
    name: str
    of: tuple[str, Kind, str]
    template: str
    more: Mapping[str, object] = {}
    expires: bool = True


def _path(expression: str) -> str:
    """What is not in the body is not known: an empty text leaves the state as it is."""
    return f"{{{{ value_json.body.{expression} | default('', true) }}}}"


def _number(expression: str) -> str:
    """Zero is a number, and as such is known."""
    return f"{{{{ value_json.body.{expression} | default('') }}}}"


_BOARD, _MEMORY = ("device", Kind.MEASURE, "device"), ("agent", Kind.MEASURE, "memory")
_BIRTH = ("agent", Kind.STATE, "agent")
_BYTES = {"device_class": "data_size", "unit_of_measurement": "B", "state_class": "measurement"}
_DIAGNOSTIC = {"entity_category": "diagnostic"}

ENTITIES: tuple[Entity, ...] = (
    Entity(
        "binary_sensor", "online", "Agent", _BIRTH, "{{ 'ON' if value_json.body.status == 'online' else 'OFF' }}",
        {"device_class": "connectivity", **_DIAGNOSTIC}, expires=False,
    ),
    Entity(
        "sensor", "temperature", "Temperature", _BOARD, _number("hottest_c"),
        {"device_class": "temperature", "unit_of_measurement": "\u00b0C", "state_class": "measurement"},
    ),
    Entity(
        "binary_sensor", "throttled", "Slowed down", _BOARD, "{{ 'ON' if value_json.body.throttled else 'OFF' }}",
        {"device_class": "problem"},
    ),
    Entity("sensor", "storage_free", "Free storage", _BOARD, _number("storage_free_bytes"), {**_BYTES, **_DIAGNOSTIC}),
    Entity(
        "sensor", "storage_wear", "Storage used up", _BOARD,
        "{{ (value_json.body.storage_wear * 100) | round if value_json.body.storage_wear is defined else '' }}",
        {"unit_of_measurement": "%", "state_class": "measurement", **_DIAGNOSTIC},
    ),
    Entity("sensor", "memory", "Memory", _MEMORY, _number("anonymous_bytes"), _BYTES),
)  # fmt: skip


def of_model(model: str) -> tuple[Entity, ...]:
    """What is shown of a model."""
    of, key = (f"model-{model}", Kind.MEASURE, "latency"), identifier(model)
    return (
        Entity(
            "sensor", f"{key}_p99", f"{model} latency (p99)", of, _number("total.p99_ms"),
            {"device_class": "duration", "unit_of_measurement": "ms", "state_class": "measurement"},
        ),
        Entity("sensor", f"{key}_state", f"{model} state", of, _path("state"), _DIAGNOSTIC),
        Entity(
            "sensor", f"{key}_restarts", f"{model} engine restarts", of, _number("engine_restarts"),
            {"state_class": "total_increasing", **_DIAGNOSTIC},
        ),
    )  # fmt: skip


def documents(
    entities: Iterable[Entity], discovery: str, prefix: str, device: str, version: str, board: str,
    periods_s: Mapping[str, float],
) -> list[Outgoing]:  # fmt: skip
    """All of them, retained. `periods_s` are those of components, `device` and others."""
    node = identifier(device)
    about = {
        "identifiers": [f"tightfit-{node}"], "name": device, "manufacturer": "Tightfit", "sw_version": version,
        **({"model": board} if board else {}),
    }  # fmt: skip
    return [
        Outgoing(
            topic_of(discovery, device, each),
            msgspec.json.encode(
                {
                    "name": each.name,
                    "unique_id": f"tightfit_{node}_{each.key}",
                    "state_topic": _topic(prefix, device, each.of),
                    "value_template": each.template,
                    "availability_topic": _topic(prefix, device, _BIRTH),
                    "availability_template": "{{ value_json.body.status }}",
                    **each.more,
                    **({"expire_after": _expiry_s(each, periods_s)} if each.expires else {}),
                    "device": about,
                    "origin": {"name": "tightfit-agent", "sw_version": version},
                }
            ),
            retain=True,
            properties=_JSON,
        )
        for each in entities
    ]


def removals(gone: Sequence[str]) -> list[Outgoing]:
    """Take away what is at these topics."""
    return [Outgoing(topic, b"", retain=True) for topic in gone]


def topic_of(discovery: str, device: str, entity: Entity) -> str:
    """Where its document is."""
    return f"{discovery}/{entity.component}/{identifier(device)}/{entity.key}/config"


def identifier(name: str) -> str:
    """As it may stand in a topic of discovery, and another one for each name."""
    if _PLAIN.fullmatch(name):
        return name
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:39]
    return f"{plain}_{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _topic(prefix: str, device: str, of: tuple[str, Kind, str]) -> str:
    return topics.topic(prefix, device, topics.stream(*of))


def _expiry_s(entity: Entity, periods_s: Mapping[str, float]) -> int:
    period_s = periods_s["device" if entity.of[0] == "device" else "agent"]
    return max(int(_PERIODS * period_s), 1)
