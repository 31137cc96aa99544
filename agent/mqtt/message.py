"""One message before it has a place among others, and the bytes in which it is kept until it is sent. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from agent.mqtt.moment import Moment


class Kind(str, enum.Enum):
    """The class of a message, as it stands in its topic."""

    STATE = "state"
    MEASURE = "m"
    EVENT = "e"
    ALARM = "a"
    COMMAND = "cmd"
    RESULT = "res"
    META = "meta"


class Message(msgspec.Struct, frozen=True):
    """What is said: `body` is data (mappings, lists, text, numbers, bytes) of the schema named, e.g. "result/1".

    `component` and `name` may be any text: `topics.escape` makes levels of them. An answer to a command has its
    `correlation`, and goes to its `response_topic` where that says one.
    """

    component: str
    kind: Kind
    name: str
    body: Mapping[str, object]
    moment: Moment
    schema: str
    retain: bool = False
    expiry_s: int | None = None
    traceparent: str | None = None
    response_topic: str | None = None
    correlation: bytes | None = None


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A Message in the log. Fields are only ever added at the end: a newer agent reads what an older one kept."""

    component: bytes
    kind: Kind
    name: bytes
    body: dict[str, object]
    moment: Moment
    schema: str
    retain: bool
    expiry_s: int | None
    traceparent: str | None
    response_topic: str | None
    correlation: bytes | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Kept)


def pack(message: Message) -> bytes:
    """The bytes that the log keeps. Text of a body that is not UTF-8 loses only what is not; integers are 64 bits."""
    kept = _Kept(
        message.component.encode("utf-8", "surrogatepass"),
        message.kind,
        message.name.encode("utf-8", "surrogatepass"),
        dict(message.body),
        message.moment,
        message.schema,
        message.retain,
        message.expiry_s,
        message.traceparent,
        message.response_topic,
        message.correlation,
    )
    try:
        return _encoder.encode(kept)
    except UnicodeEncodeError:
        return _encoder.encode(msgspec.structs.replace(kept, body=_clean(kept.body)))


def unpack(data: bytes) -> Message:
    """The message of these bytes; ValueError where they are none."""
    kept = _decoder.decode(data)
    return Message(
        kept.component.decode("utf-8", "surrogatepass"),
        kept.kind,
        kept.name.decode("utf-8", "surrogatepass"),
        *(getattr(kept, each) for each in _Kept.__struct_fields__[3:]),
    )


def _clean(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_clean(key): _clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(each) for each in value]
    return value
