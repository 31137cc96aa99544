"""Constant folding, bounded: what follows from constants alone is computed once, unless it is large."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from onnxscript.optimizer import fold_constants

from compile.graph import dims_of, ir
from compile.passes.base import Pass
from compile.passes.sequences import sequences

# The optimizer logs every node it leaves; the pass reports by its result.
logging.getLogger("onnxscript").setLevel(logging.ERROR)

# Since this opset Split, Squeeze and Unsqueeze take their sizes and axes as inputs.
_AXES_INPUT_OPSET = 13
# Of which a few elements say how large the result is.
_GROWING = ("ConstantOfShape", "Expand", "Tile", "Resize", "OneHot", "Pad", "EyeLike", "Upsample")
# An outer product of two such inputs still has no more than a quarter of a million elements.
_UNKNOWN_RESULT_ELEMENTS = 512
# Smaller ones are shapes and factors, not weights.
_WEIGHT_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class FoldConstants(Pass):
    """Compute nodes whose inputs are all constant, each input and output at most so many elements.

    The caps keep the graph from growing: an 84-byte file can ask for a constant of 16 GB.
    """

    max_input_elements: int = 1 << 14
    max_output_elements: int = 1 << 16

    requires: ClassVar = ("no_constant_nodes", "sorted")

    def apply(self, model: ir.Model) -> Sequence[str]:
        # Whatever the opset, the library's rules for sequences write the newer form of these.
        if model.graph.opset_imports.get("", 0) < _AXES_INPUT_OPSET and sequences(model):
            return ()
        try:
            with np.errstate(all="ignore"):  # what comes out is what the runtime would compute
                fold_constants(
                    model,
                    onnx_shape_inference=False,
                    input_size_limit=self.max_input_elements,
                    output_size_limit=self.max_output_elements,
                    should_fold=self._should_fold,
                )
        except RuntimeError as error:
            reason = error.__cause__ or error
            # Each node is replaced by itself, so the graph is whole; what the runtime refuses too, it will name.
            return [f"constants from some node on are not folded: {' '.join(f'{error}: {reason}'.split())}"]
        finally:
            _state_shapes(model.graph)
        return ()

    def _grows(self, node: ir.Node) -> bool:
        if node.op_type == "Range":
            return not _range_size(node) <= self.max_output_elements
        return node.op_type in _GROWING

    def _should_fold(self, node: ir.Node) -> bool | None:
        """False where the result is, or could be, larger than its cap: it would be computed before it is measured."""
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        if self._grows(node) or any(value.dtype == ir.DataType.STRING for value in values):
            return False
        if any(_holds_nan(value) for value in node.inputs):
            # It is refused when it is written, under the name that it has in the model.
            return False
        if node.op_type == "Transpose" and any(_size(v) >= _WEIGHT_ELEMENTS for v in node.inputs):
            # Lowering looks through it; folded, a tied table and matrix would be stored twice.
            return False
        elements = sum(map(_size, node.inputs))
        for value in node.outputs:
            dims = value.shape.dims if value.shape is not None else ("unknown",)
            sizes = [dim for dim in dims if isinstance(dim, int)]
            if len(sizes) == len(dims):
                if math.prod(sizes) > self.max_output_elements:
                    return False
            elif elements > _UNKNOWN_RESULT_ELEMENTS:
                return False
        return None


def _state_shapes(graph: ir.Graph) -> None:
    """A value that was computed keeps the shape that it was declared with, in symbols; inference would believe that."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.shape = ir.Shape(dims_of(value.const_value))


def _range_size(node: ir.Node) -> float:
    """Elements of a Range; not finite, or NaN, where its operands say nothing."""
    operands = [value.const_value for value in node.inputs if value is not None and value.const_value is not None]
    if len(operands) != 3 or any(tensor.size != 1 for tensor in operands):
        return math.inf
    start, limit, delta = (float(tensor.numpy().item()) for tensor in operands)
    return (limit - start) / delta if delta else math.inf


def _holds_nan(value: ir.Value | None) -> bool:
    tensor = value.const_value if value is not None else None
    if tensor is None or not tensor.dtype.is_floating_point() or tensor.size > FoldConstants.max_input_elements:
        return False
    return bool(np.isnan(tensor.numpy()).any())


def _size(value: ir.Value | None) -> int:
    return value.const_value.size if value is not None and value.const_value is not None else 0
