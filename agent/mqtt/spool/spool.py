"""The spool: what is produced waits here, on disk, until it is delivered or dropped, and every loss is explained.

Theory of operation. Each kind has a lane: segments that records are appended to. `append` gives a record its number and
its position and keeps it in memory; `take` makes one piece of work of all that is due, whoever runs it (`work.run`, on
any thread), and `finish` looks at what came of it: what is durable is acknowledged. One piece of work is under way at a
time; meanwhile others are appended. `sync` does all three at once.

    append -> pending -> take -> run -> finish -> queued -> delivered | dropped, by reason
                 |                        |
                 +------ refused ---------+--> a gap: told in a message of its own, as soon as somebody takes messages

What is done is noted beside the segments (`notes`), in memory as ranges. A segment of which nothing waits goes.

Nothing here knows what the messages are, and nothing looks at a clock: `now` are seconds of CLOCK_BOOTTIME or
CLOCK_MONOTONIC. One owner calls it.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.mqtt.spool.counts import Counts, Wear
from agent.mqtt.spool.gaps import ANY, Gap, Ledger, join
from agent.mqtt.spool.lane import Ahead, Entry, Lane, damage_gap
from agent.mqtt.spool.notes import Checkpoint, Delivered, Dropped, LaneState, Note, Told, pack_note
from agent.mqtt.spool.policy import Drop, Limits, Policy, keep_every
from agent.mqtt.spool.records import ENTRY, HEAD_BYTES, LOST, Record, pack
from agent.mqtt.spool.recovery import DAMAGED, Lost, Recovery, read_notes
from agent.mqtt.spool.work import FULL, Work, Write
from targets.errors import TightfitError


class SpoolError(TightfitError):
    """The folder cannot be used as a spool."""


@dataclass(frozen=True)
class Gaps:
    """How gaps are told: messages of that kind and stream, with a body made of each."""

    kind: str
    stream: str
    body: Callable[[Gap, float], bytes]


class Figures(msgspec.Struct, frozen=True):
    """What the spool has and had; `by_kind` are copies."""

    by_kind: Mapping[str, Counts]
    bytes_by_kind: Mapping[str, int]
    wear: Wear
    amplification: float
    gaps_untold: int
    segments: int
    pending: int
    errors: int
    last_error: str


class Spool:
    """A folder of messages; see `open`."""

    def __init__(self, folder: Path, session: str, policies: Mapping[str, Policy], limits: Limits, gaps: Gaps) -> None:
        self.folder, self.session, self.limits = folder, session, limits
        self._gaps = gaps
        self._lanes = {
            kind: Lane(kind, policy, limits.segment_of(policy), folder / kind) for kind, policy in policies.items()
        }
        self._keeping = [lane for lane in self._lanes.values() if lane.policy.drop is Drop.NEWEST]
        self._ledger = Ledger(limits.gaps)
        self._wear = Wear()
        self._seqs: dict[str, int] = {}
        self._position = self._boundary = 0
        # Handed out and not settled; of these the bodies are not kept.
        self._outside: dict[int, Entry] = {}
        self._live = [Ahead(lane) for lane in self._lanes.values()]
        self._replay = [Ahead(lane) for lane in self._lanes.values()]
        # Of the group that waits: when it began, and whether it may not wait.
        self._since: float | None = None
        self._urgent = False
        self._working: Work | None = None
        # Messages that tell of gaps: those not yet durable, and all that wait.
        self._telling: dict[int, Gap] = {}
        self._told: set[int] = set()
        self._tell_at = 0.0
        self._lost: list[int] = []
        # Notes that are not yet written, and when the first of them came; what was delivered is put together.
        self._notes: list[Note] = []
        self._delivered: dict[str, list[tuple[int, int]]] = {}
        self._notes_since: float | None = None
        self._must_sync = False
        self._notes_at = self._notes_sent = 0
        self._notes_file = self._lock = -1
        self._unlink: list[Path] = []
        self._clock_ms, self._opened, self._boot = 0, 0.0, ""
        self._errors, self._last_error = 0, ""
        # The last time that somebody said, and when to try again what failed for another reason than room.
        self._now = self._retry_at = 0.0

    @classmethod
    def open(
        cls,
        folder: Path,
        session: str,
        policies: Mapping[str, Policy],
        gaps: Gaps,
        now: float,
        boot: str,
        limits: Limits | None = None,
    ) -> Spool:
        """Open a folder, made where it is not there. What was acknowledged is there; a torn tail is cut off.

        `session` is new with each start of the producer, and numbers of streams begin at 0 in it. `boot` says which
        boot `now` is of. Raises SpoolError where somebody else has it open, or where the storage cannot be used.
        """
        spool = cls(folder, session, policies, limits or Limits(), gaps)
        if gaps.kind not in policies:
            raise SpoolError(f"gaps are to be told as kind {gaps.kind!r}, but there are only {', '.join(policies)}")
        try:
            spool._open(now, boot)
        except OSError as error:
            spool._close_files()
            what = f"the spool in {folder} cannot be opened: {error.strerror or error}"
            raise SpoolError(what, "is the folder on a file system that this user may write to?") from None
        return spool

    def append(self, kind: str, stream: str, body: bytes, now: float, *, urgent: bool = False) -> int | None:
        """Take a message; its position, or None where it was refused, which is counted and will be told.

        It is durable when `sync` has returned a position not below this one, unless `lost` names it.
        """
        self._now = now
        lane = self._lanes[kind]
        seq = self._number(stream)
        reason = self._refusal(lane, stream, len(body), seq)
        if reason is not None:
            self._refuse(lane, stream if stream in self._seqs else ANY, seq, reason)
            return None
        return self._append(lane, stream, seq, body, now, urgent=urgent)

    def due(self, now: float) -> bool:
        """Whether it is time for `take`."""
        return (at := self.next_sync_at()) is not None and at <= now

    def next_sync_at(self) -> float | None:
        """When to call `take`; None: not before something happens. In the past while a group is full or urgent."""
        times = []
        if self._since is not None:
            full = self._urgent or sum(len(lane.pending) for lane in self._lanes.values()) >= self.limits.group_records
            times.append(self._since if full else self._since + self.limits.group_s)
        if self._notes_since is not None:
            times.append(self._notes_since + self.limits.notes_s)
        return max(min(times), self._retry_at) if times else None

    def take(self, now: float) -> Work | None:
        """What is to be done now, for whoever can wait for it; None where there is nothing, or it is under way."""
        self._now = now
        if self._working is not None:
            return None
        writes = [_write(lane) for lane in self._lanes.values() if lane.pending]
        for lane in self._lanes.values():
            self._unlink += [segment.path for segment in lane.finished]
            lane.finished.clear()
        notes = b"".join(map(pack_note, self._taken_notes()))
        if not (writes or notes or self._unlink):
            self._since = self._notes_since = None
            return None
        work = Work(
            self.folder,
            self._notes_file,
            self._notes_at,
            notes,
            self._must_sync or bool(self._unlink),
            self._unlink,
            writes,
            self.limits.free_floor_bytes,
        )
        if self._notes_at + len(notes) > self.limits.notes_bytes:
            if self._notes_at > 4 * self.limits.notes_bytes:
                # There was no room for new ones for long: they are all in what is tried now.
                work.notes = b""
            work.checkpoint = self._checkpoint(now)
            work.reserve_bytes = self._reserve_bytes
        self._unlink, self._since, self._urgent = [], None, False
        self._working = work
        return work

    def finish(self, work: Work, now: float) -> int:
        """A piece of work has run; all up to the position that this returns is durable, or named by `lost`."""
        self._now, self._working = now, None
        self._wear.bytes_written += work.bytes_written
        self._wear.syncs += work.syncs
        self._finish_notes(work)
        for write in work.writes:
            if write.error is None:
                self._written(write)
        failed = [write for write in work.writes if write.error is not None]
        counts = [write.lane.in_flight for write in failed]
        for write in failed:
            write.lane.in_flight = 0
        for write, count in zip(failed, counts, strict=True):
            self._unwritten(write, count)
        if self._since is None and any(lane.pending for lane in self._lanes.values()):
            self._since = now - self.limits.group_s
        return self.durable()

    def sync(self, now: float) -> int:
        """Do all that is to be done, here and now: see `finish`."""
        # Where the disk is full each try makes room for the next, as long as there is something to drop.
        for _ in range(sum(len(lane.segments) + len(lane.pending) for lane in self._lanes.values()) + 8):
            work = self.take(now)
            if work is None:
                break
            work.run()
            self.finish(work, now)
            if self._retry_at > now:
                break
        return self.durable()

    def durable(self) -> int:
        """The last position up to which nothing is pending."""
        firsts = [lane.pending[0].record.position for lane in self._lanes.values() if lane.pending]
        return min(firsts, default=self._position) - 1

    def lost(self) -> Sequence[int]:
        """Positions that could not be written, since the last call: they are counted, and will be told."""
        lost, self._lost = self._lost, []
        return lost

    def connected(self) -> None:
        """Somebody takes messages from now on: what waits is history, what comes is live. All may be taken again."""
        self._boundary = self._position
        self._outside.clear()

    def live(self, most: int, now: float, after: int = -1) -> Sequence[Entry]:
        """At most so many that wait and came since `connected`, in order, behind that position; all durable."""
        self._tell(now)
        return self._entries(self._live, most, max(after, self._boundary - 1), self.durable() + 1, now)

    def replay(self, most: int, now: float, after: int = -1) -> Sequence[Entry]:
        """The same of what waited before."""
        return self._entries(self._replay, most, after, min(self._boundary, self.durable() + 1), now)

    def delivered(self, position: int, now: float) -> bool:
        """It arrived. In any order; False where it waits no more, because it was dropped meanwhile or said before."""
        entry = self._outside.pop(position, None)
        if entry is None:
            return False
        lane = self._lanes[entry.kind]
        if not lane.settle(entry.ordinal, entry.ordinal + 1):
            return False
        lane.counts.delivered += 1
        lane.counts.queued -= 1
        self._told.discard(position)
        self._delivered_note(lane.kind, entry.ordinal, now)
        return True

    def rejected(self, position: int, reason: str, now: float) -> bool:
        """It will never arrive: dropped for that reason."""
        entry = self._outside.pop(position, None)
        return entry is not None and self._drop_entry(entry, reason, now)

    def expire(self, now: float) -> None:
        """Drop what is too old, segment by segment; of a segment in part when it is taken."""
        for lane in self._lanes.values():
            if not lane.policy.max_age_s:
                continue
            limit = self._age_ms(now) - int(lane.policy.max_age_s * 1000)
            if lane.active is not None and lane.active.marks and lane.active.newest_ms < limit:
                lane.seal()
            while (segment := lane.oldest()) is not None and segment.newest_ms < limit:
                self._drop_segment(lane, "age", now)

    def age_s(self, entry: Entry, now: float) -> float:
        """How long it has waited, as long as boards were on."""
        return max(self._age_ms(now) - entry.made_ms, 0) / 1000

    @property
    def figures(self) -> Figures:
        """What there is and was."""
        lanes = self._lanes.values()
        return Figures(
            {lane.kind: _copy(lane.counts) for lane in lanes},
            {lane.kind: lane.used_bytes for lane in lanes},
            msgspec.structs.replace(self._wear),
            self._wear.amplification,
            len(self._ledger),
            sum(len(lane.segments) for lane in lanes),
            sum(len(lane.pending) for lane in lanes),
            self._errors,
            self._last_error,
        )

    @property
    def gaps(self) -> Sequence[Gap]:
        """What is dropped and not yet told."""
        return self._ledger.all()

    def close(self, now: float) -> None:
        """Make everything durable and let the folder go. Nothing may be under way."""
        self.sync(now)
        self._finish_notes(self._rewrite(now))
        self._close_files()

    def abandon(self) -> None:
        """Let the folder go as if the process died."""
        self._close_files()

    # What comes in.

    def _number(self, stream: str) -> int:
        """The next number of the stream."""
        if stream not in self._seqs and len(self._seqs) >= self.limits.streams:
            stream = ANY
        seq = self._seqs.get(stream, 0)
        self._seqs[stream] = seq + 1
        return seq

    def _refusal(self, lane: Lane, stream: str, nbytes: int, seq: int) -> str | None:
        """Why a message cannot be taken; room is made for one that can."""
        if nbytes > self.limits.record_bytes:
            return "too_large"
        if stream not in self._seqs:
            return "streams"
        if seq % keep_every(lane.policy, lane.used_bytes):
            return "decimated"
        nbytes += HEAD_BYTES + len(stream) + len(self.session)
        if sum(each.pending_bytes for each in self._lanes.values()) + nbytes > self.limits.pending_bytes:
            return "disk"
        return None if self._make_room(lane, nbytes) else "full"

    def _make_room(self, lane: Lane, nbytes: int) -> bool:
        """Whether there is room for so much more, after what had to go went."""
        files = len(lane.segments) >= self.limits.segments
        if lane.policy.drop is Drop.NEWEST:
            if lane.used_bytes + nbytes <= lane.policy.max_bytes or files:
                return not files
            while self._is_over(lane, nbytes):
                if not self._sacrifice("room"):
                    return False
            return True
        while (
            files
            or lane.used_bytes + nbytes > lane.policy.max_bytes
            or (self._is_lent() and self._is_over(lane, nbytes))
        ):
            if not self._drop_segment(lane, "oldest", self._now):
                return False
            files = len(lane.segments) >= self.limits.segments
        return True

    def _is_lent(self) -> bool:
        """Whether a kind has more than its own room; while none has, all together cannot have too much."""
        return any(lane.used_bytes > lane.policy.max_bytes for lane in self._keeping)

    def _is_over(self, lane: Lane, nbytes: int) -> bool:
        """Whether with so much more all kinds together have more than all may; the room of those that do not drop what
        they have is kept for them."""
        used = 0
        for each in self._lanes.values():
            has = each.used_bytes + (nbytes if each is lane else 0)
            used += max(has, each.policy.max_bytes) if each.policy.drop is Drop.NEWEST else has
        return used > sum(each.policy.max_bytes for each in self._lanes.values())

    def _sacrifice(self, reason: str) -> bool:
        """Drop the oldest segment of the kind that drops what it has, and has most; False where there is none."""
        lanes = [lane for lane in self._lanes.values() if lane.policy.drop is not Drop.NEWEST]
        for lane in sorted(lanes, key=lambda lane: -lane.used_bytes):
            if lane.oldest() is None:
                lane.seal()
            if self._drop_segment(lane, reason, self._now):
                return True
        return False

    def _append(self, lane: Lane, stream: str, seq: int, body: bytes, now: float, *, urgent: bool) -> int:
        self._flush_refused(lane, now)
        position = self._add(lane, ENTRY, stream, seq, body, now)
        lane.counts.produced += 1
        lane.counts.queued += 1
        self._since = now if self._since is None else self._since
        self._urgent |= urgent
        return position

    def _add(self, lane: Lane, what: int, stream: str, seq: int, body: bytes, now: float) -> int:
        record = Record(what, self._position, lane.next_index, self.session, stream, seq, self._age_ms(now), body)
        self._position += 1
        lane.add(record, pack(record))
        return record.position

    def _refuse(self, lane: Lane, stream: str, seq: int, reason: str) -> None:
        gap = Gap(lane.kind, stream, self.session, seq, seq, 1, reason)
        lane.counts.produced += 1
        lane.counts.drop(reason, 1)
        self._ledger.add(gap)
        known = lane.refused.get((stream, reason))
        if known is not None:
            gap = msgspec.structs.replace(known, last=seq, count=known.count + 1)
        lane.refused[stream, reason] = gap

    def _flush_refused(self, lane: Lane, now: float) -> None:
        """What was refused goes to disk with what was not, which says why numbers before it are missing."""
        for (stream, reason), gap in lane.refused.items():
            body = msgspec.msgpack.encode(Lost(gap.last, gap.count, reason))
            self._add(lane, LOST, stream, gap.first, body, now)
        lane.refused.clear()

    # What goes out.

    def _entries(self, aheads: Sequence[Ahead], most: int, after: int, before: int, now: float) -> Sequence[Entry]:
        most = min(most, self.limits.outside - len(self._outside))
        if most <= 0:
            return []
        lanes = zip(aheads, self._lanes.values(), strict=True)
        parts = [self._fresh(ahead, lane, after, before, most, now) for ahead, lane in lanes]
        # Of a lane that has more than it gave nothing may be passed over, whatever others have behind it.
        upto = min(
            (part[-1].position for ahead, part in zip(aheads, parts, strict=True) if part and ahead.more),
            default=before,
        )
        entries: list[Entry] = []
        for entry in itertools.islice(heapq.merge(*parts, key=lambda entry: entry.position), most):
            if entry.position > upto:
                break
            self._outside[entry.position] = entry._replace(body=b"")
            entries.append(entry)
        return entries

    def _fresh(self, ahead: Ahead, lane: Lane, after: int, before: int, most: int, now: float) -> Sequence[Entry]:
        """What waits of a lane, without what has become too old."""
        while True:
            entries = ahead.entries(after, before, 1 if len(lane.done) >= self.limits.ranges else most)
            for low, high in lane.damaged:
                self._drop(lane, [(low, high)], DAMAGED, [damage_gap(lane.kind, low, high)], now)
            lane.damaged.clear()
            limit = self._age_ms(now) - int(lane.policy.max_age_s * 1000) if lane.policy.max_age_s else -1
            old = [entry for entry in entries if entry.made_ms < limit]
            if not old:
                return entries
            for entry in old:
                self._drop_entry(entry, "age", now)

    def _tell(self, now: float) -> None:
        """Make messages of gaps, for somebody takes messages; a few at a time, and not before the last arrived."""
        if not len(self._ledger) or now < self._tell_at or self._told or self._telling:
            return
        self._tell_at = now + self.limits.gaps_s
        lane, stream = self._lanes[self._gaps.kind], self._gaps.stream
        for gap in self._ledger.all()[: self.limits.gaps_at_once]:
            body = self._gaps.body(gap, now)
            if self._refusal(lane, stream, len(body), 0) not in {None, "streams"}:
                break
            position = self._append(lane, stream, self._number(stream), body, now, urgent=False)
            self._telling[position] = gap
            self._told.add(position)

    # What goes.

    def _drop_segment(self, lane: Lane, reason: str, now: float) -> bool:
        """Drop what waits in the oldest segment that is sealed; False where there is none."""
        segment = lane.oldest()
        if segment is None:
            return False
        ranges = lane.done.missing(segment.first, segment.next)
        self._drop(lane, ranges, reason, lane.gaps_of(segment, reason), now)
        return True

    def _drop_entry(self, entry: Entry, reason: str, now: float) -> bool:
        self._told.discard(entry.position)
        gap = Gap(entry.kind, entry.stream, entry.session, entry.seq, entry.seq, 1, reason)
        return self._drop(self._lanes[entry.kind], [(entry.ordinal, entry.ordinal + 1)], reason, [gap], now)

    def _drop(
        self, lane: Lane, ranges: Sequence[tuple[int, int]], reason: str, gaps: Sequence[Gap], now: float
    ) -> bool:
        dropped = [part for low, high in ranges for part in lane.settle(low, high)]
        count = sum(high - low for low, high in dropped)
        if not count:
            return False
        lane.counts.drop(reason, count)
        lane.counts.queued -= count
        for gap in gaps:
            self._ledger.add(gap)
        self._notes.append(Dropped(lane.kind, dropped, reason, gaps))
        self._must_sync = True
        self._notes_since = now if self._notes_since is None else self._notes_since
        return True

    # Notes.

    def _delivered_note(self, kind: str, index: int, now: float) -> None:
        ranges = self._delivered.setdefault(kind, [])
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
        self._notes_since = now if self._notes_since is None else self._notes_since

    def _taken_notes(self) -> list[Note]:
        self._notes += [Delivered(kind, ranges) for kind, ranges in self._delivered.items()]
        self._delivered = {}
        self._notes_sent = len(self._notes)
        self._notes_since = None
        return self._notes

    def _checkpoint(self, now: float) -> bytes:
        """All that is known, if what is being written is."""
        lanes = {
            lane.kind: LaneState(lane.next_index, _copy(lane.counts), list(lane.done)) for lane in self._lanes.values()
        }
        for lane in self._lanes.values():
            lane.refused.clear()
        clock = self._age_ms(now)
        note = Checkpoint(lanes, self._ledger.all(), self._wear, self._position, self._boot, int(now * 1000), clock)
        return pack_note(note)

    def _finish_notes(self, work: Work) -> None:
        if work.notes_error is not None:
            self._failed(work.notes_error)
            self._notes_since = self._now
            self._retry_at = self._now + self.limits.notes_s
            return
        del self._notes[: self._notes_sent]
        self._notes_at += len(work.notes)
        self._must_sync = bool(self._notes) and self._must_sync
        if work.new_notes_file >= 0:
            os.close(self._notes_file)
            self._notes_file, self._notes_at = work.new_notes_file, len(work.checkpoint)

    def _written(self, write: Write) -> None:
        """What was in flight is durable."""
        positions = [each.record.position for each in write.lane.pending[: write.lane.in_flight]]
        self._wear.bytes_appended += write.lane.written()
        if self._telling and write.lane.kind == self._gaps.kind:
            told = [self._telling.pop(position) for position in positions if position in self._telling]
            for gap in told:
                self._ledger.told(gap)
            if told:
                self._notes.append(Told(told))
                self._notes_since = self._now if self._notes_since is None else self._notes_since

    def _unwritten(self, write: Write, count: int) -> None:
        """What was in flight is tried again, after something made room for it or some time; or it is lost."""
        lane, error = write.lane, write.error
        assert error is not None  # noqa: S101  only those come here
        self._failed(error)
        self._since = self._now - self.limits.group_s
        if error.errno not in FULL:
            self._retry_at = self._now + self.limits.notes_s
            return
        if self._sacrifice("disk"):
            return
        lane.in_flight = count
        gone = [each.record for each in lane.withdraw()]
        entries = [record for record in gone if record.what == ENTRY]
        for record in entries:
            lane.done.add(record.ordinal, record.ordinal + 1)
            self._lost.append(record.position)
            self._telling.pop(record.position, None)
            self._told.discard(record.position)
        lane.counts.drop("disk", len(entries))
        lane.counts.queued -= len(entries)
        gaps = _gaps_of(lane.kind, gone)
        for gap in gaps:
            if gap.reason == "disk":
                self._ledger.add(gap)
        self._notes.append(Dropped(lane.kind, [(gone[0].ordinal, gone[-1].ordinal + 1)], "disk", gaps))
        self._must_sync = True
        self._notes_since = self._now

    def _failed(self, error: OSError) -> None:
        self._errors += 1
        self._last_error = error.strerror or str(error)

    # The folder.

    def _open(self, now: float, boot: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close_files()
            raise SpoolError(f"somebody else has the spool in {self.folder} open", "one agent, one spool") from None
        for lane in self._lanes.values():
            lane.folder.mkdir(exist_ok=True, mode=0o700)
        _sync_folders(self.folder.parent, self.folder)
        (self.folder / "notes.new").unlink(missing_ok=True)
        found = read_notes(self.folder / "notes")
        recovery = Recovery(self._ledger, self._gaps.stream)
        recovery.run(self._lanes, found)
        _sync_folders(*(lane.folder for lane in self._lanes.values()))
        self._position = self._boundary = recovery.position
        self._told, self._wear = recovery.told, recovery.wear
        self._opened, self._boot, self._now = now, boot, now
        self._clock_ms = recovery.clock_ms
        if found.checkpoint is not None and found.checkpoint.boot == boot:
            since_ms = int(now * 1000) - found.checkpoint.mono_ms
            self._clock_ms = max(self._clock_ms, found.checkpoint.clock_ms + since_ms)
        self._notes_file = os.open(self.folder / "notes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._notes_at, self._notes_since = found.end, now
        self._finish_notes(self._rewrite(now))

    def _rewrite(self, now: float) -> Work:
        """Begin the notes anew; nothing may be under way."""
        work = Work(self.folder, self._notes_file, self._notes_at, b"", False, [], [], 0)
        work.checkpoint, work.reserve_bytes = self._checkpoint(now), self._reserve_bytes
        work.run()
        self._wear.bytes_written += work.bytes_written
        self._wear.syncs += work.syncs
        self._notes_sent = 0
        return work

    @property
    def _reserve_bytes(self) -> int:
        return self.limits.notes_bytes + self.limits.notes_bytes // 2

    def _age_ms(self, now: float) -> int:
        return self._clock_ms + max(int((now - self._opened) * 1000), 0)

    def _close_files(self) -> None:
        for ahead in (*self._live, *self._replay):
            ahead.close()
        files = [lane.active.file for lane in self._lanes.values() if lane.active is not None]
        for file in (*files, self._notes_file, self._lock):
            if file >= 0:
                os.close(file)
        for lane in self._lanes.values():
            lane.active = None
        self._notes_file = self._lock = -1


def _write(lane: Lane) -> Write:
    """What is pending, for the end of its segment: as much as it has room for."""
    segment = lane.begin()
    room = max(lane.segment_bytes - segment.nbytes, 0)
    lane.in_flight = max(sum(end <= room for end in itertools.accumulate(len(each.data) for each in lane.pending)), 1)
    return Write(lane, segment, b"".join(each.data for each in lane.pending[: lane.in_flight]))


def _gaps_of(kind: str, records: Sequence[Record]) -> list[Gap]:
    """What is missing without these records, and what they themselves said is."""
    gaps: dict[tuple[str, str, str], Gap] = {}
    for record in records:
        last, count, reason = record.seq, 1, "disk"
        if record.what == LOST:
            lost = msgspec.msgpack.decode(record.body, type=Lost)
            last, count, reason = lost.last, lost.count, lost.reason
        gap = Gap(kind, record.stream, record.session, record.seq, last, count, reason)
        key = record.stream, record.session, reason
        gaps[key] = join(gaps[key], gap) if key in gaps else gap
    return list(gaps.values())


def _sync_folders(*folders: Path) -> None:
    for folder in folders:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _copy(counts: Counts) -> Counts:
    return msgspec.structs.replace(counts, dropped=dict(counts.dropped))
