"""What is split, and into how many parts: from byte tables alone, and never more than is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile.forms import NORMALIZE
from compile.graph import ir
from compile.partition.graph import static_sizes
from compile.passes.base import run_passes
from compile.passes.split import plan
from compile.passes.split.columns import SplitColumns, panels
from compile.passes.split.plan import MOST_PARTS, peak_bytes, split_columns, split_rows
from compile.passes.split.rows import SplitRows
from compile.shapes import bind_shapes, parse_shape
from tests.support.models import init, model, node, normal, value

KIB, MIB = 1 << 10, 1 << 20
UNBOUNDED = 1 << 40


@pytest.fixture(autouse=True)
def only_activations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nodes themselves took nothing: these models are small."""
    monkeypatch.setattr(plan, "NODE_BYTES", 0)


def graph_of(proto: onnx.ModelProto, *shapes: str) -> ir.Model:
    graph = ir.from_proto(proto)
    bind_shapes(graph, tuple(map(parse_shape, shapes)))
    run_passes(graph, NORMALIZE)
    return graph


def peak(graph: ir.Model) -> int:
    return peak_bytes(graph, static_sizes(graph))


# -- weights -----------------------------------------------------------------------------------------------------------


def head(columns: int) -> ir.Model:
    """A table of 64 KiB and a matrix of `columns` x 256 bytes."""
    nodes = [node("Gather", ["table", "i"], ["h"]), node("MatMul", ["h", "w"], ["y"], name="head")]
    weights = [init("table", normal(256, 64)), init("w", normal(64, columns))]
    return graph_of(model(nodes, [value("i", [3], onnx.TensorProto.INT64)], [value("y", None)], weights))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.integers(2, 4000), limit=st.integers(1, 512 * KIB), bits=st.sampled_from([4, 8, 32]))
def test_the_fewest_parts_that_fit_are_taken(columns: int, limit: int, bits: int) -> None:
    stored = columns * 64 * bits // 8

    def largest(parts: int) -> float:
        return max(stop - start for start, stop in panels(columns, parts)) * stored / columns

    found = split_columns(head(columns), {"y": stored, "h": 64 * KIB}, limit)
    if stored <= limit:
        assert found.passes == found.stuck == ()
    elif found.passes:
        (step,) = found.passes
        assert isinstance(step, SplitColumns)
        assert largest(step.parts) <= limit
        assert all(largest(fewer) > limit for fewer in range(2, step.parts))
        assert f"split into {len(panels(columns, step.parts))} by columns" in found.notes[0]
    else:
        (stuck,) = found.stuck
        assert stuck.operator == "MatMul node 'head'"
        assert largest(MOST_PARTS) > limit
        assert stuck.least >= largest(MOST_PARTS)


# -- activations -------------------------------------------------------------------------------------------------------


def attention(rows: int | str, keys: int | str, heads: int = 8) -> onnx.ModelProto:
    nodes = [
        node("MatMul", ["q", "k"], ["scores"]),
        node("Mul", ["scores", "s"], ["scaled"]),
        node("Softmax", ["scaled"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["o"]),
        node("Relu", ["o"], ["y"]),
    ]
    inputs = [value("q", [1, heads, rows, 8]), value("k", [1, heads, 8, keys]), value("v", [1, heads, keys, 8])]
    return model(nodes, inputs, [value("y", None)], [init("s", np.float32(0.3))])


def stack(height: int, channels: Sequence[int]) -> onnx.ModelProto:
    """Convolutions of 3x3 with stride 2 and Relu, on a square image."""
    nodes, weights, current, taken = [], [], "x", 3
    for at, made in enumerate(channels):
        weights.append(init(f"w{at}", normal(made, taken, 3, 3, seed=at)))
        nodes.append(node("Conv", [current, f"w{at}"], [f"c{at}"], pads=[1, 1, 1, 1], strides=[2, 2] if at else [1, 1]))
        nodes.append(node("Relu", [f"c{at}"], [f"r{at}"]))
        current, taken = f"r{at}", made
    nodes.append(node("GlobalAveragePool", [current], ["y"]))
    return model(nodes, [value("x", [1, 3, height, height])], [value("y", None)], weights)


def test_what_fits_is_not_split() -> None:
    graph = graph_of(attention(256, 256))
    assert peak(graph) == 2 * 8 * 256 * 256 * 4
    found = split_rows(graph, static_sizes(graph), 4 * MIB, UNBOUNDED)
    assert found.passes == found.notes == found.stuck == ()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(budget=st.integers(200 * KIB, 4 * MIB - 1))
def test_attention_is_split_as_far_as_it_must(budget: int) -> None:
    graph = graph_of(attention(256, 256))
    (step,) = split_rows(graph, static_sizes(graph), budget, UNBOUNDED).passes
    assert isinstance(step, SplitRows)
    assert step.axis == -2
    assert step.values[-1] in ("o", "y")
    peaks = {}
    for parts in (step.parts // 2, step.parts):
        graph = graph_of(attention(256, 256))
        if parts > 1:
            run_passes(graph, [SplitRows(step.values, step.axis, parts)])
        peaks[parts] = peak(graph)
    # What enters counts whole while it is read, so that a little less than the budget is used.
    assert peaks[step.parts] <= budget < 1.5 * peaks[step.parts // 2]


@pytest.mark.parametrize("budget", [800 * KIB, MIB, 2 * MIB])
def test_a_stack_of_convolutions_is_split_as_a_whole(budget: int) -> None:
    graph = graph_of(stack(192, (16, 16, 32, 64)))
    before = peak(graph)
    found = split_rows(graph, static_sizes(graph), budget, UNBOUNDED)
    assert found.stuck == ()
    run_passes(graph, found.passes)
    assert before > 2.5 * MIB > budget >= peak(graph)
    (step,) = found.passes
    # One convolution alone reads and makes as much as before: only several of them hide what is between them.
    assert isinstance(step, SplitRows)
    assert sum(name.startswith("c") for name in step.values) >= 2


def test_a_dynamic_number_of_queries_is_planned_at_the_largest() -> None:
    graph, largest = graph_of(attention("t", "t"), "t=1..256"), graph_of(attention(256, 256))
    found = split_rows(graph, static_sizes(largest), MIB, UNBOUNDED)
    assert found.passes == split_rows(largest, static_sizes(largest), MIB, UNBOUNDED).passes
    run_passes(graph, found.passes)
    assert sum(each.op_type == "Softmax" for each in graph.graph) == found.passes[0].parts  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Relu", ["x"], ["a"]), node("Transpose", ["a"], ["y"])], "Transpose is not computed by rows"),
        ([node("CumSum", ["x", "axis"], ["y"])], "CumSum is not computed by rows"),
        ([node("Conv", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])], "dynamic number of rows"),
    ],
)
def test_what_no_split_helps_is_named_with_the_least_that_would_do(nodes: list[onnx.NodeProto], words: str) -> None:
    weights = [init("axis", np.array(0)), init("w", normal(2, 2, 3, 3))]
    proto = model(nodes, [value("x", [1, 2, "h", 256])], [value("y", None)], weights)
    graph = graph_of(proto, "h=64..256")
    sizes = {each.name or "": 512 * KIB for n in graph.graph for each in n.outputs}
    found = split_rows(graph, sizes, 100 * KIB, UNBOUNDED)
    assert found.passes == ()
    assert found.stuck[0].nbytes >= 512 * KIB
    assert found.stuck[0].least >= 512 * KIB
    assert any(re.search(words, each.reason) for each in found.stuck)


def test_what_the_host_cannot_compute_is_left() -> None:
    graph = graph_of(attention(256, 256))
    assert split_rows(graph, static_sizes(graph), MIB, MIB).passes == ()


def test_bands_cost_what_their_nodes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes that take as much as they save, nothing is won."""
    monkeypatch.setattr(plan, "NODE_BYTES", MIB)
    graph = graph_of(attention(256, 256))
    found = split_rows(graph, static_sizes(graph), 2 * MIB, UNBOUNDED)
    assert found.passes == ()
    assert found.stuck[0].least >= 4 * MIB
