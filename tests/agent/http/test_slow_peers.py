"""Clients that send or take next to nothing are let go, in both lanes, and nobody waits for them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.wire import LANES, ODD, Wire, post, wire

# All that is not slow is done long before the long limits, so that those of [limits] are what ends the slow.
SETTINGS = """
[http]
keepalive_s = 3600
body_s = 3600
send_s = 3600
[requests]
timeout_s = 3600
[streams]
idle_s = 3600
[limits]
head_s = 1.0
bytes_per_s = 1000
pace_s = 1.0
send_buffer_kib = 64
"""
SHAPE = (512, 512)
BODY = (
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[512,512],"parameters":{"binary_data_size":1048576}}],'
    b'"parameters":{"binary_data_output":true}}'
)
BINARY = f"Inference-Header-Content-Length: {len(BODY)}"
LINES = {"fast lane": b"POST /v2/models/x/infer HTTP/1.1\r\nHost: x\r\n", "aiohttp": b"GET /v2 HTTP/1.1\r\nHost: x\r\n"}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("slow-peers")
    (folder / "agent.toml").write_text(SETTINGS)
    bundle = bundles.identity(folder / "x.tfb", DType.FLOAT32, SHAPE)
    with serving(bundle, folder / "log", "--config", str(folder / "agent.toml")) as agent:
        yield agent
        until(lambda: agent.metric("tightfit_in_flight") == 0)
        assert "Traceback" not in agent.log


@contextlib.contextmanager
def dripping(connection: Wire, data: bytes) -> Iterator[None]:
    """Sends a byte now and then, until the block is left."""
    stop = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            for byte in itertools.cycle(data):
                if stop.wait(0.05):
                    return
                connection.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def cut(agent: Agent, reason: str) -> float:
    return agent.metric("tightfit_connections_cut_total", reason=reason)


@pytest.mark.parametrize("lane", LINES)
def test_a_head_that_does_not_end(agent: Agent, lane: str) -> None:
    before = cut(agent, "slow_head")
    with wire(agent.port) as connection:
        connection.send(LINES[lane])
        with dripping(connection, b"x: y\r\n"):
            answer = connection.read()
            assert answer.status == "HTTP/1.1 408 Request Timeout"
            assert (answer.headers["connection"], answer.json) == (
                "close",
                {"error": "the head did not arrive within 1 s"},
            )
    assert cut(agent, "slow_head") == before + 1


@pytest.mark.parametrize("lane", LANES)
def test_the_next_head_that_does_not_end(agent: Agent, lane: str) -> None:
    """Behind one that was answered, and in one read with its end."""
    body = BODY + bytes(1 << 20)
    with wire(agent.port) as connection:
        connection.send(post(agent.name, body, BINARY, *(f"{k}: {v}" for k, v in LANES[lane].items())))
        assert connection.read().status == "HTTP/1.1 200 OK"
        connection.send(LINES[lane])
        assert connection.read().status == "HTTP/1.1 408 Request Timeout"
        assert connection.is_closed()


@pytest.mark.parametrize("odd", [(), (ODD,)], ids=LANES)
def test_blank_lines_begin_no_head(agent: Agent, odd: tuple[str, ...]) -> None:
    """Some clients send one behind a body; the connection then waits for the next request as long as any."""
    body = BODY + bytes(1 << 20)
    before = cut(agent, "slow_head")
    with wire(agent.port) as connection, wire(agent.port) as other:
        connection.send(post(agent.name, body, BINARY, *odd) + b"\r\n")
        assert connection.read().status == "HTTP/1.1 200 OK"
        other.send(LINES["aiohttp"])
        assert other.read().status == "HTTP/1.1 408 Request Timeout"
        connection.send(post(agent.name, body, BINARY, *odd))
        assert connection.read().status == "HTTP/1.1 200 OK"
    assert cut(agent, "slow_head") == before + 1


@pytest.mark.parametrize("odd", [(), (ODD,)], ids=LANES)
def test_a_body_that_comes_byte_by_byte(agent: Agent, odd: tuple[str, ...]) -> None:
    with wire(agent.port) as connection:
        connection.send(post(agent.name, BODY + bytes(1 << 20), BINARY, *odd)[: -1 << 20])
        with dripping(connection, b"\0"):
            answer = connection.read()
        assert answer.status == "HTTP/1.1 408 Request Timeout"
        assert answer.json == {"error": "the body did not arrive at 1000 bytes a second"}
    until(lambda: agent.metric("tightfit_in_flight") == 0)


def test_a_record_that_comes_byte_by_byte(agent: Agent) -> None:
    head = b"POST /v2/models/%b/stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
    with wire(agent.port) as connection:
        connection.send(head % agent.name.encode() + b"Content-Length: 100000\r\n\r\n{")
        with dripping(connection, b" "):
            data = connection.read_raw()
    assert b'"reason":"slow_body"' in data
    assert b"a record did not arrive at 1000 bytes a second" in data


@pytest.mark.parametrize("odd", [(), (ODD,)], ids=LANES)
def test_who_takes_next_to_nothing_of_an_answer_is_let_go(agent: Agent, odd: tuple[str, ...]) -> None:
    before = agent.metric("tightfit_requests_total", reason="slow_reader") + cut(agent, "slow_reader")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", agent.port))
        client.sendall(post(agent.name, BODY + bytes(1 << 20), BINARY, *odd))
        until(
            lambda: agent.metric("tightfit_requests_total", reason="slow_reader") + cut(agent, "slow_reader") > before
        )
    until(lambda: agent.metric("tightfit_in_flight") == 0)


@pytest.mark.parametrize("odd", [(), (ODD,)], ids=LANES)
def test_who_asks_and_never_reads_is_read_no_more(tmp_path: Path, odd: tuple[str, ...]) -> None:
    """Small answers stand in no slot: the agent keeps neither more of them nor of what is asked than it has to."""
    (tmp_path / "agent.toml").write_text(SETTINGS.replace("pace_s = 1.0", "pace_s = 3.0"))
    with serving(
        bundles.add(tmp_path / "add.tfb"), tmp_path / "log", "--config", str(tmp_path / "agent.toml")
    ) as agent:
        data = b"".join(struct.pack("<f", at) for at in range(16))
        text = (
            b'{"inputs":[{"name":"a","datatype":"FP32","shape":[1,8],"parameters":{"binary_data_size":32}},'
            b'{"name":"b","datatype":"FP32","shape":[1,8],"parameters":{"binary_data_size":32}}]}'
        )
        asks = post(agent.name, text + data, f"Inference-Header-Content-Length: {len(text)}", *odd) * 100
        sent = 0
        with wire(agent.port) as connection:
            connection.socket.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while sent < 1 << 30:
                    sent += connection.socket.send(asks)
        # What both kernels and the agent hold, and not what a loopback device carries in seconds.
        assert sent < 64 << 20
        until(lambda: agent.metric("tightfit_connections_cut_total", reason="slow_reader") == 1)
        assert "Traceback" not in agent.log


SMALL = BODY.replace(b"512,512", b"120,128").replace(b"1048576", b"61440")


@contextlib.contextmanager
def of_small_answers(tmp_path: Path, settings: str) -> Iterator[Agent]:
    (tmp_path / "agent.toml").write_text(settings)
    bundle = bundles.identity(tmp_path / "small.tfb", DType.FLOAT32, (120, 128))
    with serving(bundle, tmp_path / "log", "--config", str(tmp_path / "agent.toml")) as agent:
        yield agent
        assert "Traceback" not in agent.log


def asking_without_reading(agent: Agent, count: int, odd: tuple[str, ...]) -> socket.socket:
    """Connected, and so many requests of 60 KiB sent, of which the last asks to close. What then waits for the client
    may be more than its kernel and the agent's take, and less than what the agent stops reading at."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect(("127.0.0.1", agent.port))
    binary = f"Inference-Header-Content-Length: {len(SMALL)}"
    for at in range(count):
        last = ("Connection: close",) if at == count - 1 else ()
        client.sendall(post(agent.name, SMALL + bytes(61440), binary, *odd, *last))
    return client


@pytest.mark.parametrize("odd", [(), (ODD,)], ids=LANES)
def test_who_asks_to_close_and_does_not_read_is_let_go(tmp_path: Path, odd: tuple[str, ...]) -> None:
    with of_small_answers(tmp_path, SETTINGS.replace("_kib = 64", "_kib = 16")) as agent:
        for at, count in enumerate((1, 2, 3), 1):
            with asking_without_reading(agent, count, odd):
                until(lambda: cut(agent, "slow_reader") == at)  # noqa: B023 - over before the next turn


@pytest.mark.parametrize("odd", [(), (ODD,)], ids=LANES)
def test_who_does_not_read_the_last_answer_has_its_place_until_it_has(tmp_path: Path, odd: tuple[str, ...]) -> None:
    settings = SETTINGS.replace("[http]", "[http]\nconnections = 8").replace("pace_s = 1.0", "pace_s = 3600")
    with of_small_answers(tmp_path, settings) as agent, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(asking_without_reading(agent, 2, odd)) for _ in range(8)]
        for client in clients:
            assert client.recv(1, socket.MSG_PEEK)
        with wire(agent.port) as newcomer:
            answer = newcomer.read()
            assert answer.status == "HTTP/1.1 503 Service Unavailable"
            assert "8 connections are open" in answer.json["error"]
        reader = clients[0].makefile("rb")
        stack.enter_context(reader)
        assert len(reader.read()) > 2 * 61440
        until(lambda: agent.request("/v2/health/live")[0] == 200)
