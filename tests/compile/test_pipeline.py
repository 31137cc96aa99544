"""From file to bundle: the same bytes every time, and a real model end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from rich.console import Console

from bench.models import fetch
from compile.__main__ import main
from compile.errors import OptionError, VerificationError
from compile.forms import NORMALIZE
from compile.options import Options
from compile.passes.fold import FoldConstants
from compile.pipeline import compile_model
from compile.report import print_report
from compile.shapes import parse_shape
from compile.windows import parse_split
from targets.board import load_board
from targets.budget import check_plan
from targets.bundle import MANIFEST, Manifest, dumps, read_manifest, verify_files
from targets.errors import BudgetError
from targets.tensor import DimRange, Padding
from targets.windows import Split
from tests.support.models import SCHEME_NAMES, external, init, model, node, normal, save, value

BOARD = load_board("x86-64-dev")
ROOT = Path(__file__).parents[2]
COMPILE_ALL = """
import sys
from pathlib import Path
from compile.backends import ort
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board
source, out = map(Path, sys.argv[1:3])
board = load_board("x86-64-dev")
observe, traces = ort.observe, []

def observe_once(*arguments):
    # Observing takes most of the time, and the graphs of all schemes have the same activations but for a few.
    if not traces:
        traces.append(observe(*arguments))
    return traces[0]

ort.observe = observe_once
for scheme in sys.argv[3:]:
    options = Options(
        scheme, (parse_shape("i=1..4"),), assets=(source.with_name("labels.txt"),), random=True
    )
    compile_model(source, board, out / scheme, options)
"""


def tower(folder: Path) -> Path:
    """A table, matrices, a convolution, constants and weights inside and beside the file."""
    nodes = [
        node("Gather", ["table", "i"], ["e"]),
        node("MatMul", ["e", "w"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("Gemm", ["b", "v", "bias"], ["c"], transB=1),
        node("Reshape", ["c", "square"], ["d"]),
        node("Conv", ["d", "k"], ["f"]),
        node("ReduceMean", ["f"], ["y"], axes=[2, 3], keepdims=0),
    ]
    data = normal(64, 128, seed=3)
    folder.mkdir(parents=True)
    (folder / "big.bin").write_bytes(data.tobytes())
    (folder / "labels.txt").write_text("a\nb\n")
    weights = [
        init("table", normal(100, 64)), external("w", [64, 128], location="big.bin"), init("v", normal(144, 128)),
        init("bias", normal(144)), init("square", np.array([-1, 16, 3, 3])), init("k", normal(8, 16, 3, 3)),
    ]  # fmt: skip
    proto = model(nodes, [value("i", ["n"], 7)], [value("y", ["n", 8]), value("b", ["n", 128])], weights)
    proto.metadata_props.add(key="b", value="2")
    proto.metadata_props.add(key="a", value="1")
    return save(folder, proto)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    source = tower(tmp_path / "source")
    running = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", COMPILE_ALL, str(source), str(tmp_path / seed), *SCHEME_NAMES]
        running.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}))
    assert [process.wait(120) for process in running] == [0, 0]
    first, second = files_of(tmp_path / "1"), files_of(tmp_path / "2")
    assert list(first) == list(second)
    assert [name for name in first if first[name] != second[name]] == []
    assert sum(name.endswith("weights.bin") for name in first) == len(SCHEME_NAMES)
    for scheme in SCHEME_NAMES:
        manifest = read_manifest(tmp_path / "1" / scheme)
        verify_files(tmp_path / "1" / scheme, manifest)
        assert manifest.quantization.scheme == scheme
        assert "assets/metadata.json" in manifest.assets
        assert str(tmp_path) not in dumps(manifest).decode()


def test_a_real_model_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = fetch("ppocr-v6-rec"), tmp_path / "rec.tfb"
    board = load_board("raspberry-pi-5-4gb")
    options = Options(shapes=(parse_shape("x=1,3,48,160..320"),))
    manifest = compile_model(source, board, out, options)
    assert read_manifest(out) == manifest
    assert (out / MANIFEST).read_bytes() == dumps(manifest)
    verify_files(out, manifest)
    check_plan(manifest.plan, manifest.plan.budget_bytes)
    assert manifest.contract.inputs[0].describe().startswith("x float32[1,3,48,")
    assert max(error.relative_l2 for error in manifest.verification.outputs) < 1e-5

    sample = {"x": np.random.default_rng(7).standard_normal((1, 3, 48, 224)).astype(np.float32)}
    before, after = (
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, sample)
        for path in (source, out / manifest.segments[0].file)
    )
    for expected, found in zip(before, after, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    for arguments, words in ([], "Memory, budget 3.4 GiB"), (["--json"], '"schema": 1'):
        monkeypatch.setattr(sys, "argv", ["tightfit-compile", "inspect", str(out), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert words in capsys.readouterr().out

    small = read_manifest(out).plan
    with pytest.raises(BudgetError):
        check_plan(small, small.phase("run").total_bytes - 1)


BATCHES: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "rows apart": ([node("Relu", ["a"], ["y"])], ""),
    "rows apart, through a computed shape": (
        [node("Shape", ["a"], ["s"]), node("Reshape", ["a", "flat"], ["f"]), node("Reshape", ["f", "s"], ["y"])], "",
    ),
    "a softmax over rows": ([node("Softmax", ["a"], ["y"], axis=0)], "'y' of rows together differs from that of rows"),
    "a sum of rows": ([node("ReduceMax", ["a"], ["y"], axes=[0], keepdims=0)], r"'y' is \[48\] for 2 rows together"),
}  # fmt: skip


@pytest.mark.usefixtures("unobserved")
@pytest.mark.parametrize("scheme", ["fp32", "int8-dynamic", "int4"])
@pytest.mark.parametrize("case", BATCHES)
def test_the_batch_is_what_rows_prove_to_be(tmp_path: Path, case: str, scheme: str) -> None:
    nodes, words = BATCHES[case]
    weights = [init("w", normal(64, 48)), init("flat", np.array([-1]))]
    proto = model([node("MatMul", ["x", "w"], ["a"]), *nodes], [value("x", ["n", 64])], [value("y", None)], weights)
    path, shapes = save(tmp_path, proto), (parse_shape("n=1..3/9"),)
    manifest = compile_model(path, BOARD, tmp_path / "found.tfb", Options(scheme, shapes))
    assert manifest.contract.dims == {"n": DimRange(1, 9, 9, (3, 9))}
    assert manifest.contract.batch == (None if words else "n")
    named = Options(scheme, shapes, batch_axis="n")
    if words:
        with pytest.raises(OptionError, match=rf"--batch-axis: 'n' is not the batch: output {words}"):
            compile_model(path, BOARD, tmp_path / "named.tfb", named)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["found.tfb", "model.onnx"]
    else:
        assert compile_model(path, BOARD, tmp_path / "named.tfb", named).contract == manifest.contract
        assert manifest.contract.outputs[0].shape == ("n", 48)


def test_long_sequences_are_split_as_far_as_windows_prove_to_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A convolution sees two positions to each side, and every second of them answers; a maximum sees all."""
    nodes = [
        node("Conv", ["x", "w"], ["y"], pads=[2, 2], strides=[2]),
        node("ReduceMax", ["y"], ["m"], axes=[2], keepdims=0),
    ]
    weights = [init("w", normal(3, 2, 5))]
    proto = model(nodes, [value("x", [1, 2, "t"])], [value("y", [1, 3, None]), value("m", [1, 3])], weights, opset=13)
    path, shapes = save(tmp_path, proto), (parse_shape("t=1..32"),)

    def compiled(split: str, max_error: float | None = None) -> Manifest:
        wanted = Options("fp32", shapes, split=parse_split(split), overwrite=True, max_error=max_error)
        return compile_model(path, BOARD, tmp_path / "out.tfb", wanted)

    manifest = compiled("t=200/8")
    contract, split = manifest.contract, manifest.contract.split
    assert isinstance(split, Split)
    assert (split.dim, split.window, split.overlap, split.longest) == ("t", 32, 8, 200)
    assert [(join.axis, join.made, join.of) for join in split.joins] == [(2, 1, 2), (None, 1, 1)]
    assert [(join.error or 0) < 1e-5 for join in split.joins] == [True, False]
    assert contract.whole.dims["t"].max == 200
    assert [spec.max_nbytes for spec in contract.whole.inputs] == [2 * 200 * 4]
    assert [spec.max_nbytes for spec in contract.whole.outputs] == [3 * 100 * 4, 3 * 4]
    run = manifest.plan.phase("run")
    assert run.nbytes("bodies") == manifest.plan.slots * 2 * (2 * 200 * 4)
    assert run.nbytes("answers") == manifest.plan.slots * (3 * 100 * 4 + 3 * 2 * 8)
    print_report(manifest, Console())
    assert "t up to 200 in windows of 32 that share 8" in capsys.readouterr().out

    with pytest.raises(
        VerificationError, match=r"--split t=200/2: output 'y' of windows differs from that of the whole"
    ):
        compiled("t=200/2", max_error=1e-2)
    with pytest.raises(
        OptionError, match="windows of 32 that share 7 do not join: outputs have one position for every 2"
    ):
        compiled("t=200/7")


@pytest.mark.usefixtures("unobserved")
def test_padding_is_what_a_mask_proves_to_be(tmp_path: Path) -> None:
    masked = [node("Mul", ["x", "mask"], ["y"]), node("ReduceMean", ["y"], ["m"], axes=[1], keepdims=0)]
    summed = [*masked[:1], node("ReduceL1", ["y"], ["m"], axes=[1], keepdims=0)]
    inputs = [value("x", ["n", "t"]), value("mask", ["n", "t"])]
    outputs = [value("y", ["n", "t"]), value("m", ["n"])]

    def compiled(nodes: list[onnx.NodeProto], shape: str) -> Manifest:
        source = save(tmp_path, model(nodes, inputs, outputs))
        options = Options("fp32", tuple(map(parse_shape, shape.split())), pad="t", overwrite=True)
        return compile_model(source, BOARD, tmp_path / "out.tfb", options)

    manifest = compiled(summed, "n=1..4 t=1..16")
    assert (manifest.contract.batch, manifest.contract.pad) == ("n", Padding("t", (1, None)))
    with pytest.raises(
        OptionError, match=r"--pad: 4 positions .* filled up to 16: output 'm' differs by a relative L2"
    ):
        compiled(masked, "n=1..4 t=3/16")
    with pytest.raises(OptionError, match="--pad: padding is for requests that run together"):
        compiled(masked, "n=1 t=1..16")


def test_passes_print_as_they_would_be_written() -> None:
    assert str(NORMALIZE[0]) == "InlineFunctions()"
    (fold,) = (each for each in NORMALIZE if isinstance(each, FoldConstants))
    assert str(fold).startswith("FoldConstants(max_input_elements=")
