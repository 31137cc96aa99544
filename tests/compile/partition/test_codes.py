"""Codes at cuts: they cross in the place of floats, and mean what onnxruntime makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from bench.bundle_runner import BundleRunner
from compile.forms import NORMALIZE
from compile.graph import ir
from compile.options import Options
from compile.partition.codes import Codes
from compile.partition.graph import extract, order_of, positions, segments, static_sizes
from compile.partition.tables import legal_ends
from compile.passes.base import run_passes
from compile.passes.quantizers import QuantizeAtOnce
from compile.pipeline import compile_model
from targets.board import load_board
from tests.compile.partition.test_graph import cached, run, tied, unet
from tests.support.agents import serving
from tests.support.models import Array, init, model, node, normal, relative, save, value

BOARD = load_board("x86-64-dev")


@pytest.mark.parametrize("build", [unet, cached, tied], ids=lambda build: build.__name__)
@pytest.mark.usefixtures("unobserved")
def test_a_cut_model_is_verified_through_its_codes(tmp_path: Path, build: object) -> None:
    path = save(tmp_path, build())  # type: ignore[operator]
    whole = compile_model(path, BOARD, tmp_path / "1.tfb", Options("int8-static", random=True))
    cut = compile_model(path, BOARD, tmp_path / "4.tfb", Options("int8-static", random=True, segments=4))
    crossing = {name for segment in cut.segments for name in segment.outputs}
    assert any(name.endswith(".codes") for name in crossing)
    for one, four in zip(whole.verification.outputs, cut.verification.outputs, strict=True):
        assert four.relative_l2 == pytest.approx(one.relative_l2, rel=1e-2)
    assert len(cut.verification.segments) == 4
    assert all(error.isolated < 0.1 for error in cut.verification.segments)


def quantized() -> onnx.ModelProto:
    """A source with codes of its own: quantized late, restored early for two readers far from each other."""
    nodes = [
        node("MatMul", ["x", "w0"], ["a"]),
        node("MatMul", ["x", "w1"], ["b"]),
        node("QuantizeLinear", ["a", "scale", "zero"], ["a.codes"]),
        node("DequantizeLinear", ["a.codes", "scale", "zero"], ["a.floats"]),
        node("MatMul", ["a.floats", "w2"], ["c"]),
        node("Add", ["c", "b"], ["d"]),
        node("MatMul", ["d", "w3"], ["e"]),
        node("Mul", ["e", "a.floats"], ["y"]),
    ]
    weights = [init(f"w{at}", normal(32, 32, seed=at) / 6) for at in range(4)]
    weights += [init("scale", np.float32(0.02)), init("zero", np.uint8(128))]
    return model(nodes, [value("x", [2, 32])], [value("y", [2, 32])], weights)


def test_quantizing_stays_with_what_is_quantized_and_restoring_goes_with_the_readers() -> None:
    proto = quantized()
    whole = ir.from_proto(proto)
    run_passes(whole, (*NORMALIZE, QuantizeAtOnce()))
    names = [each.outputs[0].name for each in whole.graph]
    assert names.index("a.codes") == names.index("a") + 1
    order = order_of(whole, static_sizes(whole), {}, [0] * len(names))
    legal = legal_ends(order.positions)
    assert names.index("a") + 1 not in legal
    assert names.index("a.floats") + 1 not in legal
    parts = segments(whole, legal)
    assert len(parts) > 4
    assert not any({"a", "a.floats"} & {*part.inputs, *part.outputs} for part in parts)
    values: dict[str, Array] = {"x": normal(2, 32, seed=9)}
    expected = run(proto, values)["y"]
    for part in parts:
        values |= run(ir.to_proto(extract(whole, part)), {name: values[name] for name in part.inputs})
    np.testing.assert_array_equal(values["y"], expected)


def test_restored_values_that_a_person_wants_are_made_where_they_are() -> None:
    whole = ir.from_proto(quantized())
    run_passes(whole, NORMALIZE)
    at = next(at for at, each in enumerate(whole.graph) if each.outputs[0].name == "a.floats") + 1
    assert positions(whole, static_sizes(whole), ["a.floats"])[at - 1].crossing is not None
    first, second = segments(whole, [at, len(whole.graph)], ["a.floats"])
    assert "a.floats" in first.outputs
    assert "a.floats" in second.inputs


@pytest.mark.parametrize(("dtype", "zero"), [(np.uint8, 117), (np.int8, -3)])
def test_codes_mean_what_the_runtime_makes_of_them(dtype: type, zero: int) -> None:
    scale = np.float32(0.037)
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["c"]), node("DequantizeLinear", ["c", "s", "z"], ["y"])]
    element = onnx.TensorProto.UINT8 if dtype is np.uint8 else onnx.TensorProto.INT8
    proto = model(
        nodes, [value("x", [4096])], [value("c", [4096], element), value("y", [4096])],
        [init("s", scale), init("z", dtype(zero))],
    )  # fmt: skip
    x = np.concatenate([normal(2048) * 4, (np.arange(2048, dtype=np.float32) - 1024) * scale / 2])
    codes, floats = onnxruntime.InferenceSession(proto.SerializeToString()).run(["c", "y"], {"x": x})
    mine = Codes("x", scale, zero, np.dtype(dtype))
    np.testing.assert_array_equal(mine.quantize(x), codes)
    np.testing.assert_array_equal(mine.restore(codes), floats)


def test_the_agent_passes_codes_on(tmp_path: Path) -> None:
    """Observed, planned and served as any other bundle."""
    out = tmp_path / "cut.tfb"
    options = Options("int8-static", random=True, segments=3, name="cut")
    manifest = compile_model(save(tmp_path, unet()), BOARD, out, options)
    assert any(name.endswith(".codes") for segment in manifest.segments for name in segment.outputs)
    x = normal(1, 3, 32, 32, seed=5)
    expected = BundleRunner(out, 1).run({"x": x})[manifest.contract.outputs[0].name]
    with serving(out, tmp_path / "log") as agent:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": x.ravel().tolist()}
        status, body, _ = agent.post({"inputs": [tensor]})
    assert status == 200, body
    (output,) = json.loads(body)["outputs"]
    assert relative(expected, np.array(output["data"], np.float32).reshape(expected.shape)) < 1e-5
