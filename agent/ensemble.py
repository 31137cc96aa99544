"""Several models on one input: the contract that their members' give together, and who is asked what. Pure.

An ensemble takes what its members take, each input once by its name, and gives `MEMBER.OUTPUT` for each output of each
member. What one member would refuse, the ensemble refuses, naming it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from targets.errors import ContractError
from targets.tensor import Contract, Dim, DimRange, TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """What one member is asked: `inputs` are indices into the ensemble's inputs, in the order of the member's contract;
    `outputs` into the member's outputs, in the order wished for."""

    member: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Ensemble:
    """Members by name, with the contract of each.

    `contract` has inputs as loose as the loosest member's; `parts` asks each of them, and so what is wrong is said in
    the name of one. Raises ContractError where one input cannot be every member's that takes it.
    """

    def __init__(self, members: Mapping[str, Contract]) -> None:
        self._members = dict(members)
        takers: dict[str, list[tuple[str, Contract, TensorSpec]]] = {}
        for member, contract in members.items():
            for spec in contract.inputs:
                takers.setdefault(spec.name, []).append((member, contract, spec))
        dims: dict[str, DimRange] = {}
        inputs = tuple(_merged(specs, dims) for specs in takers.values())
        self._outputs = [(member, at) for member, each in members.items() for at in range(len(each.outputs))]
        outputs = tuple(_output(member, members[member].outputs[at]) for member, at in self._outputs)
        try:
            self.contract = Contract(inputs, outputs, dims)
        except ValueError as error:
            raise ContractError(
                f"the members' names cannot be told apart: {error}", "rename one under [[models]]"
            ) from None
        self._positions = {spec.name: position for position, spec in enumerate(inputs)}

    def parts(self, shapes: Sequence[Sequence[int]], wishes: Sequence[int]) -> tuple[Part, ...]:
        """Who is asked what, for inputs of these shapes and outputs by index, both in the order of `contract`.

        Members of whose outputs none is wished for are not asked, but their inputs are checked all the same. Raises
        ContractError that names the member.
        """
        parts = []
        for member, contract in self._members.items():
            inputs = tuple(self._positions[spec.name] for spec in contract.inputs)
            given = {spec.name: (spec.dtype, shapes[at]) for spec, at in zip(contract.inputs, inputs, strict=True)}
            try:
                contract.check_inputs(given)
            except ContractError as error:
                raise ContractError(f"member {member!r}: {error.message}", error.hint) from None
            outputs = tuple(at for owner, at in map(self._outputs.__getitem__, wishes) if owner == member)
            if outputs:
                parts.append(Part(member, inputs, outputs))
        return tuple(parts)

    def owner(self, output: int) -> tuple[str, int]:
        """(member, index into its outputs) of an output of `contract`."""
        return self._outputs[output]


def _merged(takers: Sequence[tuple[str, Contract, TensorSpec]], dims: dict[str, DimRange]) -> TensorSpec:
    """One input as loose as the loosest of those who take it; the ranges of its axes go into `dims`."""
    (first, _, spec), *others = takers
    for member, _, other in others:
        if other.dtype is not spec.dtype or len(other.shape) != len(spec.shape) or other.layout != spec.layout:
            raise ContractError(
                f"{first!r} takes {spec.describe()}, {member!r} takes {other.describe()}",
                "what several members take must be one tensor for all: name it differently, or leave one out",
            )
    shape: list[Dim] = []
    for axis in range(len(spec.shape)):
        ranges = [_range(contract, each.shape[axis]) for _, contract, each in takers]
        low, high = min(each.min for each in ranges), max(each.max for each in ranges)
        name = f"{spec.name}.{axis}"
        if low < high:
            dims[name] = DimRange(low, high, high)
        shape.append(name if low < high else low)
    return TensorSpec(spec.name, spec.dtype, tuple(shape), max(each.max_nbytes for _, _, each in takers), spec.layout)


def _range(contract: Contract, dim: Dim) -> DimRange:
    return DimRange(dim, dim, dim) if isinstance(dim, int) else contract.dims[dim]


def _output(member: str, spec: TensorSpec) -> TensorSpec:
    return TensorSpec(f"{member}.{spec.name}", spec.dtype, spec.shape, spec.max_nbytes, spec.layout)
