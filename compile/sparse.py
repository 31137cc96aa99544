"""Sparse tensors made dense while a model is read: onnx-ir knows none, and no kernel of a board computes with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from compile.errors import ModelError
from targets.tensor import human

# All of a model together, made dense: a file of a few bytes can ask for terabytes.
MAX_DENSE_BYTES = 256 << 20


def densify(model: onnx.ModelProto, path: Path) -> None:
    """Make sparse initializers ordinary ones, and sparse constants ordinary Constant nodes, in all graphs; in place.

    Raises ModelError where indices do not fit the shape, or the dense tensors exceed MAX_DENSE_BYTES in all.
    """
    total = 0

    def dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
        nonlocal total
        made = _dense(sparse, name, path, MAX_DENSE_BYTES - total)
        total += len(made.raw_data)
        return made

    for graph in proto_graphs(model):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(dense(sparse, sparse.values.name))
        graph.ClearField("sparse_initializer")
    for node in (*proto_nodes(model.graph.node), *(n for f in model.functions for n in proto_nodes(f.node))):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                made = dense(attribute.sparse_tensor, node.output[0] if node.output else node.name)
                attribute.ClearField("sparse_tensor")
                attribute.t.CopyFrom(made)
                attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR


def proto_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and every subgraph, those of functions included."""
    yield model.graph
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in proto_nodes(nodes):
            yield from _bodies(node)


def proto_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of every subgraph below them."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(inner for body in _bodies(node) for inner in body.node)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _dense(sparse: onnx.SparseTensorProto, name: str, path: Path, room: int) -> onnx.TensorProto:
    """The tensor with zeros written out; indices are flat [NNZ] or by axis [NNZ, rank]."""
    dims, where = tuple(sparse.dims), f"{path}: sparse tensor {name!r}"
    if onnx.TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
        raise ModelError(f"{where} stands outside the model file", "save it inside, or as a dense tensor")
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    if indices.dtype != np.int64:
        raise ModelError(f"{where} has indices of type {indices.dtype}, not int64", "export the model again")
    if values.ndim != 1 or values.dtype == object:
        raise ModelError(f"{where} has values of type {values.dtype}{list(values.shape)}", "export the model again")
    size = math.prod(dims) * values.itemsize
    if any(dim < 0 for dim in dims) or size > room:
        raise ModelError(
            f"{where} of shape {list(dims)} takes {human(max(size, 0))} made dense; all of a model may take "
            f"{human(MAX_DENSE_BYTES)}",
            "save it as a dense tensor with external data",
        )
    made = np.zeros(dims, values.dtype)
    made.reshape(-1)[_flat(indices, dims, len(values), where)] = values
    return onnx.numpy_helper.from_array(made, name)


def _flat(indices: npt.NDArray[np.int64], dims: tuple[int, ...], count: int, where: str) -> npt.NDArray[np.int64]:
    """Positions in the flattened tensor, each checked against the shape."""
    by_axis = indices.ndim == 2 and indices.shape == (count, len(dims))
    limits = np.array(dims if by_axis else [math.prod(dims)], np.int64)
    if not (by_axis or indices.shape == (count,)):
        raise ModelError(f"{where} has {count} values and indices of shape {list(indices.shape)}", "export it again")
    table = indices.reshape(count, -1) if count else indices.reshape(0, len(limits))
    if ((table < 0) | (table >= limits)).any():
        raise ModelError(f"{where} of shape {list(dims)} has an index outside it", "export the model again")
    strides = np.array([math.prod(dims[axis + 1 :]) for axis in range(len(limits))] if by_axis else [1], np.int64)
    flat: npt.NDArray[np.int64] = table @ strides
    return flat
