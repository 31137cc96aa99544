"""Packets of MQTT 3.1.1 and 5.0, written after the standards alone: for brokers that are worse than real ones."""

from __future__ import annotations

import struct
from typing import NamedTuple

from agent.mqtt.packet import Outgoing, Properties

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, SUBSCRIBE, SUBACK = 1, 2, 3, 4, 5, 8, 9
PINGREQ, PINGRESP, DISCONNECT = 12, 13, 14

# Of MQTT 5.0, section 2.2.2.2: identifier to (name, kind).
_KINDS = {
    0x01: ("text", "byte"), 0x02: ("expiry", "four"), 0x03: ("content_type", "string"),
    0x08: ("response_topic", "string"), 0x09: ("correlation", "binary"), 0x0B: ("subscription", "length"),
    0x11: ("session_expiry", "four"), 0x12: ("assigned_id", "string"), 0x13: ("server_keepalive", "two"),
    0x15: ("method", "string"), 0x16: ("data", "binary"), 0x17: ("problems", "byte"), 0x18: ("will_delay", "four"),
    0x19: ("responses", "byte"), 0x1A: ("response_information", "string"), 0x1C: ("server_reference", "string"),
    0x1F: ("reason", "string"), 0x21: ("receive_maximum", "two"), 0x22: ("alias_maximum", "two"),
    0x23: ("alias", "two"), 0x24: ("maximum_qos", "byte"), 0x25: ("retain_available", "byte"), 0x26: ("user", "pair"),
    0x27: ("maximum_packet", "four"), 0x28: ("wildcards", "byte"), 0x29: ("subscription_ids", "byte"),
    0x2A: ("shared", "byte"),
}  # fmt: skip
_NUMBERS = {name: (identifier, kind) for identifier, (name, kind) in _KINDS.items()}


class Packet(NamedTuple):
    """One, as it stands on the wire behind its length."""

    kind: int
    flags: int
    body: bytes


def length(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(">H", len(data)) + data


def properties(**given: object) -> bytes:
    """With their length before them; what is None is left out, `user` is pairs."""
    out = b""
    for name, value in given.items():
        identifier, kind = _NUMBERS[name]
        if kind == "pair":
            assert isinstance(value, list | tuple)
            out += b"".join(bytes([identifier]) + string(first) + string(second) for first, second in value)
        elif value is not None:
            out += bytes([identifier]) + _value(kind, value)
    return length(len(out)) + out


def _value(kind: str, value: object) -> bytes:
    if kind in ("string", "binary"):
        assert isinstance(value, str | bytes)
        return string(value)
    assert isinstance(value, int)
    return struct.pack({"byte": ">B", "two": ">H", "four": ">I"}[kind], value)


def packet(kind: int, body: bytes = b"", flags: int = 0) -> bytes:
    return bytes([kind << 4 | flags]) + length(len(body)) + body


def connack(code: int = 0, *, session: bool = False, protocol: int = 5, **given: object) -> bytes:
    body = bytes([session, code])
    return packet(CONNACK, body + properties(**given) if protocol == 5 else body)


def puback(mid: int, code: int = 0, *, protocol: int = 5) -> bytes:
    return packet(PUBACK, struct.pack(">H", mid) + (bytes([code]) if code and protocol == 5 else b""))


def suback(mid: int, codes: list[int], *, protocol: int = 5) -> bytes:
    return packet(SUBACK, struct.pack(">H", mid) + (b"\0" if protocol == 5 else b"") + bytes(codes))


def disconnect(code: int, **given: object) -> bytes:
    return packet(DISCONNECT, bytes([code]) + properties(**given))


def publish(message: Outgoing, protocol: int = 5, mid: int = 1, dup: bool = False) -> bytes:
    given: Properties = message.properties
    body = string(message.topic) + (struct.pack(">H", mid) if message.qos else b"")
    if protocol == 5:
        body += properties(
            text=1 if given.text else None, expiry=given.expiry_s, content_type=given.content_type or None,
            response_topic=given.response_topic or None, correlation=given.correlation or None, user=given.user,
        )  # fmt: skip
    return packet(PUBLISH, body + message.payload, dup << 3 | message.qos << 1 | message.retain)


class Reader:
    """Takes fields off a packet's body."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, count: int) -> bytes:
        data = self._body[self._at : self._at + count]
        assert len(data) == count, "the packet ends too early"
        self._at += count
        return data

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def length(self) -> int:
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def string(self) -> bytes:
        return self.take(self.number(2))

    def rest(self) -> bytes:
        return self.take(len(self._body) - self._at)

    def properties(self) -> dict[str, object]:
        inside = Reader(self.take(self.length()))
        found: dict[str, object] = {}
        while inside._at < len(inside._body):
            name, kind = _KINDS[inside.number(1)]
            if kind == "pair":
                pairs = found.setdefault(name, [])
                assert isinstance(pairs, list)
                pairs.append((inside.string().decode(), inside.string().decode()))
            elif kind == "string":
                found[name] = inside.string().decode()
            elif kind == "binary":
                found[name] = inside.string()
            else:
                found[name] = (
                    inside.length() if kind == "length" else inside.number({"byte": 1, "two": 2, "four": 4}[kind])
                )
        return found


class Connection(NamedTuple):
    """What a CONNECT says."""

    protocol: int
    clean: bool
    keepalive: int
    client_id: str
    will_topic: str
    will_payload: bytes
    will_delay: int
    username: str
    password: bytes
    properties: dict[str, object]


def read_connect(body: bytes) -> Connection:
    reader = Reader(body)
    assert reader.string() == b"MQTT"
    protocol, flags, keepalive = reader.number(1), reader.number(1), reader.number(2)
    found = reader.properties() if protocol == 5 else {}
    client_id = reader.string().decode()
    topic, payload, delay = "", b"", 0
    if flags & 0x04:
        will = reader.properties() if protocol == 5 else {}
        delay = int(str(will.get("will_delay", 0)))
        topic, payload = reader.string().decode(), reader.string()
    username = reader.string().decode() if flags & 0x80 else ""
    password = reader.string() if flags & 0x40 else b""
    return Connection(protocol, bool(flags & 2), keepalive, client_id, topic, payload, delay, username, password, found)


class Published(NamedTuple):
    """What a PUBLISH says."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    mid: int
    properties: dict[str, object]


def read_publish(received: Packet, protocol: int) -> Published:
    reader, qos = Reader(received.body), received.flags >> 1 & 3
    topic = reader.string().decode()
    mid = reader.number(2) if qos else 0
    found = reader.properties() if protocol == 5 else {}
    return Published(topic, reader.rest(), qos, bool(received.flags & 1), bool(received.flags & 8), mid, found)
