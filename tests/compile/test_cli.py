"""`tightfit-compile`: one clear line for each bad input, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from targets.board import board_source
from targets.bundle import read_manifest, verify_files
from tests.support.commands import Run, refused, runner
from tests.support.models import init, mlp, model, node, normal, save, value

BOARD = "x86-64-dev"


@pytest.fixture
def tightfit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


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
    "blocks without a block scheme": (
        ["--target", BOARD, "--scheme", "int8-dynamic", "--block", "64", "--symmetric"],
        "--block 64 and --symmetric: scheme 'int8-dynamic' does not .*those that do: int8-weights, int4",
    ),
    "no block length": (
        ["--target", BOARD, "--scheme", "int4", "--block", "48"],
        "--block 48 .*available: 32, 64, 128",
    ),
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
        "--host-memory 100.0 MiB is too little .*the compiler itself needs 400.0 MiB",
    ),
    "no size": (["--target", BOARD, "--shape", "x=1,64", "--host-memory", "much"], "much"),
    "unknown residency": (
        ["--target", BOARD, "--shape", "x=1,64", "--residency", "map"],
        "unknown residency 'map'.*did you mean 'mapped'",
    ),
    "too many slots": (["--target", BOARD, "--shape", "x=1,64", "--slots", "257"], "257 is neither auto nor a number"),
    "no number of slots": (
        ["--target", BOARD, "--shape", "x=1,64", "--slots", "-1"],
        "-1 is neither auto nor a number",
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
    words = "needs int4, which mine .* cannot execute.*available there: fp32, int8-dynamic, int8-static, int8-weights"
    refused(tightfit, tmp_path, words, mlp(tmp_path), "--target", target, "--scheme", "int4")


@pytest.mark.usefixtures("unobserved")
def test_a_board_that_is_too_small(tightfit: Run, tmp_path: Path) -> None:
    target = board(
        tmp_path, physical_mib="64", mem_total_mib="64", os_reserve_mib="1", contiguous_ceiling_mib="64",
        runtime_fixed_mib="53",
    )  # fmt: skip
    source = mlp(tmp_path, 1, 256, 8192)
    refused(
        tightfit,
        tmp_path,
        "no segments fit mine: the budget is 54.4 MiB; .* would do, for MatMul node .*larger board",
        source,
        "--target",
        target,
    )


CALIB: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "dtype": ({"x": np.zeros((1, 64), np.int32)}, "input 'x' is int32"),
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


@pytest.mark.usefixtures("unobserved")
def test_the_blocks_asked_for_stand_in_manifest_and_report(tightfit: Run, tmp_path: Path) -> None:
    common = [mlp(tmp_path, k=256), "--target", BOARD, "--scheme", "int4"]
    for index, (given, block, symmetric) in enumerate(
        [([], "32", "false"), (["--block", "32", "--zero-points"], "32", "false"), (["--symmetric"], "32", "true"),
         (["--block", "128", "--symmetric"], "128", "true")]
    ):  # fmt: skip
        out = tmp_path / f"{index}.tfb"
        done = tightfit(*common, *given, "--name", "m", "-o", out)
        assert done.code == 0, done.err
        manifest = read_manifest(out)
        assert (manifest.options["block"], manifest.options["symmetric"]) == (block, symmetric)
        assert json.loads((out / "report.json").read_text())["options"] == manifest.options
        words = f"scheme int4, blocks of {block} {'without' if symmetric == 'true' else 'with'} zero points"
        assert words in done.out
        assert words in tightfit("inspect", out).out
    assert read_manifest(tmp_path / "0.tfb") == read_manifest(tmp_path / "1.tfb")
    sizes = [read_manifest(tmp_path / f"{index}.tfb").quantization.weight_bytes for index in range(4)]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3]


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
