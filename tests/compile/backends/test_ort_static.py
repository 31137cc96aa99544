"""Static INT8: what onnxruntime makes of the graph, and that its answers stay close."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from compile.backends.base import Lowered
from tests.support.models import Array, emit, init, model, node, normal, relative, run, save, value

SCHEME = "int8-static"


def optimized(segment: Path, inputs: dict[str, Array]) -> tuple[dict[str, int], dict[str, Array]]:
    """Operators after onnxruntime's optimizer, and what they answer."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(segment.with_suffix(".optimized"))
    onnxruntime.InferenceSession(str(segment), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    return collections.Counter(n.op_type for n in nodes), run(segment, inputs, optimized=True)


def check(
    folder: Path, proto: onnx.ModelProto, inputs: dict[str, Array], limit: float = 0.03
) -> tuple[dict[str, int], Lowered]:
    """Calibrate on the inputs, lower, write, run with and without the optimizer, and compare."""
    path = save(folder, proto)
    segment, report = emit(path, SCHEME, folder, samples=[inputs])
    expected, plain = run(path, inputs), run(segment, inputs)
    operators, fused = optimized(segment, inputs)
    assert list(plain) == list(expected)
    for name, reference in expected.items():
        assert reference.dtype == plain[name].dtype == fused[name].dtype
        assert relative(reference, plain[name]) < limit, name
        assert relative(reference, fused[name]) < limit, name
    return operators, report


def mobile_block() -> onnx.ModelProto:
    """What mobile nets are made of: normalization, clipping, a depthwise filter, a gate, a residual."""
    nodes = [
        node("Conv", ["x", "w0"], ["a0"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["a0", "gain", "offset", "mean", "variance"], ["a1"]),
        node("Relu", ["a1"], ["a2"]),
        node("Conv", ["a2", "w1"], ["a3"], group=16, pads=[1, 1, 1, 1]),
        node("Add", ["a3", "shift"], ["a4"]),
        node("Clip", ["a4", "zero", "six"], ["a5"]),
        node("GlobalAveragePool", ["a5"], ["g0"]),
        node("Conv", ["g0", "w2", "b2"], ["g1"]),
        node("HardSigmoid", ["g1"], ["g2"], alpha=1 / 6),
        node("Mul", ["a5", "g2"], ["a6"]),
        node("Conv", ["a6", "w3", "b2"], ["a7"]),
        node("Add", ["a7", "a2"], ["a8"]),
        node("Conv", ["a8", "w3"], ["y"]),
    ]
    weights = [
        init("w0", normal(16, 8, 3, 3) / 8), init("gain", np.abs(normal(16)) + 0.5), init("offset", normal(16, seed=2)),
        init("mean", normal(16, seed=3)), init("variance", np.abs(normal(16, seed=4)) + 0.5),
        init("w1", normal(16, 1, 3, 3, seed=5) / 3), init("shift", normal(1, 16, 1, 1, seed=6)),
        init("zero", np.float32(0)), init("six", np.float32(6)), init("w2", normal(16, 16, 1, 1, seed=7) / 4),
        init("b2", normal(16, seed=8)), init("w3", normal(16, 16, 1, 1, seed=9) / 4),
    ]  # fmt: skip
    return model(nodes, [value("x", [1, 8, 20, 20])], [value("y", None)], weights)


def test_a_mobile_block_stays_on_codes_from_end_to_end(tmp_path: Path) -> None:
    operators, report = check(tmp_path, mobile_block(), {"x": normal(1, 8, 20, 20, seed=11)})
    assert report.quantized == {"Conv": 5}
    assert report.left == ()
    assert operators["QLinearConv"] == 5
    assert operators["QuantizeLinear"] == operators["DequantizeLinear"] == 1
    assert not operators.keys() & {"Conv", "BatchNormalization", "Relu", "Clip", "HardSigmoid", "Add", "Mul"}


CONVOLUTIONS = {
    "1d": ([1, 16, 20], [32, 16, 3], {}),
    "2d": ([2, 16, 9, 9], [32, 16, 3, 3], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "3d": ([1, 8, 5, 5, 5], [16, 8, 2, 2, 2], {}),
    "grouped": ([1, 32, 9, 9], [32, 8, 3, 3], {"group": 4}),
    "depthwise": ([1, 128, 9, 9], [128, 1, 3, 3], {"group": 128}),
    "same": ([1, 16, 9, 9], [32, 16, 3, 3], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
}


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(tmp_path: Path, kind: str, bias: bool, opset: int) -> None:
    x, w, attributes = CONVOLUTIONS[kind]
    conv = node("Conv", ["x", "w", *(["b"] if bias else [])], ["y"], **attributes)
    weights = [init("w", normal(*w)), *([init("b", normal(w[0]))] if bias else [])]
    proto = model([conv], [value("x", x)], [value("y", None)], weights, opset=opset)
    operators, report = check(tmp_path, proto, {"x": normal(*x, seed=1)})
    assert report.quantized == {"Conv": 1}
    assert operators["QLinearConv"] == 1


@pytest.mark.parametrize("group", [1, 2])
def test_transposed_convolutions_keep_int8_weights(tmp_path: Path, group: int) -> None:
    conv = node("ConvTranspose", ["x", "w"], ["y"], group=group, strides=[2, 2])
    proto = model([conv], [value("x", [1, 16, 5, 5])], [value("y", None)], [init("w", normal(16, 8, 3, 3))])
    _, report = check(tmp_path, proto, {"x": normal(1, 16, 5, 5, seed=1)})
    assert report.quantized == {"ConvTranspose": 1}
    assert (tmp_path / SCHEME / "weights.bin").stat().st_size < 16 * 8 * 9 + 4096


@pytest.mark.parametrize("attributes", [{}, {"alpha": 0.5}, {"alpha": -2.0, "beta": 3.0}, {"beta": 0.0}, {"transA": 1}])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("bias", [None, (48,), (1, 48), (3, 48), (3, 1), ()])
def test_gemm_in_every_form(
    tmp_path: Path, bias: tuple[int, ...] | None, trans_b: int, attributes: dict[str, Any]
) -> None:
    weights = [init("w", normal(*((48, 40) if trans_b else (40, 48))))]
    if bias is not None:
        weights.append(init("c", normal(*bias, seed=3) if bias else np.float32(0.5)))
    names = ["x", "w", *(["c"] if bias is not None else [])]
    x = (40, 3) if attributes.get("transA") else (3, 40)
    gemm = node("Gemm", names, ["y"], transB=trans_b, **attributes)
    proto = model([gemm], [value("x", x)], [value("y", [3, 48])], weights)
    operators, report = check(tmp_path, proto, {"x": normal(*x, seed=5)})
    assert report.quantized == {"Gemm": 1}
    assert operators["MatMulIntegerToFloat"] == 1


@pytest.mark.parametrize("bias", [(48,), (1, 48), (1, 1, 48), (2, 48)])
def test_a_bias_behind_matmul_goes_into_the_kernel(tmp_path: Path, bias: tuple[int, ...]) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Add", ["c", "a"], ["y"])]
    weights = [init("w", normal(40, 48)), init("c", normal(*bias))]
    proto = model(nodes, [value("x", [2, 40])], [value("y", None)], weights)
    operators, _ = check(tmp_path, proto, {"x": normal(2, 40, seed=5)})
    assert operators.get("Add", 0) == (0 if bias in {(48,), (1, 48)} else 1)


def between_convolutions(
    nodes: list[onnx.NodeProto], channels: int, weights: list[onnx.TensorProto]
) -> onnx.ModelProto:
    """A convolution makes `a` [1,8,8,8], `nodes` make `b` [1,channels,..] of it, another one reads that."""
    around = [
        node("Conv", ["x", "w0"], ["a"]),
        *nodes,
        node("Conv", ["b", "w1"], ["y"]),
    ]
    more = [init("w0", normal(8, 4, 1, 1)), init("w1", normal(8, channels, 1, 1, seed=1))]
    return model(around, [value("x", [1, 4, 8, 8])], [value("y", None)], [*more, *weights])


FOUR = init("four", np.array([1, 1, 2, 2], np.float32))
PADS = init("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1]))
W2 = init("w2", normal(8, 4, 1, 1, seed=2))
MOVES = {
    "MaxPool": ([node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2], strides=[2, 2])], 8, []),
    "Transpose": ([node("Transpose", ["a"], ["b"], perm=[0, 1, 3, 2])], 8, []),
    "Pad": ([node("Pad", ["a", "pads"], ["p"]), node("Transpose", ["p"], ["b"], perm=[0, 1, 3, 2])], 8, [PADS]),
    "Pad by reflection": ([node("Pad", ["a", "pads"], ["b"], mode="reflect")], 8, [PADS]),
    "Resize": ([node("Resize", ["a", "", "four"], ["b"], mode="nearest")], 8, [FOUR]),
    "Split and Concat": (
        [node("Split", ["a"], ["s", "t"], axis=1, num_outputs=2), node("Concat", ["t", "s"], ["b"], axis=1)], 8, [],
    ),
    "Concat with itself": ([node("Concat", ["a", "a"], ["b"], axis=1)], 16, []),
    "Concat": ([node("Conv", ["x", "w2"], ["c"]), node("Concat", ["a", "c"], ["b"], axis=1)], 16, [W2]),
    "Concat of what is cut off and what is not": (
        [node("Conv", ["x", "w2"], ["c"]), node("Relu", ["c"], ["d"]), node("Concat", ["a", "d"], ["b"], axis=1)],
        16,
        [W2],
    ),
    "LeakyRelu": ([node("LeakyRelu", ["a"], ["b"], alpha=0.1)], 8, []),
    "Sigmoid": ([node("Sigmoid", ["a"], ["b"])], 8, []),
    "AveragePool": ([node("AveragePool", ["a"], ["b"], kernel_shape=[2, 2])], 8, []),
    "Mul by a number": ([node("Mul", ["a", "half"], ["b"])], 8, [init("half", np.float32(-0.5))]),
    "Add of itself": ([node("Add", ["a", "a"], ["b"])], 8, []),
    "Relu twice": ([node("Relu", ["a"], ["r"]), node("Relu", ["r"], ["b"])], 8, []),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_between_convolutions_nothing_is_float(tmp_path: Path, case: str) -> None:
    nodes, channels, weights = MOVES[case]
    proto = between_convolutions(nodes, channels, weights)
    proto.opset_import[0].version = 18
    operators, report = check(tmp_path, proto, {"x": normal(1, 4, 8, 8, seed=3)}, 0.05)
    assert set(report.quantized) == {"Conv"}
    assert operators["QuantizeLinear"] == operators["DequantizeLinear"] == 1


@pytest.mark.parametrize("fill", [-3.4028235e38, -np.inf])
def test_what_pads_in_front_of_max_pooling_goes_into_it(tmp_path: Path, fill: float) -> None:
    nodes = [
        node("Pad", ["a", "pads", "fill"], ["p"]),
        node("MaxPool", ["p"], ["b"], kernel_shape=[3, 3], strides=[2, 2]),
    ]
    proto = between_convolutions(nodes, 8, [PADS, init("fill", np.float32(fill))])
    operators, report = check(tmp_path, proto, {"x": normal(1, 4, 8, 8, seed=3)})
    assert report.left == ()
    assert "Pad" not in operators


def test_what_only_a_float_operator_makes_is_not_quantized_for_an_add(tmp_path: Path) -> None:
    nodes = [node("Tanh", ["a"], ["t"]), node("Add", ["a", "t"], ["b"])]
    operators, _ = check(tmp_path, between_convolutions(nodes, 8, []), {"x": normal(1, 4, 8, 8, seed=3)})
    assert operators["Add"] == 1
    assert operators["QuantizeLinear"] == 2


def test_a_gelu_between_convolutions_is_one_kernel(tmp_path: Path) -> None:
    nodes = [
        node("Div", ["a", "root"], ["d"]), node("Erf", ["d"], ["e"]), node("Add", ["e", "one"], ["f"]),
        node("Mul", ["a", "f"], ["g"]), node("Mul", ["g", "half"], ["b"]),
    ]  # fmt: skip
    numbers = {"root": 2**0.5, "one": 1, "half": 0.5}
    proto = between_convolutions(nodes, 8, [init(name, np.float32(number)) for name, number in numbers.items()])
    operators, _ = check(tmp_path, proto, {"x": normal(1, 4, 8, 8, seed=3)})
    assert operators["Gelu"] == 1
    assert not operators.keys() & {"Erf", "Div"}


def test_an_intermediate_that_is_an_output_stays_float_and_named(tmp_path: Path) -> None:
    proto = between_convolutions([node("Relu", ["a"], ["b"])], 8, [])
    proto.graph.output.extend([value("a", None), value("b", None)])
    _, report = check(tmp_path, proto, {"x": normal(1, 4, 8, 8, seed=3)})
    assert report.quantized == {"Conv": 2}


def test_a_result_that_a_subgraph_reads_is_left_with_the_reason(tmp_path: Path) -> None:
    then = helper.make_graph([node("Neg", ["a"], ["t"])], "then", [], [value("t", None)])
    other = helper.make_graph([node("Abs", ["a"], ["e"])], "else", [], [value("e", None)])
    proto = between_convolutions([node("If", ["c"], ["b"], then_branch=then, else_branch=other)], 8, [])
    proto.graph.input.append(value("c", [], TensorProto.BOOL))
    for flag in (True, False):
        inputs = {"x": normal(1, 4, 8, 8, seed=3), "c": np.array(flag)}
        _, report = check(tmp_path / str(flag), proto, inputs)
        assert report.quantized == {"Conv": 1}
        assert ["subgraph" in left.reason for left in report.left] == [True]


def test_a_matrix_of_two_users_is_stored_once(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    proto = model(nodes, [value("x", [2, 64])], [value("y", [2, 64])], [init("w", normal(64, 64))])
    _, report = check(tmp_path, proto, {"x": normal(2, 64)})
    assert report.quantized == {"MatMul": 2}
    assert (tmp_path / SCHEME / "weights.bin").stat().st_size == 64 * 64


def test_every_operator_with_weights_is_counted_or_has_a_reason(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "tiny"], ["b"]), node("MatMul", ["b", "b2"], ["c"]),
        node("Gather", ["table", "i"], ["e"]), node("MatMul", ["three", "cube"], ["h"]),
        node("LSTM", ["seq", "W", "R"], ["", "l"], hidden_size=16),
    ]  # fmt: skip
    weights = [
        init("w", normal(40, 40)), init("tiny", normal(40, 4)), init("table", normal(50, 33)),
        init("cube", normal(3, 24, 24)), init("W", normal(1, 64, 8)), init("R", normal(1, 64, 16)),
    ]  # fmt: skip
    inputs = [
        value("x", [4, 40]), value("b2", [4, 40]), value("i", [2], TensorProto.INT64), value("three", [3, 2, 24]),
        value("seq", [3, 1, 8]),
    ]  # fmt: skip
    proto = model(nodes, inputs, [value(name, None) for name in "cehl"], weights)
    sample = {
        "x": normal(4, 40), "b2": normal(4, 40, seed=1), "i": np.array([0, 7]), "three": normal(3, 2, 24),
        "seq": normal(3, 1, 8),
    }  # fmt: skip
    _, report = check(tmp_path, proto, sample)
    assert report.quantized == {"MatMul": 1}
    assert {(left.op, left.count, left.reason) for left in report.left} == {
        ("MatMul", 1, "fewer than 1024 weights"),
        ("MatMul", 1, "both sides are computed"),
        ("MatMul", 1, "weight with 3 dimensions"),
        ("Gather", 1, "no INT8 kernel for this operator"),
        ("LSTM", 1, "no INT8 kernel for this operator"),
    }
