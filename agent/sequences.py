"""A sequence longer than what the engine runs at once: in windows through one slot, answered as one.

Its inputs stay in the body while its windows run one after the other, and what they answer is put together outside the
slab; the plan counts both for the longest sequence (`bodies` and `answers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from agent.engine.channel import Slab
from agent.errors import Reason, RefusedError
from agent.request import Result
from processing.windows import Joined, cut
from targets.tensor import Contract, TensorSpec
from targets.windows import Window, windows

Shapes = tuple[tuple[int, ...], ...]
Payload = bytes | memoryview


class LongRequest:
    """One request of a long sequence. `outputs` are indices of those that are wanted."""

    def __init__(self, contract: Contract, shapes: Shapes, payloads: Sequence[Payload], outputs: Sequence[int]) -> None:
        split = contract.split
        if split is UNSET:
            raise ValueError("the contract splits nothing")
        length = contract.size_of(split.dim, shapes)
        self.windows = windows(split, length)
        self._contract, self._shapes, self._payloads = contract, shapes, payloads
        self._axes = [spec.shape.index(split.dim) if split.dim in spec.shape else None for spec in contract.inputs]
        self._joined = [(contract.outputs[index], Joined(split.joins[index], length)) for index in outputs]

    def fill(self, window: Window, slab: Slab, slot: int) -> tuple[Shapes, tuple[int, ...]]:
        """Write the inputs that a window sees into the slot: (shapes, bytes) of each. The others are there whole."""
        shapes, sizes = [], []
        for index, (spec, shape, payload, axis) in enumerate(
            zip(self._contract.inputs, self._shapes, self._payloads, self._axes, strict=True)
        ):
            place = slab.input(slot, index)
            if axis is None:
                place[: len(payload)] = np.frombuffer(payload, np.uint8)
                shapes.append(shape)
                sizes.append(len(payload))
                continue
            seen = cut(np.frombuffer(payload, _dtype(spec)).reshape(shape), axis, window)
            place[: seen.nbytes].view(seen.dtype).reshape(seen.shape)[...] = seen
            shapes.append(seen.shape)
            sizes.append(seen.nbytes)
        return tuple(shapes), tuple(sizes)

    def take(self, window: Window, result: Result, slab: Slab, slot: int) -> None:
        """Copy what is needed of a window's outputs. Raises RefusedError where they do not join."""
        for (spec, joined), output in zip(self._joined, result.outputs, strict=True):
            value = slab.output(slot, output.index)[: output.nbytes].view(_dtype(spec)).reshape(output.shape)
            try:
                joined.add(window, value)
            except ValueError as error:
                raise RefusedError(Reason.ENGINE_ERROR, f"output {spec.name!r}: {error}") from None

    def answer(self) -> list[NDArray[Any]]:
        """The wanted outputs of the whole; asked for once."""
        return [joined.result() for _, joined in self._joined]


def is_long(contract: Contract, shapes: Shapes) -> bool:
    """Whether inputs of these shapes are run in windows."""
    return contract.split is not UNSET and contract.size_of(contract.split.dim, shapes) > contract.split.window


def _dtype(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype(spec.dtype.numpy)
