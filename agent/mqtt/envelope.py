"""A message as it is sent: its topic, its payload, and what MQTT 5 says beside it. Pure.

The payload is an object {v, t, tq, mono, boot, body}, and `restamped` where `t` was worked out later. What MQTT 5 has
properties for stands under 3.1.1 in its member `mqtt` (docs/mqtt.md).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Literal

import cbor2
import msgspec

from agent.mqtt import topics
from agent.mqtt.message import Kind, Message
from agent.mqtt.moment import Moment, age_s, restamp
from agent.mqtt.packet import Outgoing, Properties, is_topic

Encoding = Literal["json", "cbor"]
CONTENT_TYPES: dict[Encoding, str] = {"json": "application/json", "cbor": "application/cbor"}
VERSION = 1
# Only what stands for the newest is kept by a broker for who comes later.
_RETAINABLE = frozenset({Kind.STATE, Kind.META})
_json = msgspec.json.Encoder()


def encode(
    message: Message,
    *,
    session: str,
    seq: int | None,
    now: Moment,
    device: str,
    prefix: str = "edge",
    hist: bool = False,
    protocol: int = 5,
    encoding: Encoding = "json",
    qos: int = 1,
    known: Mapping[str, Moment] | None = None,
) -> Outgoing:
    """What to send at `now`. `seq` is None for what the log does not number (birth, will); `known` as `restamp` has it.

    The topic is the response topic of the command that is answered, where it is one that may be sent to.
    """
    stream = topics.stream(message.component, message.kind, message.name)
    own = topics.topic(prefix, device, stream)
    elsewhere = message.response_topic if message.response_topic and is_topic(message.response_topic) else own
    said = _said(message, session, seq, hist)
    if elsewhere != own:
        # Who reads there cannot tell from the topic.
        said.update(device=topics.escape(device), stream=stream)
    expiry_s = _expiry(message, now)
    payload = _payload(message, now, known)
    if protocol != 5:
        payload["mqtt"] = _beside(said, seq, expiry_s, message.correlation, encoding)
    data = _json.encode(_finite(payload)) if encoding == "json" else cbor2.dumps(payload)
    return Outgoing(
        elsewhere,
        data,
        min(qos, 1),
        message.retain and message.kind in _RETAINABLE,
        Properties(
            content_type=CONTENT_TYPES[encoding],
            text=encoding == "json",
            expiry_s=expiry_s,
            correlation=message.correlation or b"",
            user=tuple(said.items()),
        ),
    )


def _said(message: Message, session: str, seq: int | None, hist: bool) -> dict[str, str]:
    said = {"schema": message.schema, "session": session}
    if seq is not None:
        said["seq"] = str(seq)
    if message.traceparent:
        said["traceparent"] = message.traceparent
    if hist:
        said["hist"] = "1"
    return said


def _payload(message: Message, now: Moment, known: Mapping[str, Moment] | None) -> dict[str, object]:
    made, stamp = message.moment, restamp(message.moment, now, known)
    payload: dict[str, object] = {
        "v": VERSION,
        "t": stamp.utc_ns,
        "tq": stamp.quality.value,
        "mono": made.mono_ns,
        "boot": made.boot_id,
    }
    if stamp.restamped:
        payload["restamped"] = {"t": made.utc_ns, "tq": made.quality.value}
    payload["body"] = dict(message.body)
    return payload


def _beside(
    said: dict[str, str], seq: int | None, expiry_s: int | None, correlation: bytes | None, encoding: Encoding
) -> dict[str, object]:
    beside: dict[str, object] = {**said, "content_type": CONTENT_TYPES[encoding]}
    if seq is not None:
        beside["seq"] = seq
    if "hist" in said:
        beside["hist"] = 1
    if expiry_s is not None:
        beside["expiry_s"] = expiry_s
    if correlation:
        beside["correlation"] = base64.b64encode(correlation).decode("ascii")
    return beside


def _expiry(message: Message, now: Moment) -> int | None:
    """What is left of it. What waited too long is dropped by the log, not here: the broker is told a second."""
    if message.expiry_s is None:
        return None
    return max(1, math.ceil(message.expiry_s - (age_s(message.moment, now) or 0)))


def _finite(value: object) -> object:
    """JSON has no NaN: as in the JSON of Protocol Buffers the three stand as text. Bytes stand as base64."""
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
