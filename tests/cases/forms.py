"""Small models, each of a form that has broken an ONNX tool, and inputs for them.

A form must keep its results under every scheme. What onnxruntime itself refuses to load has its results beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper

from tests.support.models import Array, init, model, node, normal, value


@dataclasses.dataclass(frozen=True)
class Form:
    """`quantized`: operators that every quantizing scheme must have quantized; `shapes`: what `--shape` says;
    `reference`: results where the source itself cannot be loaded; `warns`: a part of what the compiler must say."""

    build: Callable[[], onnx.ModelProto]
    quantized: frozenset[str] = frozenset()
    shapes: tuple[str, ...] = ()
    reference: Callable[[Mapping[str, Array]], dict[str, Array]] | None = None
    warns: str = ""


def samples_of(proto: onnx.ModelProto, seed: int, open_size: int = 3) -> dict[str, Array]:
    """Inputs of a model; whatever its ranges are, `open_size` must lie in them."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    made: dict[str, Array] = {}
    for index, entry in enumerate(proto.graph.input):
        if entry.name in weights:
            continue
        kind = entry.type.tensor_type
        shape = [dim.dim_value if dim.dim_value > 0 else open_size for dim in kind.shape.dim]
        if kind.elem_type == T.STRING:
            made[entry.name] = np.full(shape, "ab"[seed % 2], object)
        elif kind.elem_type == T.BOOL:
            made[entry.name] = np.full(shape, seed % 2 == 0)
        elif kind.elem_type == T.INT64:
            made[entry.name] = np.random.default_rng(seed + index).integers(0, 9, shape)
        else:
            made[entry.name] = normal(*shape, seed=seed + index)
    return made


def chained(op: str, *weights: str, **attributes: Any) -> list[onnx.NodeProto]:
    """`op` after `op` from x to y, one for each weight."""
    ends = ["x", *(f"h{index}" for index in range(len(weights) - 1)), "y"]
    return [node(op, [ends[index], name], [ends[index + 1]], **attributes) for index, name in enumerate(weights)]


def square(name: str, seed: int = 0) -> onnx.TensorProto:
    return init(name, normal(40, 40, seed=seed) / 6)


X, Y = [value("x", [2, 40])], [value("y", None)]


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


def bfloat16_weight() -> onnx.ModelProto:
    weight = helper.make_tensor("w", T.BFLOAT16, [40, 40], normal(40, 40).reshape(-1).tolist())
    nodes = [node("Cast", ["w"], ["f"], to=1), node("MatMul", ["x", "f"], ["y"])]
    return model(nodes, [value("x", [2, 40])], [value("y", None)], [weight])


def strings() -> onnx.ModelProto:
    constant = onnx.numpy_helper.from_array(np.array(["a", "b"], object), "k")
    return model(
        [node("Equal", ["s", "k"], ["y"])], [value("s", [2], T.STRING)], [value("y", [2], T.BOOL)], [constant],
        opset=19, ir_version=9,
    )  # fmt: skip


def passthrough() -> onnx.ModelProto:
    nodes = [node("Constant", [], ["c"], value=init("", np.array([7])))]
    return model(nodes, [value("x", [3])], [value("x", [3]), value("c", [1], T.INT64)])


def constant_floats() -> onnx.ModelProto:
    nodes = [
        node("Constant", [], ["flat"], value_floats=normal(1600).tolist()),
        node("Constant", [], ["shape"], value_ints=[40, 40]),
        node("Reshape", ["flat", "shape"], ["w"]),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    return model(nodes, X, Y)


def branches_and_what_they_share() -> onnx.ModelProto:
    """One weight outside and inside, and a value of the outer graph."""
    then = helper.make_graph([node("MatMul", ["x", "w"], ["r1"], name="same")], "then", [], [value("r1", [2, 40])])
    other = helper.make_graph([node("Relu", ["before"], ["r2"], name="same")], "else", [], [value("r2", [2, 40])])
    nodes = [
        node("MatMul", ["x", "w"], ["before"]),
        node("If", ["c"], ["z"], then_branch=then, else_branch=other),
        node("Add", ["z", "before"], ["y"]),
    ]
    return model(nodes, [*X, value("c", [], T.BOOL)], Y, [square("w")])


def scan(*, weighted: bool) -> onnx.ModelProto:
    step = [node("MatMul", ["s", "w"], ["m"]), node("Add", ["m", "xi"], ["so"])] if weighted else [
        node("Add", ["s", "xi"], ["so"])
    ]  # fmt: skip
    body = helper.make_graph(
        [*step, node("Identity", ["so"], ["yo"])],
        "body",
        [value("s", [1, 40]), value("xi", [1, 40])],
        [value("so", [1, 40]), value("yo", [1, 40])],
        [square("w")] if weighted else [],
    )
    nodes = [node("Scan", ["s0", "x"], ["sf", "y"], num_scan_inputs=1, body=body)]
    inputs = [value("s0", [1, 40]), value("x", [3, 1, 40])]
    return model(nodes, inputs, [value("sf", [1, 40]), value("y", [3, 1, 40])])


def twice_the_name(name: str) -> onnx.ModelProto:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name=name),
        node("Relu", ["a"], ["b"], name=name),
        node("MatMul", ["b", "v"], ["y"], name=name),
    ]
    return model(nodes, X, Y, [square("w"), square("v", 1)])


def twice_the_name_result(inputs: Mapping[str, Array]) -> dict[str, Array]:
    w, v = normal(40, 40) / 6, normal(40, 40, seed=1) / 6
    return {"y": np.maximum(inputs["x"] @ w, 0) @ v}


def with_shape(shape: list[int | str | None], declared: list[int] | None = None) -> onnx.ModelProto:
    return model([node("MatMul", ["x", "w"], ["y"])], [value("x", shape)], [value("y", declared)], [square("w")])


def empty() -> onnx.ModelProto:
    """A tensor without elements on the way of a quantized operator."""
    nodes = [node("Concat", ["x", "z"], ["a"], axis=0), node("MatMul", ["a", "w"], ["y"])]
    return model(nodes, X, Y, [init("z", np.zeros((0, 40), np.float32)), square("w")])


def scalar() -> onnx.ModelProto:
    nodes = [node("Mul", ["x", "s"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    return model(nodes, X, Y, [init("s", np.float32(2)), square("w")])


def wide_integers() -> onnx.ModelProto:
    add = node("Add", ["x", "k"], ["y"])
    return model([add], [value("x", [3], T.INT64)], [value("y", [3], T.INT64)], [init("k", np.array([1 << 40]))])


def float8_weight() -> onnx.ModelProto:
    weight = helper.make_tensor("w", T.FLOAT8E4M3FN, [40, 40], normal(40, 40).reshape(-1).tolist())
    nodes = [node("DequantizeLinear", ["w", "s"], ["f"]), node("MatMul", ["x", "f"], ["y"])]
    return model(nodes, X, Y, [weight, init("s", np.float32(1))], opset=19, ir_version=9)


PLACES = [1, 41, 82, 123, 1599]


def sparse_tensor(name: str, by_axis: bool) -> onnx.SparseTensorProto:
    places = np.array(PLACES)
    indices = np.stack([places // 40, places % 40], axis=1) if by_axis else places
    return helper.make_sparse_tensor(init(name, normal(len(PLACES))), init("", indices), [40, 40])


def sparse_initializer(by_axis: bool) -> onnx.ModelProto:
    made = model([node("MatMul", ["x", "w"], ["y"])], X, Y)
    made.graph.sparse_initializer.append(sparse_tensor("w", by_axis))
    return made


def sparse_constant() -> onnx.ModelProto:
    nodes = [
        node("Constant", [], ["w"], sparse_value=sparse_tensor("w", by_axis=False)),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    return model(nodes, X, Y)


def sparse_in_a_branch() -> onnx.ModelProto:
    then = helper.make_graph([node("MatMul", ["x", "w"], ["t"])], "then", [], [value("t", [2, 40])])
    then.sparse_initializer.append(sparse_tensor("w", by_axis=True))
    other = helper.make_graph([node("Neg", ["x"], ["e"])], "else", [], [value("e", [2, 40])])
    branch = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    return model([branch], [*X, value("c", [], T.BOOL)], [value("y", [2, 40])])


def local_function() -> onnx.ModelProto:
    """A domain of its own, whose operator the model itself defines, with a weight inside of it."""
    body = [
        node("Constant", [], ["w"], value=square("")),
        node("MatMul", ["a", "w"], ["b"]),
    ]
    imports = [helper.make_opsetid("", 17)]
    function = helper.make_function("com.acme", "Layer", ["a"], ["b"], body, imports)
    nodes = [node("Layer", ["x"], ["a"], domain="com.acme"), node("Layer", ["a"], ["y"], domain="com.acme")]
    return model(nodes, X, Y, functions=[function], domains=["com.acme"])


def aligned(op: str, axis: int | None, right: list[int], constant: bool) -> onnx.ModelProto:
    """Broadcasting as it was before opset 7."""
    attributes = {} if axis is None else {"axis": axis}
    operand = [value("b", right)]
    return model(
        [node(op, ["x", "b"], ["y"], broadcast=1, **attributes)],
        [value("x", [2, 3, 4, 5]), *operand],
        [value("y", [2, 3, 4, 5])],
        [init("b", normal(*right, seed=3))] if constant else [],
        opset=6,
        ir_version=3,
    )


def align(function: Callable[[Array, Array], Array], axis: int, right: list[int]) -> Callable[..., dict[str, Array]]:
    def result(inputs: Mapping[str, Array]) -> dict[str, Array]:
        b = inputs.get("b", normal(*right, seed=3))
        return {"y": function(inputs["x"], b.reshape(*b.shape, *[1] * (4 - axis % 4 - b.ndim)))}

    return result


def old_network() -> onnx.ModelProto:
    """Opset 6: batch normalization, Dropout and Gemm with the attributes of that time."""
    nodes = [
        node("Conv", ["x", "k"], ["a"]),
        node("BatchNormalization", ["a", "s", "t", "m", "v"], ["b"], is_test=1),
        node("Dropout", ["b"], ["d"], is_test=1),
        node("Flatten", ["d"], ["f"]),
        node("Gemm", ["f", "w", "c"], ["y"], broadcast=1),
    ]
    weights = [
        init("k", normal(16, 8, 3, 3) / 8), init("s", normal(16)), init("t", normal(16, seed=1)),
        init("m", normal(16, seed=2)), init("v", np.abs(normal(16, seed=3)) + 1),
        init("w", normal(64, 32) / 8), init("c", normal(32)),
    ]  # fmt: skip
    return model(nodes, [value("x", [1, 8, 4, 4])], Y, weights, opset=6, ir_version=3)


def old_network_result(inputs: Mapping[str, Array]) -> dict[str, Array]:
    kernel, x = normal(16, 8, 3, 3) / 8, inputs["x"][0]
    places = [(i, j) for i in range(2) for j in range(2)]
    a = np.array([[(k * x[:, i : i + 3, j : j + 3]).sum() for i, j in places] for k in kernel])
    s, t, m, v = (normal(16, seed=seed)[:, None] for seed in range(4))
    b = (a - m) / np.sqrt(np.abs(v) + 1 + 1e-5) * s + t
    return {"y": (b.reshape(1, -1) @ (normal(64, 32) / 8) + normal(32)).astype(np.float32)}


def upsample(opset: int) -> onnx.ModelProto:
    """Gone from opset 10; its factors were an attribute before opset 9, an input then."""
    weights, inputs, factors = [init("k", normal(16, 16, 3, 3) / 12)], ["x"], [1.0, 1.0, 2.0, 2.0]
    if opset >= 9:
        weights.append(init("s", np.array(factors, np.float32)))
        inputs.append("s")
    grow = node("Upsample", inputs, ["a"], **({} if opset >= 9 else {"scales": factors}))
    nodes = [grow, node("Conv", ["a", "k"], ["y"])]
    return model(nodes, [value("x", [1, 16, 4, 4])], Y, weights, opset=opset, ir_version=4)


# What lowering would call its own, of a weight named w and of nodes named n0, n1, ...
GENERATED = [
    "w.q4", "w.q8", "w.scale", "w.zero", "w.int8", "w.T", "w.T.q4", "w.T.q8", "w.T.scale", "w.T.zero", "w.T.int8",
    "w_scale", "w_zero_point", "w_quantized", "w_QuantizeLinear_Output", "w_DequantizeLinear_Output",
]  # fmt: skip


def names_of_weights() -> onnx.ModelProto:
    """Weights that have the names which the compiler would make for `w`, which is used both ways."""
    names = [*GENERATED, "w"]
    nodes = chained("MatMul", *names)
    nodes[-1].output[0] = "last"
    nodes.append(node("Gemm", ["last", "w"], ["y"], transB=1))
    return model(nodes, X, Y, [square(name, seed) for seed, name in enumerate(names)])


def names_of_values() -> onnx.ModelProto:
    """The same names, for what is computed."""
    ends = ["x", *GENERATED, "n1.out", "n2.bias", "n3.quantized", "val_0", "v", "y"]
    nodes = [
        node("Gemm", [taken, "w", "c"], [made], name=f"n{index}", transB=1)
        for index, (taken, made) in enumerate(itertools.pairwise(ends))
    ]
    return model(nodes, X, Y, [init("w", normal(40, 40) / 20), init("c", normal(2, 40))])


def names_of_kernels() -> onnx.ModelProto:
    kernels, made = ["w", "w.float32", "w.T", "c2.weight", "w"], ["b0", "c1.weight", "w.int8", "w.scale", "y"]
    nodes = [
        node("Conv", [data, kernel, "b"], [result], name=f"c{index}", pads=[1, 1, 1, 1])
        for index, (data, kernel, result) in enumerate(zip(["x", *made[:-1]], kernels, made, strict=True))
    ]
    weights = [init(name, normal(16, 16, 3, 3, seed=seed) / 12) for seed, name in enumerate(kernels[:-1])]
    return model(nodes, [value("x", [1, 16, 5, 5])], Y, [*weights, init("b", normal(16))])


def names_of_halves() -> onnx.ModelProto:
    nodes = [
        node("Cast", ["x"], ["x.wide"], to=T.FLOAT16),
        node("MatMul", ["x.wide", "w"], ["w.wide"]),
        node("Add", ["w.wide", "y.wide"], ["y.narrow"]),
        node("Cast", ["y.narrow"], ["y"], to=T.FLOAT),
    ]
    weights = [init("w", (normal(40, 40) / 6).astype(np.float16)), init("y.wide", normal(40).astype(np.float16))]
    return model(nodes, X, Y, weights)


def data_dependent() -> onnx.ModelProto:
    nodes = [node("Relu", ["x"], ["a"]), node("NonZero", ["a"], ["z"]), node("Transpose", ["z"], ["y"])]
    return model(nodes, [value("x", [8])], [value("y", None, T.INT64)])


def vectors() -> onnx.ModelProto:
    nodes = [node("MatMul", ["w", "x"], ["a"]), node("MatMul", ["a", "v"], ["y"])]
    return model(nodes, [value("x", [40, 50])], [value("y", [])], [init("w", normal(40)), init("v", normal(50))])


def scaled_gemm(bias: list[int], **attributes: Any) -> onnx.ModelProto:
    weights = [square("w"), init("c", normal(*bias, seed=2))]
    rows = 40 if attributes.get("transA") else 2
    gemm = node("Gemm", ["x", "w", "c"], ["y"], alpha=0.5, beta=2.0, **attributes)
    return model([gemm], [value("x", [rows, 40])], Y, weights)


def dead_ends() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Exp", ["x"], ["dead"]), node("Add", ["dead", "u"], ["deader"])]
    return model(nodes, X, Y, [square("w"), init("u", normal(40)), init("unused", normal(64, 64))])


def untyped_output() -> onnx.ModelProto:
    made = model([node("MatMul", ["x", "w"], ["y"])], X, Y, [square("w")])
    made.graph.output[0].ClearField("type")
    return made


def unread_input() -> onnx.ModelProto:
    inputs = [value("training", [], T.BOOL), *X, value("mask", ["n"], T.INT64)]
    return model([node("MatMul", ["x", "w"], ["y"])], inputs, Y, [square("w")])


def dropout() -> onnx.ModelProto:
    nodes = [node("Dropout", ["x", "r", "t"], ["d", "mask"]), node("MatMul", ["d", "w"], ["y"])]
    return model(nodes, X, Y, [init("r", np.float32(0.5)), init("t", np.array(False)), square("w")])


def padded(auto_pad: str) -> onnx.ModelProto:
    conv = node("Conv", ["x", "w"], ["y"], auto_pad=auto_pad, strides=[2, 2])
    return model([conv], [value("x", [1, 16, 5, 7])], Y, [init("w", normal(16, 16, 2, 2) / 8)])


def between() -> onnx.ModelProto:
    """An intermediate value is an output too, in front of the one that is made of it."""
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])]
    return model(nodes, X, [value("y", None), value("a", None)], [square("w")])


MATMUL, GEMM = frozenset({"MatMul"}), frozenset({"Gemm"})

FORMS: dict[str, Form] = {
    "weights are inputs before IR 4": Form(lambda: initializer_in_inputs(3), MATMUL),
    "an input with a default": Form(lambda: initializer_in_inputs(8), MATMUL, warns="inputs with a default .* 'w'"),
    "weights in Constant nodes": Form(constant_node, MATMUL),
    "weights in lists of floats": Form(constant_floats, MATMUL),
    "branches and what they share": Form(branches_and_what_they_share, MATMUL),
    "a weight in a Loop body": Form(loop_body, MATMUL),
    "Scan": Form(lambda: scan(weighted=False)),
    "a weight in a Scan body": Form(lambda: scan(weighted=True), MATMUL),
    "one weight, two orientations": Form(shared_by_matmul_and_gemm, MATMUL | GEMM),
    "nodes without names": Form(lambda: twice_the_name(""), MATMUL),
    "duplicate node names": Form(
        lambda: twice_the_name("n"), MATMUL, reference=twice_the_name_result, warns="3 nodes named 'n'"
    ),
    "an output is a weight": Form(output_is_initializer, MATMUL),
    "an intermediate value is an output": Form(between, MATMUL),
    "a dimension without value or name": Form(lambda: with_shape([None, 40]), MATMUL, ("x=1..4,40",)),
    "a dimension of minus one": Form(lambda: with_shape([-1, 40], [-1, 40]), MATMUL, ("x=1..4,40",)),
    "a tensor without elements": Form(empty, MATMUL),
    "a scalar weight": Form(scalar, MATMUL),
    "integers beyond 32 bits": Form(wide_integers),
    "strings": Form(strings),
    "bfloat16": Form(bfloat16_weight),
    "float8": Form(float8_weight),
    "a sparse initializer": Form(lambda: sparse_initializer(by_axis=False), MATMUL),
    "a sparse initializer, indices by axis": Form(lambda: sparse_initializer(by_axis=True), MATMUL),
    "a sparse constant": Form(sparse_constant, MATMUL),
    "a sparse initializer in a branch": Form(sparse_in_a_branch, MATMUL),
    "an operator defined in the model": Form(local_function, MATMUL),
    "opset 6, a channel": Form(
        lambda: aligned("Add", 1, [3], constant=True), reference=align(np.add, 1, [3]), warns="from opset 6 to 7"
    ),
    "opset 6, two axes in the middle": Form(
        lambda: aligned("Mul", 1, [3, 4], constant=False), reference=align(np.multiply, 1, [3, 4])
    ),
    "opset 6, an axis from behind": Form(
        lambda: aligned("Sub", -2, [4], constant=True), reference=align(np.subtract, -2, [4])
    ),
    "opset 6, no axis": Form(lambda: aligned("Add", None, [5], constant=False), reference=align(np.add, 3, [5])),
    "opset 6, a small network": Form(old_network, GEMM, reference=old_network_result),
    "Upsample of opset 9": Form(lambda: upsample(9)),
    "Upsample of opset 7": Form(lambda: upsample(7)),
    "hostile names": Form(hostile_names, MATMUL),
    "weights named as the compiler's own": Form(names_of_weights, MATMUL | GEMM),
    "values named as the compiler's own": Form(names_of_values, GEMM),
    "kernels named as the compiler's own": Form(names_of_kernels),
    "FP16 named as the compiler's own": Form(names_of_halves, MATMUL),
    "a wrong value_info": Form(wrong_value_info, MATMUL, warns=r"'a' is \[2,40\], not \[7,9\]"),
    "a wrong output shape": Form(lambda: with_shape([2, 40], [7, 9]), MATMUL, warns=r"'y' is \[2,40\], not \[7,9\]"),
    "a wrong output rank": Form(lambda: with_shape([2, 40], [7]), MATMUL, warns=r"'y' is \[2,40\], not \[7\]"),
    "a shape that follows from data": Form(data_dependent),
    "a weight with a batch": Form(lambda: model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", [3, 2, 40])], Y, [init("w", normal(3, 40, 16))])),
    "vectors as weights": Form(vectors),
    "Gemm with factors, bias of a row": Form(lambda: scaled_gemm([40], transB=1)),
    "Gemm with factors, bias of the result": Form(lambda: scaled_gemm([2, 40], transB=1)),
    "Gemm with factors, transposed data": Form(lambda: scaled_gemm([1, 40], transA=1)),
    "dead ends": Form(dead_ends, MATMUL),
    "Ifs thirty deep": Form(lambda: nested_ifs(30)),
    "an input that is an output": Form(passthrough),
    "a chain of 500": Form(lambda: unary(500)),
    "a weight made by ConstantOfShape": Form(generated_weight),
    "an output without a type": Form(untyped_output, MATMUL),
    "an input that nobody reads": Form(unread_input, MATMUL, ("mask=1..4",)),
    "Dropout with a mask": Form(dropout, MATMUL),
    "SAME_LOWER on odd sizes": Form(lambda: padded("SAME_LOWER")),
    "SAME_UPPER on odd sizes": Form(lambda: padded("SAME_UPPER")),
}  # fmt: skip
