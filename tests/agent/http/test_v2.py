"""The protocol's errors over a real socket: each is answered, and the next good request is served."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from targets.bundle import read_manifest
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.wire import LANES

INFER = "/v2/models/add/infer"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("v2")
    with serving(bundles.add(folder / "add.tfb"), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(params=LANES)
def either(agent: Agent, request: pytest.FixtureRequest) -> Agent:
    """The agent, asked by either lane."""
    return replace(agent, headers=LANES[request.param])


def good(values: Any = (1,) * 8) -> dict[str, Any]:
    return {"inputs": [{"name": n, "shape": [1, 8], "datatype": "FP32", "data": list(values)} for n in "ab"]}


def raw(agent: Agent, data: bytes, timeout: float = 60) -> bytes:
    """Send bytes as they are and read until the server closes."""
    with socket.create_connection(("127.0.0.1", agent.port), timeout) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def is_error(answer: tuple[int, bytes, dict[str, str]], status: int) -> str:
    code, body, headers = answer
    assert code == status, body
    assert headers["Content-Type"] == "application/json"
    (text,) = json.loads(body).values()
    assert json.loads(body) == {"error": text}
    assert len(text) <= 2000
    return str(text)


@pytest.fixture(autouse=True)
def _still_serves(agent: Agent) -> Iterator[None]:
    yield
    status, body, _ = agent.post(good())
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [2.0] * 8)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[" * 20_000, b"\xef\xbb\xbf{}", json.dumps(good()).encode("utf-16"),
        json.dumps(good()).encode().replace(b"1,", b"NaN,", 1),
        json.dumps(good()).encode().replace(b"[1,", b"[1e999,", 1),
        json.dumps(good((1,) * 7)).encode(), json.dumps(good((1,) * 9)).encode(),
        json.dumps(good(((1,) * 4, (1,) * 3))).encode(), json.dumps(good((9**999,) * 8)).encode(),
        json.dumps(good()).encode().replace(b'"inputs"', b'"inputs":[],"inputs"'),
    ],
)  # fmt: skip
def test_bad_bodies(either: Agent, body: bytes) -> None:
    is_error(either.post(body), 400)


@pytest.mark.parametrize("length", ["-1", "abc", "0", "999999"])
def test_bad_header_lengths(either: Agent, length: str) -> None:
    text = is_error(either.post(good(), {"Inference-Header-Content-Length": length}), 400)
    assert "Inference-Header-Content-Length" in text


def test_broken_gzip_and_a_bomb(agent: Agent) -> None:
    is_error(agent.post(b"not gzip at all", {"Content-Encoding": "gzip"}), 400)
    bomb = gzip.compress(bytes(200 << 20), compresslevel=9)
    is_error(agent.post(bomb, {"Content-Encoding": "gzip"}), 413)
    is_error(agent.post(gzip.compress(bytes(60 << 20)), {"Content-Encoding": "gzip"}), 413)
    is_error(agent.post(b"x", {"Content-Encoding": "br"}), 415)


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(agent: Agent) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n"
    for expect in ("", "Expect: 100-continue\r\n"):
        answer = raw(agent, (head + expect + "\r\n").encode())
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"100 Continue" not in answer


def test_expect_continue_is_answered_when_the_body_is_wanted(agent: Agent) -> None:
    body = json.dumps(good()).encode()
    with socket.create_connection(("127.0.0.1", agent.port), 10) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_a_chunked_body_past_the_limit(agent: Agent) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    assert raw(agent, head + chunk * 4).startswith(b"HTTP/1.1 413 ")


def test_length_and_chunked_together_are_not_served_twice(agent: Agent) -> None:
    smuggled = b"0\r\n\r\nGET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    answer = raw(agent, head + smuggled)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 400 ")
    assert list(json.loads(body)) == ["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1", "/v2/", "/v2/models", "/v2/models//infer", "/v2/models/..%2f..%2fetc/infer", "/v2/models/%00/infer",
        f"/v2/models/{'a' * 300}/infer", "/v2/models/none", "/v2/models/none/ready", "/v2/models/add/versions/1",
        "/v2/models/add/versions/1/ready", "/v2/models/add/versions/..%2f/infer", "/v2/models/../../etc/passwd",
    ],
)  # fmt: skip
def test_paths_that_are_not_there(agent: Agent, path: str) -> None:
    data = b"{}" if path.endswith("/infer") else None
    is_error(agent.request(path, data), 404)


def test_unknown_names_list_what_there_is(either: Agent) -> None:
    assert "did you mean 'add'? available: add" in is_error(either.request("/v2/models/adder"), 404)
    version = json.loads(either.request("/v2/models/add")[1])["versions"][0]
    assert f"available: {version}" in is_error(either.request("/v2/models/add/versions/1"), 404)
    assert either.post(good(), path=f"/v2/models/add/versions/{version}/infer")[0] == 200
    text = is_error(either.post({**good(), "outputs": [{"name": "sum"}]}), 400)
    assert "unknown output 'sum'" in text
    assert "scaled, total" in text


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", INFER, "POST"), ("POST", "/v2", "GET,HEAD")])
def test_other_methods_are_told_which_there_are(agent: Agent, method: str, path: str, allowed: str) -> None:
    answer = agent.request(path, method=method)
    is_error(answer, 405)
    assert answer[2]["Allow"] == allowed


def test_heads_are_limited(agent: Agent) -> None:
    for line in (f"X: {'a' * 9000}", "\r\n".join(f"X{n}: a" for n in range(200))):
        answer = raw(agent, f"GET /v2 HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.0 431 ")
        assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


def test_a_subset_of_outputs_in_the_order_asked(either: Agent) -> None:
    outputs = [{"name": "scaled"}, {"name": "total", "parameters": {"binary_data": True}}]
    status, body, headers = either.post({**good(), "id": "42", "outputs": outputs})
    length = int(headers["Inference-Header-Content-Length"])
    head = json.loads(body[:length])
    assert (status, head["id"]) == (200, "42")
    assert [output["name"] for output in head["outputs"]] == ["scaled", "total"]
    assert head["outputs"][0]["data"] == [2.0 * n for n in range(8)]
    assert np.frombuffer(body[length:], "<f4").tolist() == [2.0] * 8


def test_response_heads_are_small_and_tell_no_versions(either: Agent) -> None:
    _, _, headers = either.post(good())
    assert headers["Server"] == "tightfit-agent"
    assert sum(len(name) + len(value) + 4 for name, value in headers.items()) < 256


def test_health_and_description(agent: Agent) -> None:
    for path, expected in {
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        "/v2/models/add/ready": {"name": "add", "ready": True},
    }.items():
        status, body, _ = agent.request(path)
        assert (status, json.loads(body)) == (200, expected)
    assert {"binary_tensor_data", "model_repository"} < set(json.loads(agent.request("/v2")[1])["extensions"])
    model = json.loads(agent.request("/v2/models/add")[1])
    assert model["inputs"][0] == {"name": "a", "datatype": "FP32", "shape": [-1, 8]}


def test_metrics_tell_outcomes_and_memory(either: Agent) -> None:
    def read() -> dict[str, float]:
        status, body, headers = either.request("/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        lines = [line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = read()
    either.post(good())
    either.post(b"{")
    after = read()
    for reason in ("ok", "bad_request"):
        name = f'tightfit_requests_total{{model="add",reason="{reason}"}}'
        assert after[name] == before[name] + 1
    assert after['tightfit_engine_up{model="add"}'] == 1
    assert after['tightfit_in_flight{model="add"}'] == 0
    for process in ("gateway", "engine"):
        assert either.metric("tightfit_memory_bytes", kind="anonymous", process=process) > 1 << 20


def test_metrics_show_the_plan_beside_what_is_used(agent: Agent) -> None:
    plan = read_manifest(Path(agent.log_file).parent / "add.tfb").plan
    for term in plan.phase("run").terms:
        assert agent.metric("tightfit_plan_bytes", term=term.name, kind=term.kind) == term.nbytes
    assert agent.metric("tightfit_slots") == plan.slots
    assert agent.metric("tightfit_pool_bytes") == 0
    assert agent.metric("tightfit_door_room") == 64
    assert agent.metric("tightfit_budget_bytes") > plan.phase("run").total_bytes
    assert agent.metric("tightfit_build_info") == 1
    before = agent.metric("tightfit_uptime_seconds"), agent.metric("tightfit_batch_rows_count")
    agent.post(good())
    assert agent.metric("tightfit_uptime_seconds") > before[0] > 0
    assert agent.metric("tightfit_batch_rows_count") == before[1] + 1


def test_metrics_as_a_scraper_asks_for_them(agent: Agent) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    agent.post(good(), {"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    _, body, headers = agent.request("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    samples = [sample for family in open_metrics(body.decode()) for sample in family.samples]
    assert trace in [sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar]
    _, body, headers = agent.request("/metrics")
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert trace not in body.decode()


def test_health_is_answered_while_a_large_body_is_parsed(tmp_path: Path) -> None:
    count = 2_000_000
    bundle = bundles.identity(tmp_path / "large.tfb", DType.FLOAT32, (count,))
    with serving(bundle, tmp_path / "log") as agent, ThreadPoolExecutor(1) as threads:
        body = (
            b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d],"data":[' % count + b"0.5," * (count - 1) + b"1]}]}"
        )

        def longest_s() -> float:
            """Of all that is asked until the body is answered."""
            answer = threads.submit(agent.post, body)
            took = []
            while not answer.done():
                started = time.perf_counter()
                assert agent.request("/v2/health/live")[0] == 200
                took.append(time.perf_counter() - started)
                time.sleep(0.02)
            status, text, _ = answer.result()
            assert status == 200
            assert text.endswith(b"0.5,1.0]}]}")
            return max(took)

        # Without threads and pieces it is the better part of a second every time, whatever else the machine does.
        assert any(longest_s() < 0.25 for _ in range(6))


def test_connections_past_the_limit_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[http]\nconnections = 3\n")
    bundle = bundles.identity(tmp_path / "x.tfb", DType.FLOAT32)
    with serving(bundle, tmp_path / "log", "--config", str(tmp_path / "a.toml")) as agent:
        with contextlib.ExitStack() as kept:
            for _ in range(3):
                connection = kept.enter_context(socket.create_connection(("127.0.0.1", agent.port), 60))
                connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            answer = raw(agent, b"")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"3 connections are open, which is the limit" in answer
        # Until the agent has seen that they are closed.
        until(lambda: agent.request("/v2/health/live")[0] == 200)


@pytest.mark.parametrize(
    "path", [INFER, "/v2", "/v2/models/none/infer", "/nowhere", "/v2/models/add/stream", "/v2/events"]
)
def test_ids_are_echoed_on_answers_errors_and_heads_of_streams(agent: Agent, path: str) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    data = None if path in ("/v2", "/nowhere", "/v2/events") else json.dumps(good()).encode()
    request = urllib.request.Request(agent.url + path, data, {"X-Request-Id": "a7", "traceparent": trace})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            headers = response.headers
    except urllib.error.HTTPError as error:
        with error:
            headers = error.headers
    assert (headers["X-Request-Id"], headers["traceparent"]) == ("a7", trace)


def test_ids_that_no_answer_can_carry_are_ignored(either: Agent) -> None:
    status, _, headers = either.post(good(), {"X-Request-Id": "x" * 129, "traceparent": "none"})
    assert status == 200
    assert not {"x-request-id", "traceparent"} & {name.lower() for name in headers}
