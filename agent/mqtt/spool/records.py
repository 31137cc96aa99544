"""How records stand in a segment: bytes in, records out, no files. Little-endian.

    magic 4 | crc-32 4 | length 4 | what 1 | session 1 | stream 2 | position 8 | ordinal 8 | seq 8 | made_ms 8
    | session | stream | body

The CRC covers all behind it, so that a length that lies is found too. A reader that meets something else looks for the
next magic whose record is whole: one bad byte costs one record.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = b"\xa5TF1"
_PREFIX = struct.Struct("<4sI")
_FIXED = struct.Struct("<IBBHQQQQ")
HEAD_BYTES = _PREFIX.size + _FIXED.size
# No record is longer: a length that says so is damage, and is not read.
MOST_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10

ENTRY = 1
# Numbers of a stream that were given and never stored; the body says how many, and why.
LOST = 2


class Record(NamedTuple):
    """One of a segment. `position` orders all of a spool, `ordinal` those of a kind, without a hole; `made_ms` says how
    old the spool was."""

    what: int
    position: int
    ordinal: int
    session: str
    stream: str
    seq: int
    made_ms: int
    body: bytes


class Damage(NamedTuple):
    """Bytes from `offset` to `end` that are no record; `torn`: no whole record is behind them."""

    offset: int
    end: int
    torn: bool


def pack(record: Record) -> bytes:
    """Its bytes in a segment."""
    session, stream = record.session.encode(), record.stream.encode()
    _, position, ordinal, _, _, seq, made_ms, body = record
    length = len(session) + len(stream) + len(body)
    fixed = _FIXED.pack(length, record.what, len(session), len(stream), position, ordinal, seq, made_ms)
    rest = b"".join((fixed, session, stream, body))
    return _PREFIX.pack(MAGIC, zlib.crc32(rest)) + rest


class Reader:
    """Reads a file of records from front to back, by a small buffer; `end` may grow as the file does."""

    def __init__(self, file: int, offset: int, end: int) -> None:
        self.offset, self.end = offset, end
        self._file = file
        self._buffer, self._start = b"", offset

    def __iter__(self) -> Iterator[tuple[int, Record | Damage]]:
        """What is there until `end`, each with the offset behind it."""
        while (found := self.next()) is not None:
            yield self.offset, found

    def next(self) -> Record | Damage | None:
        """What comes next, and `offset` is behind it; None at the end, which may have moved when it is asked again."""
        if self.offset >= self.end:
            return None
        found = self._at(self.offset)
        if found is None:
            damage = self._damage()
            self.offset = damage.end
            return damage
        record, self.offset = found
        return record

    def _at(self, offset: int) -> tuple[Record, int] | None:
        """The record that begins there, and where it ends."""
        at = self._have(offset, HEAD_BYTES)
        if at < 0:
            return None
        magic, crc = _PREFIX.unpack_from(self._buffer, at)
        if magic != MAGIC:
            return None
        fixed = _FIXED.unpack_from(self._buffer, at + _PREFIX.size)
        length, what, session, stream, position, ordinal, seq, made_ms = fixed
        if length > MOST_BYTES or session + stream > length:
            return None
        nbytes = HEAD_BYTES + length
        at = self._have(offset, nbytes)
        if at < 0 or zlib.crc32(memoryview(self._buffer)[at + _PREFIX.size : at + nbytes]) != crc:
            return None
        texts = at + HEAD_BYTES
        body = texts + session + stream
        names = self._buffer[texts : texts + session].decode(), self._buffer[texts + session : body].decode()
        return Record(what, position, ordinal, *names, seq, made_ms, self._buffer[body : at + nbytes]), offset + nbytes

    def _damage(self) -> Damage:
        """From here to the next whole record, or to the end."""
        start = at = self.offset
        while at + 1 < self.end:
            # So much that a magic across two chunks is in one of them.
            chunk = self._bytes(at + 1, _CHUNK_BYTES)
            found = chunk.find(MAGIC)
            if found < 0:
                at += max(len(chunk) - len(MAGIC) + 1, 1)
                continue
            at += 1 + found
            if self._at(at) is not None:
                return Damage(start, at, torn=False)
        return Damage(start, self.end, torn=True)

    def _have(self, offset: int, count: int) -> int:
        """Where in the buffer so many bytes from there on are; -1 where there are not so many."""
        at = offset - self._start
        if at >= 0 and at + count <= len(self._buffer):
            return at
        return offset - self._start if len(self._bytes(offset, count)) == count else -1

    def _bytes(self, offset: int, count: int) -> bytes:
        """At most so many bytes from there on, never past `end`."""
        count = min(count, self.end - offset)
        at = offset - self._start
        if at < 0 or at + count > len(self._buffer):
            wanted = min(max(count, _CHUNK_BYTES), self.end - offset)
            self._buffer, self._start, at = os.pread(self._file, wanted, offset), offset, 0
        return self._buffer[at : at + count]
