"""The sessions of a bundle's segments, and which of their weights are in memory when.

Theory of operation. Every segment is loaded once and its session stays; what comes and goes are streamed weights:

    turn of A begins     A's weights are there (their reading waited for); a thread begins to read those of B, the next
    A runs
    turn of B begins     B's weights are there, those of C are read in the place of A's ...

The order is a circle, so the first is read ahead while the last runs and is there when the next request comes. At no
time are more than two streamed segments in memory; `ring` says where. A turn that does not come as foreseen (a run
failed, outputs that nobody wants) waits until its weights have been read.

What a run reads of a mapping is known after the first: kernels leave alone what went into their copies, and read rows
of tables. Only what it read for the most part is read ahead, or held. Until every streamed segment has run once, they
are read as pages of their files, and let go after each turn.

Mapped weights stay: by themselves as long as nothing else needs the memory; beside streamed ones, which would push
them out, they are held.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from agent import log
from agent.backends.base import Backend, BackendError, Session, SessionOptions
from agent.engine import paging
from agent.engine.ring import Ring, Streamed
from targets.bundle import Residency

# malloc.h; setting it, even to what it is, ends its adjustment.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 128 << 10


@dataclass(frozen=True)
class Source:
    """What a segment is loaded from; `weights` is the laid-out file that they are mapped from, if there is one."""

    graph: Path
    options: SessionOptions
    weights: Path | None = None


class Sessions:
    """One session per segment. Not for use by several threads at once."""

    def __init__(self, backend: Backend, sources: Sequence[Source]) -> None:
        """Load all, one after the other. Raises BackendError."""
        residencies = [source.options.residency for source in sources]
        self._streamed = [step for step, residency in enumerate(residencies) if residency is Residency.STREAMED]
        mixed = [step for step, residency in enumerate(residencies) if residency is Residency.MAPPED and self._streamed]
        self._pages: dict[int, _Pages] = {}
        self._unheld = set(mixed)
        self._held: list[paging.Held] = []
        self._may_lock = True
        self._sessions: list[Session] = []
        for step, source in enumerate(sources):
            self._sessions.append(backend.load_session(source.graph, source.options))
            if source.weights is None:
                continue
            if step in self._streamed or step in mixed:
                # Those that stay come back with the first run: loading the others takes memory too.
                self._pages[step] = _Pages(source.weights)
                self._pages[step].drop()
            else:
                # Loading reads more than a run does, the weights as they were before they were laid out. What stays
                # mapped is not touched by this.
                paging.drop(source.weights, ())
        self._unknown = set(self._streamed)
        self._ring: Ring | None = None
        self._fetching: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "weights")
        self.streamed_bytes = 0
        """Bytes of weights that were brought in for a turn so far."""

    def turn(self, step: int) -> AbstractContextManager[Session]:
        """The segment's session, to be used until the block ends. Raises BackendError when its weights do not come."""
        # Where all weights stay there is nothing to do before or after.
        return self._turn(step) if self._pages else contextlib.nullcontext(self._sessions[step])

    @contextlib.contextmanager
    def _turn(self, step: int) -> Iterator[Session]:
        after = self._begin(step)
        try:
            yield self._sessions[step]
            self._learn(step)
        finally:
            self._end(step, after)

    def close(self) -> None:
        """Close everything."""
        self._thread.shutdown()
        for held in self._held:
            held.close()
        for session in self._sessions:
            session.close()
        if self._ring is not None:
            self._ring.close()

    def _begin(self, step: int) -> int | None:
        """Have its weights there, and those of the next on their way; or the next, which can only come afterwards."""
        if self._ring is None or step not in self._streamed:
            return None
        number = self._streamed.index(step)
        if not (self._fetching and self._fetching.done() and self._ring.has(number)):
            self._fetch(number).result()
        after = (number + 1) % len(self._streamed)
        if self._ring.meet(number, after):
            return after
        self._fetch(after)
        return None

    def _end(self, step: int, after: int | None) -> None:
        if step in self._streamed and self._ring is None:
            self._thread.submit(self._pages[step].drop).result()
            if not self._unknown:
                self._ring = self._made_ring()
        elif step in self._pages:
            self._thread.submit(self._pages[step].drop_rows)
        if after is not None:
            self._fetch(after)

    def _fetch(self, number: int) -> Future[None]:
        """Have it fetched, after all that was asked for before."""
        ring = self._ring

        def fetch() -> None:
            if ring is not None:
                self.streamed_bytes += ring.fetch(number)

        self._fetching = self._thread.submit(fetch)
        return self._fetching

    def _learn(self, step: int) -> None:
        """See what the run that has just ended had read."""
        if step in self._pages:
            self._pages[step].learn()
        self._unknown.discard(step)
        if step in self._unheld:
            self._unheld.discard(step)
            self._lock(lambda: self._held.append(paging.Held(self._pages[step].wanted)))

    def _made_ring(self) -> Ring:
        pages = [self._pages[step] for step in self._streamed]
        try:
            ring = Ring([Streamed(each.file, each.wanted) for each in pages])
        except OSError as error:
            raise BackendError(f"cannot reserve memory for streamed weights: {error.strerror}") from None
        self._lock(ring.lock)
        return ring

    def _lock(self, lock: Callable[[], None]) -> None:
        """Where it may not be, that is said once."""
        if not self._may_lock:
            return
        try:
            lock()
        except OSError as error:
            self._may_lock = False
            log.get("engine").warning(
                "cannot lock weights that are to stay: they may be pushed out and read again",
                error=error.strerror,
                hint="raise LimitMEMLOCK of the service",
            )


class _Pages:
    """Pages of a laid-out file that a loaded session has mapped. `wanted`: what a run reads for the most part."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._all = paging.mappings_of(file)
        self._known = False
        self._rows: tuple[paging.Mapping, ...] = ()
        self.wanted: tuple[paging.Mapping, ...] = ()

    def learn(self) -> None:
        """See what the run that has just ended had read; its pages must still be there. Only the first is asked."""
        if self._known:
            return
        self._known = True
        touched = [(each, paging.touched(each)) for each in self._all]
        self.wanted = tuple(each for each, nbytes in touched if 2 * nbytes >= each.region.nbytes)
        self._rows = tuple(each for each, nbytes in touched if 0 < 2 * nbytes < each.region.nbytes)
        # What is wanted is held, or comes by the ring.
        paging.read_singly((*self.wanted, *self._rows))

    def drop_rows(self) -> None:
        """Let go what is read by rows: others will be read next time, and in the end all would be there."""
        paging.drop(self.file, self._rows)

    def drop(self) -> None:
        """Let everything go, tables included."""
        paging.drop(self.file, self._all)


def trim_heap() -> None:
    """Give freed memory back to the system; malloc would keep it until the process ends."""
    ctypes.CDLL(None).malloc_trim(0)


def give_freed_blocks_back() -> None:
    """Have malloc return every block of 128 KiB or more when it is freed, not when the heap is trimmed.

    glibc does so until the first is freed, and then keeps blocks of that size, of up to 32 MiB. Loading PP-OCR's
    recogniser took 36 to 39 MiB so, as it happened; now it takes 33 each time.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
