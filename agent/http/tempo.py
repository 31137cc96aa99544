"""What every connection is held to, whichever protocol serves it: how many there are, and how slow they may be."""

from __future__ import annotations

import asyncio
import time

from agent.config import Config
from agent.errors import Reason
from agent.http.answers import refusal
from agent.http.lane.ways import answer
from agent.http.sockets import is_secure, untaken
from agent.limits.pace import Pace
from agent.limits.places import Holder, Places
from agent.request import Refused
from agent.telemetry import Telemetry


class Tempo:
    """Shared by all connections."""

    def __init__(self, config: Config, telemetry: Telemetry) -> None:
        self.http, self.limits = config.http, config.limits
        self.places = Places(config.http.connections, config.limits.client_connections)
        self._telemetry = telemetry

    def let_in(self, holder: Holder, client: str, transport: asyncio.WriteTransport) -> bool:
        """Give a new connection a place, another's if need be; where there is none it is told so, and closed."""
        found = self.places.ask(client)
        if isinstance(found, Refused):
            self.cut(transport, found.reason, found.message)
            return False
        if found is not None:
            self._telemetry.cut(Reason.CLIENT_BUSY)
            found.give_up()
        self.places.add(holder, client)
        return True

    def cut(self, transport: asyncio.WriteTransport, reason: Reason, message: str = "") -> None:
        """End a connection that is nobody's request: with an answer, where there is something to say."""
        self._telemetry.cut(reason)
        if message:
            transport.write(closing(reason, message))
            transport.close()
        else:
            transport.abort()

    def late_head(self, transport: asyncio.WriteTransport) -> None:
        """End one whose client began a head and does not come to its end."""
        self.cut(transport, Reason.SLOW_HEAD, f"the head did not arrive within {self.limits.head_s:.3g} s")

    def see_out(self, transport: asyncio.Transport) -> Reader | None:
        """Of a connection that is closed when all is sent: what cuts it off if its client does not take that. TLS has a
        limit of its own."""
        if not transport.is_closing() or is_secure(transport) or not transport.get_write_buffer_size():
            return None
        return Reader(self, transport)

    def pace(self, whole_s: float) -> Pace:
        """That of what begins now."""
        return Pace(whole_s, self.limits.bytes_per_s, self.limits.pace_s, time.monotonic())


class Reader:
    """Watches a client while more waits for it than may: all of it must leave within `send_s`, and keep pace. One that
    does not is cut off, and `gave_up` then."""

    __slots__ = ("_closing", "_pace", "_tempo", "_timer", "_transport", "_waits", "gave_up")

    def __init__(self, tempo: Tempo, transport: asyncio.Transport) -> None:
        """Begin."""
        self.gave_up = False
        self._tempo, self._transport = tempo, transport
        # Closing does not end it, but being cut off by somebody else.
        self._closing = transport.is_closing()
        self._pace, self._waits = tempo.pace(tempo.http.send_s), untaken(transport)
        self._arm()

    def close(self) -> None:
        """It has taken enough."""
        self._timer.cancel()

    def _arm(self) -> None:
        left_s = self._pace.left_s(time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def _look(self) -> None:
        if self._transport.is_closing() and not self._closing:
            return
        if self._pace.too_slow(self._waits - untaken(self._transport), time.monotonic()):
            self.gave_up = True
            self._tempo.cut(self._transport, Reason.SLOW_READER)
        else:
            self._arm()


def closing(reason: Reason, message: str) -> bytes:
    """An answer to what is no request, behind which the connection is closed."""
    response = refusal(reason, message)
    headers = {name: value for name, value in response.headers.items() if name != "Content-Length"}
    return answer(response.status, headers, bytes(response.body or b""), {}, close=True)  # type: ignore[arg-type]
