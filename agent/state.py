"""State in a slot: which of the two places of a pair is read next, and which shape it has.

`targets.states` says how the places swap roles from one run to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent.engine.channel import Slab
from agent.request import Result
from targets.tensor import Contract, nbytes


class Step(NamedTuple):
    """One run: what the gateway is asked."""

    shapes: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    outputs: tuple[int, ...]
    turn: bool


class SlotState:
    """State of one text or sequence. `shapes` has that of every input that is state, by index, as it is now."""

    def __init__(self, contract: Contract, slab: Slab, slot: int) -> None:
        """It begins: with nothing where it grows, with zeros elsewhere."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        self._contract, self._pairs, self._turn = contract, contract.pairs, False
        axes = {each.input: each.axis for each in contract.states or ()}
        for index in self._pairs:
            spec = contract.inputs[index]
            axis = axes[spec.name]
            self.shapes[index] = tuple(0 if at == axis else int(dim) for at, dim in enumerate(spec.shape))
            slab.input(slot, index)[: nbytes(spec.dtype, self.shapes[index])] = 0

    def step(self, given: Mapping[int, tuple[int, ...]], outputs: Sequence[int]) -> Step:
        """A run on what stands in the slot: `given` are shapes of all other inputs, `outputs` those that are wanted
        beside state, by index."""
        shapes = {**given, **self.shapes}
        specs = self._contract.inputs
        sizes = tuple(nbytes(spec.dtype, shapes[index]) for index, spec in enumerate(specs))
        ordered = tuple(shapes[index] for index in range(len(specs)))
        return Step(ordered, sizes, (*self._pairs.values(), *outputs), self._turn)

    def take(self, result: Result) -> None:
        """That run is over."""
        left = {output.index: output.shape for output in result.outputs}
        self.shapes = {index: left[of] for index, of in self._pairs.items()}
        self._turn = not self._turn
