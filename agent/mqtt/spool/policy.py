"""How much may wait, for how long, and what goes first when that is too much. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Drop(str, enum.Enum):
    """What a kind does when its room is used up.

    OLDEST: what waits longest goes. NEWEST: what waits stays, and takes the room of kinds that drop what they have;
    only when nothing of those is left, what comes is refused. DECIMATE: the fuller it is, the fewer of each stream are
    taken, every 2nd, 4th, 8th; when it is full, the oldest goes. Nothing is written twice for it.
    """

    OLDEST = "oldest"
    NEWEST = "newest"
    DECIMATE = "decimate"


@dataclass(frozen=True)
class Policy:
    """Of one kind. `max_bytes` are bytes on disk; `max_age_s` is 0 where age does not matter. A board that is off does
    not age what waits: who was away may have no idea of the time."""

    max_bytes: int
    max_age_s: float = 0.0
    drop: Drop = Drop.OLDEST

    def __post_init__(self) -> None:
        if self.max_bytes < LEAST_BYTES:
            raise ValueError(f"max_bytes is {self.max_bytes}, at least {LEAST_BYTES} are needed")
        if self.max_age_s < 0:
            raise ValueError(f"max_age_s is {self.max_age_s}, a kind that is kept for ever has 0")


# Eight segments of a page each, so that to drop the oldest is never to drop everything.
LEAST_BYTES = 64 << 10


@dataclass(frozen=True)
class Limits:
    """Of the whole spool; each of these bounds memory, disk or wear."""

    # A group is synced when it has so many records, or when its first one is so old: what a power cut can take.
    group_records: int = 50
    group_s: float = 0.1
    # Sealed at this size: the least that is dropped at once, and what one sync of the notes is spread over.
    segment_bytes: int = 1 << 20
    # Files of one kind; each start of the agent begins a new one.
    segments: int = 4096
    # Of the file system, for others.
    free_floor_bytes: int = 64 << 20
    # Larger ones are refused: nothing that large is telemetry.
    record_bytes: int = 1 << 20
    # Not yet on disk: when the disk hangs, memory does not grow past it.
    pending_bytes: int = 4 << 20
    # How long an acknowledgement may wait until it is noted; a power cut repeats what is not.
    notes_s: float = 1.0
    # The notes are written anew when they are larger.
    notes_bytes: int = 256 << 10
    # Ranges of a kind that are done, out of order. Past it only the oldest is handed out, which adds none.
    ranges: int = 8192
    # Handed out and not settled.
    outside: int = 16384
    # Names of streams, and gaps that wait to be told; past it what differs is put together.
    streams: int = 4096
    gaps: int = 1024
    # Between two times that gaps are told, and how many at a time.
    gaps_s: float = 10.0
    gaps_at_once: int = 64

    def segment_of(self, policy: Policy) -> int:
        """Where a segment of a kind is sealed."""
        return max(min(self.segment_bytes, policy.max_bytes // 8), 4096)


def keep_every(policy: Policy, used_bytes: int) -> int:
    """Of how many records of a stream one is taken while so much waits."""
    if policy.drop is not Drop.DECIMATE:
        return 1
    for every, eighths in ((8, 7), (4, 6), (2, 4)):
        if used_bytes * 8 >= policy.max_bytes * eighths:
            return every
    return 1
