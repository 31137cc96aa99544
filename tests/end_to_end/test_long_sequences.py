"""From `--split` to an answer over HTTP: what windows give is what onnxruntime gives for the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from compile.windows import parse_split
from targets.board import load_board
from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.models import init, model, node, normal, save, value

LONGEST = 5000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions that see three positions to each side, every second position of them; and its mean."""
    nodes = [
        node("Conv", ["x", "w"], ["h"], pads=[2, 2]),
        node("Relu", ["h"], ["r"]),
        node("Conv", ["r", "v"], ["y"], pads=[1, 1], strides=[2]),
        node("ReduceMean", ["y"], ["mean"], axes=[2], keepdims=0),
    ]
    weights = [init("w", normal(16, 8, 5)), init("v", normal(4, 16, 3))]
    outputs = [value("y", ["n", 4, None]), value("mean", ["n", 4])]
    return save(tmp_path_factory.mktemp("long"), model(nodes, [value("x", ["n", 8, "t"])], outputs, weights))


@pytest.fixture(scope="module")
def agent(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    shapes = (parse_shape("n=1..2"), parse_shape("t=1..256"))
    options = Options("fp32", shapes, split=parse_split(f"t={LONGEST}/8"))
    bundle = tmp_path_factory.mktemp("bundle") / "conv.tfb"
    compile_model(source, load_board("x86-64-dev"), bundle, options)
    with serving(bundle, bundle.with_suffix(".log")) as agent:
        yield agent
        assert "Traceback" not in agent.log


def ask(agent: Agent, x: np.ndarray, binary: bool = False, **parameters: Any) -> tuple[int, dict[str, np.ndarray]]:
    item: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    parameters["binary_data_output"] = binary
    if not binary:
        status, body, _ = agent.post({"inputs": [{**item, "data": x.ravel().tolist()}], "parameters": parameters})
        tail = b""
    else:
        item["parameters"] = {"binary_data_size": x.nbytes}
        head = json.dumps({"inputs": [item], "parameters": parameters}).encode()
        sent = {"Inference-Header-Content-Length": str(len(head))}
        status, body, headers = agent.post(head + x.tobytes(), sent)
        length = int(headers.get("Inference-Header-Content-Length", len(body)))
        body, tail = body[:length], body[length:]
    if status != 200:
        return status, {"error": np.array(json.loads(body)["error"])}
    outputs = {}
    for each in json.loads(body)["outputs"]:
        if binary:
            size = each["parameters"]["binary_data_size"]
            data, tail = np.frombuffer(tail[:size], np.float32), tail[size:]
        else:
            data = np.array(each["data"], np.float32)
        outputs[each["name"]] = data.reshape(each["shape"])
    return status, outputs


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("length", [1, 256, 257, 500, 1001])
def test_windows_give_what_the_whole_gives(agent: Agent, source: Path, length: int, binary: bool) -> None:
    x = normal(2, 8, length)
    (expected,) = onnxruntime.InferenceSession(source).run(["y"], {"x": x})
    status, outputs = ask(agent, x, binary)
    assert status == 200
    np.testing.assert_allclose(outputs["y"], expected, rtol=1e-4, atol=1e-4)


def test_as_long_as_it_may_be_and_no_longer(agent: Agent, source: Path) -> None:
    """The answer is raw and large: it is sent in pieces."""
    before = agent.metric("tightfit_pass_seconds_count")
    x = normal(2, 8, LONGEST)
    (expected,) = onnxruntime.InferenceSession(source).run(["y"], {"x": x})
    status, outputs = ask(agent, x, binary=True)
    assert status == 200
    np.testing.assert_allclose(outputs["y"], expected, rtol=1e-4, atol=1e-4)
    assert agent.metric("tightfit_pass_seconds_count") == before + 1 + -(-(LONGEST - 256) // 248)
    status, refused = ask(agent, normal(2, 8, LONGEST + 1), binary=True)
    assert (status, "the bundle was compiled for 1..5000 there" in str(refused["error"])) == (400, True)
    until(lambda: agent.metric("tightfit_in_flight") == 0)


def test_one_deadline_for_all_windows(agent: Agent) -> None:
    status, refused = ask(agent, normal(2, 8, LONGEST), binary=True, timeout=1)
    assert (status, "deadline" in str(refused["error"])) == (504, True)
    assert ask(agent, normal(1, 8, 300))[0] == 200


def test_what_cannot_be_done_in_time_is_not_begun(tmp_path: Path) -> None:
    """One window can be, all of them cannot."""
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\ntimeout_s = 120\n")
    bundle = bundles.slow(tmp_path / "slow.tfb", longest=80)
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:

        def asked(length: int, **parameters: int) -> tuple[int, str]:
            x = {"name": "x", "datatype": "FP32", "shape": [length], "data": [1.0] * length}
            turns = {"name": "turns", "datatype": "INT64", "shape": [1], "data": [600_000]}
            status, body, _ = agent.post({"inputs": [x, turns], "parameters": parameters})
            return status, json.loads(body).get("error", "")

        took_s = []
        for _ in range(5):
            before_s = agent.metric("tightfit_pass_seconds_sum")
            assert asked(4)[0] == 200
            took_s.append(agent.metric("tightfit_pass_seconds_sum") - before_s)
        before = agent.metric("tightfit_pass_seconds_count")
        status, error = asked(80, timeout=int(10e6 * min(took_s)))
        assert (status, error[:33]) == (504, "the answer would be there in abou")
        assert agent.metric("tightfit_pass_seconds_count") == before
        assert asked(80)[0] == 200
        assert agent.metric("tightfit_pass_seconds_count") == before + 20


def test_requests_of_unequal_length_answer_as_alone(tmp_path: Path) -> None:
    """Whichever of them the scheduler lets run together, padded."""
    with serving(bundles.masked(tmp_path / "masked.tfb", slots=8), tmp_path / "log") as agent:

        def asked(length: int) -> tuple[Any, ...]:
            x = np.arange(1, length + 1, dtype=np.float32)
            item = {"datatype": "FP32", "shape": [1, length]}
            inputs = [{**item, "name": "x", "data": x.tolist()}, {**item, "name": "mask", "data": [1.0] * length}]
            status, body, _ = agent.post({"inputs": inputs})
            after, total, longest = (each["data"] for each in json.loads(body)["outputs"])
            bucket = 4 if length <= 4 else 8
            return status, after == (x + 1).tolist(), total == [x.sum()], length <= longest[0] <= bucket

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(asked, [1 + number % 8 for number in range(200)]))
        assert set(answers) == {(200, True, True, True)}
