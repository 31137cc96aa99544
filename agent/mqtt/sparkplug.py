"""Sparkplug B: an edge node's birth, data and death, as its hosts want them. Pure.

Source: Eclipse Sparkplug Specification 3.0.0; requirements are named by their ids there (`tck-id-...`). Payloads are
Protocol Buffers (section 6.4.1), of which so little is needed that it is written and read here.

    CONNECT with NDEATH(bdSeq) as the will --> NBIRTH(seq 0, bdSeq, all metrics) --> NDATA(seq 1, 2, ... 255, 0, ...)
                                                  ^--------- NCMD Node Control/Rebirth ---------'
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from agent.mqtt.packet import Outgoing

NAMESPACE = "spBv1.0"
REBIRTH, BDSEQ = "Node Control/Rebirth", "bdSeq"
# Section 6.4.16, DataType.
_INT64, _DOUBLE, _BOOLEAN, _STRING = 4, 10, 11, 12
_WRAP = 256
# A payload that has more is no command of a person's.
_MOST_BYTES = 64 << 10

Value = bool | int | float | str | None
"""None of a metric that has no value now (is_null)."""


class Metric(NamedTuple):
    """Its type is that of its value; of one without, `kind` says it."""

    value: Value
    kind: type[bool] | type[int] | type[float] | type[str]


class Node:
    """One edge node. What it makes is to be sent in that order, on one connection, or not at all."""

    def __init__(self, group: str, name: str) -> None:
        self._group, self._name = group, name
        self._bdseq = _WRAP - 1
        self._seq = 0
        self._told: dict[str, Metric] = {}

    @property
    def commands(self) -> str:
        """The topic of commands to it (tck-id-message-flow-edge-node-ncmd-subscribe)."""
        return self._topic("NCMD")

    def connects(self) -> Outgoing:
        """The will of the next connection, which counts it (tck-id-payloads-ndeath-will-message, -bdseq)."""
        self._bdseq = (self._bdseq + 1) % _WRAP
        return self.death()

    def death(self) -> Outgoing:
        """Also what is sent before a disconnection on purpose. QoS 1, not retained (tck-id-payloads-ndeath-...)."""
        payload = _metric(BDSEQ, Metric(self._bdseq, int), None)
        return Outgoing(self._topic("NDEATH"), _field(2, payload), qos=1)

    def birth(self, metrics: Mapping[str, Metric], now_ms: int) -> Outgoing:
        """All that the node will ever tell of until the next one, with its values now; seq is 0, and bdSeq that of the
        will (tck-id-payloads-nbirth-...). QoS 0, not retained."""
        self._seq, self._told = 0, dict(metrics)
        own = {BDSEQ: Metric(self._bdseq, int), REBIRTH: Metric(False, bool)}
        return self._payload("NBIRTH", {**own, **metrics}, now_ms)

    def data(self, metrics: Mapping[str, Metric], now_ms: int) -> Outgoing | None:
        """What differs from what was told (tck-id-operational-behavior-data-publish-nbirth-change); None where nothing
        does. Raises ValueError for what was not in the birth: that needs another one."""
        if metrics.keys() - self._told.keys():
            raise ValueError("metrics that were not in the birth")
        changed = {name: metric for name, metric in metrics.items() if self._told[name] != metric}
        if not changed:
            return None
        self._seq = (self._seq + 1) % _WRAP
        self._told.update(changed)
        return self._payload("NDATA", changed, now_ms)

    def wants_birth(self, metrics: Mapping[str, Metric]) -> bool:
        """Whether there are others than in the birth."""
        return metrics.keys() != self._told.keys()

    def _payload(self, kind: str, metrics: Mapping[str, Metric], now_ms: int) -> Outgoing:
        parts = [_number(1, now_ms)]
        parts += [_field(2, _metric(name, metric, now_ms)) for name, metric in metrics.items()]
        parts.append(_number(3, self._seq))
        return Outgoing(self._topic(kind), b"".join(parts), qos=0)

    def _topic(self, kind: str) -> str:
        return f"{NAMESPACE}/{self._group}/{kind}/{self._name}"


def is_rebirth(payload: bytes) -> bool:
    """Whether a command asks for another birth; what cannot be read asks for nothing."""
    if len(payload) > _MOST_BYTES:
        return False
    try:
        for number, metric in _fields(payload):
            if number == 2 and isinstance(metric, bytes):
                found = dict(_fields(metric))
                # Metric.name and Metric.boolean_value.
                if found.get(1) == REBIRTH.encode() and found.get(14) == 1:
                    return True
    except ValueError:
        return False
    return False


# --- Protocol Buffers: https://protobuf.dev/programming-guides/encoding/


def _metric(name: str, metric: Metric, now_ms: int | None) -> bytes:
    parts = [_field(1, name.encode("utf-8", "replace"))]
    if now_ms is not None:
        parts.append(_number(3, now_ms))
    parts.append(_number(4, {bool: _BOOLEAN, int: _INT64, float: _DOUBLE, str: _STRING}[metric.kind]))
    value = metric.value
    if value is None:
        parts.append(_number(7, 1))
    elif metric.kind is bool:
        parts.append(_number(14, int(value)))
    elif metric.kind is str:
        parts.append(_field(15, str(value).encode("utf-8", "replace")))
    elif metric.kind is float:
        parts.append(_varint(13 << 3 | 1) + struct.pack("<d", float(value)))
    else:
        # Of negative ones the two's complement, as the specification has it for long_value.
        parts.append(_number(11, int(value) & 0xFFFF_FFFF_FFFF_FFFF))
    return b"".join(parts)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field. Raises ValueError for what is no message."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            length, at = _read_varint(data, at)
        else:
            length = {1: 8, 5: 4}.get(wire, len(data))
        if at + length > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, data[at : at + length]
        at += length


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
    raise ValueError("a number is too long")
