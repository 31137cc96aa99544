"""FP16 models keep their interface, compute in FP32, and have their matrices quantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.support.models import Array, emit, init, model, node, normal, relative, run, save, value

HALF, BOOL = TensorProto.FLOAT16, TensorProto.BOOL


def half(*shape: int, seed: int = 0) -> Array:
    return normal(*shape, seed=seed).astype(np.float16)


def perceptron(folder: Path) -> Path:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Add", ["a", "b"], ["c"]),
        node("Relu", ["c"], ["d"]),
        node("Gather", ["table", "i"], ["e"]),
        node("MatMul", ["d", "v"], ["f"]),
        node("Add", ["f", "e"], ["y"]),
    ]
    weights = [
        init("w", half(64, 96)), init("b", half(96)), init("v", half(96, 64, seed=1)),
        init("table", half(50, 64, seed=2)),
    ]  # fmt: skip
    inputs = [value("x", [4, 64], HALF), value("i", [4], TensorProto.INT64)]
    return save(folder, model(nodes, inputs, [value("y", [4, 64], HALF)], weights))


@pytest.mark.parametrize(
    ("scheme", "limit"), [("fp32", 2e-3), ("int8-weights", 2e-2), ("int4", 0.2), ("int8-dynamic", 3e-2)]
)
def test_the_interface_stays_and_the_values_are_close(tmp_path: Path, scheme: str, limit: float) -> None:
    path = perceptron(tmp_path)
    segment, report = emit(path, scheme, tmp_path)
    sample = {"x": half(4, 64, seed=5), "i": np.array([0, 7, 49, 7])}
    expected, found = run(path, sample)["y"], run(segment, sample)["y"]
    assert found.dtype == np.float16
    assert relative(expected.astype(np.float32), found.astype(np.float32)) < limit
    quantized = {"fp32": {}, "int8-dynamic": {"MatMul": 2}}.get(scheme, {"Gather": 1, "MatMul": 2})
    assert report.quantized == quantized


@pytest.mark.parametrize("flag", [True, False])
def test_branches_and_what_they_capture(tmp_path: Path, flag: bool) -> None:
    def branch(name: str, nodes: list[helper.NodeProto], *weights: TensorProto) -> helper.GraphProto:
        return helper.make_graph(nodes, name, [], [value("r", [2, 32], HALF)], list(weights))

    then = branch("then", [node("MatMul", ["x", "w"], ["r"])], init("w", half(32, 32)))
    other = branch("else", [node("Add", ["x", "outer"], ["s"]), node("Cast", ["s"], ["r"], to=HALF)])
    nodes = [node("If", ["flag"], ["z"], then_branch=then, else_branch=other), node("Mul", ["z", "outer"], ["y"])]
    inputs = [value("x", [2, 32], HALF), value("flag", [], BOOL)]
    path = save(tmp_path, model(nodes, inputs, [value("y", [2, 32], HALF)], [init("outer", half(32, seed=3))]))
    segment, _ = emit(path, "fp32", tmp_path)
    sample = {"x": half(2, 32, seed=4), "flag": np.array(flag)}
    expected, found = run(path, sample)["y"], run(segment, sample)["y"]
    assert found.dtype == np.float16
    assert relative(expected.astype(np.float32), found.astype(np.float32)) < 3e-3


def test_what_overflows_in_sixteen_bits_does_not(tmp_path: Path) -> None:
    nodes = [node("Mul", ["x", "big"], ["a"]), node("Div", ["a", "big"], ["y"])]
    path = save(
        tmp_path,
        model(nodes, [value("x", [4], HALF)], [value("y", [4], HALF)], [init("big", np.float16(6e4).reshape(1))]),
    )
    segment, _ = emit(path, "fp32", tmp_path)
    sample = np.array([1, 2, 3, 4], np.float16)
    np.testing.assert_array_equal(run(segment, {"x": sample})["y"], sample)


def test_a_model_without_sixteen_bit_values_is_left_alone(tmp_path: Path) -> None:
    path = save(tmp_path, model([node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2])]))
    segment, _ = emit(path, "fp32", tmp_path)
    assert "Cast" not in segment.read_bytes().decode("latin-1")
