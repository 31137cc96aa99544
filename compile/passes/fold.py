"""Constant folding, bounded: what follows from constants alone is computed once, unless it is large."""

from __future__ import annotations

import dataclasses
import logging
from typing import ClassVar

from onnxscript.optimizer import fold_constants

from compile.graph import ir
from compile.passes.base import Pass

# The optimizer logs every node it leaves; the pass reports by its result.
logging.getLogger("onnxscript").setLevel(logging.ERROR)


@dataclasses.dataclass(frozen=True)
class FoldConstants(Pass):
    """Compute nodes whose inputs are all constant, each input and output at most so many bytes.

    The caps keep the graph from growing: an 84-byte file can ask for a constant of 16 GB.
    """

    max_input_bytes: int = 1 << 16
    max_output_bytes: int = 1 << 18

    requires: ClassVar = ("no_constant_nodes", "sorted")

    def apply(self, model: ir.Model) -> None:
        fold_constants(
            model,
            onnx_shape_inference=False,
            input_size_limit=self.max_input_bytes,
            output_size_limit=self.max_output_bytes,
            should_fold=self._should_fold,
        )

    @staticmethod
    def _should_fold(node: ir.Node) -> bool | None:
        # These make large tensors of small ones before a cap on the result could be looked at.
        return False if node.op_type in ("ConstantOfShape", "Expand", "Tile", "Range", "Resize", "OneHot") else None
