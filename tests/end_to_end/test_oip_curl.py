"""Plain curl against a real agent: what a person types, and what libcurl's clients send."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

BODY = {
    "id": "drive-7",
    "inputs": [
        {"name": "a", "datatype": "FP32", "shape": [1, 8], "data": [1, 2, 3, 4, 5, 6, 7, 8]},
        {"name": "b", "datatype": "FP32", "shape": [1, 8], "data": [[1, 1, 1, 1, 1, 1, 1, 1]]},
    ],
}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("curl")
    with serving(bundles.add(folder / "add.tfb"), folder / "log") as agent:
        yield agent


def curl(*arguments: str) -> tuple[int, bytes]:
    """(status, body)."""
    command = ["curl", "--silent", "--show-error", "--max-time", "20", "--write-out", "\n%{http_code}", *arguments]
    done = subprocess.run(command, capture_output=True, check=True)
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), body


def test_infer_as_json(agent: Agent) -> None:
    status, body = curl(f"{agent.url}/v2/models/add/infer", "--data", json.dumps(BODY))
    answer = json.loads(body)
    assert (status, answer["id"], answer["model_name"]) == (200, "drive-7", "add")
    assert answer["outputs"][0] == {
        "name": "total", "datatype": "FP32", "shape": [1, 8], "data": [2, 3, 4, 5, 6, 7, 8, 9],
    }  # fmt: skip


def test_infer_as_binary(agent: Agent, tmp_path: Path) -> None:
    values = struct.pack("<8f", *range(8))
    head = json.dumps(
        {
            "inputs": [
                {"name": n, "datatype": "FP32", "shape": [1, 8], "parameters": {"binary_data_size": 32}} for n in "ab"
            ],
            "outputs": [{"name": "total", "parameters": {"binary_data": True}}],
        }
    ).encode()
    (tmp_path / "body").write_bytes(head + values + values)
    (tmp_path / "headers").touch()
    status, body = curl(
        f"{agent.url}/v2/models/add/infer", "--data-binary", f"@{tmp_path / 'body'}",
        "--header", f"Inference-Header-Content-Length: {len(head)}", "--dump-header", str(tmp_path / "headers"),
    )  # fmt: skip
    assert status == 200
    headers = (tmp_path / "headers").read_text().lower()
    assert "content-type: application/octet-stream" in headers
    assert struct.unpack("<8f", body[-32:]) == tuple(2.0 * n for n in range(8))


def test_compressed_both_ways(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text(json.dumps(BODY))
    subprocess.run(["gzip", str(tmp_path / "body.json")], check=True)
    status, body = curl(
        f"{agent.url}/v2/models/add/infer", "--data-binary", f"@{tmp_path / 'body.json.gz'}",
        "--header", "Content-Encoding: gzip", "--compressed",
    )  # fmt: skip
    assert (status, json.loads(body)["id"]) == (200, "drive-7")


def test_health_metadata_and_errors(agent: Agent) -> None:
    assert curl(f"{agent.url}/v2/health/live")[0] == 200
    assert curl(f"{agent.url}/v2/health/ready")[0] == 200
    assert json.loads(curl(f"{agent.url}/v2/models/add")[1])["name"] == "add"
    status, body = curl(f"{agent.url}/v2/models/ad/infer", "--data", "{}")
    assert (status, "did you mean 'add'?" in json.loads(body)["error"]) == (404, True)
    assert curl(f"{agent.url}/v2/models/add/infer")[0] == 405
    assert curl("--head", f"{agent.url}/v2/health/live")[0] == 200
    assert curl("--http1.0", f"{agent.url}/v2/health/live")[0] == 200


def test_a_body_large_enough_for_expect_continue(tmp_path: Path) -> None:
    """libcurl asks `Expect: 100-continue` before it sends more than 1 MiB."""
    shape = (600, 1000)
    with serving(bundles.identity(tmp_path / "x.tfb", DType.FLOAT32, shape), tmp_path / "log") as agent:
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [0.5] * 600_000}
        (tmp_path / "body").write_text(json.dumps({"inputs": [tensor]}))
        status, body = curl(f"{agent.url}/v2/models/x/infer", "--data-binary", f"@{tmp_path / 'body'}")
        assert status == 200
        assert json.loads(body)["outputs"][0]["data"] == [0.5] * 600_000
        (tmp_path / "body").write_bytes(b"0" * (70 << 20))
        assert curl(f"{agent.url}/v2/models/x/infer", "--data-binary", f"@{tmp_path / 'body'}")[0] == 413
