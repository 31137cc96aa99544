"""Tensors as both halves speak of them: element types, shapes with named dimensions, sizes in bytes."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec

from targets.errors import ContractError, TightfitError, did_you_mean


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


class DimRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Closed range of a named dimension; `opt` is the size to be fastest at."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise ValueError(f"a range needs 0 <= min <= opt <= max, not {self.min}, {self.opt}, {self.max}")

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}..{self.max}"


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle promises to take and to give. Input dimensions are numbers or names found in `dims`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: dict[str, DimRange]

    def __post_init__(self) -> None:
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            names = [spec.name for spec in specs]
            if len(set(names)) != len(names):
                raise ValueError(f"two {kind}s have one name: {', '.join(names)}")
        for spec in self.inputs:
            unknown = [d for d in spec.shape if isinstance(d, str) and d not in self.dims]
            if unknown:
                raise ValueError(f"input {spec.name!r}: no range for dimension {unknown[0]!r}")

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
        return sizes

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
            allowed = DimRange(dim, dim, dim) if isinstance(dim, int) else self.dims[dim]
            if not allowed.min <= size <= allowed.max:
                raise ContractError(
                    f"input {spec.name!r} has size {size} on axis {axis}",
                    f"the bundle was compiled for {allowed} there ({spec.describe()})",
                )


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
