"""Connections of the fast lane: in order, whole, bounded, and alike to those of aiohttp's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import bundles
from tests.support.agents import Agent, serving, stopped, until
from tests.support.wire import ODD, Answer, Wire, post, tensors, wire

ONES = np.ones((1, 8), np.float32)
CLOSE = "Connection: close"
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def adds(number: float, *headers: str, binary: bool = True) -> bytes:
    """A request to add `number` to ones, eight times."""
    body, more = tensors({"a": ONES * number, "b": ONES}, binary)
    return post("add", body, *more, *headers)


def sums(answer: Answer) -> list[float]:
    assert answer.status == "HTTP/1.1 200 OK"
    length = answer.headers.get("inference-header-content-length")
    if length is None:
        return [float(value) for value in answer.json["outputs"][0]["data"]]
    total = json.loads(answer.body[: int(length)])["outputs"][0]["parameters"]["binary_data_size"]
    return [float(value) for value in np.frombuffer(answer.body[int(length) :][:total], np.float32)]


def in_lane(agent: Agent) -> float:
    return agent.metric("tightfit_lane_connections")


@contextlib.contextmanager
def adding(folder: Path, settings: str) -> Iterator[Agent]:
    config = folder / "agent.toml"
    config.write_text(f"[http]\nconnections = 40\n{settings}")
    with serving(bundles.add(folder / "add.tfb"), folder / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log
        until(lambda: agent.metric("tightfit_in_flight") == 0)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with adding(tmp_path_factory.mktemp("lane"), "body_s = 120\n[requests]\ntimeout_s = 120\n") as agent:
        yield agent


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """One that waits for clients no longer than a test can."""
    with adding(tmp_path_factory.mktemp("hasty"), "body_s = 0.5\nsend_s = 2\n") as agent:
        yield agent


@pytest.fixture
def connection(agent: Agent) -> Iterator[Wire]:
    with wire(agent.port) as connection:
        yield connection


@pytest.mark.parametrize("binary", [True, False])
def test_it_stays_in_the_lane_until_something_else_is_asked(agent: Agent, binary: bool) -> None:
    until(lambda: in_lane(agent) == 0)
    with wire(agent.port) as connection:
        for number in range(5):
            assert sums(connection.ask(adds(number, binary=binary))) == [number + 1] * 8
        assert in_lane(agent) == 1
        assert connection.ask(GET).json == {"live": True}
        assert in_lane(agent) == 0
        assert sums(connection.ask(adds(7, binary=binary))) == [8.0] * 8


def requests() -> dict[str, bytes]:
    """Of every kind that the lane answers, good and bad."""
    two = {"a": ONES, "b": ONES * 2}
    good, length = tensors(two, binary=True)
    text, _ = tensors(two, binary=False)
    mixed, mixed_length = tensors(two, True, outputs=[{"name": "scaled", "parameters": {"binary_data": False}}])
    named, named_length = tensors(two, True, id="seven")
    many = {"a": np.ones((64, 8), np.float32), "b": np.ones((64, 8), np.float32)}
    return {
        "binary": post("add", good, *length),
        "JSON": post("add", text),
        "mixed": post("add", mixed, *mixed_length),
        "an id": post("add", named, *named_length),
        "ids in the head": post("add", good, *length, "X-Request-Id: a-1", f"traceparent: 00-{'1' * 32}-{'2' * 16}-01"),
        "a bad id": post("add", good, *length, "X-Request-Id: a b"),
        "close": post("add", good, *length, CLOSE),
        "keep-alive": post("add", good, *length, "Connection: Keep-Alive"),
        "gzip for an answer": post("add", tensors(many, False)[0], "Accept-Encoding: gzip"),
        "many codings": post("add", text, "Accept-Encoding: gzip, deflate, br"),
        "nothing": post("add", b""),
        "no JSON": post("add", b"{"),
        "no JSON, close": post("add", b"{", CLOSE),
        "a tensor too short": post("add", good[:-1], *length),
        "a tensor too long": post("add", good + b"0", *length),
        "a length that cannot be": post("add", good, f"Inference-Header-Content-Length: {len(good) + 1}"),
        "no length at all": post("add", good, "Inference-Header-Content-Length: -1"),
        "no such input": post("add", tensors({"a": ONES, "c": ONES}, False)[0]),
        "another shape": post("add", tensors({"a": ONES[:, :4], "b": ONES}, False)[0]),
        "two of a key": post("add", text.replace(b'"inputs"', b'"inputs":[],"inputs"')),
        "no such output": post("add", tensors(two, False, outputs=[{"name": "sum"}])[0]),
        "shared memory": post("add", tensors(two, False, parameters={"shared_memory_region": "x"})[0]),
        "a bad priority": post("add", tensors(two, False, parameters={"priority": 256})[0]),
        "a priority": post("add", tensors(two, False, parameters={"priority": 1})[0], "Priority: u=9, i"),
        "too short a time": post("add", good, *length, "Request-Timeout-Ms: 0"),
        "no time": post("add", text, "Request-Timeout-Ms: soon"),
        "enough time": post("add", text, "Request-Timeout-Ms: 20000"),
        "no model": post("sub", text),
        "no version": post("add/versions/1", text),
        "too large": post("add", b" " * (1 << 20)),
        "much too large": post("add", b" " * (3 << 20)),
    }


@pytest.mark.parametrize("name", requests())
def test_both_lanes_answer_alike(agent: Agent, name: str) -> None:
    """Twice each: the second time the lane remembers."""
    request = requests()[name]
    odd = request.replace(b"Host: x\r\n", f"Host: x\r\n{ODD}\r\n".encode(), 1)
    answers = []
    for data in (request, request, odd):
        with wire(agent.port) as connection:
            first = connection.ask(data)
            if first.headers.get("connection") == "close":
                assert connection.is_closed()
            else:
                assert connection.ask(data) == first
            answers.append(first)
    assert answers[0] == answers[1] == answers[2]


ROW = "[1, 1, 1, 1, 1, 1, 1, 1]"


@pytest.mark.parametrize(
    "data",
    [
        "[0,2e0,-3.5,4,5,6,7,8]", f"[{ROW}]", " [1 ,1,1,1,1,1,1,\n1] ", "[1,1,1,1,1,1,1,1e400]", "[1,1,1,1,1,1,1]",
        "[1,1,1,1,1,1,1,1,1]", "[]", "[1,1,1,1,1,1,1,]", "[1,1,1,1,1,1,1,01]", "[1,1,1,1],[1,1,1,1]",
        '["1",1,1,1,1,1,1,1]', "[NaN,1,1,1,1,1,1,1]", "[1,1,1,1,1,1,1,1", "1,1,1,1,1,1,1,1]", "7", "null", "{}",
        f'{ROW},"data":{ROW}', f'{ROW},"parameters":{{}}', f'{ROW}}},{{"name":"b","data":{ROW}', "[1,1,1,1][1,1,1,1]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("which", ["a", "b"])
def test_other_data_in_a_text_that_came_before(agent: Agent, data: str, which: str) -> None:
    """What the lane remembers of a text says nothing of what else stands where its data was."""

    def asked(a: str, b: str) -> bytes:
        inputs = ",".join(
            f'{{"name":"{name}","datatype":"FP32","shape":[1,8],"data":{each}}}' for name, each in (("a", a), ("b", b))
        )
        return f'{{"inputs":[{inputs}]}}'.encode()

    body = asked(*((data, ROW) if which == "a" else (ROW, data)))
    with wire(agent.port) as lane, wire(agent.port) as other:
        for _ in range(2):
            assert sums(lane.ask(post("add", asked(ROW, ROW)))) == [2.0] * 8
            assert lane.ask(post("add", body)) == other.ask(post("add", body, ODD))


def test_a_request_split_at_every_byte(agent: Agent, connection: Wire) -> None:
    request = adds(3)
    for cut in range(1, len(request), 7):
        connection.send(request[:cut])
        # It is there before the rest comes: another connection was answered since.
        agent.request("/v2/health/live") if cut % 5 == 0 else None
        assert sums(connection.ask(request[cut:])) == [4.0] * 8


def test_one_byte_at_a_time(connection: Wire) -> None:
    for byte in adds(5) + adds(6):
        connection.send(bytes([byte]))
    assert sums(connection.read()) == [6.0] * 8
    assert sums(connection.read()) == [7.0] * 8


def test_pipelined_requests_are_answered_in_order(connection: Wire) -> None:
    bad = post("add", b"{")
    connection.send(b"".join([adds(1), bad, *(adds(n, binary=n % 2 == 0) for n in range(300)), bad, adds(2)]))
    assert sums(connection.read()) == [2.0] * 8
    assert connection.read().status == "HTTP/1.1 400 Bad Request"
    for number in range(300):
        assert sums(connection.read()) == [number + 1] * 8
    assert connection.read().status == "HTTP/1.1 400 Bad Request"
    assert sums(connection.read()) == [3.0] * 8


def test_pipelined_requests_across_the_lanes(connection: Wire) -> None:
    connection.send(adds(1) + adds(2) + GET + adds(3) + adds(4, ODD) + adds(5, CLOSE))
    assert [sums(connection.read()) for _ in range(2)] == [[2.0] * 8, [3.0] * 8]
    assert connection.read().json == {"live": True}
    assert [sums(connection.read()) for _ in range(3)] == [[n] * 8 for n in (4.0, 5.0, 6.0)]
    assert connection.is_closed()


def test_a_client_that_sends_and_does_not_read(hasty: Agent) -> None:
    """It is read no further than a bound, and closed when it did not read for as long as an answer may take to leave;
    others are served."""
    request = adds(1)
    until(lambda: in_lane(hasty) == 0)
    with wire(hasty.port) as connection:
        sent = connection.socket.send(request)
        connection.socket.setblocking(False)
        while sent < 40_000_000:
            rest = request[sent % len(request) :]
            try:
                sent += connection.socket.send(rest + request * 100)
            except BlockingIOError:
                if not in_lane(hasty):
                    break
            except ConnectionError:
                break
        assert sent < 40_000_000
        with wire(hasty.port) as other:
            assert sums(other.ask(adds(1))) == [2.0] * 8


def test_a_body_that_does_not_come(hasty: Agent) -> None:
    before = hasty.metric("tightfit_requests_total", reason="slow_body")
    with wire(hasty.port) as connection:
        answer = connection.ask(adds(1)[:-1])
        # What is left of it is not taken for the next request.
        connection.send(adds(1)[-1:])
        assert (answer.status, answer.json) == (
            "HTTP/1.1 408 Request Timeout",
            {"error": "the body did not arrive within 0.5 s"},
        )
        assert hasty.metric("tightfit_requests_total", reason="slow_body") == before + 1
        assert sums(connection.ask(adds(2))) == [3.0] * 8


def test_what_a_body_lacks_is_not_waited_for_long(hasty: Agent) -> None:
    with wire(hasty.port) as connection:
        assert connection.ask(adds(1)[:-1]).status == "HTTP/1.1 408 Request Timeout"
        assert connection.is_closed()


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_within_its_body(agent: Agent, reset: bool) -> None:
    before = agent.metric("tightfit_requests_total", reason="disconnected")
    with wire(agent.port) as connection:
        connection.send(adds(1)[:-1])
        until(lambda: agent.metric("tightfit_in_flight") == 1)
        if reset:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: agent.metric("tightfit_requests_total", reason="disconnected") == before + 1)
    until(lambda: agent.metric("tightfit_in_flight") == 0)


def test_half_a_close_behind_the_last_request(connection: Wire) -> None:
    connection.send(adds(1) + adds(2, CLOSE))
    assert sums(connection.read()) == [2.0] * 8
    connection.socket.shutdown(socket.SHUT_WR)
    assert sums(connection.read()) == [3.0] * 8
    assert connection.is_closed()


# --- with a model that takes as long as it is told


def turns(number: int, *headers: str) -> bytes:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
        {"name": "turns", "datatype": "INT64", "shape": [1], "data": [number]},
    ]
    return post("slow", json.dumps({"inputs": inputs}).encode(), *headers)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.slow(tmp_path_factory.mktemp("slow") / "slow.tfb", slots=2)


@pytest.fixture
def slow_agent(slow: Path, tmp_path: Path) -> Iterator[Agent]:
    """Its engine may stand still for long."""
    config = tmp_path / "agent.toml"
    patience = "timeout_s = 120\ndrain_s = 120\n[engine]\nhang_s = 120\n"
    config.write_text(f"[http]\nhalf_close = true\nbody_s = 120\n[requests]\nqueue_length = 2\n{patience}")
    with serving(slow, tmp_path / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def test_who_leaves_the_queue_or_the_door_is_never_run(slow: Path, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\ntimeout_s = 120\n[engine]\nhang_s = 120\n")
    with serving(slow, tmp_path / "log", "--config", str(config)) as agent, wire(agent.port) as first:
        with stopped(agent.engine_pid):
            first.send(turns(1))
            until(lambda: agent.metric("tightfit_running") == 1)
            with wire(agent.port) as queued, wire(agent.port) as at_the_door:
                queued.send(turns(1))
                until(lambda: agent.metric("tightfit_queue_depth") == 1)
                at_the_door.send(turns(1))
                until(lambda: agent.metric("tightfit_door_depth") == 1)
            until(lambda: agent.metric("tightfit_requests_total", reason="disconnected") == 2)
        assert first.read().status == "HTTP/1.1 200 OK"
        until(lambda: agent.metric("tightfit_in_flight") == 0)
        assert agent.metric("tightfit_executed_requests_total") == 1


def test_who_waits_at_the_door_comes_in_and_stays_in_the_lane(slow_agent: Agent) -> None:
    with wire(slow_agent.port) as first, wire(slow_agent.port) as second, wire(slow_agent.port) as third:
        with stopped(slow_agent.engine_pid):
            first.send(turns(1))
            until(lambda: slow_agent.metric("tightfit_running") == 1)
            second.send(turns(1))
            until(lambda: slow_agent.metric("tightfit_queue_depth") == 1)
            third.send(turns(1)[:-5])
            until(lambda: slow_agent.metric("tightfit_door_depth") == 1)
            third.send(turns(1)[-5:] + turns(2))
        for connection in (first, second, third, third):
            assert connection.read().json["outputs"][0]["data"] == [1, 2, 3, 4]
        assert in_lane(slow_agent) == 3


def test_more_than_the_queue_holds(slow_agent: Agent) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(wire(slow_agent.port)) for _ in range(6)]
        with stopped(slow_agent.engine_pid):
            for connection in connections[:4]:
                connection.send(turns(1))
            until(lambda: slow_agent.metric("tightfit_in_flight") + slow_agent.metric("tightfit_door_depth") == 4)
            for connection in connections[4:]:
                refused = connection.ask(turns(1))
                assert (refused.status, refused.headers["retry-after"]) == ("HTTP/1.1 503 Service Unavailable", "1")
                assert "the queue is full: 2 are waiting" in refused.json["error"]
        assert {connection.read().status for connection in connections[:4]} == {"HTTP/1.1 200 OK"}
        for connection in connections:
            assert connection.ask(turns(1)).status == "HTTP/1.1 200 OK"


def test_half_a_close_where_it_always_means_done(slow_agent: Agent) -> None:
    with wire(slow_agent.port) as connection:
        with stopped(slow_agent.engine_pid):
            connection.send(turns(1) + turns(1))
            until(lambda: slow_agent.metric("tightfit_running") == 1)
            connection.socket.shutdown(socket.SHUT_WR)
        for _ in range(2):
            assert connection.read().json["outputs"][0]["data"] == [1, 2, 3, 4]
        assert connection.is_closed()


def test_the_end_of_the_engine_is_answered(slow_agent: Agent) -> None:
    with wire(slow_agent.port) as connection, wire(slow_agent.port) as other:
        engine = slow_agent.engine_pid
        with stopped(engine):
            connection.send(turns(1))
            until(lambda: slow_agent.metric("tightfit_running") == 1)
            other.send(turns(1))
            until(lambda: slow_agent.metric("tightfit_queue_depth") == 1)
            os.kill(engine, signal.SIGKILL)
            answer = connection.read()
        assert (answer.status, answer.headers["retry-after"]) == ("HTTP/1.1 503 Service Unavailable", "5")
        assert "the engine process was killed by SIGKILL" in answer.json["error"]
        # What waited is run by the next one, and the connection that was answered goes on.
        assert other.read().status == "HTTP/1.1 200 OK"
        assert connection.ask(turns(1)).status == "HTTP/1.1 200 OK"


def test_a_stop_answers_what_runs_and_takes_nothing_new(slow_agent: Agent) -> None:
    with wire(slow_agent.port) as running, wire(slow_agent.port) as idle:
        assert idle.ask(turns(1)).status == "HTTP/1.1 200 OK"
        with stopped(slow_agent.engine_pid):
            running.send(turns(1))
            until(lambda: slow_agent.metric("tightfit_running") == 1)
            slow_agent.process.send_signal(signal.SIGTERM)
            until(lambda: "stopping" in slow_agent.log)
            refused = idle.ask(turns(1))
        assert (refused.status, refused.headers["connection"]) == ("HTTP/1.1 503 Service Unavailable", "close")
        assert refused.json["error"].startswith("the agent is stopping")
        answer = running.read()
        assert (answer.status, answer.headers["connection"]) == ("HTTP/1.1 200 OK", "close")
        assert idle.is_closed()
        assert running.is_closed()
        assert slow_agent.process.wait(60) == 0


def test_who_waits_while_a_version_comes_that_the_lane_leaves(slow: Path, tmp_path: Path) -> None:
    """It begins anew in the other lane, and counts once."""
    config = tmp_path / "agent.toml"
    text = "[http]\nbody_s = 120\n[requests]\ntimeout_s = 120\n"
    text += f'[[models]]\nbundle = "{slow}"\nname = "slow"\n'
    config.write_text(text)
    with serving(None, tmp_path / "log", "--config", str(config)) as agent, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(wire(agent.port)) for _ in range(3)]
        for connection in connections:
            # Two have a slot, and keep it until the last byte comes.
            connection.send(turns(1)[:-1])
        until(lambda: agent.metric("tightfit_in_flight") == 2)
        until(lambda: agent.metric("tightfit_door_depth") == 1)
        # Answers are kept from now on.
        config.write_text(text + "cache_mib = 1\n")
        agent.process.send_signal(signal.SIGHUP)
        until(lambda: in_lane(agent) == 2)
        for connection in connections:
            assert connection.ask(turns(1)[-1:]).json["outputs"][0]["data"] == [1, 2, 3, 4]
        until(lambda: agent.metric("tightfit_requests_total") == 3)
        until(lambda: agent.metric("tightfit_in_flight") == 0)
        assert "Traceback" not in agent.log


def test_idle_connections_are_closed_and_count(slow: Path, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[http]\nkeepalive_s = 3\nconnections = 3\n")
    with serving(slow, tmp_path / "log", "--config", str(config)) as agent:
        with wire(agent.port) as silent, wire(agent.port) as partial, wire(agent.port) as asking:
            partial.send(turns(1)[:30])
            assert asking.ask(turns(1)).status == "HTTP/1.1 200 OK"
            with wire(agent.port) as fourth:
                assert fourth.read_raw().startswith(b"HTTP/1.1 503 ")
            for connection in (silent, partial, asking):
                assert connection.is_closed()
        assert agent.request("/v2/health/live")[0] == 200
