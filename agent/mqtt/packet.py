"""What goes to a broker and comes from it, as values: nothing of the library that carries it. Pure."""

from __future__ import annotations

import msgspec

# A fixed header of PUBLISH is one byte and a length of at most four (MQTT 5.0, section 2.1.4).
_LENGTHS = (0x7F, 0x3FFF, 0x1F_FFFF, 0xFFF_FFFF)


class Properties(msgspec.Struct, frozen=True):
    """Of MQTT 5.0, section 3.3.2.3. `text` says that the payload is UTF-8 (payload format indicator 1)."""

    content_type: str = ""
    text: bool = False
    expiry_s: int | None = None
    response_topic: str = ""
    correlation: bytes = b""
    user: tuple[tuple[str, str], ...] = ()


NO_PROPERTIES = Properties()


class Outgoing(msgspec.Struct, frozen=True):
    """A message as it is sent. Under 3.1.1 its properties are not."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    properties: Properties = NO_PROPERTIES


class Incoming(msgspec.Struct, frozen=True):
    """A message as it came, `at` by this machine's monotonic clock."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties
    at: float


def is_topic(text: str) -> bool:
    """Whether a message may be sent there (MQTT 5.0, section 4.7): what may not, some brokers end a connection for."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False
    return 0 < size <= 0xFFFF and not any(each in text for each in "+#\0")


def packet_bytes(message: Outgoing, protocol: int) -> int:
    """How long its PUBLISH is on the wire, under `protocol` 4 (3.1.1) or 5: what Maximum Packet Size is about."""
    body = 2 + len(message.topic.encode("utf-8", "replace")) + len(message.payload) + (2 if message.qos else 0)
    if protocol == 5:
        inside = _properties_bytes(message.properties)
        body += inside + _length_bytes(inside)
    return 1 + _length_bytes(body) + body


def _properties_bytes(properties: Properties) -> int:
    size = 2 * properties.text + 5 * (properties.expiry_s is not None)
    size += _string(properties.content_type) + _string(properties.response_topic)
    size += 3 + len(properties.correlation) if properties.correlation else 0
    return size + sum(5 + len(name.encode()) + len(value.encode()) for name, value in properties.user)


def _string(text: str) -> int:
    return 3 + len(text.encode("utf-8")) if text else 0


def _length_bytes(length: int) -> int:
    return next(count for count, most in enumerate(_LENGTHS, 1) if length <= most)
