"""The line that a request leaves in the log (docs/observability.md).

By default those alone leave one that were not answered: flash wears, and what was answered is counted. Of a flood of
refusals a few leave lines, by reason, so that neither the flash is filled nor one reason hidden by another; how many
did not is said once a minute. Nothing of a request's input is in its line but a digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any, Literal

from agent import log
from agent.calls import Call
from agent.config import Log
from agent.errors import TABLE, Reason

# Lines of one reason at once, and seconds until there may be one more: 4 KB a minute while a flood goes on.
_BURST, _EVERY_S = 10, 6.0
# How often it is said how many lines were left out.
_SAID_EVERY_S = 60.0
# A fifth of a millisecond on a slow core without instructions for it.
_HASHED_BYTES = 64 << 10
_DIGEST_DIGITS = 16
_MOST_CHARACTERS = 500
# No client's doing, and no load's.
_FAULTS = frozenset({Reason.FAULT, Reason.ENGINE_ERROR, Reason.OUTPUT_TOO_LARGE})


class Sparing:
    """Lets few lines of each reason through. Pure: time is an argument (monotonic seconds)."""

    def __init__(self) -> None:
        self.left_out: dict[Reason, int] = {}
        """How many were not let through since somebody took note of it."""
        self._left: dict[Reason, tuple[float, float]] = {}

    def takes(self, reason: Reason, now: float) -> bool:
        """Whether there may be one more now."""
        left, at = self._left.get(reason, (_BURST, now))
        left = min(left + (now - at) / _EVERY_S, _BURST)
        if left < 1:
            self._left[reason] = left, now
            self.left_out[reason] = self.left_out.get(reason, 0) + 1
            return False
        self._left[reason] = left - 1, now
        return True


class RequestLog:
    """Writes lines of requests from within the event loop, until it is closed."""

    def __init__(self, options: Log) -> None:
        self._wanted: Literal["failures", "all", "none"] = options.requests
        self._words = options.level == "debug"
        """Whether what is said to clients about their own mistakes is logged as well."""
        self._log = log.get("gateway")
        self._sparing = Sparing()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def takes_answered(self) -> bool:
        """Whether requests that are answered leave a line too."""
        return self._wanted == "all"

    def settled(self, call: Call, reason: Reason, message: str) -> None:
        """One request has ended, and still has its slot."""
        now = time.monotonic()
        if self._wanted == "none" or (reason is Reason.OK and self._wanted == "failures"):
            return
        if self._wanted == "failures" and not self._sparing.takes(reason, now):
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_SAID_EVERY_S, self._say)
            return
        status = TABLE[reason].status
        write = self._log.warning if reason in _FAULTS else self._log.info
        write("request", **call.ids, **_fields(call, reason, now), **self._said(status, message))

    def close(self) -> None:
        """Say what is left to say."""
        if self._timer is not None:
            self._timer.cancel()
            self._say()

    def _said(self, status: int, message: str) -> dict[str, str]:
        return {"message": message[:_MOST_CHARACTERS]} if message and (status >= 500 or self._words) else {}

    def _say(self) -> None:
        self._timer = None
        counts = {reason.value: count for reason, count in self._sparing.left_out.items()}
        self._sparing.left_out = {}
        self._log.warning("more requests failed than have lines here", left_out=counts)


def _fields(call: Call, reason: Reason, now: float) -> dict[str, Any]:
    """All but its ids; what is not known of it is not there."""
    served = call.served or (call.entry.active if call.entry else None)
    fields = {
        "model": call.entry.name if call.entry else call.name,
        "version": served.version if served else "",
        "latency_ms": _ms(now - call.arrived),
        "queue_ms": _ms(call.waited_s(now)),
        "run_ms": _ms(call.compute_s) if call.ended else None,
        "status_code": TABLE[reason].status,
        "reason": reason.value,
        "batch_size": call.batch_rows or None,
        "input_sha256": input_digest(call),
        "priority": call.priority or None,
        "client": call.client,
    }
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def input_digest(call: Call) -> str | None:
    """The beginning of the SHA-256 of what stands in the call's slot: of each input, in the contract's order, how many
    bytes it has (8 bytes, little-endian) and its bytes, of all together the first 64 KiB. None where nothing does.

    So it is the same whether tensors came as JSON, as bytes, or as a record of a stream.
    """
    if call.served is None or call.slot is None or not call.inputs:
        return None
    digest, left = hashlib.sha256(), _HASHED_BYTES
    for index, nbytes in enumerate(call.inputs):
        digest.update(nbytes.to_bytes(8, "little"))
        digest.update(call.served.slab.input(call.slot, index)[: min(nbytes, left)].data)
        left -= min(nbytes, left)
    return digest.hexdigest()[:_DIGEST_DIGITS]
