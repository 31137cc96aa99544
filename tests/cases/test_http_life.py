"""What broke other servers in the course of serving, rather than in one request. Proven where the part is tested:

| what | reported at | proven by |
|---|---|---|
| a large body is parsed, and nobody else is answered | NVIDIA/TensorRT-LLM#15690, bhky/opennsfw2#31 | here; the milliseconds in bench/results/bad_peers.md |
| a reader that takes nothing, and a buffer without end | aiohttp#1367, aiohttp#1823, vercel/ai#9475 | here; tests/agent/http/test_streams.py (more than may be unread) |
| reload under load; a reload that fails keeps what ran | triton#2117, triton#2076, triton#2578, triton#2607, triton#5757, triton#6150, triton#2182 | tests/agent/test_repository.py, tests/end_to_end/test_streams.py |
| SIGTERM lets what runs end, refuses what comes, and ends with 0 | aiohttp#3638, aiohttp#1221, aiohttp#7188, aiohttp#7718 | tests/agent/test_gateway.py (a stop answers what was accepted) |

triton is triton-inference-server/server.
"""  # noqa: E501

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.soak import Process
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving, until
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
