"""Pages of a file that the runtime has mapped: brought into memory before their turn, let go after it, or held.

A cycle through more weights than memory holds makes the kernel evict each page shortly before it is needed again
(least recently used, which then always misses), so what comes and goes is said to it: `fetch` reads a part ahead,
`drop` lets it go, and `Held` keeps what is to stay. The mappings are the runtime's own, found in /proc/self/smaps
(proc(5)); they are private and never written, so a page that was let go comes back from the file.
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

# madvise(2); since Linux 5.14, on older kernels pages are mapped one fault after the other.
_MADV_POPULATE_READ = 22
# Of one request to read ahead the kernel reads no more than the device's window, which is 128 KiB by default.
_WINDOW_BYTES = 128 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclasses.dataclass(frozen=True)
class Mapping:
    """Where bytes of a file are in this process, from a page's beginning."""

    address: int
    region: Region
    touched: int
    """Bytes whose pages this process had mapped when the mapping was found: it read them, or their neighbours."""


def mappings_of(file: Path) -> tuple[Mapping, ...]:
    """Every mapping of the file in this process, by offset."""
    name = str(file.resolve()).replace("\n", "\\012")
    size = file.stat().st_size
    found: list[Mapping] = []
    ours = False
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            key, *rest = line.rstrip("\n").split(maxsplit=5)
            if not key.endswith(":"):
                # address range, permissions, offset, device, inode, path
                ours = rest[4:] == [name]
                if ours:
                    start, end = (int(part, 16) for part in key.split("-"))
                    offset = int(rest[1], 16)
                    # The last page goes past the end of the file.
                    found.append(Mapping(start, Region(file, offset, min(end - start, size - offset)), 0))
            elif ours and key == "Rss:":
                found[-1] = dataclasses.replace(found[-1], touched=int(rest[0]) << 10)
    return tuple(sorted(found, key=lambda each: each.region.offset))


def fetch(mappings: Sequence[Mapping]) -> None:
    """Have all pages in memory and mapped; returns when they are. A page that cannot be read is left to its reader."""
    for region in joined(mapping.region for mapping in mappings):
        _advise_file(region, os.POSIX_FADV_WILLNEED, _WINDOW_BYTES)
    for mapping in mappings:
        _libc.madvise(mapping.address, mapping.region.nbytes, _MADV_POPULATE_READ)


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
        if _libc.mlock(_address_of(shared), region.nbytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(region.file))

    def close(self) -> None:
        """Unlock everything."""
        for each in self._maps:
            each.close()
        self._maps.clear()


def _address_of(shared: mmap.mmap) -> int:
    return int(np.frombuffer(shared, np.uint8).ctypes.data)


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
