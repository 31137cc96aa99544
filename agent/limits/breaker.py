"""Refuses what would fail: a circuit breaker for one version of a model. Pure.

    closed --failures in a row--> open --open_s--> half open --one request: succeeds--> closed
                                   ^--------------------------'fails

Failures that are all of one client keep only that one out: whoever finds an input that the runtime fails on may not
take the model from the others. The death of an engine is nobody's.
"""

from __future__ import annotations


class Breaker:
    """Opens for `open_s` after so many failures in a row; 0: never."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._most, self._open_s = failures, open_s
        self._count = 0
        self._only: str | None = None
        """Whose all failures in the row are; None where they are not one client's."""
        self._until: float | None = None
        self._probe: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether somebody is refused."""
        return self._until is not None

    def wait_s(self, call: int, client: str, now: float) -> float:
        """0 where the call may run, else after how long another may. One is let through to try."""
        if self._until is None or self._only not in (None, client):
            return 0.0
        if now < self._until:
            return self._until - now
        if self._probe in (None, call):
            self._probe = call
            return 0.0
        return self._open_s

    def left(self, call: int) -> None:
        """That call has ended, whatever came of it."""
        if self._probe == call:
            self._probe = None

    def succeeded(self) -> bool:
        """A request was run; True where that closes it."""
        was_open = self.is_open
        self._count, self._until, self._probe = 0, None, None
        return was_open

    def failed(self, client: str | None, now: float) -> bool:
        """A request failed, of that client, or, None, an engine died; True where that opens it."""
        if not self._most:
            return False
        self._only = client if self._count == 0 or self._only == client else None
        self._count += 1
        if self._count < self._most:
            return False
        opens = self._until is None
        self._until, self._probe = now + self._open_s, None
        return opens
