"""Pages of a file that the runtime has mapped: found, let go, or held.

A cycle through more weights than memory holds makes the kernel evict each page shortly before it is needed again
(least recently used, which then always misses), so what is to stay is said to it: `drop` lets pages go, and `Held`
keeps them. The mappings are the runtime's own, found in /proc/self/maps (proc(5)); they are private and never written,
so a page that was let go comes back from the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent.external_data import Region, joined

# Of one request to read ahead the kernel reads no more than the device's window, which is 128 KiB by default.
_WINDOW_BYTES = 128 << 10

# Of an entry of /proc/self/pagemap (64 bits a page): whether the page is in memory and mapped.
_PRESENT = np.uint64(63)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclasses.dataclass(frozen=True)
class Mapping:
    """Where bytes of a file are in this process, from a page's beginning."""

    address: int
    region: Region

    @property
    def nbytes(self) -> int:
        """Of all its pages; the last may go past the end of the file."""
        return -(-self.region.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def mappings_of(file: Path) -> tuple[Mapping, ...]:
    """Every mapping of the file in this process, by offset."""
    name = str(file.resolve()).replace("\n", "\\012")
    size = file.stat().st_size
    found: list[Mapping] = []
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            if path == [name]:
                start, end = (int(part, 16) for part in addresses.split("-"))
                # The last page goes past the end of the file.
                at = int(offset, 16)
                found.append(Mapping(start, Region(file, at, min(end - start, size - at))))
    return tuple(sorted(found, key=lambda each: each.region.offset))


def touched(mapping: Mapping) -> int:
    """Bytes of the mapping whose pages this process has: it read them, or their neighbours. Of one mapping this takes
    microseconds, where /proc/self/smaps would look through all that the process has."""
    pages = mapping.nbytes // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        entries = np.frombuffer(os.pread(file.fileno(), 8 * pages, mapping.address // mmap.PAGESIZE * 8), np.uint64)
    return int(np.count_nonzero(entries >> _PRESENT)) * mmap.PAGESIZE


def drop(file: Path, mappings: Sequence[Mapping]) -> None:
    """Let all of the file go: from this process first, since a page that is mapped stays in the page cache."""
    for mapping in mappings:
        _libc.madvise(mapping.address, mapping.region.nbytes, mmap.MADV_DONTNEED)
    _advise_file(Region(file, 0, 0), os.POSIX_FADV_DONTNEED)


def read_singly(mappings: Sequence[Mapping]) -> None:
    """Have a fault read its page and no neighbours: for what a run reads here and there, and for what was read before,
    whose neighbours nobody wants. The device's window can be several MiB."""
    for mapping in mappings:
        _libc.madvise(mapping.address, mapping.region.nbytes, mmap.MADV_RANDOM)


class Held:
    """Parts of a file that stay in memory, whatever else is read, while this object is open."""

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        """Raises OSError where the process may not lock so much (setrlimit(2), RLIMIT_MEMLOCK)."""
        self._maps: list[mmap.mmap] = []
        try:
            for region in joined(mapping.region for mapping in mappings):
                self._hold(region)
        except OSError:
            self.close()
            raise

    def _hold(self, region: Region) -> None:
        # A mapping of our own: to lock a private one that may be written would copy every page of it.
        with region.file.open("rb") as file:
            shared = mmap.mmap(file.fileno(), region.nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=region.offset)
        self._maps.append(shared)
        shared.madvise(mmap.MADV_RANDOM)
        _advise_file(region, os.POSIX_FADV_WILLNEED, _WINDOW_BYTES)
        lock(shared)

    def close(self) -> None:
        """Unlock everything."""
        for each in self._maps:
            each.close()
        self._maps.clear()


def lock(shared: mmap.mmap) -> None:
    """mlock(2) all of a shared mapping, as long as it is there. Raises OSError where the process may not."""
    address = int(np.frombuffer(shared, np.uint8).ctypes.data)
    if _libc.mlock(address, len(shared)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _advise_file(region: Region, advice: int, step: int | None = None) -> None:
    """posix_fadvise(2), in steps of so many bytes. No bytes stand for all behind the offset. What cannot be opened its
    reader complains about."""
    with contextlib.suppress(OSError):
        descriptor = os.open(region.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset in range(region.offset, region.end, step) if step else (region.offset,):
                os.posix_fadvise(descriptor, offset, min(step or region.nbytes, region.end - offset), advice)
        finally:
            os.close(descriptor)
