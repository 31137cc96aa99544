"""Which values are sequences or optionals: shape inference types those as tensors of their elements."""

from __future__ import annotations

from compile.graph import bodies_of, ir, nodes_of

_MAKE = frozenset(
    (
        "SequenceEmpty",
        "SequenceConstruct",
        "SequenceInsert",
        "SequenceErase",
        "SplitToSequence",
        "SequenceMap",
        "Optional",
    )
)
_PASS_ON = frozenset(("Identity", "If", "Loop", "OptionalGetElement"))


def sequences(model: ir.Model) -> set[ir.Value]:
    """Every value that an operator for sequences makes, or one that passes them on."""
    found: set[ir.Value] = set()

    def is_sequence(value: ir.Value | None) -> bool:
        return value in found or (value is not None and isinstance(value.type, (ir.SequenceType, ir.OptionalType)))

    before = -1
    # A loop's body is seen before or after what it is given: until nothing more is found.
    while before < len(found):
        before = len(found)
        for node in nodes_of(model):
            read = (*node.inputs, *(v for body in bodies_of(node) for v in body.outputs))
            if node.op_type in _MAKE or (node.op_type in _PASS_ON and any(map(is_sequence, read))):
                found.update(node.outputs)
    return found
