"""Numbers that broke other quantizers: denormal weights, silent channels, masks, stale ranges.

Each row is a form reported against a quantizer, as the smallest model that shows it. Under every scheme the answers
stay close and finite, or a named error says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

from compile.calibrate.collectors import METHODS, Collector, Range, Unfit, collect_range
from compile.calibrate.samples import iterate
from compile.errors import DataError, ModelError
from compile.graph import load_model
from compile.options import Options
from compile.pipeline import compile_model
from compile.quantize.source import check_scales
from targets.board import load_board
from targets.bundle import read_manifest
from targets.tensor import Contract, DType, TensorSpec
from tests.support.models import (
    SCHEME_NAMES,
    Array,
    emit,
    init,
    model,
    node,
    normal,
    ranges,
    relative,
    run,
    save,
    value,
)
from tests.support.models import prepared as prepare_graph

BOARD = "x86-64-dev"
LIMITS = {"fp32": 1e-5, "int8-static": 0.05, "int8-dynamic": 0.05, "int8-weights": 0.05, "int4": 0.3}


def conv(kernel: Array, bias: Array | None = None, opset: int = 17, **attributes: Any) -> onnx.ModelProto:
    channels = kernel.shape[1] * attributes.get("group", 1)
    names = ["x", "w", *(["b"] if bias is not None else [])]
    weights = [init("w", kernel), *([init("b", bias)] if bias is not None else [])]
    layer = node("Conv", names, ["y"], **attributes)
    return model([layer], [value("x", [1, channels, 6, 6])], [value("y", None)], weights, opset=opset)


def transposed(kernel: Array, group: int, bias: bool) -> onnx.ModelProto:
    names = ["x", "w", *(["b"] if bias else [])]
    weights = [init("w", kernel), *([init("b", normal(kernel.shape[1] * group))] if bias else [])]
    layer = node("ConvTranspose", names, ["y"], strides=[2, 2], group=group)
    return model([layer], [value("x", [1, kernel.shape[0], 4, 4])], [value("y", None)], weights)


def spread() -> Array:
    kernel = normal(4, 1, 3, 3)
    kernel[0] *= 1000
    kernel[3] *= 1e-4
    return kernel


def silent(channels: slice) -> Array:
    kernel = normal(4, 2, 2, 2)
    kernel[channels] = 0
    return kernel


def masked() -> onnx.ModelProto:
    mask = np.array([[0, -np.inf, 0, -3.4e38]], np.float32)
    nodes = [node("Add", ["x", "mask"], ["a"]), node("Softmax", ["a"], ["y"], axis=-1)]
    return model(nodes, [value("x", [1, 4])], [value("y", None)], [init("mask", mask)])


def scaled(factors: Array) -> onnx.ModelProto:
    nodes = [node("Mul", ["x", "s"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    return model(nodes, [value("x", [2, 64])], [value("y", None)], [init("s", factors), init("w", normal(64, 32))])


def outlier() -> Array:
    factors = np.ones(64, np.float32)
    factors[3] = 1e5
    return factors


def decomposed_normalization() -> onnx.ModelProto:
    nodes = [
        node("ReduceMean", ["x"], ["mu"], axes=[-1]), node("Sub", ["x", "mu"], ["d"]), node("Pow", ["d", "two"], ["q"]),
        node("ReduceMean", ["q"], ["var"], axes=[-1]), node("Add", ["var", "eps"], ["v"]), node("Sqrt", ["v"], ["s"]),
        node("Div", ["d", "s"], ["n"]), node("MatMul", ["n", "w"], ["y"]),
    ]  # fmt: skip
    weights = [init("two", np.float32(2)), init("eps", np.float32(1e-12)), init("w", normal(64, 32))]
    return model(nodes, [value("x", [2, 64])], [value("y", None)], weights)


def giant_constant() -> onnx.ModelProto:
    nodes = [node("Mul", ["x", "k"], ["y"])]
    return model(nodes, [value("x", [1, 4])], [value("y", None)], [init("k", np.float32(-999999995904.0))])


def resize() -> onnx.ModelProto:
    layer = node("Resize", ["x", "", "s"], ["y"], mode="nearest")
    scales = init("s", np.array([1, 1, 2, 2], np.float32))
    return model([layer], [value("x", [1, 1, 4, 4])], [value("y", None)], [scales])


def recurrent(op: str, gates: int, empty: int) -> onnx.ModelProto:
    weights = [init("W", normal(1, gates * 16, 40)), init("R", normal(1, gates * 16, 16))]
    layer = node(op, ["x", "W", "R", *[""] * empty], ["", "y"], hidden_size=16)
    return model([layer], [value("x", [3, 1, 40])], [value("y", None)], weights)


def gemm() -> onnx.ModelProto:
    layer = node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    return model([layer], [value("x", [1, 64])], [value("y", None)], [init("w", normal(48, 64)), init("b", normal(48))])


def half_weights() -> onnx.ModelProto:
    nodes = [node("Cast", ["x"], ["h"], to=10), node("MatMul", ["h", "w"], ["m"]), node("Cast", ["m"], ["y"], to=1)]
    return model(nodes, [value("x", [2, 40])], [value("y", None)], [init("w", normal(40, 40).astype(np.float16) * 100)])


def input_bias() -> onnx.ModelProto:
    inputs = [value("x", [1, 16, 4, 4]), value("b", [16])]
    layer = node("Conv", ["x", "w", "b"], ["y"])
    return model([layer], inputs, [value("y", None)], [init("w", normal(16, 16, 2, 2))])


def input_kernel() -> onnx.ModelProto:
    inputs = [value("x", [1, 16, 4, 4]), value("w", [16, 16, 2, 2])]
    return model([node("Conv", ["x", "w"], ["y"])], inputs, [value("y", None)])


Build = Callable[[], onnx.ModelProto]
# id: (builder, operators quantized under int8-static, words of the reasons for those that are not)
CASES: dict[str, tuple[Build, dict[str, int], str]] = {
    "B01 ConvTranspose": (lambda: transposed(normal(16, 8, 3, 3), 1, True), {"ConvTranspose": 1}, ""),
    "B02 grouped ConvTranspose": (lambda: transposed(normal(16, 8, 3, 3), 2, False), {"ConvTranspose": 1}, ""),
    "B03 depthwise channels far apart": (lambda: conv(spread(), normal(4), group=4), {"Conv": 1}, ""),
    "B04 a bias that leaves int32": (
        lambda: conv(normal(2, 2, 2, 2) * np.float32(1e-7), np.array([5, -4.5], np.float32)), {"Conv": 1}, ""),
    "B05 a weight of zeros": (lambda: conv(silent(slice(None)), np.array([1, 2, 3, 4], np.float32)), {"Conv": 1}, ""),
    "B06 a channel of zeros": (lambda: conv(silent(slice(1, 2)), np.array([1, 2, 3, 4], np.float32)), {"Conv": 1}, ""),
    "B08 a mask of infinities": (masked, {}, ""),
    "B09 an activation that is always zero": (lambda: scaled(np.float32(0)), {}, "constant in calibration"),
    "B10 an activation of outliers": (lambda: scaled(outlier()), {}, "so large that 8 bits hold no others"),
    "B11 a decomposed normalization": (decomposed_normalization, {"MatMul": 1}, ""),
    "B12 a giant constant": (giant_constant, {}, ""),
    "B13 scales of Resize": (resize, {}, ""),
    "B17 LSTM": (lambda: recurrent("LSTM", 4, 3), {}, "no INT8 kernel"),
    "B18 GRU": (lambda: recurrent("GRU", 3, 0), {}, "no INT8 kernel"),
    "B20 Gemm": (gemm, {"Gemm": 1}, ""),
    "B21 per channel before opset 13": (lambda: conv(normal(3, 2, 2, 2), opset=10), {"Conv": 1}, ""),
    "B22 weights of 16 bits": (half_weights, {"MatMul": 1}, ""),
    "B24 a bias that is an input": (input_bias, {}, "the bias is computed"),
    "B25 a kernel that is an input": (input_kernel, {}, "the kernel is computed"),
    "B29 a bias of one channel": (lambda: conv(normal(1, 4, 3, 3), np.array([0.5], np.float32)), {"Conv": 1}, ""),
}  # fmt: skip


def sample_of(proto: onnx.ModelProto) -> dict[str, Array]:
    factor = 900 if any(n.op_type == "Pow" for n in proto.graph.node) else 1
    return {
        entry.name: normal(*(d.dim_value for d in entry.type.tensor_type.shape.dim), seed=seed + 10)
        * np.float32(factor)
        for seed, entry in enumerate(proto.graph.input)
    }


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("case", CASES)
def test_the_answers_stay(tmp_path: Path, case: str, scheme: str) -> None:
    build, quantized, reason = CASES[case]
    proto = build()
    path, sample = save(tmp_path, proto), sample_of(proto)
    segment, report = emit(path, scheme, tmp_path, samples=[sample])
    expected, found = run(path, sample), run(segment, sample)
    for name, array in expected.items():
        assert np.isfinite(found[name]).all()
        assert np.linalg.norm(array - found[name]) <= LIMITS[scheme] * max(float(np.linalg.norm(array)), 1e-6)
    if scheme == "int8-static":
        assert report.quantized == quantized
        assert any(reason in left.reason for left in report.left) == bool(reason or report.left)
    for tensor in onnx.load(str(segment)).graph.initializer:
        if tensor.name.endswith("scale"):
            assert (np.abs(onnx.numpy_helper.to_array(tensor)) >= np.finfo(np.float32).tiny).all()


@pytest.mark.parametrize("case", ["B03 depthwise channels far apart", "B06 a channel of zeros"])
def test_every_channel_keeps_its_own_precision(tmp_path: Path, case: str) -> None:
    """The largest channel hides the errors of all others in a norm. One scale for the results cannot do better than
    half a step of the largest, but weights must not lose more."""
    path = save(tmp_path, CASES[case][0]())
    sample = sample_of(onnx.load(str(path)))
    segment, _ = emit(path, "int8-weights", tmp_path)
    expected, found = run(path, sample)["y"][0], run(segment, sample)["y"][0]
    for channel, other in zip(expected, found, strict=True):
        assert relative(channel, other) < 0.03


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_b07_nan_in_a_weight_is_named(tmp_path: Path, scheme: str) -> None:
    weight = normal(64, 32)
    weight[0, 0] = np.nan
    product = node("MatMul", ["x", "w"], ["y"])
    path = save(tmp_path, model([product], [value("x", [1, 64])], [value("y", None)], [init("w", weight)]))
    with pytest.raises(ModelError, match="'w' holds 1 NaN"):
        emit(path, scheme, tmp_path)


@pytest.mark.parametrize("scale", [np.nan, 0.0, -1.0, np.inf, 1e-42])
@pytest.mark.parametrize("as_constant", [False, True])
def test_b16_scales_of_a_quantized_source_must_be_scales(tmp_path: Path, scale: float, as_constant: bool) -> None:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    tensor = init("s", np.float32(scale))
    if as_constant:
        nodes.insert(0, node("Constant", [], ["s"], value=tensor))
    weights = [init("z", np.int8(0)), *([] if as_constant else [tensor])]
    path = save(tmp_path, model(nodes, [value("x", [1, 8])], [value("y", None)], weights))
    with pytest.raises(ModelError, match=r"QuantizeLinear node .*1 of 1 scales in 's'"):
        check_scales(load_model(path))


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_codes_of_a_quantized_source_are_kept(tmp_path: Path, scheme: str) -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (16, 8, 3, 3)).astype(np.int8)
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zx"], ["q"]), node("DequantizeLinear", ["q", "sx", "zx"], ["d"]),
        node("DequantizeLinear", ["w", "sw"], ["f"], axis=0), node("Conv", ["d", "f"], ["y"]),
    ]  # fmt: skip
    weights = [
        init("w", codes), init("sw", np.full(16, 0.01, np.float32)), init("sx", np.float32(0.03)),
        init("zx", np.uint8(128)),
    ]  # fmt: skip
    path = save(tmp_path, model(nodes, [value("x", [1, 8, 6, 6])], [value("y", None)], weights))
    sample = {"x": normal(1, 8, 6, 6)}
    segment, _ = emit(path, scheme, tmp_path, samples=[sample])
    np.testing.assert_allclose(run(segment, sample)["y"], run(path, sample)["y"], rtol=1e-5)
    assert any(
        np.array_equal(onnx.numpy_helper.to_array(tensor, str(segment.parent)), codes)
        for tensor in onnx.load(str(segment)).graph.initializer
        if tensor.data_type == T.INT8 and list(tensor.dims) == [16, 8, 3, 3]
    )


@pytest.mark.parametrize("method", METHODS)
def test_b27_ragged_batches_give_the_ranges_of_single_rows(tmp_path: Path, method: str) -> None:
    layer = node("MatMul", ["x", "w"], ["a"])
    nodes = [layer, node("Relu", ["a"], ["b"]), node("MatMul", ["b", "v"], ["y"])]
    weights = [init("w", normal(40, 40)), init("v", normal(40, 40, seed=1))]
    path = save(tmp_path, model(nodes, [value("x", ["n", 40])], [value("y", ["n", 40])], weights))
    graph = prepare_graph(path, "x=1..4,40")
    rows = normal(11, 40, seed=2)
    names = ["x", "b", "y"]
    choose = functools.partial(collect_range, method=METHODS[method])
    ragged = ranges(graph, names, path, ["x=1..4,40"], [{"x": rows[:4]}, {"x": rows[4:8]}, {"x": rows[8:]}], choose)
    single = ranges(graph, names, path, ["x=1..4,40"], [{"x": row[None]} for row in rows], choose)
    assert ragged.keys() == single.keys() == set(names)
    for name, found in ragged.items():
        other = single[name]
        assert isinstance(found, Range)
        assert isinstance(other, Range)
        np.testing.assert_allclose([found.low, found.high], [other.low, other.high], rtol=1e-5)


def test_a26_empty_tensors_are_no_ranges() -> None:
    collector = Collector()
    collector.add(np.zeros((0, 4), np.float32))
    assert isinstance(collect_range(collector, METHODS["minmax"]), Unfit)


X = Contract((TensorSpec("x", DType.FLOAT32, (2, 8), 64),), (), {})
BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"x": np.full((2, 8), np.nan, np.float32)}, "'x' holds NaN"),
    "another name": ({"X": normal(2, 8)}, "'X'.*x"),
    "another shape": ({"x": normal(1, 7)}, "'x' has size"),
    "another type": ({"x": np.zeros((2, 8), np.int64)}, "'x' is int64"),
    "nothing": ({}, "'x' is missing"),
}


@pytest.mark.parametrize("bad", BAD_FILES)
def test_b28_samples_that_do_not_fit_are_named(tmp_path: Path, bad: str) -> None:
    arrays, words = BAD_FILES[bad]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=rf"(?s)bad\.npz.*{words}"):
        list(iterate(tmp_path / "bad.npz", X))


def test_b28_float64_is_cast_with_a_warning(tmp_path: Path) -> None:
    for index in range(3):
        np.savez(tmp_path / f"{index}.npz", x=normal(2, 8).astype(np.float64))
    told: list[str] = []
    samples = list(iterate(tmp_path, X, told.append))
    assert [sample["x"].dtype for sample in samples] == [np.float32] * 3
    assert len(told) == 1
    assert "0.npz: 'x' is float64" in told[0]


@pytest.mark.usefixtures("unobserved")
def test_b30_other_weights_or_samples_are_calibrated_anew(tmp_path: Path) -> None:
    """Under the same names, beside what an earlier compilation left."""
    samples = tmp_path / "samples.npz"

    def compiled(factor: float, data: float) -> dict[str, str]:
        np.savez(samples, x=normal(4, 2, 64) * np.float32(data))
        nodes = [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["b"]), node("MatMul", ["b", "v"], ["y"])]
        weights = [init("w", normal(64, 64) * np.float32(factor)), init("v", normal(64, 64, seed=1))]
        path = save(tmp_path, model(nodes, [value("x", [2, 64])], [value("y", None)], weights))
        out = tmp_path / "out.tfb"
        compile_model(path, load_board(BOARD), out, Options("int8-static", calib=samples, overwrite=True))
        graph = onnx.load(str(out / "segments" / "00.onnx"), load_external_data=False).graph
        scale = next(onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name == "b.scale")
        return {"hash": read_manifest(out).options["calibrated_on"], "scale": f"{float(scale):.3g}"}

    first, heavier, louder = compiled(1, 1), compiled(10, 1), compiled(1, 10)
    assert first["hash"] == heavier["hash"] != louder["hash"]
    assert float(heavier["scale"]) == pytest.approx(10 * float(first["scale"]), rel=0.01)
    assert float(louder["scale"]) == pytest.approx(10 * float(first["scale"]), rel=0.01)
    assert compiled(1, 1) == first
