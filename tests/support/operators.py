"""An operator of a fleet, for tests: hears all that devices say over MQTT 5, and sends them commands."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

Found = Callable[["Heard"], bool]


@dataclass(frozen=True)
class Heard:
    """A message as it came."""

    topic: str
    payload: bytes
    retain: bool
    qos: int
    user: Mapping[str, str]
    correlation: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.payload)
        return found

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["body"]
        return found

    @property
    def schema(self) -> str:
        return self.user["schema"]

    @property
    def key(self) -> tuple[str, str, str] | None:
        """What no two messages have; None of those that are not numbered."""
        return (self.topic, self.user["session"], self.user["seq"]) if "seq" in self.user else None


class Operator:
    """Hears all, from `connected_to` on."""

    def __init__(self, port: int) -> None:
        self.heard: list[Heard] = []
        self._changed = threading.Condition()
        self._subscribed = threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2, "operator", protocol=paho.MQTTv5)
        self._client.on_connect = lambda client, *_: client.subscribe("#", qos=1)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = self._on_message
        self._client.reconnect_delay_set(1, 1)
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 3600
        self._client.connect("127.0.0.1", port, clean_start=True, properties=properties)
        self._client.loop_start()
        assert self._subscribed.wait(60)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def found(self, wanted: Found) -> list[Heard]:
        with self._changed:
            return [each for each in self.heard if wanted(each)]

    def until(self, wanted: Found, count: int = 1, seconds: float = 60) -> list[Heard]:
        """Wait for so many. How long at most only bounds what a hang costs."""
        end = time.monotonic() + seconds
        with self._changed:
            while len(found := [each for each in self.heard if wanted(each)]) < count:
                left_s = end - time.monotonic()
                assert left_s > 0, (
                    f"{len(found)} of {count} came; topics: {sorted({each.topic for each in self.heard})}"
                )
                self._changed.wait(left_s)
        return found

    def send(
        self, topic: str, payload: Mapping[str, object] | bytes, *, reply: str = "", correlation: bytes = b"",
        retain: bool = False, expiry_s: int | None = None,
    ) -> None:  # fmt: skip
        properties = Properties(PacketTypes.PUBLISH)
        if reply:
            properties.ResponseTopic = reply
        if correlation:
            properties.CorrelationData = correlation
        if expiry_s is not None:
            properties.MessageExpiryInterval = expiry_s
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self._client.publish(topic, data, 1, retain, properties).wait_for_publish(60)

    def _on_message(self, _: object, __: object, message: paho.MQTTMessage) -> None:
        properties = message.properties
        user = dict(getattr(properties, "UserProperty", ()))
        correlation = getattr(properties, "CorrelationData", b"")
        with self._changed:
            self.heard.append(Heard(message.topic, message.payload, message.retain, message.qos, user, correlation))
            self._changed.notify_all()


@contextmanager
def operator(port: int) -> Iterator[Operator]:
    """One until the block is left."""
    made = Operator(port)
    try:
        yield made
    finally:
        made.close()


def of(schema: str, topic: str = "") -> Found:
    """Messages of that schema, and of topics that end so."""
    return lambda heard: heard.user.get("schema") == schema and heard.topic.endswith(topic)
