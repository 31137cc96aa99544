"""text/event-stream: records as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import Sequence

from agent.http.framing.encoder import Encoder
from agent.http.framing.records import Lost, Overflow, Record, to_json

MEDIA_TYPE = "text/event-stream"


class EventEncoder(Encoder):
    """Records as events of their type; a comment is a heartbeat.

    The id of an event is `epoch-seq`, which a client gives back as Last-Event-ID when it reconnects, after `retry_ms`.
    JSON has no line breaks, so `data` is one line.
    """

    media_type = MEDIA_TYPE
    heartbeat = b":\n\n"

    def __init__(self, epoch: str, retry_ms: int) -> None:
        self._epoch = epoch
        self.opening = b"retry: %d\n\n" % retry_ms

    def encode(self, record: Record, tensors: Sequence[memoryview] = ()) -> bytes:
        self.check(binary=bool(tensors))
        kind = record.__struct_config__.tag
        return f"id: {self._epoch}-{_last(record)}\nevent: {kind}\ndata: ".encode() + to_json(record) + b"\n\n"


def _last(record: Record) -> int:
    """Up to where a client that has this record knows of everything."""
    if isinstance(record, Lost):
        return record.last
    seq: int = record.since if isinstance(record, Overflow) else record.seq  # type: ignore[attr-defined]
    return seq
