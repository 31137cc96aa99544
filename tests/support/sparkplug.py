"""Payloads of Sparkplug B, read by Google's library after the specification's own description of them (6.4.1)."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# (number, name, type, label) of what is used here: type and label as in descriptor.proto.
_U32, _U64, _F32, _F64, _BOOL, _TEXT, _BYTES, _MESSAGE = 13, 4, 2, 1, 8, 9, 12, 11
_METRIC = (
    (1, "name", _TEXT), (2, "alias", _U64), (3, "timestamp", _U64), (4, "datatype", _U32), (5, "is_historical", _BOOL),
    (6, "is_transient", _BOOL), (7, "is_null", _BOOL), (10, "int_value", _U32), (11, "long_value", _U64),
    (12, "float_value", _F32), (13, "double_value", _F64), (14, "boolean_value", _BOOL), (15, "string_value", _TEXT),
)  # fmt: skip


def _payload_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="sparkplug_b.proto", package="spb", syntax="proto2")
    payload = file.message_type.add(name="Payload")
    metric = payload.nested_type.add(name="Metric")
    for number, name, kind in _METRIC:
        metric.field.add(number=number, name=name, type=kind, label=1)
    payload.field.add(number=1, name="timestamp", type=_U64, label=1)
    payload.field.add(number=2, name="metrics", type=_MESSAGE, type_name=".spb.Payload.Metric", label=3)
    payload.field.add(number=3, name="seq", type=_U64, label=1)
    payload.field.add(number=4, name="uuid", type=_TEXT, label=1)
    payload.field.add(number=5, name="body", type=_BYTES, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("spb.Payload"))


Payload = _payload_class()


def read(data: bytes) -> Any:
    """The payload; it has no fields that are not in the specification."""
    found = Payload.FromString(data)
    assert found.SerializeToString()  # has all that it must
    return found


def values(payload: Any) -> dict[str, object]:
    """Of its metrics by name; None of those that are null."""
    found: dict[str, object] = {}
    for metric in payload.metrics:
        (field,) = [each.name for each, _ in metric.ListFields() if each.name.endswith("_value")] or ["is_null"]
        found[metric.name] = None if field == "is_null" else getattr(metric, field)
    return found


def command(name: str, value: bool) -> bytes:
    """An NCMD."""
    payload = Payload()
    payload.metrics.add(name=name, datatype=11, boolean_value=value)
    data: bytes = payload.SerializeToString()
    return data
