"""What all connections of the fast lane share: which requests it takes, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from agent.access.access import Access
from agent.config import Config
from agent.errors import RefusedError
from agent.gateway import Gateway
from agent.http.lane.connection import Connection
from agent.http.lane.heads import Head, Heads
from agent.http.lane.ways import Way, way_of
from agent.http.tempo import Tempo
from agent.repository import Repository
from agent.served import Entry, Served

# Versions come and go; what is remembered of those that went is dropped with all else.
_REMEMBERED = 64


class Lane:
    """The lane of one gateway. `largest` says how many bytes a request of a version can have; names that are `taken`
    are no models' but ensembles'."""

    def __init__(
        self,
        gateway: Gateway,
        repository: Repository,
        access: Access,
        config: Config,
        largest: Callable[[Served], int],
        taken: Collection[str],
    ) -> None:
        self.gateway, self.repository, self.access, self.http = gateway, repository, access, config.http
        self.tempo = Tempo(config, gateway.telemetry)
        self.heads = Heads(config.http.header_bytes, config.http.headers)
        self.connections: set[Connection] = set()
        self._largest, self._taken = largest, frozenset(taken)
        self._ways: dict[str, Way | None] = {}
        gateway.telemetry.watch_one(
            "tightfit_lane_connections", "Connections that the fast lane serves.", lambda: len(self.connections)
        )

    def connection(self, otherwise: Callable[[], asyncio.Protocol]) -> Connection:
        """For a client that connects; `otherwise` makes what serves the connection when the lane does not."""
        return Connection(self, otherwise)

    def way_for(self, head: Head) -> tuple[Entry, Way] | None:
        """The model that is asked, and how the lane answers for it, where it can now. Has no effect."""
        if head.model in self._taken:
            return None
        try:
            entry = self.repository.find(head.model, head.version)
        except RefusedError:
            return None
        served = entry.active
        if served is None or entry.options.results_bytes:
            return None
        if head.version is not None and head.version != served.version:
            return None
        if entry.options.lighter and self.gateway.overload.step.lighter:
            return None
        way = self.way(served)
        return (entry, way) if way is not None and way.takes(head.length, head.header_length) else None

    def way(self, served: Served) -> Way | None:
        """How it answers for that version, if it does."""
        try:
            return self._ways[served.key]
        except KeyError:
            if len(self._ways) >= _REMEMBERED:
                self._ways.clear()
            way = self._ways[served.key] = way_of(served, self._largest(served))
            return way

    def close(self) -> None:
        """Close what is left of the connections: what runs for them is given up."""
        for connection in list(self.connections):
            connection.close()
