"""Memory that streamed segments take turns in, allocated once.

Theory of operation. A session reads its weights through the runtime's own mappings of a file. Of segments that are
streamed those mappings are replaced, at the same addresses, by parts of one block of memory: it has two places, and in
the order of their turns segments are mapped to the one and to the other. To bring a segment in is to read its weights
into its place, past the page cache (O_DIRECT, open(2)), while the one before computes:

    place 0   A A A A|C C C C C C|E ...        read while the other place's segment runs
    place 1       B B B B B B|D D D D D ...

Nothing is mapped, faulted in, evicted or let go while requests are served: that took as much time of the processors as
reading takes of the storage. The block is shared memory because only that can be mapped at many addresses.

Where the number of segments is odd, the last and the first have the same place, and the first is read when the last
has run.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.backends.base import BackendError
from agent.engine.paging import Mapping, lock
from targets.tensor import human

PLACES = 2
# Of one request: enough for the storage to be busy, and few requests.
_READ_BYTES = 8 << 20
_MAP_POPULATE = 0x8000
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Streamed:
    """What a streamed segment reads of its file: mappings, by offset."""

    file: Path
    mappings: Sequence[Mapping]


@dataclass(frozen=True)
class _Piece:
    """Bytes of the file from `offset` on, whole pages, and where in the ring they go; the last page may go past the
    end of the file."""

    offset: int
    at: int
    nbytes: int
    end: int


class Ring:
    """Two places for segments, numbered by the order of their turns. Not for use by several threads at once."""

    def __init__(self, segments: Sequence[Streamed]) -> None:
        """Allocate the places, and map the segments' weights to them: they are to be fetched before they are read.

        Raises OSError where memory is short, and then nothing has changed.
        """
        sizes = [sum(each.nbytes for each in segment.mappings) for segment in segments]
        starts = (0, max(sizes[0::PLACES]))
        self.nbytes = starts[1] + max(sizes[1::PLACES], default=0)
        memory = os.memfd_create("tightfit-ring", os.MFD_CLOEXEC)
        self._files: list[int] = []
        try:
            os.posix_fallocate(memory, 0, max(self.nbytes, mmap.PAGESIZE))
            self._memory = mmap.mmap(memory, max(self.nbytes, mmap.PAGESIZE))
            self._bytes = memoryview(self._memory)
            for segment in segments:
                self._files.append(_opened(segment.file))
            self._pieces = [
                _placed(segment.mappings, starts[number % PLACES], memory) for number, segment in enumerate(segments)
            ]
        except OSError:
            for descriptor in self._files:
                os.close(descriptor)
            raise
        finally:
            os.close(memory)
        self._names = [segment.file.name for segment in segments]
        self._inside: list[int | None] = [None] * PLACES

    def lock(self) -> None:
        """Keep it from being swapped out. Raises OSError where the process may not lock so much."""
        lock(self._memory)

    def meet(self, one: int, other: int) -> bool:
        """Whether two segments have the same place."""
        return one % PLACES == other % PLACES

    def has(self, number: int) -> bool:
        """Whether the segment's weights are in its place, unless they are just being fetched."""
        return self._inside[number % PLACES] == number

    def fetch(self, number: int) -> int:
        """Have the segment's weights in its place; bytes that were read for it. Raises BackendError."""
        if self.has(number):
            return 0
        place = number % PLACES
        self._inside[place] = None
        for piece in self._pieces[number]:
            self._read(number, piece)
        self._inside[place] = number
        return sum(piece.end - piece.offset for piece in self._pieces[number])

    def close(self) -> None:
        """Close the files and this view of the memory, which goes with the mappings: they are the sessions'."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files.clear()
        self._bytes.release()
        self._memory.close()

    def _read(self, number: int, piece: _Piece) -> None:
        done = 0
        while piece.offset + done < piece.end:
            # Whole pages are asked for, as O_DIRECT has it: an end within a page is that of the file.
            into = self._bytes[piece.at + done : piece.at + min(done + _READ_BYTES, piece.nbytes)]
            try:
                found = _read(self._files[number], into, piece.offset + done)
            except OSError as error:
                raise BackendError(f"weights cannot be read from {self._names[number]}: {error.strerror}") from None
            if not found:
                raise BackendError(
                    f"{self._names[number]} ends after {human(piece.offset + done)}, {human(piece.end)} are needed",
                    "finalise the bundle again",
                )
            done += found


def _placed(mappings: Sequence[Mapping], start: int, memory: int) -> list[_Piece]:
    """Map the ring's memory from `start` on in the place of each; what follows on another in the file is one piece."""
    pieces: list[_Piece] = []
    at = start
    for mapping in mappings:
        nbytes, region = mapping.nbytes, mapping.region
        _map(mapping.address, nbytes, memory, at)
        last = pieces[-1] if pieces else None
        if last is not None and last.offset + last.nbytes == region.offset:
            pieces[-1] = _Piece(last.offset, last.at, last.nbytes + nbytes, region.end)
        else:
            pieces.append(_Piece(region.offset, at, nbytes, region.end))
        at += nbytes
    return pieces


def _map(address: int, nbytes: int, memory: int, offset: int) -> None:
    """mmap(2) over what is there. Where that fails the process ends: weights of others could stand at the address."""
    flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
    if _libc.mmap(address, nbytes, mmap.PROT_READ, flags, memory, offset) == _MAP_FAILED:
        raise SystemExit(f"cannot map {human(nbytes)} of the ring for weights: {os.strerror(ctypes.get_errno())}")


def _opened(file: Path) -> int:
    """Open for reading past the page cache, where the file system can."""
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _read(file: int, into: memoryview, offset: int) -> int:
    """preadv(2); once more by way of the page cache where the file system refuses these bytes without."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    past_the_cache = bool(flags & os.O_DIRECT)
    try:
        found = os.preadv(file, [into], offset)
    except OSError as error:
        if error.errno != errno.EINVAL or not past_the_cache:
            raise
        past_the_cache = False
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        found = os.preadv(file, [into], offset)
    if not past_the_cache:
        os.posix_fadvise(file, offset, found, os.POSIX_FADV_DONTNEED)
    return found
