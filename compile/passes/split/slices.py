"""Slice nodes, in the form that the model's opset has."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from compile.graph import FreshNames, ir

# Since this opset Slice takes its bounds as inputs.
SLICE_INPUTS_OPSET = 10


def ints(shape: ir.Shape | None) -> tuple[int, ...]:
    """The sizes of a shape that has no symbols."""
    return tuple(dim for dim in shape or () if isinstance(dim, int))


def slice_of(
    model: ir.Model,
    names: FreshNames,
    value: ir.Value,
    axis: int,
    start: int | ir.Value,
    stop: int | ir.Value,
    name: str,
) -> tuple[ir.Node, ir.Value]:
    """A node that takes [start, stop) of a value along an axis (counted from the front), and its result.

    Bounds that are values are int64 [1], and need opset 10.
    """
    if model.graph.opset_imports.get("", 1) < SLICE_INPUTS_OPSET and isinstance(start, int) and isinstance(stop, int):
        node = ir.node("Slice", [value], {"starts": [start], "ends": [stop], "axes": [axis]})
    else:
        node = ir.node("Slice", [value, *(_bound(model, names, each) for each in (start, stop, axis))])
    result = node.outputs[0]
    result.name, result.type = names.make(name), same_type(value)
    node.name = result.name
    result.shape = resized(
        value.shape, axis, stop - start if isinstance(start, int) and isinstance(stop, int) else None
    )
    return node, result


def same_type(value: ir.Value) -> ir.TensorType | None:
    """The element type, as an object of its own: a value's type can be changed in place."""
    return None if value.dtype is None else ir.TensorType(value.dtype)


def resized(shape: ir.Shape | None, axis: int, size: int | None) -> ir.Shape | None:
    """The shape with another size along an axis (counted from the front); None for one that is not known."""
    if shape is None:
        return None
    dims: list[int | ir.SymbolicDim | None] = list(shape.dims)
    dims[axis] = size
    return ir.Shape(dims)


def _bound(model: ir.Model, names: FreshNames, bound: int | ir.Value) -> ir.Value:
    return vector(model, names, [bound]) if isinstance(bound, int) else bound


def vector(model: ir.Model, names: FreshNames, numbers: Iterable[int]) -> ir.Value:
    """A constant of int64, made once for each content."""
    array = np.array(list(numbers), np.int64)
    wanted = "split.bound" + "_".join(map(str, array))
    known = model.graph.initializers.get(wanted)
    tensor = known.const_value if known is not None else None
    if known is not None and tensor is not None and np.array_equal(tensor.numpy(), array):
        return known
    name = names.make(wanted)
    value = ir.Value(name=name, shape=ir.Shape([len(array)]), type=ir.TensorType(ir.DataType.INT64))
    value.const_value = ir.tensor(array, name=name)
    model.graph.register_initializer(value)
    return value
