"""One form for every exporter's graph, with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from compile.errors import ModelError
from compile.graph import FreshNames, ir, load_model, nodes_of
from compile.passes.base import run_passes
from compile.passes.normalize import AlignBroadcasts, InferShapes, LiftConstants, LiftOpset, RemoveDeadCode, SortNodes
from tests.support.models import Array, emit, external, init, model, node, normal, prepared, run, save, value

BOOL, INT64, STRING = TensorProto.BOOL, TensorProto.INT64, TensorProto.STRING


def same(path: Path, folder: Path, *samples: dict[str, Array]) -> Path:
    """Emit unquantized; every output must be as before, up to the order of sums."""
    segment, _ = emit(path, "fp32", folder)
    for sample in samples:
        expected, found = run(path, sample), run(segment, sample)
        assert list(found) == list(expected)
        for name, array in expected.items():
            if array.dtype.kind == "f":
                np.testing.assert_allclose(found[name], array, rtol=1e-6)
            else:
                np.testing.assert_array_equal(found[name], array)
    return segment


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "value": ({"value": init("", normal(2))}, normal(2)),
    "value_float": ({"value_float": 2.5}, np.float32(2.5)),
    "value_floats": ({"value_floats": [1.0, 2.0]}, np.array([1, 2], np.float32)),
    "value_int": ({"value_int": 7}, np.int64(7)),
    "value_ints": ({"value_ints": [7, 8]}, np.array([7, 8])),
    "value_string": ({"value_string": b"a"}, np.array("a", object)),
    "value_strings": ({"value_strings": [b"a", b"bc"]}, np.array(["a", "bc"], object)),
}


def test_two_branches_may_use_one_name(tmp_path: Path) -> None:
    then = branch("then", [node("Relu", ["x"], ["s"]), node("Neg", ["s"], ["r"])], "r")
    other = branch("else", [node("Abs", ["x"], ["s"]), node("Exp", ["s"], ["r"])], "r")
    path = with_if(tmp_path, then, other)
    names = [v.name for n in nodes_of(prepared(path)) for v in n.outputs]
    assert len(set(names)) == len(names) == 6
    same(path, tmp_path, *BOTH)


@pytest.mark.parametrize("used", ["read", "output"])
@pytest.mark.parametrize("form", FORMS)
def test_constants_of_every_form_become_initializers(tmp_path: Path, form: str, used: str) -> None:
    attributes, expected = FORMS[form]
    element = STRING if "string" in form else INT64 if "int" in form else TensorProto.FLOAT
    nodes = [node("Constant", [], ["c"], **attributes)]
    nodes += [node("Shape", ["c"], ["y"]) if used == "read" else node("Relu", ["x"], ["y"])]
    outputs = [value("y", None, INT64 if used == "read" else TensorProto.FLOAT)]
    outputs += [value("c", list(np.shape(expected)), element)] if used == "output" else []
    path = save(tmp_path, model(nodes, [value("x", [2])], outputs))
    graph = load_model(path)
    run_passes(graph, [LiftConstants()])
    assert not [n for n in nodes_of(graph) if n.op_type == "Constant"]
    (lifted,) = graph.graph.initializers.values()
    assert lifted.const_value is not None
    if element != STRING:
        np.testing.assert_array_equal(lifted.const_value.numpy(), expected)
    same(path, tmp_path, {"x": normal(2)})


def test_functions_within_functions_are_inlined(tmp_path: Path) -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    inner = helper.make_function("local", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], imports)
    calls = [node("Twice", ["a"], ["t"], domain="local"), node("Twice", ["t"], ["b"], domain="local")]
    outer = helper.make_function("local", "Four", ["a"], ["b"], calls, imports)
    nodes = [node("Four", ["x"], ["t"], domain="local"), node("Four", ["t"], ["y"], domain="local")]
    proto = model(nodes, [value("x", [2])], [value("y", [2])], functions=[inner, outer], domains=["local"])
    path = save(tmp_path, proto)
    graph = prepared(path)
    assert not graph.functions
    assert [n.op_type for n in graph.graph] == ["Add"] * 4
    same(path, tmp_path, {"x": normal(2)})


def branch(name: str, nodes: list[Any], output: str, weights: list[Any] = []) -> Any:  # noqa: B006
    return helper.make_graph(nodes, name, [], [value(output, [4])], weights)


def with_if(folder: Path, then: Any, other: Any, weights: list[Any] | None = None) -> Path:
    nodes = [node("Neg", ["x"], ["outer"]), node("If", ["c"], ["y"], then_branch=then, else_branch=other)]
    inputs = [value("x", [4]), value("c", [], BOOL)]
    return save(folder, model(nodes, inputs, [value("y", [4]), value("outer", [4])], weights or []))


BOTH = tuple({"x": normal(4), "c": np.array(flag)} for flag in (True, False))


def test_a_branch_may_return_a_constant_or_an_outer_value(tmp_path: Path) -> None:
    then = branch("then", [node("Constant", [], ["t"], value=init("", normal(4)))], "t")
    other = branch("else", [node("Identity", ["outer"], ["e"])], "e")
    same(with_if(tmp_path, then, other), tmp_path, *BOTH)


def test_a_branch_may_return_its_own_initializer(tmp_path: Path) -> None:
    then = branch("then", [node("Relu", ["x"], ["t"])], "t")
    other = branch("else", [], "e", [init("e", normal(4))])
    same(with_if(tmp_path, then, other), tmp_path, *BOTH)


def test_weights_of_branches_become_external_data_of_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(normal(20000, seed=1).tobytes() + normal(20000, seed=2).tobytes())
    branches = [
        branch(
            name,
            [node("ReduceSum", ["w"], ["s"], keepdims=0), node("Add", ["x", "s"], [output])],
            output,
            [external("w", [20000], location="w.bin", offset=offset, length=80000)],
        )
        for name, output, offset in (("then", "t", 0), ("else", "e", 80000))
    ]
    segment = same(with_if(tmp_path, *branches), tmp_path, *BOTH)
    assert segment.stat().st_size < 4000
    assert (segment.parent / "weights.bin").stat().st_size >= 160000


def test_two_outputs_of_a_body_that_are_one_value_stay_two(tmp_path: Path) -> None:
    body = helper.make_graph(
        [node("Add", ["s", "xi"], ["so"]), node("Identity", ["so"], ["yo"])],
        "body",
        [value("s", [2]), value("xi", [2])],
        [value("so", [2]), value("yo", [2])],
    )
    scan = node("Scan", ["s0", "x"], ["sf", "y"], num_scan_inputs=1, body=body)
    path = save(tmp_path, model([scan], [value("s0", [2]), value("x", [3, 2])], [value("sf", [2]), value("y", [3, 2])]))
    same(path, tmp_path, {"s0": normal(2), "x": normal(3, 2)})


def test_identities_at_the_border_stay_right(tmp_path: Path) -> None:
    nodes = [
        node("Identity", ["x"], ["same"]),
        node("Relu", ["x"], ["a"]),
        node("Identity", ["a"], ["b"]),
        node("Identity", ["a"], ["c"]),
        node("Identity", ["b"], ["d"]),
        node("Identity", ["w"], ["e"]),
    ]
    outputs = [value(name, [4]) for name in ("same", "a", "b", "c", "d", "e", "w")]
    path = save(tmp_path, model(nodes, [value("x", [4])], outputs, [init("w", normal(4))]))
    same(path, tmp_path, {"x": normal(4)})


def test_an_inner_identity_goes(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["a"]), node("Identity", ["a"], ["b"]), node("Neg", ["b"], ["y"])]
    path = save(tmp_path, model(nodes, [value("x", [4])], [value("y", [4])]))
    assert [n.op_type for n in prepared(path).graph] == ["Relu", "Neg"]


def test_nodes_in_any_order_are_sorted(tmp_path: Path) -> None:
    nodes = [node("Neg", ["b"], ["y"]), node("Relu", ["a"], ["b"]), node("Abs", ["x"], ["a"])]
    graph = load_model(save(tmp_path, model(nodes, [value("x", [4])], [value("y", [4])])))
    run_passes(graph, [SortNodes()])
    assert [n.op_type for n in graph.graph] == ["Abs", "Relu", "Neg"]


def test_dead_nodes_and_weights_go(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Exp", ["x"], ["dead"]), node("Add", ["dead", "w"], ["deader"])]
    path = save(tmp_path, model(nodes, [value("x", [4])], [value("y", [4])], [init("w", normal(4))]))
    graph = load_model(path)
    run_passes(graph, [RemoveDeadCode()])
    assert [n.op_type for n in graph.graph] == ["Relu"]
    assert not graph.graph.initializers


def test_weights_among_the_inputs_are_not_asked_for(tmp_path: Path) -> None:
    inputs = [value("x", [2, 8]), value("w", [8, 4])]
    proto = model([node("MatMul", ["x", "w"], ["y"])], inputs, [value("y", [2, 4])], [init("w", normal(8, 4))], 9, 3)
    graph = prepared(save(tmp_path, proto))
    assert [v.name for v in graph.graph.inputs] == ["x"]


def test_an_opset_is_raised_only_where_it_is_too_old(tmp_path: Path) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [value("x", [4])], [value("y", [4])], opset=11)
    graph = load_model(save(tmp_path, proto))
    run_passes(graph, [LiftOpset(9)])
    assert graph.graph.opset_imports[""] == 11
    run_passes(graph, [LiftOpset(13)])
    assert graph.graph.opset_imports[""] == 13
    assert isinstance(graph, ir.Model)


def test_what_an_old_opset_aligned_needs_a_rank(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "s"], ["r"]), node("Add", ["x", "r"], ["y"], name="sum", broadcast=1, axis=0)]
    inputs = [value("x", [2, 3]), value("s", ["n"], INT64)]
    graph = load_model(save(tmp_path, model(nodes, inputs, [value("y", [2, 3])], opset=6)))
    with pytest.raises(ModelError, match="Add node 'sum' of opset 6 broadcasts operands of unknown rank"):
        run_passes(graph, [AlignBroadcasts()])


def test_what_the_converter_refuses_names_the_opset(tmp_path: Path) -> None:
    proto = model([node("Dropout", ["x"], ["y"], is_test=0)], [value("x", [4])], [value("y", [4])], opset=6)
    with pytest.raises(ModelError, match="cannot raise opset 6 to 7"):
        run_passes(load_model(save(tmp_path, proto)), [LiftOpset(7)])


def test_fresh_names_differ_from_all_and_from_each_other(tmp_path: Path) -> None:
    then = branch("then", [node("Relu", ["x"], ["inner"]), node("Neg", ["inner"], ["r"])], "r")
    other = branch("else", [node("Abs", ["x"], ["w_1"])], "w_1", [init("w", normal(4))])
    names = FreshNames(load_model(with_if(tmp_path, then, other)))
    assert [names.make("w"), names.make("w"), names.make("inner"), names.make("free")] == [
        "w_2", "w_3", "inner_1", "free",
    ]  # fmt: skip


def test_shapes_are_inferred_again_where_something_has_changed(tmp_path: Path) -> None:
    nodes = [node("Transpose", ["x"], ["a"], perm=[0, 2, 1]), node("Relu", ["a"], ["y"])]
    graph = load_model(save(tmp_path, model(nodes, [value("x", [2, 3, 4])], [value("y", None)])))
    turn, relu = graph.graph

    def inferred() -> list[object]:
        run_passes(graph, [InferShapes()])
        return [list(made.outputs[0].shape or ()) for made in (turn, relu)]

    assert inferred() == inferred() == [[2, 4, 3]] * 2
    turn.attributes["perm"] = ir.AttrInt64s("perm", [2, 1, 0])
    assert inferred() == [[4, 3, 2]] * 2
    relu.replace_input_with(0, graph.graph.inputs[0])
    assert inferred() == [[4, 3, 2], [2, 3, 4]]
    graph.graph.inputs[0].shape = ir.Shape([5, 6, 7])
    assert inferred() == [[7, 6, 5], [5, 6, 7]]
    turn.outputs[0].shape = None
    assert inferred() == [[7, 6, 5], [5, 6, 7]]
