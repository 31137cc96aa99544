"""What has to be done to files, in an order that a power cut at any point is harmless to.

Notes first, and synced where files go: what a file had must be explained when it is gone. Then what goes, so that there
is room for what comes. A piece of work touches nothing of the spool but the files of the segments it writes, and so may
run on a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.mqtt.spool.lane import Lane, Segment

# There is no room: of the disk, of a quota, of a limit of the process.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass
class Write:
    """Records for the end of a segment."""

    lane: Lane
    segment: Segment
    data: bytes
    error: OSError | None = None


@dataclass
class Work:
    """One group; `error`s and what was done are there when it has run."""

    folder: Path
    notes_file: int
    notes_at: int
    notes: bytes
    sync_notes: bool
    unlink: Sequence[Path]
    writes: list[Write]
    floor_bytes: int
    # All that is known, when this is done: takes the place of the notes.
    checkpoint: bytes = b""
    reserve_bytes: int = 0
    notes_error: OSError | None = None
    new_notes_file: int = -1
    bytes_written: int = 0
    syncs: int = 0
    _unnamed: set[Path] = field(default_factory=set)

    def run(self) -> None:
        """Do it. Raises nothing: what failed is noted where it failed."""
        if self.notes:
            try:
                self._write(self.notes_file, self.notes, self.notes_at)
                if self.sync_notes:
                    self._sync(self.notes_file)
            except OSError as error:
                self.notes_error = error
        for path in self.unlink:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        for write in self.writes:
            self._append(write)
        for folder in self._unnamed:
            written = [each for each in self.writes if each.segment.path.parent == folder and each.error is None]
            try:
                self._sync_folder(folder)
                for write in written:
                    write.segment.is_named = True
            except OSError as error:
                for write in written:
                    write.error = error
        if self.checkpoint and not self.notes_error and not any(each.error for each in self.writes):
            with contextlib.suppress(OSError):
                self.new_notes_file = self._replace()

    def _append(self, write: Write) -> None:
        segment = write.segment
        try:
            free = os.statvfs(self.folder)
            if free.f_bavail * free.f_frsize < self.floor_bytes + len(write.data):
                raise OSError(errno.ENOSPC, "the free-space floor is reached")
            if segment.file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                segment.file = os.open(segment.path, flags, 0o600)
                os.ftruncate(segment.file, segment.nbytes)
            self._write(segment.file, write.data, segment.nbytes)
            self._sync(segment.file)
        except OSError as error:
            write.error = error
            if segment.file >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(segment.file, segment.nbytes)
            return
        if not segment.is_named:
            self._unnamed.add(segment.path.parent)

    def _replace(self) -> int:
        """A new file of notes in the place of the old one."""
        path = self.folder / "notes.new"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # So that there is room for what must be noted when the disk is full.
            with contextlib.suppress(OSError):
                os.posix_fallocate(file, 0, self.reserve_bytes)
            self._write(file, self.checkpoint, 0)
            self._sync(file)
            path.rename(self.folder / "notes")
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._sync_folder(self.folder)
        return file

    def _write(self, file: int, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(file, view, at)
            self.bytes_written += count
            at, view = at + count, view[count:]

    def _sync(self, file: int) -> None:
        os.fdatasync(file)
        self.syncs += 1

    def _sync_folder(self, folder: Path) -> None:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
            self.syncs += 1
        finally:
            os.close(file)
