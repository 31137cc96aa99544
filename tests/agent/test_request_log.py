"""The line that a request leaves: what stands in it, and for which requests there is one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import Reason
from agent.request_log import Sparing
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import COMMAND, ROOT, Agent, serving, until
from tests.support.wire import LANES, tensors

TRACE = "0af7651916cd43dd8448eb211c80319c"
IDS = {"X-Request-Id": "wiper-7", "traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}
VALUES = {name: np.arange(8, dtype=np.float32).reshape(1, 8) * (at + 1) for at, name in enumerate("ab")}
DIGEST = hashlib.sha256(b"".join(struct.pack("<Q", each.nbytes) + each.tobytes() for each in VALUES.values()))


def lines_of(agent: Agent, event: str = "request") -> list[dict[str, Any]]:
    if agent.process.poll() is None:
        # An answer may be there before its line is; behind the next one both are.
        agent.request("/v2/health/live")
    lines = [json.loads(line) for line in agent.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def ask(agent: Agent, arrays: dict[str, Any] = VALUES, binary: bool = False, **headers: str) -> int:
    body, more = tensors(arrays, binary)
    status, _, _ = agent.post(body, {**dict(line.split(": ") for line in more), **headers})
    return status


def configured(folder: Path, requests: str) -> list[str]:
    (folder / "agent.toml").write_text(f'[log]\nrequests = "{requests}"\n', encoding="utf-8")
    return ["--config", str(folder / "agent.toml")]


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("all")
    with serving(bundles.add(folder / "add.tfb"), folder / "log", *configured(folder, "all")) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(params=LANES)
def either(talkative: Agent, request: pytest.FixtureRequest) -> Agent:
    """The agent, asked by either lane."""
    return replace(talkative, headers=LANES[request.param])


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_what_is_known_of_a_request_stands_in_its_line(either: Agent, binary: bool) -> None:
    before = len(lines_of(either))
    assert ask(either, binary=binary, Priority="u=1", **IDS) == 200
    (line,) = lines_of(either)[before:]
    times = {name: line.pop(name) for name in ("latency_ms", "queue_ms", "run_ms")}
    version = json.loads(either.request("/v2/models/add")[1])["versions"][0]
    del line["timestamp"]
    assert line == {
        "service_name": "tightfit-agent", "part": "gateway", "event": "request", "level": "info",
        "request_id": "wiper-7", "trace_id": TRACE, "model": "add", "version": version, "status_code": 200,
        "reason": "ok", "batch_size": 1, "input_sha256": DIGEST.hexdigest()[:16], "priority": 64, "client": "127.0.0.1",
    }  # fmt: skip
    assert 0 <= times["queue_ms"] + times["run_ms"] <= times["latency_ms"]
    assert times["run_ms"] > 0


def test_a_request_without_a_name_has_one_of_its_own(either: Agent) -> None:
    before = len(lines_of(either))
    assert [ask(either), ask(either)] == [200, 200]
    first, second = [line["request_id"] for line in lines_of(either)[before:]]
    assert first != second
    assert re.fullmatch(r"[0-9a-f]{8}-\d+", first)
    assert "trace_id" not in lines_of(either)[-1]


def test_what_was_refused_says_why_and_nothing_of_what_was_sent(either: Agent) -> None:
    before = len(lines_of(either))
    secret = "SECRET"  # noqa: S105
    assert ask(either, {secret: VALUES["a"], "b": VALUES["b"]}) == 400
    assert either.post(b'{"inputs": "SECRET"}', path="/v2/models/add/infer")[0] == 400
    assert either.post(b"{}", path="/v2/models/SECRET/infer")[0] == 404
    lines = lines_of(either)[before:]
    assert [(line["status_code"], line["reason"]) for line in lines] == [
        (400, "bad_request"), (400, "bad_request"), (404, "unknown_model"),
    ]  # fmt: skip
    assert not any("input_sha256" in line or "batch_size" in line or "run_ms" in line for line in lines)
    assert secret not in str(lines)


def test_of_a_large_input_the_beginning_is_hashed(tmp_path: Path) -> None:
    shape = (64, 1024)
    bundle = bundles.identity(tmp_path / "x.tfb", DType.FLOAT32, shape)
    with serving(bundle, tmp_path / "log", *configured(tmp_path, "all")) as agent:
        (name,) = [each["name"] for each in json.loads(agent.request(f"/v2/models/{agent.name}")[1])["inputs"]]
        values = np.random.default_rng(1).random(shape, np.float32)
        other = values.copy()
        other[-1] = 0
        for each in (values, other, values + 1):
            assert ask(agent, {name: each}, binary=True) == 200
        # A large answer has left before its request ends.
        until(lambda: len(lines_of(agent)) == 3)
        digests = [line["input_sha256"] for line in lines_of(agent)]
        length = struct.pack("<Q", values.nbytes)
    assert digests[0] == digests[1] == hashlib.sha256(length + values.tobytes()[: 64 << 10]).hexdigest()[:16]
    assert digests[2] != digests[0]


def picks(*rows: int) -> bytes:
    x = {"name": "x", "datatype": "FP32", "shape": [len(rows), 8], "data": [0] * 8 * len(rows)}
    at = {"name": "at", "datatype": "INT64", "shape": [len(rows)], "data": rows}
    return json.dumps({"inputs": [x, at], "outputs": [{"name": "picked"}]}).encode()


@pytest.mark.parametrize("lane", LANES)
def test_a_run_that_failed_or_was_lost_says_what_it_was(tmp_path: Path, lane: str) -> None:
    bundle = bundles.picking(tmp_path / "picking.tfb")
    with serving(bundle, tmp_path / "log") as agent, ThreadPoolExecutor(1) as threads:
        agent.headers = LANES[lane]
        assert agent.post(picks(1, 2, 99))[0] == 500
        os.kill(agent.engine_pid, signal.SIGSTOP)
        lost = threads.submit(agent.post, picks(4, 5))
        until(lambda: agent.metric("tightfit_running") == 1)
        os.kill(agent.engine_pid, signal.SIGKILL)
        assert lost.result()[0] == 503
        failed, gone = lines_of(agent)
    assert (failed["reason"], failed["status_code"], failed["level"]) == ("engine_error", 500, "warning")
    assert (gone["reason"], gone["status_code"], gone["level"]) == ("engine_down", 503, "info")
    assert (failed["batch_size"], gone["batch_size"]) == (3, 2)
    assert "SIGKILL" in gone["message"]
    for line in (failed, gone):
        assert len(line["input_sha256"]) == 16
        assert "run_ms" not in line
        assert line["queue_ms"] <= line["latency_ms"]


@pytest.mark.parametrize("lane", LANES)
def test_a_flood_of_refusals_leaves_few_lines_and_their_number(tmp_path: Path, lane: str) -> None:
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log") as agent:
        agent.headers = LANES[lane]
        assert ask(agent) == 200
        for _ in range(60):
            assert agent.post(b"{}")[0] == 400
        # Another reason is not hidden by it.
        assert agent.post(b"{}", path="/v2/models/none/infer")[0] == 404
        assert agent.stop() == 0
        counts = dict.fromkeys(("ok", "bad_request", "unknown_model"), 0)
        for line in lines_of(agent):
            counts[line["reason"]] += 1
        left_out = sum(line["left_out"]["bad_request"] for line in lines_of(agent, MORE))
        assert counts["ok"] == 0
        assert counts["unknown_model"] == 1
        assert counts["bad_request"] + left_out == 60
        assert counts["bad_request"] >= 10
        assert left_out > 0


MORE = "more requests failed than have lines here"


@pytest.mark.parametrize("lane", LANES)
def test_a_log_that_nobody_takes_changes_no_answer(tmp_path: Path, lane: str) -> None:
    """As where journald has gone."""
    bundle = bundles.add(tmp_path / "add.tfb")
    command = [*COMMAND, "serve", "--bundle", str(bundle), "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        [*command, *configured(tmp_path, "all")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            url = process.stdout.readline().split()[-1]
            process.stderr.close()
            agent = Agent(process, "add", url, tmp_path / "none", headers=LANES[lane])
            assert [agent.post(b"{}")[0] for _ in range(4)] == [400] * 4
            assert [ask(agent) for _ in range(4)] == [200] * 4
            until(lambda: agent.metric("tightfit_in_flight") == 0)
            assert agent.metric("tightfit_requests_total", model="add") == 8
            assert agent.stop() == 0
        finally:
            process.kill()


def test_none(tmp_path: Path) -> None:
    with serving(bundles.picking(tmp_path / "p.tfb"), tmp_path / "log", *configured(tmp_path, "none")) as agent:
        assert agent.post(b"{}")[0] == 400
        until(lambda: agent.metric("tightfit_requests_total", reason="bad_request") == 1)
        assert agent.stop() == 0
        assert not lines_of(agent)
        assert not lines_of(agent, MORE)


@given(st.lists(st.tuples(st.sampled_from([Reason.SHED, Reason.DEADLINE]), st.floats(0, 3))))
def test_of_each_reason_there_are_ten_lines_and_then_ten_a_minute(comes: list[tuple[Reason, float]]) -> None:
    sparing, now = Sparing(), 0.0
    taken: dict[Reason, list[float]] = {Reason.SHED: [], Reason.DEADLINE: []}
    for reason, after in comes:
        now += after
        if sparing.takes(reason, now):
            taken[reason].append(now)
    for reason, times in taken.items():
        came = sum(each is reason for each, _ in comes)
        assert len(times) + sparing.left_out.get(reason, 0) == came
        assert len(times) >= min(came, 10)
        for at, since in enumerate(times):
            assert len(times) - at <= 10 + (times[-1] - since) / 6 + 1e-6
