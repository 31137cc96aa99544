"""A product with a matrix that is too large for a segment: several products with panels of its columns.

What becomes of the bytes:

    [N, K] (Gemm with transB, a turned embedding)   a panel is a range of rows: the same file, at an offset
    [K, N] (MatMul)                                 a panel is a view of the mapped file, written some rows at a time

A table that Gather reads too stays one mapped table, of which only the rows that are read are touched; its panels
refer to ranges of it (`SLICE`), so that the writer stores no byte twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from compile.graph import SLICE, FreshNames, constant, dims_of, ir
from compile.passes.base import Pass
from compile.passes.split.slices import ints, same_type, slice_of

# Panels begin at multiples of so many columns, where there are enough: kernels compute in vectors.
COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A constant matrix as a product uses it: the tensor, its axis of columns, and the nodes between (Cast, Transpose),
    the nearest to the tensor first."""

    value: ir.Value
    tensor: ir.TensorProtocol
    axis: int
    chain: tuple[ir.Node, ...]

    @property
    def columns(self) -> int:
        return dims_of(self.tensor)[self.axis]


def matrix_of(node: ir.Node) -> Matrix | None:
    """The constant matrix on the right side of a product; None for any other node."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        return None
    turned = node.op_type == "Gemm" and "transB" in node.attributes and bool(node.attributes["transB"].as_int())
    axis, value, chain = (0 if turned else 1), node.inputs[1], []
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type not in ("Cast", "Transpose") or producer.graph is not node.graph:
            return None
        if producer.op_type == "Transpose":
            axis = 1 - axis
        chain.append(producer)
        value = producer.inputs[0]
    tensor = constant(value)
    if value is None or tensor is None or len(tensor.shape) != 2 or tensor.dtype.itemsize < 1:
        return None
    return Matrix(value, tensor, axis, tuple(reversed(chain)))


def panels(columns: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges of columns of nearly one width; fewer where there are fewer columns."""
    grain = COLUMNS if columns >= COLUMNS * parts else 1
    steps = -(-columns // grain)
    edges = [min(steps * at // parts * grain, columns) for at in range(parts + 1)]
    return [(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]


@dataclasses.dataclass(frozen=True)
class SplitColumns(Pass):
    """Make the product that gives `value` from `parts` products, each with a panel of the matrix, joined by Concat.

    Gemm keeps alpha, beta and transA, and its bias is split along. Every sum has the terms that it had.
    """

    value: str
    parts: int

    requires: ClassVar = ("sorted", "unique_names")
    ensures: ClassVar = ("sorted", "unique_names")

    def apply(self, model: ir.Model) -> None:
        node = _maker(model, self.value)
        matrix = matrix_of(node) if node is not None else None
        if node is None or matrix is None:
            return
        _Splitter(model, node, matrix).split(self.parts)


def turned_whole(model: ir.Model, passes: Sequence[Pass]) -> list[Pass]:
    """Those of the passes that the source model needs too: a matrix that it turns or widens before it multiplies would
    stand in memory whole. Of a matrix whose panels are no ranges of a file that cannot be helped."""
    wanted: list[Pass] = []
    for step in passes:
        node = _maker(model, step.value) if isinstance(step, SplitColumns) else None
        matrix = matrix_of(node) if node is not None else None
        if matrix is not None and matrix.chain and matrix.axis == 0 and isinstance(matrix.tensor, ir.ExternalTensor):
            wanted.append(step)
    return wanted


def _maker(model: ir.Model, value: str) -> ir.Node | None:
    return next((node for node in model.graph if node.outputs and node.outputs[0].name == value), None)


class _Splitter:
    def __init__(self, model: ir.Model, node: ir.Node, matrix: Matrix) -> None:
        self.model, self.node, self.matrix = model, node, matrix
        self.names = FreshNames(model)

    def split(self, parts: int) -> None:
        matrix, node = self.matrix, self.node
        ranges = panels(matrix.columns, parts)
        results = [self._product(at, start, stop) for at, (start, stop) in enumerate(ranges)]
        join = ir.node("Concat", results, {"axis": _last_axis(node.outputs[0])}, name=f"{node.name}.join")
        old, result = node.outputs[0], join.outputs[0]
        result.name, result.type, result.shape = old.name, old.type, old.shape
        ir.convenience.replace_nodes_and_values(self.model.graph, node, [node], [join], [old], [result])
        for step in reversed(matrix.chain):
            if not step.outputs[0].uses() and not step.outputs[0].is_graph_output():
                self.model.graph.remove(step, safe=True)

    def _product(self, at: int, start: int, stop: int) -> ir.Value:
        """One panel's product, in front of the node, with what it needs directly in front of it."""
        matrix, node = self.matrix, self.node
        weight = self._register(panel(matrix.tensor, matrix.axis, start, stop), f"{matrix.value.name}.columns{at}")
        for step in matrix.chain:
            turned = self._copy(step, [weight], f"{step.name}.columns{at}")
            shape = dims_of(weight.const_value) if weight.const_value is not None else ints(weight.shape)
            turned.shape = ir.Shape(shape[::-1] if step.op_type == "Transpose" else shape)
            weight = turned
        inputs = [node.inputs[0], weight]
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            inputs.append(self._bias(node.inputs[2], at, start, stop))
        result = self._copy(node, inputs, f"{node.name}.columns{at}")
        if node.outputs[0].shape is not None:
            result.shape = ir.Shape([*node.outputs[0].shape.dims[:-1], stop - start])
        return result

    def _bias(self, bias: ir.Value, at: int, start: int, stop: int) -> ir.Value:
        tensor = constant(bias)
        dims = dims_of(tensor) if tensor is not None else tuple(bias.shape.dims if bias.shape is not None else ())
        if not dims or dims[-1] == 1:
            return bias
        if tensor is not None:
            return self._register(panel(tensor, len(dims) - 1, start, stop), f"{bias.name}.columns{at}")
        cut, made = slice_of(self.model, self.names, bias, len(dims) - 1, start, stop, f"{bias.name}.columns{at}")
        self.model.graph.insert_before(self.node, cut)
        return made

    def _copy(self, node: ir.Node, inputs: list[ir.Value | None], name: str) -> ir.Value:
        copy = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain, name=name)
        self.model.graph.insert_before(self.node, copy)
        copy.outputs[0].name = self.names.make(f"{node.outputs[0].name}.{name.rpartition('.')[2]}")
        copy.outputs[0].type = same_type(node.outputs[0])
        return copy.outputs[0]

    def _register(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        tensor.name = self.names.make(name)
        value = ir.Value(
            name=tensor.name, shape=ir.Shape(dims_of(tensor)), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.model.graph.register_initializer(value)
        return value


def _last_axis(value: ir.Value) -> int:
    """Concat takes a negative axis since opset 11; the rank is known wherever shapes are."""
    return len(value.shape) - 1 if value.shape is not None else -1


def panel(tensor: ir.TensorProtocol, axis: int, start: int, stop: int) -> ir.TensorProtocol:
    """Indices `start` to `stop` of a tensor along an axis, without a copy: a range of its file where it is one.

    What it is a part of, and from which row on, stands in its metadata.
    """
    dims = list(dims_of(tensor))
    row_bytes = tensor.nbytes // max(dims[axis], 1)
    dims[axis] = stop - start
    contiguous = axis == 0 or math.prod(dims[:axis]) == 1
    name = tensor.name or ""
    props = {SLICE: f"{start} {name}"} if contiguous else None
    if isinstance(tensor, ir.ExternalTensor) and contiguous:
        return ir.ExternalTensor(
            tensor.location,
            (tensor.offset or 0) + start * row_bytes,
            (stop - start) * row_bytes,
            tensor.dtype,
            shape=ir.Shape(dims),
            name=name,
            metadata_props=props,
            base_dir=tensor.base_dir,
        )
    index: tuple[Any, ...] = (*[slice(None)] * axis, slice(start, stop))
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy()[index], dtype=tensor.dtype),
        dtype=tensor.dtype,
        shape=ir.Shape(dims),
        name=name,
        metadata_props=props,
    )


def parts_of(join: ir.Node) -> Iterator[tuple[ir.Value, int, int, int]]:
    """(value, axis, start, stop) of every input of a Concat: each is that range of the result. Nothing where the sizes
    along the axis are not known."""
    if join.op_type != "Concat" or join.domain not in ("", "ai.onnx"):
        return
    axis, start = join.attributes["axis"].as_int(), 0
    found: list[tuple[ir.Value, int, int, int]] = []
    for value in join.inputs:
        if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
            return
        size = value.shape[axis]
        if not isinstance(size, int):
            return
        found.append((value, axis, start, start + size))
        start += size
    yield from found
