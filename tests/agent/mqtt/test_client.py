from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from agent.mqtt.backoff import Trouble
from agent.mqtt.packet import Outgoing
from agent.mqtt.wire import Wire
from tests.support import mqtt_packets as packets


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """A wire that takes packets of 1000 bytes, and the other end."""
    near, far = socket.socketpair()
    near.setblocking(False)
    wire = Wire(near, 1000)
    yield wire, far
    wire.close()
    far.close()


def everything(wire: Wire) -> bytes:
    data = b""
    try:
        while more := wire.recv(7):
            data += more
    except BlockingIOError:
        pass
    return data


def test_what_comes_in_any_pieces_comes_out_as_it_was(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    draws = random.Random(4)
    sent = b"".join(packets.publish(Outgoing("t", draws.randbytes(draws.randrange(900)))) for _ in range(100))
    got, at = b"", 0
    while at < len(sent):
        size = draws.choice([1, 2, 3, 500, 4000])
        far.sendall(sent[at : at + size])
        at += size
        got += everything(wire)
    assert got == sent
    assert wire.problem is None


def piecewise(wire: Wire, far: socket.socket, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        far.sendall(data[at : at + size])
        everything(wire)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\x30\xe9\x07", "a packet of 1001 bytes, where at most 1000 may come"),
        (b"\x30\xff\xff\xff\xff", "a packet without a length"),
        (b"\x34\x05", "a message of QoS 2"),
        (b"\x3d\x05", "a message of QoS 2"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 100])
def test_what_claims_too_much_ends_it_before_it_is_kept(
    ends: tuple[Wire, socket.socket], sent: bytes, words: str, pieces: int
) -> None:
    wire, far = ends
    whole = packets.publish(Outgoing("t", b"x" * 900)) + sent
    with pytest.raises(ConnectionError):
        piecewise(wire, far, whole, pieces)
    assert wire.problem is not None
    assert wire.problem[0] is Trouble.PROTOCOL
    assert words in wire.problem[1]


def test_a_packet_of_the_largest_size_is_taken(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.sendall(b"\x30\xe8\x07" + b"x" * 1000)
    assert len(everything(wire)) == 1003


def test_what_is_written_is_bounded_while_nobody_reads(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while taken < 100 << 20:
            taken += wire.send(b"x" * 1000)
    assert taken < 100 << 20
    assert wire.unsent < (64 << 10) + 1000
    got = 0
    while got < taken:
        got += len(far.recv(1 << 20))
        wire.flush()
    assert (got, wire.unsent) == (taken, 0)


def test_an_end_is_told_as_one_of_the_brokers(ends: tuple[Wire, socket.socket]) -> None:
    wire, far = ends
    far.close()
    assert wire.recv(1) == b""
    assert wire.problem == (Trouble.CLOSED, "the broker closed the connection")
