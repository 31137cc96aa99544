"""Which inputs decide shapes, and what the plan makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from compile.calibrate.control import control_inputs
from compile.graph import load_model
from compile.options import Options
from compile.pipeline import compile_model
from targets.board import load_board
from tests.support.models import init, model, node, normal, save, value

INT64 = onnx.TensorProto.INT64


def test_what_a_shape_operand_is_computed_from_is_control(tmp_path: Path) -> None:
    nodes = [
        node("Mul", ["rows", "two"], ["doubled"]),
        node("Concat", ["doubled", "rest"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    inputs = [value("x", [8]), value("rows", [1], INT64)]
    path = save(tmp_path, model(nodes, inputs, [value("y", [None, None])], [init("two", [2]), init("rest", [-1])]))
    assert control_inputs(load_model(path)) == ("rows",)


def test_a_shape_that_follows_from_another_shape_is_not(tmp_path: Path) -> None:
    nodes = [node("Shape", ["z"], ["shape"]), node("Expand", ["x", "shape"], ["y"])]
    path = save(tmp_path, model(nodes, [value("x", [1]), value("z", [3, 4])], [value("y", [3, 4])]))
    assert control_inputs(load_model(path)) == ()


def test_a_loop_count_inside_a_branch_is_control(tmp_path: Path) -> None:
    body = onnx.helper.make_graph(
        [node("Identity", ["keep"], ["again"]), node("Add", ["s", "one"], ["t"])],
        "body",
        [value("i", [], INT64), value("keep", [], onnx.TensorProto.BOOL), value("s", [1])],
        [value("again", [], onnx.TensorProto.BOOL), value("t", [1])],
    )
    loop = node("Loop", ["count", "", "x"], ["looped"], body=body)
    then = onnx.helper.make_graph([loop], "then", [], [value("looped", [1])])
    other = onnx.helper.make_graph([node("Neg", ["x"], ["negated"])], "else", [], [value("negated", [1])])
    nodes = [node("If", ["flag"], ["y"], then_branch=then, else_branch=other)]
    inputs = [value("flag", [], onnx.TensorProto.BOOL), value("count", [], INT64), value("x", [1])]
    path = save(tmp_path, model(nodes, inputs, [value("y", [1])], [init("one", normal(1))]))
    assert control_inputs(load_model(path)) == ("count",)


def test_a_persons_sample_decides_the_planned_output(tmp_path: Path) -> None:
    nodes = [node("Tile", ["x", "repeats"], ["y"])]
    path = save(tmp_path, model(nodes, [value("x", [2, 3]), value("repeats", [2], INT64)], [value("y", [None, None])]))
    np.savez(tmp_path / "calib.npz", x=normal(2, 3), repeats=np.array([4, 5]))
    manifest = compile_model(
        path, load_board("raspberry-pi-5-4gb"), tmp_path / "m.tfb", Options(calib=tmp_path / "calib.npz")
    )
    assert manifest.contract.outputs[0].max_nbytes == 8 * 15 * 4


def test_a_model_that_divides_by_its_input_is_planned_on_a_sample(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        model([node("Div", ["x", "d"], ["y"])], [value(n, [64], INT64) for n in "xd"], [value("y", [64], INT64)]),
    )
    np.savez(tmp_path / "calib.npz", x=np.arange(64), d=np.full(64, 3))
    manifest = compile_model(
        path, load_board("raspberry-pi-5-4gb"), tmp_path / "m.tfb", Options(calib=tmp_path / "calib.npz")
    )
    assert manifest.verification.outputs[0].max_abs == 0
