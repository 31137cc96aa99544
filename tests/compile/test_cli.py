"""`tightfit-compile`: one clear line for each bad input, exit code 2, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from compile.__main__ import main
from targets.board import board_source
from targets.bundle import read_manifest, verify_files
from tests.support.models import external, init, mlp, model, node, normal, save, value

BOARD = "x86-64-dev"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 98101\n"


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """What is on standard error beside warnings."""
        return [line for line in self.err.splitlines() if not line.startswith("warning:")]


Run = Callable[..., Outcome]


@pytest.fixture
def tightfit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tightfit-compile", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return run


def refused(tightfit: Run, folder: Path, words: str, *arguments: str | Path) -> None:
    """Compile into `folder`/out/m.tfb; it must fail with one line and leave nothing."""
    out = folder / "out"
    out.mkdir()
    done = tightfit(*arguments, "--json", "-o", out / "m.tfb")
    assert done.code == 2
    assert done.out == ""
    assert len(done.complaints) == 1, done.err
    assert done.complaints[0].startswith("tightfit-compile: error: ")
    assert re.search(words, done.complaints[0]), done.complaints[0]
    assert not list(out.iterdir())


# -- files that are no model ---------------------------------------------------------------------------------------


def a_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.onnx", b"x")


FILES: dict[str, tuple[bytes | Callable[[Path], Any], str]] = {
    "random": (np.random.default_rng(0).bytes(500), "not a valid ONNX model"),
    "text": (b"hello, this is a text\n" * 20, "not a valid ONNX model"),
    "empty": (b"", "is empty"),
    "zip": (a_zip, "is a zip archive"),
    "json": (b'{"model": 1}', "is JSON"),
    "html": (b"<html>404 Not Found</html>", "is a web page"),
    "tflite": (b"\x1c\0\0\0TFL3" + b"\0" * 50, "is a TensorFlow Lite model"),
    "lfs": (LFS, "git-lfs pointer.*git lfs pull"),
    "pickle": (b"\x80\x02}q\0.", "Python pickle"),
    "folder": (Path.mkdir, "is a folder"),
    "missing": (lambda _: None, "cannot read .*No such file"),
}


@pytest.mark.parametrize("kind", FILES)
def test_not_a_model(tightfit: Run, tmp_path: Path, kind: str) -> None:
    content, words = FILES[kind]
    path = tmp_path / "model.onnx"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    refused(tightfit, tmp_path, words, path, "--target", BOARD)


# -- external data -------------------------------------------------------------------------------------------------


def link(path: Path) -> None:
    path.with_name("real.bin").write_bytes(b"\0" * 4096)
    path.symlink_to("real.bin")


def hard_link(path: Path) -> None:
    path.with_name("real.bin").write_bytes(b"\0" * 4096)
    path.hardlink_to(path.with_name("real.bin"))


ZEROS = b"\0" * 4096
EXTERNAL: dict[str, tuple[dict[str, object], bytes | Callable[[Path], Any], str]] = {
    "missing": ({"location": "w.bin"}, lambda _: None, "weight file w.bin is missing"),
    "truncated": ({"location": "w.bin", "offset": 64, "length": 128}, b"\0" * 100, "ends at byte 192.*has 100"),
    "giant offset": ({"location": "w.bin", "offset": 1 << 62, "length": 128}, ZEROS, "ends at byte"),
    "negative offset": ({"location": "w.bin", "offset": -8, "length": 128}, ZEROS, "'w'|valid ONNX"),
    "words for an offset": ({"location": "w.bin", "offset": "many"}, ZEROS, "not a valid ONNX model"),
    "length mismatch": ({"location": "w.bin", "length": 64}, ZEROS, "needs 128 bytes.*says 64"),
    "parent": ({"location": "../secret.bin"}, ZEROS, "outside the model's folder"),
    "hidden parent": ({"location": "a/../../secret.bin"}, ZEROS, "outside the model's folder"),
    "absolute": ({"location": "/etc/hostname"}, ZEROS, "outside the model's folder"),
    "symlink": ({"location": "w.bin"}, link, "reached through a link"),
    "hard link": ({"location": "w.bin"}, hard_link, "second hard link"),
    "lfs": ({"location": "w.bin"}, LFS + ZEROS, "git-lfs pointer.*git lfs pull"),
    "folder": ({"location": "w.bin"}, Path.mkdir, "not a plain file"),
    "fifo": ({"location": "w.bin"}, os.mkfifo, "not a plain file"),
    "no location": ({"offset": 0}, ZEROS, "outside the model's folder|valid ONNX"),
}


@pytest.mark.parametrize("kind", EXTERNAL)
def test_unsafe_or_broken_external_data(tightfit: Run, tmp_path: Path, kind: str) -> None:
    entries, content, words = EXTERNAL[kind]
    folder = tmp_path / "model"
    multiply = node("MatMul", ["x", "w"], ["y"])
    weights = [external("w", [8, 4], **entries)]
    path = save(folder, model([multiply], [value("x", [1, 8])], [value("y", [1, 4])], weights))
    (tmp_path / "secret.bin").write_bytes(ZEROS)
    if isinstance(content, bytes):
        (folder / "w.bin").write_bytes(content)
    else:
        content(folder / "w.bin")
    refused(tightfit, tmp_path, words, path, "--target", BOARD)


def test_overlapping_weights(tightfit: Run, tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "v"], ["y"])]
    weights = [external("w", [4, 4], location="w.bin"), external("v", [4, 4], location="w.bin", offset=32)]
    path = save(tmp_path, model(nodes, [value("x", [1, 4])], [value("y", [1, 4])], weights))
    (tmp_path / "w.bin").write_bytes(ZEROS)
    refused(tightfit, tmp_path, "'w' and 'v' overlap in w.bin", path, "--target", BOARD)


# -- graphs ----------------------------------------------------------------------------------------------------------


def graph(nodes: list[Any], outputs: list[Any] | None = None, **more: Any) -> onnx.ModelProto:
    return model(nodes, [value("x", [1, 40])], outputs if outputs is not None else [value("y", None)], **more)


def without_opset() -> onnx.ModelProto:
    made = graph([node("Relu", ["x"], ["y"])])
    del made.opset_import[:]
    return made


def short_data() -> onnx.ModelProto:
    tensor = TensorProto(name="w", data_type=1, dims=[1 << 31, 1 << 31, 8], raw_data=b"\0" * 16)
    return graph([node("MatMul", ["x", "w"], ["y"])], weights=[tensor])


def nan_weight() -> onnx.ModelProto:
    weight = normal(40, 40)
    weight[0, 0] = np.nan
    return graph([node("MatMul", ["x", "w"], ["y"])], weights=[init("w", weight)])


GRAPHS: dict[str, tuple[Callable[[], onnx.ModelProto], list[str], str]] = {
    "no outputs": (lambda: graph([node("Relu", ["x"], ["y"])], []), [], "the graph has no outputs"),
    "cycle": (lambda: graph([node("Add", ["x", "y"], ["a"]), node("Relu", ["a"], ["y"])]), [], "has a cycle"),
    "opset too new": (lambda: graph([node("Relu", ["x"], ["y"])], opset=99), [], "opset 99;.*ends at 28"),
    "no opset": (without_opset, [], "imports no operator set"),
    "one name written twice": (
        lambda: graph([node("Relu", ["x"], ["a"]), node("Neg", ["x"], ["a"]), node("Abs", ["a"], ["y"])]),
        [],
        "'a' is redeclared",
    ),
    "one output listed twice": (
        lambda: graph([node("Relu", ["x"], ["y"])], [value("y", [1, 40]), value("y", [1, 40])]),
        [],
        "output 'y' is listed twice",
    ),
    "input from nowhere": (lambda: graph([node("Add", ["x", "q"], ["y"])]), [], "reads 'q', which nothing produces"),
    "custom domain": (
        lambda: graph([node("Magic", ["x"], ["y"], domain="com.acme")], [value("y", [1, 40])], domains=["com.acme"]),
        [],
        r"no operator com\.acme::Magic \(node",
    ),
    "unknown operator": (lambda: graph([node("Magic", ["x"], ["y"])], [value("y", [1, 40])]), [], "Magic"),
    "shape larger than the data": (short_data, [], "'w' needs 147573952589676412928 bytes.*the file has 16"),
    "NaN weight": (nan_weight, ["--scheme", "int4"], "tensor 'w' holds 1 NaN among its 1600 values"),
    "84 bytes that ask for 16 GB": (
        lambda: graph(
            [node("ConstantOfShape", ["s"], ["c"]), node("Identity", ["c"], ["y"])],
            weights=[init("s", np.array([1 << 16, 1 << 16]))],
        ),
        [],
        "ConstantOfShape node '.*' makes a tensor of 16.0 GiB",
    ),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_that_cannot_be_compiled(tightfit: Run, tmp_path: Path, kind: str) -> None:
    build, options, words = GRAPHS[kind]
    refused(tightfit, tmp_path, words, save(tmp_path, build()), "--target", BOARD, *options)


# -- options and data --------------------------------------------------------------------------------------------


def board(folder: Path, **changes: str) -> Path:
    text = board_source(BOARD)[1]
    for key, entry in changes.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {entry}", text)
        assert count == 1
    path = folder / "mine.toml"
    path.write_text(text)
    return path


NO_INT4 = '["float32", "int8", "uint8", "int64"]'
OPTIONS: dict[str, tuple[list[str], str]] = {
    "unknown board": (["--target", "raspbery-pi-5-4gb"], "unknown board.*did you mean 'raspberry-pi-5-4gb'"),
    "no board": ([], "Missing option '--target'"),
    "unknown option": (["--target", BOARD, "--fast"], "No such option: --fast"),
    "no samples": (["--target", BOARD, "--samples", "0"], "--samples"),
    "unknown scheme": (["--target", BOARD, "--scheme", "int5"], "unknown scheme 'int5'.*did you mean 'int4'"),
    "tensorrt": (["--target", "jetson-orin-nano-4gb"], "no compiler backend for tensorrt"),
    "bad name": (["--target", BOARD, "--name", "///"], "no model name can be made of"),
    "no range": (["--target", BOARD], r"say --shape 'x=\?,64'"),
    "grammar": (["--target", BOARD, "--shape", "x=a,64"], "'a' is not a dimension.*NAME=DIM"),
    "unknown input": (["--target", BOARD, "--shape", "z=1,64"], "no input or dimension 'z'.*available: n, x"),
    "wrong rank": (["--target", BOARD, "--shape", "x=1"], r"gives 1 dimensions for x\[n,64\]"),
    "contradiction": (["--target", BOARD, "--shape", "x=1,65"], "gives 65 for axis 1.*always 64"),
    "absurd size": (
        ["--target", BOARD, "--shape", "x=1..99999999999999,64"],
        "input x .* one tensor can have",
    ),
    "missing asset": (
        ["--target", BOARD, "--shape", "x=1,64", "--asset", "/nowhere/labels.txt"],
        "cannot read asset /nowhere/labels.txt: No such file",
    ),
    "an asset that is a folder": (
        ["--target", BOARD, "--shape", "x=1,64", "--asset", "/"],
        "cannot read asset /: Is a",
    ),
    "two assets of one name": (
        ["--target", BOARD, "--shape", "x=1,64", "--asset", __file__, "--asset", __file__],
        "two assets are named test_cli.py",
    ),
    "no number for a limit": (["--target", BOARD, "--shape", "x=1,64", "--max-error", "nan"], "nan is no limit"),
    "a negative limit": (["--target", BOARD, "--shape", "x=1,64", "--max-error", "-1"], "-1.0 is no limit"),
    "too little memory": (
        ["--target", BOARD, "--shape", "x=1,64", "--host-memory", "100MiB"],
        "--host-memory 100.0 MiB is too little .*the compiler itself needs 800.0 MiB",
    ),
    "no size": (["--target", BOARD, "--shape", "x=1,64", "--host-memory", "much"], "much"),
    "unknown residency": (
        ["--target", BOARD, "--shape", "x=1,64", "--residency", "map"],
        "unknown residency 'map'.*did you mean 'mapped'",
    ),
    "too large an error": (
        ["--target", BOARD, "--shape", "x=1,64", "--scheme", "int4", "--max-error", "1e-6"],
        "relative L2 .* limit 1e-06",
    ),
    "no data": (["--target", BOARD, "--shape", "x=1,64", "--calib", "/nowhere/a.npz"], "is not there"),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_that_do_not_fit(tightfit: Run, tmp_path: Path, kind: str) -> None:
    options, words = OPTIONS[kind]
    refused(tightfit, tmp_path, words, mlp(tmp_path, "n"), *options)


def test_options_are_checked_before_the_model_is_read(tightfit: Run, tmp_path: Path) -> None:
    for options, words in (["--asset", "/nowhere/a.txt"], "cannot read asset"), (["--max-error", "nan"], "no limit"):
        done = tightfit(tmp_path / "missing.onnx", "--target", BOARD, "-o", tmp_path / "m.tfb", *options)
        assert done.code == 2
        assert words in done.err


def test_a_scheme_the_board_cannot_execute(tightfit: Run, tmp_path: Path) -> None:
    target = board(tmp_path, dtypes=NO_INT4)
    words = "needs int4, which mine .* cannot execute.*available there: fp32, int8-dynamic, int8-weights"
    refused(tightfit, tmp_path, words, mlp(tmp_path), "--target", target, "--scheme", "int4")


@pytest.mark.usefixtures("unobserved")
def test_a_board_that_is_too_small(tightfit: Run, tmp_path: Path) -> None:
    target = board(
        tmp_path, physical_mib="64", mem_total_mib="64", os_reserve_mib="1", contiguous_ceiling_mib="64",
        runtime_fixed_mib="54",
    )  # fmt: skip
    source = mlp(tmp_path, 1, 256, 8192)
    refused(
        tightfit,
        tmp_path,
        "phase finalise needs .* but the budget is 54.4 MiB.*larger board",
        source,
        "--target",
        target,
    )


CALIB: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "dtype": ({"x": normal(1, 64).astype(np.float64)}, "input 'x' is float64"),
    "shape": ({"x": normal(1, 63)}, "size 63 on axis 1"),
    "missing input": ({}, "holds no samples|input 'x' is missing"),
    "unknown input": ({"x": normal(1, 64), "q": normal(1)}, "unknown input 'q'"),
    "pickled": ({"x": np.array([{}], object)}, "objects are refused"),
    "not an npz": (b"no archive", "it is neither an npz nor an npy file"),
}


@pytest.mark.parametrize("kind", CALIB)
def test_calibration_data_that_does_not_fit(tightfit: Run, tmp_path: Path, kind: str) -> None:
    content, words = CALIB[kind]
    data = tmp_path / "data.npz"
    if isinstance(content, bytes):
        data.write_bytes(content)
    else:
        np.savez(data, **content)
    refused(tightfit, tmp_path, rf"data\.npz.*({words})", mlp(tmp_path, 1), "--target", BOARD, "--calib", data)


def test_an_output_that_cannot_be_written(tightfit: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file" / "m.tfb", Path("/proc/tightfit/m.tfb")):
        done = tightfit(mlp(tmp_path), "--target", BOARD, "--json", "-o", out)
        assert done.code == 2
        assert done.complaints == [line for line in done.complaints if line.startswith("tightfit-compile: error: ")]
        assert len(done.complaints) == 1


# -- what works ------------------------------------------------------------------------------------------------------


def test_compile_inspect_and_overwrite(tightfit: Run, tmp_path: Path) -> None:
    """One bundle through all commands; a tensor's name that looks like markup prints as it is."""
    multiply = node("MatMul", ["x", "w"], ["y[/x]"])
    path = save(
        tmp_path, model([multiply], [value("x", ["n", 40])], [value("y[/x]", ["n", 40])], [init("w", normal(40, 40))])
    )
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\n")
    out = tmp_path / "m.tfb"
    common = [path, "--target", BOARD, "--shape", "x=1..4,40", "-o", out, "--asset", labels]
    done = tightfit(*common)
    assert done.code == 0, done.err
    assert "wrote" in done.out
    assert "random inputs" in done.err
    manifest = read_manifest(out)
    verify_files(out, manifest)
    assert manifest.assets == ("assets/labels.txt",)

    again = tightfit(*common)
    assert again.code == 2
    assert re.search(r"error: .*m\.tfb exists .*--overwrite", again.err)
    assert read_manifest(out) == manifest

    shown = tightfit("inspect", out)
    assert (shown.code, shown.err) == (0, "")
    assert "y[/x]" in shown.out
    assert manifest.version in shown.out
    assert json.loads(tightfit("inspect", "--json", out).out)["name"] == "model"

    replaced = tightfit(*common, "--overwrite", "--json", "--name", "other")
    assert replaced.code == 0
    assert json.loads(replaced.out) == json.loads((out / "report.json").read_text())
    assert read_manifest(out).name == "other"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["labels.txt", "m.tfb", "model.onnx"]

    (out / "segments/00.onnx").write_bytes(b"changed")
    broken = tightfit("inspect", out)
    assert broken.code == 2
    assert len(broken.complaints) == 1


def test_as_a_program(tmp_path: Path) -> None:
    """The same through the interpreter: exit code, and no traceback."""
    command = [sys.executable, "-m", "compile", str(tmp_path / "no.onnx"), "--target", BOARD, "-o", str(tmp_path / "m")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("tightfit-compile: error: cannot read ")
    assert "Traceback" not in done.stderr


def test_help_names_what_exists(tightfit: Run) -> None:
    for arguments in ([], ["--help"]):
        done = tightfit(*arguments)
        assert done.code == 0
        assert "inspect" in done.out
