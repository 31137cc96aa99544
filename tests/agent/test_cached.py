"""Answers that are kept, over HTTP: the same bytes, and no second run."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.memory import mem_total_bytes
from targets.bundle import read_manifest
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving, stopped, until
from tests.support.bundles import MIB, rewrite
from tests.support.wire import post, wire


def configured(folder: Path, bundle: Path, mib: int = 1, more: str = "") -> Path:
    config = folder / "agent.toml"
    more += "[requests]\ntimeout_s = 120\n[engine]\nhang_s = 120\n"
    config.write_text(f'{more}[[models]]\nbundle = "{bundle}"\ncache_mib = {mib}\n', encoding="utf-8")
    return config


@pytest.fixture
def add(tmp_path: Path) -> Iterator[Agent]:
    config = configured(tmp_path, bundles.add(tmp_path / "add.tfb"))
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def ask(agent: Agent, first: float = 1.0, outputs: tuple[str, ...] = (), binary: bool = False) -> bytes:
    inputs = [{"name": name, "datatype": "FP32", "shape": [1, 8], "data": [first] + [1.0] * 7} for name in "ab"]
    body: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": binary}}
    if outputs:
        body["outputs"] = [{"name": name} for name in outputs]
    status, answer, _ = agent.post(body)
    assert status == 200, answer
    return answer


def passes(agent: Agent) -> float:
    return agent.metric("tightfit_pass_seconds_count")


def counts(agent: Agent) -> tuple[float, float]:
    """(hits, misses)."""
    return agent.metric("tightfit_cache_hits_total"), agent.metric("tightfit_cache_misses_total")


def test_what_was_answered_before_is_not_run_again(add: Agent) -> None:
    first = ask(add)
    assert (counts(add), passes(add)) == ((0, 1), 1)
    assert ask(add) == first
    assert (counts(add), passes(add)) == ((1, 1), 1)
    assert add.metric("tightfit_requests_total", reason="ok") == 2
    until(lambda: add.metric("tightfit_in_flight") == 0)
    # In the other form it is the same answer; other inputs, and other outputs, are other requests.
    assert ask(add, binary=True) != first
    assert passes(add) == 1
    assert ask(add, first=2.0) != first
    ask(add, outputs=("scaled",))
    assert (counts(add), passes(add)) == ((2, 3), 3)


def test_a_new_version_has_no_answers_of_the_old(add: Agent, tmp_path: Path) -> None:
    ask(add)
    bundle = tmp_path / "add.tfb"
    shutil.rmtree(bundle)
    rewrite(bundles.add(bundle), read_manifest(bundle), options={"variant": "2"})
    version = read_manifest(bundle).version
    add.process.send_signal(signal.SIGHUP)
    until(lambda: bool(json.loads(ask(add))["model_version"] == version))
    assert counts(add) == (0, 1)


def test_no_refusal_is_kept(tmp_path: Path) -> None:
    config = configured(tmp_path, bundles.growing(tmp_path / "growing.tfb"))
    body = {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [17]}]}
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        assert [agent.post(body)[0] for _ in range(2)] == [500, 500]
        assert (counts(agent), passes(agent), agent.metric("tightfit_cache_bytes")) == ((0, 2), 2, 0)


def test_the_limit_is_kept_by_forgetting(tmp_path: Path) -> None:
    """Three answers of 300 KiB fit into 1 MiB. What is hashed is too much for the event loop."""
    config = configured(tmp_path, bundles.identity(tmp_path / "large.tfb", DType.FLOAT32, (300, 256)))

    def answer(agent: Agent, number: int) -> bytes:
        data = [float(number)] * (300 * 256)
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [300, 256], "data": data}]}
        status, found, _ = agent.post({**body, "parameters": {"binary_data_output": True}})
        assert status == 200
        return found[-1200 * 256 :]

    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        seen = [answer(agent, number) for number in (1, 2, 3, 4, 2, 1)]
        assert seen[1] == seen[4] != seen[0] == seen[5]
        assert counts(agent) == (1, 5)
        assert agent.metric("tightfit_cache_evictions_total") == 2
        assert agent.metric("tightfit_cache_bytes") <= MIB


def slow(turns: int) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "turns", "datatype": "INT64", "shape": [1], "data": [turns]},
        ]
    }


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Agent]:
    config = configured(tmp_path, bundles.slow(tmp_path / "slow.tfb", slots=4))
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def test_equal_requests_at_one_time_run_once(busy: Agent) -> None:
    """Those that come while one runs: of two that come at once, the one whose body ends first may be due later."""
    with ThreadPoolExecutor(4) as threads:
        with stopped(busy.engine_pid):
            first = threads.submit(busy.post, slow(1))
            until(lambda: busy.metric("tightfit_running") == 1)
            others = [threads.submit(busy.post, slow(1)) for _ in range(3)]
            until(lambda: busy.metric("tightfit_in_flight") == 4)
        answers = [each.result() for each in (first, *others)]
    assert {status for status, _, _ in answers} == {200}
    assert len({body for _, body, _ in answers}) == 1
    assert (passes(busy), counts(busy)) == (1, (3, 1))


def test_when_the_one_that_runs_is_given_up_another_does(busy: Agent) -> None:
    """The first has a deadline that passes while it runs."""
    hasty = {**slow(1), "parameters": {"timeout": 3_000_000}}
    with ThreadPoolExecutor(2) as threads:
        with stopped(busy.engine_pid):
            first = threads.submit(busy.post, hasty)
            until(lambda: busy.metric("tightfit_running") == 1)
            second = threads.submit(busy.post, slow(1))
            until(lambda: busy.metric("tightfit_in_flight") == 2)
            assert first.result()[0] == 504
        assert second.result()[0] == 200
    assert counts(busy) == (0, 2)


def test_who_waits_for_an_equal_one_may_leave(busy: Agent) -> None:
    with ThreadPoolExecutor(1) as threads:
        with stopped(busy.engine_pid):
            first = threads.submit(busy.post, slow(1))
            until(lambda: busy.metric("tightfit_running") == 1)
            with wire(busy.port) as connection:
                connection.send(post("slow", json.dumps(slow(1)).encode()))
                until(lambda: busy.metric("tightfit_in_flight") == 2)
            until(lambda: busy.metric("tightfit_requests_total", reason="disconnected") == 1)
        assert first.result()[0] == 200
    until(lambda: busy.metric("tightfit_in_flight") == 0)
    assert passes(busy) == 1


def test_the_machine_must_have_room_for_it(tmp_path: Path) -> None:
    room = f"[memory]\nos_reserve_mib = {mem_total_bytes() // MIB - 220}\n"
    config = configured(tmp_path, bundles.add(tmp_path / "add.tfb"), mib=100, more=room)
    code, _, told = run_agent("serve", "--config", str(config), "--port", "0")
    assert code == 2
    assert "of which 100.0 MiB keep answers" in told
