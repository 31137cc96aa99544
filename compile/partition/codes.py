"""Codes that cross the cuts of a quantized graph, and the values of the source model that they stand for.

Result and source are compared where they are cut, and the source has no codes: there the compiled segment is looked at
as one that takes and gives floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.backends.base import Model, Tensors
from compile.graph import constant, ir

Array = npt.NDArray[Any]
_CODES = (ir.DataType.INT8, ir.DataType.UINT8)


@dataclasses.dataclass(frozen=True)
class Codes:
    """What codes mean: value `source` is (codes - zero) * scale, in float32."""

    source: str
    scale: np.float32
    zero: int
    dtype: np.dtype[Any]

    def quantize(self, values: Array) -> Array:
        """As QuantizeLinear does: halves go to even, what is too large or too small to the ends of the type."""
        ends = np.iinfo(self.dtype)
        codes: Array = np.clip(np.rint(values / self.scale) + self.zero, ends.min, ends.max).astype(self.dtype)
        return codes

    def restore(self, codes: Array) -> Array:
        """As DequantizeLinear does."""
        floats: Array = (codes.astype(np.int32) - self.zero).astype(np.float32)
        floats *= self.scale
        return floats


def codes_of(model: ir.Model, known: Collection[str]) -> dict[str, Codes]:
    """Every value of codes, by name, that has one scale and stands for one of the `known` values."""
    found: dict[str, Codes] = {}
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or len(node.inputs) < 3:
            continue
        floats, codes = node.inputs[0], node.outputs[0]
        if node.op_type == "DequantizeLinear":
            floats, codes = node.outputs[0], node.inputs[0] or codes
        name = floats.name if floats is not None else None
        scale, zero = constant(node.inputs[1]), constant(node.inputs[2])
        if not name or name not in known or codes.producer() is None or scale is None or zero is None:
            continue
        if scale.size == 1 and scale.dtype == ir.DataType.FLOAT and zero.dtype in _CODES:
            meant = Codes(name, np.float32(scale.numpy().item()), int(zero.numpy().item()), zero.dtype.numpy())
            found.setdefault(codes.name or "", meant)
    return found


def in_floats(names: Iterable[str], codes: Mapping[str, Codes]) -> tuple[str, ...]:
    """The same values by the source model's names, each once."""
    return tuple(dict.fromkeys(codes[name].source if name in codes else name for name in names))


@dataclasses.dataclass(frozen=True)
class InFloats:
    """A compiled segment that takes and gives, in the place of codes, what they stand for. `inputs` are its own."""

    model: Model
    inputs: tuple[str, ...]
    codes: Mapping[str, Codes]

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Outputs by the source model's names; where both codes and floats of one leave, the floats."""
        given = {
            name: self.codes[name].quantize(inputs[self.codes[name].source]) if name in self.codes else inputs[name]
            for name in self.inputs
        }
        made = self.model.run(given)
        restored = {
            self.codes[name].source: self.codes[name].restore(made[name]) for name in made if name in self.codes
        }
        return {**restored, **{name: array for name, array in made.items() if name not in self.codes}}
