"""Tensors as both halves speak of them: element types, shapes with named dimensions, sizes in bytes."""

from __future__ import annotations

import enum
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise

import msgspec
from msgspec import UNSET, UnsetType

from targets.errors import ContractError, TightfitError, did_you_mean
from targets.states import State, Sum
from targets.windows import Split


class DType(str, enum.Enum):
    """Element types. The value stands in manifests and board files; `TABLE` holds what else is known."""

    BOOL = "bool"
    UINT4 = "uint4"
    INT4 = "int4"
    UINT8 = "uint8"
    INT8 = "int8"
    UINT16 = "uint16"
    INT16 = "int16"
    UINT32 = "uint32"
    INT32 = "int32"
    UINT64 = "uint64"
    INT64 = "int64"
    FLOAT8E4M3 = "float8e4m3"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    STRING = "string"

    @property
    def bits(self) -> int:
        """Bits of one element; 0 for strings, whose size is in the data."""
        return TABLE[self][0]

    @property
    def oip(self) -> str | None:
        """Name in the Open Inference Protocol (section "Tensor Data Types"); None where it has none."""
        return TABLE[self][1]

    @property
    def numpy(self) -> str | None:
        """Little-endian numpy type string; None where numpy has no such type."""
        return TABLE[self][2]


# dtype: (bits, Open Inference Protocol name, numpy type string)
TABLE: dict[DType, tuple[int, str | None, str | None]] = {
    DType.BOOL: (8, "BOOL", "|b1"),
    DType.UINT4: (4, None, None),
    DType.INT4: (4, None, None),
    DType.UINT8: (8, "UINT8", "|u1"),
    DType.INT8: (8, "INT8", "|i1"),
    DType.UINT16: (16, "UINT16", "<u2"),
    DType.INT16: (16, "INT16", "<i2"),
    DType.UINT32: (32, "UINT32", "<u4"),
    DType.INT32: (32, "INT32", "<i4"),
    DType.UINT64: (64, "UINT64", "<u8"),
    DType.INT64: (64, "INT64", "<i8"),
    DType.FLOAT8E4M3: (8, None, None),
    DType.FLOAT16: (16, "FP16", "<f2"),
    DType.BFLOAT16: (16, "BF16", None),
    DType.FLOAT32: (32, "FP32", "<f4"),
    DType.FLOAT64: (64, "FP64", "<f8"),
    DType.STRING: (0, "BYTES", "|O"),
}

FROM_OIP: dict[str, DType] = {row[1]: dtype for dtype, row in TABLE.items() if row[1]}

Dim = int | str
"""A dimension: a size, or the name of a range in the contract."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, element type and shape of a model input or output.

    `max_nbytes` is what one value may need at the upper ends of all ranges. It is stated, not derived,
    because an output's shape may depend on data, and strings have no size of their own.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    max_nbytes: int
    layout: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor needs a name")
        if self.max_nbytes < 0 or any(isinstance(d, int) and d < 0 for d in self.shape):
            raise ValueError(f"tensor {self.name!r}: sizes cannot be negative")

    def describe(self) -> str:
        """As people write it: `x float32[1,3,48,width]`."""
        return f"{self.name} {self.dtype.value}[{','.join(map(str, self.shape))}]"


# Requests of one bucket wait for each other: with more buckets fewer meet, with fewer they are padded further.
MAX_BUCKETS = 8
# From this size on buckets grow by at most half; below, they double.
_FINE = 16


def ladder(low: int, opt: int, high: int) -> tuple[int, ...]:
    """Bucket sizes for low..high: ascending, at most MAX_BUCKETS, `low` (1 at least), `opt` and `high` among them.

    From below 16 they double (1, 2, 4, 8); else they grow in equal ratios of at most 1.5, by multiples of 8 or 16.
    Where that makes too many, the ratio is as much larger as it must be.
    """
    first = min(max(low, 1), high)
    fixed = {first, opt, high}
    doubled = fixed.union(first << i for i in range(high.bit_length()) if first << i < high)
    if first < _FINE and len(doubled) <= MAX_BUCKETS:
        return tuple(sorted(doubled))
    spans = list(pairwise(sorted({first, max(opt, first), high})))
    ratio = 1.5
    while sum(steps := [math.ceil(math.log(b / a, ratio)) for a, b in spans]) + (opt < first) >= MAX_BUCKETS:
        ratio *= 1.1
    between = [_even(a * (b / a) ** (i / n)) for (a, b), n in zip(spans, steps, strict=True) for i in range(1, n)]
    return tuple(sorted(fixed.union(size for size in between if first < size < high)))


def _even(size: float) -> int:
    grain = 16 if size >= 128 else 8 if size >= 24 else 1
    return round(size / grain) * grain


class DimRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Closed range of a named dimension; `opt` is the size to be fastest at.

    `buckets` are the sizes that requests are grouped by, those of `ladder` where none are given: ascending, `opt`
    among them, `max` the last. They say which requests may share a batch; every size in the range is taken.
    """

    min: int
    opt: int
    max: int
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise ValueError(f"a range needs 0 <= min <= opt <= max, not {self.min}, {self.opt}, {self.max}")
        if not self.buckets:
            msgspec.structs.force_setattr(self, "buckets", ladder(self.min, self.opt, self.max))
        rising = all(a < b for a, b in pairwise(self.buckets))
        if not rising or self.buckets[0] < self.min or self.buckets[-1] != self.max or self.opt not in self.buckets:
            raise ValueError(
                f"buckets must rise from {self.min} or more to {self.max} and hold {self.opt}, "
                f"not {', '.join(map(str, self.buckets))}"
            )

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}..{self.max}"

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max

    def spelled(self) -> str:
        """As `--shape` reads it, whole: `320..640..1280`, or with buckets of its own `320..640..320/640/1280`."""
        own = self.buckets != ladder(self.min, self.opt, self.max)
        if self.min == self.max and not own:
            return str(self.min)
        last = "/".join(map(str, self.buckets)) if own else str(self.max)
        return f"{self.min}..{last}" if self.opt == self.max else f"{self.min}..{self.opt}..{last}"

    def bucket(self, size: int) -> int:
        """The smallest bucket that holds a size of the range; ContractError for a size outside of it."""
        if size not in self:
            raise ContractError(f"size {size} is outside {self}")
        return self.buckets[bisect_left(self.buckets, size)]


class Padding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs may be filled up with zeros along dimension `dim`, at its end and up to its bucket: what they give is then
    the same, followed by what padding gives along axis `axes[i]` of output i; None where an output has no such axis."""

    dim: str
    axes: tuple[int | None, ...]


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle promises to take and to give. Input dimensions are numbers or names found in `dims`.

    `batch`: the dimension along which requests can be put together and answers be taken apart, axis 0 of every input
    and output: each row is computed as if it were alone. None where there is none. `split`: the dimension of which more
    than its range allows is taken, and run in windows. `pad`: the dimension along which requests of one batch need not
    be equally long. `states`: what one run leaves to the next of the same session. `sums`: dimensions that follow from
    others.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: dict[str, DimRange]
    batch: str | None = None
    split: Split | UnsetType = UNSET
    pad: Padding | UnsetType = UNSET
    states: tuple[State, ...] | UnsetType = UNSET
    sums: tuple[Sum, ...] | UnsetType = UNSET

    def __post_init__(self) -> None:
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            names = [spec.name for spec in specs]
            if len(set(names)) != len(names):
                raise ValueError(f"two {kind}s have one name: {', '.join(names)}")
        for spec in self.inputs:
            unknown = [d for d in spec.shape if isinstance(d, str) and d not in self.dims]
            if unknown:
                raise ValueError(f"input {spec.name!r}: no range for dimension {unknown[0]!r}")
        if self.batch is not None:
            if self.batch not in self.dims:
                raise ValueError(f"no range for the batch {self.batch!r}")
            for spec in (*self.inputs, *self.outputs):
                if [axis for axis, dim in enumerate(spec.shape) if dim == self.batch] != [0]:
                    raise ValueError(f"the batch {self.batch!r} must be axis 0, and no other, of {spec.describe()}")

        if self.split is not UNSET:
            self._check_split(self.split)
        if self.pad is not UNSET:
            self._check_padding(self.pad)
        if self.states is not UNSET:
            self._check_states(self.states)
        self._check_sums()

    def _check_sums(self) -> None:
        used = {dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str)}
        for each in self.sums or ():
            if not each.of or not used.issuperset(dim for dim in (each.dim, *each.of) if isinstance(dim, str)):
                raise ValueError(f"{each.dim!r} is no sum of dimensions that inputs have: {each.of}")

    def _check_states(self, states: tuple[State, ...]) -> None:
        inputs = {spec.name: spec for spec in self.inputs}
        outputs = {spec.name: spec for spec in self.outputs}
        if not states or self.batch is not None or self.split is not UNSET:
            raise ValueError("state is that of one request: there is no batch, and nothing is split")
        if len({each.input for each in states}) + len({each.output for each in states}) != 2 * len(states):
            raise ValueError("a tensor is part of two pairs of state")
        for each in states:
            into, of = inputs.get(each.input), outputs.get(each.output)
            if into is None or of is None or into.dtype is not of.dtype or into.dtype is DType.STRING:
                raise ValueError(f"{each.input!r} and {each.output!r} are not input and output of one type")
            dim = into.shape[each.axis] if each.axis is not None and each.axis < len(into.shape) else None
            if each.axis is not None and not (isinstance(dim, str) and self.dims[dim].min == 0):
                raise ValueError(f"state {into.describe()} cannot grow from nothing along axis {each.axis}")
            if any(isinstance(dim, str) for axis, dim in enumerate(into.shape) if axis != each.axis):
                raise ValueError(f"state {into.describe()} can have more than one shape")

    def _check_padding(self, pad: Padding) -> None:
        if pad.dim not in self.dims or self.batch is None or pad.dim == self.batch:
            raise ValueError(f"{pad.dim!r} cannot be padded: it is no dimension beside the batch")
        if len(pad.axes) != len(self.outputs):
            raise ValueError(f"padding along {pad.dim!r} says of {len(pad.axes)} outputs what comes of it")
        self._check_along(pad.dim, "padded")
        for spec, axis in zip(self.outputs, pad.axes, strict=True):
            if axis is not None and not 0 < axis < len(spec.shape):
                raise ValueError(f"{spec.describe()} has no axis {axis} beside the batch")

    def _check_along(self, dim: str, done: str) -> None:
        """Inputs have the dimension once at the most, and elements that can be taken apart."""
        for spec in self.inputs:
            if spec.shape.count(dim) > 1 or (dim in spec.shape and spec.dtype is DType.STRING):
                raise ValueError(f"{spec.describe()} cannot be {done} along {dim!r}")

    def _check_split(self, split: Split) -> None:
        if split.dim not in self.dims or self.dims[split.dim].max != split.window or split.dim == self.batch:
            raise ValueError(f"windows of {split.window} are not the largest size of a dimension {split.dim!r}")
        if len(split.joins) != len(self.outputs):
            raise ValueError(f"windows of {len(self.outputs)} outputs are joined in {len(split.joins)} ways")
        self._check_along(split.dim, "cut")
        for spec, join in zip(self.outputs, split.joins, strict=True):
            if spec.dtype is DType.STRING or (join.axis is not None and join.axis >= len(spec.shape)):
                raise ValueError(f"{spec.describe()} cannot be joined along axis {join.axis}")

    @property
    def whole(self) -> Contract:
        """What clients may send and get: where sequences are split, ranges and bytes go up to the longest."""
        if self.split is UNSET:
            return self
        split, sizes = self.split, self.dims[self.split.dim]
        return Contract(
            tuple(
                _longer(spec, split.longest, split.window) if split.dim in spec.shape else spec for spec in self.inputs
            ),
            tuple(
                spec
                if join.axis is None
                else _longer(spec, -(-split.longest * join.made // join.of), split.window * join.made // join.of)
                for spec, join in zip(self.outputs, split.joins, strict=True)
            ),
            {**self.dims, split.dim: DimRange(sizes.min, sizes.opt, split.longest)},
            self.batch,
        )

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of the place of every input, and of every output, in a slot.

        Those of a pair of state swap roles from one run to the next, so both are as large as the larger.
        """
        inputs = {spec.name: spec.max_nbytes for spec in self.inputs}
        outputs = {spec.name: spec.max_nbytes for spec in self.outputs}
        for each in self.states or ():
            inputs[each.input] = outputs[each.output] = max(inputs[each.input], outputs[each.output])
        return tuple(inputs.values()), tuple(outputs.values())

    @property
    def pairs(self) -> dict[int, int]:
        """Index of every input that is state -> index of the output that it was."""
        inputs = {spec.name: index for index, spec in enumerate(self.inputs)}
        outputs = {spec.name: index for index, spec in enumerate(self.outputs)}
        return {inputs[each.input]: outputs[each.output] for each in self.states or ()}

    @property
    def without_state(self) -> Contract:
        """What a client sends and gets whose state is kept for it."""
        past = {each.input for each in self.states or ()}
        left = {each.output for each in self.states or ()}
        return Contract(
            tuple(spec for spec in self.inputs if spec.name not in past),
            tuple(spec for spec in self.outputs if spec.name not in left),
            self.dims,
        )

    @property
    def answer_bytes(self) -> int:
        """What one answer takes that is put together of windows: the longest outputs, and of a mean its sum and what is
        added to it, both of 64 bits. 0 where nothing is split."""
        if self.split is UNSET:
            return 0
        return sum(
            spec.max_nbytes if join.axis is not None else spec.max_nbytes * 128 // spec.dtype.bits
            for spec, join in zip(self.whole.outputs, self.split.joins, strict=True)
        )

    @property
    def batch_rows(self) -> int:
        """The most rows that requests put together may have; 0 where they cannot be: there is no batch dimension, or
        inputs or outputs are strings, of which nobody knows before where a row ends."""
        if self.batch is None or any(spec.dtype is DType.STRING for spec in (*self.inputs, *self.outputs)):
            return 0
        return self.dims[self.batch].max

    def size_of(self, dim: str, shapes: Sequence[Sequence[int]]) -> int:
        """The size of a named dimension where the inputs have these shapes: what `check_inputs` found them to agree on.

        Raises KeyError for a dimension that no input has.
        """
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if dim in spec.shape:
                return shape[spec.shape.index(dim)]
        raise KeyError(dim)

    def alike(self, shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Requests of which this is equal may be put together: the shapes of all inputs apart from axis 0, where they
        can be padded with the bucket in the place of the size. Only of a contract with a batch, and shapes of its own.

        With state none may; then those that take about as long are alike: what is new is equally much.
        """
        if self.states is not UNSET:
            grown = {each.dim for each in self.sums or ()}
            past = {each.input for each in self.states}
            return tuple(
                tuple(shape)
                for spec, shape in zip(self.inputs, shapes, strict=True)
                if spec.name not in past and grown.isdisjoint(spec.shape)
            )
        if self.pad is UNSET:
            return tuple(tuple(shape[1:]) for shape in shapes)
        dim = self.pad.dim
        return tuple(
            tuple(
                self.dims[dim].bucket(size) if named == dim else size
                for named, size in zip(spec.shape[1:], shape[1:], strict=True)
            )
            for spec, shape in zip(self.inputs, shapes, strict=True)
        )

    def input(self, name: str) -> TensorSpec:
        """The input of that name, or ContractError naming those there are."""
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise ContractError(f"unknown input {name!r}", did_you_mean(name, (s.name for s in self.inputs)))

    def check_inputs(self, given: Mapping[str, tuple[DType, Sequence[int]]]) -> dict[str, int]:
        """Check names, dtypes and shapes of one request; returns the size of every named dimension.

        Raises ContractError for the first thing wrong: a missing or unknown input, another dtype, another
        rank, a size outside its range, or two tensors that disagree on a shared dimension.
        """
        for name in given:
            self.input(name)
        sizes: dict[str, int] = {}
        owner: dict[str, str] = {}
        for spec in self.inputs:
            if spec.name not in given:
                wanted = ", ".join(s.describe() for s in self.inputs)
                raise ContractError(f"input {spec.name!r} is missing", f"the model takes: {wanted}")
            dtype, shape = given[spec.name]
            self._check_one(spec, dtype, shape)
            for dim, size in zip(spec.shape, shape, strict=True):
                if isinstance(dim, int):
                    continue
                if sizes.setdefault(dim, size) != size:
                    raise ContractError(
                        f"inputs {owner[dim]!r} and {spec.name!r} disagree on dimension {dim!r}: "
                        f"{sizes[dim]} and {size}",
                        "they must be equal",
                    )
                owner.setdefault(dim, spec.name)
        for each in self.sums or ():
            wanted_size = sum(dim if isinstance(dim, int) else sizes[dim] for dim in each.of)
            if sizes[each.dim] != wanted_size:
                raise ContractError(
                    f"dimension {each.dim!r} of input {owner[each.dim]!r} is {sizes[each.dim]}, not {wanted_size}",
                    f"it is {' + '.join(map(str, each.of))}",
                )
        return sizes

    def bucket(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The bucket of every named dimension, for the sizes that `check_inputs` returns: the smallest that holds it.

        Requests with equal buckets may share a batch. Raises ContractError for a dimension without a range and for a
        size outside its range.
        """
        found: dict[str, int] = {}
        for name, size in sizes.items():
            if name not in self.dims:
                raise ContractError(f"unknown dimension {name!r}", did_you_mean(name, self.dims))
            found[name] = self.dims[name].bucket(size)
        return found

    def _check_one(self, spec: TensorSpec, dtype: DType, shape: Sequence[int]) -> None:
        if dtype is not spec.dtype:
            raise ContractError(
                f"input {spec.name!r} is {dtype.value}", f"the model takes {spec.describe()}; convert it first"
            )
        if len(shape) != len(spec.shape):
            raise ContractError(
                f"input {spec.name!r} has {len(shape)} dimensions {list(shape)}",
                f"the model takes {spec.describe()}",
            )
        for axis, (dim, size) in enumerate(zip(spec.shape, shape, strict=True)):
            allowed = dim if isinstance(dim, int) else self.dims[dim]
            if not (size == allowed if isinstance(allowed, int) else size in allowed):
                raise ContractError(
                    f"input {spec.name!r} has size {size} on axis {axis}",
                    f"the bundle was compiled for {allowed} there ({spec.describe()})",
                )


def _longer(spec: TensorSpec, size: int, of: int) -> TensorSpec:
    """The spec with as many bytes as for `size` positions, where it has what `of` of them need."""
    return msgspec.structs.replace(spec, max_nbytes=-(-spec.max_nbytes * size // of))


def nbytes(dtype: DType, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor; sub-byte types are packed, rounded up to a whole byte at the end."""
    if dtype is DType.STRING:
        raise ValueError("a string tensor has no size apart from its data")
    elements = 1
    for size in shape:
        elements *= size
    return (elements * dtype.bits + 7) // 8


def human(nbytes: float) -> str:
    """Bytes for people, in binary units: `1.5 GiB`."""
    if abs(nbytes) >= 1 << 63:
        return "more than 8 EiB"  # not to be divided: an integer can be larger than any float
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)} | {"KB": 1000}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of `3.4GiB`, `900 MiB`, `2GB` or plain `1048576`, rounded down; raises TightfitError for anything else.

    Units are those of IEC 80000-13: GiB = 2^30, GB = 10^9. A bare `G` is refused, because programs differ about it.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise TightfitError(f"{text!r} is not a size", "write 3.4GiB, 900MiB, 2GB or a number of bytes")
    return int(Decimal(match[1]) * _UNITS[match[2]])
