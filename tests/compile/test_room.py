"""Disks that are too small or read-only, and the memory that compiling takes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.big_model import Shape, generate
from compile.__main__ import main
from compile.limits import limited
from compile.processes import mapped_of, tree_of
from targets.bundle import read_manifest, verify_files
from tests.support.disks import small_disk
from tests.support.models import mlp

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def complaint(
    source: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> str:
    """Compile; it must fail with one line, which is returned."""
    arguments = ["tightfit-compile", str(source), "--target", "x86-64-dev", "--json", "-o", str(out), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning:")]
    return line


def test_what_the_disk_cannot_hold_is_told_of_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mlp(tmp_path, 2, 512, 512)
    with small_disk(tmp_path / "disk", 2 * MIB) as disk:
        said = complaint(source, disk / "m.tfb", capsys, monkeypatch)
        assert said == (f"tightfit-compile: error: the bundle needs 3.0 MiB; {disk} has 2.0 MiB free (make room)")
        assert not list(disk.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mlp(tmp_path, 2, 512, 512)
    monkeypatch.setattr("compile.emit._check_disk", lambda *_: None)
    with small_disk(tmp_path / "disk", MIB) as disk:
        said = complaint(source, disk / "m.tfb", capsys, monkeypatch)
        assert said.endswith("No space left on device")
        assert not list(disk.iterdir())


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mlp(tmp_path)
    with small_disk(tmp_path / "disk", MIB) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        said = complaint(source, disk / "m.tfb", capsys, monkeypatch)
        assert said == (
            f"tightfit-compile: error: cannot write {disk}/m.tfb: Read-only file system (choose a folder you can write)"
        )


class Watch(threading.Thread):
    """The largest sum of anonymous memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._pid = pid
        self._stop_it = threading.Event()

    def run(self) -> None:
        while not self._stop_it.wait(0.02):
            self.peak = max(self.peak, sum(mapped_of(pid, ()).anonymous for pid in tree_of(self._pid)))

    def stop(self) -> int:
        self._stop_it.set()
        self.join()
        return self.peak


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """302 MB of float32."""
    path = tmp_path_factory.mktemp("large") / "large.onnx"
    generate(path, Shape(hidden=1024, layers=6, heads=16, dtype="float32"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp32", "int4"])
def test_compiling_stays_within_the_memory_it_is_given(large: Path, tmp_path: Path, scheme: str) -> None:
    command = [sys.executable, "-m", "compile", str(large), "--target", "x86-64-dev", "--scheme", scheme, "--json"]
    command += ["--shape", "x=1,1..16,1024", "--host-memory", "420MiB", "-o", str(tmp_path / "m.tfb")]
    with limited(420 * MIB) as limit:
        with subprocess.Popen(
            limit.command(command), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            watch = Watch(process.pid)
            watch.start()
            said = process.communicate()[1]
            peak = watch.stop()
        assert process.returncode == 0, said
        assert limit.oom_kills() == 0
    assert 100 * MIB < peak < 420 * MIB
    manifest = read_manifest(tmp_path / "m.tfb")
    verify_files(tmp_path / "m.tfb", manifest)
    assert (len(manifest.segments) > 1) is (scheme == "fp32")
