"""What became of everything that was produced: produced = delivered + dropped by reason + queued. Pure."""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct):
    """Of one kind, since the spool was made: they go on after a restart.

    `produced` counts what is stored, or dropped with a reason. After a crash they go on from what is on disk: what was
    never acknowledged and is not there was not produced, and what was delivered without a note of it is queued again.
    """

    produced: int = 0
    delivered: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    queued: int = 0

    def drop(self, reason: str, count: int) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    @property
    def balanced(self) -> bool:
        """Whether the law holds."""
        return self.produced == self.delivered + sum(self.dropped.values()) + self.queued


class Wear(msgspec.Struct):
    """What the storage had to bear, since the spool was made: bytes of bodies, bytes written in all, and syncs."""

    bytes_appended: int = 0
    bytes_written: int = 0
    syncs: int = 0

    @property
    def amplification(self) -> float:
        """Bytes written for each byte appended; what the file system adds is not in it."""
        return self.bytes_written / self.bytes_appended if self.bytes_appended else 0.0
