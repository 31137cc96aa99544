"""What administrators did, and who tried: a line in the log for each, with names and places but nothing secret."""

from __future__ import annotations

import time
from collections.abc import Callable

from agent import log
from agent.access.callers import Caller

# Whoever is refused can try again at once, and a board's flash wears: so many lines in so long.
_MOST_REFUSED, _WINDOW_S = 20, 60.0


class Audit:
    """Writes them. What is refused past a bound is counted, and the next line says how much that was."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._log, self._now = log.get("audit"), now
        self._began, self._written, self._left_out = now(), 0, 0

    def done(self, what: str, who: str, where: str, outcome: str = "done", **more: object) -> None:
        """Something was changed, or could not be."""
        self._log.info("audit", what=what, who=who, where=where, outcome=outcome, **more)

    def refused(self, what: str, who: str, where: str, outcome: str, **more: object) -> None:
        """Somebody wanted to who may not."""
        if self._now() - self._began >= _WINDOW_S:
            self._began, self._written = self._now(), 0
        if self._written >= _MOST_REFUSED:
            self._left_out += 1
            return
        self._written += 1
        left_out, self._left_out = self._left_out, 0
        if left_out:
            more["left_out"] = left_out
        self._log.warning("audit", what=what, who=who, where=where, outcome=outcome, **more)


def name_of(caller: Caller) -> str:
    """As the log has it."""
    return caller.name if caller.known else "anonymous"
