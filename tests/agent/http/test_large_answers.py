"""Large answers leave straight out of their slot: whole, unmixed, and never for longer than a client may take."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving, until

SHAPE = (1024, 1024)
SEND_S = 3.0


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("large")
    config = folder / "agent.toml"
    config.write_text(f"[http]\nsend_s = {SEND_S}\n")
    bundle = bundles.identity(folder / "large.tfb", DType.FLOAT32, SHAPE, slots=1)
    with serving(bundle, folder / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def request_of(agent: Agent, values: np.ndarray) -> tuple[bytes, dict[str, str]]:
    _, metadata, _ = agent.request(f"/v2/models/{agent.name}")
    (name,) = (entry["name"] for entry in json.loads(metadata)["inputs"])
    data = values.tobytes()
    tensor = {"name": name, "shape": list(SHAPE), "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def test_answers_through_one_slot_are_not_mixed(agent: Agent) -> None:
    def ask(seed: int) -> bool:
        values = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
        status, body, headers = agent.post(*request_of(agent, values))
        assert status == 200
        return body[int(headers["Inference-Header-Content-Length"]) :] == values.tobytes()

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(24)))


def test_a_client_that_does_not_read_gives_its_slot_back(agent: Agent) -> None:
    body, headers = request_of(agent, np.zeros(SHAPE, np.float32))
    lines = [f"POST /v2/models/{agent.name}/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode()
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", agent.port))
        silent.sendall(head + body)
        until(lambda: agent.metric("tightfit_in_flight") == 1)
        status, _, _ = agent.post(*request_of(agent, np.ones(SHAPE, np.float32)))
        assert status == 200
        until(lambda: agent.metric("tightfit_requests_total", reason="slow_reader") >= 1)
