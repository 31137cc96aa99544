"""Who may be connected: so many in all, so many of one client, and nobody kept out by one who has most of it. Pure.

Where all places are taken, the client that has most of them gives one up for a newcomer who has fewer: the one that it
has had longest and asks nothing on now. So a thousand connections of one client cost the others nothing.
"""

from __future__ import annotations

from typing import Protocol

from agent.errors import Reason
from agent.request import Refused


class Holder(Protocol):
    """A connection."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing that it asked for goes on."""
        ...

    def give_up(self) -> None:
        """Close it."""


class Places:
    """At most `most`, and of one client at most `per_client` (0: all)."""

    def __init__(self, most: int, per_client: int) -> None:
        self._most, self._per_client = most, per_client
        self._clients: dict[Holder, str] = {}
        self._of: dict[str, dict[Holder, None]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def ask(self, client: str) -> Holder | Refused | None:
        """Whether one more of that client may come: None, who has to go for it, or why not."""
        own = len(self._of.get(client, ()))
        if self._per_client and own >= self._per_client:
            return Refused(Reason.CLIENT_BUSY, f"{own} connections of this client are open, as many as may be of one")
        if len(self._clients) < self._most:
            return None
        greediest = max(self._of.values(), key=len)
        if len(greediest) > own + 1:
            for holder in greediest:
                if holder.is_idle:
                    return holder
        return Refused(Reason.QUEUE_FULL, f"{self._most} connections are open, which is the limit")

    def add(self, holder: Holder, client: str) -> None:
        """It has a place from now on."""
        self._clients[holder] = client
        self._of.setdefault(client, {})[holder] = None

    def remove(self, holder: Holder) -> None:
        """It has none any more, if it had one."""
        client = self._clients.pop(holder, None)
        if client is not None:
            of_client = self._of[client]
            del of_client[holder]
            if not of_client:
                del self._of[client]
