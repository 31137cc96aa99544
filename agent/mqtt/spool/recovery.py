"""What a folder has when it is opened: segments are read once, notes are followed, what is torn is cut off."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agent.mqtt.spool.counts import Counts, Wear
from agent.mqtt.spool.gaps import Gap, Ledger, join
from agent.mqtt.spool.lane import Lane, Segment, damage_gap
from agent.mqtt.spool.notes import Checkpoint, Delivered, Dropped, LaneState, Note, Told, unpack_note
from agent.mqtt.spool.records import ENTRY, Damage, Reader, Record

DAMAGED = "damaged"


class Lost(msgspec.Struct, frozen=True):
    """The body of a LOST record: numbers up to `last` were refused, `count` of them."""

    last: int
    count: int
    reason: str


@dataclass
class Found:
    """What the notes said."""

    checkpoint: Checkpoint | None = None
    notes: list[Note] = field(default_factory=list)
    # Where the next one goes.
    end: int = 0


def read_notes(path: Path) -> Found:
    """All notes that can be read; what is behind damage is not trusted: it only repeats messages."""
    found = Found()
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return found
    try:
        for end, record in Reader(file, 0, os.fstat(file).st_size):
            if isinstance(record, Damage):
                break
            note = unpack_note(record)
            found.end = end
            if isinstance(note, Checkpoint):
                found.checkpoint = note
            else:
                found.notes.append(note)
    except msgspec.MsgspecError:
        pass
    finally:
        os.close(file)
    return found


class Recovery:
    """Brings lanes and the ledger to where they were."""

    def __init__(self, ledger: Ledger, gap_stream: str) -> None:
        self.ledger, self.gap_stream = ledger, gap_stream
        self.position = 0
        self.clock_ms = 0
        self.wear = Wear()
        # Messages that tell of gaps and wait.
        self.told: set[int] = set()

    def run(self, lanes: dict[str, Lane], found: Found) -> None:
        """Read it all. Raises OSError where the storage cannot be read."""
        checkpoint = found.checkpoint
        if checkpoint is not None:
            self.position, self.clock_ms, self.wear = checkpoint.position, checkpoint.clock_ms, checkpoint.wear
            for gap in checkpoint.gaps:
                self.ledger.add(gap)
        for lane in lanes.values():
            state = checkpoint.lanes.get(lane.kind) if checkpoint else None
            self._lane(lane, state, found.notes)
        for note in found.notes:
            if isinstance(note, Dropped):
                for gap in note.gaps:
                    self.ledger.add(gap)
        for note in found.notes:
            if isinstance(note, Told):
                for gap in note.gaps:
                    self.ledger.told(gap)

    def _lane(self, lane: Lane, state: LaneState | None, notes: list[Note]) -> None:
        lane.counts = msgspec.structs.replace(state.counts, queued=0) if state else Counts()
        lane.counts.dropped = dict(lane.counts.dropped)
        for low, high in state.done if state else ():
            lane.done.add(low, high)
        lane.next_index = state.next_index if state else 0
        for note in notes:
            if isinstance(note, Delivered | Dropped) and note.kind == lane.kind:
                for low, high in note.ranges:
                    count = lane.done.add(low, high)
                    lane.next_index = max(lane.next_index, high)
                    if isinstance(note, Delivered):
                        lane.counts.delivered += count
                    else:
                        lane.counts.drop(note.reason, count)
        counted, more = self._segments(lane, state)
        lane.counts.produced += lane.next_index - max(counted, 0) + more
        for segment in lane.segments:
            segment.live = sum(high - low for low, high in lane.done.missing(segment.first, segment.next))
            lane.counts.queued += segment.live
        lane.finish_empty()

    def _segments(self, lane: Lane, state: LaneState | None) -> tuple[int, int]:
        """Read the files: the index that counting begins at, and what LOST records add to one for each."""
        scan = _Scan(lane, state)
        paths = sorted(lane.folder.glob("*.log"), key=lambda path: int(path.stem))
        for path in paths:
            segment = self._segment(scan, path, last=path is paths[-1])
            if segment is None:
                path.unlink()
            else:
                lane.restore(segment)
        scan.hole(lane.next_index)
        for gap in scan.gaps():
            self.ledger.add(gap)
        return scan.counted, scan.more

    def _segment(self, scan: _Scan, path: Path, *, last: bool) -> Segment | None:
        """What a file has; None where it has nothing. What is torn at the end of the last one is cut off."""
        segment = Segment(int(path.stem), path, -1)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            reader, start = Reader(file, 0, os.fstat(file).st_size), 0
            for end, record in reader:
                if isinstance(record, Record):
                    self._record(scan, segment, record, start)
                    segment.nbytes = end
                start = end
            if last:
                # It may be of a process that was killed before it was durable.
                os.ftruncate(file, segment.nbytes)
                os.fdatasync(file)
        finally:
            os.close(file)
        return None if segment.first < 0 else segment

    def _record(self, scan: _Scan, segment: Segment, record: Record, offset: int) -> None:
        if segment.first < 0:
            segment.first = record.ordinal
        segment.note(record, offset)
        self.position = max(self.position, record.position + 1)
        self.clock_ms = max(self.clock_ms, record.made_ms)
        lost = scan.record(record)
        if lost is not None:
            self.ledger.add(lost)
        elif record.stream == self.gap_stream and record.ordinal not in scan.lane.done:
            self.told.add(record.position)


class _Scan:
    """Follows the records of a lane, from file to file, and notices what is missing."""

    def __init__(self, lane: Lane, state: LaneState | None) -> None:
        self.lane = lane
        # From here on records count as produced; before, the notes have counted them.
        self.counted = state.next_index if state else -1
        self.more = 0
        self._upto = 0
        self._holes = self._missing = 0
        # Of each stream and session: the last number, and how many holes there were before it.
        self._last: dict[tuple[str, str], tuple[int, int]] = {}
        self._known: dict[tuple[str, str], Gap] = {}
        self._range = (0, 0)

    def hole(self, index: int) -> None:
        """The next record has that index."""
        for low, high in self.lane.done.missing(self._upto, index):
            self.lane.done.add(low, high)
            self.lane.counts.drop(DAMAGED, high - low)
            self._range = (self._range[0] if self._missing else low, high)
            self._holes, self._missing = self._holes + 1, self._missing + high - low
        self._upto = max(self._upto, index)

    def record(self, record: Record) -> Gap | None:
        """It comes next; what it says is lost, where it is not yet counted."""
        if self.counted < 0:
            # Without notes nothing is known of what was before: it is as if it had not been.
            self.counted = self._upto = record.ordinal
            self.lane.done.add(0, record.ordinal)
        self.hole(record.ordinal)
        self._upto = max(self._upto, record.ordinal + 1)
        self.lane.next_index = max(self.lane.next_index, record.ordinal + 1)
        last, holes = self._last.get(names := (record.stream, record.session), (record.seq, self._holes))
        if holes < self._holes and record.seq > last + 1:
            gap = Gap(self.lane.kind, *names, last + 1, record.seq - 1, record.seq - 1 - last, DAMAGED)
            self._known[names] = join(self._known[names], gap) if names in self._known else gap
        if record.what == ENTRY:
            self._last[names] = (max(last, record.seq), self._holes)
            return None
        lost = msgspec.msgpack.decode(record.body, type=Lost)
        self._last[names] = (max(last, lost.last), self._holes)
        self.lane.done.add(record.ordinal, record.ordinal + 1)
        if record.ordinal < self.counted:
            return None
        self.more += lost.count - 1
        self.lane.counts.drop(lost.reason, lost.count)
        return Gap(self.lane.kind, *names, record.seq, lost.last, lost.count, lost.reason)

    def gaps(self) -> list[Gap]:
        """What damage has taken: of whom, as far as the numbers behind it say so."""
        known = list(self._known.values())
        unknown = self._missing - sum(gap.count for gap in known)
        if unknown > 0:
            gap = damage_gap(self.lane.kind, *self._range)
            known.append(msgspec.structs.replace(gap, count=unknown))
        return known
