"""How fast a client must send or take what it is about to: all of it in some time, and never next to nothing. Pure.

A rate over all that moved would let a client that was fast at first stand still for as long as it likes. So it is asked
for in every period by itself, as Kestrel's MinDataRate and Apache's mod_reqtimeout do.
"""

from __future__ import annotations


class Pace:
    """Begins at `now`: all must have moved within `whole_s`, and in every `period_s` until then `bytes_per_s` on
    average; 0 asks for no rate."""

    __slots__ = ("_bytes_per_s", "_end", "_moved", "_next", "_period_s", "_whole_s")

    def __init__(self, whole_s: float, bytes_per_s: float, period_s: float, now: float) -> None:
        self._whole_s, self._bytes_per_s, self._period_s = whole_s, bytes_per_s, period_s
        self._end, self._next = now + whole_s, now + period_s
        self._moved = 0

    def left_s(self, now: float) -> float:
        """After how long it must be looked at again."""
        due = min(self._end, self._next) if self._bytes_per_s else self._end
        return max(due - now, 0.001)

    def too_slow(self, moved: int, now: float) -> str:
        """What it missed, when so many bytes have moved in all; empty while it keeps pace."""
        if now >= self._end:
            return f"within {self._whole_s:.3g} s"
        if self._bytes_per_s and now >= self._next:
            if moved - self._moved < self._bytes_per_s * self._period_s:
                return f"at {self._bytes_per_s:g} bytes a second"
            self._moved, self._next = moved, now + self._period_s
        return ""

    def stood_still(self, seconds: float) -> None:
        """So long nothing could move, and for no fault of the client's."""
        self._end += seconds
        self._next += seconds
