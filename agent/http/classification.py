"""The classification extension: the best classes of an output instead of all of it. Pure.

Source: Triton `extension_classification.md`. A class is said as `VALUE:INDEX`, or `VALUE:INDEX:LABEL` where the bundle
knows its name; equal values go by index, and NaN comes last. The value is as short as tells it from any other of its
type (Triton's has six decimals).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent.strings import pack_strings
from targets.errors import ContractError
from targets.tensor import DType, TensorSpec

MOST_CLASSES = 1000
"""So many are answered of an output, or of a row of it: who wants more wants the tensor."""


def check_classes(spec: TensorSpec, count: object) -> int:
    """The parameter `classification` of a request for that output. Raises ContractError."""
    if type(count) is not int or not 1 <= count <= MOST_CLASSES:
        raise ContractError(
            f"output {spec.name!r}: parameter classification is {count!r}", f"it must be 1 to {MOST_CLASSES}"
        )
    if spec.dtype in (DType.BOOL, DType.STRING):
        raise ContractError(f"output {spec.name!r} is {spec.dtype.oip}, which has no best classes", "ask for all of it")
    return count


def classified(
    spec: TensorSpec, shape: tuple[int, ...], data: NDArray[np.uint8], count: int, batched: bool, labels: Sequence[str]
) -> tuple[TensorSpec, tuple[int, ...], NDArray[np.uint8]]:
    """The `count` best classes, or as many as there are, of an output whose bytes are `data`: BYTES of shape [count],
    or where axis 0 is a batch [rows, count]. Classes are the elements, or those of a row, in row-major order."""
    rows, classes = (shape[0], math.prod(shape[1:])) if batched else (1, math.prod(shape))
    values = data.view(np.dtype(spec.dtype.numpy)).reshape(rows, classes)
    count = min(count, classes)
    texts = [text for row in values for text in _texts(row, count, labels)]
    given = (rows, count) if batched else (count,)
    return TensorSpec(spec.name, DType.STRING, given, 0), given, np.frombuffer(pack_strings(texts), np.uint8)


def _texts(row: NDArray[np.generic], count: int, labels: Sequence[str]) -> list[bytes]:
    return [
        f"{row[at]!s}:{at}{f':{labels[at]}' if at < len(labels) else ''}".encode() for at in _best(row, count).tolist()
    ]


def _best(row: NDArray[np.generic], count: int) -> NDArray[np.intp]:
    """Indices of the largest, which come first."""
    if count == 0:
        return np.empty(0, np.intp)
    if row.dtype.kind == "f":
        row = np.where(np.isnan(row), -np.inf, row)
    least = np.partition(row, -count)[-count]
    found = np.flatnonzero(row >= least)
    # Sorted from behind, so that of equal ones the first comes first.
    rising = np.argsort(row[found][::-1], kind="stable")
    return found[len(found) - 1 - rising[::-1]][:count]
