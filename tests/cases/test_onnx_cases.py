"""Model forms that broke other tools: compiled with the same results, or refused with a named error.

Each row is a form reported against an ONNX tool; the builders make the smallest model that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from compile.backends.base import Lowered
from compile.graph import load_model, weight_nbytes
from tests.support.models import SCHEME_NAMES, Array, emit, init, model, node, normal, relative, run, save, value

LIMITS = {"fp32": 1e-5, "int8-static": 0.05, "int8-dynamic": 0.05, "int8-weights": 0.05, "int4": 0.3}


def unary(count: int) -> onnx.ModelProto:
    nodes = [node("Abs" if i % 2 else "Neg", [f"t{i}"], [f"t{i + 1}"]) for i in range(count)]
    return model(nodes, [value("t0", [4])], [value(f"t{count}", [4])])


def product(*shape: int, **options: Any) -> onnx.ModelProto:
    multiply = node("MatMul", ["x", "w"], ["y"])
    x = [2, shape[-2]]
    return model([multiply], [value("x", x)], [value("y", None)], [init("w", normal(*shape))], **options)


def initializer_in_inputs(ir_version: int) -> onnx.ModelProto:
    made = product(40, 40, opset=9 if ir_version == 3 else 17, ir_version=ir_version)
    made.graph.input.append(value("w", [40, 40]))
    return made


def constant_node() -> onnx.ModelProto:
    nodes = [node("Constant", [], ["w"], value=init("", normal(40, 40))), node("MatMul", ["x", "w"], ["y"])]
    return model(nodes, [value("x", [2, 40])], [value("y", None)])


def loop_body() -> onnx.ModelProto:
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("MatMul", ["s", "w"], ["t"]), node("Tanh", ["t"], ["out"])],
        "body",
        [value("i", [], T.INT64), value("go", [], T.BOOL), value("s", [1, 40])],
        [value("on", [], T.BOOL), value("out", [1, 40])],
    )
    weights = [init("n", np.int64(3)), init("yes", np.array(True)), init("w", normal(40, 40) / 6)]
    return model(
        [node("Loop", ["n", "yes", "x"], ["y"], body=body)], [value("x", [1, 40])], [value("y", None)], weights
    )


def shared_by_matmul_and_gemm() -> onnx.ModelProto:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Gemm", ["x", "w"], ["b"], transB=1),
        node("Add", ["a", "b"], ["y"]),
    ]
    return model(nodes, [value("x", [2, 40])], [value("y", None)], [init("w", normal(40, 40))])


def output_is_initializer() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    return model(nodes, [value("x", [2, 40])], [value("y", None), value("w", [40, 40])], [init("w", normal(40, 40))])


def hostile_names() -> onnx.ModelProto:
    nodes = [node("MatMul", ["../../x:0", "/w/é space"], ["a/b\\c"], name="n/../:*?"), node("Relu", ["a/b\\c"], ["y"])]
    return model(nodes, [value("../../x:0", [1, 40])], [value("y", None)], [init("/w/é space", normal(40, 40))])


def nested_ifs(depth: int) -> onnx.ModelProto:
    def level(k: int) -> onnx.GraphProto:
        if k == 0:
            return helper.make_graph([node("Relu", ["x"], ["o0"])], "g0", [], [value("o0", [4])])
        other = helper.make_graph([node("Neg", ["x"], [f"e{k}"])], "e", [], [value(f"e{k}", [4])])
        branch = node("If", ["c"], [f"o{k}"], then_branch=level(k - 1), else_branch=other)
        return helper.make_graph([branch], f"g{k}", [], [value(f"o{k}", [4])])

    return model(list(level(depth).node), [value("x", [4]), value("c", [], T.BOOL)], [value(f"o{depth}", [4])])


def generated_weight() -> onnx.ModelProto:
    fill = node("ConstantOfShape", ["s"], ["w"], value=init("", np.array([0.5], np.float32)))
    conv = node("Conv", ["x", "w"], ["y"])
    return model([fill, conv], [value("x", [1, 2, 4, 4])], [value("y", None)], [init("s", np.array([3, 2, 2, 2]))])


def wrong_value_info() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])]
    made = model(nodes, [value("x", [2, 40])], [value("y", None)], [init("w", normal(40, 40))])
    made.graph.value_info.append(value("a", [7, 9]))
    return made


def recurrent(op: str, gates: int) -> onnx.ModelProto:
    weights = [init("W", normal(1, gates * 16, 40)), init("R", normal(1, gates * 16, 16))]
    layer = node(op, ["x", "W", "R"], ["", "y"], hidden_size=16)
    return model([layer], [value("x", [3, 1, 40])], [value("y", None)], weights)


def transposed_conv(group: int) -> onnx.ModelProto:
    conv = node("ConvTranspose", ["x", "w"], ["y"], group=group, strides=[2, 2])
    return model([conv], [value("x", [1, 16, 5, 5])], [value("y", None)], [init("w", normal(16, 8, 3, 3))])


def masked() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "m"], ["b"]), node("Softmax", ["b"], ["y"])]
    mask = np.zeros((1, 40), np.float32)
    mask[0, ::2] = -np.inf
    mask[0, 1] = -3.4e38
    weights = [init("w", normal(40, 40) / 40), init("m", mask)]
    return model(nodes, [value("x", [2, 40])], [value("y", None)], weights)


def silent_channels() -> onnx.ModelProto:
    kernel = normal(16, 8, 3, 3)
    kernel[3] = 0
    kernel[5] *= 1000
    kernel[6] *= 1e-4
    return model(
        [node("Conv", ["x", "w", "b"], ["y"])], [value("x", [1, 8, 6, 6])], [value("y", None)],
        [init("w", kernel), init("b", normal(16))],
    )  # fmt: skip


def conv_weight_as_input() -> onnx.ModelProto:
    inputs = [value("x", [1, 16, 4, 4]), value("w", [16, 16, 2, 2])]
    return model([node("Conv", ["x", "w"], ["y"])], inputs, [value("y", None)])


def bfloat16_weight() -> onnx.ModelProto:
    weight = helper.make_tensor("w", T.BFLOAT16, [40, 40], normal(40, 40).reshape(-1).tolist())
    nodes = [node("Cast", ["w"], ["f"], to=1), node("MatMul", ["x", "f"], ["y"])]
    return model(nodes, [value("x", [2, 40])], [value("y", None)], [weight])


def strings() -> onnx.ModelProto:
    constant = helper.make_tensor("k", T.STRING, [2], [b"a", b"b"])
    return model(
        [node("Equal", ["s", "k"], ["y"])], [value("s", [2], T.STRING)], [value("y", [2], T.BOOL)], [constant],
        opset=19, ir_version=9,
    )  # fmt: skip


def passthrough() -> onnx.ModelProto:
    nodes = [node("Constant", [], ["c"], value=init("", np.array([7])))]
    return model(nodes, [value("x", [3])], [value("x", [3]), value("c", [1], T.INT64)])


# id: (builder, operators that a quantizing scheme must have quantized)
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], set[str]]] = {
    "A07 weights are inputs before IR 4": (lambda: initializer_in_inputs(3), {"MatMul"}),
    "A08 a weight that could be overridden": (lambda: initializer_in_inputs(8), {"MatMul"}),
    "A09 weights in Constant nodes": (constant_node, {"MatMul"}),
    "A11 a weight in a Loop body": (loop_body, {"MatMul"}),
    "A13 one weight, two orientations": (shared_by_matmul_and_gemm, {"MatMul", "Gemm"}),
    "A21 an output is a weight": (output_is_initializer, {"MatMul"}),
    "A30 strings": (strings, set()),
    "A31 bfloat16": (bfloat16_weight, set()),
    "A47 hostile names": (hostile_names, {"MatMul"}),
    "A50 a wrong value_info": (wrong_value_info, {"MatMul"}),
    "A53 a batched weight": (lambda: model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", [3, 2, 40])], [value("y", None)],
        [init("w", normal(3, 40, 16))]), set()),
    "A60 Ifs thirty deep": (lambda: nested_ifs(30), set()),
    "A61 an input that is an output": (passthrough, set()),
    "A63 a chain of 500": (lambda: unary(500), set()),
    "A64 a weight made by ConstantOfShape": (generated_weight, set()),
    "B01 ConvTranspose": (lambda: transposed_conv(1), set()),
    "B02 grouped ConvTranspose": (lambda: transposed_conv(2), set()),
    "B03 B05 B06 channels far apart or silent": (silent_channels, set()),
    "B08 a mask of infinities": (masked, {"MatMul"}),
    "B17 LSTM": (lambda: recurrent("LSTM", 4), set()),
    "B18 GRU": (lambda: recurrent("GRU", 3), set()),
    "B25 a kernel that is an input": (conv_weight_as_input, set()),
}  # fmt: skip


def sample_of(proto: onnx.ModelProto) -> dict[str, Array]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    made: dict[str, Array] = {}
    for seed, entry in enumerate(proto.graph.input):
        if entry.name in weights:
            continue
        kind = entry.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type == T.STRING:
            made[entry.name] = np.full(shape, "a", object)
        elif kind.elem_type == T.BOOL:
            made[entry.name] = np.array(True)
        else:
            made[entry.name] = normal(*shape, seed=seed + 10)
    return made


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("case", CASES)
def test_the_results_stay(tmp_path: Path, case: str, scheme: str) -> None:
    build, quantized = CASES[case]
    proto = build()
    path, sample = save(tmp_path, proto), sample_of(proto)
    segment, report = emit(path, scheme, tmp_path, samples=[sample])
    expected, found = run(path, sample), run(segment, sample)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape
        if array.dtype.kind == "f":
            assert relative(array, found[name]) <= LIMITS[scheme]
        else:
            np.testing.assert_array_equal(found[name], array)
    if scheme != "fp32":
        uncalibrated = {left.op for left in report.left if "subgraph" in left.reason}
        assert quantized <= set(report.quantized) | uncalibrated
    assert_accounted(report, path)


def assert_accounted(report: Lowered, path: Path) -> None:
    """Weights are quantized, or left with a reason; none are passed over in silence."""
    if weight_nbytes(load_model(path)) >= 4 * 1024 and not report.quantized:
        assert report.left
    assert all(left.reason for left in report.left)


def test_b03_every_channel_keeps_its_own_precision(tmp_path: Path) -> None:
    path = save(tmp_path, silent_channels())
    sample = {"x": normal(1, 8, 6, 6, seed=4)}
    segment, report = emit(path, "int8-weights", tmp_path)
    assert report.quantized == {"Conv": 1}
    expected, found = run(path, sample)["y"][0], run(segment, sample)["y"][0]
    for channel in range(16):
        assert relative(expected[channel], found[channel]) < 0.03


def test_a56_the_form_of_the_data_does_not_show_in_the_bundle(tmp_path: Path) -> None:
    weight = normal(40, 40)
    typed = helper.make_tensor("w", T.FLOAT, [40, 40], weight.reshape(-1).tolist())
    bytes_of = []
    for name, tensor in (("raw", init("w", weight)), ("typed", typed)):
        multiply = node("MatMul", ["x", "w"], ["y"])
        path = save(tmp_path / name, model([multiply], [value("x", [2, 40])], [value("y", [2, 40])], [tensor]))
        segment, _ = emit(path, "fp32", tmp_path / name)
        bytes_of.append((segment.read_bytes(), (segment.parent / "weights.bin").read_bytes()))
    assert bytes_of[0] == bytes_of[1]


def test_a59_what_nobody_reads_is_dropped(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Exp", ["x"], ["dead"])]
    path = save(tmp_path, model(nodes, [value("x", [4])], [value("y", [4])], [init("unused", normal(64, 64))]))
    segment, _ = emit(path, "fp32", tmp_path)
    assert not (segment.parent / "weights.bin").exists()
    assert [n.op_type for n in onnx.load(str(segment)).graph.node] == ["Relu"]
