"""Inputs whose values decide shapes, axes or how often something runs: random values there mean nothing."""

from __future__ import annotations

from compile.graph import bodies_of, ir, nodes_of

# Operand positions of each operator whose values, not only shapes, decide the sizes of its outputs, name its axes or
# count its repetitions (https://onnx.ai/onnx/operators; all versions together).
_CONTROL: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "Loop": (0, 1),
    "MaxUnpool": (1, 2),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "SequenceAt": (1,),
    "SequenceErase": (1,),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "STFT": (1, 3),
    "Tile": (1, 2),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
_REDUCTION_AXES = 1


def control_inputs(model: ir.Model) -> tuple[str, ...]:
    """Names of the model's inputs from which a control operand is computed, in the model's order."""
    seen: set[ir.Value] = set()
    frontier = [value for node in nodes_of(model) for value in _controls(node)]
    while frontier:
        value = frontier.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        # A shape depends on another value's shape, not on what it holds.
        if producer is not None and producer.op_type not in ("Shape", "Size"):
            frontier += [v for v in producer.inputs if v is not None]
            frontier += [v for body in bodies_of(producer) for v in body.outputs]
    return tuple(v.name or "" for v in model.graph.inputs if v in seen and v.name not in model.graph.initializers)


def _controls(node: ir.Node) -> list[ir.Value]:
    """The node's operands whose values decide its outputs' shapes."""
    if node.domain not in ("", "ai.onnx"):
        return []
    positions = (_REDUCTION_AXES,) if node.op_type.startswith("Reduce") else _CONTROL.get(node.op_type, ())
    return [v for i in positions if i < len(node.inputs) and (v := node.inputs[i]) is not None]
