"""FP16 where it holds every value: held against numpy's arithmetic, which rounds to FP16 after every operator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from compile.calibrate.collectors import whole_range
from compile.graph import ir
from compile.passes.base import run_passes
from compile.passes.narrow import NarrowFloats, wanted
from compile.passes.normalize import RemoveDeadCode
from tests.support.graphs import Random, models
from tests.support.models import Array, init, model, node, normal, prepared, ranges, relative, run, save, value

HALF = TensorProto.FLOAT16
Sample = dict[str, Array]


def narrowed(path: Path, *samples: Sample, shapes: tuple[str, ...] = ()) -> tuple[Path, list[str]]:
    """The model with what FP16 holds of these samples narrowed, beside the source, and what the pass says."""
    graph = prepared(path, *shapes)
    found = ranges(graph, wanted(graph), path, shapes, samples, whole_range)
    notes = run_passes(graph, [NarrowFloats(found), RemoveDeadCode()])
    out = path.with_name("narrow.onnx")
    onnx.save(ir.to_proto(graph), out)
    onnx.checker.check_model(str(out), full_check=True)
    return out, notes


def types(path: Path) -> dict[str, int]:
    """Element type of each value that the main graph makes or holds."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    made = {each.name: each.type.tensor_type.elem_type for each in (*graph.value_info, *graph.output)}
    return made | {each.name: each.data_type for each in graph.initializer}


def in_halves(path: Path, sample: Mapping[str, Array]) -> Array:
    """The first output as numpy computes it: what overflows in FP16 overflows here."""
    with np.errstate(all="ignore"):
        return np.asarray(ReferenceEvaluator(str(path)).run(None, dict(sample))[0])


def perceptron(folder: Path, scale: float = 1.0) -> Path:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "b"], ["c"]), node("Relu", ["c"], ["d"]),
        node("MatMul", ["d", "v"], ["y"]),
    ]  # fmt: skip
    weights = [init("w", normal(64, 96) * np.float32(scale)), init("b", normal(96)), init("v", normal(96, 32, seed=1))]
    return save(folder, model(nodes, [value("x", [4, 64])], [value("y", [4, 32])], weights))


def test_what_fits_is_narrow_and_the_interface_stays(tmp_path: Path) -> None:
    path, sample = perceptron(tmp_path), {"x": normal(4, 64, seed=5)}
    out, notes = narrowed(path, sample)
    assert not notes
    assert {name for name, element in types(out).items() if element == TensorProto.FLOAT} == {"y"}
    assert out.stat().st_size < 0.6 * path.stat().st_size
    assert relative(run(path, sample)["y"], run(out, sample)["y"]) < 2e-3
    assert relative(run(path, sample)["y"], in_halves(out, sample)) < 2e-3


@pytest.mark.parametrize(("scale", "narrow"), [(100.0, True), (1e4, False), (1e-9, False)])
def test_what_comes_near_the_end_of_its_range_is_not(tmp_path: Path, scale: float, narrow: bool) -> None:
    path, sample = perceptron(tmp_path, scale), {"x": normal(4, 64, seed=5)}
    out, notes = narrowed(path, sample)
    assert ("w.float16" in types(out)) is narrow
    assert narrow or any(note.startswith("MatMul") and "stays FP32" in note for note in notes)
    assert relative(run(path, sample)["y"], in_halves(out, sample)) < 2e-3


def layer_norm(folder: Path) -> Path:
    nodes = [
        node("ReduceMean", ["x"], ["mu"], axes=[-1]), node("Sub", ["x", "mu"], ["d"]), node("Pow", ["d", "two"], ["q"]),
        node("ReduceMean", ["q"], ["var"], axes=[-1]), node("Add", ["var", "eps"], ["v"]), node("Sqrt", ["v"], ["s"]),
        node("Div", ["d", "s"], ["n"]), node("MatMul", ["n", "w"], ["y"]),
    ]  # fmt: skip
    weights = [init("two", np.float32(2)), init("eps", np.float32(1e-12)), init("w", normal(64, 32))]
    return save(folder, model(nodes, [value("x", [2, 64])], [value("y", [2, 32])], weights))


@pytest.mark.parametrize("factor", [900.0, 1.0, 1e-4])
def test_a_decomposed_normalization_neither_overflows_nor_divides_by_zero(tmp_path: Path, factor: float) -> None:
    path, sample = layer_norm(tmp_path), {"x": normal(2, 64, seed=3) * np.float32(factor)}
    # One row is near constant, as padding is, whatever the others are.
    sample["x"][1] = 1e-5 * normal(64, seed=4)
    out, notes = narrowed(path, sample)
    assert not notes  # its matrix is narrow in every case
    assert types(out)["w.float16"] == HALF
    assert relative(run(path, sample)["y"], in_halves(out, sample)) < 5e-3


def test_sums_within_an_operator_count(tmp_path: Path) -> None:
    """30 on average is nothing; 4,096 of them are more than FP16 holds, and so are their squares."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("ReduceMean", ["a"], ["m"], axes=[-1]),
        node("ReduceL2", ["a"], ["l"], axes=[-1]), node("MaxPool", ["a"], ["p"], kernel_shape=[4]),
        node("Add", ["m", "l"], ["y"]), node("MatMul", ["p", "v"], ["z"]),
    ]  # fmt: skip
    weights = [init("w", normal(8, 4096)), init("v", normal(4093, 8, seed=1) / np.float32(64))]
    outputs = [value("y", [1, 1, 1]), value("z", [1, 1, 8])]
    path = save(tmp_path, model(nodes, [value("x", [1, 1, 8])], outputs, weights))
    sample = {"x": np.full((1, 1, 8), 30, np.float32)}
    out, _ = narrowed(path, sample)
    found = types(out)
    assert found["a.float16"] == found["p.float16"] == HALF
    assert {"m.float16", "l.float16"}.isdisjoint(found)
    assert relative(run(path, sample)["y"], in_halves(out, sample)) < 2e-3


def test_a_mask_stays_what_it_is(tmp_path: Path) -> None:
    mask = np.array([[0, -np.inf, 0, -3.4e38]] * 4, np.float32)
    nodes = [
        node("MatMul", ["x", "w"], ["s"]), node("Add", ["s", "mask"], ["a"]), node("Softmax", ["a"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["y"]),
    ]  # fmt: skip
    weights = [init("mask", mask), init("w", normal(8, 4)), init("v", normal(4, 8, seed=1))]
    path = save(tmp_path, model(nodes, [value("x", [4, 8])], [value("y", [4, 8])], weights))
    sample = {"x": normal(4, 8, seed=2)}
    out, _ = narrowed(path, sample)
    found = types(out)
    assert found["mask"] == found["a"] == TensorProto.FLOAT
    assert found["w.float16"] == found["v.float16"] == HALF
    assert relative(run(path, sample)["y"], in_halves(out, sample)) < 2e-3


def test_what_the_standard_has_in_fp32_alone_stays(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "k"], ["c"]), node("Resize", ["c", "", "scales"], ["r"], mode="nearest"),
        node("Conv", ["r", "k2"], ["y"]),
    ]  # fmt: skip
    weights = [init("k", normal(4, 3, 1, 1)), init("k2", normal(2, 4, 1, 1)), init("scales", np.float32([1, 1, 2, 2]))]
    path = save(tmp_path, model(nodes, [value("x", [1, 3, 4, 4])], [value("y", [1, 2, 8, 8])], weights))
    sample = {"x": normal(1, 3, 4, 4)}
    out, notes = narrowed(path, sample)
    found = types(out)
    assert not notes
    assert found["r.float16"] == HALF
    assert found["scales"] == TensorProto.FLOAT
    assert relative(run(path, sample)["y"], run(out, sample)["y"]) < 2e-3


@pytest.mark.parametrize("flag", [True, False])
def test_a_body_reads_what_it_captures_in_fp32(tmp_path: Path, flag: bool) -> None:
    then = helper.make_graph([node("Neg", ["a"], ["r"])], "then", [], [value("r", [4, 8])])
    other = helper.make_graph([node("MatMul", ["a", "w"], ["q"])], "else", [], [value("q", [4, 8])])
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("If", ["flag"], ["z"], then_branch=then, else_branch=other),
        node("MatMul", ["z", "w"], ["y"]),
    ]  # fmt: skip
    inputs = [value("x", [4, 8]), value("flag", [], TensorProto.BOOL)]
    path = save(tmp_path, model(nodes, inputs, [value("y", [4, 8])], [init("w", normal(8, 8))]))
    sample = {"x": normal(4, 8, seed=1), "flag": np.array(flag)}
    out, _ = narrowed(path, sample)
    assert types(out)["a.float16"] == HALF
    assert relative(run(path, sample)["y"], run(out, sample)["y"]) < 2e-3


def test_cheap_operators_among_fp32_stay_with_it(tmp_path: Path) -> None:
    """Beyond FP16 on both sides: a Cast there and back would cost more than the Relu."""
    nodes = [node("Mul", ["x", "big"], ["a"]), node("Relu", ["a"], ["b"]), node("Tanh", ["b"], ["c"]),
             node("Neg", ["c"], ["y"])]  # fmt: skip
    path = save(tmp_path, model(nodes, [value("x", [8])], [value("y", [8])], [init("big", np.float32(1e6))]))
    out, _ = narrowed(path, {"x": normal(8)})
    assert [each.op_type for each in onnx.load(out).graph.node] == ["Mul", "Relu", "Tanh", "Neg"]


def test_what_nobody_saw_stays_wide(tmp_path: Path) -> None:
    path = perceptron(tmp_path)
    graph = prepared(path)
    notes = run_passes(graph, [NarrowFloats({})])
    assert notes == [
        "MatMul 'node' stays FP32: 'x': not seen in calibration",
        "MatMul 'node_3' stays FP32: 'd': not seen in calibration",
    ]
    assert all(each.dtype != ir.DataType.FLOAT16 for each in graph.graph.initializers.values())


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=30)
@given(drawn=models())
def test_a_random_model_stays_valid_and_close(drawn: Random, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = save(tmp_path_factory.mktemp("narrow"), drawn.proto)
    expected = run(path, drawn.inputs)
    out, _ = narrowed(path, drawn.inputs, shapes=drawn.shapes)
    for name, found in run(out, drawn.inputs).items():
        assert found.dtype == expected[name].dtype
        assert found.shape == expected[name].shape
        if found.dtype.kind == "f" and found.size:
            assert np.abs(found - expected[name]).max() <= 2e-2 * max(np.abs(expected[name]).max(), 1.0)
