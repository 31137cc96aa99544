"""What broke other servers in the course of serving, rather than in one request. Proven where the part is tested:

| what | reported at | proven by |
|---|---|---|
| a large body is parsed, and nobody else is answered | NVIDIA/TensorRT-LLM#15690, bhky/opennsfw2#31 | here; the milliseconds in bench/results/bad_peers.md |
| a reader that takes nothing, and a buffer without end | aiohttp#1367, aiohttp#1823, vercel/ai#9475 | here; tests/agent/http/test_streams.py (more than may be unread) |
| reload under load; a reload that fails keeps what ran | triton#2117, triton#2076, triton#2578, triton#2607, triton#5757, triton#6150, triton#2182 | here; tests/agent/test_repository.py (where two do not fit), tests/end_to_end/test_streams.py |
| SIGTERM lets what runs end, refuses what comes, and ends with 0 | aiohttp#3638, aiohttp#1221, aiohttp#7188, aiohttp#7718 | here; tests/agent/test_gateway.py (at the door, and no stop waits for ever) |

triton is triton-inference-server/server.
"""  # noqa: E501

from __future__ import annotations

import json
import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.soak import Process
from targets.bundle import read_manifest
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving, stopped, until
from tests.support.peers import Answer, Peer
from tests.support.wire import LANES as HEADERS

LANES = {name: tuple(f"{key}: {value}" for key, value in headers.items()) for name, headers in HEADERS.items()}
both_lanes = pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
SHAPE = (1024, 4096)
COUNT = SHAPE[0] * SHAPE[1]
MIB = 1 << 20


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """`y = x` of four million numbers."""
    folder = tmp_path_factory.mktemp("large")
    with serving(bundles.identity(folder / "large.tfb", DType.FLOAT32, SHAPE), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log
        until(lambda: agent.metric("tightfit_in_flight") == 0)


def large(*fields: str, binary: bool = False) -> bytes:
    """A request, as 38 MB of JSON or 16 MB of raw tensors; its answer is raw tensors."""
    tensor: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": list(SHAPE)}
    more = {"parameters": {"binary_data_output": True}}
    if binary:
        text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 4 * COUNT}}], **more}).encode()
        body, fields = text + bytes(4 * COUNT), (*fields, f"Inference-Header-Content-Length: {len(text)}")
    else:
        data = ",".join(["0.123456"] * COUNT)
        body = json.dumps({"inputs": [{**tensor, "data": 0}], **more}).replace('"data": 0', f'"data":[{data}]').encode()
    lines = ["POST /v2/models/large/infer HTTP/1.1", "Host: ecu", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def _asked(agent: Agent, sent: bytes) -> Answer:
    with Peer(("127.0.0.1", agent.port)) as client:
        client.send(sent)
        return client.answer()


@both_lanes
def test_others_are_answered_while_a_large_body_is_read_and_decoded(agent: Agent, lane: Sequence[str]) -> None:
    sent = large(*lane)
    assert len(sent) > 37_000_000
    with ThreadPoolExecutor(1) as thread, Peer(("127.0.0.1", agent.port)) as client:
        for _ in range(2):
            answer = thread.submit(_asked, agent, sent)
            live = 0
            while not answer.done():
                client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: ecu\r\n\r\n")
                live += client.answer().json == {"live": True}
            # Where the loop stands still until all is decoded, there are one or two.
            assert live > 10
            body = answer.result().body[int(answer.result().headers["inference-header-content-length"]) :]
            assert body == struct.pack("<f", 0.123456) * COUNT


@both_lanes
def test_a_large_body_that_is_wrong_at_its_end(agent: Agent, lane: Sequence[str]) -> None:
    sent = large(*lane)
    end = sent.rindex(b"]", 0, sent.rindex(b"]"))
    while not sent[: end + 1].endswith(b"0.123456]"):
        end = sent.rindex(b"]", 0, end)
    for wrong in (b"NaN]", b"}  ]", b",  ]", b"e99]"):
        answer = _asked(agent, sent[: end - 3] + (b"  " + wrong)[-4:] + sent[end + 1 :])
        assert answer.status == 400, wrong


@both_lanes
def test_who_reads_nothing_costs_no_more_than_its_answer(agent: Agent, lane: Sequence[str], tmp_path: Path) -> None:
    """Its answer goes out of its slot; what is in the gateway meanwhile is a piece of it."""
    config = tmp_path / "agent.toml"
    config.write_text("[http]\nsend_s = 1\n")
    bundle = bundles.identity(tmp_path / "large.tfb", DType.FLOAT32, SHAPE)
    with serving(bundle, tmp_path / "log", "--config", str(config)) as other:
        assert _asked(other, large(*lane, binary=True)).status == 200
        before = Process.of(other.process.pid).anonymous
        for given_up in range(1, 4):
            with Peer(("127.0.0.1", other.port), receive=4096) as client:
                client.send(large(*lane, binary=True))
                until(lambda: _given_up(other) == given_up)  # noqa: B023 - over before the next turn
                # Its slot is another's.
                assert other.metric("tightfit_in_flight") == 0
        assert Process.of(other.process.pid).anonymous < before + 32 * MIB


def _given_up(agent: Agent) -> float:
    """Requests whose answer was not taken."""
    return sum(agent.metric("tightfit_requests_total", reason=reason) for reason in ("slow_reader", "disconnected"))


# --- reload, and the end


def small(*fields: str) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    body = json.dumps({"inputs": [tensor]}).encode()
    lines = ["POST /v2/models/small/infer HTTP/1.1", "Host: ecu", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def version(folder: Path, number: int) -> Path:
    bundle = bundles.identity(folder, DType.FLOAT32, (1, 2))
    return bundles.rewrite(bundle, read_manifest(bundle), name="small", options={"variant": str(number)})


def _put_in_place(bundle: Path, place: Path) -> None:
    link = place.with_name("new")
    link.symlink_to(bundle)
    link.rename(place)


def _reloaded(agent: Agent) -> dict[str, str]:
    """How the model stands after a reload."""
    before = agent.log.count('"reloaded"')
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: agent.log.count('"reloaded"') > before)
    (entry,) = json.loads(agent.request("/v2/repository/index", b"{}")[1])
    return entry


@both_lanes
def test_who_asks_through_a_reload_is_answered_and_what_cannot_be_loaded_changes_nothing(
    lane: Sequence[str], tmp_path: Path
) -> None:
    first, second = version(tmp_path / "1.tfb", 1), version(tmp_path / "2.tfb", 2)
    broken = version(tmp_path / "3.tfb", 3)
    (broken / "segments" / "00.onnx").write_bytes(b"\x08\x0a not a graph")
    bundles.rewrite(broken, read_manifest(broken))
    names = [read_manifest(each).version for each in (first, second)]
    place = tmp_path / "served.tfb"
    place.symlink_to(first)
    (tmp_path / "agent.toml").write_text(f'[[models]]\nbundle = "{place}"\n')
    with serving(None, tmp_path / "log", "--config", str(tmp_path / "agent.toml")) as agent:
        stop = threading.Event()

        def ask() -> Counter[str]:
            answers: Counter[str] = Counter()
            with Peer(("127.0.0.1", agent.port)) as client:
                while not stop.is_set():
                    client.send(small(*lane))
                    answer = client.answer()
                    answers[answer.json["model_version"] if answer.status == 200 else answer.json["error"]] += 1
            return answers

        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            try:
                until(lambda: agent.metric("tightfit_requests_total") > 4)
                _put_in_place(second, place)
                assert _reloaded(agent)["version"] == names[1]
                before = agent.metric("tightfit_requests_total")
                until(lambda: agent.metric("tightfit_requests_total") > before + 4)
                _put_in_place(broken, place)
                entry = _reloaded(agent)
                assert (entry["version"], entry["state"]) == (names[1], "READY")
                assert "00.onnx" in entry["reason"]
                before = agent.metric("tightfit_requests_total")
                until(lambda: agent.metric("tightfit_requests_total") > before + 4)
            finally:
                stop.set()
            answers = sum((each.result() for each in asking), Counter[str]())
        assert set(answers) == set(names)
        assert "Traceback" not in agent.log


@both_lanes
def test_a_stop_lets_what_runs_end_and_refuses_what_comes(lane: Sequence[str], tmp_path: Path) -> None:
    with serving(version(tmp_path / "small.tfb", 1), tmp_path / "log") as agent:
        address = ("127.0.0.1", agent.port)
        with Peer(address) as running, Peer(address) as idle:
            for client in (running, idle):
                client.send(small(*lane))
                assert client.answer().status == 200
            with stopped(agent.engine_pid):
                running.send(small(*lane))
                until(lambda: agent.metric("tightfit_running") == 1)
                agent.process.send_signal(signal.SIGTERM)
                until(lambda: "stopping" in agent.log)
                idle.send(small(*lane))
                refused = idle.answer()
                assert (refused.status, refused.closes) == (503, True)
                until(lambda: not _listens(agent))
            assert running.answer().json["outputs"][0]["data"] == [1, 2]
            assert running.ended()
            assert idle.ended()
        assert agent.process.wait(60) == 0
        assert "Traceback" not in agent.log


def _listens(agent: Agent) -> bool:
    try:
        socket.create_connection(("127.0.0.1", agent.port)).close()
    except ConnectionRefusedError:
        return False
    return True
