"""What a compilation has already written, so that it can go on after a kill and end with the same bytes.

Theory of operation: `journal.jsonl` stands in OUT.partial. Its first line says what is being made (source, options,
board, versions); each further line says where one tensor stands and the SHA-256 of the weight file up to its end, and
is written after the tensor.
A later run with an equal first line reads the weight file once, keeps every leading tensor whose digest still holds,
cuts the file behind the last of them and goes on. Order and padding are fixed, so the result does not depend on how
often it was interrupted. Records need no fsync to survive a kill; a power cut loses at most what was not yet synced,
which the digests then notice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

JOURNAL = "journal.jsonl"
# Both files are made durable each time this much was written: one fsync a tensor would cost more than the work.
SYNC_BYTES = 256 << 20
READ_BYTES = 4 << 20


class Record(msgspec.Struct, frozen=True):
    """One tensor in the weight file: storage key, place, digest of the file up to the tensor's end."""

    key: str
    offset: int
    nbytes: int
    sha256: str


class Journal:
    """The journal of one weight file. `head` is everything that the bytes depend on."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self._path = folder / JOURNAL
        self._head = json.dumps(head, sort_keys=True)
        self._file: BinaryIO | None = None
        self._unsynced = 0

    def resumable(self) -> bool:
        """Whether what stands in the folder was begun by an equal compilation."""
        try:
            with self._path.open("rb") as file:
                return file.readline() == self._head.encode() + b"\n"
        except OSError:
            return False

    def records(self) -> Iterator[Record]:
        """Every whole record of an equal compilation, in order; a line that was cut short ends them."""
        if not self.resumable():
            return
        with self._path.open("rb") as file:
            file.readline()
            for line in file:
                try:
                    yield msgspec.json.decode(line, type=Record)
                except msgspec.DecodeError:
                    return

    def restart(self, records: list[Record]) -> None:
        """Begin again with just these records."""
        self.close()
        lines = [self._head.encode(), *(msgspec.json.encode(record) for record in records)]
        with self._path.open("wb") as file:
            file.write(b"\n".join(lines) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._file = self._path.open("ab")

    def add(self, record: Record, weights: int) -> None:
        """Note a tensor that was written to the file descriptor `weights`."""
        if self._file is None:
            raise ValueError("restart() opens the journal")
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        self._unsynced += record.nbytes
        if self._unsynced >= SYNC_BYTES:
            os.fdatasync(weights)
            os.fdatasync(self._file.fileno())
            self._unsynced = 0

    def remove(self) -> None:
        """Delete it: the bundle is whole."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def verified_prefix(weights: Path, records: Iterator[Record]) -> tuple[list[Record], int, hashlib._Hash]:
    """(records whose bytes still hold, end of the last, SHA-256 state of the file up to there)."""
    kept: list[Record] = []
    whole = hashlib.sha256()
    end = 0
    try:
        file = weights.open("rb", buffering=0)
    except OSError:
        return kept, end, whole
    with file:
        for record in records:
            if record.offset < end:
                break
            attempt = whole.copy()
            padding = file.read(record.offset - end)
            if padding.strip(b"\0"):
                break
            attempt.update(padding)
            left = record.nbytes
            while left and (data := file.read(min(left, READ_BYTES))):
                attempt.update(data)
                left -= len(data)
            if left or attempt.hexdigest() != record.sha256:
                break
            whole, end = attempt, record.offset + record.nbytes
            kept.append(record)
    return kept, end, whole
