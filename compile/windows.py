"""Sequences that are longer than the bundle's range: how their windows join, and how far that is from the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from compile.activations import ActivationCache
from compile.calibrate.samples import Sample
from compile.errors import DataError, OptionError, VerificationError
from compile.verify import FLOAT_LIMIT, Comparison, Link, run_chain
from processing.windows import Joined, cut
from targets.errors import did_you_mean
from targets.tensor import Contract, DType
from targets.windows import Join, Split, Window, windows

_SPLIT = re.compile(r"([^=]+)=(\d{1,9})(?:/(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class SplitRequest:
    """Sequences along the dimension `dim` may have up to `longest` positions; windows share `overlap`."""

    dim: str
    longest: int
    overlap: int

    def __str__(self) -> str:
        return f"{self.dim}={self.longest}/{self.overlap}"


def parse_split(text: str) -> SplitRequest:
    """Read `--split`; raises OptionError that shows the grammar."""
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise OptionError(
            f"--split {text!r} is not a split",
            "write DIMENSION=LONGEST/OVERLAP, as in t=4096/32: sequences of up to 4096 positions are run in windows of "
            "the range's largest size, of which neighbours share 32",
        )
    return SplitRequest(match[1], int(match[2]), int(match[3] or 0))


def axes_of(inputs: Contract, dim: str) -> dict[str, int]:
    """Along which axis each input that has the dimension is cut. Raises OptionError where one cannot be."""
    axes: dict[str, int] = {}
    for spec in inputs.inputs:
        found = [axis for axis, each in enumerate(spec.shape) if each == dim]
        if len(found) > 1 or (found and spec.dtype is DType.STRING):
            raise OptionError(f"--split: {spec.describe()} cannot be cut along {dim!r}", "split another dimension")
        if found:
            axes[spec.name] = found[0]
    return axes


def check_split(inputs: Contract, wanted: SplitRequest) -> None:
    """What can be refused before the model has run. Raises OptionError."""
    if wanted.dim not in inputs.dims:
        raise OptionError(f"--split: no dimension {wanted.dim!r} has a range", did_you_mean(wanted.dim, inputs.dims))
    window = inputs.dims[wanted.dim].max
    if wanted.longest <= window:
        raise OptionError(
            f"--split {wanted}: the range already goes up to {window}", f"give a longest size above {window}"
        )
    if wanted.overlap >= window:
        raise OptionError(f"--split {wanted}: windows of {window} cannot share {wanted.overlap}", "share less")
    if 2 * inputs.dims[wanted.dim].min > window:
        raise OptionError(
            f"--split {wanted}: the range {inputs.dims[wanted.dim]} is too narrow to see how outputs follow it",
            f"let it begin at {window // 2} or below",
        )
    if wanted.dim == inputs.batch:
        raise OptionError(f"--split: {wanted.dim!r} is the batch: its rows are apart as they are", "send fewer rows")
    axes_of(inputs, wanted.dim)


def longest_bytes(inputs: Contract, wanted: SplitRequest | None) -> int:
    """Bytes of all inputs where the sequence is as long as it may be; without a split, as the range allows."""
    total = sum(spec.max_nbytes for spec in inputs.inputs)
    if wanted is None:
        return total
    window = inputs.dims[wanted.dim].max
    along = sum(spec.max_nbytes for spec in inputs.inputs if wanted.dim in spec.shape)
    return total - along + along // window * wanted.longest


def measure_split(
    chain: Sequence[Link],
    inputs: Contract,
    wanted: SplitRequest,
    sample_of: Callable[[int], Sample],
    results: Sequence[str],
    cache: ActivationCache,
) -> Split:
    """Run the source model on windows and on the whole, and say how what they give joins, and how far it is off.

    `sample_of` makes a sample in which the dimension has the given size. Raises OptionError where outputs do not join.
    """
    sizes, dim = inputs.dims[wanted.dim], wanted.dim
    short = max(sizes.max // 2, 1)
    shapes = [_shapes(chain, sample_of(size), results, cache) for size in (sizes.max, short)]
    joins = tuple(_join(name, shapes[0][name], shapes[1][name], sizes.max, short) for name in results)
    try:
        split = Split(dim, sizes.max, wanted.overlap, wanted.longest, joins)
    except ValueError as error:
        raise OptionError(f"--split {wanted}: {error}", "choose another overlap, or another end of the range") from None
    if split.shortest < sizes.min:
        raise OptionError(
            f"--split {wanted}: the last window may have {split.shortest} positions, the range begins at {sizes.min}",
            "let the range begin lower",
        )
    errors = _errors(chain, inputs, split, sample_of, results, cache)
    joins = tuple(msgspec.structs.replace(join, error=error) for join, error in zip(joins, errors, strict=True))
    return msgspec.structs.replace(split, joins=joins)


def windows_notes(split: Split | UnsetType, results: Sequence[str]) -> list[str]:
    """What a person should know of how long sequences are run."""
    if split is UNSET:
        return []
    where = f"more than {split.window} positions along {split.dim!r} are run in windows"
    if any(join.error is None for join in split.joins):
        return [f"{where}; the source model does not take so many, so the result could not be compared with anything"]
    named = zip(results, split.joins, strict=True)
    far = [f"{name!r} by {join.error:.3g}" for name, join in named if (join.error or 0) > FLOAT_LIMIT]
    return [f"{where}, and outputs differ from those of the whole (relative L2): {', '.join(far)}"] if far else []


def _shapes(
    chain: Sequence[Link], sample: Sample, results: Sequence[str], cache: ActivationCache
) -> dict[str, tuple[int, ...]]:
    made = run_chain(chain, [sample], results, cache)
    return {name: made(name, 0).shape for name in results}


def _join(name: str, large: tuple[int, ...], small: tuple[int, ...], window: int, short: int) -> Join:
    """How one output joins, by what becomes of its shape when the sequence is shorter."""
    changed = [axis for axis, (a, b) in enumerate(zip(large, small, strict=False)) if a != b]
    if len(large) != len(small) or len(changed) > 1:
        raise OptionError(
            f"--split: output {name!r} is {list(large)} for {window} positions and {list(small)} for {short}",
            "an output may have one axis along the sequence, or none",
        )
    if not changed:
        return Join()
    axis = changed[0]
    ratio = Fraction(large[axis], window)
    if abs(small[axis] - short * ratio) >= 1:
        raise OptionError(
            f"--split: axis {axis} of output {name!r} has {large[axis]} positions for {window} of the sequence, and "
            f"{small[axis]} for {short}",
            "windows join where the output has as many, or every n-th, or n for each, and none is lost at the edges",
        )
    return Join(axis, ratio.numerator, ratio.denominator)


def _errors(
    chain: Sequence[Link],
    inputs: Contract,
    split: Split,
    sample_of: Callable[[int], Sample],
    results: Sequence[str],
    cache: ActivationCache,
) -> list[float] | list[None]:
    """Relative L2 of each output; None where the source takes no longer sequence. Three windows are enough for
    everything that can differ: a first, one between others, and a last that shares more."""
    stride = split.window - split.overlap
    length = min(split.longest, split.window + stride + -(-stride // 2))
    whole = sample_of(length)
    seen, axes = windows(split, length), axes_of(inputs, split.dim)
    parts = [
        {name: cut(array, axes[name], window) if name in axes else array for name, array in whole.items()}
        for window in seen
    ]
    made = run_chain(chain, parts, results, cache)
    values = {
        name: _joined(name, join, seen, [np.asarray(made(name, index)) for index in range(len(seen))])
        for name, join in zip(results, split.joins, strict=True)
    }
    try:
        made = run_chain(chain, [whole], results, cache)
    except (VerificationError, DataError):
        return [None] * len(results)
    errors = []
    for name in results:
        expected = np.asarray(made(name, 0))
        if expected.shape != values[name].shape:
            raise OptionError(
                f"--split: output {name!r} is {list(expected.shape)} for {length} positions at once, "
                f"{list(values[name].shape)} in windows",
                "such outputs do not join",
            )
        comparison = Comparison(name)
        comparison.add(expected, values[name])
        errors.append(comparison.result().relative_l2)
    return errors


def _joined(name: str, join: Join, seen: Sequence[Window], values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    kind = values[0].dtype.kind
    if kind not in "fiub" or (join.axis is None and kind != "f"):
        axis = "no axis" if join.axis is None else f"axis {join.axis}"
        raise OptionError(
            f"--split: output {name!r} is {values[0].dtype}, and has {axis} along the sequence",
            "of numbers windows can be put together, of floats a mean over them can be taken",
        )
    whole = Joined(join, seen[-1].end)
    try:
        for window, value in zip(seen, values, strict=True):
            whole.add(window, value)
        return whole.result()
    except ValueError as error:
        raise OptionError(f"--split: output {name!r}: {error}", "such outputs do not join") from None
