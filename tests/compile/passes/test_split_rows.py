"""Regions computed in bands of rows give what they gave before: attention, convolutions, whatever their attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

from compile.errors import ModelError
from compile.forms import NORMALIZE
from compile.graph import ir, nodes_of
from compile.passes.base import run_passes
from compile.passes.split.rows import CannotSplit, SplitRows, backward, bands, find, needed
from compile.shapes import bind_shapes, parse_shape
from tests.support.models import Array, init, model, node, normal, relative, value


def graph_of(proto: onnx.ModelProto, *shapes: str) -> ir.Model:
    graph = ir.from_proto(proto)
    bind_shapes(graph, tuple(map(parse_shape, shapes)))
    run_passes(graph, NORMALIZE)
    return graph


def outputs(proto: onnx.ModelProto, inputs: Mapping[str, Array], optimize: bool = False) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def split(graph: ir.Model, values: Sequence[str], axis: int, parts: int) -> onnx.ModelProto:
    run_passes(graph, [SplitRows(tuple(values), axis, parts)])
    return ir.to_proto(graph)


# -- attention -------------------------------------------------------------------------------------------------------


def attention(rows: int | str, keys: int | str, mask: Sequence[int | str], opset: int = 17) -> onnx.ModelProto:
    """Two heads of width 8: Softmax(q k / s + mask) v."""
    nodes = [
        node("MatMul", ["q", "k"], ["scores"]),
        node("Div", ["scores", "s"], ["scaled"]),
        node("Add", ["scaled", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["p"], axis=-1 if opset >= 13 else 3),
        node("MatMul", ["p", "v"], ["y"]),
    ]
    inputs = [value("q", [1, 2, rows, 8]), value("k", [1, 2, 8, keys]), value("v", [1, 2, keys, 8])]
    inputs.append(value("mask", mask))
    return model(nodes, inputs, [value("y", None)], [init("s", np.float32(8**0.5))], opset=opset)


REGION = ("scores", "scaled", "masked", "p", "y")


def attention_inputs(rows: int, keys: int, mask: Sequence[int]) -> dict[str, Array]:
    return {
        "q": normal(1, 2, rows, 8),
        "k": normal(1, 2, 8, keys, seed=1),
        "v": normal(1, 2, keys, 8, seed=2),
        "mask": np.where(normal(*mask, seed=3) > 1, np.float32(-np.inf), np.float32(0)),
    }


@pytest.mark.parametrize("opset", [9, 12, 17])
@settings(max_examples=12)
@given(
    rows=st.integers(1, 40),
    keys=st.integers(1, 40),
    parts=st.integers(2, 8),
    whole=st.booleans(),
)
def test_attention_by_slices_of_its_queries(opset: int, rows: int, keys: int, parts: int, whole: bool) -> None:
    mask = (1, 1, 1, keys) if whole else (1, 1, rows, keys)
    proto, inputs = attention(rows, keys, mask, opset), attention_inputs(rows, keys, mask)
    inputs["mask"][..., 0] = 0
    parts = min(parts, rows)
    made = split(graph_of(proto), REGION, -2, parts)
    (expected,), (found,) = outputs(proto, inputs), outputs(made, inputs)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert sum(each.op_type == "Softmax" for each in made.graph.node) == parts


@settings(max_examples=20)
@given(rows=st.integers(1, 40), parts=st.integers(2, 16), optimize=st.booleans())
def test_attention_of_a_dynamic_length(rows: int, parts: int, optimize: bool) -> None:
    """Also of fewer rows than parts: empty bands are harmless."""
    proto = attention("t", "t", (1, 1, "t", "t"))
    graph = graph_of(proto, "t=1..40")
    made = split(graph, REGION, -2, parts)
    inputs = attention_inputs(rows, rows, (1, 1, rows, rows))
    inputs["mask"][..., 0] = 0
    (expected,), (found,) = outputs(proto, inputs, optimize), outputs(made, inputs, optimize)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_row_is_in_one_band() -> None:
    for size in range(1, 50):
        for parts in range(1, size + 1):
            found = bands(size, parts)
            assert [row for low, high in found for row in range(low, high)] == list(range(size))
            assert max(high - low for low, high in found) == -(-size // parts)


# -- images ------------------------------------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn, channels: int, at: int) -> tuple[str, dict[str, Any], Array | None, int]:
    """(operator, attributes, filters, channels it makes)."""
    kind = draw(st.sampled_from(["Conv", "MaxPool", "AveragePool", "Relu"]))
    if kind == "Relu":
        return kind, {}, None, channels
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    attributes: dict[str, Any] = {"strides": list(draw(st.tuples(st.integers(1, 3), st.integers(1, 2))))}
    if kind == "Conv" or draw(st.booleans()):
        attributes["dilations"] = [draw(st.integers(1, 2)), 1] if kind != "AveragePool" else [1, 1]
    auto = draw(st.sampled_from(["", "", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto:
        attributes["auto_pad"] = auto
        attributes.pop("dilations", None)
    else:
        begin, end = (draw(st.tuples(st.integers(0, kernel[0] - 1), st.integers(0, kernel[1] - 1))) for _ in range(2))
        attributes["pads"] = [*begin, *end]
    if kind == "AveragePool":
        attributes |= {"kernel_shape": list(kernel), "count_include_pad": draw(st.integers(0, 1))}
        attributes.pop("dilations", None)
        return kind, attributes, None, channels
    if kind == "MaxPool":
        # Of windows that begin behind the padding ONNX infers one more than onnxruntime makes.
        up = all(stride <= size for stride, size in zip(attributes["strides"], kernel, strict=True))
        attributes |= {"kernel_shape": list(kernel), "ceil_mode": draw(st.integers(0, int(up)))}
        return kind, attributes, None, channels
    attributes["group"] = draw(st.sampled_from([1, 2, channels]))
    made = draw(st.sampled_from([2, 4])) * (channels if attributes["group"] == channels else 1)
    filters = normal(made, channels // attributes["group"], *kernel, seed=at)
    return kind, attributes, filters, made


@st.composite
def images(draw: st.DrawFn) -> tuple[onnx.ModelProto, list[str]]:
    """One to three layers on an image of odd sizes, perhaps with a shortcut around one that keeps the size."""
    channels, nodes, weights, names, current = 2, [], [], [], "x"
    for at in range(draw(st.integers(1, 3))):
        kind, attributes, filters, channels = draw(layers(channels, at))
        taken = [current, *([f"w{at}"] if filters is not None else [])]
        if filters is not None:
            weights.append(init(f"w{at}", filters))
        nodes.append(node(kind, taken, [f"h{at}"], **attributes))
        names.append(f"h{at}")
        if draw(st.booleans()):
            weights.append(init(f"w{at}.same", normal(channels, channels, 3, 1, seed=7)))
            nodes.append(node("Conv", [f"h{at}", f"w{at}.same"], [f"s{at}"], pads=[1, 0, 1, 0]))
            nodes.append(node("Add", [f"s{at}", f"h{at}"], [f"r{at}"]))
            names += [f"s{at}", f"r{at}"]
        current = names[-1]
    height, width = draw(st.integers(9, 24)), draw(st.integers(5, 9))
    nodes.append(node("Neg", [current], ["y"]))
    return model(nodes, [value("x", ["n", 2, height, width])], [value("y", None)], weights), names


@settings(max_examples=60)
@given(case=images(), parts=st.integers(2, 6), optimize=st.booleans())
def test_stacks_of_convolutions_and_pooling_by_bands_with_halo(
    case: tuple[onnx.ModelProto, list[str]], parts: int, optimize: bool
) -> None:
    proto, names = case
    try:
        graph = graph_of(proto, "n=1..3")
        before = outputs(proto, {"x": normal(2, 2, *shape_of(proto))}, optimize)
    except (ModelError, RuntimeException):
        reject()  # the image is too small for its layers
    rows = before[0].shape[2]
    nodes = find(graph, names)
    assert nodes is not None
    try:
        for each in bands(rows, min(parts, rows)):
            backward(nodes, -2, each)
    except CannotSplit as reason:
        if not any(words in str(reason) for words in ("rows of padding", "rounds the number")):
            raise
        reject()
    made = split(graph, names, -2, min(parts, rows))
    (found,) = outputs(made, {"x": normal(2, 2, *shape_of(proto))}, optimize)
    np.testing.assert_allclose(found, before[0], rtol=1e-4, atol=1e-4)


def shape_of(proto: onnx.ModelProto) -> list[int]:
    return [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim][2:]


def test_a_tile_takes_its_halo_and_no_more() -> None:
    """Two convolutions of 3x3, stride 2 and 1, on 32 rows: rows 4 to 8 of 16 come of 3 to 9, and those of 5 to 18."""
    proto = model(
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
            node("Conv", ["a", "w"], ["b"], pads=[1, 1, 1, 1]),
            node("Relu", ["b"], ["y"]),
        ],
        [value("x", [1, 2, 32, 8])],
        [value("y", None)],
        [init("w", normal(2, 2, 3, 3))],
    )
    graph = graph_of(proto)
    nodes = find(graph, ["a", "b"])
    assert nodes is not None
    held = {each.name: rows for each, rows in backward(nodes, -2, (4, 8)).items()}
    assert held == {"b": (4, 8), "a": (3, 9)}
    assert needed(nodes[0], -2, (3, 9))[0] == (5, 18)
    made = split(graph, ["a", "b"], -2, 4)
    pads = [list(a.ints) for n in made.graph.node if n.op_type == "Conv" for a in n.attribute if a.name == "pads"]
    # Only the first and the last band still stand at an edge.
    assert pads == [[1, 1, 0, 1], [1, 1, 0, 1], *[[0, 1, 0, 1]] * 4, [0, 1, 0, 1], [0, 1, 1, 1]]
    inputs = {"x": normal(1, 2, 32, 8)}
    assert relative(outputs(proto, inputs)[0], outputs(made, inputs)[0]) < 1e-6


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Softmax", ["x"], ["h"], axis=2)], "looks along the rows"),
        ([node("ReduceSum", ["x"], ["h"])], "ReduceSum is not computed by rows"),
        ([node("Conv", ["x", "w"], ["h"])], r"a dynamic number of rows \(h\), and a halo needs a fixed one"),
        ([node("Concat", ["x", "x"], ["h"], axis=2)], "joins rows"),
        ([node("MaxPool", ["x"], ["h", "i"], kernel_shape=[2, 2])], "a second output of MaxPool is read"),
    ],
)
def test_what_cannot_be_computed_by_rows_says_why(nodes: list[onnx.NodeProto], words: str) -> None:
    read = [*nodes, node("Neg", ["h"], ["y"])]
    read += [node("Cast", ["i"], ["z"], to=1)] if "i" in nodes[0].output else []
    proto = model(
        read,
        [value("x", [1, 2, "h", 8])],
        [value(each.output[0], None) for each in read[1:]],
        [init("w", normal(2, 2, 3, 3))],
    )
    graph = graph_of(proto, "h=9..16")
    (found,) = [each for each in nodes_of(graph) if each.outputs[0].name == "h"]
    with pytest.raises(CannotSplit, match=words):
        needed(found, -2, (0, 4))
