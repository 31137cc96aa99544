"""What one client may use: connections, streams; and that the others do not notice. Clients differ by address here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.streams import pick
from tests.support.wire import LANES, Wire, post

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /v2/events HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def agent_of(folder: Path, settings: str) -> Iterator[Agent]:
    (folder / "agent.toml").write_text(settings)
    with serving(bundles.add(folder / "add.tfb"), folder / "log", "--config", str(folder / "agent.toml")) as agent:
        yield agent
        assert "Traceback" not in agent.log


class From(Wire):
    """A connection from an address of the loopback device, 127.0.0.`last`."""

    def __init__(self, port: int, last: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60, source_address=(f"127.0.0.{last}", 0))
        self._data = b""


@contextlib.contextmanager
def connected(agent: Agent, count: int, last: int, sends: bytes = b"") -> Iterator[Sequence[From]]:
    with contextlib.ExitStack() as stack:
        connections = [From(agent.port, last) for _ in range(count)]
        for connection in connections:
            stack.callback(connection.socket.close)
            if sends:
                connection.send(sends)
        yield connections


@pytest.mark.parametrize("sends", [b"", b"GET /v2/hea", b"POST /v2/models/add/infer HTTP/1.1\r\n"])
def test_a_client_with_all_the_connections_keeps_nobody_out(tmp_path: Path, sends: bytes) -> None:
    """Whatever it has begun on them, in either lane; one on which something goes on is left to it."""
    settings = "[http]\nconnections = 40\n[limits]\nhead_s = 3600\n"
    with agent_of(tmp_path, settings) as agent, connected(agent, 1, 2, STREAM) as (busy,):
        assert b"200" in busy.socket.recv(1 << 16)
        with connected(agent, 200, 2, sends), connected(agent, 10, 3) as others:
            for _ in range(3):
                for other in others:
                    assert other.ask(LIVE).json == {"live": True}
            cut = agent.metric("tightfit_connections_cut_total", reason="client_busy")
            assert cut >= 10
            assert agent.metric("tightfit_streams") == 1


def test_connections_of_one_client(tmp_path: Path) -> None:
    with agent_of(tmp_path, "[limits]\nclient_connections = 3\n") as agent:
        with connected(agent, 3, 2, LIVE) as connections:
            for connection in connections:
                assert connection.read().json == {"live": True}
            with connected(agent, 1, 2) as (fourth,), connected(agent, 1, 3, LIVE) as (other,):
                answer = fourth.read()
                assert (answer.status, answer.headers["retry-after"]) == ("HTTP/1.1 429 Too Many Requests", "1")
                assert "3 connections of this client are open" in answer.json["error"]
                assert fourth.is_closed()
                assert other.read().json == {"live": True}

        def has_room() -> bool:
            with connected(agent, 1, 2) as (again,), contextlib.suppress(OSError, EOFError):
                return again.ask(LIVE).status == "HTTP/1.1 200 OK"
            return False

        until(has_room)


def test_streams_of_one_client(tmp_path: Path) -> None:
    with (
        agent_of(tmp_path, "[limits]\nclient_streams = 2\n") as agent,
        connected(agent, 2, 2, STREAM),
        connected(agent, 1, 3, STREAM),
    ):
        until(lambda: agent.metric("tightfit_streams") == 3)
        with connected(agent, 1, 2, STREAM) as (third,):
            answer = third.read()
            assert (answer.status, answer.headers["retry-after"]) == ("HTTP/1.1 429 Too Many Requests", "1")
            assert "2 streams of this client are open" in answer.json["error"]


def asks(agent: Agent, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    body = {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8} for name in ("a", "b")
        ]
    }  # fmt: skip
    status, _, answered = agent.post(body, headers)
    return status, answered


@pytest.mark.parametrize("lane", LANES)
def test_a_client_that_asks_too_often(tmp_path: Path, lane: str) -> None:
    with agent_of(tmp_path, "[limits]\nrequests_per_s = 0.001\nburst = 3\n") as agent:
        assert [asks(agent, LANES[lane])[0] for _ in range(5)] == [200, 200, 200, 429, 429]
        _, headers = asks(agent, LANES[lane])
        # What it has to wait is what the bucket says, and no constant.
        assert 900 < int(headers["Retry-After"]) <= 1000
        assert agent.metric("tightfit_requests_total", reason="rate_limited") == 3
        assert agent.request("/v2/health/live")[0] == 200


@pytest.mark.parametrize("lane", LANES)
def test_requests_of_one_client_at_once(tmp_path: Path, lane: str) -> None:
    with agent_of(tmp_path, "[limits]\nclient_requests = 1\n") as agent, connected(agent, 1, 2) as (slow,):
        body = b'{"inputs":[]}'
        slow.send(post(agent.name, body, *(f"{k}: {v}" for k, v in LANES[lane].items()))[:-1])
        until(lambda: agent.metric("tightfit_in_flight") == 1)
        with connected(agent, 1, 2) as (second,):
            answer = second.ask(post(agent.name, body, *(f"{k}: {v}" for k, v in LANES[lane].items())))
            assert answer.status == "HTTP/1.1 429 Too Many Requests"
            assert "1 requests of this client go on" in answer.json["error"]
        assert asks(agent, LANES[lane])[0] == 200
        assert slow.ask(body[-1:]).status == "HTTP/1.1 400 Bad Request"
        assert slow.ask(post(agent.name, body)).status == "HTTP/1.1 400 Bad Request"


@pytest.mark.parametrize("lane", LANES)
def test_a_model_that_fails_again_and_again_is_let_rest(tmp_path: Path, lane: str) -> None:
    """For the client that has it fail; the others go on, and with what they succeed it is tried again."""
    (tmp_path / "agent.toml").write_text("[limits]\nbreaker_failures = 3\nbreaker_s = 3600\n")
    bundle = bundles.picking(tmp_path / "picking.tfb")
    headers = [f"{key}: {value}" for key, value in LANES[lane].items()]
    good, bad = (post("picking", pick("", 1, row).strip(), *headers) for row in (0, 99))
    with serving(bundle, tmp_path / "log", "--config", str(tmp_path / "agent.toml")) as agent:
        with connected(agent, 1, 2) as (failing,), connected(agent, 1, 3) as (other,):
            assert [failing.ask(bad).status.split()[1] for _ in range(5)] == ["500"] * 3 + ["503"] * 2
            answer = failing.ask(good)
            assert answer.status == "HTTP/1.1 503 Service Unavailable"
            assert 3500 < int(answer.headers["retry-after"]) <= 3600
            assert agent.metric("tightfit_breaker_open") == 1
            assert other.ask(good).status == "HTTP/1.1 200 OK"
            assert agent.metric("tightfit_breaker_open") == 0
            assert failing.ask(good).status == "HTTP/1.1 200 OK"
        with connected(agent, 1, 2, b"GET /v2/events?since=0 HTTP/1.1\r\nHost: x\r\n\r\n") as (events,):
            said = b""
            while said.count(b"event: breaker") < 2:
                said += events.socket.recv(1 << 16)
        assert b'"open":true' in said
        assert b'"open":false' in said
        assert "Traceback" not in agent.log
