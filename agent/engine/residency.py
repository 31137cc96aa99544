"""The sessions of a bundle's segments, and which of their weights are in memory when.

Theory of operation. Every segment is loaded once and its session stays; what comes and goes are the pages of streamed
weights, which the runtime has mapped:

    turn of A begins     A's pages are there (their reading waited for); a thread begins to read those of B, the next
    A runs
    turn of A ends       the thread lets A's pages go
    turn of B begins     B's pages are there, those of C are read ahead ...

One thread reads and lets go, one thing after the other, so that neither takes time from a run. The order is a circle,
so the first is read ahead while the last runs and is there when the next request comes. At no time are the pages of
more than two streamed segments in memory, and only of one between requests. A bundle with a single streamed segment has
nothing to hide its reading under: none is there between requests. Where a turn does not come as foreseen (a run failed,
outputs that nobody wants) what was read ahead is let go before anything else is read.

Mapped weights stay: by themselves as long as nothing else needs the memory; beside streamed ones, which would push
them out, they are held.

What a run reads of a mapping is known after the first: kernels leave alone what went into their copies, and read rows
of tables. Only what it read for the most part is read ahead, or held.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent import log
from agent.backends.base import Backend, Session, SessionOptions
from agent.engine import paging
from agent.external_data import joined
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
        self._ahead: tuple[int, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, "pages")
        self.streamed_bytes = 0
        """Bytes of weights that were brought in for a turn so far."""

    @contextlib.contextmanager
    def turn(self, step: int) -> Iterator[Session]:
        """The segment's session, to be used until the block ends."""
        if step in self._streamed:
            self._take(step)
            self._read_ahead(self._after(step))
        try:
            yield self._sessions[step]
            if step in self._pages:
                self._pages[step].learn()
            if step in self._unheld:
                self._hold(step)
        finally:
            if step in self._streamed:
                self._thread.submit(self._pages[step].drop)
            elif step in self._pages:
                self._thread.submit(self._pages[step].drop_rows)

    def close(self) -> None:
        """Close everything."""
        self._forget()
        self._thread.shutdown()
        for held in self._held:
            held.close()
        for session in self._sessions:
            session.close()

    def _hold(self, step: int) -> None:
        self._unheld.discard(step)
        try:
            self._held.append(paging.Held(self._pages[step].wanted))
        except OSError as error:
            self._unheld.clear()
            log.get("engine").warning(
                "cannot lock weights that are to stay: they may be pushed out and read again",
                error=error.strerror,
                hint="raise LimitMEMLOCK of the service",
            )

    def _after(self, step: int) -> int:
        return self._streamed[(self._streamed.index(step) + 1) % len(self._streamed)]

    def _take(self, step: int) -> None:
        if self._ahead is not None and self._ahead[0] == step:
            self._ahead[1].result()
            self._ahead = None
        else:
            self._forget()
            self._thread.submit(self._fetch, step).result()

    def _read_ahead(self, step: int) -> None:
        if len(self._streamed) > 1:
            self._ahead = step, self._thread.submit(self._fetch, step)

    def _forget(self) -> None:
        """Let go what was read ahead, waiting for it first."""
        if self._ahead is not None:
            (step, future), self._ahead = self._ahead, None
            future.result()
            self._thread.submit(self._pages[step].drop).result()

    def _fetch(self, step: int) -> None:
        self.streamed_bytes += self._pages[step].fetch()


class _Pages:
    """Pages of a laid-out file that a loaded session has mapped. `wanted`: what a run reads for the most part."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._all = paging.mappings_of(file)
        self._known = False
        self._rows: tuple[paging.Mapping, ...] = ()
        self.wanted: tuple[paging.Mapping, ...] = ()

    def learn(self) -> None:
        """See what the run that has just ended had read; its pages must still be there. Only the first is asked."""
        if self._known:
            return
        self._known = True
        now = paging.mappings_of(self._file)
        self.wanted = tuple(each for each in now if 2 * each.touched >= each.region.nbytes)
        self._rows = tuple(each for each in now if 0 < 2 * each.touched < each.region.nbytes)
        # What is wanted is read before its turn, whole.
        paging.read_singly((*self.wanted, *self._rows))

    def fetch(self) -> int:
        """Bring in what a run will read; bytes of it, none while that is not known."""
        paging.fetch(self.wanted)
        return sum(region.nbytes for region in joined(each.region for each in self.wanted))

    def drop_rows(self) -> None:
        """Let go what is read by rows: others will be read next time, and in the end all would be there."""
        paging.drop(self._file, self._rows)

    def drop(self) -> None:
        """Let everything go, tables included."""
        paging.drop(self._file, self._all)


def trim_heap() -> None:
    """Give freed memory back to the system; malloc would keep it until the process ends."""
    ctypes.CDLL(None).malloc_trim(0)


def give_freed_blocks_back() -> None:
    """Have malloc return every block of 128 KiB or more when it is freed, not when the heap is trimmed.

    glibc does so until the first is freed, and then keeps blocks of that size, of up to 32 MiB. Loading PP-OCR's
    recogniser took 36 to 39 MiB so, as it happened; now it takes 33 each time.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
