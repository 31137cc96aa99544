"""Deadlines, full queues, clients that leave, and an engine that dies: always an answer, never a hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import bundles
from tests.support.agents import Agent, serving, stopped
from tests.support.wire import LANES


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.slow(tmp_path_factory.mktemp("slow") / "slow.tfb", slots=2)


@pytest.fixture
def agent(bundle: Path, tmp_path: Path) -> Iterator[Agent]:
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\nqueue_length = 3\ntimeout_s = 120\ndrain_s = 60\n[engine]\nhang_s = 120\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(params=LANES)
def either(agent: Agent, request: pytest.FixtureRequest) -> Agent:
    """The agent, asked by either lane."""
    return replace(agent, headers=LANES[request.param])


@pytest.fixture(scope="module")
def turns_per_s(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How many turns of its loop this machine does in a second."""
    turns = 20_000
    with serving(bundle, tmp_path_factory.mktemp("calibrate") / "log") as agent:
        started = time.perf_counter()
        assert agent.post(request_of(turns))[0] == 200
        return turns / (time.perf_counter() - started)


def request_of(turns: float, **parameters: Any) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "turns", "datatype": "INT64", "shape": [1], "data": [int(turns)]},
        ],
    }


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


Answers = list[Future[tuple[int, bytes, dict[str, str]]]]


def until(agent: Agent, name: str, value: float, **labels: str) -> None:
    end = time.monotonic() + 10
    while agent.metric(name, **labels) != value:
        assert time.monotonic() < end, f"{name} stays {agent.metric(name, **labels)}"
        time.sleep(0.01)


def test_more_than_the_queue_holds(either: Agent, threads: ThreadPoolExecutor, turns_per_s: float) -> None:
    answers: Answers = [threads.submit(either.post, request_of(turns_per_s * 0.3)) for _ in range(10)]
    done = [answer.result() for answer in answers]
    assert sorted(status for status, _, _ in done) == [200] * 5 + [503] * 5
    for status, body, headers in done:
        if status == 503:
            assert headers["Retry-After"] == "1"
            assert "the queue is full: 3 are waiting" in json.loads(body)["error"]
    assert either.metric("tightfit_in_flight") == 0


def test_a_deadline_is_kept_by_a_timer(agent: Agent, threads: ThreadPoolExecutor) -> None:
    with stopped(agent.engine_pid):
        long = threads.submit(agent.post, request_of(1))
        until(agent, "tightfit_running", 1)
        started = time.perf_counter()
        status, body, _ = agent.post(request_of(1, timeout=200_000))
        took = time.perf_counter() - started
    assert (status, "deadline" in json.loads(body)["error"]) == (504, True)
    assert took > 0.19
    assert long.result()[0] == 200


def test_a_deadline_in_the_head_holds_at_the_door(bundle: Path, tmp_path: Path, turns_per_s: float) -> None:
    """Where the body that could name one is not read yet."""
    with serving(bundle, tmp_path / "log") as agent, ThreadPoolExecutor(2) as threads:
        long = [threads.submit(agent.post, request_of(turns_per_s)) for _ in range(2)]
        until(agent, "tightfit_in_flight", 2)
        started = time.perf_counter()
        status, body, _ = agent.post(request_of(1), {"Request-Timeout-Ms": "200"})
        assert (status, "deadline" in json.loads(body)["error"]) == (504, True)
        assert time.perf_counter() - started < 0.9
        status, body, _ = agent.post(request_of(1), {"Request-Timeout-Ms": "soon"})
        assert (status, "Request-Timeout-Ms is 'soon'" in json.loads(body)["error"]) == (400, True)
        assert [answer.result()[0] for answer in long] == [200, 200]


def test_who_is_in_a_hurry_goes_first(tmp_path: Path, threads: ThreadPoolExecutor, turns_per_s: float) -> None:
    """By the head at the door, and by the parameter in the queue."""
    bundle = bundles.slow(tmp_path / "slow.tfb", slots=1)
    with serving(bundle, tmp_path / "log") as agent:
        done: list[str] = []

        def post(name: str, headers: dict[str, str]) -> None:
            assert agent.post(request_of(turns_per_s * 0.1), headers)[0] == 200
            done.append(name)

        first = threads.submit(agent.post, request_of(turns_per_s))
        until(agent, "tightfit_running", 1)
        later = []
        for name, headers in {"last": {"Priority": "u=7"}, "middle": {}, "first": {"Priority": "u=0, i"}}.items():
            later.append(threads.submit(post, name, headers))
            until(agent, "tightfit_door_depth", len(later))
        for answer in (first, *later):
            answer.result()
        assert done == ["first", "middle", "last"]
    bundle = bundles.slow(tmp_path / "wide.tfb", slots=4)
    with serving(bundle, tmp_path / "log") as agent:
        done.clear()

        def post_in(name: str, priority: int) -> None:
            assert agent.post(request_of(turns_per_s * 0.1, priority=priority))[0] == 200
            done.append(name)

        first = threads.submit(agent.post, request_of(turns_per_s))
        until(agent, "tightfit_running", 1)
        later = []
        for name, priority in {"last": 255, "middle": 0, "first": 1}.items():
            later.append(threads.submit(post_in, name, priority))
            until(agent, "tightfit_queue_depth", len(later))
        for answer in (first, *later):
            answer.result()
        assert done == ["first", "middle", "last"]


@pytest.mark.parametrize("priority", [-1, 256, 1.5, True, "1"])
def test_priorities_that_are_none(agent: Agent, priority: object) -> None:
    status, body, _ = agent.post(request_of(1, priority=priority))
    assert (status, "parameter priority is" in json.loads(body)["error"]) == (400, True)


def test_a_deadline_passes_while_it_runs(either: Agent, turns_per_s: float) -> None:
    started = time.perf_counter()
    assert either.post(request_of(turns_per_s * 1.5, timeout=200_000))[0] == 504
    assert time.perf_counter() - started < 1
    # Its slot is the engine's until the run ends.
    assert either.metric("tightfit_in_flight") == 1
    until(either, "tightfit_in_flight", 0)
    assert either.post(request_of(1))[0] == 200


def test_clients_that_leave_are_not_run(agent: Agent, threads: ThreadPoolExecutor, turns_per_s: float) -> None:
    long = threads.submit(agent.post, request_of(turns_per_s))
    until(agent, "tightfit_in_flight", 1)
    body = json.dumps(request_of(turns_per_s)).encode()
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    gone = [socket.create_connection(("127.0.0.1", agent.port)) for _ in range(3)]
    for connection in gone:
        connection.sendall(head + body)
    until(agent, "tightfit_door_depth", 2)
    for connection in gone:
        connection.close()
    until(agent, "tightfit_requests_total", 3, reason="disconnected")
    assert long.result()[0] == 200
    assert agent.post(request_of(1))[0] == 200
    assert agent.metric("tightfit_pass_seconds_count") == 2


def test_a_slow_body_holds_its_slot_no_longer_than_its_deadline(bundle: Path, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[http]\nbody_s = 0.3\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        with socket.create_connection(("127.0.0.1", agent.port), 5) as connection:
            connection.sendall(b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        until(agent, "tightfit_in_flight", 0)


def test_what_cannot_be_in_time_is_refused_before_its_body(
    tmp_path: Path, threads: ThreadPoolExecutor, turns_per_s: float
) -> None:
    bundle = bundles.slow(tmp_path / "slow.tfb", slots=6)
    with serving(bundle, tmp_path / "log") as agent:
        for _ in range(3):
            assert agent.post(request_of(turns_per_s * 0.3))[0] == 200
        os.kill(agent.engine_pid, signal.SIGSTOP)
        running: Answers = [threads.submit(agent.post, request_of(1))]
        until(agent, "tightfit_running", 1)
        running += [threads.submit(agent.post, request_of(1, priority=1)) for _ in range(2)]
        until(agent, "tightfit_queue_depth", 2)
        head = "POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nRequest-Timeout-Ms: 5\r\n"
        for length in ("Content-Length: 50", "Transfer-Encoding: chunked"):
            with socket.create_connection(("127.0.0.1", agent.port), 5) as connection:
                connection.sendall(f"{head}{length}\r\n\r\n".encode())
                assert connection.recv(4096).startswith(b"HTTP/1.1 504 ")
        os.kill(agent.engine_pid, signal.SIGCONT)
        assert [answer.result()[0] for answer in running] == [200] * 3


def test_a_deadline_counts_from_when_the_request_came(either: Agent) -> None:
    """Not from when the gateway had time to read it."""
    body = json.dumps(request_of(1, timeout=200_000)).encode()
    headers = {"Host": "x", "Content-Length": len(body), **either.headers}
    lines = ["POST /v2/models/slow/infer HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    head = "\r\n".join(lines).encode()
    with socket.create_connection(("127.0.0.1", either.port), 20) as connection:
        either.process.send_signal(signal.SIGSTOP)
        connection.sendall(head + body)
        time.sleep(0.5)
        either.process.send_signal(signal.SIGCONT)
        assert connection.recv(4096).startswith(b"HTTP/1.1 504 ")
    assert either.post(request_of(1, timeout=10_000_000))[0] == 200


def test_a_killed_engine_comes_back(either: Agent, threads: ThreadPoolExecutor, turns_per_s: float) -> None:
    """What ran is answered with the reason; what waited, a half-sent body among it, is answered by the next engine."""
    first = either.engine_pid
    running = threads.submit(either.post, request_of(turns_per_s * 20))
    until(either, "tightfit_running", 1)
    waiting: Answers = [threads.submit(either.post, request_of(10)) for _ in range(3)]
    until(either, "tightfit_door_depth", 2)
    os.kill(first, signal.SIGKILL)
    status, body, headers = running.result(10)
    assert (status, headers["Retry-After"]) == (503, "5")
    assert "the engine process was killed by SIGKILL" in json.loads(body)["error"]
    assert [answer.result(20)[0] for answer in waiting] == [200] * 3
    until(either, "tightfit_engine_up", 1)
    assert either.engine_pid != first
    assert either.metric("tightfit_engine_restarts_total") == 1
    assert either.metric("tightfit_in_flight") == 0
    assert either.request("/v2/health/ready")[0] == either.request("/v2/models/slow/ready")[0] == 200
    assert "was killed by SIGKILL" in either.log
    assert "memory" not in either.log
    assert either.stop() == 0


def test_while_no_engine_is_there_who_comes_is_told_to_try_again(agent: Agent) -> None:
    os.kill(agent.engine_pid, signal.SIGKILL)
    seen = set()
    end = time.monotonic() + 20
    while 200 not in seen or 503 not in seen:
        assert time.monotonic() < end, seen
        status, body, headers = agent.post(request_of(1))
        seen.add(status)
        assert status == 200 or (status, headers["Retry-After"]) == (503, "5"), body
        assert agent.request("/v2/health/live")[0] == 200


def test_an_engine_that_hangs_is_ended_and_replaced(
    bundle: Path, tmp_path: Path, threads: ThreadPoolExecutor, turns_per_s: float
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nhang_s = 1.0\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        first = agent.engine_pid
        running = threads.submit(agent.post, request_of(turns_per_s * 20))
        until(agent, "tightfit_running", 1)
        os.kill(first, signal.SIGSTOP)
        status, body, _ = running.result(30)
        assert status == 503
        assert "the engine process did not answer within" in json.loads(body)["error"]
        until(agent, "tightfit_engine_up", 1)
        assert agent.engine_pid != first
        assert agent.post(request_of(1))[0] == 200
        assert agent.stop() == 0


def test_an_engine_that_dies_too_often_ends_the_agent(bundle: Path, tmp_path: Path) -> None:
    """With exit code 1, which a service manager answers with a restart; 2 says that this would not help."""
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nrestarts = 1\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        os.kill(agent.engine_pid, signal.SIGKILL)
        until(agent, "tightfit_engine_restarts_total", 1)
        until(agent, "tightfit_engine_up", 1)
        os.kill(agent.engine_pid, signal.SIGKILL)
        assert agent.process.wait(20) == 1
        assert "died too often" in agent.log
        assert "Traceback" not in agent.log


def test_the_engine_dies_with_its_gateway(agent: Agent) -> None:
    engine = Path(f"/proc/{agent.engine_pid}")
    assert int((engine / "oom_score_adj").read_text()) >= 500
    agent.stop(signal.SIGKILL)
    end = time.monotonic() + 5
    while engine.exists() and "\nState:\tZ" not in (engine / "status").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def listens(agent: Agent) -> bool:
    try:
        socket.create_connection(("127.0.0.1", agent.port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_answers_what_was_accepted(
    agent: Agent, threads: ThreadPoolExecutor, turns_per_s: float, number: int
) -> None:
    kept = socket.create_connection(("127.0.0.1", agent.port))
    answers: Answers = [threads.submit(agent.post, request_of(turns_per_s * 0.5)) for _ in range(4)]
    until(agent, "tightfit_door_depth", 2)
    agent.process.send_signal(number)
    while listens(agent):
        time.sleep(0.01)
    # A connection from before hears that the agent is not ready any more.
    with kept:
        kept.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert [answer.result()[0] for answer in answers] == [200] * 4
    assert agent.process.wait(10) == 0


def test_a_stop_does_not_wait_for_ever(bundle: Path, tmp_path: Path, turns_per_s: float) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\ndrain_s = 0.3\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(agent.post, request_of(turns_per_s * 30))
        until(agent, "tightfit_in_flight", 1)
        started = time.monotonic()
        assert agent.stop() == 0
        assert time.monotonic() - started < 8
        status, body, _ = answer.result()
        assert (status, "stopped" in json.loads(body)["error"]) == (503, True)
