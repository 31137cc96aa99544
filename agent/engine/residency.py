"""The sessions of a bundle's segments, each there when its turn comes.

Theory of operation. A segment whose weights are on the heap, mapped or unpacked is loaded once and stays. A streamed
one lives from shortly before its turn until the turn ends:

    turn of A begins     A is taken; the next streamed segment B is read ahead and opened, on a thread
    A runs               the kernel reads B, its session is built
    turn of A ends       A is closed, the heap trimmed, A's pages leave the cache
    turn of B begins     B is taken (its opening waited for), C is read ahead ...

The order is a circle, so the first is read ahead while the last runs and is there when the next request comes. At no
time are more than two streamed segments open, and only one between requests. A bundle with a single streamed segment
has nothing to hide its opening under: none is open between requests. Where a turn does not come as foreseen (a run
failed, outputs that nobody wants) what was read ahead is closed before anything else is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent.backends.base import Backend, BackendError, Session, SessionOptions
from agent.external_data import Region
from targets.bundle import Residency

# malloc.h; setting it, even to what it is, ends its adjustment.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 128 << 10


@dataclass(frozen=True)
class Source:
    """What a segment is opened from; `weights` are the bytes that opening it reads beside the graph."""

    graph: Path
    options: SessionOptions
    weights: tuple[Region, ...] = ()


class Sessions:
    """One session per segment, resident or streamed. Not for use by several threads at once."""

    def __init__(self, backend: Backend, sources: Sequence[Source]) -> None:
        """Load what is resident. Raises BackendError."""
        self._backend = backend
        self._sources = sources
        self._streamed = [i for i, source in enumerate(sources) if source.options.residency is Residency.STREAMED]
        self._resident = {i: self._load_to_stay(i) for i in range(len(sources)) if i not in self._streamed}
        self._ahead: tuple[int, Future[Session]] | None = None
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self.streamed_bytes = 0
        """Bytes of the weights that were opened for a turn so far."""

    @contextlib.contextmanager
    def turn(self, step: int) -> Iterator[Session]:
        """The segment's session, to be used until the block ends. Raises BackendError when it cannot be opened."""
        if step in self._resident:
            yield self._resident[step]
            return
        session = self._take(step)
        try:
            self._read_ahead(self._after(step))
            yield session
        finally:
            self._drop(step, session)

    def close(self) -> None:
        """Close everything."""
        self._forget()
        self._thread.shutdown()
        for session in self._resident.values():
            session.close()

    def _after(self, step: int) -> int:
        return self._streamed[(self._streamed.index(step) + 1) % len(self._streamed)]

    def _take(self, step: int) -> Session:
        ahead, foreseen = self._ahead, self._ahead is not None and self._ahead[0] == step
        if ahead is None or not foreseen:
            self._forget()
            return self._open(step)
        self._ahead = None
        try:
            return ahead[1].result()
        except BackendError:
            # It may have failed long ago, for want of memory that is there again now.
            return self._open(step)

    def _read_ahead(self, step: int) -> None:
        if len(self._streamed) > 1:
            self._ahead = step, self._thread.submit(self._open, step)

    def _forget(self) -> None:
        """Close what was read ahead, waiting for it first."""
        if self._ahead is None:
            return
        (step, future), self._ahead = self._ahead, None
        if future.exception() is None:
            self._drop(step, future.result())

    def _open(self, step: int) -> Session:
        _advise(self._sources[step].weights, os.POSIX_FADV_WILLNEED)
        # What opening read and the run will not is left to the kernel until the turn ends: to drop it here would also
        # drop what was read ahead and no page table holds yet.
        session = self._load(step)
        self.streamed_bytes += sum(region.nbytes for region in self._sources[step].weights)
        return session

    def _load(self, step: int) -> Session:
        source = self._sources[step]
        return self._backend.load_session(source.graph, source.options)

    def _load_to_stay(self, step: int) -> Session:
        session = self._load(step)
        # Opening reads more than stays mapped; pages that are mapped are not touched by this.
        _advise(self._sources[step].weights, os.POSIX_FADV_DONTNEED)
        return session

    def _drop(self, step: int, session: Session) -> None:
        session.close()
        trim_heap()
        _advise(self._sources[step].weights, os.POSIX_FADV_DONTNEED)


def trim_heap() -> None:
    """Give freed memory back to the system; malloc would keep it until the process ends."""
    ctypes.CDLL(None).malloc_trim(0)


def give_freed_blocks_back() -> None:
    """Have malloc return every block of 128 KiB or more when it is freed, not when the heap is trimmed.

    glibc does so until the first is freed, and then keeps blocks of that size, of up to 32 MiB. Loading PP-OCR's
    recogniser took 36 to 39 MiB so, as it happened; now it takes 33 each time.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _advise(regions: Sequence[Region], advice: int) -> None:
    """posix_fadvise(2): a hint, so what cannot be opened is left for the runtime to complain about."""
    for region in regions:
        with contextlib.suppress(OSError):
            descriptor = os.open(region.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, region.offset, region.nbytes, advice)
            finally:
                os.close(descriptor)
