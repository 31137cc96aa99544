"""Starting: what is refused is one line and exit code 2, and the gateway loads no runtime."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import helper

from targets.bundle import MANIFEST, read_manifest
from targets.tensor import Contract, DType
from tests.support import bundles
from tests.support.agents import ROOT, run_agent, serving
from tests.support.bundles import dense, model_of, rewrite, write_bundle


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.add(tmp_path_factory.mktemp("serve") / "add.tfb")


def refused(*arguments: str, **env: str) -> str:
    """The one line that a refused start says."""
    code, out, err = run_agent(*arguments, env=env)
    assert (code, out) == (2, ""), err
    lines = [line for line in err.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, err
    assert lines[0].startswith("tightfit-agent: error: ")
    return lines[0]


def test_the_gateway_imports_no_runtime() -> None:
    heavy = ("compile", "onnx", "onnxruntime", "tensorrt", "cv2", "tokenizers")
    code = f"import sys, agent.app, agent.__main__; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_check_says_what_it_found(good: Path) -> None:
    code, out, err = run_agent("check", str(good))
    assert (code, err) == (0, "")
    assert out.startswith(f"add version {read_manifest(good).version} is whole and fits: load 151.0 MiB, run 152.0 MiB")


def test_help_shows_examples() -> None:
    for command in ("serve", "check"):
        code, out, _ = run_agent(command, "--help")
        assert code == 0
        assert f"tightfit-agent {command} " in out


def test_bundles_that_are_refused(good: Path, tmp_path: Path) -> None:
    assert "is not there" in refused("serve", "--bundle", str(tmp_path / "none.tfb"))
    broken = Path(shutil.copytree(good, tmp_path / "add.tfb"))
    with (broken / "segments" / "01.bin").open("r+b") as file:
        file.write(b"\xff")
    assert "SHA-256 differs" in refused("serve", "--bundle", str(broken))
    (broken / MANIFEST).unlink()
    assert "no manifest.json" in refused("check", str(broken))
    (tmp_path / "a.toml").write_text(f"[memory]\nos_reserve_mib = {1 << 20}\n")
    assert "board too small" in refused("serve", "--config", str(tmp_path / "a.toml"), "--bundle", str(good))


def test_configurations_that_are_refused(good: Path, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[http]\nprot = 1\n")
    assert "did you mean 'port'" in refused("serve", "--config", str(tmp_path / "a.toml"))
    assert "--insecure" in refused("serve", "--bundle", str(good), "--host", "0.0.0.0")  # noqa: S104
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused("serve", "--bundle", str(good), "--port", port)


def damaged_graph(folder: Path, data: bytes) -> Path:
    bundle = bundles.identity(folder / "x.tfb", DType.FLOAT32)
    (bundle / "segments" / "00.onnx").write_bytes(data)
    return rewrite(bundle, read_manifest(bundle))


def test_graphs_that_the_engine_cannot_load(tmp_path: Path) -> None:
    corrupt = damaged_graph(tmp_path / "corrupt", b"\x08\x0a not a graph")
    assert "00.onnx is not an ONNX graph" in refused("serve", "--bundle", str(corrupt), "--port", "0")
    x, y = dense("x", DType.FLOAT32, 2), dense("y", DType.FLOAT32, 2)
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], [x], [y])
    model.opset_import[0].version = 999
    future = write_bundle(tmp_path / "future.tfb", [model], Contract((x,), (y,), {}))
    text = refused("serve", "--bundle", str(future), "--port", "0")
    assert "onnxruntime cannot load 00.onnx" in text
    assert "opset" in text


def test_a_missing_runtime_names_what_to_install(good: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ModuleNotFoundError(\"No module\", name='onnxruntime')")
    text = refused("serve", "--bundle", str(good), "--port", "0", PYTHONPATH=str(tmp_path))
    assert "onnxruntime is not installed (pip install 'tightfit[agent,cpu]')" in text


def test_a_missing_library_of_the_gateway_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(\"No module\", name='aiohttp')")
    code, _, err = run_agent("check", "x", env={"PYTHONPATH": str(tmp_path)})
    assert code == 2
    assert err == "tightfit-agent: error: aiohttp is not installed (pip install 'tightfit[agent,cpu]')\n"


def test_a_sample_that_does_not_run(tmp_path: Path) -> None:
    bundle = bundles.add(tmp_path / "add.tfb")
    (bundle / "sample" / "0.bin").write_bytes(bytes(31))
    rewrite(bundle, read_manifest(bundle))
    assert "the bundle's own sample does not run" in refused("serve", "--bundle", str(bundle), "--port", "0")


def test_an_engine_that_dies_while_it_loads(good: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    text = refused("serve", "--bundle", str(good), "--port", "0", PYTHONPATH=str(tmp_path))
    assert "the engine process was killed by SIGSEGV while it loaded the bundle" in text


def test_an_engine_that_loads_for_too_long(good: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import time\ntime.sleep(60)")
    (tmp_path / "a.toml").write_text("[engine]\nload_s = 0.5\n")
    arguments = ("serve", "--config", str(tmp_path / "a.toml"), "--bundle", str(good), "--port", "0")
    assert "did not load within 0.5 s" in refused(*arguments, PYTHONPATH=str(tmp_path))


def test_systemd_hears_ready_and_stopping(good: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        with serving(good, tmp_path / "log", env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as agent:
            assert manager.recv(64) == b"READY=1"
            assert agent.stop() == 0
            assert manager.recv(64) == b"STOPPING=1"
    events = [json.loads(line)["event"] for line in agent.log.splitlines()]
    assert events[:2] == ["engine ready", "serving"]


def test_from_another_folder(good: Path, tmp_path: Path) -> None:
    """A relative bundle is found from where the agent was started, and the engine finds the agent from there."""
    done = subprocess.run(
        [sys.executable, "-m", "agent", "check", os.path.relpath(good, tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_outputs_past_their_room_are_an_error_and_no_crash(tmp_path: Path) -> None:
    with serving(bundles.growing(tmp_path / "growing.tfb"), tmp_path / "log") as agent:
        body = {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [16]}]}
        assert agent.post(body)[0] == 200
        body["inputs"][0]["data"] = [17]
        status, text, _ = agent.post(body)
        assert status == 500
        assert "output 'y' has 68 B, the bundle's plan has room for 64 B" in json.loads(text)["error"]
        body["inputs"][0]["data"] = [-1]
        status, text, _ = agent.post(body)
        assert (status, "onnxruntime" in json.loads(text)["error"]) == (500, True)
        body["inputs"][0]["data"] = [0]
        status, text, _ = agent.post(body)
        assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [])


def test_nan_is_never_written_as_json(tmp_path: Path) -> None:
    with serving(bundles.log_of(tmp_path / "log.tfb"), tmp_path / "log") as agent:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [-1] * 8}]}
        status, text, _ = agent.post(body)
        assert (status, "binary_data = true" in json.loads(text)["error"]) == (400, True)
        status, text, headers = agent.post({**body, "parameters": {"binary_data_output": True}})
        assert status == 200
        assert len(text) == int(headers["Inference-Header-Content-Length"]) + 32


def test_spans_without_their_library(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text(
        "raise ModuleNotFoundError('none', name='opentelemetry')\n", encoding="utf-8"
    )
    config = tmp_path / "agent.toml"
    config.write_text('[tracing]\nendpoint = "http://127.0.0.1:9/v1/traces"\n', encoding="utf-8")
    bundle = bundles.add(tmp_path / "add.tfb")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    code, _, said = run_agent("serve", "--bundle", str(bundle), "--config", str(config), env={"PYTHONPATH": path})
    assert (code, said) == (
        2,
        "tightfit-agent: error: [tracing] has an endpoint, but opentelemetry is not installed "
        "(pip install 'tightfit[otel]', or leave the endpoint out)\n",
    )
