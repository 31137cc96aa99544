"""When a pass begins that several requests share. Pure."""

from __future__ import annotations

PATIENCE = 0.1
"""How long a pass waits for company, in parts of what the last one took: that much is lost where nobody comes, and half
of a pass is won where one does."""


class Gathering:
    """When a pass that up to `most` requests can share begins.

    Theory of operation. Requests that come together are not ready at the same instant. Were the first to start at once
    it would be alone, and so the second, whose turn it is when the first has gone to fetch the next: two that ask in
    turn would never meet. So a pass waits a little for those that are on their way, which hold a slot already, and for
    those that had company before and are likely to ask again. Who comes alone does not wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._patience_s = 0.0
        self._company_until = 0.0
        self._since: float | None = None

    def begins_at(self, ready: int, coming: int, now: float) -> float | None:
        """When a pass of the `ready` begins, at once if not after `now`, while `coming` hold slots that are not filled
        yet; None without any. To be asked again whenever either number changes, while no pass goes on."""
        if not ready:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if ready >= self._most:
            return now
        return max(self._since + self._patience_s if coming else now, self._company_until)

    def ended(self, requests: int, waiting: int, took_s: float, now: float) -> None:
        """A pass of so many requests is over, and others wait."""
        self._patience_s = PATIENCE * took_s
        self._company_until = now + self._patience_s if requests + waiting > 1 else now
        self._since = None
