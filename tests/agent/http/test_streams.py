"""Streams of requests over real sockets, against a real agent."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.http.stream_calls import Evenly
from agent.memory import pss_by_kind
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving, stopped, until
from tests.support.streams import FRAMES, LINES, Exchange, Record, line, pick, stream, turn

SETTINGS = """
[http]
body_s = {body_s}
[requests]
timeout_s = 120
[engine]
hang_s = 120
[streams]
most = 12
in_flight = 6
unread_kib = 64
heartbeat_s = 0.4
idle_s = {idle_s}
patience_s = {patience_s}
"""
PATIENT = SETTINGS.format(body_s=120, idle_s=300, patience_s=120)
# What waits for a client may wait no longer than a test can, and no shorter than a busy machine stands still.
HASTY = SETTINGS.format(body_s=3, idle_s=3, patience_s=3)


def configured(folder: Path, settings: str = PATIENT) -> tuple[str, str]:
    path = folder / "agent.toml"
    path.write_text(settings, encoding="utf-8")
    return "--config", str(path)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("streams")
    with serving(bundles.picking(folder / "picking.tfb"), folder / "log", *configured(folder)) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("hasty")
    with serving(bundles.picking(folder / "picking.tfb"), folder / "log", *configured(folder, HASTY)) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("slow")
    with serving(bundles.slow(folder / "slow.tfb", slots=8), folder / "log", *configured(folder)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def test_answers_come_in_order_each_its_own(agent: Agent) -> None:
    with stream(agent) as exchange:
        assert exchange.status == 200
        assert f"Content-Type: {LINES}".encode() in exchange.head
        for turn_ in range(200):
            exchange.send(pick(str(turn_), turn_, turn_ % 16))
        exchange.end()
        records = exchange.records()
    assert [record["seq"] for record in records] == list(range(1, 201))
    for at, record in enumerate(records):
        assert (record["type"], record["id"], record["status"]) == ("result", str(at), 200)
        assert record["outputs"][0]["data"] == [8 * (at % 16) + column + at for column in range(8)]
        timing = record["timing"]
        assert 0 <= timing["queue_us"] <= timing["total_us"]
        assert 0 < timing["compute_us"] <= timing["total_us"]


def test_an_answer_comes_before_the_next_record_is_sent(agent: Agent) -> None:
    with stream(agent) as exchange:
        for turn_ in range(20):
            exchange.send(pick(str(turn_), turn_, 0))
            assert exchange.records(1)[0]["id"] == str(turn_)


def test_several_are_on_their_way_at_once(agent: Agent) -> None:
    with stream(agent) as exchange:
        exchange.send(pick("first", 0, 0))
        assert exchange.records(1)[0]["id"] == "first"
        with stopped(agent.engine_pid):
            exchange.send(b"".join(pick(str(at), at, 0) for at in range(20)))
            # In the pass that stands still are those that came in one turn of the loop.
            until(lambda: agent.metric("tightfit_queue_depth") + agent.metric("tightfit_running") == 6)
            assert agent.metric("tightfit_in_flight") == 6
        assert [record["id"] for record in exchange.records(20)] == [str(at) for at in range(20)]


def test_a_bad_record_is_answered_in_its_place(agent: Agent) -> None:
    bad = [
        b"{\n", b"[]\n", b"\xff\xfe\n", line("few", x=("FP32", [[1.0] * 7]), at=("INT64", [1])),
        pick("outside", 0, 99), b"x" * (1 << 20) + b"\n",
    ]  # fmt: skip
    with stream(agent) as exchange:
        for at, data in enumerate(bad):
            exchange.send(pick(f"good {at}", at, 0) + data)
        exchange.send(pick("last", 1, 2))
        exchange.end()
        records = exchange.records()
    assert [record["seq"] for record in records] == list(range(1, 2 * len(bad) + 2))
    assert [record["id"] for record in records[::2]] == [*(f"good {at}" for at in range(len(bad))), "last"]
    errors = records[1::2]
    assert [record["reason"] for record in errors] == ["bad_request"] * 4 + ["engine_error", "too_large"]
    assert [record["status"] for record in errors] == [400] * 4 + [500, 413]
    assert [record.get("id") for record in errors] == [None] * 3 + [None, "outside", None]
    assert "7" in errors[3]["error"]


def test_frames_and_what_cannot_be_read_further(agent: Agent) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 8], "parameters": {"binary_data_size": 32}},
        {"name": "at", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}},
    ]
    text = json.dumps({"inputs": inputs, "outputs": [{"name": "picked"}]}).encode()
    with stream(agent, FRAMES) as exchange:
        for value in range(10):
            tensors = struct.pack("<8fq", *[value] * 8, value)
            exchange.send(struct.pack("<II", 4 + len(text) + len(tensors), len(text)) + text + tensors)
        exchange.send(b'{"inputs"')
        records = all_frames(exchange)
    assert [record["seq"] for record, _ in records] == list(range(1, 12))
    for value, (record, tensors) in enumerate(records[:10]):
        assert record["outputs"][0]["parameters"] == {"binary_data_size": 32}
        assert list(struct.unpack("<8f", tensors)) == [8 * value + column + value for column in range(8)]
    assert (records[10][0]["type"], records[10][0]["reason"]) == ("error", "bad_request")


def test_parts_in_and_events_out(agent: Agent) -> None:
    with stream(agent, "multipart/mixed; boundary=b", {"Accept": "text/event-stream"}) as exchange:
        for at in range(3):
            body = pick(str(at), at, at)
            head = f"--b\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            exchange.send(head.encode() + body + b"\r\n")
            event = exchange.event()
            assert (event["event"], event["id"].rpartition("-")[2]) == ("result", str(at + 1))
            assert json.loads(event["data"])["outputs"][0]["data"][0] == 9 * at


@pytest.mark.parametrize(
    ("path", "content_type", "headers", "status"),
    [
        ("/v2/models/none/stream", LINES, {}, 404),
        ("/v2/models/picking/versions/none/stream", LINES, {}, 404),
        ("/v2/models/picking/stream", "text/plain", {}, 415),
        ("/v2/models/picking/stream", "multipart/mixed", {}, 400),
        ("/v2/models/picking/stream", LINES, {"Accept": "image/png"}, 400),
        ("/v2/models/picking/stream", LINES, {"Content-Encoding": "gzip"}, 415),
        ("/v2/models/picking/stream", LINES, {"Request-Timeout-Ms": "soon"}, 400),
        ("/v2/models/picking/results", "", {}, 403),
        ("/v2/events?policy=none", "", {}, 400),
        ("/v2/events?policy=block", "", {}, 400),
        ("/v2/events?since=none", "", {}, 400),
    ],
)
def test_what_is_refused_before_it_begins(
    agent: Agent, path: str, content_type: str, headers: dict[str, str], status: int
) -> None:
    with Exchange(agent, path, content_type, headers) as exchange:
        assert exchange.status == status


def test_a_version_of_its_own(agent: Agent) -> None:
    (version,) = json.loads(agent.request(f"/v2/models/{agent.name}")[1])["versions"]
    with Exchange(agent, f"/v2/models/{agent.name}/versions/{version}/stream", LINES) as exchange:
        exchange.send(pick("", 1, 1))
        assert exchange.records(1)[0]["model_version"] == version


def test_the_connection_serves_other_requests_behind_a_stream(agent: Agent) -> None:
    with stream(agent) as exchange:
        exchange.send(pick("", 1, 1))
        exchange.end()
        assert len(exchange.records()) == 1
        exchange.socket.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert exchange.socket.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_records_that_are_none_are_counted(agent: Agent) -> None:
    before = agent.metric("tightfit_requests_total", model="picking", reason="too_large")
    with stream(agent) as exchange:
        exchange.send(b"x" * (1 << 20) + b"\n")
        assert exchange.records(1)[0]["reason"] == "too_large"
    until(lambda: agent.metric("tightfit_requests_total", model="picking", reason="too_large") == before + 1)


def test_as_many_streams_as_may(agent: Agent) -> None:
    until(lambda: agent.metric("tightfit_streams") == 0)
    open_ = [stream(agent) for _ in range(12)]
    try:
        assert {each.status for each in open_} == {200}
        assert agent.metric("tightfit_streams", model=agent.name) == 12
        with stream(agent) as one_more:
            assert one_more.status == 503
    finally:
        for each in open_:
            each.close()
    until(lambda: agent.metric("tightfit_streams") == 0)


def test_no_slot_is_kept_for_clients_that_vanish(agent: Agent) -> None:
    """Records are in every stage when the reset comes: asked, done, written."""
    for _ in range(20):
        with stream(agent) as exchange:
            exchange.send_all(pick(str(at), at, 0) for at in range(8))
            for _ in range(30):
                exchange.receive()
                exchange.send_all(pick("more", at, 0) for at in range(4))
            exchange.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: agent.metric("tightfit_streams") == 0)
    until(lambda: agent.metric("tightfit_in_flight") == 0)


def test_heartbeats_until_it_is_idle_for_too_long(hasty: Agent) -> None:
    with stream(hasty) as exchange:
        exchange.send(pick("", 1, 1))
        assert exchange.records(1)[0]["status"] == 200
        assert exchange.line() == b"\n"
        last = exchange.records()[-1]
    assert (last["type"], last["seq"], last["reason"], last["status"]) == ("error", 2, "slow_body", 408)
    with stream(hasty) as exchange:
        for _ in range(10):
            exchange.send(b"\n")
            time.sleep(0.4)
        exchange.send(pick("there", 1, 1))
        assert exchange.records(1)[0]["id"] == "there"


def test_a_record_that_does_not_arrive(hasty: Agent) -> None:
    with stream(hasty) as exchange:
        for part in (b'{"id', b'":', b'"x",'):
            exchange.send(part)
            time.sleep(0.4)
        (last,) = exchange.records()
    assert (last["reason"], last["seq"]) == ("slow_body", 1)


def test_a_body_whose_transfer_coding_is_broken(hasty: Agent) -> None:
    with stream(hasty) as exchange:
        exchange.send(pick("", 1, 1))
        assert exchange.records(1)[0]["status"] == 200
        exchange.socket.sendall(b"no length\r\n")
        (last,) = exchange.records()
    assert (last["type"], last["status"]) == ("error", 400)
    assert "chunks" in last["error"]
    until(lambda: hasty.metric("tightfit_streams") == 0)


# --- records that are large


def large(value: float) -> bytes:
    """A frame with 256 KiB."""
    x = {"name": "x", "datatype": "FP32", "shape": [256, 256], "parameters": {"binary_data_size": 1 << 18}}
    text = json.dumps({"inputs": [x]}).encode()
    return struct.pack("<II", 4 + len(text) + (1 << 18), len(text)) + text + struct.pack("<f", value) * (1 << 16)


def frames_in(data: bytes) -> list[tuple[Record, bytes]]:
    """(JSON, raw tensors) of each."""
    found = []
    while data:
        (total,) = struct.unpack_from("<I", data)
        # Without anything it is a heartbeat.
        if total:
            (length,) = struct.unpack_from("<I", data, 4)
            found.append((json.loads(data[8 : 8 + length]), data[8 + length : 4 + total]))
        data = data[4 + total :]
    return found


def all_frames(exchange: Exchange) -> list[tuple[Record, bytes]]:
    while exchange.receive():
        pass
    return frames_in(bytes(exchange.body))


@contextlib.contextmanager
def serving_wide(folder: Path, settings: str) -> Iterator[Agent]:
    """A model of large tensors, for one request at once."""
    bundle = bundles.identity(folder / "wide.tfb", DType.FLOAT32, (256, 256), slots=1)
    with serving(bundle, folder / "log", *configured(folder, settings)) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with serving_wide(tmp_path_factory.mktemp("wide"), PATIENT) as agent:
        yield agent


@pytest.fixture(scope="module")
def hasty_wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with serving_wide(tmp_path_factory.mktemp("hasty_wide"), HASTY) as agent:
        yield agent


def test_large_records_go_through_their_slot(wide: Agent) -> None:
    def send() -> None:
        exchange.send_all([large(value) for value in range(20)])
        exchange.end()

    with stream(wide, FRAMES) as exchange:
        sender = threading.Thread(target=send)
        sender.start()
        answers = all_frames(exchange)
        sender.join()
    assert [record["seq"] for record, _ in answers] == list(range(1, 21))
    assert [tensors for _, tensors in answers] == [struct.pack("<f", value) * (1 << 16) for value in range(20)]


def test_no_more_of_a_large_record_is_read_than_has_a_slot(wide: Agent) -> None:
    """Whoever has none is told so in its place, and what it sends of the record is dropped."""
    with stream(wide, FRAMES) as first, stream(wide, FRAMES, {"Request-Timeout-Ms": "3000"}) as second:
        first.send(large(1)[:100_000])
        until(lambda: wide.metric("tightfit_in_flight") == 1)
        second.send(large(2)[:100_000])
        until(lambda: wide.metric("tightfit_requests_total", reason="deadline") == 1)
        first.send(large(1)[100_000:])
        first.end()
        assert [record["status"] for record, _ in all_frames(first)] == [200]
        second.send(large(2)[100_000:] + large(3))
        second.end()
        answers = all_frames(second)
    assert [(record["seq"], record["status"]) for record, _ in answers] == [(1, 504), (2, 200)]
    assert answers[1][1] == struct.pack("<f", 3) * (1 << 16)


def test_a_large_record_that_does_not_arrive_gives_its_slot_back(hasty_wide: Agent) -> None:
    with stream(hasty_wide, FRAMES) as exchange:
        exchange.send(large(1)[:100_000])
        until(lambda: hasty_wide.metric("tightfit_in_flight") == 1)
        answers = all_frames(exchange)
    assert [(record["seq"], record["reason"]) for record, _ in answers] == [(1, "slow_body")]
    until(lambda: hasty_wide.metric("tightfit_in_flight") == 0)


def test_a_large_answer_that_is_not_read_gives_its_slot_back(hasty_wide: Agent) -> None:
    before = hasty_wide.metric("tightfit_requests_total", reason="slow_reader")
    with stream(hasty_wide, FRAMES, receive=4096) as exchange:

        def send() -> None:
            with contextlib.suppress(OSError):
                exchange.send_all([large(1)] * 60)

        sender = threading.Thread(target=send)
        sender.start()
        until(lambda: hasty_wide.metric("tightfit_requests_total", reason="slow_reader") == before + 1)
        until(lambda: hasty_wide.metric("tightfit_in_flight") == 0)
        sender.join()
    with stream(hasty_wide, FRAMES) as exchange:
        exchange.send(large(2))
        exchange.end()
        assert all_frames(exchange)[0][0]["status"] == 200


# --- what takes long


def test_priority_and_timeout_are_the_record_s_own(slow: Agent) -> None:
    with stream(slow) as exchange:
        with stopped(slow.engine_pid):
            exchange.send(turn("long", 1))
            until(lambda: slow.metric("tightfit_running") == 1)
            exchange.send(turn("late", 10, timeout=1000) + turn("good", 10))
            until(lambda: slow.metric("tightfit_requests_total", reason="deadline") == 1)
        records = exchange.records(3)
    assert [record["id"] for record in records] == ["long", "late", "good"]
    assert [record["status"] for record in records] == [200, 504, 200]
    assert records[1]["reason"] == "deadline"
    with stream(slow, headers={"Request-Timeout-Ms": "1"}) as exchange:
        exchange.send(turn("", 400_000))
        assert exchange.records(1)[0]["reason"] == "deadline"


@pytest.mark.parametrize("behind", [0, 400], ids=["its socket is read", "its socket is full"])
def test_what_is_queued_for_a_client_that_went_is_never_run(slow: Agent, behind: int) -> None:
    until(lambda: slow.metric("tightfit_in_flight") == 0)
    before = slow.metric("tightfit_executed_requests_total")
    exchange = stream(slow)
    with stopped(slow.engine_pid):
        exchange.send(turn("", 1))
        until(lambda: slow.metric("tightfit_running") == 1)
        exchange.send(turn("", 10) * 5)
        until(lambda: slow.metric("tightfit_queue_depth") == 5)
        # So much more that nobody reads it, and with it the end of the connection.
        for _ in range(behind):
            exchange.send(turn("x" * 1000, 10))
        exchange.close()
        until(lambda: slow.metric("tightfit_in_flight") == 1)
    until(lambda: slow.metric("tightfit_in_flight") == 0)
    assert slow.metric("tightfit_executed_requests_total") == before + 1
    until(lambda: slow.metric("tightfit_streams") == 0)


def test_all_is_sent_before_anything_is_read(agent: Agent) -> None:
    with stream(agent) as exchange:
        for at in range(500):
            exchange.send(pick(str(at), at, 0))
        exchange.end()
        time.sleep(0.5)
        assert [record["id"] for record in exchange.records()] == [str(at) for at in range(500)]


def test_more_than_may_be_unread(tmp_path: Path) -> None:
    """The client sends and never reads: it is told, can send on, and memory is bounded."""
    bundle = bundles.picking(tmp_path / "picking.tfb")
    settings = "[http]\nbody_s = 60\n[streams]\nunread_kib = 64\npatience_s = 0.5\n"
    with serving(bundle, tmp_path / "log", *configured(tmp_path, settings)) as agent:
        with stream(agent, receive=4096) as exchange:
            assert exchange.status == 200
            record = pick("x" * 4000, 1, 1)
            sender = threading.Thread(target=exchange.send_all, args=([record * 10] * 300,))
            sender.start()
            memory = []
            while sender.is_alive():
                memory.append(pss_by_kind(agent.process.pid)["anonymous"])
                sender.join(0.2)
            exchange.end()
            records = exchange.records()
        assert [each["type"] for each in records[:-1]] == ["result"] * (len(records) - 1)
        assert [each["seq"] for each in records[:-1]] == list(range(1, len(records)))
        assert (records[-1]["type"], records[-1]["since"]) == ("overflow", len(records) - 1)
        assert max(memory) - memory[0] < 16 << 20
        until(lambda: agent.metric("tightfit_in_flight") == 0)
        assert "Traceback" not in agent.log


def test_a_stop_ends_streams_with_a_record(tmp_path: Path) -> None:
    config = configured(tmp_path, "[requests]\ntimeout_s = 120\ndrain_s = 120\n[engine]\nhang_s = 120\n")
    with serving(bundles.slow(tmp_path / "slow.tfb"), tmp_path / "log", *config) as agent:
        with stream(agent) as busy, stream(agent) as idle, Exchange(agent, "/v2/events") as events:
            assert idle.status == events.status == 200
            with stopped(agent.engine_pid):
                busy.send(turn("runs", 1))
                until(lambda: agent.metric("tightfit_running") == 1)
                agent.process.terminate()
                (last,) = idle.records()
            assert (last["type"], last["reason"], last["retry_after_s"]) == ("error", "draining", 5)
            records = busy.records()
            assert [(record["seq"], record.get("id"), record["status"]) for record in records] == [
                (1, "runs", 200),
                (2, None, 503),
            ]
            assert events.event()["event"] == "error"
        assert agent.process.wait(60) == 0
        assert "Traceback" not in agent.log


@pytest.mark.parametrize(("rate", "taken"), [(1.0, [1, 1, 1, 1]), (0.5, [0, 1, 0, 1]), (0.25, [0, 0, 0, 1])])
def test_images_are_left_out_evenly(rate: float, taken: list[int]) -> None:
    evenly = Evenly()
    assert [evenly.takes(rate) for _ in range(8)] == taken * 2
