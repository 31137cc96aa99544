"""How often one client may ask, and how much of it may go on at once. Pure.

The rate is a token bucket of `burst` tokens, kept as one time for each client: when its bucket will be full again (the
generic cell rate algorithm, ITU-T I.371). A full bucket is no different from none, so it is forgotten; where more than
`most` are not full, the one that asked longest ago is.
"""

from __future__ import annotations

import math


class Rates:
    """`per_s` requests of a client, after `burst` at once; at most `at_once` that go on. 0: any number."""

    def __init__(self, per_s: float, burst: int, at_once: int, most: int = 4096) -> None:
        self._every_s = 1 / per_s if per_s else 0.0
        self._slack_s = self._every_s * (burst - 1)
        self._most, self._at_once = most, at_once
        self._full_at: dict[str, float] = {}
        self._going: dict[str, int] = {}

    def __len__(self) -> int:
        """How many clients are remembered for their rate."""
        return len(self._full_at)

    def wait_s(self, client: str, now: float) -> int:
        """Take a token: 0, or, where there is none, after how many whole seconds there is one."""
        if not self._every_s:
            return 0
        full_at = max(self._full_at.pop(client, now), now)
        early_s = full_at - now - self._slack_s
        # Behind all others, so that the first is who asked longest ago.
        self._full_at[client] = full_at + self._every_s if early_s <= 1e-9 else full_at
        if len(self._full_at) > self._most:
            self._forget(now)
        return math.ceil(early_s) if early_s > 1e-9 else 0

    def begin(self, client: str) -> bool:
        """Whether one more may go on; if so, it does until `end`."""
        going = self._going.get(client, 0)
        if self._at_once and going >= self._at_once:
            return False
        self._going[client] = going + 1
        return True

    def end(self, client: str) -> None:
        """One that began has ended."""
        going = self._going[client] - 1
        if going:
            self._going[client] = going
        else:
            del self._going[client]

    def _forget(self, now: float) -> None:
        for client in [each for each, full_at in self._full_at.items() if full_at <= now]:
            del self._full_at[client]
        while len(self._full_at) > self._most:
            del self._full_at[next(iter(self._full_at))]
