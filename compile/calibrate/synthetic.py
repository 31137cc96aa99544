"""Seeded random samples, where a person gives none: they show that a model runs, not how accurate it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.calibrate.control import control_inputs
from compile.calibrate.samples import Sample
from compile.errors import DataError
from compile.graph import ir
from compile.shapes import sizes_at
from targets.tensor import Contract, DimRange, DType, TensorSpec


def random_samples(model: ir.Model, contract: Contract, corners: tuple[str, ...]) -> list[Sample]:
    """Seeded random samples, one for each corner (`min`, `opt`, `max`) of the dimension ranges.

    Floats are standard normal. Integers that index a table stay within it; all others are 0 or 1, as masks
    and flags are. Such data says whether a model runs, little about its accuracy.
    """
    limits = indexed_rows(model)
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for corner in corners:
        sizes = sizes_at(contract.dims, corner)
        samples.append({spec.name: _random(rng, spec, sizes, limits.get(spec.name, 2)) for spec in contract.inputs})
    return samples


def unmasked_sample(model: ir.Model, contract: Contract, sizes: Mapping[str, int]) -> Sample:
    """A random sample with dimensions of these sizes, in which masks and flags are 1: all of it counts."""
    dims = {**contract.dims, **{name: DimRange(size, size, size) for name, size in sizes.items()}}
    sample = random_samples(model, Contract(contract.inputs, (), dims), ("opt",))[0]
    tables = indexed_rows(model)
    flags = [name for name, array in sample.items() if array.dtype.kind in "iub" and name not in tables]
    return {**sample, **{name: np.ones_like(sample[name]) for name in flags}}


def largest_sample(model: ir.Model, contract: Contract, samples: Sequence[Sample]) -> Sample:
    """A random sample at the upper ends of all ranges; inputs whose values decide shapes are as in the first given
    sample that has them at full size."""
    largest = random_samples(model, contract, ("max",))[0]
    for name in control_inputs(model):
        given = (sample[name] for sample in samples if sample[name].shape == largest[name].shape)
        largest[name] = next(given, largest[name])
    return largest


def _random(rng: np.random.Generator, spec: TensorSpec, sizes: Mapping[str, int], limit: int) -> npt.NDArray[Any]:
    shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
    if spec.dtype is DType.STRING:
        return rng.choice(np.array(["alpha", "beta", "gamma"], object), shape)
    if spec.dtype.numpy is None:
        raise DataError(
            f"input {spec.name!r} is {spec.dtype.value}, which numpy cannot hold", "give it float32 in front"
        )
    dtype = np.dtype(spec.dtype.numpy)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return np.asarray(rng.integers(0, min(limit, 2 if dtype.kind == "b" else limit), shape)).astype(dtype)


# Operators whose second input indexes their first, and the attribute that says along which axis.
_LOOKUPS = {"Gather": "axis", "GatherBlockQuantized": "gather_axis"}
_SAME_VALUES = frozenset({"Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten"})


def indexed_rows(model: ir.Model) -> dict[str, int]:
    """Rows of the smallest table that each input of the graph indexes, looking through shape changes and casts."""
    rows: dict[str, int] = {}
    for graph_input in model.graph.inputs:
        frontier, seen = [graph_input], {graph_input}
        while frontier:
            value = frontier.pop()
            for use in value.uses():
                if use.node.op_type in _LOOKUPS and use.idx == 1:
                    axis = use.node.attributes.get(_LOOKUPS[use.node.op_type])
                    size = _size(use.node.inputs[0], 0 if axis is None else int(axis.value))
                    if size:
                        name = graph_input.name or ""
                        rows[name] = min(rows.get(name, size), size)
                elif use.node.op_type in _SAME_VALUES:
                    fresh = [v for v in use.node.outputs if v not in seen]
                    seen.update(fresh)
                    frontier.extend(fresh)
    return rows


def _size(value: ir.Value | None, axis: int) -> int | None:
    dims = value.shape if value is not None else None
    return dims[axis] if dims is not None and isinstance(dims[axis], int) else None  # type: ignore[return-value]


def corners(dims: Mapping[str, DimRange]) -> tuple[str, ...]:
    """Corners worth a sample each: all three where something varies, else one."""
    return ("opt", "min", "max") if dims else ("opt",)
