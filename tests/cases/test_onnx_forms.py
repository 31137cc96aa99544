"""ONNX models of every form: compiled under every scheme, run from the bundle, and compared with the source.

Each form was reported against an ONNX tool; the inputs are none that the compiler saw.
"""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from compile import sizes
from compile.graph import load_model, nodes_of
from compile.options import Options
from compile.pipeline import compile_model
from compile.progress import Progress
from compile.shapes import parse_shape
from targets.board import load_board
from targets.bundle import Manifest, verify_files
from tests.cases.forms import FORMS, samples_of, square, unary
from tests.support.models import Array, external, init, model, node, normal, prepared, relative, save, value

BOARD = load_board("x86-64-dev")
# Every scheme that needs no calibration data, and the error that its arithmetic explains.
LIMITS = {"fp32": 1e-5, "int8-dynamic": 0.06, "int8-weights": 0.06, "int4": 0.45}
MIB = 1 << 20
# Operators that the report must account for one by one, in subgraphs and functions too.
COUNTED = ("MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN")


class Warnings(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def run_bundle(bundle: Path, manifest: Manifest, inputs: dict[str, Array]) -> dict[str, Array]:
    """The outputs of the contract, from the bundle's files alone."""
    values = dict(inputs)
    for segment in manifest.segments:
        session = onnxruntime.InferenceSession(str(bundle / segment.file), providers=["CPUExecutionProvider"])
        made = session.run(list(segment.outputs), {name: values[name] for name in segment.inputs})
        values.update(zip(segment.outputs, made, strict=True))
    return {spec.name: values[spec.name] for spec in manifest.contract.outputs}


def run_source(path: Path, inputs: dict[str, Array]) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_close(expected: dict[str, Array], found: dict[str, Array], limit: float) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        if array.dtype.kind == "f":
            assert relative(array, found[name]) <= limit, name
        else:
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("scheme", LIMITS)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.usefixtures("unobserved")
def test_the_results_stay(tmp_path: Path, kind: str, scheme: str) -> None:
    form = FORMS[kind]
    proto = form.build()
    path, out, warnings = save(tmp_path, proto), tmp_path / "m.tfb", Warnings()
    options = Options(scheme, tuple(map(parse_shape, form.shapes)), random=True)
    manifest = compile_model(path, BOARD, out, options, warnings)
    verify_files(out, manifest)
    for seed in (100, 101):
        inputs = samples_of(proto, seed)
        assert set(inputs) == {spec.name for spec in manifest.contract.inputs}
        expected = form.reference(inputs) if form.reference else run_source(path, inputs)
        assert_close(expected, run_bundle(out, manifest, inputs), LIMITS[scheme])

    report = manifest.quantization
    if scheme != "fp32":
        assert form.quantized <= set(report.quantized)
    assert all(left.reason for left in report.left)
    reported = collections.Counter(report.quantized)
    for left in report.left:
        reported[left.op] += left.count
    present = collections.Counter(n.op_type for n in nodes_of(prepared(path, *form.shapes)))
    assert {op: reported[op] for op in COUNTED} == {op: present[op] for op in COUNTED}

    said = [text for text in warnings.texts if "--calib" not in text]
    assert bool(said) == bool(form.warns or form.reference)
    assert re.search(form.warns, " ".join(said))
    assert set(said) <= set(json.loads((out / "report.json").read_text())["warnings"])


def test_the_form_of_the_data_does_not_show_in_the_bundle(tmp_path: Path) -> None:
    weight = normal(40, 40)
    typed = helper.make_tensor("w", onnx.TensorProto.FLOAT, [40, 40], weight.reshape(-1).tolist())
    (tmp_path / "w.bin").write_bytes(b"\0" * 64 + weight.tobytes())
    beside = external("w", [40, 40], location="w.bin", offset=64, length=6400)
    bundles = []
    for index, tensor in enumerate((init("w", weight), typed, beside)):
        multiply = node("MatMul", ["x", "w"], ["y"])
        path = save(tmp_path, model([multiply], [value("x", [2, 40])], [value("y", [2, 40])], [tensor]))
        out = tmp_path / f"{index}.tfb"
        compile_model(path, BOARD, out, Options("int8-weights"))
        bundles.append({p.name: p.read_bytes() for p in (out / "segments").iterdir()})
    assert bundles[0] == bundles[1] == bundles[2]


@pytest.mark.usefixtures("unobserved")
def test_two_weights_in_one_file(tmp_path: Path) -> None:
    """Each at an offset of whole pages; compiled by a relative path from the folder above."""
    w, v = normal(40, 40) / 6, normal(40, 40, seed=1) / 6
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(b"\1" * 4096 + w.tobytes() + b"\1" * (8192 - 6400) + v.tobytes())
    weights = [
        external("w", [40, 40], location="w.bin", offset=4096, length=6400),
        external("v", [40, 40], location="w.bin", offset=12288, length=6400),
    ]
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "v"], ["y"])]
    path = save(folder, model(nodes, [value("x", [2, 40])], [value("y", None)], weights))
    x = normal(2, 40, seed=9)
    for scheme, limit in LIMITS.items():
        out = tmp_path / f"{scheme}.tfb"
        manifest = compile_model(path, BOARD, out, Options(scheme, random=True))
        assert_close({"y": x @ w @ v}, run_bundle(out, manifest, {"x": x}), limit)
        assert not (out / "segments/w.bin").exists()


@pytest.mark.usefixtures("unobserved")
def test_weights_of_a_function_stand_beside_the_model_wherever_the_compiler_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = normal(40, 40) / 6
    folder = tmp_path / "model"
    body = [
        node("Constant", [], ["w"], value=external("w", [40, 40], location="w.bin")),
        node("MatMul", ["a", "w"], ["b"]),
    ]
    function = helper.make_function("local", "Layer", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    nodes = [node("Layer", ["x"], ["y"], domain="local")]
    save(
        folder, model(nodes, [value("x", [2, 40])], [value("y", None)], functions=[function], domains=["local"])
    )  # fmt: skip
    (folder / "w.bin").write_bytes(weight.tobytes())
    (tmp_path / "w.bin").write_bytes(np.zeros_like(weight).tobytes())
    monkeypatch.chdir(tmp_path)
    manifest = compile_model(Path("model/model.onnx"), BOARD, tmp_path / "m.tfb", Options())
    x = normal(2, 40, seed=9)
    assert_close({"y": x @ weight}, run_bundle(tmp_path / "m.tfb", manifest, {"x": x}), 1e-5)


@pytest.mark.usefixtures("unobserved")
def test_what_nobody_reads_is_not_written(tmp_path: Path) -> None:
    path = save(tmp_path, FORMS["dead ends"].build())
    compile_model(path, BOARD, tmp_path / "m.tfb", Options())
    segment = onnx.load(str(tmp_path / "m.tfb/segments/00.onnx"), load_external_data=False)
    assert [n.op_type for n in segment.graph.node] == ["MatMul"]
    assert [tensor.name for tensor in segment.graph.initializer] == ["w"]
    assert (tmp_path / "m.tfb/segments/weights.bin").stat().st_size == 6400


@pytest.mark.usefixtures("unobserved")
def test_a_weight_that_segments_share_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "BASE_BYTES", 0)
    nodes = [node("MatMul", ["x" if i == 0 else f"h{i - 1}", "wv"[i % 2]], [f"h{i}"]) for i in range(4)]
    path = save(
        tmp_path, model(nodes, [value("x", [2, 40])], [value("h3", None)], [square("w"), square("v", 1)])
    )  # fmt: skip
    # Room for one weight of 6400 bytes, not for two.
    manifest = compile_model(path, BOARD, tmp_path / "m.tfb", Options(host_memory=2 * 8000))
    assert len(manifest.segments) == 4
    for segment in manifest.segments:
        held = load_model(tmp_path / "m.tfb" / segment.file).graph.initializers.values()
        assert sum(w.const_value.nbytes for w in held if w.const_value is not None) <= 8000
    assert manifest.quantization.weight_bytes == 2 * 6400
    assert (tmp_path / "m.tfb/segments/weights.bin").stat().st_size == 8192 + 6400
    inputs = {"x": normal(2, 40, seed=5)}
    assert_close(run_source(path, inputs), run_bundle(tmp_path / "m.tfb", manifest, inputs), 1e-5)


@pytest.mark.usefixtures("unobserved")
def test_weights_never_stand_in_the_graph_file(tmp_path: Path) -> None:
    names = [f"w{index}" for index in range(12)]
    nodes = [node("MatMul", ["x" if i == 0 else f"h{i - 1}", name], [f"h{i}"]) for i, name in enumerate(names)]
    weights = [init(name, normal(256, 256, seed=i) / 16) for i, name in enumerate(names)]
    path = save(tmp_path, model(nodes, [value("x", [2, 256])], [value("h11", None)], weights))
    assert path.stat().st_size > 3 * MIB
    for scheme in LIMITS:
        compile_model(path, BOARD, tmp_path / f"{scheme}.tfb", Options(scheme, random=True))
        assert (tmp_path / f"{scheme}.tfb/segments/00.onnx").stat().st_size < 16 << 10


@pytest.mark.slow
@pytest.mark.usefixtures("unobserved")
def test_more_than_two_gigabytes_in_one_tensor(tmp_path: Path) -> None:
    rows = 550_000
    with (tmp_path / "table.bin").open("wb") as file:
        file.truncate(rows * 1024 * 4)
    gather = node("Gather", ["table", "i"], ["y"])
    inputs, weights = [value("i", [2], onnx.TensorProto.INT64)], [external("table", [rows, 1024], location="table.bin")]
    path = save(tmp_path, model([gather], inputs, [value("y", [2, 1024])], weights))
    manifest = compile_model(path, BOARD, tmp_path / "m.tfb", Options("int4"))
    assert manifest.quantization.source_weight_bytes > 1 << 31
    (found,) = run_bundle(tmp_path / "m.tfb", manifest, {"i": np.array([0, rows - 1])}).values()
    np.testing.assert_array_equal(found, np.zeros((2, 1024), np.float32))


@pytest.mark.slow
@pytest.mark.usefixtures("unobserved")
def test_a_chain_of_20_000(tmp_path: Path) -> None:
    path = save(tmp_path, unary(20_000))
    manifest = compile_model(path, BOARD, tmp_path / "m.tfb", Options())
    x = normal(4, seed=3)
    (found,) = run_bundle(tmp_path / "m.tfb", manifest, {"t0": x}).values()
    np.testing.assert_array_equal(found, np.abs(x))
