"""Cuts: properties of the choice, and segments that give, one after the other, the bits of the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from compile.forms import NORMALIZE
from compile.graph import ir
from compile.partition.cuts import Rates, Rules, best_cuts
from compile.partition.graph import extract, isolated, order_of, positions, segments, static_sizes
from compile.partition.greedy import WORTHWHILE_FILL, Position, cut
from compile.passes.base import run_passes
from tests.support.models import Array, init, model, node, normal, value

# -- the choice ------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Position], int]:
    """Positions over at most ten weights, some of them shared, some cuts illegal; and a limit."""
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=10))
    pool = [(f"w{index}", size) for index, size in enumerate(sizes)]
    reads = st.lists(st.sampled_from(pool), max_size=3).map(tuple)
    made = st.builds(Position, reads, st.none() | st.integers(0, 20))
    return draw(st.lists(made, max_size=30)), draw(st.integers(1, 250))


def held(nodes: Sequence[Position]) -> int:
    return sum({name: size for position in nodes for name, size in position.weights}.values())


@given(problems())
def test_every_node_is_in_exactly_one_segment_and_none_is_empty(problem: tuple[list[Position], int]) -> None:
    nodes, limit = problem
    ends = cut(nodes, limit)
    assert ends == sorted(set(ends))
    assert ends[-1] == len(nodes)
    assert ends[0] > 0 or not nodes
    assert all(nodes[end - 1].crossing is not None for end in ends[:-1])


@given(problems())
def test_only_what_cannot_be_divided_exceeds_the_limit(problem: tuple[list[Position], int]) -> None:
    nodes, limit = problem
    ends = cut(nodes, limit)
    for start, end in zip([0, *ends], ends, strict=False):
        if held(nodes[start:end]) > limit:
            assert all(position.crossing is None for position in nodes[start : end - 1])


@given(problems())
def test_a_cut_stands_where_least_crosses_among_the_well_filled(problem: tuple[list[Position], int]) -> None:
    nodes, limit = problem
    ends = cut(nodes, limit)
    for start, end in zip([0, *ends], ends, strict=False):
        if held(nodes[start:]) <= limit:
            assert end == len(nodes)
            continue
        crossing = {at + 1: nodes[at].crossing for at in range(start, len(nodes))}
        legal = {at: n for at, n in crossing.items() if n is not None and held(nodes[start:at]) <= limit}
        full = {at: n for at, n in legal.items() if held(nodes[start:at]) >= WORTHWHILE_FILL * limit}
        if not legal:
            continue
        among = full or {max(legal): legal[max(legal)]}
        assert end == max(at for at, n in among.items() if n == min(among.values()))


def test_a_weight_that_is_read_again_counts_once() -> None:
    tied = Position((("table", 80),), 1)
    assert cut([tied, Position((("w", 15),), 1), tied], 100) == [3]
    assert cut([tied, Position((("w", 25),), 1), tied], 100) == [1, 2, 3]


# -- models whose values jump over cuts ----------------------------------------------------------------------------


def unet() -> onnx.ModelProto:
    """Three levels down and up; the first skip crosses almost every cut."""
    nodes, weights, skips, current = [], [], [], "x"

    def conv(name: str, data: str, taken: int, made: int) -> str:
        nodes.append(node("Conv", [data, f"{name}.w"], [f"{name}.c"], pads=[1, 1, 1, 1]))
        nodes.append(node("Relu", [f"{name}.c"], [name]))
        weights.append(init(f"{name}.w", normal(made, taken, 3, 3, seed=len(weights)) / 8))
        return name

    for level, (taken, made) in enumerate(((3, 8), (8, 12), (12, 16))):
        skips.append(conv(f"down{level}", current, taken, made))
        nodes.append(node("MaxPool", [skips[-1]], [f"pool{level}"], kernel_shape=[2, 2], strides=[2, 2]))
        current = f"pool{level}"
    current = conv("middle", current, 16, 16)
    for level, (taken, skip, made) in enumerate(((16, 16, 12), (12, 12, 8), (8, 8, 4))):
        weights.append(init(f"grow{level}.w", normal(taken, taken, 2, 2, seed=len(weights)) / 8))
        nodes.append(node("ConvTranspose", [current, f"grow{level}.w"], [f"grow{level}"], strides=[2, 2]))
        nodes.append(node("Concat", [f"grow{level}", skips[-1 - level]], [f"joined{level}"], axis=1))
        current = conv(f"up{level}", f"joined{level}", taken + skip, made)
    return model(nodes, [value("x", [1, 3, 32, 32])], [value(current, None)], weights)


def tied() -> onnx.ModelProto:
    """An embedding that is also the output matrix."""
    nodes = [node("Gather", ["table", "i"], ["h0"])]
    weights = [init("table", normal(64, 32))]
    for layer in range(4):
        nodes += [node("MatMul", [f"h{layer}", f"w{layer}"], [f"p{layer}"]), node("Tanh", [f"p{layer}"], [f"t{layer}"])]
        nodes += [node("Add", [f"t{layer}", f"h{layer}"], [f"h{layer + 1}"])]
        weights.append(init(f"w{layer}", normal(32, 32, seed=layer + 1) / 6))
    nodes += [node("Gemm", ["h4", "table"], ["y"], transB=1)]
    return model(nodes, [value("i", [5], TensorProto.INT64)], [value("y", [5, 64])], weights)


def captured() -> onnx.ModelProto:
    """An If whose bodies read a value made long before it, a weight, and a graph input."""
    then = helper.make_graph(
        [node("MatMul", ["a", "v"], ["t"]), node("Add", ["t", "x"], ["u"])], "then", [], [value("u", [2, 32])]
    )
    inner = helper.make_graph([node("Neg", ["a"], ["n"])], "inner", [], [value("n", [2, 32])])
    same = helper.make_graph([node("Identity", ["x"], ["s"])], "same", [], [value("s", [2, 32])])
    other = helper.make_graph(
        [node("If", ["c"], ["e"], then_branch=inner, else_branch=same)], "else", [], [value("e", [2, 32])]
    )
    nodes = [
        node("MatMul", ["x", "w0"], ["a"]),
        node("MatMul", ["a", "w1"], ["b"]),
        node("MatMul", ["b", "w2"], ["d"]),
        node("ReduceMax", ["d"], ["m"], keepdims=0),
        node("Greater", ["m", "zero"], ["c"]),
        node("If", ["c"], ["z"], then_branch=then, else_branch=other),
        node("MatMul", ["z", "w3"], ["y"]),
    ]
    weights = [init(name, normal(32, 32, seed=at) / 6) for at, name in enumerate(("w0", "w1", "w2", "w3", "v"))]
    return model(nodes, [value("x", [2, 32])], [value("y", [2, 32])], [*weights, init("zero", np.float32(0))])


def cached() -> onnx.ModelProto:
    """A decoder step: every layer takes its past and gives it back, one row longer."""
    nodes, weights, outputs, current = [], [], [value("h3", [1, 32])], "x"
    inputs = [value("x", [1, 32])]
    for layer in range(3):
        p = f"l{layer}."
        weights += [init(p + name, normal(32, 32, seed=3 * layer + at) / 6) for at, name in enumerate("qkv")]
        nodes += [node("MatMul", [current, p + name], [p + name + "1"]) for name in "qkv"]
        for name in "kv":
            inputs.append(value(f"past.{name}{layer}", [4, 32]))
            outputs.append(value(f"present.{name}{layer}", [5, 32]))
            nodes.append(node("Concat", [f"past.{name}{layer}", p + name + "1"], [f"present.{name}{layer}"], axis=0))
        nodes += [
            node("Transpose", [f"present.k{layer}"], [p + "t"], perm=[1, 0]),
            node("MatMul", [p + "q1", p + "t"], [p + "scores"]),
            node("Softmax", [p + "scores"], [p + "weights"], axis=-1),
            node("MatMul", [p + "weights", f"present.v{layer}"], [p + "context"]),
            node("Add", [p + "context", current], [f"h{layer + 1}"]),
        ]
        current = f"h{layer + 1}"
    return model(nodes, inputs, outputs, weights)


def towers() -> onnx.ModelProto:
    """Two independent chains that meet in the last operator."""
    nodes, weights = [], []
    for side in "ab":
        current = side
        for layer in range(4):
            nodes.append(node("MatMul", [current, f"{side}{layer}.w"], [f"{side}{layer}"]))
            weights.append(init(f"{side}{layer}.w", normal(32, 32, seed=len(weights)) / 6))
            current = f"{side}{layer}"
    nodes.append(node("Mul", ["a3", "b3"], ["y"]))
    return model(nodes, [value("a", [2, 32]), value("b", [2, 32])], [value("y", [2, 32])], weights)


def early() -> onnx.ModelProto:
    """Outputs made at once: one is read at the end again, one by nobody."""
    nodes = [node("MatMul", ["x", "w0"], ["first"]), node("Relu", ["first"], ["second"])]
    nodes += [node("MatMul", [f"h{i}" if i else "first", f"w{i + 1}"], [f"h{i + 1}"]) for i in range(4)]
    nodes.append(node("Add", ["h4", "first"], ["y"]))
    weights = [init(f"w{i}", normal(32, 32, seed=i) / 6) for i in range(5)]
    return model(nodes, [value("x", [2, 32])], [value(n, [2, 32]) for n in ("y", "second", "first")], weights)


def unmade() -> onnx.ModelProto:
    """Outputs that are an input and a weight, and an input that nobody reads."""
    nodes = [node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [f"h{i + 1}"]) for i in range(4)]
    inputs = [value("x", [2, 32]), value("unread", [3]), value("handed_on", [4])]
    outputs = [value("h4", [2, 32]), value("handed_on", [4]), value("w1", [32, 32])]
    return model(nodes, inputs, outputs, [init(f"w{i}", normal(32, 32, seed=i) / 6) for i in range(4)])


MODELS = (unet, tied, captured, cached, towers, early, unmade)


def session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(proto: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    loaded = session(proto)
    names = [output.name for output in loaded.get_outputs()]
    return dict(zip(names, loaded.run(names, dict(inputs)), strict=True))


@pytest.mark.parametrize("share", [2, 4, 8, 0], ids=["half", "quarter", "eighth", "all cuts"])
@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_segments_one_after_the_other_are_the_model(build: Callable[[], onnx.ModelProto], share: int) -> None:
    proto = build()
    whole = ir.from_proto(proto)
    run_passes(whole, NORMALIZE)
    total = sum(v.const_value.nbytes for v in whole.graph.initializers.values() if v.const_value is not None)
    limit = total // share if share else 1
    ends = cut(positions(whole, static_sizes(whole)), limit)
    parts = segments(whole, ends)
    assert len(parts) >= (4 if share in (4, 8, 0) else 2)
    assert [part.end for part in parts] == ends

    rng = np.random.default_rng(0)
    sample: dict[str, Array] = {}
    for entry in proto.graph.input:
        shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        whole_numbers = entry.type.tensor_type.elem_type == TensorProto.INT64
        sample[entry.name] = rng.integers(0, 9, shape) if whole_numbers else normal(*shape, seed=len(sample) + 50)
    expected = run(ir.to_proto(whole), sample)
    for name, array in run(proto, sample).items():
        np.testing.assert_array_equal(expected[name], array)

    values = dict(sample)
    for part in parts:
        made = run(ir.to_proto(extract(whole, part)), {name: values[name] for name in part.inputs})
        assert set(made) == set(part.outputs)
        values.update(made)
    for output in proto.graph.output:
        np.testing.assert_array_equal(values[output.name], expected[output.name])


@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_what_crosses_is_what_the_next_segments_take(build: Callable[[], onnx.ModelProto]) -> None:
    whole = ir.from_proto(build())
    run_passes(whole, NORMALIZE)
    sizes = static_sizes(whole)
    found = positions(whole, sizes)
    for end in range(1, len(found)):
        before, behind = segments(whole, [end, len(found)])
        crossing = set(before.outputs) & set(behind.inputs)
        assert found[end - 1].crossing == sum(sizes[name] for name in crossing)


def test_a_value_of_unknown_size_crosses_no_cut() -> None:
    whole = ir.from_proto(towers())
    run_passes(whole, NORMALIZE)
    sizes = static_sizes(whole)
    known = positions(whole, sizes)
    del sizes["a3"]
    blocked = positions(whole, sizes)
    made = next(at for at, n in enumerate(whole.graph) if n.outputs[0].name == "a3")
    assert [p.crossing for p in blocked[:made]] == [p.crossing for p in known[:made]]
    assert all(p.crossing is None for p in blocked[made:-1])
    assert blocked[-1].crossing == 0
    free = positions(whole, {n: s for n, s in sizes.items() if n != "a3"}, forced=["a3"])
    assert all(p.crossing is not None for p in free)


def test_weights_of_a_segment_stand_in_the_order_of_the_whole_model() -> None:
    names = [f"w{index}" for index in range(40)]
    nodes = [node("Add", [f"a{index}", name], [f"a{index + 1}"]) for index, name in enumerate(names)]
    weights = [init(name, normal(4)) for name in names]
    whole = ir.from_proto(model(nodes, [value("a0", [4])], [value("a40", [4])], weights))
    cuts = segments(whole, [20, 40])
    assert [list(extract(whole, part).graph.initializers) for part in cuts] == [names[:20], names[20:]]


def test_what_a_target_cannot_run_gets_segments_of_its_own() -> None:
    whole = ir.from_proto(unet())
    run_passes(whole, NORMALIZE)
    sizes = static_sizes(whole)
    found = isolated(whole, lambda each: f"no {each.op_type} there" if each.op_type in ("Concat", "MaxPool") else "")
    assert len(found) == 6
    assert {each.reason for each in found} == {"no Concat there", "no MaxPool there"}
    forced = frozenset({each.start for each in found} | {each.end for each in found}) - {0}
    order = order_of(whole, sizes, {}, [0] * len(whole.graph))
    cuts = best_cuts(order, Rules(forced=forced), Rates(1e9, 1e9, 1))
    parts = segments(whole, cuts.ends)
    nodes = list(whole.graph)
    for part in parts:
        kinds = {node.op_type for node in nodes[part.start : part.end]}
        assert len(kinds) == 1 or not kinds & {"Concat", "MaxPool"}
    assert {(part.start, part.end) for part in parts} >= {(each.start, each.end) for each in found}
    # Nothing else is cut: each further segment would cost a start.
    assert len(parts) == len(forced) + 1
    values: dict[str, Array] = {"x": normal(1, 3, 32, 32)}
    expected = run(ir.to_proto(whole), values)
    for part in parts:
        values |= run(ir.to_proto(extract(whole, part)), {name: values[name] for name in part.inputs})
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array)


def test_reasons_that_differ_part_neighbours() -> None:
    whole = ir.from_proto(unet())
    reasons = [f"{each.op_type}" for each in whole.graph]
    found = isolated(whole, lambda each: each.op_type)
    assert [reason for each in found for reason in [each.reason] * (each.end - each.start)] == reasons
    assert all(before.reason != after.reason for before, after in itertools.pairwise(found))
