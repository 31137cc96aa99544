"""Several models and versions: loaded, replaced and unloaded while requests come, none of which is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.memory import mem_total_bytes
from targets.bundle import read_manifest
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving, stopped
from tests.support.bundles import MIB, rewrite

CONTROL = "[repository]\ncontrol = true\n"


def variant(folder: Path, number: int) -> Path:
    """The bundle of a small model, in one of many versions."""
    bundle = bundles.add(folder)
    return rewrite(bundle, read_manifest(bundle), name="add", options={"variant": str(number)})


def unloadable(folder: Path) -> Path:
    """A bundle that is whole and cannot be loaded."""
    bundle = variant(folder, 99)
    (bundle / "segments" / "00.onnx").write_bytes(b"\x08\x0a not a graph")
    return rewrite(bundle, read_manifest(bundle))


def version_of(bundle: Path) -> str:
    return read_manifest(bundle).version


def configured(folder: Path, *models: Path | str, more: str = "") -> Path:
    """A configuration of these models, each a bundle or the lines that say more of it."""
    tables = (each if isinstance(each, str) else f'bundle = "{each}"\n' for each in models)
    config = folder / "agent.toml"
    config.write_text(more + "".join(f"[[models]]\n{table}" for table in tables), encoding="utf-8")
    return config


def room_for(nbytes: int) -> str:
    """Lines of a configuration by which the agent may use so much of this machine."""
    return f"[memory]\nos_reserve_mib = {(mem_total_bytes() - nbytes) // MIB}\n"


ROOM_FOR_ONE = 220 * MIB
"""The plan of a small model has about 152 MiB."""


def ask(agent: Agent, path: str = "/v2/models/add/infer", rows: int = 1, **headers: str) -> tuple[int, dict[str, Any]]:
    data = [1.0] * (8 * rows)
    inputs = [{"name": name, "datatype": "FP32", "shape": [rows, 8], "data": data} for name in "ab"]
    status, body, _ = agent.post({"inputs": inputs}, headers, path)
    return status, json.loads(body)


def index(agent: Agent, **wanted: bool) -> list[dict[str, str]]:
    status, body, _ = agent.request("/v2/repository/index", json.dumps(wanted).encode())
    assert status == 200
    listed: list[dict[str, str]] = json.loads(body)
    return listed


def change(agent: Agent, name: str, what: str, **parameters: str) -> tuple[int, str]:
    """Load or unload a model by the API: (status, error or nothing)."""
    body = json.dumps({"parameters": parameters}).encode() if parameters else b""
    status, text, _ = agent.request(f"/v2/repository/models/{name}/{what}", body)
    return status, json.loads(text)["error"] if text else ""


def until(condition: Callable[[], bool], what: str = "") -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def put_in_place(bundle: Path, place: Path) -> None:
    """Have a folder, which others read, be another one from now on."""
    link = place.with_name("new")
    link.symlink_to(bundle)
    link.rename(place)


@contextlib.contextmanager
def clients(agent: Agent, count: int = 6, path: str = "/v2/models/add/infer") -> Iterator[Counter[str]]:
    """Clients that ask again as soon as they are answered; what they were answered, by version or error."""
    answers: Counter[str] = Counter()
    stop = threading.Event()
    inputs = [{"name": name, "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8} for name in "ab"]
    body = json.dumps({"inputs": inputs}).encode()

    def work() -> Counter[str]:
        mine: Counter[str] = Counter()
        connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=60)
        while not stop.is_set():
            connection.request("POST", path, body)
            response = connection.getresponse()
            answer = json.loads(response.read())
            mine[answer["model_version"] if response.status == 200 else answer["error"]] += 1
            if response.status == 200:
                assert [output["data"][0] for output in answer["outputs"]] == [2.0, 0.0]
        connection.close()
        return mine

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(work) for _ in range(count)]
        try:
            yield answers
        finally:
            stop.set()
            for future in futures:
                answers.update(future.result())


def held_by(agent: Agent) -> tuple[float, int]:
    """Bytes of gateway and engines that nobody shares with them, and descriptors of the gateway."""
    memory = sum(agent.metric("tightfit_memory_bytes", kind=kind) for kind in ("anonymous", "shared"))
    return memory, len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir()))


def reload_(agent: Agent, number: int = signal.SIGHUP) -> None:
    """Reload, and wait for the end of it."""
    before = agent.log.count('"reloaded"')
    agent.process.send_signal(number)
    until(lambda: agent.log.count('"reloaded"') > before, agent.log)


# --- several models


def test_several_models_and_versions(tmp_path: Path) -> None:
    first, second = variant(tmp_path / "1.tfb", 1), variant(tmp_path / "2.tfb", 2)
    other = bundles.identity(tmp_path / "other.tfb", DType.FLOAT32)
    config = configured(tmp_path, first, second, f'bundle = "{other}"\nname = "copy"\n')
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        assert agent.name == "add,add,copy"
        assert len(agent.engine_pids) == 3
        assert ask(agent)[1]["model_version"] == version_of(first)
        for version in (version_of(first), version_of(second)):
            path = f"/v2/models/add/versions/{version}"
            assert ask(agent, f"{path}/infer")[1]["model_version"] == version
            assert agent.request(f"{path}/ready")[0] == 200
        status, answer = ask(agent, "/v2/models/add/versions/none/infer")
        assert (status, version_of(second) in answer["error"]) == (404, True)
        assert json.loads(agent.request("/v2/models/add")[1])["versions"] == [version_of(first), version_of(second)]
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}]}
        status, text, _ = agent.post(body, path="/v2/models/copy/infer")
        assert (status, json.loads(text)["model_name"]) == (200, "copy")
        assert [(each["name"], each["state"]) for each in index(agent)] == [
            ("add", "READY"), ("add", "READY"), ("copy", "READY"),
        ]  # fmt: skip
        assert agent.metric("tightfit_requests_total", model="copy", reason="ok") == 1
        pids = agent.engine_pids
        configured(tmp_path, second, f'bundle = "{other}"\nname = "copy"\n', first)
        reload_(agent)
        assert agent.engine_pids == pids
        assert ask(agent)[1]["model_version"] == version_of(second)
        assert agent.stop() == 0
    assert "Traceback" not in agent.log


def test_one_engine_that_dies_leaves_the_others_alone(tmp_path: Path) -> None:
    other = bundles.identity(tmp_path / "copy.tfb", DType.FLOAT32)
    config = configured(tmp_path, variant(tmp_path / "1.tfb", 1), other, more="[engine]\nrestarts = 0\n")
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        os.kill(agent.engine_pids[1], signal.SIGKILL)
        until(lambda: agent.request("/v2/models/copy/ready")[0] == 503)
        assert agent.request("/v2/health/ready")[0] == 503
        assert ask(agent)[0] == agent.request("/v2/models/add/ready")[0] == 200
        (entry,) = (each for each in index(agent) if each["name"] == "copy")
        assert (entry["state"], "killed by SIGKILL" in entry["reason"]) == ("UNAVAILABLE", True)
        os.kill(agent.engine_pids[0], signal.SIGKILL)
        assert agent.process.wait(60) == 1


def test_models_that_do_not_fit_together(tmp_path: Path) -> None:
    bundle = variant(tmp_path / "1.tfb", 1)
    config = configured(tmp_path, bundle, bundle, more=room_for(ROOM_FOR_ONE))
    code, _, err = run_agent("serve", "--config", str(config), "--port", "0")
    assert code == 2
    assert "no room for add: it needs 152.0 MiB beside 152.0 MiB of add, but the budget of this machine is 2" in err


# --- reload


@pytest.mark.parametrize("reloads", [3, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("room", "how"), [(0, "swapped"), (ROOM_FOR_ONE, "replaced")])
def test_a_reload_loses_nothing(tmp_path: Path, room: int, how: str, reloads: int) -> None:
    """Under load, by swap or, where two do not fit, with requests that wait for the next; and memory comes back."""
    versions = [variant(tmp_path / f"{number}.tfb", number) for number in range(2)]
    place = tmp_path / "served.tfb"
    place.symlink_to(versions[0])
    config = configured(tmp_path, place, more=room_for(room) if room else "")
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        answers = Counter[str]()
        for part in (range(1, 3), range(3, reloads + 1)):
            with clients(agent) as answered:
                for number in part:
                    put_in_place(versions[number % 2], place)
                    reload_(agent)
                    assert index(agent)[0]["version"] == version_of(versions[number % 2])
            answers += answered
            if part.start == 1:
                memory_then, descriptors_then = held_by(agent)
        assert set(answers) == set(map(version_of, versions)), answers
        assert agent.log.count(f'"{how}"') == reloads
        assert len(agent.engine_pids) == 1

        def came_back() -> bool:
            memory, descriptors = held_by(agent)
            return memory <= 1.05 * memory_then and descriptors <= descriptors_then + 2  # one that is being closed

        until(came_back, "what the first reloads left does not suffice for the others")
        assert agent.metric("tightfit_requests_total") == agent.metric("tightfit_requests_total", reason="ok")
        assert agent.metric("tightfit_requests_total") == answers.total()
        assert agent.stop() == 0
    assert "Traceback" not in agent.log


@pytest.mark.parametrize("room", [0, ROOM_FOR_ONE])
def test_what_cannot_be_loaded_leaves_what_ran(tmp_path: Path, room: int) -> None:
    good = variant(tmp_path / "good.tfb", 1)
    place = tmp_path / "served.tfb"
    place.symlink_to(good)
    config = configured(tmp_path, place, more=room_for(room) if room else "")
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        with clients(agent, 3) as answers:
            put_in_place(unloadable(tmp_path / "bad.tfb"), place)
            reload_(agent, signal.SIGUSR1)
            (entry,) = index(agent)
            assert (entry["version"], entry["state"]) == (version_of(good), "READY")
            assert "00.onnx is not an ONNX graph" in entry["reason"]
        assert set(answers) == {version_of(good)}
        cut = variant(tmp_path / "cut.tfb", 3)
        (cut / "segments" / "01.bin").write_bytes(b"")
        put_in_place(cut, place)
        reload_(agent)
        assert "01.bin" in index(agent)[0]["reason"]
        assert ask(agent)[0] == agent.request("/v2/health/ready")[0] == 200


def test_a_bundle_that_moved(tmp_path: Path) -> None:
    """It is the same, so nothing is loaded; but the next engine is loaded from where it is by then."""
    place = tmp_path / "served.tfb"
    put_in_place(variant(tmp_path / "here.tfb", 1), place)
    with serving(place, tmp_path / "log") as agent:
        pid = agent.engine_pid
        put_in_place((tmp_path / "here.tfb").rename(tmp_path / "there.tfb"), place)
        reload_(agent)
        assert agent.engine_pid == pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: agent.metric("tightfit_engine_restarts_total") == 1 and agent.metric("tightfit_engine_up") == 1)
        assert ask(agent)[0] == 200


def test_a_configuration_that_changed(tmp_path: Path) -> None:
    """Models come and go with it; where it is not valid everything stays."""
    add, copy = variant(tmp_path / "add.tfb", 1), bundles.identity(tmp_path / "copy.tfb", DType.FLOAT32)
    config = configured(tmp_path, add)
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        (pid,) = agent.engine_pids
        configured(tmp_path, f'bundle = "{add}"\npriority = 9\nqueue_length = 1\n', copy)
        reload_(agent)
        assert agent.request("/v2/models/copy/ready")[0] == 200
        assert agent.engine_pids[0] == pid  # what did not change was not touched
        config.write_text("[[models]]\nbundel = 1\n")
        agent.process.send_signal(signal.SIGHUP)
        until(lambda: "did you mean 'bundle'" in agent.log)
        assert ask(agent)[0] == agent.request("/v2/models/copy/ready")[0] == 200
        configured(tmp_path, copy, tmp_path / "none.tfb", more="[requests]\ntimeout_s = 9.0\n")
        reload_(agent)
        assert "these sections take effect when the agent is started again" in agent.log
        assert ask(agent)[0] == 404
        assert [(each["name"], each["state"]) for each in index(agent)] == [("copy", "READY"), ("none", "UNAVAILABLE")]
        assert "is not there" in index(agent)[1]["reason"]
        assert agent.request("/v2/health/ready")[0] == 503
        until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_signal_to_all_processes_of_the_service_is_one_to_the_gateway(tmp_path: Path) -> None:
    with serving(variant(tmp_path / "add.tfb", 1), tmp_path / "log") as agent:
        pid = agent.engine_pid
        for number in (signal.SIGUSR1, signal.SIGHUP):
            os.kill(pid, number)
            reload_(agent, number)
        assert ask(agent)[0] == 200
        assert agent.engine_pid == pid


def test_the_service_manager_hears_of_a_reload(tmp_path: Path) -> None:
    bundle = variant(tmp_path / "add.tfb", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        with serving(bundle, tmp_path / "log", env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as agent:
            assert manager.recv(64) == b"READY=1"
            before = time.monotonic_ns() // 1000
            agent.process.send_signal(signal.SIGHUP)
            state, _, stamp = manager.recv(200).decode().partition("\nMONOTONIC_USEC=")
            assert state == "RELOADING=1"
            assert before <= int(stamp) <= time.monotonic_ns() // 1000
            assert manager.recv(200) == b"READY=1\nSTATUS=reloaded"
            assert agent.stop() == 0


# --- the repository API


def test_nobody_may_change_models_unless_it_is_configured(tmp_path: Path) -> None:
    with serving(variant(tmp_path / "add.tfb", 1), tmp_path / "log") as agent:
        for what in ("load", "unload"):
            status, error = change(agent, "add", what)
            assert (status, "control = true" in error) == (403, True)
        assert ask(agent)[0] == 200
        assert index(agent) == [
            {"name": "add", "version": version_of(tmp_path / "add.tfb"), "state": "READY", "reason": ""}
        ]


def test_load_and_unload(tmp_path: Path) -> None:
    folder = tmp_path / "bundles"
    folder.mkdir()
    first, second = variant(tmp_path / "add.tfb", 1), variant(folder / "newer.tfb", 2)
    bundles.identity(folder / "copy.tfb", DType.FLOAT32)
    config = configured(tmp_path, first, more=f'{CONTROL}folders = ["{folder}"]\n')
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        assert [(each["name"], each["state"], each["reason"]) for each in index(agent)] == [
            ("add", "READY", ""), ("copy", "UNAVAILABLE", "not loaded"), ("newer", "UNAVAILABLE", "not loaded"),
        ]  # fmt: skip
        assert change(agent, "copy", "load") == (200, "")
        assert [each["name"] for each in index(agent, ready=True)] == ["add", "copy"]
        assert agent.request("/v2/models/copy/ready")[0] == 200
        assert change(agent, "add", "load", bundle="newer.tfb") == (200, "")
        assert ask(agent)[1]["model_version"] == version_of(second)
        pid = agent.engine_pids[0]
        assert change(agent, "copy", "unload") == (200, "")
        assert not Path(f"/proc/{pid}").exists()
        assert agent.request("/v2/models/copy/ready")[0] == 503
        assert agent.request("/v2/health/ready")[0] == 200  # as somebody wanted it
        status, error = ask(agent, "/v2/models/copy/infer")
        assert (status, error["error"]) == (503, "model 'copy' is not loaded: unloaded")
        assert change(agent, "copy", "load") == (200, "")
        # What is configured is what a reload makes of it again; what a client loaded stays.
        reload_(agent)
        assert ask(agent)[1]["model_version"] == version_of(first)
        assert agent.request("/v2/models/copy/ready")[0] == 200


@pytest.mark.parametrize(
    ("name", "what", "parameters", "status", "message"),
    [
        ("none", "load", {}, 404, "no bundle 'none.tfb' for model 'none'"),
        ("none", "unload", {}, 404, "unknown model 'none'"),
        ("add", "load", {"bundle": "../outside.tfb"}, 404, "no bundle '../outside.tfb'"),
        ("add", "load", {"bundle": "link.tfb"}, 404, "no bundle 'link.tfb'"),
        ("..%2foutside", "load", {}, 404, "cannot be a model's name"),
        ("add", "load", {"bundle": "bad.tfb"}, 400, "failed to load 'add': 00.onnx is not an ONNX graph"),
        ("bad", "load", {}, 400, "failed to load 'bad': 00.onnx is not an ONNX graph"),
        ("add", "load", {"bundle": "large.tfb"}, 400, "failed to load 'add': board too small for add"),
        ("add", "load", {"config": "{}"}, 400, "unknown parameter 'config'"),
        ("add", "load", {"bundle": "x" * 5000}, 404, "no bundle"),
        ("add", "load", {"bundle": "x\0"}, 404, "no bundle"),
        ("add", "load", {"bundle": "."}, 404, "no bundle"),
    ],
)
def test_changes_that_are_refused(
    controlled: Agent, name: str, what: str, parameters: dict[str, str], status: int, message: str
) -> None:
    got, error = change(controlled, name, what, **parameters)
    assert (got, message in error) == (status, True), error
    assert ask(controlled)[0] == controlled.request("/v2/health/ready")[0] == 200


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    tmp_path = tmp_path_factory.mktemp("controlled")
    folder = tmp_path / "bundles"
    folder.mkdir()
    add = variant(tmp_path / "add.tfb", 1)
    outside = variant(tmp_path / "outside.tfb", 2)
    (folder / "link.tfb").symlink_to(outside)
    unloadable(folder / "bad.tfb")
    large = variant(folder / "large.tfb", 3)
    manifest = read_manifest(large)
    rewrite(large, manifest, plan=bundles.plan_of(manifest.contract, activations=300 * MIB))
    config = configured(tmp_path, add, more=f'{room_for(400 * MIB)}{CONTROL}folders = ["{folder}"]\n')
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        yield agent
        assert agent.stop() == 0
    assert "Traceback" not in agent.log


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"ready": 1}', b'{"other": true}', b"[" * 20_000])
def test_bodies_that_are_none(controlled: Agent, body: bytes) -> None:
    assert controlled.request("/v2/repository/index", body)[0] == 400
    assert controlled.request("/v2/repository/models/add/load", body)[0] == 400


def test_unloading_answers_what_was_accepted(tmp_path: Path) -> None:
    """Whoever waits at the door is accepted too; who comes later is told."""
    slow = bundles.slow(tmp_path / "slow.tfb", slots=1)
    config = configured(tmp_path, slow, more=f"{CONTROL}[engine]\nhang_s = 120\n")
    body = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "turns", "datatype": "INT64", "shape": [1], "data": [1]},
        ]
    }
    with serving(None, tmp_path / "log", "--config", str(config)) as agent, ThreadPoolExecutor(8) as threads:
        with stopped(agent.engine_pid):
            answers = [threads.submit(agent.post, body) for _ in range(4)]
            until(lambda: agent.metric("tightfit_door_depth") == 3)
            unloaded = threads.submit(change, agent, "slow", "unload")
            until(lambda: index(agent)[0]["state"] == "UNLOADING")
            status, text, _ = agent.post(body)
            assert (status, "is being unloaded" in json.loads(text)["error"]) == (503, True)
        assert [answer.result()[0] for answer in answers] == [200] * 4
        assert unloaded.result() == (200, "")
        assert agent.engine_pids == []
        assert agent.stop() == 0


def test_a_stop_in_the_middle_of_a_reload(tmp_path: Path) -> None:
    """What was accepted is answered, by whichever version, and nothing stays behind."""
    versions = [bundles.slow(tmp_path / "slow.tfb", slots=1), bundles.slow(tmp_path / "other.tfb", slots=1)]
    rewrite(versions[1], read_manifest(versions[1]), name="slow", options={"variant": "1"})
    place = tmp_path / "served.tfb"
    put_in_place(versions[0], place)
    patience = "[requests]\ntimeout_s = 120\ndrain_s = 120\n[engine]\nhang_s = 120\n"
    config = configured(tmp_path, place, more=room_for(ROOM_FOR_ONE) + patience)
    body = {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "turns", "datatype": "INT64", "shape": [1], "data": [1]},
        ]
    }
    with serving(None, tmp_path / "log", "--config", str(config)) as agent, ThreadPoolExecutor(3) as threads:
        (pid,) = agent.engine_pids
        with stopped(pid):
            answers = [threads.submit(agent.post, body) for _ in range(3)]
            until(lambda: agent.metric("tightfit_door_depth") == 2)
            put_in_place(versions[1], place)
            agent.process.send_signal(signal.SIGHUP)
            until(lambda: index(agent)[0]["state"] == "LOADING")
            # One is in the old version, which ends with it; two wait for the new one.
            agent.process.terminate()
            until(lambda: "stopping" in agent.log, agent.log)
        assert agent.process.wait(60) == 0
        answered = [answer.result() for answer in answers]
        assert [status for status, _, _ in answered] == [200] * 3
        assert {json.loads(text)["model_version"] for _, text, _ in answered} == set(map(version_of, versions))
        assert not Path(f"/proc/{pid}").exists()
    assert "Traceback" not in agent.log
