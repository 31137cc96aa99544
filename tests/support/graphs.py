"""Random valid ONNX models for hypothesis: weights shared and inline, subgraphs, odd names, dynamic dims, many opsets.

What is drawn is a plan of steps; each step reads values that exist and has the shapes it needs, so that every model is
valid by construction and shrinks to a few nodes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.support.models import Array, emit, init, model, node, run, save, value

OPSETS = (9, 11, 12, 13, 15, 17, 18, 21)
WIDTHS = (1, 4, 32, 48, 64)
CHANNELS = (1, 4, 8)
ODD_NAMES = ("../../etc/x", "a:0/", "w_quantized", "x_scale", "é 名", "x" * 200)
ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class Random:
    """A model, inputs it runs on (`ROWS` rows where that axis is dynamic), and the `--shape` options it needs."""

    proto: onnx.ModelProto
    inputs: dict[str, Array]
    shapes: tuple[str, ...]

    def __repr__(self) -> str:
        steps = [f"{n.op_type}({', '.join(n.input)}) -> {', '.join(n.output)}" for n in self.proto.graph.node]
        outputs = ", ".join(output.name for output in self.proto.graph.output)
        return f"<opset {self.proto.opset_import[0].version}: {'; '.join(steps)}; outputs {outputs} {self.shapes}>"


@dataclasses.dataclass
class _Builder:
    """The graph so far. `flat`: values [rows, width]; `images`: values [1, channels, 8, 8]."""

    draw: Any
    opset: int
    rows: int | str
    nodes: list[onnx.NodeProto] = dataclasses.field(default_factory=list)
    weights: dict[str, Array] = dataclasses.field(default_factory=dict)
    flat: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    images: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    functions: list[onnx.FunctionProto] = dataclasses.field(default_factory=list)
    count: int = 0

    def pick(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def name(self, role: str) -> str:
        """A fresh name, odd now and then."""
        self.count += 1
        return f"{self.pick((*[''] * 5, *ODD_NAMES))}{role}{self.count}"

    def add(self, op: str, inputs: Sequence[str], **attributes: object) -> str:
        out = self.name("v")
        self.nodes.append(node(op, inputs, [out], name=self.pick(("", self.name("node"))), **attributes))
        return out

    def weight(self, *shape: int) -> str:
        """A weight: new, shared with an earlier use, or in a Constant node."""
        same = [name for name, array in self.weights.items() if array.shape == shape and array.dtype == np.float32]
        if same and self.draw(st.booleans()):
            return str(self.pick(same))
        seed = self.draw(st.integers(0, 99))
        array = (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(max(shape[0], 1))).astype(np.float32)
        name = self.name("w")
        if self.draw(st.integers(0, 4)) == 0:
            tensor = onnx.numpy_helper.from_array(array, name)
            self.nodes.append(node("Constant", [], [name], value=tensor))
        else:
            self.weights[name] = array
        return name

    def constant(self, array: Array) -> str:
        name = self.name("c")
        self.weights[name] = array
        return name


def _matmul(b: _Builder) -> None:
    source, width = b.pick(b.flat)
    wide = b.pick(WIDTHS)
    b.flat.append((b.add("MatMul", [source, b.weight(width, wide)]), wide))


def _gemm(b: _Builder) -> None:
    source, width = b.pick(b.flat)
    wide = b.pick(WIDTHS)
    transposed = b.draw(st.booleans())
    matrix = b.weight(wide, width) if transposed else b.weight(width, wide)
    bias = [b.weight(wide)] if b.opset < 11 or b.draw(st.booleans()) else []
    attributes = {"transB": int(transposed), "alpha": b.pick((1.0, 0.5)), "beta": b.pick((1.0, 2.0))}
    b.flat.append((b.add("Gemm", [source, matrix, *bias], **attributes), wide))


def _activation(b: _Builder) -> None:
    where = b.images if b.images and b.draw(st.booleans()) else b.flat
    source, width = b.pick(where)
    where.append((b.add(b.pick(("Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Identity")), [source]), width))


def _softmax(b: _Builder) -> None:
    source, width = b.pick(b.flat)
    b.flat.append((b.add("Softmax", [source], axis=1), width))


def _combine(b: _Builder) -> None:
    """Two values of one width, or a value and a constant."""
    source, width = b.pick(b.flat)
    others = [name for name, wide in b.flat if wide == width]
    other = b.pick(others) if b.draw(st.booleans()) else b.weight(width)
    b.flat.append((b.add(b.pick(("Add", "Mul", "Sub", "Max")), [source, other]), width))


def _concat(b: _Builder) -> None:
    (first, one), (second, two) = b.pick(b.flat), b.pick(b.flat)
    b.flat.append((b.add("Concat", [first, second], axis=1), one + two))


def _twice_transposed(b: _Builder) -> None:
    source, width = b.pick(b.flat)
    turned = b.add("Transpose", [source], perm=[1, 0])
    b.flat.append((b.add("Transpose", [turned], perm=[1, 0]), width))


def _gather(b: _Builder) -> None:
    width = b.pick(WIDTHS)
    b.flat.append((b.add("Gather", [b.weight(16, width), "ids"], axis=0), width))


def _half(b: _Builder) -> None:
    """A stretch in FP16, as mixed-precision exporters leave it."""
    source, width = b.pick(b.flat)
    wide = b.pick(WIDTHS)
    narrow = b.add("Cast", [source], to=TensorProto.FLOAT16)
    matrix = b.constant(np.linspace(-1, 1, width * wide).reshape(width, wide).astype(np.float16))
    b.flat.append((b.add("Cast", [b.add("MatMul", [narrow, matrix])], to=TensorProto.FLOAT), wide))


def _branch(b: _Builder) -> None:
    """An If whose branches capture a value and a weight of the graph around them."""
    source, width = b.pick(b.flat)
    wide = b.pick(WIDTHS)
    matrix, bodies = b.weight(width, wide), []
    for role in ("then", "else"):
        inner, out = b.name("v"), b.name("v")
        nodes = [node("MatMul", [source, matrix], [inner]), node("Relu" if role == "then" else "Neg", [inner], [out])]
        bodies.append(helper.make_graph(nodes, role, [], [value(out, [b.rows, wide])]))
    out = b.name("v")
    b.nodes.append(node("If", ["flag"], [out], then_branch=bodies[0], else_branch=bodies[1]))
    b.flat.append((out, wide))


def _loop(b: _Builder) -> None:
    """A Loop of two rounds with a square weight of the graph around it."""
    source, width = b.pick(b.flat)
    matrix = b.weight(width, width)
    i, keep, state, again, made, new, out = (b.name("v") for _ in range(7))
    body = helper.make_graph(
        [node("Identity", [keep], [again]), node("MatMul", [state, matrix], [made]), node("Tanh", [made], [new])],
        "body",
        [value(i, [], TensorProto.INT64), value(keep, [], TensorProto.BOOL), value(state, [b.rows, width])],
        [value(again, [], TensorProto.BOOL), value(new, [b.rows, width])],
    )
    b.nodes.append(node("Loop", [b.constant(np.array(2)), "", source], [out], body=body))
    b.flat.append((out, width))


def _function(b: _Builder) -> None:
    """A call of a model-local function with a weight inside."""
    source, width = b.pick(b.flat)
    name = f"Block{len(b.functions)}"
    tensor = onnx.numpy_helper.from_array(np.eye(width, dtype=np.float32) / 2, "m")
    nodes = [node("Constant", [], ["m"], value=tensor), node("MatMul", ["x", "m"], ["y"])]
    b.functions.append(helper.make_function("local", name, ["x"], ["y"], nodes, [helper.make_opsetid("", b.opset)]))
    out = b.name("v")
    b.nodes.append(node(name, [source], [out], domain="local"))
    b.flat.append((out, width))


def _conv(b: _Builder) -> None:
    source, channels = b.pick(b.images)
    group = channels if channels > 1 and b.draw(st.booleans()) else 1
    wide = channels if group > 1 else b.pick(CHANNELS)
    inputs = [source, b.weight(wide, channels // group, 3, 3)]
    if b.draw(st.booleans()):
        inputs.append(b.weight(wide))
    b.images.append((b.add("Conv", inputs, kernel_shape=[3, 3], pads=[1, 1, 1, 1], group=group), wide))


def _transposed_conv(b: _Builder) -> None:
    source, channels = b.pick(b.images)
    wide = b.pick(CHANNELS)
    out = b.add("ConvTranspose", [source, b.weight(channels, wide, 3, 3)], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    b.images.append((out, wide))


def _pool(b: _Builder) -> None:
    source, channels = b.pick(b.images)
    op = b.pick(("MaxPool", "AveragePool"))
    b.images.append((b.add(op, [source], kernel_shape=[3, 3], pads=[1, 1, 1, 1]), channels))


def _dead(b: _Builder) -> None:
    source, _ = b.pick(b.flat)
    b.add("Exp", [source])
    b.weight(64, 64)


_STEPS = (
    _matmul, _matmul, _gemm, _activation, _softmax, _combine, _concat, _twice_transposed, _gather, _half, _branch,
    _loop, _function, _conv, _conv, _transposed_conv, _pool, _dead,
)  # fmt: skip


@st.composite
def models(draw: st.DrawFn, max_steps: int = 12) -> Random:
    """A random model with 1 to 3 outputs, some of which may be inner values too."""
    opset = draw(st.sampled_from(OPSETS))
    dynamic = draw(st.booleans())
    rows: int | str = ROWS if dynamic else 3
    b = _Builder(draw, opset, rows)
    b.flat.append(("x", 32))
    b.images.append(("image", 4))
    for _ in range(draw(st.integers(1, max_steps))):
        step = draw(st.sampled_from(_STEPS))
        # Functions need IR 8; before opset 11 branches could not be empty of inputs in every runtime.
        if step is _function and opset < 15:
            continue
        step(b)
    made = [(n, [rows, width]) for n, width in b.flat[1:]] + [(n, [1, c, 8, 8]) for n, c in b.images[1:]]
    if not made:
        made = [(b.add("Relu", ["x"]), [rows, 32])]
    chosen = dict([made[-1], *draw(st.lists(st.sampled_from(made), max_size=2))])
    outputs = [value(name, shape) for name, shape in chosen.items()]
    inputs = [
        value("x", [rows, 32]),
        value("image", [1, 4, 8, 8]),
        value("ids", [rows], TensorProto.INT64),
        value("flag", [], TensorProto.BOOL),
    ]
    weights = [init(name, array) for name, array in b.weights.items()]
    proto = model(
        b.nodes,
        inputs,
        outputs,
        weights,
        opset,
        draw(st.sampled_from((4, 7, 8) if not b.functions else (8, 9))) if opset < 15 or b.functions else 8,
        b.functions,
        ["local"] if b.functions else [],
    )
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    size = draw(st.integers(1, 4)) if dynamic else 3
    given: dict[str, Array] = {
        "x": rng.standard_normal((size, 32)).astype(np.float32),
        "image": rng.standard_normal((1, 4, 8, 8)).astype(np.float32),
        "ids": rng.integers(0, 16, size),
        "flag": np.array(draw(st.booleans())),
    }
    return Random(proto, given, (f"{ROWS}=1..4",) if dynamic else ())


# The float scheme changes the order of sums only; what is FP16 in the source is computed in FP32 after compiling.
TOLERANCE = 1e-3
HALF_TOLERANCE = 3e-2


def compile_and_compare(drawn: Random, scheme: str) -> None:
    """Emit the model, run it beside its source; AssertionError where shapes, types or finiteness differ, or, without
    quantization, values by more than their tolerance."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = save(folder, drawn.proto)
        expected = run(path, drawn.inputs)
        segment, _ = emit(path, scheme, folder, *drawn.shapes)
        made = run(segment, drawn.inputs)
    assert list(made) == list(expected)
    half = any(tensor.data_type == TensorProto.FLOAT16 for tensor in drawn.proto.graph.initializer)
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    for output, reference in expected.items():
        found = made[output]
        assert (found.shape, found.dtype) == (reference.shape, reference.dtype)
        assert np.isfinite(found).all() or not np.isfinite(reference).all()
        if scheme == "fp32":
            scale = float(np.abs(reference).max(initial=0))
            np.testing.assert_allclose(found, reference, rtol=tolerance, atol=tolerance * scale + 1e-6)
