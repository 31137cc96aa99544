"""Requests of unequal length in one batch: whether filling the shorter up with zeros leaves its answer as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.activations import ActivationCache
from compile.calibrate.samples import Sample
from compile.errors import DataError, OptionError, VerificationError
from compile.verify import Comparison, Link, run_chain
from targets.errors import did_you_mean
from targets.tensor import Contract, DType, Padding

_ADVICE = "leave --pad out: then only requests of one length run together"


def check_padding(inputs: Contract, dim: str) -> None:
    """What can be refused before the model has run. Raises OptionError."""
    if dim not in inputs.dims:
        raise OptionError(f"--pad: no dimension {dim!r} has a range", did_you_mean(dim, inputs.dims))
    if inputs.batch is None or dim == inputs.batch:
        raise OptionError(
            "--pad: padding is for requests that run together along another dimension, the batch", _ADVICE
        )
    if not unequal(inputs, dim):
        raise OptionError(f"--pad: {dim} = {inputs.dims[dim]} has no two sizes in one bucket", _ADVICE)
    for spec in inputs.inputs:
        if spec.shape.count(dim) > 1 or (dim in spec.shape and spec.dtype is DType.STRING):
            raise OptionError(f"--pad: {spec.describe()} cannot be padded along {dim!r}", _ADVICE)


def unequal(inputs: Contract, dim: str) -> list[tuple[int, int]]:
    """(smallest size, bucket) of every bucket that has more than one size: the most that padding can add."""
    sizes = inputs.dims[dim]
    pairs = ((max(below + 1, 1), bucket) for below, bucket in pairwise((sizes.min - 1, *sizes.buckets)))
    return [(size, bucket) for size, bucket in pairs if size < bucket]


def verify_padding(
    chain: Sequence[Link],
    inputs: Contract,
    dim: str,
    sample_of: Callable[[int], Sample],
    results: Sequence[str],
    cache: ActivationCache,
    limit: float,
) -> Padding:
    """Run the source model on the shortest sequence of every bucket, as it is and filled up with zeros to the bucket.

    `sample_of` makes a sample in which the dimension has the given size. Raises OptionError where an output's own part
    differs by a relative L2 of more than `limit`. The source is asked for the reason that `verify_rows` gives.
    """
    axes: dict[str, int | None] = {}
    for size, bucket in unequal(inputs, dim):
        alone = sample_of(size)
        filled = dict(alone)
        for spec in inputs.inputs:
            if dim in spec.shape:
                filled[spec.name] = _filled(alone[spec.name], spec.shape.index(dim), bucket)
        try:
            made = run_chain(chain, [alone, filled], results, cache)
            for name in results:
                axis = _compare(name, np.asarray(made(name, 0)), np.asarray(made(name, 1)), size, bucket, limit)
                if axes.setdefault(name, axis) != axis:
                    raise VerificationError(f"output {name!r} follows it on another axis")
        except (VerificationError, DataError) as error:
            raise OptionError(
                f"--pad: {size} positions along {dim!r} are not the same filled up to {bucket}: {error.message}",
                _ADVICE,
            ) from None
    return Padding(dim, tuple(axes[name] for name in results))


def _filled(array: npt.NDArray[Any], axis: int, size: int) -> npt.NDArray[Any]:
    widths = [(0, size - length if at == axis else 0) for at, length in enumerate(array.shape)]
    return np.pad(array, widths)


def _compare(
    name: str, alone: npt.NDArray[Any], filled: npt.NDArray[Any], size: int, bucket: int, limit: float
) -> int | None:
    """The axis that grew with the padding; raises VerificationError where what is not padding differs."""
    grown = [
        axis for axis, (a, b) in enumerate(zip(alone.shape, filled.shape, strict=False)) if (a, b) == (size, bucket)
    ]
    axis = grown[0] if len(grown) == 1 and alone.shape != filled.shape else None
    comparison = Comparison(name)
    comparison.add(alone, filled if axis is None else filled.take(range(size), axis))
    relative = comparison.result().relative_l2
    if relative > limit:
        raise VerificationError(f"output {name!r} differs by a relative L2 of {relative:.3g}")
    return axis
