"""Which broker is asked next. Pure.

They are tried in the order in which they are named, from the first again after each connection that ended: it is named
first because it is wanted most. A broker may send its clients elsewhere (Server Reference, MQTT 5.0, section 4.11);
that is followed for a few steps, so that two brokers that name each other are not asked for ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# A referral to a region and to a node in it are two.
MOST_REFERRALS = 3
_ADDRESS = re.compile(
    r"(?:(mqtts?)://)?(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9][A-Za-z0-9._-]{0,252}))(?::(\d{1,5}))?/?", re.ASCII
)
_PORTS = {"mqtt": 1883, "mqtts": 8883}


class Broker(NamedTuple):
    """Where one is."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"


def parse_broker(text: str) -> Broker:
    """Of `mqtts://HOST:PORT` or `mqtt://HOST:PORT`. Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not found[1] or not 0 < int(found[4] or _PORTS[found[1]]) < 65_536:
        raise ValueError(f"{text!r} is no broker: mqtts://HOST:PORT, or mqtt://127.0.0.1:PORT without TLS")
    return Broker(found[2] or found[3], int(found[4] or _PORTS[found[1]]), found[1] == "mqtts")


def referred(text: str, by: Broker) -> Broker | None:
    """The first of those in a Server Reference, spoken to as the one that named it was: a broker cannot take TLS
    away. None where there is none that we understand."""
    for each in text.split():
        found = _ADDRESS.fullmatch(each)
        port = int(found[4]) if found and found[4] else by.port
        if found and 0 < port < 65_536:
            return Broker(found[2] or found[3], port, by.tls)
    return None


class Brokers:
    """`current` is the one to ask; there is one at least."""

    def __init__(self, named: Sequence[Broker]) -> None:
        self._named = tuple(named)
        self._at = 0
        self._referral: Broker | None = None
        self._referrals = 0

    @property
    def current(self) -> Broker:
        return self._referral or self._named[self._at]

    def connected(self) -> None:
        """It let us in. What it was referred by is kept until the connection ends."""
        self._referrals = 0

    def failed(self) -> bool:
        """It did not let us in: ask the next one. True when all were asked."""
        self._referrals = 0
        if self._referral is not None:
            self._referral = None
            return False
        self._at = (self._at + 1) % len(self._named)
        return self._at == 0

    def lost(self) -> None:
        """The connection ended: begin with the first."""
        self._at, self._referral = 0, None

    def refer(self, to: str) -> bool:
        """The broker named another: whether that is asked next."""
        other = referred(to, self.current)
        if other is None or other == self.current or self._referrals == MOST_REFERRALS:
            return False
        self._referral = other
        self._referrals += 1
        return True
