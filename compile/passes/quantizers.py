"""Where QuantizeLinear stands."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compile.graph import constant, ir
from compile.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class QuantizeAtOnce(Pass):
    """Put each QuantizeLinear right behind the node whose result it reads, so that codes cross all cuts behind it."""

    requires: ClassVar = ("sorted",)
    ensures: ClassVar = ("sorted",)

    def apply(self, model: ir.Model) -> None:
        for node in list(model.graph):
            producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
            fixed = all(value is None or constant(value) is not None for value in node.inputs[1:])
            if node.op_type == "QuantizeLinear" and producer is not None and producer.graph is model.graph and fixed:
                model.graph.remove(node)
                model.graph.insert_after(producer, node)
