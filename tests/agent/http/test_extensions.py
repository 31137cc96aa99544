"""Triton's extensions of the Open Inference Protocol over a real socket: statistics, configurations, settings."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import ParseDict

from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving
from tests.support.images import BLUE, classifier, jpeg, plain, png

X = {"name": "x", "datatype": "FP32", "shape": [2, 8], "data": [1.0] * 16}
AT = {"name": "at", "datatype": "INT64", "shape": [2], "data": [0, 1]}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("extensions")
    models = {
        "pick": bundles.picking(folder / "pick.tfb"),
        "text": bundles.identity(folder / "text.tfb", DType.STRING, (1,)),
        "log": bundles.log_of(folder / "log.tfb"),
        "colour": classifier(folder / "colour.tfb"),
    }
    tables = "".join(f'[[models]]\nname = "{name}"\nbundle = "{path}"\n' for name, path in models.items())
    kept = (
        f'[[models]]\nname = "kept"\nbundle = "{bundles.identity(folder / "kept.tfb", DType.FLOAT32)}"\ncache_mib = 1\n'
    )
    both = '[[ensembles]]\nname = "both"\nmodels = ["pick", "log"]\n'
    config = folder / "agent.toml"
    config.write_text(f"[repository]\ncontrol = true\n{tables}{kept}{both}", encoding="utf-8")
    with serving(None, folder / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def get(agent: Agent, path: str, status: int = 200) -> Any:
    code, body, _ = agent.request(path)
    assert code == status, body
    return json.loads(body)


def stats(agent: Agent, model: str) -> dict[str, Any]:
    (found,) = get(agent, f"/v2/models/{model}/stats")["model_stats"]
    assert found["name"] == model
    return dict(found)


def pick(agent: Agent, **changes: Any) -> int:
    at = {**AT, **changes}
    return agent.post({"inputs": [X, at]}, path="/v2/models/pick/infer")[0]


def test_requests_and_executions_are_counted(agent: Agent) -> None:
    before = stats(agent, "pick")
    assert pick(agent) == 200
    after = stats(agent, "pick")
    assert after["inference_count"] == before["inference_count"] + 2
    assert after["execution_count"] == before["execution_count"] + 1
    assert after["last_inference"] > before["last_inference"]
    grown = {name for name, each in after["inference_stats"].items() if each != before["inference_stats"][name]}
    assert grown == {"success", "queue", "compute_input", "compute_infer", "compute_output"}
    parts = sum(after["inference_stats"][name]["ns"] for name in grown - {"success"})
    assert parts <= after["inference_stats"]["success"]["ns"]
    (two,) = [each for each in after["batch_stats"] if each["batch_size"] == 2]
    assert two["compute_infer"]["count"] >= 1
    assert two["compute_infer"]["ns"] > 0


def test_what_fails_is_no_inference(agent: Agent) -> None:
    before = stats(agent, "pick")
    assert pick(agent, data=[0, 99]) == 500
    assert pick(agent, data=[0]) == 400
    after = stats(agent, "pick")
    assert after["inference_stats"]["fail"]["count"] == before["inference_stats"]["fail"]["count"] + 2
    for name in ("inference_count", "execution_count", "last_inference"):
        assert after[name] == before[name]
    assert pick(agent) == 200


def test_kept_answers_are_hits(agent: Agent) -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1.0] * 6}
    for _ in range(3):
        assert agent.post({"inputs": [x]}, path="/v2/models/kept/infer")[0] == 200
    found = stats(agent, "kept")
    counts = {name: each["count"] for name, each in found["inference_stats"].items()}
    assert counts == {
        "success": 3, "fail": 0, "queue": 3, "compute_input": 1, "compute_infer": 1, "compute_output": 1,
        "cache_hit": 2, "cache_miss": 1,
    }  # fmt: skip
    assert (found["inference_count"], found["execution_count"]) == (1, 1)


def test_of_all_models_of_one_and_of_one_version(agent: Agent) -> None:
    listed = get(agent, "/v2/models/stats")["model_stats"]
    assert [each["name"] for each in listed] == ["pick", "text", "log", "colour", "kept", "both"]
    for each in listed:
        path = f"/v2/models/{each['name']}/versions/{each['version']}/stats"
        assert get(agent, path)["model_stats"][0]["version"] == each["version"]
    assert "available: " in get(agent, "/v2/models/pick/versions/1/stats", 404)["error"]
    assert "did you mean 'pick'" in get(agent, "/v2/models/picks/stats", 404)["error"]


def test_an_ensemble_counts_beside_its_members(agent: Agent) -> None:
    before = {name: stats(agent, name) for name in ("both", "pick", "log")}
    x, at = {**X, "shape": [1, 8], "data": [1.0] * 8}, {**AT, "shape": [1], "data": [3]}
    assert agent.post({"inputs": [x, at]}, path="/v2/models/both/infer")[0] == 200
    for name, each in before.items():
        after = stats(agent, name)
        assert after["inference_count"] == each["inference_count"] + 1
        for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            assert after["inference_stats"][part]["count"] == each["inference_stats"][part]["count"] + 1


def test_a_reload_of_a_version_goes_on_counting(agent: Agent) -> None:
    assert pick(agent) == 200
    before = stats(agent, "pick")
    for change in ("unload", "load"):
        assert agent.request(f"/v2/repository/models/pick/{change}", b"")[0] == 200
        if change == "unload":
            assert "is not loaded" in get(agent, "/v2/models/pick/stats", 503)["error"]
    assert stats(agent, "pick")["inference_count"] == before["inference_count"]
    assert pick(agent) == 200
    assert stats(agent, "pick")["inference_count"] == before["inference_count"] + 2


@pytest.fixture(scope="module")
def model_config() -> ModuleType:
    """Triton's own description of a configuration; its package would want gRPC."""
    import tritonclient  # noqa: PLC0415

    path = Path(next(iter(tritonclient.__path__))) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configurations_are_what_triton_reads(agent: Agent, model_config: ModuleType) -> None:
    for name in ("pick", "text", "log", "colour", "kept", "both"):
        config = get(agent, f"/v2/models/{name}/config")
        parsed = ParseDict(config, model_config.ModelConfig())
        assert (parsed.name, len(parsed.input) > 0, len(parsed.output) > 0) == (name, True, True)
    assert "available: " in get(agent, "/v2/models/pick/versions/1/config", 404)["error"]


def test_the_batch_is_no_dimension_of_a_configuration(agent: Agent) -> None:
    config = get(agent, "/v2/models/pick/config")
    assert (config["platform"], config["backend"], config["max_batch_size"]) == ("onnxruntime_onnx", "onnxruntime", 8)
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [8]},
        {"name": "at", "data_type": "TYPE_INT64", "dims": [1], "reshape": {"shape": []}},
    ]
    assert config["dynamic_batching"] == {"priority_levels": 255, "default_priority_level": 128}
    text = get(agent, "/v2/models/text/config")
    assert (text["input"], text["max_batch_size"]) == ([{"name": "x", "data_type": "TYPE_STRING", "dims": [1]}], 0)
    assert "dynamic_batching" not in text
    assert get(agent, "/v2/models/kept/config")["response_cache"] == {"enable": True}
    steps = get(agent, "/v2/models/both/config")["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["pick", "log"]
    assert steps[1]["output_map"] == {"y": "log.y"}


def classes(agent: Agent, model: str, inputs: list[dict[str, Any]], output: str, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": inputs, "outputs": [{"name": output, "parameters": parameters}]}
    status, answer, _ = agent.post(body, path=f"/v2/models/{model}/infer")
    assert status == 200, answer
    (found,) = json.loads(answer)["outputs"]
    return dict(found)


def test_the_best_classes_with_labels_and_of_rows(agent: Agent) -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.25] * 64 + [2.0] * 64 + [0.5] * 64}
    found = classes(agent, "colour", [x], "y", classification=2)
    assert found == {"name": "y", "datatype": "BYTES", "shape": [2], "data": ["2.0:1:green", "0.5:2:blue"]}
    x = {**X, "data": [float(value) for value in range(16)]}
    found = classes(agent, "pick", [x, {**AT, "data": [0, 0]}], "picked", classification=1)
    assert (found["shape"], found["data"]) == ([2, 1], ["14.0:7", "22.0:7"])
    found = classes(agent, "log", [{**X, "shape": [1, 8], "data": [1.0] * 8}], "y", classification=99)
    assert found["shape"] == [8]


def test_best_classes_as_raw_bytes_differ_in_size_from_request_to_request(agent: Agent) -> None:
    head = json.dumps(
        {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "parameters": {"binary_data_size": 32}}],
            "outputs": [{"name": "y", "parameters": {"classification": 1, "binary_data": True}}],
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    for value, text in ((1.0, b"0.0:0"), (2.0, b"0.6931472:0"), (1.0, b"0.0:0")):
        data = head + np.full(8, value, np.float32).tobytes()
        status, body, answered = agent.post(data, headers, "/v2/models/log/infer")
        length = int(answered["Inference-Header-Content-Length"])
        (output,) = json.loads(body[:length])["outputs"]
        assert status == 200
        assert output["parameters"]["binary_data_size"] == len(body) - length
        assert body[length:] == len(text).to_bytes(4, "little") + text


def test_raw_bytes_in_raw_bytes_out(agent: Agent) -> None:
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
    for value in (1.0, 2.0):
        status, body, answered = agent.post(np.full(8, value, np.float32).tobytes(), headers, "/v2/models/log/infer")
        length = int(answered["Inference-Header-Content-Length"])
        assert status == 200
        assert np.allclose(np.frombuffer(body[length:], np.float32), np.log(value))
    status, body, _ = agent.post("hej é".encode(), headers, "/v2/models/text/infer")
    assert (status, body[-10:]) == (200, b"\6\0\0\0" + "hej é".encode())
    status, body, _ = agent.post(bytes(16), headers, "/v2/models/pick/infer")
    assert (status, "the inputs are x, at" in json.loads(body)["error"]) == (400, True)


@pytest.mark.parametrize("kind", ["image/jpeg", "image/png"])
def test_an_image_is_a_request(agent: Agent, kind: str) -> None:
    data = jpeg(plain(16, 16, BLUE)) if kind == "image/jpeg" else png(plain(16, 16, BLUE))
    status, body, _ = agent.post(data, {"Content-Type": kind}, "/v2/models/colour/infer")
    assert (status, json.loads(body)["label"]) == (200, ["blue"])
    assert agent.post(data, {"Content-Type": kind}, "/v2/models/colour/image")[1] == body


@pytest.mark.parametrize("path", ["/v2/models/log/infer", "/v2/models/log/image", "/v2/models/both/infer"])
def test_an_image_for_a_model_without_a_recipe(agent: Agent, path: str) -> None:
    status, body, _ = agent.post(png(plain(8, 8)), {"Content-Type": "image/png"}, path)
    assert status == 415
    assert "takes tensors, no images (compile it with --recipe" in json.loads(body)["error"]


@pytest.mark.parametrize("path", ["/v2/trace/setting", "/v2/models/both/trace/setting", "/v2/logging"])
def test_settings_are_shown_and_stay(agent: Agent, path: str) -> None:
    settings = get(agent, path)
    for same in ({}, settings, dict.fromkeys(settings)):
        status, body, _ = agent.post(json.dumps(same).encode(), path=path)
        assert (status, json.loads(body)) == (200, settings)
    for changed in ({"trace_level": ["TIMESTAMPS"]}, {"log_verbose_level": 1}):
        status, body, _ = agent.post(json.dumps(changed).encode(), path=path)
        known = next(iter(changed)) in settings
        assert (status, ("cannot be set" if known else "unknown setting") in json.loads(body)["error"]) == (400, True)
    assert agent.post(b"[", path=path)[0] == 400
    assert get(agent, path) == settings


def test_what_is_logged_is_what_is_configured(agent: Agent) -> None:
    shown = get(agent, "/v2/logging")
    assert (shown["log_error"], shown["log_warning"], shown["log_info"], shown["log_verbose_level"]) == (
        True, True, True, 0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_no_memory_is_shared(agent: Agent, kind: str) -> None:
    assert get(agent, f"/v2/{kind}sharedmemory/status") == []
    assert "no shared memory region 'r'" in get(agent, f"/v2/{kind}sharedmemory/region/r/status", 400)["error"]
    for path in ("region/r/register", "region/r/unregister", "unregister"):
        status, body, _ = agent.post(b"{}", path=f"/v2/{kind}sharedmemory/{path}")
        assert (status, "not supported" in json.loads(body)["error"]) == (400, True)


def test_traces_of_no_model(agent: Agent) -> None:
    assert "unknown model 'none'" in get(agent, "/v2/models/none/trace/setting", 404)["error"]
