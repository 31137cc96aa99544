"""One request for several models: with real engines, over HTTP."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from targets.bundle import read_manifest
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving, stopped, until
from tests.support.bundles import rewrite
from tests.support.images import RED, classifier, detector, jpeg, plain
from tests.support.wire import post, wire


def configured(folder: Path, models: Mapping[str, Path], ensembles: Mapping[str, list[str]], more: str = "") -> Path:
    config = folder / "agent.toml"
    tables = [f'[[models]]\nname = "{name}"\nbundle = "{bundle}"\n' for name, bundle in models.items()]
    tables += [f'[[ensembles]]\nname = "{name}"\nmodels = {json.dumps(each)}\n' for name, each in ensembles.items()]
    config.write_text(more + "".join(tables), encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("ensembles")
    models = {
        "add": bundles.add(folder / "add.tfb"),
        "log": bundles.log_of(folder / "log.tfb"),
        "grow": bundles.growing(folder / "grow.tfb"),
        "slow": bundles.slow(folder / "slow.tfb"),
        "copy": bundles.identity(folder / "copy.tfb", DType.FLOAT32, (300, 256)),
        "again": rewrite(
            bundles.identity(folder / "again.tfb", DType.FLOAT32, (300, 256)),
            read_manifest(folder / "again.tfb"),
            options={"variant": "2"},
        ),
    }
    ensembles = {
        "both": ["log", "add"],
        "growing": ["add", "grow"],
        "late": ["add", "slow"],
        "one": ["copy", "again"],
        "other": ["again", "copy"],
    }
    config = configured(folder, models, ensembles, "[repository]\ncontrol = true\n[engine]\nhang_s = 120\n")
    with serving(None, folder / "log", "--config", str(config)) as agent:
        yield agent
        until(lambda: agent.metric("tightfit_in_flight") == 0)
        assert "Traceback" not in agent.log


A = {"name": "a", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8}
B = {"name": "b", "datatype": "FP32", "shape": [1, 8], "data": [2.0] * 8}
X = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8}


def ask(agent: Agent, name: str, *inputs: dict[str, Any], **more: Any) -> tuple[int, dict[str, Any]]:
    headers = more.pop("headers", {})
    status, body, _ = agent.post({"inputs": list(inputs), **more}, headers, f"/v2/models/{name}/infer")
    return status, json.loads(body)


def passes(agent: Agent, model: str) -> float:
    return agent.metric("tightfit_pass_seconds_count", model=model)


def settled(agent: Agent, model: str, reason: str) -> float:
    return agent.metric("tightfit_requests_total", model=model, reason=reason)


def test_its_metadata_are_derived(agent: Agent) -> None:
    status, body, _ = agent.request("/v2/models/both")
    found = json.loads(body)
    assert status == 200
    assert (found["name"], found["platform"], len(found["versions"])) == ("both", "ensemble", 1)
    assert found["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [1, 8]},
        {"name": "a", "datatype": "FP32", "shape": [-1, 8]},
        {"name": "b", "datatype": "FP32", "shape": [-1, 8]},
    ]
    assert [each["name"] for each in found["outputs"]] == ["log.y", "add.total", "add.scaled"]
    assert agent.request("/v2/models/both/ready")[0] == 200
    version = found["versions"][0]
    assert agent.request(f"/v2/models/both/versions/{version}")[0] == 200
    assert agent.request("/v2/models/both/versions/7")[0] == 404


def test_one_request_has_one_answer_of_all(agent: Agent) -> None:
    before = {name: (passes(agent, name), settled(agent, name, "ok")) for name in ("add", "log")}
    status, answer = ask(agent, "both", A, B, X, id="7")
    assert (status, answer["id"], answer["model_name"]) == (200, "7", "both")
    data = {each["name"]: each["data"] for each in answer["outputs"]}
    assert data == {"log.y": [0.0] * 8, "add.total": [3.0] * 8, "add.scaled": [float(3 * i) for i in range(8)]}
    for name, (run, ok) in before.items():
        assert (passes(agent, name), settled(agent, name, "ok")) == (run + 1, ok + 1)
    assert settled(agent, "both", "ok") >= 1


def test_who_is_not_asked_does_not_run(agent: Agent) -> None:
    before = passes(agent, "log")
    status, answer = ask(agent, "both", A, B, X, outputs=[{"name": "add.scaled"}, {"name": "add.total"}])
    assert status == 200
    assert [each["name"] for each in answer["outputs"]] == ["add.scaled", "add.total"]
    assert passes(agent, "log") == before


def test_what_a_member_would_refuse_is_refused_in_its_name(agent: Agent) -> None:
    rows = [{**each, "shape": [size, 8], "data": [1.0] * 8 * size} for each, size in ((A, 3), (B, 2))]
    status, answer = ask(agent, "both", *rows, X)
    assert status == 400
    assert answer["error"].startswith("member 'add': inputs 'a' and 'b' disagree on dimension 'batch': 3 and 2")
    status, answer = ask(agent, "both", A, B)
    assert (status, "input 'x' is missing" in answer["error"]) == (400, True)
    status, answer = ask(agent, "both", A, B, X, outputs=[{"name": "log.x"}])
    assert (status, "did you mean 'log.y'?" in answer["error"]) == (400, True)


def test_when_a_member_fails_the_whole_does(agent: Agent) -> None:
    many = {"name": "n", "datatype": "INT64", "shape": [1], "data": [17]}
    status, answer = ask(agent, "growing", A, B, many)
    assert status == 500
    assert answer["error"].startswith("member 'grow': output 'y' has 68 B, the bundle's plan has room for 64 B")
    assert settled(agent, "growing", "output_too_large") == settled(agent, "add", "output_too_large") == 1
    assert ask(agent, "growing", A, B, {**many, "data": [16]})[0] == 200


SLOW = (
    {"name": "x", "datatype": "FP32", "shape": [4], "data": [1.0] * 4},
    {"name": "turns", "datatype": "INT64", "shape": [1], "data": [1]},
)
SLOW_ENGINE = 3
"""Which of the engines, in the order of the models, is that of `slow`."""


@pytest.mark.parametrize("by", [{"headers": {"Request-Timeout-Ms": "3000"}}, {"parameters": {"timeout": 3_000_000}}])
def test_one_deadline_for_all(agent: Agent, by: dict[str, Any]) -> None:
    with stopped(agent.engine_pids[SLOW_ENGINE]):
        status, answer = ask(agent, "late", A, B, *SLOW, **by)
        assert (status, answer["error"][:14]) == (504, "member 'slow':")
    until(lambda: agent.metric("tightfit_in_flight") == 0)
    assert ask(agent, "late", A, B, *SLOW)[0] == 200


def test_a_client_that_leaves_leaves_no_slot_taken(agent: Agent) -> None:
    with stopped(agent.engine_pids[SLOW_ENGINE]):
        with wire(agent.port) as connection:
            connection.send(post("late", json.dumps({"inputs": [A, B, *SLOW]}).encode()))
            until(lambda: agent.metric("tightfit_running", model="slow") == 1)
        until(lambda: settled(agent, "late", "disconnected") == settled(agent, "slow", "disconnected") == 1)
    until(lambda: agent.metric("tightfit_in_flight") == 0)


def test_large_answers_leave_the_slots_in_pieces(agent: Agent) -> None:
    x = np.arange(300 * 256, dtype=np.float32)
    item = {"name": "x", "datatype": "FP32", "shape": [300, 256], "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    sent = {"Inference-Header-Content-Length": str(len(head))}
    status, body, headers = agent.post(head + x.tobytes(), sent, "/v2/models/one/infer")
    length = int(headers["Inference-Header-Content-Length"])
    names = [each["name"] for each in json.loads(body[:length])["outputs"]]
    assert (status, names) == (200, ["copy.y", "again.y"])
    assert body[length:] == x.tobytes() * 2


def test_ensembles_of_the_same_models_do_not_wait_for_each_other(agent: Agent) -> None:
    """Each takes both; in which order they are named does not matter."""
    x = {"name": "x", "datatype": "FP32", "shape": [300, 256], "data": [0.5] * (300 * 256)}

    def both(number: int) -> int:
        name = ("one", "other", "copy", "again")[number % 4]
        output = {"one": "copy.y", "other": "again.y"}.get(name, "y")
        binary = {"outputs": [{"name": output, "parameters": {"binary_data": True}}]}
        body = json.dumps({"inputs": [x], **binary}).encode()
        return agent.post(body, None, f"/v2/models/{name}/infer")[0]

    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(both, range(80))) == {200}


def test_a_member_that_is_unloaded_is_named(agent: Agent) -> None:
    """The last one: what it unloads is loaded again."""
    assert agent.post(b"{}", None, "/v2/repository/models/log/unload")[0] == 200
    assert agent.request("/v2/models/both/ready")[0] == 503
    status, answer = ask(agent, "both", A, B, X)
    assert (status, answer["error"]) == (503, "member 'log': model 'log' is not loaded: unloaded")
    assert agent.request("/v2/models/both")[0] == 503
    assert agent.post(b"{}", None, "/v2/repository/models/log/load")[0] == 200
    assert ask(agent, "both", A, B, X)[0] == 200


def test_one_image_for_all(tmp_path: Path) -> None:
    """Each member makes its own input of it, of its own size."""
    models = {"colour": classifier(tmp_path / "colour.tfb"), "boxes": detector(tmp_path / "boxes.tfb")}
    config = configured(tmp_path, models, {"both": ["boxes", "colour"]})
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        image = jpeg(plain(64, 64, RED))
        alone = {
            f"{name}.{key}": value
            for name in models
            for key, value in json.loads(agent.post(image, None, f"/v2/models/{name}/image")[1]).items()
            if not key.startswith("model_")
        }
        status, body, _ = agent.post(image, None, "/v2/models/both/image")
        answer = json.loads(body)
        assert (status, answer.pop("model_name"), answer.pop("model_version") != "") == (200, "both", True)
        assert answer == alone
        assert answer["colour.label"] == ["red"]
        described = json.loads(agent.request("/v2/models/both")[1])
        assert described["parameters"]["image_path"] == "/v2/models/both/image"
        assert set(described["parameters"]["image_outputs"].split(",")) == set(alone)
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [b64encode(image).decode()]}
        status, answer = ask(agent, "both", tensor, outputs=[{"name": "colour.label"}])
        assert (status, answer["outputs"][0]["name"], answer["outputs"][0]["data"]) == (200, "colour.label", ["red"])
        status, body, _ = agent.post(b"no image", None, "/v2/models/both/image")
        assert (status, json.loads(body)["error"].startswith("member ")) == (400, True)
        assert "Traceback" not in agent.log


@pytest.mark.parametrize(
    ("ensembles", "words"),
    [
        ({"both": ["add", "lob"]}, "ensemble 'both': no model 'lob' (did you mean 'log'?"),
        ({"add": ["log"]}, "two models or ensembles are called 'add'"),
        ({"both": ["log", "copy"]}, "'log' takes x float32[1,8], 'copy' takes x int64[2]"),
        ({"both": ["log", "log"]}, "ensemble 'both' needs models, each once"),
        ({"both": []}, "ensemble 'both' needs models, each once"),
        ({"a b": ["log"]}, "'a b' cannot be an ensemble's name"),
    ],
)
def test_what_is_no_ensemble(tmp_path: Path, ensembles: dict[str, list[str]], words: str) -> None:
    models = {
        "add": bundles.add(tmp_path / "add.tfb"),
        "log": bundles.log_of(tmp_path / "log.tfb"),
        "copy": bundles.identity(tmp_path / "copy.tfb", DType.INT64, (2,)),
    }
    config = configured(tmp_path, models, ensembles)
    code, _, told = run_agent("serve", "--config", str(config), "--port", "0")
    assert (code, "Traceback" in told) == (2, False)
    assert words in told.splitlines()[-1]
