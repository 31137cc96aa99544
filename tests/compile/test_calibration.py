"""The scheme int8-static through the command line: what it asks for, what it says, and what the bundle holds."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from compile.__main__ import compile_command
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.bundle import read_manifest
from targets.errors import TightfitError
from tests.support.models import Array, init, mlp, model, node, normal, save, value

ARM, X86 = "raspberry-pi-5-4gb", "x86-64-dev"
STREAMED = Options("int8-static", (parse_shape("x=1,1..4,128"),), random=True)
pytestmark = pytest.mark.usefixtures("unobserved")


def network(folder: Path) -> Path:
    nodes = [
        node("Conv", ["x", "w0"], ["a"], pads=[1, 1, 1, 1]), node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w1"], ["c"]), node("Add", ["c", "b"], ["d"]), node("Conv", ["d", "w1"], ["y"]),
    ]  # fmt: skip
    weights = [init("w0", normal(16, 4, 3, 3) / 6), init("w1", normal(16, 16, 1, 1, seed=1) / 4)]
    return save(folder, model(nodes, [value("x", [1, 4, 12, 12])], [value("y", None)], weights))


def samples(folder: Path, count: int = 6) -> Path:
    folder.mkdir(exist_ok=True)
    for index in range(count):
        np.savez(folder / f"{index}.npz", x=normal(1, 4, 12, 12, seed=index))
    return folder


def test_a_bundle_says_what_it_was_calibrated_on(tmp_path: Path) -> None:
    path, calib = network(tmp_path), samples(tmp_path / "samples")
    out = tmp_path / "out.tfb"
    manifest = compile_model(path, load_board(ARM), out, Options("int8-static", calib=calib))
    assert manifest.quantization.quantized == {"Conv": 3}
    assert manifest.verification.outputs[0].relative_l2 < 0.03
    assert manifest.options["calibrate_with"] == "percentile"
    assert len(manifest.options["calibrated_on"]) == 64
    assert json.loads((out / "report.json").read_text())["warnings"] == []
    again = compile_model(path, load_board(ARM), tmp_path / "again.tfb", Options("int8-static", calib=calib))
    assert again.version == manifest.version


def test_all_samples_are_calibrated_on_however_few_are_verified(tmp_path: Path) -> None:
    path, calib = network(tmp_path), samples(tmp_path / "samples")
    few = compile_model(path, load_board(ARM), tmp_path / "1.tfb", Options("int8-static", calib=calib, samples=1))
    samples(calib, 7)
    more = compile_model(path, load_board(ARM), tmp_path / "2.tfb", Options("int8-static", calib=calib, samples=1))
    assert few.verification.samples == more.verification.samples == 1
    assert few.options["calibrated_on"] != more.options["calibrated_on"]


def test_it_asks_for_samples(tmp_path: Path) -> None:
    with pytest.raises(TightfitError, match=r"needs samples.*--calib.*--random"):
        compile_model(network(tmp_path), load_board(ARM), tmp_path / "out.tfb", Options("int8-static"))
    assert not list(tmp_path.glob("*.tfb*"))


def test_random_ranges_are_said_to_be_guesses(tmp_path: Path) -> None:
    out = tmp_path / "out.tfb"
    manifest = compile_model(network(tmp_path), load_board(ARM), out, Options("int8-static", random=True))
    assert manifest.quantization.quantized == {"Conv": 3}
    warnings = json.loads((out / "report.json").read_text())["warnings"]
    assert any("random values" in text and "guesses" in text for text in warnings)


def test_a_method_that_is_none_is_named(tmp_path: Path) -> None:
    options = Options("int8-static", random=True, calibrate_with="percentil")
    with pytest.raises(TightfitError, match=r"unknown method 'percentil'.*percentile"):
        compile_model(network(tmp_path), load_board(ARM), tmp_path / "out.tfb", options)


def test_what_stays_float_is_in_the_report(tmp_path: Path) -> None:
    nodes = [node("Mul", ["x", "s"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    weights = [init("s", np.float32(0)), init("w", normal(64, 32))]
    path = save(tmp_path, model(nodes, [value("x", [2, 64])], [value("y", None)], weights))
    out = tmp_path / "out.tfb"
    manifest = compile_model(path, load_board(ARM), out, Options("int8-static", random=True))
    assert [left.reason for left in manifest.quantization.left] == ["'a': constant in calibration"]
    warnings = json.loads((out / "report.json").read_text())["warnings"]
    assert any("'a' stays float: constant in calibration" in text for text in warnings)


@pytest.mark.parametrize(("board", "largest"), [(ARM, 127), (X86, 64)])
def test_weights_keep_to_what_the_boards_kernels_can_add(tmp_path: Path, board: str, largest: int) -> None:
    out = tmp_path / "out.tfb"
    compile_model(mlp(tmp_path), load_board(board), out, Options("int8-static", random=True))
    graph = onnx.load(str(out / "segments" / "00.onnx")).graph
    codes = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert [int(np.abs(each.astype(int)).max()) for each in codes] == [largest, largest]


def test_segments_are_calibrated_like_the_whole(
    tmp_path: Path, transformer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fits the host is cut as one that does not would be."""
    whole = compile_model(transformer, load_board(ARM), tmp_path / "whole.tfb", STREAMED)
    monkeypatch.setattr("compile.transform.segment_limit", lambda _: 1 << 20)
    parts = compile_model(transformer, load_board(ARM), tmp_path / "parts.tfb", STREAMED)
    assert len(whole.segments) == 1
    assert len(parts.segments) > 1
    assert parts.quantization.quantized == whole.quantization.quantized
    scales = [_scales(tmp_path / name) for name in ("whole.tfb", "parts.tfb")]
    assert scales[0].keys() == scales[1].keys()
    for name, scale in scales[0].items():
        np.testing.assert_allclose(scales[1][name], scale, rtol=1e-3)
    assert read_manifest(tmp_path / "parts.tfb") == parts


def _scales(bundle: Path) -> dict[str, Array]:
    return {
        tensor.name: onnx.numpy_helper.to_array(tensor, str(bundle / "segments"))
        for path in sorted((bundle / "segments").glob("*.onnx"))
        for tensor in onnx.load(str(path), load_external_data=False).graph.initializer
        if tensor.name.endswith(".scale") and not tensor.external_data
    }


def test_the_command_line_and_the_pipeline_have_one_default_method() -> None:
    assert inspect.signature(compile_command).parameters["calibrate_with"].default == Options().calibrate_with
