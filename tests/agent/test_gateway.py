"""Deadlines, full queues, clients that leave, and an engine that dies: always an answer, never a hang."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import agents, bundles
from tests.support.agents import Agent, serving, stopped
from tests.support.streams import Exchange
from tests.support.wire import LANES, post, wire


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


def request_of(turns: int, **parameters: Any) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "turns", "datatype": "INT64", "shape": [1], "data": [turns]},
        ],
    }


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


Answers = list[Future[tuple[int, bytes, dict[str, str]]]]


def until(agent: Agent, name: str, value: float, **labels: str) -> None:
    agents.until(lambda: agent.metric(name, **labels) == value)


def test_more_than_the_queue_holds(either: Agent, threads: ThreadPoolExecutor) -> None:
    with stopped(either.engine_pid):
        answers: Answers = [threads.submit(either.post, request_of(1)) for _ in range(10)]
        for answer in itertools.islice(as_completed(answers), 5):
            status, body, headers = answer.result()
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "the queue is full: 3 are waiting" in json.loads(body)["error"]
    assert sorted(answer.result()[0] for answer in answers) == [200] * 5 + [503] * 5
    until(either, "tightfit_in_flight", 0)


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


def test_a_deadline_in_the_head_holds_at_the_door(agent: Agent, threads: ThreadPoolExecutor) -> None:
    """Where the body that could name one is not read yet."""
    with stopped(agent.engine_pid):
        long = [threads.submit(agent.post, request_of(1)) for _ in range(2)]
        until(agent, "tightfit_in_flight", 2)
        status, body, _ = agent.post(request_of(1), {"Request-Timeout-Ms": "200"})
        assert (status, "deadline" in json.loads(body)["error"]) == (504, True)
        status, body, _ = agent.post(request_of(1), {"Request-Timeout-Ms": "soon"})
        assert (status, "Request-Timeout-Ms is 'soon'" in json.loads(body)["error"]) == (400, True)
    assert [answer.result()[0] for answer in long] == [200, 200]


@pytest.mark.parametrize(
    ("slots", "depth"), [(1, "tightfit_door_depth"), (4, "tightfit_queue_depth")], ids=["at the door", "in the queue"]
)
def test_who_is_in_a_hurry_goes_first(tmp_path: Path, threads: ThreadPoolExecutor, slots: int, depth: str) -> None:
    """By the head at the door, and by the parameter in the queue. Results are numbered as they come."""
    bundle = bundles.slow(tmp_path / "slow.tfb", slots=slots)
    config = tmp_path / "agent.toml"
    config.write_text(f'[engine]\nhang_s = 120\n[[models]]\nbundle = "{bundle}"\nresults_mib = 1\n')
    with (
        serving(None, tmp_path / "log", "--config", str(config)) as agent,
        Exchange(agent, "/v2/models/slow/results") as results,
    ):
        assert results.status == 200

        def post(name: str, head: str, parameter: int) -> None:
            body = {"id": name, **(request_of(1) if slots == 1 else request_of(1, priority=parameter))}
            assert agent.post(body, {"Priority": head} if slots == 1 else {})[0] == 200

        with stopped(agent.engine_pid):
            answers = [threads.submit(post, "running", "u=3", 0)]
            until(agent, "tightfit_running", 1)
            for waiting, each in enumerate((("last", "u=7", 255), ("middle", "u=3", 0), ("first", "u=0, i", 1)), 1):
                answers.append(threads.submit(post, *each))
                until(agent, depth, waiting)
        for answer in answers:
            answer.result()
        assert [record["id"] for record in results.records(4)] == ["running", "first", "middle", "last"]


@pytest.mark.parametrize("priority", [-1, 256, 1.5, True, "1"])
def test_priorities_that_are_none(agent: Agent, priority: object) -> None:
    status, body, _ = agent.post(request_of(1, priority=priority))
    assert (status, "parameter priority is" in json.loads(body)["error"]) == (400, True)


def test_a_deadline_passes_while_it_runs(either: Agent) -> None:
    with stopped(either.engine_pid):
        assert either.post(request_of(1, timeout=200_000))[0] == 504
        # Its slot is the engine's until the run ends.
        assert either.metric("tightfit_in_flight") == 1
    until(either, "tightfit_in_flight", 0)
    assert either.post(request_of(1))[0] == 200


def test_clients_that_leave_are_not_run(agent: Agent, threads: ThreadPoolExecutor) -> None:
    body = json.dumps(request_of(1)).encode()
    with stopped(agent.engine_pid):
        long = threads.submit(agent.post, request_of(1))
        until(agent, "tightfit_running", 1)
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(wire(agent.port)).send(post("slow", body))
            until(agent, "tightfit_queue_depth", 1)
            until(agent, "tightfit_door_depth", 2)
        until(agent, "tightfit_requests_total", 3, reason="disconnected")
    assert long.result()[0] == 200
    assert agent.post(request_of(1))[0] == 200
    assert agent.metric("tightfit_pass_seconds_count") == 2


def test_a_slow_body_holds_its_slot_no_longer_than_its_deadline(bundle: Path, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[http]\nbody_s = 0.3\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent, wire(agent.port) as connection:
        assert connection.ask(post("slow", b" " * 50)[:-49]).status == "HTTP/1.1 408 Request Timeout"
        until(agent, "tightfit_in_flight", 0)


def test_what_cannot_be_in_time_is_refused_before_its_body(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nhang_s = 120\n")
    bundle = bundles.slow(tmp_path / "slow.tfb", slots=6)
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        for _ in range(3):
            assert agent.post(request_of(400_000))[0] == 200
        with stopped(agent.engine_pid):
            running: Answers = [threads.submit(agent.post, request_of(1))]
            until(agent, "tightfit_running", 1)
            running += [threads.submit(agent.post, request_of(1, priority=1)) for _ in range(2)]
            until(agent, "tightfit_queue_depth", 2)
            head = "POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nRequest-Timeout-Ms: 5\r\n"
            for length in ("Content-Length: 50", "Transfer-Encoding: chunked"):
                with wire(agent.port) as connection:
                    assert connection.ask(f"{head}{length}\r\n\r\n".encode()).status == "HTTP/1.1 504 Gateway Timeout"
        assert [answer.result()[0] for answer in running] == [200] * 3


def test_a_deadline_counts_from_when_the_request_came(either: Agent) -> None:
    """Not from when the gateway had time to read it."""
    body = json.dumps(request_of(1, timeout=200_000)).encode()
    with wire(either.port) as connection:
        with stopped(either.process.pid):
            connection.send(post("slow", body, *(f"{name}: {value}" for name, value in either.headers.items())))
            time.sleep(0.5)
        assert connection.read().status == "HTTP/1.1 504 Gateway Timeout"
    assert either.post(request_of(1, timeout=60_000_000))[0] == 200


def test_a_killed_engine_comes_back(either: Agent, threads: ThreadPoolExecutor) -> None:
    """What ran is answered with the reason; what waited, a half-sent body among it, is answered by the next engine."""
    first = either.engine_pid
    with stopped(first):
        running = threads.submit(either.post, request_of(1))
        until(either, "tightfit_running", 1)
        waiting: Answers = [threads.submit(either.post, request_of(10)) for _ in range(3)]
        until(either, "tightfit_door_depth", 2)
        os.kill(first, signal.SIGKILL)
        status, body, headers = running.result()
    assert (status, headers["Retry-After"]) == (503, "5")
    assert "the engine process was killed by SIGKILL" in json.loads(body)["error"]
    assert [answer.result()[0] for answer in waiting] == [200] * 3
    until(either, "tightfit_engine_up", 1)
    assert either.engine_pid != first
    assert either.metric("tightfit_engine_restarts_total") == 1
    until(either, "tightfit_in_flight", 0)
    assert either.request("/v2/health/ready")[0] == either.request("/v2/models/slow/ready")[0] == 200
    assert "was killed by SIGKILL" in either.log
    assert "memory" not in either.log
    assert either.stop() == 0


def test_while_no_engine_is_there_who_comes_is_told_to_try_again(tmp_path: Path) -> None:
    """For as long as what it loads is away."""
    bundle, away = bundles.slow(tmp_path / "slow.tfb"), tmp_path / "away"
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nrestarts = 1000\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        bundle.rename(away)
        os.kill(agent.engine_pid, signal.SIGKILL)
        for _ in range(10):
            status, body, headers = agent.post(request_of(1))
            assert (status, headers["Retry-After"]) == (503, "5"), body
            assert agent.request("/v2/health/live")[0] == 200
        away.rename(bundle)
        while status != 200:
            time.sleep(0.05)
            status, body, headers = agent.post(request_of(1))
            assert status == 200 or (status, headers["Retry-After"]) == (503, "5"), body
        assert "Traceback" not in agent.log


def test_an_engine_that_hangs_is_ended_and_replaced(bundle: Path, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nhang_s = 3.0\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        first = agent.engine_pid
        with stopped(first):
            status, body, _ = agent.post(request_of(1))
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
        assert agent.process.wait(60) == 1
        assert "died too often" in agent.log
        assert "Traceback" not in agent.log


def test_the_engine_dies_with_its_gateway(agent: Agent) -> None:
    pid = agent.engine_pid
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 500
    engine = os.pidfd_open(pid)
    try:
        agent.stop(signal.SIGKILL)
        # Readable when the process has ended, whoever is to hear of it.
        assert select.select([engine], [], [], 60)[0] == [engine]
    finally:
        os.close(engine)


def listens(agent: Agent) -> bool:
    try:
        socket.create_connection(("127.0.0.1", agent.port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_answers_what_was_accepted(agent: Agent, threads: ThreadPoolExecutor, number: int) -> None:
    with wire(agent.port) as kept:
        with stopped(agent.engine_pid):
            answers: Answers = [threads.submit(agent.post, request_of(1)) for _ in range(4)]
            until(agent, "tightfit_door_depth", 2)
            agent.process.send_signal(number)
            agents.until(lambda: not listens(agent))
            # A connection from before hears that the agent is not ready any more.
            ready = kept.ask(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert ready.status == "HTTP/1.1 503 Service Unavailable"
        assert [answer.result()[0] for answer in answers] == [200] * 4
    assert agent.process.wait(60) == 0


def test_a_stop_does_not_wait_for_ever(bundle: Path, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\ndrain_s = 0.3\n[engine]\nhang_s = 120\n")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent, stopped(agent.engine_pid):
        answer = threads.submit(agent.post, request_of(1))
        until(agent, "tightfit_running", 1)
        assert agent.stop() == 0
        status, body, _ = answer.result()
        assert (status, "stopped" in json.loads(body)["error"]) == (503, True)
