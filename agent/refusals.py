"""The newest refusals, for people who look: bounded, however many there are. Pure.

What is refused again and again would soon be all that is kept. So refusals of one model with one reason that follow
each other closely are one entry, which counts them and has the words of the last.
"""

from __future__ import annotations

import msgspec

from agent.errors import Reason

# Entries, and characters of what each says: some 30 KiB.
MOST = 50
_TEXT, _NAME = 300, 100
# A client that is refused every half minute still has one entry.
TOGETHER_S = 60.0


class Refusal(msgspec.Struct, frozen=True):
    """`count` refusals from `first_s` to `last_s` (seconds after the epoch), with the message of the last."""

    model: str
    reason: Reason
    message: str
    first_s: float
    last_s: float
    count: int = 1


class Refusals:
    """At most `most` of them, the last refused last."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: dict[tuple[str, Reason, float], Refusal] = {}
        self._newest: dict[tuple[str, Reason], Refusal] = {}

    def note(self, model: str, reason: Reason, message: str, wall_s: float) -> None:
        """A request was refused now."""
        model, message = model[:_NAME], message[:_TEXT]
        before = self._newest.get((model, reason))
        if before is not None and wall_s - before.last_s < TOGETHER_S:
            # What was refused last goes last.
            del self._kept[model, reason, before.first_s]
            refusal = Refusal(model, reason, message, before.first_s, wall_s, before.count + 1)
        else:
            refusal = Refusal(model, reason, message, wall_s, wall_s)
        self._kept[model, reason, refusal.first_s] = self._newest[model, reason] = refusal
        if len(self._kept) > self._most:
            oldest = self._kept.pop(next(iter(self._kept)))
            if self._newest.get((oldest.model, oldest.reason)) is oldest:
                del self._newest[oldest.model, oldest.reason]

    def newest(self) -> list[Refusal]:
        """All that are kept, the newest first."""
        return list(reversed(self._kept.values()))
