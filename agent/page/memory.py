"""Memory as an operator sees it: what the plans count, by part, and what the processes use."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from agent.memory import pss_by_kind
from targets.budget import ANSWERS, BATCH, RING, TOKENIZER, WAITING, Term

PARTS = ("weights", "activations", "slots", "runtime", "gateway", "answers")
"""Of a plan, in the order in which they are shown. What is in no other part is the runtime's."""
_PART = {
    "weights": "weights", "mapped_weights": "weights", RING: "weights",
    "activations": "activations", "workspace": "activations", "arena_index": "activations", WAITING: "activations",
    BATCH: "activations",
    "io_slots": "slots", "bodies": "slots", ANSWERS: "slots",
    "service": "gateway", TOKENIZER: "gateway", "recipe": "gateway",
}  # fmt: skip
# The kernel walks the pages of every process for it: milliseconds for each GB.
EVERY_S = 5.0

Pid = tuple[str, int]
"""The model whose engine it is ("": the gateway), and its process."""


def planned(terms: Iterable[Term], kept: int) -> dict[tuple[str, str], int]:
    """Bytes by part and kind of memory, of the plans of all that run, and of `kept` bytes for answers and pictures."""
    sums: dict[tuple[str, str], int] = {}
    for term in terms:
        key = _PART.get(term.name, "runtime"), term.kind
        sums[key] = sums.get(key, 0) + term.nbytes
    if kept:
        sums["answers", "anonymous"] = kept
    return {key: nbytes for key, nbytes in sorted(sums.items(), key=lambda each: PARTS.index(each[0][0])) if nbytes}


@dataclass(frozen=True, slots=True)
class Measured:
    """What each process used by kind, at `at` of the monotonic clock: (model, kind, bytes)."""

    at: float
    used: tuple[tuple[str, str, int], ...]


class Meter:
    """Measures when somebody asks, in a thread of its own, and no more often than every `EVERY_S`."""

    def __init__(self, engines: Callable[[], Iterable[tuple[str, int | None]]]) -> None:
        self._engines = engines
        self._thread = ThreadPoolExecutor(1, "memory")
        self._last: Measured | None = None
        self._measuring: asyncio.Future[Measured] | None = None

    async def read(self) -> Measured:
        """The last figures. Only the first who asks waits; others have them measured for whoever comes next."""
        if self._measuring is None and (self._last is None or time.monotonic() - self._last.at >= EVERY_S):
            pids = [("", os.getpid()), *((name, pid) for name, pid in self._engines() if pid)]
            self._measuring = asyncio.get_running_loop().run_in_executor(self._thread, _measure, pids)
            self._measuring.add_done_callback(self._measured)
        if self._last is not None:
            return self._last
        if self._measuring is None:
            raise RuntimeError("nothing was measured and nothing is being measured")
        return await asyncio.shield(self._measuring)

    def close(self) -> None:
        """Measure no more."""
        self._thread.shutdown(wait=False)

    def _measured(self, measuring: asyncio.Future[Measured]) -> None:
        self._measuring = None
        if not measuring.cancelled() and measuring.exception() is None:
            self._last = measuring.result()


def _measure(pids: Iterable[Pid]) -> Measured:
    used = [(name, kind, nbytes) for name, pid in pids for kind, nbytes in pss_by_kind(pid).items()]
    return Measured(time.monotonic(), tuple(used))
