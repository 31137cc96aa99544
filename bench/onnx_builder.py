"""Writes ONNX graphs operator by operator, with weights streamed into one external-data file."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

PAGE = 4096
"""Weights start on page borders so that they can be mapped."""
EXTERNAL_FROM_BYTES = 1024


class GraphBuilder:
    """One graph under construction. Values are their names; each method returns the name of what it made.

    `weight` writes its array to disk at once, so that memory holds one tensor at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = path.with_name(path.name + ".data")
        self._partial_data = self._data.with_name(self._data.name + ".partial")
        self._sink = self._partial_data.open("wb")
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._known: dict[tuple[str, tuple[int, ...], str], str] = {}
        self._outputs_made = 0

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add an operator with one output; `out` names it."""
        self._outputs_made += 1
        name = out or f"{kind.lower()}_{self._outputs_made}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], name=f"node_{name}", **attributes))
        return name

    def weight(self, array: NDArray[Any], name: str) -> str:
        """Add an initializer; small ones stand in the graph, large ones in the external data."""
        array = np.ascontiguousarray(array)
        raw = array.tobytes()
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        if len(raw) < EXTERNAL_FROM_BYTES:
            tensor.raw_data = raw
        else:
            self._sink.write(b"\0" * (-self._sink.tell() % PAGE))
            tensor.data_location = TensorProto.EXTERNAL
            entries = {"location": self._data.name, "offset": self._sink.tell(), "length": len(raw)}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
            self._sink.write(raw)
        self._initializers.append(tensor)
        return name

    def constant(self, array: NDArray[Any]) -> str:
        """Add a small initializer, or return the equal one that is there."""
        key = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        if key not in self._known:
            self._known[key] = self.weight(array, f"constant_{len(self._known)}")
        return self._known[key]

    def ints(self, *values: int) -> str:
        """An int64 vector."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        """A float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def save(self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> None:
        """Write the graph; graph and data appear under their names only when both are complete."""
        self._sink.close()
        graph = helper.make_graph(self._nodes, name, list(inputs), list(outputs), self._initializers)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="tightfit-bench"
        )
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_bytes(model.SerializeToString(deterministic=True))
        self._partial_data.replace(self._data)
        partial.replace(self._path)

    def abandon(self) -> None:
        """Remove what was written, after a failure."""
        self._sink.close()
        with contextlib.suppress(OSError):
            self._partial_data.unlink()


def value(name: str, element_type: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    """A graph input or output; strings are dimensions known only at run time."""
    return helper.make_tensor_value_info(name, element_type, list(shape))
