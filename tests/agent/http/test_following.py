"""Following what a model answers, and what happens to models, over real sockets."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.memory import pss_by_kind
from tests.support import bundles
from tests.support.agents import Agent, serving, stopped, until
from tests.support.streams import EVENTS, FRAMES, LINES, Exchange, Record, pick, stream, turn

RESULTS = "/v2/models/picking/results"
SETTINGS = """
[[models]]
bundle = "{bundle}"
results_mib = 1
[http]
send_s = 120
[streams]
heartbeat_s = 0.3
patience_s = {patience}
"""


def started(folder: Path, patience_s: float = 3) -> Path:
    config = folder / "agent.toml"
    bundle = bundles.picking(folder / "picking.tfb")
    config.write_text(SETTINGS.format(bundle=bundle, patience=patience_s), encoding="utf-8")
    return config


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with serving(None, tmp_path / "log", "--config", str(started(tmp_path))) as agent:
        yield agent
        assert "Traceback" not in agent.log


def follow(agent: Agent, query: str = "", accept: str = LINES, receive: int = 0, **headers: str) -> Exchange:
    exchange = Exchange(
        agent, RESULTS + query, headers={"Accept": accept, **{k.replace("_", "-"): v for k, v in headers.items()}},
        receive=receive,
    )  # fmt: skip
    assert exchange.status == 200
    return exchange


def ask(agent: Agent, first: int, last: int, note: str = "") -> list[Record]:
    """Answers to requests with these numbers, all in one stream."""
    with stream(agent) as exchange:
        requests = [pick(f"{note}{at}", at, 0) for at in range(first, last + 1)]
        sender = threading.Thread(target=exchange.send_all, args=(requests,))
        sender.start()
        records = exchange.records(last + 1 - first)
        sender.join()
    assert {record["status"] for record in records} == {200}
    return records


def test_results_of_all_clients_by_number(agent: Agent) -> None:
    with follow(agent) as lines, follow(agent, accept=EVENTS) as events, follow(agent, accept=FRAMES) as frames:
        ask(agent, 1, 3)
        assert agent.post(json.loads(pick("alone", 4, 0)))[0] == 200
        assert agent.post(json.loads(pick("fails", 4, 99)))[0] == 500
        ask(agent, 5, 5)
        records = lines.records(5)
        assert [record["seq"] for record in records] == [1, 2, 3, 4, 5]
        assert [record["id"] for record in records] == ["1", "2", "3", "alone", "5"]
        assert [record["outputs"][0]["data"][0] for record in records] == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert all(record["timing"]["compute_us"] > 0 for record in records)
        heard = [events.event() for _ in range(5)]
        assert [json.loads(event["data"]) for event in heard] == records
        assert {event["event"] for event in heard} == {"result"}
        until(lambda: frames.receive() and frames.body.count(b'"binary_data_size":32') == 5)
        assert lines.line() == b"\n"
    assert agent.metric("tightfit_results_bytes", model="picking") > 5 * 32


def test_going_on_where_it_was_left(agent: Agent) -> None:
    with follow(agent, accept=EVENTS) as events:
        ask(agent, 1, 5)
        last = [events.event() for _ in range(2)][-1]["id"]
    ask(agent, 6, 7)
    with follow(agent, "?since=1", EVENTS, Last_Event_ID=last) as events:
        assert [json.loads(events.event()["data"])["seq"] for _ in range(5)] == [3, 4, 5, 6, 7]
    with follow(agent, "?since=5") as lines:
        assert [record["seq"] for record in lines.records(2)] == [6, 7]
    with follow(agent, f"?since=other-{last.rpartition('-')[2]}") as lines:
        lost, first = lines.records(2)
        assert lost == {"type": "lost", "first": 1, "last": 0, "count": 0, "restarted": True}
        assert first["seq"] == 1


def test_what_is_gone_is_said_and_memory_is_bounded(agent: Agent) -> None:
    """Twelve MiB of ids go through one that keeps one MiB."""
    note = "x" * 4000
    ask(agent, 1, 500, note)
    before = pss_by_kind(agent.process.pid)["anonymous"]
    ask(agent, 501, 3000, note)
    assert pss_by_kind(agent.process.pid)["anonymous"] - before < 8 << 20
    assert agent.metric("tightfit_results_bytes", model="picking") <= 1 << 20
    with follow(agent, "?since=10") as lines:
        lost, first = lines.records(2)
        assert (lost["type"], lost["first"], lost["last"] + 1) == ("lost", 11, first["seq"])
        assert lost["count"] == lost["last"] - 10
        assert 2500 < first["seq"] < 3000


def rest(exchange: Exchange, newest: int) -> list[Record]:
    """Records up to that of the newest result, or to the end."""
    records = []
    while (record := exchange.record()) is not None:
        records.append(record)
        if record.get("seq") == newest:
            break
    return records


def test_a_slow_reader_that_wants_the_latest(agent: Agent) -> None:
    with follow(agent, "?policy=latest", receive=4096) as lines:
        ask(agent, 1, 3000, "x" * 4000)
        records = rest(lines, 3000)
    known = 0
    for record in records:
        if record["type"] == "lost":
            assert (record["first"], record["count"]) == (known + 1, record["last"] - known)
        known = record["last"] if record["type"] == "lost" else record["seq"]
    assert known == 3000
    assert any(record["type"] == "lost" for record in records)
    assert len(records) < 2990


def test_a_slow_reader_that_wants_all_or_nothing(agent: Agent) -> None:
    with follow(agent, "?policy=close", receive=4096) as lines:
        ask(agent, 1, 3000, "x" * 4000)
        records = rest(lines, 3000)
    *results, last = records
    assert [record["seq"] for record in results] == list(range(1, len(results) + 1))
    assert (last["type"], last["since"], last["reason"]) == ("overflow", len(results), "slow_reader")


def test_a_reader_that_results_wait_for(tmp_path: Path) -> None:
    """While it reads, however slowly, it misses nothing; and everybody is as slow."""
    with serving(None, tmp_path / "log", "--config", str(started(tmp_path, 60))) as agent:
        with follow(agent, "?policy=block", receive=4096) as lines:
            asking = threading.Thread(target=ask, args=(agent, 1, 2000, "x" * 4000))
            asking.start()
            time.sleep(3)
            assert asking.is_alive()
            assert agent.metric("tightfit_results_bytes", model="picking") <= 1 << 20
            assert [record["seq"] for record in rest(lines, 2000)] == list(range(1, 2001))
            asking.join()
        assert "Traceback" not in agent.log


def test_a_reader_that_takes_nothing_is_not_waited_for_long(agent: Agent) -> None:
    with follow(agent, "?policy=block", receive=4096):
        ask(agent, 1, 2000, "x" * 4000)
    assert agent.metric("tightfit_streams") <= 1


def test_what_nobody_may_follow(tmp_path: Path) -> None:
    with serving(bundles.picking(tmp_path / "picking.tfb"), tmp_path / "log") as agent:
        status, body, _ = agent.request(RESULTS)
        assert status == 403
        assert "results_mib" in json.loads(body)["error"]
        with Exchange(agent, "/v2/events?since=0") as events:
            happened = [events.event() for _ in range(2)]
        assert [event["event"] for event in happened] == ["load", "activate"]
        record = json.loads(happened[1]["data"])
        assert (record["seq"], record["model"]) == (2, "picking")
        assert record["at"].endswith("Z")


def test_pressure_is_told_of(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(
        "[requests]\nqueue_length = 2\n[degradation]\nrise_s = 0.1\n[streams]\nin_flight = 1\n[engine]\nhang_s = 120\n"
    )
    bundle = bundles.slow(tmp_path / "slow.tfb", slots=1)
    with (
        serving(bundle, tmp_path / "log", "--config", str(config)) as agent,
        Exchange(agent, "/v2/events") as events,
        stopped(agent.engine_pid),
        contextlib.ExitStack() as streams,
    ):
        assert events.status == 200
        for _ in range(3):
            streams.enter_context(stream(agent)).send(turn("", 1))
        event = events.event()
        assert event["event"] == "degrade"
        record = json.loads(event["data"])
        assert (record["before"], record["cause"]) == (0, "queue")
        assert record["level"] > 0
