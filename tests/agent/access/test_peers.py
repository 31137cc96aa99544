"""Where somebody comes from, and as what process."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from agent.access.peers import is_local, process_of


class Transport:
    """What a connection tells of itself."""

    def __init__(self, end: socket.socket | None, peer: Any) -> None:
        self._extra = {"socket": end, "peername": peer}

    def get_extra_info(self, name: str) -> Any:
        return self._extra.get(name)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        (("127.0.0.1", 1), True),
        (("127.8.0.1", 1), True),
        (("::1", 1, 0, 0), True),
        (("::ffff:127.0.0.1", 1, 0, 0), True),
        (("192.168.0.1", 1), False),
        (("::ffff:192.168.0.1", 1, 0, 0), False),
        (("fe80::1%eth0", 1, 0, 2), False),
        (("10.0.0.1", 1), False),
        ("", False),
        (None, False),
        ((), False),
    ],
)
def test_the_loopback_is_this_machine(peer: Any, local: bool) -> None:
    with socket.socket() as end:
        assert is_local(Transport(end, peer)) is local  # type: ignore[arg-type]


def test_processes() -> None:
    one, other = socket.socketpair()
    with one, other:
        found = process_of(Transport(one, ""))  # type: ignore[arg-type]
        assert found is not None
        assert found[0] == os.geteuid()
        assert {os.getegid(), *os.getgroups()} == set(found[1])
        assert is_local(Transport(one, ""))  # type: ignore[arg-type]
    with socket.socket() as end:
        assert process_of(Transport(end, ("127.0.0.1", 1))) is None  # type: ignore[arg-type]
