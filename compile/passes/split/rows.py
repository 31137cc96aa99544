"""Regions of a graph computed a few rows at a time, so that what is large inside them is never there whole.

A region is a set of nodes of which one value leaves. Its rows lie along one axis, counted from the end because
operands may have fewer axes: queries of attention ([.., Tq, Tk], axis -2), rows of an image ([N, C, H, W], axis -2).
For rows [low, high) of its result, every operator says which rows of each operand it needs:

    elementwise, Softmax, left side of a product, ...   the same rows
    Conv, pooling                                       [low * s - p, (high - 1) * s - p + (k - 1) * d + 1), inside the
                                                        image; what lies outside becomes this tile's padding
    right side of a product, filters, ...               all

Going backward through the region gives each tile its halo, however many convolutions are stacked: patch-based
inference (Lin et al., MCUNetV2, 2021, arXiv:2110.15352). Rows of a halo are computed in both tiles.
Slices of attention's queries are the same idea without a halo (Rabe and Staats, 2021, arXiv:2112.05682).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

from compile.graph import FreshNames, constant, dims_of, ir
from compile.passes.base import Pass
from compile.passes.split.slices import resized, same_type, slice_of, vector

Rows = tuple[int, int]
"""[low, high) along the region's axis."""

Bounds = tuple[ir.Value, ir.Value]
"""The same, where it is computed: int64 [1] each."""


class CannotSplit(Exception):  # noqa: N818 - not an error: the reason why a node cannot be computed by rows
    pass


# Since this opset Softmax looks along one axis, by default the last; before, along all from one on, by default 1.
_SOFTMAX_OPSET = 13

POINTWISE = frozenset(
    {
        "Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp",
        "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN",
        "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or",
        "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt",
        "Sub", "Sum", "Swish", "Tanh", "ThresholdedRelu", "Where", "Xor",
    }
)  # fmt: skip
"""Each element of the result comes of the elements at its place, operands being broadcast."""


def needed(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    """Rows of each input that `rows` of the node's result come of; None for an input that is used whole.

    Raises CannotSplit.
    """
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None:
        raise CannotSplit(f"{node.op_type} is not computed by rows")
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        raise CannotSplit(f"a second output of {node.op_type} is read")
    return rule(node, axis, rows)


def position(value: ir.Value, axis: int) -> int:
    """The axis counted from the front. Raises CannotSplit where the value has none."""
    rank = -1 if value.shape is None else len(value.shape)
    if rank < -axis:
        raise CannotSplit(f"{value.name!r} has no such axis" if rank >= 0 else f"the rank of {value.name!r} is unknown")
    return rank + axis


def extent(value: ir.Value, axis: int) -> int | str | None:
    """Size of the value along the axis, or its symbol."""
    at = position(value, axis)
    dim = value.shape[at] if value.shape is not None else None
    return dim if isinstance(dim, int) or dim is None else dim.value


def _same_or_whole(node: ir.Node, value: ir.Value | None, axis: int, rows: Rows) -> Rows | None:
    """Broadcasting: an operand without the axis, or of size 1, is used whole."""
    if value is None:
        return None
    tensor = constant(value)
    if value.shape is None and (tensor is None or tensor.size != 1):
        raise CannotSplit(f"the shape of {value.name!r} is unknown")
    if value.shape is None or len(value.shape) < -axis:
        return None
    own, whole = extent(value, axis), extent(node.outputs[0], axis)
    if own is None or whole is None:
        raise CannotSplit(f"the shape of {value.name!r} or {node.outputs[0].name!r} is unknown")
    if own == whole:
        return rows
    if own == 1:
        return None
    raise CannotSplit(f"{value.name!r} has {own} rows where {node.outputs[0].name!r} has {whole}")


def _pointwise(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    return [_same_or_whole(node, value, axis, rows) for value in node.inputs]


def _first_input(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    first = node.inputs[0]
    if first is None or extent(first, axis) is None or extent(first, axis) != extent(node.outputs[0], axis):
        raise CannotSplit(f"the shape of {node.op_type} node {node.name!r} is unknown")
    return [rows, *[None] * (len(node.inputs) - 1)]


def _along_later_axes(default: int) -> Callable[[ir.Node, int, Rows], list[Rows | None]]:
    """Operators that normalize over their `axis`, or all axes from it on: rows must lie in front of it."""

    def rule(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
        result = node.outputs[0]
        own = node.attributes["axis"].as_int() if "axis" in node.attributes else default
        if result.shape is None or own % len(result.shape) <= position(result, axis):
            raise CannotSplit(f"{node.op_type} node {node.name!r} looks along the rows")
        return _first_input(node, axis, rows)

    return rule


def _softmax(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    opset = node.graph.opset_imports.get("", 1) if node.graph is not None else 1
    return _along_later_axes(-1 if opset >= _SOFTMAX_OPSET else 1)(node, axis, rows)


def _product(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    if axis != -2 or ("transA" in node.attributes and node.attributes["transA"].as_int()):
        raise CannotSplit(f"{node.op_type} node {node.name!r} is not split along this axis")
    right = node.inputs[1]
    if right is None or right.shape is None or len(right.shape) < 2:
        raise CannotSplit(f"{node.op_type} node {node.name!r} has no matrix on its right side")
    wanted = _first_input(node, axis, rows)
    return [*wanted[:2], *(_same_or_whole(node, value, axis, rows) for value in node.inputs[2:])]


def _normalize_channels(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    if position(node.outputs[0], axis) < 2:
        raise CannotSplit(f"{node.op_type} node {node.name!r} is not split along channels")
    return _first_input(node, axis, rows)


def _scaled(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    tensors = [constant(value) for value in node.inputs[1:] if value is not None]
    if any(tensor is None or tensor.size != 1 for tensor in tensors):
        raise CannotSplit(f"{node.op_type} node {node.name!r} has more than one scale")
    return _first_input(node, axis, rows)


def _concat(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    result = node.outputs[0]
    own = node.attributes["axis"].as_int()
    if result.shape is None or own % len(result.shape) == position(result, axis):
        raise CannotSplit(f"Concat node {node.name!r} joins rows")
    whole = extent(result, axis)
    if whole is None or any(value is None or extent(value, axis) != whole for value in node.inputs):
        raise CannotSplit(f"the shape of Concat node {node.name!r} is unknown")
    return [rows for _ in node.inputs]


@dataclasses.dataclass(frozen=True)
class Window:
    """How a convolution or a pooling walks over its first spatial axis, and the padding of all."""

    kernel: int
    stride: int
    dilation: int
    pads: tuple[int, ...]

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    def span(self, rows: Rows) -> Rows:
        """Rows of the input, which may lie outside of it."""
        return rows[0] * self.stride - self.pads[0], (rows[1] - 1) * self.stride - self.pads[0] + self.reach


def window_of(node: ir.Node) -> Window:
    """The window, `auto_pad` being resolved. Raises CannotSplit."""
    data, result = node.inputs[0], node.outputs[0]
    filters = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    kernel = _ints(node, "kernel_shape") or (dims_of(filters)[2:] if filters is not None else ())
    if data is None or data.shape is None or result.shape is None or not kernel:
        raise CannotSplit(f"the shape of {node.op_type} node {node.name!r} is unknown")
    count = len(kernel)
    strides, dilations = _ints(node, "strides") or (1,) * count, _ints(node, "dilations") or (1,) * count
    pads = _ints(node, "pads") or (0,) * (2 * count)
    auto = node.attributes["auto_pad"].as_string() if "auto_pad" in node.attributes else "NOTSET"
    if auto == "VALID":
        pads = (0,) * (2 * count)
    elif auto.startswith("SAME"):
        pads = _same_pads(node, data.shape, auto, kernel, strides, dilations)
    window = Window(kernel[0], strides[0], dilations[0], pads)
    up = "ceil_mode" in node.attributes and node.attributes["ceil_mode"].as_int()
    # The last window may reach beyond the padding, which an average counts; and begin there, which ONNX infers and
    # onnxruntime does not.
    if up and (node.op_type == "AveragePool" or window.stride > window.reach):
        raise CannotSplit(f"{node.op_type} node {node.name!r} rounds the number of its rows up")
    return window


def _ints(node: ir.Node, name: str) -> tuple[int, ...]:
    return tuple(node.attributes[name].as_ints()) if name in node.attributes else ()


def _same_pads(
    node: ir.Node,
    shape: ir.Shape,
    auto: str,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[int, ...]:
    """SAME_UPPER and SAME_LOWER: ceil(size / stride) results, the odd row of padding at the end or the beginning."""
    begins, ends = [], []
    for size, k, s, d in zip(shape.dims[2:], kernel, strides, dilations, strict=True):
        if not isinstance(size, int):
            raise CannotSplit(f"{node.op_type} node {node.name!r} has auto_pad and a dynamic size")
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        begins.append(total // 2 if auto == "SAME_UPPER" else -(-total // 2))
        ends.append(total - begins[-1])
    return (*begins, *ends)


def _sliding(node: ir.Node, axis: int, rows: Rows) -> list[Rows | None]:
    if position(node.outputs[0], axis) != 2:
        raise CannotSplit(f"{node.op_type} node {node.name!r} is split along its first spatial axis only")
    window = window_of(node)
    size = extent(node.inputs[0], axis) if node.inputs[0] is not None else None
    if not isinstance(size, int):
        raise CannotSplit(
            f"{node.op_type} node {node.name!r} has a dynamic number of rows ({size}), and a halo needs a fixed one"
        )
    low, high = window.span(rows)
    if max(low, 0) >= min(high, size):
        raise CannotSplit(f"{node.op_type} node {node.name!r} has rows of padding alone")
    if node.op_type != "Conv" and max(-low, high - size) >= window.kernel:
        # onnxruntime refuses such a pooling, though a window that is dilated, or rounded up, reaches so far.
        raise CannotSplit(f"{node.op_type} node {node.name!r} has rows of padding as high as its kernel")
    return [(max(low, 0), min(high, size)), *[None] * (len(node.inputs) - 1)]


_RULES: Mapping[str, Callable[[ir.Node, int, Rows], list[Rows | None]]] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _along_later_axes(-1)),
    **dict.fromkeys(("MatMul", "Gemm"), _product),
    **dict.fromkeys(("Conv", "MaxPool", "AveragePool"), _sliding),
    "BatchNormalization": _normalize_channels,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _scaled),
    "Concat": _concat,
}
_SLIDING = ("Conv", "MaxPool", "AveragePool")


def bands(size: int, parts: int) -> list[Rows]:
    """`parts` ranges of rows, the largest of ceil(size / parts)."""
    return [(size * at // parts, size * (at + 1) // parts) for at in range(parts)]


def backward(nodes: Sequence[ir.Node], axis: int, rows: Rows) -> dict[ir.Value, Rows]:
    """Rows of each value inside the region that `rows` of its result come of. `nodes` are in order, the result last.

    Raises CannotSplit.
    """
    held = {nodes[-1].outputs[0]: rows}
    inside = {node.outputs[0] for node in nodes}
    for node in reversed(nodes):
        if node.outputs[0] not in held:
            raise CannotSplit(f"{node.outputs[0].name!r} is used whole")
        for value, wanted in zip(node.inputs, needed(node, axis, held[node.outputs[0]]), strict=True):
            if value not in inside or value is None:
                continue
            if wanted is None:
                raise CannotSplit(f"{value.name!r} is used whole")
            before = held.get(value, wanted)
            held[value] = min(before[0], wanted[0]), max(before[1], wanted[1])
    return held


@dataclasses.dataclass(frozen=True)
class SplitRows(Pass):
    """Compute the nodes whose results are `values` (in order, the last leaves the region) in `parts` bands of rows.

    Where the number of rows is dynamic the bounds are computed from it, and with fewer rows than parts some bands are
    empty.
    """

    values: tuple[str, ...]
    axis: int
    parts: int

    requires: ClassVar = ("sorted", "unique_names")
    ensures: ClassVar = ("sorted", "unique_names")

    def apply(self, model: ir.Model) -> None:
        nodes = find(model, self.values)
        if nodes is not None:
            _Bands(model, nodes, self.axis).split(self.parts)


def find(model: ir.Model, values: Collection[str]) -> list[ir.Node] | None:
    """The nodes whose first results have these names, in order; None where one is missing."""
    made = {node.outputs[0].name: node for node in model.graph if node.outputs}
    return [made[name] for name in values] if all(name in made for name in values) else None


class _Bands:
    def __init__(self, model: ir.Model, nodes: Sequence[ir.Node], axis: int) -> None:
        self.model, self.nodes, self.axis = model, nodes, axis
        self.names = FreshNames(model)
        self.result = nodes[-1].outputs[0]

    def split(self, parts: int) -> None:
        size = extent(self.result, self.axis)
        if isinstance(size, int):
            results = [self._band(f"rows{at}", rows, None) for at, rows in enumerate(bands(size, parts))]
        else:
            # Without a halo all values of a band have the same rows, so that which ones does not matter here.
            results = [self._band(f"rows{at}", (0, 1), bounds) for at, bounds in enumerate(self._dynamic_bounds(parts))]
        last = self.nodes[-1]
        join = ir.node("Concat", results, {"axis": position(self.result, self.axis)}, name=f"{last.name}.join")
        made = join.outputs[0]
        made.name, made.type, made.shape = self.result.name, self.result.type, self.result.shape
        ir.convenience.replace_nodes_and_values(
            self.model.graph, last, list(reversed(self.nodes)), [join], [self.result], [made]
        )

    def _band(self, suffix: str, rows: Rows, bounds: Bounds | None) -> ir.Value:
        """The region once more, for these rows of its result; where `bounds` are given, for what lies in them."""
        held = backward(self.nodes, self.axis, rows)
        made: dict[ir.Value, ir.Value] = {}
        cut: dict[tuple[ir.Value, Rows], ir.Value] = {}
        for node in self.nodes:
            own = held[node.outputs[0]]
            inputs: list[ir.Value | None] = []
            for value, wanted in zip(node.inputs, needed(node, self.axis, own), strict=True):
                if value is None or wanted is None:
                    inputs.append(value)
                    continue
                if (value, wanted) not in cut:
                    cut[value, wanted] = self._rows_of(value, made.get(value), held.get(value), wanted, bounds, suffix)
                inputs.append(cut[value, wanted])
            made[node.outputs[0]] = self._copy(node, inputs, own, suffix, bounds is None)
        return made[self.result]

    def _rows_of(
        self,
        value: ir.Value,
        inside: ir.Value | None,
        has: Rows | None,
        wanted: Rows,
        bounds: Bounds | None,
        suffix: str,
    ) -> ir.Value:
        """The wanted rows of a value, of which the band may have made more, or only these."""
        if inside is not None and (bounds is not None or has == wanted):
            return inside
        if bounds is None and inside is None and extent(value, self.axis) == wanted[1] - wanted[0]:
            return value
        begins = has[0] if inside is not None and has is not None else 0
        low, high = bounds or (wanted[0] - begins, wanted[1] - begins)
        source = value if inside is None else inside
        at = position(value, self.axis)
        node, result = slice_of(self.model, self.names, source, at, low, high, f"{value.name}.{suffix}")
        self.model.graph.insert_before(self.nodes[-1], node)
        return result

    def _copy(self, node: ir.Node, inputs: list[ir.Value | None], rows: Rows, suffix: str, fixed: bool) -> ir.Value:
        attributes = dict(node.attributes)
        if node.op_type in _SLIDING:
            attributes |= self._padding(node, rows)
            attributes.pop("auto_pad", None)
        copy = ir.node(node.op_type, inputs, attributes, domain=node.domain, name=f"{node.name}.{suffix}")
        self.model.graph.insert_before(self.nodes[-1], copy)
        old, result = node.outputs[0], copy.outputs[0]
        result.name, result.type = self.names.make(f"{old.name}.{suffix}"), same_type(old)
        result.shape = resized(old.shape, position(old, self.axis), rows[1] - rows[0] if fixed else None)
        return result

    def _padding(self, node: ir.Node, rows: Rows) -> dict[str, ir.Attr]:
        """What of the window lies outside of the image becomes padding of this band."""
        window = window_of(node)
        low, high = window.span(rows)
        size = extent(node.inputs[0], self.axis) if node.inputs[0] is not None else 0
        pads = list(window.pads)
        pads[0] = max(-low, 0)
        pads[len(pads) // 2] = max(high - size, 0) if isinstance(size, int) else 0
        return {"pads": ir.AttrInt64s("pads", pads)}

    def _dynamic_bounds(self, parts: int) -> list[Bounds]:
        """For each band [rows * at / parts, rows * (at + 1) / parts), int64 [1] each."""
        source = self._operand()
        at = position(source, self.axis)
        shape = self._add("Shape", [source], "shape")
        axis = vector(self.model, self.names, [at])
        count = self._add("Gather", [shape, axis], "count")
        whole = vector(self.model, self.names, [parts])
        edges: list[ir.Value] = [vector(self.model, self.names, [0])]
        for edge in range(1, parts):
            times = self._add("Mul", [count, vector(self.model, self.names, [edge])], f"times{edge}")
            edges.append(self._add("Div", [times, whole], f"edge{edge}"))
        edges.append(count)
        return list(itertools.pairwise(edges))

    def _operand(self) -> ir.Value:
        """A value from outside that has the rows."""
        inside = {node.outputs[0] for node in self.nodes}
        for node in self.nodes:
            for value, wanted in zip(node.inputs, needed(node, self.axis, (0, 1)), strict=True):
                if value is not None and wanted is not None and value not in inside:
                    return value
        raise CannotSplit("no operand has the rows")

    def _add(self, op: str, inputs: list[ir.Value], what: str) -> ir.Value:
        node = ir.node(op, inputs, name=f"{self.nodes[-1].name}.{what}")
        self.model.graph.insert_before(self.nodes[-1], node)
        result = node.outputs[0]
        result.name = self.names.make(f"{self.result.name}.{what}")
        result.type, result.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None if op == "Shape" else 1])
        return result
