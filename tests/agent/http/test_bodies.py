"""Content codings and their limits; clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent.config import Config
from agent.errors import Reason, RefusedError
from agent.http.bodies import add_piece, choose_encoding, compress, decompress, read_body
from agent.http.protocol import Protocol, runner_of
from agent.http.tempo import Tempo
from agent.telemetry import Telemetry

LIMIT = 1 << 16


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


@given(st.binary(max_size=500), st.sampled_from(["gzip", "deflate"]))
def test_round_trip(data: bytes, encoding: str) -> None:
    assert decompress(compress(data, encoding), encoding, LIMIT) == data


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", b"data"), ("identity", b"data"), ("gzip", gzip.compress(b"data")), ("X-GZIP", gzip.compress(b"data")),
        ("deflate", zlib.compress(b"data")), (" Deflate ", raw_deflate(b"data")),
    ],
)  # fmt: skip
def test_codings_that_clients_send(encoding: str, body: bytes) -> None:
    assert decompress(body, encoding, LIMIT) == b"data"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"data"), ("gzip", b""), ("gzip", gzip.compress(b"data")[:-3]),
        ("gzip", gzip.compress(b"data") + b"x"),
        ("deflate", b"data"), ("gzip", b"\x1f\x8b" + b"\xff" * 50), ("deflate", raw_deflate(b"data" * 99)[:-5]),
    ],
)  # fmt: skip
def test_broken_bodies(encoding: str, body: bytes) -> None:
    with pytest.raises(RefusedError, match="not valid") as caught:
        decompress(body, encoding, LIMIT)
    assert caught.value.reason is Reason.BAD_REQUEST


def test_a_bomb_is_refused_in_bounded_memory() -> None:
    bomb = gzip.compress(bytes(200 << 20), compresslevel=1)
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError) as caught:
            decompress(bomb, "gzip", LIMIT)
        assert caught.value.reason is Reason.TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < len(bomb) + 4 * LIMIT
    finally:
        tracemalloc.stop()


def test_other_codings_are_named() -> None:
    with pytest.raises(RefusedError, match="available: gzip, deflate") as caught:
        decompress(b"x", "br", LIMIT)
    assert caught.value.reason is Reason.UNSUPPORTED_ENCODING


@pytest.mark.parametrize(
    ("accept", "binary", "nbytes", "expected"),
    [
        (None, False, 5000, None),
        ("gzip", False, 100, None),
        ("gzip", False, 5000, "gzip"),
        ("deflate", True, 5000, "deflate"),
        ("gzip, deflate", True, 5000, None),
        ("gzip, deflate", False, 5000, "gzip"),
        ("gzip;q=0, deflate;q=0.5", False, 5000, "deflate"),
        ("br", False, 5000, None),
        ("gzip;q=x", False, 5000, None),
        ("", False, 5000, None),
    ],
)
def test_which_coding_a_response_gets(accept: str | None, binary: bool, nbytes: int, expected: str | None) -> None:
    assert choose_encoding(accept, binary, nbytes) == expected


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_leaves_with_the_last_byte_of_its_body(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def serve() -> None:
        came: asyncio.Queue[web.Request] = asyncio.Queue()
        became: asyncio.Queue[str] = asyncio.Queue()

        async def handler(request: web.Request) -> web.Response:
            came.put_nowait(request)
            try:
                await read_body(request, LIMIT, 10)
                await asyncio.sleep(60)
            except (ConnectionError, asyncio.CancelledError):
                became.put_nowait("left")
                raise
            became.put_nowait("stayed")
            return web.Response()

        application = web.Application()
        application.router.add_post("/", handler)
        runner = runner_of(application, 1)
        await runner.setup()
        server = await asyncio.get_running_loop().create_server(
            partial(Protocol, runner.server, Tempo(Config(), Telemetry())), "127.0.0.1", 0
        )
        for _ in range(10):
            client = socket.create_connection(server.sockets[0].getsockname())
            client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n1")
            await came.get()
            # The server's loop, which is this one, finds both at once.
            client.sendall(b"2")
            client.close()
            assert await became.get() == "left"
        server.close()
        await runner.cleanup()

    with contextlib.closing(loop()) as running:
        running.run_until_complete(serve())


@pytest.mark.parametrize("nbytes", [2, 3, 100, 4095])
def test_a_body_in_small_pieces_holds_little_more_than_itself(nbytes: int) -> None:
    size = 1 << 19
    parts: list[bytes] = []
    tracemalloc.start()
    try:
        for at in range(0, size, nbytes):
            add_piece(parts, bytes((at & 255, at >> 8 & 255)) + bytes(nbytes - 2))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < size * 1.25


@given(st.lists(st.one_of(st.binary(max_size=9), st.integers(0, 3).map(lambda many: bytes(many * 4095)))))
def test_pieces_stay_in_order(pieces: list[bytes]) -> None:
    parts: list[bytes] = []
    for piece in pieces:
        add_piece(parts, piece)
    assert b"".join(parts) == b"".join(pieces)
    assert all(len(one) >= 4096 or len(next_) >= 4096 for one, next_ in pairwise(parts))
