"""Ranges for the dynamic dimensions of a model: `--shape x=1..8,3,48,320..1600`."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType

from compile.errors import ModelError, OptionError
from compile.graph import contract_dtype, ir
from compile.states import Pair, pairs_of, terms_of
from targets.errors import did_you_mean
from targets.states import State, Sum
from targets.tensor import Contract, DimRange, DType, Padding, TensorSpec, nbytes
from targets.windows import Split

# Sizes of 18 digits are more than any tensor has.
_SIZE = r"(\d{1,18})"
_DIM = re.compile(rf"(?:{_SIZE}\.\.)?(?:{_SIZE}\.\.)?({_SIZE[1:-1]}(?:/{_SIZE[1:-1]})*)", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_EXAMPLE = (
    "write NAME=DIM,DIM,... with DIM a size, MIN..MAX or MIN..OPT..MAX, as in x=1..8,3,48,320..1600; MAX may be the "
    "sizes to group requests by, as in 320..480/640/1600"
)

ShapeRequest = tuple[str, tuple[DimRange, ...]]
"""An input name (or a pattern such as `past.*`) and the range of each of its axes; or a symbol and its range."""


def parse_shape(text: str) -> ShapeRequest:
    """Read one `--shape` option; raises OptionError that shows the grammar."""
    name, equals, dims = text.rpartition("=")
    if not equals or not name:
        raise OptionError(f"--shape {text!r} names no input", _EXAMPLE)
    return name, tuple(_parse_dim(dim.strip(), text) for dim in dims.split(",") if dims.strip() or "," in dims)


def _parse_dim(dim: str, text: str) -> DimRange:
    match = _DIM.fullmatch(dim)
    if not match:
        raise OptionError(f"--shape {text!r}: {dim!r} is not a dimension", _EXAMPLE)
    first, second, last = match.groups()
    buckets = tuple(map(int, last.split("/")))
    low, high = int(first or buckets[0]), buckets[-1]
    opt = int(second or high)
    if not low <= opt <= high:
        raise OptionError(f"--shape {text!r}: {dim!r} does not rise from MIN to MAX", _EXAMPLE)
    try:
        return DimRange(low, opt, high, buckets if len(buckets) > 1 else ())
    except ValueError as error:
        raise OptionError(f"--shape {text!r}: {dim!r}: {error}", _EXAMPLE) from None


def bind_shapes(model: ir.Model, requests: Sequence[ShapeRequest]) -> dict[str, DimRange]:
    """The ranges that `bind` gives."""
    return bind(model, requests)[0]


def bind(model: ir.Model, requests: Sequence[ShapeRequest]) -> tuple[dict[str, DimRange], tuple[Sum, ...]]:
    """Give every dynamic input dimension a size or a named range, in place; returns the ranges, and which of them are
    sums of others.

    A symbol that several inputs share is bound once, for all of them; `batch=1..8` binds it by its own name, where no
    input is called so. A range of one size becomes that size.
    Raises OptionError when a request fits no input or contradicts the model, and when dimensions stay open.
    """
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    names = [value.name or "" for value in inputs]
    for value in inputs:
        contract_dtype(value)
    open_dims = dict.fromkeys(dim for value in inputs for dim in _dims(value) if isinstance(dim, str))
    symbols: dict[str, DimRange] = {}
    for pattern, ranges in requests:
        matched = [v for v in inputs if v.name == pattern] or [
            v for v in inputs if fnmatch.fnmatchcase(v.name or "", pattern)
        ]
        if not matched and pattern in open_dims and len(ranges) == 1:
            _bind_symbol(pattern, ranges[0], symbols)
            continue
        if not matched:
            raise OptionError(
                f"--shape: no input or dimension {pattern!r}", did_you_mean(pattern, [*names, *open_dims])
            )
        for value in matched:
            _bind_one(value, ranges, symbols)
    sums = _bind_sums({value.name or "": _dims(value) for value in inputs}, symbols, pairs_of(model))
    _require_bound(inputs, symbols)
    renamed = _readable_names(inputs, symbols)
    for value in inputs:
        value.shape = ir.Shape([_bound(d, symbols, renamed) for d in _dims(value)])
    dims = {renamed[s]: r for s, r in symbols.items() if r.min != r.max}
    return dims, tuple(
        Sum(renamed[symbol], tuple(_bound(term, symbols, renamed) for term in terms))
        for symbol, terms in sums.items()
        if renamed[symbol] in dims
    )


def _bind_sums(
    inputs: Mapping[str, Sequence[int | str]], symbols: dict[str, DimRange], pairs: Sequence[Pair]
) -> dict[str, tuple[int | str, ...]]:
    """Bind what follows from other dimensions; what each is the sum of."""
    sums: dict[str, tuple[int | str, ...]] = {}
    for symbol in dict.fromkeys(dim for dims in inputs.values() for dim in dims if isinstance(dim, str)):
        terms = terms_of(symbol, inputs, pairs)
        if terms and all(isinstance(term, int) or term in symbols for term in terms):
            parts = [DimRange(t, t, t) if isinstance(t, int) else symbols[t] for t in terms]
            total = DimRange(*(sum(getattr(part, corner) for part in parts) for corner in ("min", "opt", "max")))
            given = symbols.get(symbol, total)
            if (given.min, given.max) != (total.min, total.max):
                raise OptionError(
                    f"--shape binds dimension {symbol!r} to {given}, but it is "
                    f"{' + '.join(map(str, terms))}, which is {total}",
                    "leave it out: it follows from the others",
                )
            symbols[symbol] = total
            sums[symbol] = terms
    return sums


def _dims(value: ir.Value) -> list[int | str]:
    """Axes of an input: sizes, or symbols; an unnamed axis is its own symbol, and so is one that Paddle names "?"."""
    if value.shape is None:
        raise ModelError(f"input {value.name!r} has no rank", "export the model with shapes")
    return [
        dim if isinstance(dim, int) else (str(dim.value or "").strip("?") or f"{value.name}.{axis}")
        for axis, dim in enumerate(value.shape)
    ]


def _bind_one(value: ir.Value, ranges: tuple[DimRange, ...], symbols: dict[str, DimRange]) -> None:
    dims = _dims(value)
    shown = f"{value.name}[{','.join(map(str, dims))}]"
    if len(dims) != len(ranges):
        raise OptionError(f"--shape gives {len(ranges)} dimensions for {shown}, which has {len(dims)}")
    for axis, (dim, wanted) in enumerate(zip(dims, ranges, strict=True)):
        if isinstance(dim, int):
            if (wanted.min, wanted.max) != (dim, dim):
                raise OptionError(f"--shape gives {wanted} for axis {axis} of {shown}, which is always {dim}")
        else:
            _bind_symbol(dim, wanted, symbols)


def _bind_symbol(symbol: str, wanted: DimRange, symbols: dict[str, DimRange]) -> None:
    if symbols.setdefault(symbol, wanted) != wanted:
        raise OptionError(
            f"--shape binds dimension {symbol!r} twice: {symbols[symbol].spelled()} and {wanted.spelled()}"
        )


def _require_bound(inputs: list[ir.Value], symbols: Mapping[str, DimRange]) -> None:
    missing: list[str] = []
    examples: list[str] = []
    axes: list[str] = []
    known = {symbol: wanted.spelled() for symbol, wanted in symbols.items()}
    guesses = dict(known)
    for value in inputs:
        dims = _dims(value)
        unbound = [axis for axis, dim in enumerate(dims) if isinstance(dim, str) and dim not in guesses]
        if unbound:
            guesses.update({str(dims[axis]): _guess(axis, len(dims)) for axis in unbound})
            axes.extend(_describe_axis(value, axis) for axis in unbound)
            shown = [known.get(dim, "?") if isinstance(dim, str) else dim for dim in dims]
            missing.append(f"--shape '{value.name}={','.join(map(str, shown))}'")
            filled = [guesses[dim] if isinstance(dim, str) else dim for dim in dims]
            examples.append(f"--shape '{value.name}={','.join(map(str, filled))}'")
    if missing:
        raise OptionError(
            f"the model has dynamic dimensions without a range: {'; '.join(axes)}; say {' '.join(missing)}",
            f"each ? is a size, MIN..MAX or MIN..OPT..MAX; for example {' '.join(examples)}",
        )


def _guess(axis: int, rank: int) -> str:
    """A range for an example: a batch, the sides of an image, or a sequence."""
    if axis == 0 and rank > 1:
        return "1..8"
    return "32..640" if rank >= 4 and axis >= rank - 2 else "1..256"


def _describe_axis(value: ir.Value, axis: int) -> str:
    """A dynamic axis for people: its symbol, if the exporter gave it one, where it is, and whether it is the batch."""
    dims = _dims(value)
    symbol = "" if dims[axis] == f"{value.name}.{axis}" else f"{dims[axis]!r}, "
    return f"{symbol}axis {axis} of {value.name}{', usually the batch' if axis == 0 and len(dims) > 1 else ''}"


def _readable_names(inputs: list[ir.Value], symbols: Mapping[str, DimRange]) -> dict[str, str]:
    """Symbols as clients will see them; no two symbols get one name."""
    renamed = {symbol: symbol for symbol in symbols if _IDENTIFIER.fullmatch(symbol)}
    for symbol in symbols:
        if symbol not in renamed:
            name = _axis_name(inputs, symbol)
            while name in renamed.values():
                name += "_"
            renamed[symbol] = name
    return renamed


def _axis_name(inputs: list[ir.Value], symbol: str) -> str:
    """A readable name for an exporter's `DynamicDimension.0`: the first input that has it, and the axis."""
    for value in inputs:
        for axis, dim in enumerate(_dims(value)):
            if dim == symbol:
                return re.sub(r"\W", "_", f"{value.name}_{axis}")
    raise AssertionError(f"symbol {symbol!r} belongs to no input")


def _bound(dim: int | str, symbols: Mapping[str, DimRange], renamed: Mapping[str, str]) -> int | str:
    if isinstance(dim, int):
        return dim
    wanted = symbols[dim]
    return wanted.max if wanted.min == wanted.max else renamed[dim]


def sizes_at(dims: Mapping[str, DimRange], corner: str) -> dict[str, int]:
    """Every named dimension at its `min`, `opt` or `max`."""
    return {name: int(getattr(wanted, corner)) for name, wanted in dims.items()}


def largest_nbytes(value: ir.Value, sizes: Mapping[str, int]) -> int | None:
    """Bytes of a value at these sizes of the named dimensions; None where shape or type are not known."""
    if value.shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
        return None
    elements = 1
    for dim in value.shape:
        size = dim if isinstance(dim, int) else sizes.get(dim.value or "")
        if size is None:
            return None
        elements *= size
    return math.ceil(elements * value.dtype.itemsize)


def input_shapes(model: ir.Model, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Shape of every input once the named dimensions have these sizes."""
    return {
        value.name or "": tuple(d if isinstance(d, int) else sizes[d] for d in _dims(value))
        for value in model.graph.inputs
        if value.name not in model.graph.initializers
    }


# A string has no bound of its own; this is what the agent reserves for each element of a string input.
STRING_RESERVE_BYTES = 4096


def contract_inputs(model: ir.Model, dims: Mapping[str, DimRange]) -> tuple[TensorSpec, ...]:
    """What a client sends: the inputs, in the model's order, with their bytes at the upper ends of all ranges."""
    shapes = input_shapes(model, sizes_at(dims, "max"))
    return tuple(
        TensorSpec(value.name or "", dtype, tuple(_dims(value)), _reserve(dtype, shapes[value.name or ""]))
        for value in model.graph.inputs
        if value.name in shapes
        for dtype in (contract_dtype(value),)
    )


def find_batch(inputs: Contract, wanted: str = "") -> str | None:
    """The dimension that may be the batch: axis 0, and no other, of every input, with room for two requests.

    None where there is none. Whether rows are computed apart is not known by that (`compile.verify.verify_rows`).
    Raises OptionError when `wanted` is not it.
    """
    leading = (
        name
        for name, sizes in inputs.dims.items()
        if 2 * max(sizes.min, 1) <= sizes.max
        and all([axis for axis, dim in enumerate(spec.shape) if dim == name] == [0] for spec in inputs.inputs)
    )
    found = next(leading, None)
    if wanted in ("", found):
        return found
    if wanted not in inputs.dims:
        raise OptionError(f"--batch-axis: no dimension {wanted!r} has a range", did_you_mean(wanted, inputs.dims))
    raise OptionError(
        f"--batch-axis: {wanted!r} = {inputs.dims[wanted]} is not the batch, which is axis 0, and no other, of every "
        "input and holds two requests",
        f"the model takes {'; '.join(spec.describe() for spec in inputs.inputs)}",
    )


def build_contract(
    model: ir.Model,
    dims: dict[str, DimRange],
    output_nbytes: Mapping[str, int],
    batch: str | None = None,
    split: Split | UnsetType = UNSET,
    pad: Padding | UnsetType = UNSET,
    states: Sequence[State] = (),
    sums: Sequence[Sum] = (),
) -> Contract:
    """The I/O contract; `output_nbytes` is what each output took at the upper ends of all ranges.

    `batch` is axis 0 of every output too, whether or not that could be inferred.
    """
    outputs = contract_outputs(model, dims, output_nbytes, batch)
    return Contract(
        contract_inputs(model, dims), outputs, dims, batch, split, pad, tuple(states) or UNSET, tuple(sums) or UNSET
    )


def contract_outputs(
    model: ir.Model, dims: Mapping[str, DimRange], output_nbytes: Mapping[str, int], batch: str | None = None
) -> tuple[TensorSpec, ...]:
    """What a client gets, in the model's order."""
    return tuple(
        TensorSpec(
            value.name or "", contract_dtype(value), _output_dims(value, dims, batch), output_nbytes[value.name or ""]
        )
        for value in model.graph.outputs
    )


def _reserve(dtype: DType, shape: tuple[int, ...]) -> int:
    if dtype is not DType.STRING:
        return nbytes(dtype, shape)
    elements = 1
    for size in shape:
        elements *= size
    return elements * STRING_RESERVE_BYTES


def _output_dims(value: ir.Value, dims: Mapping[str, DimRange], batch: str | None) -> tuple[int | str, ...]:
    """Output axes: sizes, names of ranges, or a name of its own where it follows from the data."""
    if value.shape is None:
        return ()
    shape = tuple(
        dim if isinstance(dim, int) else (dim.value if dim.value in dims else None) or f"{value.name}_{axis}"
        for axis, dim in enumerate(value.shape)
    )
    return shape if batch is None else (batch, *shape[1:])
