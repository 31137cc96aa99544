"""A text in its slot: what a step reads, what it leaves, and how much more there is room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.engine.channel import Slab
from agent.errors import Reason, RefusedError
from agent.request import Result
from agent.state import SlotState, Step
from targets.generation import Roles
from targets.tensor import Contract, TensorSpec


class Session:
    """Tokens go in, in pieces of as many as the model takes at once. `length` is how many the state is of."""

    def __init__(self, contract: Contract, roles: Roles, slab: Slab, slot: int) -> None:
        self.length = 0
        self._contract, self._roles, self._slab, self._slot = contract, roles, slab, slot
        self._state = SlotState(contract, slab, slot)
        self._grow = [
            (index, each.axis)
            for each in contract.states or ()
            for index, spec in enumerate(contract.inputs)
            if spec.name == each.input and each.axis is not None
        ]

    def pieces(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """The tokens as the model takes them."""
        for start in range(0, len(tokens), self._roles.piece):
            yield tokens[start : start + self._roles.piece]

    @property
    def full(self) -> bool:
        """Whether the model can look back on no more."""
        return self._roles.context is not None and self.length > self._roles.context

    def fill(self, tokens: Sequence[int], scores: bool = True) -> Step:
        """Write what a run of one piece reads. `scores`: whether anybody wants to know what comes next."""
        roles, new = self._roles, len(tokens)
        values = {roles.tokens: np.asarray(tokens)[None]}
        if roles.mask is not None:
            values[roles.mask] = np.ones((1, self.length + new), np.int64)
        if roles.positions is not None:
            values[roles.positions] = np.arange(self.length, self.length + new)[None]
        for index, value in values.items():
            data = value.astype(_dtype(self._contract.inputs[index])).reshape(-1).view(np.uint8)
            self._slab.input(self._slot, index)[: data.nbytes] = data
        return self._state.step({index: value.shape for index, value in values.items()}, (roles.logits,) * scores)

    def take(self, result: Result, new: int) -> NDArray[Any] | None:
        """The run of a piece of `new` tokens is over: scores of the next token, in the slot until the next run; None
        where nobody wanted them. Raises RefusedError where state has not grown by these tokens."""
        self.length += new
        self._state.take(result)
        for index, axis in self._grow:
            if self._state.shapes[index][axis] != self.length:
                raise RefusedError(
                    Reason.ENGINE_ERROR,
                    f"state {self._contract.inputs[index].name!r} has length {self._state.shapes[index][axis]} after "
                    f"{self.length} tokens",
                )
        scores = next((output for output in result.outputs if output.index == self._roles.logits), None)
        if scores is None:
            return None
        raw = self._slab.output(self._slot, scores.index)[: scores.nbytes]
        rows = raw.view(_dtype(self._contract.outputs[scores.index])).reshape(-1, self._roles.vocabulary)
        last: NDArray[Any] = rows[-1]
        return last


def _dtype(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype(spec.dtype.numpy)
