"""The notes: what became of records, in a file beside them. It begins with all that was known, and goes on from there.

A note that a power cut takes is no loss: what it said was delivered is queued again. Only what says that records were
dropped is synced, and that before their file goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from agent.mqtt.spool.counts import Counts, Wear
from agent.mqtt.spool.gaps import Gap
from agent.mqtt.spool.records import Record, pack

NOTE = 3

Range: TypeAlias = tuple[int, int]


class Delivered(msgspec.Struct, frozen=True, tag="d"):
    """Records of a kind that arrived, by index."""

    kind: str
    ranges: Sequence[Range]


class Dropped(msgspec.Struct, frozen=True, tag="x"):
    """Records of a kind that are gone, by index."""

    kind: str
    ranges: Sequence[Range]
    reason: str
    gaps: Sequence[Gap]


class Told(msgspec.Struct, frozen=True, tag="t"):
    """Gaps of which a message is stored."""

    gaps: Sequence[Gap]


class LaneState(msgspec.Struct, frozen=True):
    """All of a kind up to `next_index`."""

    next_index: int
    counts: Counts
    done: Sequence[Range]


class Checkpoint(msgspec.Struct, frozen=True, tag="c"):
    """All that was known. `clock_ms` was the spool's age at `mono_ms` of that boot."""

    lanes: dict[str, LaneState]
    gaps: Sequence[Gap]
    wear: Wear
    position: int
    boot: str
    mono_ms: int
    clock_ms: int


Note: TypeAlias = Delivered | Dropped | Told | Checkpoint

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


def pack_note(note: Note) -> bytes:
    """Its bytes in the file."""
    return pack(Record(NOTE, 0, 0, "", "", 0, 0, _encoder.encode(note)))


def unpack_note(record: Record) -> Note:
    """The note in a record. Raises msgspec.MsgspecError."""
    return _decoder.decode(record.body)
