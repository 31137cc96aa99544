"""What is made on the board: built once, whole or not there, for this bundle, this runtime and this CPU only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from agent import finalise, laid_out
from agent.cpu import Cpu, this_cpu
from agent.laid_out import JOURNAL, STATE, Finalised, FinaliseError, Machine, caches, folder_of, locate, this_machine
from agent.models import Model, open_model
from targets.budget import Phase, Term
from targets.bundle import Residency, file_sha256, read_manifest
from targets.errors import BudgetError
from tests.support import bundles
from tests.support.agents import COMMAND, ROOT, run_agent, serving
from tests.support.bundles import MIB
from tests.support.disks import small_disk

HEAP, MAPPED, STREAMED, UNPACKED = Residency.HEAP, Residency.MAPPED, Residency.STREAMED, Residency.UNPACKED
BUDGET = 3400 * MIB


@pytest.fixture(autouse=True)
def _state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each test its own, whatever this machine has; the agents that are started inherit it."""
    monkeypatch.setenv(STATE, str(tmp_path / "state"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundles.chain(tmp_path / "chain.tfb", [MAPPED, STREAMED])


def build(bundle: Path) -> finalise.Report:
    return finalise.build(opened(bundle), None, 1, lambda _: None)


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    return run_agent("finalise", *map(str, arguments), env=env)


def made(bundle: Path) -> Path:
    """The one folder that was made of the bundle."""
    (folder,) = (bundle.parent / "state" / "finalised").iterdir()
    return folder


def journal(folder: Path) -> Finalised:
    return msgspec.json.decode((folder / JOURNAL).read_bytes(), type=Finalised)


def opened(bundle: Path) -> Model:
    return open_model(bundle, BUDGET)


def refused_serve(bundle: Path, *arguments: str) -> str:
    code, out, err = run_agent("serve", "--bundle", str(bundle), "--port", "0", *arguments)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, err
    return lines[0]


def test_what_is_needed_is_built_and_the_second_run_verifies_it(bundle: Path) -> None:
    code, out, err = run(bundle)
    assert code == 0, err
    assert out.startswith(f"chain version {read_manifest(bundle).version} is finalised (2 built now, ")
    assert err.startswith("segment 1 of 2, segments/00.onnx: ")
    found = journal(made(bundle))
    assert [entry.segment for entry in found.segments] == ["segments/00.onnx", "segments/01.onnx"]
    assert found.bundle == read_manifest(bundle).digest
    assert found.machine == this_machine("onnxruntime")
    names = {"00.onnx", "00.onnx.bin", "01.onnx", "01.onnx.bin"}
    assert {path.name for path in made(bundle).iterdir()} == names | {JOURNAL}
    for entry in found.segments:
        for file in entry.files:
            path = made(bundle) / file.path
            assert (path.stat().st_size, file_sha256(path)) == (file.nbytes, file.sha256)
    assert found.total_bytes == sum((made(bundle) / name).stat().st_size for name in names)
    before = {path.name: path.stat().st_mtime_ns for path in made(bundle).iterdir()}
    code, out, err = run(bundle)
    assert (code, err) == (0, "")
    assert "is finalised already, all files verified: 2 segments in " in out
    assert {path.name: path.stat().st_mtime_ns for path in made(bundle).iterdir()} == before


def test_predicted_storage_is_enough_and_not_far_off(bundle: Path) -> None:
    build(bundle)
    for entry in journal(made(bundle)).segments:
        predicted = finalise.predicted_bytes(opened(bundle), entry.step)
        assert entry.nbytes <= predicted <= 1.3 * entry.nbytes + finalise.DISK_SLACK_BYTES


def test_as_json(bundle: Path) -> None:
    code, out, _ = run(bundle, "--json")
    report = json.loads(out)
    assert (code, report["state"], report["built"]) == (0, "built", [0, 1])
    assert report["total_bytes"] == journal(made(bundle)).total_bytes
    assert report["peak_bytes"] > 10 * MIB
    report = json.loads(run(bundle, "--json")[1])
    assert (report["state"], report["built"], report["folder"]) == ("present", [], str(made(bundle)))


def test_nothing_to_build(tmp_path: Path) -> None:
    bundle = bundles.chain(tmp_path / "chain.tfb", [UNPACKED, UNPACKED])
    code, out, err = run(bundle)
    assert (code, err) == (0, "")
    assert out.endswith("nothing to build, no segment is mapped or streamed\n")
    assert json.loads(run(bundle, "--json")[1])["state"] == "nothing to build"
    assert not (tmp_path / "state").exists()


def test_a_segment_without_weights(tmp_path: Path) -> None:
    bundle = bundles.add(tmp_path / "add.tfb")
    assert run(bundle, "--residency", "mapped")[0] == 0
    with serving(bundle, tmp_path / "log", "--residency", "mapped") as agent:
        body = {
            "inputs": [{"name": n, "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8} for n in "ab"],
            "outputs": [{"name": "scaled"}],
        }
        status, text, _ = agent.post(body)
        assert status == 200, text
        assert json.loads(text)["outputs"][0]["data"] == [2.0 * i for i in range(8)]


def test_a_person_chooses_another_residency_later(tmp_path: Path) -> None:
    bundle = bundles.chain(tmp_path / "chain.tfb", [HEAP, HEAP])
    assert "--residency mapped" in refused_serve(bundle, "--residency", "mapped")
    code, out, _ = run(bundle, "--residency", "mapped", "--json")
    assert (code, json.loads(out)["built"]) == (0, [0, 1])
    assert [entry.step for entry in journal(made(bundle)).segments] == [0, 1]


# --- where it is put


def test_the_state_folder_comes_first_when_it_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, state = tmp_path / "x.tfb", tmp_path / "state"
    beside = tmp_path / "x.tfb.finalised"
    monkeypatch.setattr(laid_out, "STATE_FOLDER", state)
    monkeypatch.setenv(STATE, "")
    assert caches(bundle, None) == [beside, state / "finalised"]
    state.mkdir()
    assert caches(bundle, None) == [state / "finalised", beside]
    monkeypatch.setenv(STATE, str(tmp_path / "own"))
    assert caches(bundle, None) == [tmp_path / "own" / "finalised", beside]
    assert caches(bundle, tmp_path / "c") == [tmp_path / "c"]


def test_serve_finds_it_in_any_of_the_places(bundle: Path, tmp_path: Path) -> None:
    assert run(bundle, "--cache", caches(bundle, None)[1])[0] == 0
    assert (tmp_path / "chain.tfb.finalised").is_dir()
    with serving(bundle, tmp_path / "log"):
        pass
    refused_serve(bundle, "--cache", str(tmp_path / "elsewhere"))
    with serving(bundle, tmp_path / "log", "--cache", str(tmp_path / "chain.tfb.finalised")):
        pass


def test_a_folder_that_cannot_be_made(bundle: Path) -> None:
    (bundle.parent / "file").write_text("")
    code, _, err = run(bundle, "--cache", bundle.parent / "file")
    assert code == 2
    assert "cannot write to" in err
    assert "--cache" in err


# --- what serve says when it is not there


def test_serve_names_the_command(bundle: Path) -> None:
    text = refused_serve(bundle)
    assert text.startswith("tightfit-agent: error: chain keeps 2 of its 2 segments in files that are made on the board")
    assert text.endswith(f"they are not there yet (run: tightfit-agent finalise {bundle})")


def test_serve_finalises_when_told_to(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path / "log", "--finalise") as agent:
        assert "segment 2 of 2, segments/01.onnx" in agent.log
    (tmp_path / "a.toml").write_text("[engine]\nfinalise_on_start = true\n")
    with serving(bundle, tmp_path / "log", "--config", str(tmp_path / "a.toml")) as agent:
        assert "finalise" not in agent.log


def as_if_made_by(bundle: Path, machine: Machine) -> Path:
    """Give out what is there as that of another machine."""
    folder = made(bundle)
    found = msgspec.structs.replace(journal(folder), machine=machine)
    (folder / JOURNAL).write_bytes(msgspec.json.encode(found))
    moved = folder_of(opened(bundle), folder.parent, machine)
    folder.rename(moved)
    return moved


MACHINE = this_machine("onnxruntime")
NEXT_FEATURE = msgspec.structs.replace(this_cpu(), features=(*this_cpu().features, "sve9"))


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine("onnxruntime 1.2.3", MACHINE.cpu), f"were made by onnxruntime 1.2.3, this is {MACHINE.runtime}"),
        (Machine(MACHINE.runtime, Cpu("riscv64", ("x",), ())), "were made on another CPU"),
        (Machine(MACHINE.runtime, NEXT_FEATURE), "were made on a CPU that differs in sve9"),
    ],
)
def test_what_was_made_elsewhere_is_stale(bundle: Path, machine: Machine, message: str) -> None:
    build(bundle)
    other = as_if_made_by(bundle, machine)
    with pytest.raises(FinaliseError, match=message) as refusal:
        locate(opened(bundle), None)
    assert refusal.value.hint == f"run: tightfit-agent finalise {bundle}"
    total = journal(other).total_bytes
    assert finalise.prune(opened(bundle), None) == total
    assert not other.exists()


def test_stale_files_can_make_room(bundle: Path) -> None:
    build(bundle)
    as_if_made_by(bundle, Machine("onnxruntime 1.2.3", MACHINE.cpu))
    assert f"were made by onnxruntime 1.2.3, this is {MACHINE.runtime}" in refused_serve(bundle)
    report = json.loads(run(bundle, "--prune", "--json")[1])
    assert (report["built"], report["freed_bytes"]) == ([0, 1], report["total_bytes"])
    assert made(bundle) == locate(opened(bundle), None)


def test_a_journal_that_lies_about_its_runtime_is_found_out_by_the_engine(bundle: Path) -> None:
    build(bundle)
    found = journal(made(bundle))
    lie = msgspec.structs.replace(found, machine=Machine("onnxruntime 1.2.3", MACHINE.cpu))
    (made(bundle) / JOURNAL).write_bytes(msgspec.json.encode(lie))
    assert "made by onnxruntime 1.2.3" in refused_serve(bundle)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))


def link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut, "bytes instead of"), (flip, "SHA-256 differs"), (link, "is no plain file"), (Path.unlink, "is gone")],
)
def test_damaged_files_are_refused_and_made_again(bundle: Path, damage: Callable[[Path], object], message: str) -> None:
    build(bundle)
    damage(made(bundle) / "01.onnx.bin")
    with pytest.raises(FinaliseError, match=message) as refusal:
        locate(opened(bundle), None)
    assert refusal.value.hint == f"run: tightfit-agent finalise {bundle}"
    lines: list[str] = []
    assert finalise.build(opened(bundle), None, 1, lines.append).built == (1,)
    assert message in lines[0]
    assert locate(opened(bundle), None) == made(bundle)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"schema": 99}'])
def test_a_damaged_journal_is_none(bundle: Path, text: bytes) -> None:
    folder = folder_of(opened(bundle), caches(bundle, None)[0], MACHINE)
    folder.mkdir(parents=True)
    (folder / JOURNAL).write_bytes(text)
    with pytest.raises(FinaliseError, match="they are not there yet"):
        locate(opened(bundle), None)
    assert build(bundle).built == (0, 1)


# --- interruptions


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("moment", ["first", "second"])
def test_kill_9_in_the_middle_leaves_nothing_that_passes_for_whole(tmp_path: Path, moment: str) -> None:
    bundle = bundles.chain(tmp_path / "chain.tfb", [MAPPED, MAPPED], layers=6, width=1024)
    cache = caches(bundle, None)[0]
    name = "00.onnx.bin" if moment == "first" else "01.onnx.bin"
    while not any(cache.glob(f"*/building/{name}")):
        # The first time, or it had done more before this test could see that and kill it.
        shutil.rmtree(cache, ignore_errors=True)
        process = subprocess.Popen(
            [*COMMAND, "finalise", str(bundle)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(lambda: process.poll() is not None or any(p.stat().st_size for p in cache.glob(f"*/building/{name}")))  # noqa: B023
        children = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        wait_for(lambda: not any(map(alive, children)))  # noqa: B023
    text = refused_serve(bundle)
    assert ("they are not there yet" if moment == "first" else "does not have all of them") in text
    code, out, err = run(bundle, "--json")
    assert code == 0, err
    assert json.loads(out)["built"] == ([0, 1] if moment == "first" else [1])
    assert not (made(bundle) / "building").exists()
    with serving(bundle, tmp_path / "log"):
        pass


def test_two_at_a_time_are_one_too_many(bundle: Path) -> None:
    folder = folder_of(opened(bundle), caches(bundle, None)[0], MACHINE)
    folder.mkdir(parents=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        code, _, err = run(bundle)
    finally:
        os.close(descriptor)
    assert code == 2
    assert "another process is making" in err
    assert run(bundle)[0] == 0


def test_a_process_that_dies_is_told_of(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    code, _, err = run(bundle, env={"PYTHONPATH": str(tmp_path)})
    assert code == 2
    assert "the process that laid out 00.onnx was killed by SIGKILL (out of memory?)" in err


def test_a_graph_that_does_not_load(bundle: Path) -> None:
    graph = bundle / "segments" / "01.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"MatMul", b"MatMol"))
    bundles.rewrite(bundle, read_manifest(bundle))
    code, _, err = run(bundle)
    assert code == 2
    assert err.splitlines()[-1].startswith("tightfit-agent: error: onnxruntime cannot load 01.onnx")
    assert sorted(path.name for path in made(bundle).iterdir()) == ["00.onnx", "00.onnx.bin", JOURNAL]


# --- room


def test_a_disk_that_is_too_small_is_told_of_before_it_starts(bundle: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        code, _, err = run(bundle, "--cache", disk)
        assert code == 2
        assert "is too small: 2 segments need 3.2 MiB, 1.0 MiB are free" in err.replace("1020.0 KiB", "1.0 MiB")
        assert not list(disk.glob("*/*"))


def test_a_disk_that_fills_up_meanwhile(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finalise, "DISK_FACTOR", 0.0)
    monkeypatch.setattr(finalise, "DISK_SLACK_BYTES", 4096)
    with small_disk(tmp_path / "disk", 400 << 10) as disk:
        with pytest.raises(FinaliseError, match=r"is full"):
            finalise.build(opened(bundle), disk, 1, lambda _: None)
        (folder,) = disk.iterdir()
        assert list(folder.iterdir()) == []
        with pytest.raises(FinaliseError, match="they are not there yet"):
            locate(opened(bundle), disk)


def test_the_finalise_phase_must_fit_this_machine(bundle: Path) -> None:
    plan = read_manifest(bundle).plan
    terms = (Term("runtime", "anonymous", 150 * MIB), Term("weights", "anonymous", 200 * MIB))
    plan = msgspec.structs.replace(plan, phases=(Phase("finalise", terms), *plan.phases[1:]))
    bundles.rewrite(bundle, read_manifest(bundle), plan=plan)
    with pytest.raises(BudgetError, match=r"board too small .* phase finalise needs 350.0 MiB"):
        open_model(bundle, 300 * MIB)
    code, _, err = run(bundle, "--os-reserve-mib", str(1 << 20))
    assert code == 2
    assert "phase finalise needs 350.0 MiB" in err


def test_the_command_itself_never_loads_a_runtime() -> None:
    code = "import sys, agent.finalise; print([m for m in ('onnxruntime', 'onnx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
