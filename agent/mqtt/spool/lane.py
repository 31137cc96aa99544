"""One kind's part of the spool: its segments, what is done of them, and what is not yet on disk.

Of what waits on disk only the segments are known, and which records are done as ranges; bodies stay there until
somebody takes them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.mqtt.spool.counts import Counts
from agent.mqtt.spool.gaps import ANY, Gap
from agent.mqtt.spool.policy import Policy
from agent.mqtt.spool.ranges import Ranges
from agent.mqtt.spool.records import ENTRY, Damage, Reader, Record

PAGE_BYTES = 4096
# Between two places of a segment that reading can begin at.
_MARK_BYTES = 64 << 10
# Of a segment, known without reading it.
_STREAMS = 64
# Read ahead of who takes it.
_AHEAD_BYTES = 256 << 10


class Entry(NamedTuple):
    """One message that waits. `made_ms` is the spool's age when it was appended (`Spool.age_s`)."""

    position: int
    kind: str
    stream: str
    session: str
    seq: int
    made_ms: int
    body: bytes
    ordinal: int


class Mark(NamedTuple):
    """A record begins at `offset`, and all positions before it are smaller."""

    position: int
    ordinal: int
    offset: int


class Segment:
    """A file of records `first` to `next`, by index; `nbytes` of it are durable, `live` records are not done."""

    def __init__(self, number: int, path: Path, first: int) -> None:
        self.number, self.path = number, path
        self.first = self.next = first
        self.last_position = -1
        self.nbytes = self.live = 0
        self.newest_ms = 0
        self.marks: list[Mark] = []
        # What it has of each (stream, session): first, last, how many; None where they are too many to know by heart.
        self.streams: dict[tuple[str, str], tuple[int, int, int]] | None = {}
        # Of who writes; -1 where nobody does. Until its folder is synced it may be gone after a power cut.
        self.file = -1
        self.is_named = False

    @property
    def disk_bytes(self) -> int:
        """In whole pages."""
        return -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES

    def note(self, record: Record, offset: int) -> None:
        """It has this record at that offset."""
        if not self.marks or offset - self.marks[-1].offset >= _MARK_BYTES:
            self.marks.append(Mark(record.position, record.ordinal, offset))
        self.next, self.last_position = record.ordinal + 1, record.position
        self.newest_ms = max(self.newest_ms, record.made_ms)
        if record.what == ENTRY and self.streams is not None:
            name, seq = (record.stream, record.session), record.seq
            first, _, count = self.streams.get(name, (seq, seq, 0))
            self.streams[name] = (first, seq, count + 1)
            if len(self.streams) > _STREAMS:
                self.streams = None

    def mark_before(self, position: int) -> Mark:
        """Where to begin to read for what comes after that position."""
        at = bisect_right(self.marks, position, key=lambda mark: mark.position) - 1
        return self.marks[max(at, 0)] if self.marks else Mark(0, self.first, 0)


class Pending(NamedTuple):
    """A record that is not yet on disk, and its bytes there."""

    record: Record
    data: bytes


class Lane:
    """What waits of one kind."""

    def __init__(self, kind: str, policy: Policy, segment_bytes: int, folder: Path) -> None:
        self.kind, self.policy, self.segment_bytes, self.folder = kind, policy, segment_bytes, folder
        self.counts = Counts()
        self.done = Ranges()
        self.segments: list[Segment] = []
        # The last segment while it may grow.
        self.active: Segment | None = None
        self.next_index = 0
        self.next_number = 1
        # Of these the first `in_flight` are being written.
        self.pending: list[Pending] = []
        self.pending_bytes = 0
        self.in_flight = 0
        # Refused since the last record, by (stream, reason): goes to disk with the next one that is not.
        self.refused: dict[tuple[str, str], Gap] = {}
        # Segments of which nothing waits any more.
        self.finished: list[Segment] = []
        self.sealed_bytes = 0
        # Damage that was met while reading: ranges of records.
        self.damaged: list[tuple[int, int]] = []

    @property
    def used_bytes(self) -> int:
        """On disk, and on the way there."""
        return self.sealed_bytes + (self.active.disk_bytes if self.active else 0) + self.pending_bytes

    def add(self, record: Record, data: bytes) -> None:
        """A record is on its way."""
        self.pending.append(Pending(record, data))
        self.pending_bytes += len(data)
        self.next_index = record.ordinal + 1
        if record.what != ENTRY:
            self.done.add(record.ordinal, record.ordinal + 1)

    def begin(self) -> Segment:
        """The segment that what is pending goes to; it has room for the first of it."""
        if self.active and self.active.nbytes and self.active.nbytes + len(self.pending[0].data) > self.segment_bytes:
            self.seal()
        if self.active is None:
            path = self.folder / f"{self.next_number:012d}.log"
            self.active = Segment(self.next_number, path, self.pending[0].record.ordinal)
            self.segments.append(self.active)
            self.next_number += 1
        return self.active

    def written(self) -> int:
        """What was in flight is durable; bytes of bodies in it."""
        segment = self.active
        assert segment is not None  # noqa: S101  what is in flight has one
        bodies = 0
        for record, data in self.pending[: self.in_flight]:
            segment.note(record, segment.nbytes)
            segment.nbytes += len(data)
            self.pending_bytes -= len(data)
            if record.what == ENTRY:
                bodies += len(record.body)
                segment.live += record.ordinal not in self.done
        del self.pending[: self.in_flight]
        self.in_flight = 0
        if segment.nbytes >= self.segment_bytes:
            self.seal()
        return bodies

    def withdraw(self) -> list[Pending]:
        """What was in flight did not get there, and is forgotten."""
        gone = self.pending[: self.in_flight]
        del self.pending[: self.in_flight]
        self.pending_bytes -= sum(len(each.data) for each in gone)
        self.in_flight = 0
        return gone

    def seal(self) -> None:
        """The active segment grows no more."""
        if self.active is None or self.in_flight:
            return
        segment, self.active = self.active, None
        if segment.file >= 0:
            os.close(segment.file)
            segment.file = -1
        self.sealed_bytes += segment.disk_bytes
        if not segment.live:
            self._finish(segment)

    def restore(self, segment: Segment) -> None:
        """A segment that was found on disk; it grows no more."""
        self.segments.append(segment)
        self.sealed_bytes += segment.disk_bytes
        self.next_number = max(self.next_number, segment.number + 1)
        self.next_index = max(self.next_index, segment.next)

    def finish_empty(self) -> None:
        """Let go of what was restored and has nothing that waits."""
        for segment in [each for each in self.segments if not each.live and each is not self.active]:
            self._finish(segment)

    def settle(self, start: int, end: int) -> list[tuple[int, int]]:
        """Records from `start` to `end` wait no more; the ranges of those that did."""
        ranges = [(start, end)] if end - start == 1 and start not in self.done else self.done.missing(start, end)
        for low, high in ranges:
            at = max(bisect_right(self.segments, low, key=lambda segment: segment.first) - 1, 0)
            while at < len(self.segments) and self.segments[at].first < high:
                segment = self.segments[at]
                segment.live -= max(min(high, segment.next) - max(low, segment.first), 0)
                if segment.live or segment is self.active:
                    at += 1
                else:
                    self._finish(segment)
            self.done.add(low, high)
        return ranges

    def oldest(self) -> Segment | None:
        """The sealed segment that waits longest."""
        return self.segments[0] if self.segments and self.segments[0] is not self.active else None

    def gaps_of(self, segment: Segment, reason: str) -> list[Gap]:
        """What would be missing if what waits in the segment went."""
        gaps = segment.streams
        if gaps is None or sum(count for _, _, count in gaps.values()) != segment.live:
            gaps = {}
            for record in _records(segment):
                if record.what == ENTRY and record.ordinal not in self.done:
                    name, seq = (record.stream, record.session), record.seq
                    first, _, count = gaps.get(name, (seq, seq, 0))
                    gaps[name] = (first, seq, count + 1)
        return [Gap(self.kind, *names, first, last, count, reason) for names, (first, last, count) in gaps.items()]

    def _finish(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self.sealed_bytes -= segment.disk_bytes
        self.finished.append(segment)


def _records(segment: Segment) -> Iterator[Record]:
    """All of a segment that can be read."""
    try:
        file = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for _, found in Reader(file, 0, segment.nbytes):
            if isinstance(found, Record):
                yield found
    finally:
        os.close(file)


class Ahead:
    """Reads what waits of a lane in order, a little ahead of who takes it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._base = -1
        self._entries: deque[Entry] = deque()
        self._segment: Segment | None = None
        self._number = 0
        self._reader: Reader | None = None
        self._file = -1
        self._next_index = 0
        # Whether it stopped because it had enough, and not because there was no more.
        self.more = False

    def entries(self, after: int, before: int, most: int) -> Sequence[Entry]:
        """At most so many that wait, of positions between."""
        if after < self._base:
            self._rewind()
        self._base = after
        done = self._lane.done
        self._entries = deque(each for each in self._entries if each.position > after and each.ordinal not in done)
        nbytes = sum(len(each.body) for each in self._entries)
        self.more = True
        while len(self._entries) < most and nbytes < _AHEAD_BYTES:
            if self._entries and self._entries[-1].position >= before:
                self.more = False
                break
            entry = self._next()
            if entry is None:
                self.more = False
                break
            nbytes += len(entry.body)
            self._entries.append(entry)
        return [each for each in self._entries if each.position < before][:most]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._reader, self._segment = -1, None, None

    def _rewind(self) -> None:
        self.close()
        self._entries.clear()
        self._number = 0

    def _next(self) -> Entry | None:
        while self._segment is not None or self._open():
            assert self._segment is not None  # noqa: S101  `_open` has just said so
            assert self._reader is not None  # noqa: S101
            self._reader.end = self._segment.nbytes
            while (found := self._reader.next()) is not None:
                if isinstance(found, Damage):
                    continue
                if found.ordinal != self._next_index:
                    self._missed(found.ordinal)
                self._next_index = found.ordinal + 1
                if found.what == ENTRY and found.position > self._base and found.ordinal not in self._lane.done:
                    return Entry(
                        found.position,
                        self._lane.kind,
                        found.stream,
                        found.session,
                        found.seq,
                        found.made_ms,
                        found.body,
                        found.ordinal,
                    )
            if self._segment is self._lane.active:
                return None
            self._missed(self._segment.next)
            self.close()
        return None

    def _missed(self, index: int) -> None:
        """Records before that one that cannot be read."""
        for low, high in self._lane.done.missing(self._next_index, index):
            self._lane.damaged.append((low, high))

    def _open(self) -> bool:
        """The next segment with something to read."""
        segments = self._lane.segments
        at = bisect_right(segments, self._number, key=lambda segment: segment.number)
        for segment in segments[at:]:
            if not segment.live or segment.last_position <= self._base:
                continue
            mark = segment.mark_before(self._base)
            self._number, self._next_index = segment.number, mark.ordinal
            try:
                self._file = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._missed(segment.next)
                continue
            self._segment, self._reader = segment, Reader(self._file, mark.offset, segment.nbytes)
            return True
        return False


def damage_gap(kind: str, low: int, high: int) -> Gap:
    """Records of which nobody knows whose they were."""
    return Gap(kind, ANY, ANY, low, high - 1, high - low, "damaged")
