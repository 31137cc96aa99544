"""A compilation that was killed goes on, and ends with the bytes of one that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.big_model import Shape, generate
from compile.__main__ import main
from compile.graph import ir
from compile.journal import JOURNAL, Journal, Record
from compile.options import Options
from compile.pipeline import compile_model
from compile.progress import Progress
from compile.shapes import parse_shape
from compile.writer import PAGE, BundleWriter, TensorSink
from targets.board import load_board
from targets.bundle import read_manifest, verify_files

ROOT = Path(__file__).parents[2]
BOARD = load_board("x86-64-dev")
SHAPE = "x=1,2..8,128"
OPTIONS = Options(scheme="int4", shapes=(parse_shape(SHAPE),))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Interrupted(Progress):
    """Interrupts when so many bytes are written, as a person may; keeps what was said."""

    def __init__(self, after: int | None = None) -> None:
        self.left = after
        self.said: list[str] = []

    def advance(self, nbytes: int) -> None:
        if self.left is not None:
            self.left -= nbytes
            if self.left < 0:
                raise KeyboardInterrupt

    def warn(self, text: str) -> None:
        self.said.append(text)

    @property
    def resumed(self) -> bool:
        return any("which are kept" in text for text in self.said)


# -- the journal by itself -----------------------------------------------------------------------------------------


def test_a_journal_is_read_up_to_its_first_broken_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"a": 1})
    records = [Record(str(at), at * PAGE, 10, "0" * 64) for at in range(3)]
    journal.restart(records[:1])
    for record in records[1:]:
        journal.add(record, 0)
    journal.close()
    assert list(journal.records()) == records
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-5])
    assert list(journal.records()) == records[:2]
    path.write_bytes(path.read_bytes().replace(b'"1"', b"\xff"))
    assert list(journal.records()) == records[:1]
    assert list(Journal(tmp_path, {"a": 2}).records()) == []
    path.write_bytes(b"\xff\xfe")
    assert not journal.resumable()


def sink_of(folder: Path) -> TensorSink:
    return TensorSink(folder / "segments" / "weights.bin", Journal(folder, {}))


def tensors() -> list[ir.Tensor]:
    rng = np.random.default_rng(0)
    return [ir.tensor(rng.integers(1, 256, size, np.uint8), name=f"t{size}") for size in (5000, 4096, 1, 9000, 3)]


@settings(max_examples=40)
@given(damage=st.integers(0, 6 * PAGE), cut=st.booleans())
def test_tensors_in_front_of_the_damage_are_kept(
    tmp_path_factory: pytest.TempPathFactory, damage: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("sink")
    with sink_of(folder) as sink:
        placed = [sink.put(tensor, tensor.name or "") for tensor in tensors()]
    path = folder / "segments" / "weights.bin"
    whole = path.read_bytes()
    damage = min(damage, len(whole) - 1)
    broken = bytes([whole[damage] ^ 1])
    path.write_bytes(whole[:damage] if cut else whole[:damage] + broken + whole[damage + 1 :])
    with sink_of(folder) as sink:
        ends = [(tensor.offset or 0) + (tensor.length or 0) for tensor in placed]
        assert sink.resumed_bytes == max((end for end in ends if end <= damage), default=0)
        for tensor in tensors():
            sink.put(tensor, tensor.name or "")
        assert sink.nbytes == sink.tensor_bytes + sum(-end % PAGE for end in ends[:-1])
    assert path.read_bytes() == whole
    shutil.rmtree(folder)


# -- interrupted in this process ---------------------------------------------------------------------------------


@pytest.fixture
def source(transformer: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    folder = tmp_path / "source"
    shutil.copytree(transformer.parent, folder)
    return folder / transformer.name


@pytest.fixture
def expected(source: Path, tmp_path: Path, unobserved: None) -> dict[str, bytes]:
    """What an uninterrupted compilation writes."""
    compile_model(source, BOARD, tmp_path / "whole.tfb", OPTIONS)
    return files_of(tmp_path / "whole.tfb")


def interrupt(source: Path, out: Path, options: Options = OPTIONS, after: int = 600_000) -> Path:
    """Compile until `after` bytes are written; returns the folder that is left."""
    with pytest.raises(KeyboardInterrupt):
        compile_model(source, BOARD, out, options, Interrupted(after))
    partial = out.with_name(out.name + ".partial")
    assert (partial / JOURNAL).is_file()
    assert not out.exists()
    return partial


def resume(source: Path, out: Path, options: Options = OPTIONS) -> bool:
    """Compile to the end; whether anything was kept."""
    progress = Interrupted()
    compile_model(source, BOARD, out, options, progress)
    verify_files(out, read_manifest(out))
    assert not out.with_name(out.name + ".partial").exists()
    return progress.resumed


@pytest.mark.parametrize("after", [0, 1, 300_000, 700_000])
def test_an_interrupted_compilation_goes_on(
    source: Path, tmp_path: Path, expected: dict[str, bytes], after: int
) -> None:
    out = tmp_path / "m.tfb"
    interrupt(source, out, after=after)
    resume(source, out)
    assert files_of(out) == expected


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def corrupt_padding(partial: Path) -> None:
    """The first byte behind a tensor that does not end on a page border."""
    lines = (partial / JOURNAL).read_bytes().splitlines()[1:]
    ends = [record["offset"] + record["nbytes"] for record in map(json.loads, lines)]
    flip(partial / "segments/weights.bin", next(end for end in ends[:-1] if end % PAGE))


# what happened to the folder -> whether something can still be kept
DAMAGE: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "nothing": (lambda _: None, True),
    "first byte": (lambda p: flip(p / "segments/weights.bin", 0), False),
    "a byte in the middle": (lambda p: flip(p / "segments/weights.bin", 300_000), True),
    "padding": (corrupt_padding, True),
    "weights cut short": (lambda p: os.truncate(p / "segments/weights.bin", 200_001), True),
    "weights emptied": (lambda p: os.truncate(p / "segments/weights.bin", 0), False),
    "weights deleted": (lambda p: (p / "segments/weights.bin").unlink(), False),
    "journal cut short": (lambda p: os.truncate(p / JOURNAL, (p / JOURNAL).stat().st_size - 7), True),
    "journal without records": (lambda p: os.truncate(p / JOURNAL, 50), False),
    "journal deleted": (lambda p: (p / JOURNAL).unlink(), False),
    "journal of garbage": (lambda p: (p / JOURNAL).write_bytes(b"\xff\0{}\n" * 9), False),
    "activations of a verification": (
        lambda p: (p / "scratch").mkdir() or (p / "scratch/000000.bin").write_bytes(b"x"),
        True,
    ),
    "a stranger's file": (lambda p: (p / "assets").mkdir() or (p / "assets/x.txt").write_text("x"), True),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_noticed(source: Path, tmp_path: Path, expected: dict[str, bytes], kind: str) -> None:
    damage, kept = DAMAGE[kind]
    out = tmp_path / "m.tfb"
    damage(interrupt(source, out))
    assert resume(source, out) is kept
    assert files_of(out) == expected


def touch(path: Path) -> None:
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))


def test_a_source_that_was_touched_starts_afresh(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    for file in (source, source.with_name("small.onnx.data")):
        interrupt(source, tmp_path / "m.tfb")
        touch(file)
        assert not resume(source, tmp_path / "m.tfb")
        assert files_of(tmp_path / "m.tfb") == expected
        shutil.rmtree(tmp_path / "m.tfb")


def test_other_weights_start_afresh(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    weights = source.with_name("small.onnx.data")
    interrupt(source, tmp_path / "m.tfb")
    flip(weights, 1002)
    assert not resume(source, tmp_path / "m.tfb")
    changed = files_of(tmp_path / "m.tfb")
    compile_model(source, BOARD, tmp_path / "again.tfb", OPTIONS)
    assert files_of(tmp_path / "again.tfb") == changed != expected


def test_other_options_start_afresh(source: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    for other in (
        Options(scheme="int8-weights", shapes=OPTIONS.shapes),
        Options(scheme="int4", shapes=OPTIONS.shapes, block=64),
        Options(scheme="int4", shapes=OPTIONS.shapes, symmetric=True),
        Options(scheme="int4", shapes=(parse_shape("x=1,2..9,128"),)),
        Options(scheme="int4", shapes=OPTIONS.shapes, host_memory=3 << 30),
    ):
        interrupt(source, tmp_path / "m.tfb", other)
        assert not resume(source, tmp_path / "m.tfb")
        assert files_of(tmp_path / "m.tfb") == expected
        shutil.rmtree(tmp_path / "m.tfb")


def test_assets_of_the_interrupted_run_are_not_in_the_bundle(
    source: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "labels.txt").write_text("a")

    def commit(*_: object) -> None:
        raise KeyboardInterrupt

    options = Options("int4", OPTIONS.shapes, assets=(tmp_path / "labels.txt",))
    with monkeypatch.context() as patched:
        patched.setattr(BundleWriter, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            compile_model(source, BOARD, tmp_path / "m.tfb", options)
    assert (tmp_path / "m.tfb.partial/assets/labels.txt").is_file()
    assert resume(source, tmp_path / "m.tfb")
    assert files_of(tmp_path / "m.tfb") == expected


def test_two_compilations_of_one_name(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.tfb"
    arguments = [str(source), "--target", "x86-64-dev", "--shape", SHAPE, "--json", "-o", str(out)]
    monkeypatch.setattr(sys, "argv", ["tightfit-compile", *arguments])
    with BundleWriter(out, {}) as first:
        first.add("report.json", b"{}")
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning:")]
        assert said == [
            f"tightfit-compile: error: another compilation is writing {out} (wait for it, or choose another name)"
        ]
        assert (first.folder / "report.json").read_bytes() == b"{}"


# -- killed ------------------------------------------------------------------------------------------------------------

# Forks a compilation whose writing takes about a second, half of each tensor at a time, and kills it at a random
# moment; then runs it to its end. Prints what came of each.
KILLS = """
import json, os, random, shutil, sys, time
from pathlib import Path
from compile import writer
from compile.backends import ort
from compile.backends.base import Trace
from compile.options import Options
from compile.pipeline import compile_model
from compile.progress import Progress
from compile.shapes import parse_shape
from targets.board import load_board
from targets.bundle import file_sha256

source, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
board, options = load_board("x86-64-dev"), Options("int4", (parse_shape(sys.argv[4]),))
write = writer.TensorSink._write

def halves(self, data):
    view = memoryview(data)
    for half in view[: len(view) // 2], view[len(view) // 2 :]:
        write(self, half)
        time.sleep(0.003)

writer.TensorSink._write = halves
ort.observe = lambda parts, settings, inputs, results: Trace((), dict.fromkeys(results, 1 << 16), 0)
ort.runs_within = lambda *_: True

class Said(Progress):
    def warn(self, text):
        if "are kept" in text:
            (folder / "kept").touch()

def start(out):
    child = os.fork()
    if child:
        return child
    try:
        compile_model(source, board, out, options, Said())
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

def digests(out):
    return {str(p.relative_to(out)): file_sha256(p) for p in sorted(out.rglob("*")) if p.is_file()}

began = time.monotonic()
assert os.waitpid(start(folder / "whole.tfb"), 0)[1] == 0
duration = time.monotonic() - began
expected = digests(folder / "whole.tfb")
rng, found = random.Random(7), []
for turn in range(count):
    (folder / "kept").unlink(missing_ok=True)
    child = start(folder / "m.tfb")
    time.sleep(rng.uniform(0, duration))
    os.kill(child, 9)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if not (folder / "m.tfb").exists():
        assert os.waitpid(start(folder / "m.tfb"), 0)[1] == 0
    same = digests(folder / "m.tfb") == expected
    left = sorted(p.name for p in folder.iterdir() if p.name not in ("m.tfb", "whole.tfb", "kept"))
    found.append({"killed": killed, "same": same, "kept": (folder / "kept").exists(), "left": left})
    shutil.rmtree(folder / "m.tfb")
print(json.dumps(found))
"""


def test_killed_at_any_moment_it_ends_with_the_same_bytes(transformer: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(transformer), str(tmp_path), "5", SHAPE],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 5
    assert [turn for turn in found if not turn["same"] or turn["left"]] == []
    assert sum(turn["killed"] for turn in found) >= 3
    assert any(turn["kept"] for turn in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_killed_twenty_times(tmp_path: Path) -> None:
    """Nothing made up: the program, the processes that it starts, and 100 MB of weights."""
    source = tmp_path / "source" / "model.onnx"
    source.parent.mkdir()
    generate(source, Shape(hidden=512, layers=8, heads=8, dtype="float32"))
    out = tmp_path / "out"

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "compile", str(source), "--target", "x86-64-dev", "--scheme", "int4"]
        command += ["--shape", "x=1,2..8,512", "--json", "-o", str(out / name)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    began = time.monotonic()
    with start("whole.tfb") as whole:
        assert whole.wait(120) == 0
    duration = time.monotonic() - began
    expected, rng, kept = files_of(out / "whole.tfb"), random.Random(3), 0
    for _ in range(20):
        with start("m.tfb") as victim:
            time.sleep(rng.uniform(0, duration))
            victim.send_signal(signal.SIGKILL)
        if not (out / "m.tfb").exists():
            with start("m.tfb") as again:
                said = again.communicate(timeout=120)[1]
            assert again.returncode == 0, said
            kept += "are kept" in said
        assert files_of(out / "m.tfb") == expected
        assert sorted(p.name for p in out.iterdir()) == ["m.tfb", "whole.tfb"]
        shutil.rmtree(out / "m.tfb")
    assert kept
