"""Lowering: what is quantized runs and stays close, what is left has a reason, and nothing is stored twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compile.backends import ort
from compile.errors import ModelError
from compile.graph import initializers, ir
from compile.quantize.schemes import choose_scheme
from targets.board import load_board
from tests.support.models import (
    SATURATES,
    Array,
    emit,
    external,
    init,
    lowered,
    mlp,
    model,
    node,
    normal,
    prepared,
    relative,
    run,
    save,
    value,
)

QUANTIZING = ("int8-dynamic", "int8-weights", "int4")
# Codes of 7 bits, where this machine has no more, are twice as far off.
LIMITS = {"fp32": 1e-5, "int8-dynamic": 0.06 if SATURATES else 0.03, "int8-weights": 0.03, "int4": 0.15}


def check(path: Path, scheme: str, folder: Path, inputs: dict[str, Array], quantized: dict[str, int]) -> Path:
    """Lower, write, run and compare."""
    segment, report = emit(path, scheme, folder)
    assert report.quantized == quantized
    expected, found = run(path, inputs), run(segment, inputs)
    assert list(found) == list(expected)
    for name, reference in expected.items():
        assert relative(reference, found[name]) < LIMITS[scheme], name
    return segment


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_matmuls(tmp_path: Path, scheme: str) -> None:
    check(mlp(tmp_path), scheme, tmp_path, {"x": normal(2, 64)}, {"MatMul": 2})


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("bias", [None, (48,), (1,), (1, 48), (3, 48), ()])
def test_gemm(tmp_path: Path, scheme: str, trans_b: int, bias: tuple[int, ...] | None) -> None:
    weights = [init("w", normal(*((48, 40) if trans_b else (40, 48))))]
    names = ["x", "w"]
    if bias is not None:
        weights.append(init("c", normal(*bias, seed=3) if bias else np.float32(0.5)))
        names.append("c")
    gemm = node("Gemm", names, ["y"], transB=trans_b)
    path = save(tmp_path, model([gemm], [value("x", [3, 40])], [value("y", [3, 48])], weights))
    check(path, scheme, tmp_path, {"x": normal(3, 40, seed=5)}, {"Gemm": 1})


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("attributes", [{"alpha": 0.5}, {"beta": 2.0}, {"transA": 1}])
def test_gemm_with_factors_is_left(tmp_path: Path, scheme: str, attributes: dict[str, Any]) -> None:
    weights = [init("w", normal(40, 48)), init("c", normal(48))]
    x = [40, 3] if attributes.get("transA") else [3, 40]
    gemm = node("Gemm", ["x", "w", "c"], ["y"], **attributes)
    path = save(tmp_path, model([gemm], [value("x", x)], [value("y", [3, 48])], weights))
    segment, report = emit(path, scheme, tmp_path)
    assert report.quantized == {}
    assert [(left.op, left.count) for left in report.left] == [("Gemm", 1)]
    assert "alpha" in report.left[0].reason
    np.testing.assert_allclose(run(segment, {"x": normal(*x)})["y"], run(path, {"x": normal(*x)})["y"], rtol=1e-5)


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_a_transposed_constant_is_looked_through(tmp_path: Path, scheme: str) -> None:
    nodes = [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])]
    path = save(tmp_path, model(nodes, [value("x", [2, 130])], [value("y", [2, 256])], [init("w", normal(256, 130))]))
    check(path, scheme, tmp_path, {"x": normal(2, 130)}, {"MatMul": 1})


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize(("k", "n"), [(1024, 1), (33, 64), (70, 37), (65, 16)])
def test_odd_sizes(tmp_path: Path, scheme: str, k: int, n: int) -> None:
    multiply = node("MatMul", ["x", "w"], ["y"])
    path = save(
        tmp_path, model([multiply], [value("x", [2, 3, k])], [value("y", [2, 3, n])], [init("w", normal(k, n))])
    )
    check(path, scheme, tmp_path, {"x": normal(2, 3, k, seed=2)}, {"MatMul": 1})


CONVOLUTIONS = {
    "1d": ([1, 16, 20], [32, 16, 3], {}),
    "2d": ([1, 16, 9, 9], [32, 16, 3, 3], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "3d": ([1, 8, 5, 5, 5], [16, 8, 2, 2, 2], {}),
    "grouped": ([1, 32, 9, 9], [32, 8, 3, 3], {"group": 4}),
    "depthwise": ([1, 128, 9, 9], [128, 1, 3, 3], {"group": 128}),
}


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("scheme", ["int8-weights", "int4"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(tmp_path: Path, scheme: str, kind: str, opset: int) -> None:
    x, w, attributes = CONVOLUTIONS[kind]
    conv = node("Conv", ["x", "w", "b"], ["y"], **attributes)
    weights = [init("w", normal(*w)), init("b", normal(w[0]))]
    path = save(tmp_path, model([conv], [value("x", x)], [value("y", None)], weights, opset=opset))
    check(path, scheme, tmp_path, {"x": normal(*x, seed=1)}, {"Conv": 1})


def test_dynamic_int8_leaves_convolutions_and_says_why(tmp_path: Path) -> None:
    conv = node("Conv", ["x", "w"], ["y"])
    path = save(
        tmp_path, model([conv], [value("x", [1, 16, 9, 9])], [value("y", None)], [init("w", normal(16, 16, 3, 3))])
    )
    report = lowered(path, "int8-dynamic")[1]
    assert [(left.op, left.count, left.weight_bytes) for left in report.left] == [("Conv", 1, 16 * 16 * 9 * 4)]
    assert "slower than float32" in report.left[0].reason


def branches(folder: Path) -> Path:
    """`y = c ? (x @ w) : -(x @ w)`; w is used in front of the If and in its first branch."""
    then = helper.make_graph([node("MatMul", ["a", "w"], ["t"])], "then", [], [value("t", [2, 40])])
    other = helper.make_graph([node("Neg", ["a"], ["e"])], "else", [], [value("e", [2, 40])])
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    inputs = [value("x", [2, 40]), value("c", [], TensorProto.BOOL)]
    return save(folder, model(nodes, inputs, [value("y", [2, 40])], [init("w", normal(40, 40))]))


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_inside_a_branch(tmp_path: Path, scheme: str) -> None:
    path = branches(tmp_path)
    segment, report = emit(path, scheme, tmp_path)
    assert report.quantized == {"MatMul": 2}
    for flag in (True, False):
        inputs = {"x": normal(2, 40), "c": np.array(flag)}
        assert relative(run(path, inputs)["y"], run(segment, inputs)["y"]) < 2 * LIMITS[scheme]


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_inside_a_local_function(tmp_path: Path, scheme: str) -> None:
    body = [node("MatMul", ["a", "b"], ["c"])]
    function = helper.make_function("local", "Product", ["a", "b"], ["c"], body, [helper.make_opsetid("", 17)])
    nodes = [
        node("Product", ["x", "w"], ["t"], domain="local"),
        node("Product", ["t", "v"], ["y"], domain="local"),
    ]
    weights = [init("w", normal(40, 48)), init("v", normal(48, 40))]
    proto = model(nodes, [value("x", [2, 40])], [value("y", [2, 40])], weights, functions=[function], domains=["local"])
    check(save(tmp_path, proto), scheme, tmp_path, {"x": normal(2, 40)}, {"MatMul": 2})


def offsets(segment: Path) -> dict[str, tuple[int, int]]:
    """(offset, length) of every external tensor of a written graph."""
    proto = onnx.load(str(segment), load_external_data=False)
    found = {}
    for tensor in proto.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            found[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    return found


@pytest.mark.parametrize("scheme", ["int8-weights", "int4"])
def test_a_tied_table_and_matrix_are_stored_once(tmp_path: Path, scheme: str) -> None:
    nodes = [
        node("Gather", ["w", "i"], ["e"]),
        node("Transpose", ["w"], ["t"], perm=[1, 0]),
        node("MatMul", ["e", "t"], ["y"]),
    ]
    inputs = [value("i", [3], TensorProto.INT64)]
    path = save(tmp_path, model(nodes, inputs, [value("y", [3, 200])], [init("w", normal(200, 128))]))
    segment = check(path, scheme, tmp_path, {"i": np.array([0, 7, 199])}, {"Gather": 1, "MatMul": 1})
    codes = {name: place for name, place in offsets(segment).items() if ".q" in name}
    assert len(codes) == 2
    assert len(set(codes.values())) == 1
    code_bytes = 200 * 128 * (1 if scheme == "int8-weights" else 0.5)
    assert (segment.parent / "weights.bin").stat().st_size < code_bytes * 1.4 + 3 * 4096


@pytest.mark.parametrize("scheme", ["fp32", *QUANTIZING])
def test_a_weight_of_two_users_is_stored_once(tmp_path: Path, scheme: str) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    path = save(tmp_path, model(nodes, [value("x", [2, 64])], [value("y", [2, 64])], [init("w", normal(64, 64))]))
    quantized = {} if scheme == "fp32" else {"MatMul": 2}
    segment = check(path, scheme, tmp_path, {"x": normal(2, 64)}, quantized)
    places = list(offsets(segment).values())
    assert len(places) == len(set(places))
    assert sum(length for _, length in places) <= 64 * 64 * 4


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_other_float_types_are_left_with_the_reason(tmp_path: Path, scheme: str) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(np.float64))
    weight = init("w", normal(40, 48).astype(np.float64))
    multiply = node("MatMul", ["x", "w"], ["y"])
    path = save(tmp_path, model([multiply], [value("x", [2, 40], element)], [value("y", [2, 48], element)], [weight]))
    report = lowered(path, scheme)[1]
    assert report.quantized == {}
    assert [left.reason for left in report.left] == ["weight is DOUBLE, not FLOAT or FLOAT16"]


def _float8(name: str) -> onnx.TensorProto:
    """Too large to be folded."""
    return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, [160, 160], normal(160, 160).reshape(-1).tolist())


_DEQUANTIZE = node("DequantizeLinear", ["q", "s"], ["w"])
COMPUTED: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "codes": ([_DEQUANTIZE, node("MatMul", ["x", "w"], ["y"])], "quantized in the source already"),
    "codes that are turned": (
        [_DEQUANTIZE, node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])],
        "quantized in the source already",
    ),
    "another type": (
        [node("Cast", ["q"], ["w"], to=TensorProto.FLOAT), node("MatMul", ["x", "w"], ["y"])],
        "weight is FLOAT8E4M3FN, not FLOAT or FLOAT16",
    ),
    "the left side": ([node("MatMul", ["f", "x"], ["y"])], "the weight is the left side"),
    "nothing": ([node("MatMul", ["x", "x"], ["y"])], "both sides are computed"),
}


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("scheme", QUANTIZING)
def test_a_product_without_a_constant_is_left_with_the_reason(tmp_path: Path, scheme: str, kind: str) -> None:
    nodes, reason = COMPUTED[kind]
    weights = [_float8("q"), init("s", np.float32(1)), init("f", normal(160, 160))]
    path = save(tmp_path, model(nodes, [value("x", [160, 160])], [value("y", [160, 160])], weights, 19, 9))
    left = lowered(path, scheme)[1].left
    assert [row.reason for row in left if row.op == "MatMul"] == [reason]


@pytest.mark.parametrize("scheme", ["fp32", *QUANTIZING])
def test_the_counts_add_up(tmp_path: Path, scheme: str) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["a", "tiny"], ["b"]),
        node("MatMul", ["b", "b2"], ["c"]),
        node("Gemm", ["c", "w2"], ["d"], alpha=2.0),
        node("Gather", ["table", "i"], ["e"]),
        node("Conv", ["image", "kernel"], ["f"]),
        node("Conv", ["image", "k1"], ["g"]),
        node("MatMul", ["three", "cube"], ["h"]),
    ]
    weights = [
        init("w", normal(40, 40)), init("tiny", normal(40, 4)), init("w2", normal(40, 40)),
        init("table", normal(50, 33)), init("kernel", normal(16, 16, 3, 3)), init("k1", normal(2, 16, 1, 1)),
        init("cube", normal(3, 24, 24)),
    ]  # fmt: skip
    inputs = [
        value("x", [4, 40]), value("b2", [4, 40]), value("i", [2], TensorProto.INT64), value("image", [1, 16, 5, 5]),
        value("three", [3, 2, 24]),
    ]  # fmt: skip
    outputs = [value(name, None) for name in "defgh"]
    path = save(tmp_path, model(nodes, inputs, outputs, weights))
    report = lowered(path, scheme)[1]
    left = {op: sum(row.count for row in report.left if row.op == op) for op in ("MatMul", "Gemm", "Gather", "Conv")}
    total = {op: report.quantized.get(op, 0) + count for op, count in left.items()}
    assert total == {"MatMul": 4, "Gemm": 1, "Gather": 1, "Conv": 2}
    assert all(row.reason for row in report.left)


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_nan_is_named_when_it_is_quantized(tmp_path: Path, scheme: str) -> None:
    weight = normal(40, 40)
    weight[3, 3] = np.nan
    multiply = node("MatMul", ["x", "w"], ["y"])
    path = save(tmp_path, model([multiply], [value("x", [2, 40])], [value("y", [2, 40])], [init("w", weight)]))
    with pytest.raises(ModelError, match="'w' holds 1 NaN"):
        emit(path, scheme, tmp_path)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_generated_names_avoid_those_of_the_model(tmp_path: Path, scheme: str) -> None:
    names = ["w.scale", "w.q4", "w.q8", "w.int8", "w.zero", "n.quantized"]
    nodes = [node("MatMul", ["x", "w"], [names[0]], name="n")]
    nodes += [node("Relu", [a], [b], name=b) for a, b in zip(names, [*names[1:], "y"], strict=True)]
    path = save(tmp_path, model(nodes, [value("x", [2, 40])], [value("y", [2, 40])], [init("w", normal(40, 40))]))
    check(path, scheme, tmp_path, {"x": normal(2, 40)}, {"MatMul": 1})


def test_four_bit_weights_of_the_source_stay_packed(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(-8, 8, (64, 64)).astype(np.int8)
    flat = values.reshape(-1)
    (tmp_path / "w.bin").write_bytes(((flat[0::2] & 15) | ((flat[1::2] & 15) << 4)).astype(np.uint8).tobytes())
    nodes = [node("DequantizeLinear", ["w", "s"], ["f"]), node("MatMul", ["x", "f"], ["y"])]
    weights = [external("w", [64, 64], TensorProto.INT4, location="w.bin", length=2048), init("s", np.float32(0.1))]
    proto = model(nodes, [value("x", [2, 64])], [value("y", [2, 64])], weights, opset=21, ir_version=10)
    path = save(tmp_path, proto)
    check(path, "fp32", tmp_path, {"x": normal(2, 64)}, {})


@pytest.mark.parametrize(("board", "largest"), [("x86-64-dev", 64), ("raspberry-pi-5-4gb", 127)])
def test_dynamic_codes_fit_the_kernels_of_the_board(tmp_path: Path, board: str, largest: int) -> None:
    scheme = choose_scheme("int8-dynamic", load_board(board))
    graph = prepared(mlp(tmp_path))
    ort.lower(graph, scheme)
    codes = [t.numpy() for t in initializers(graph) if t.dtype == ir.DataType.INT8]
    assert [int(np.abs(each.astype(int)).max()) for each in codes] == [largest, largest]
