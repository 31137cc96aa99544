"""Samples to calibrate and verify with: npz and npy files, folders of them, or random values (with a warning).

A sample is one array per model input. A file may hold several: then its arrays have one leading axis more.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.errors import DataError
from compile.graph import ir
from compile.shapes import sizes_at
from targets.errors import ContractError
from targets.tensor import Contract, DimRange, DType, TensorSpec

Sample = dict[str, npt.NDArray[Any]]

_FROM_NUMPY = {np.dtype(dtype.numpy): dtype for dtype in DType if dtype.numpy}
SUFFIXES = (".npz", ".npy")
# An npy file, an npz file, an empty npz file. Anything else numpy takes for a pickle, and advises to trust it.
_MAGIC = (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Arrays of an npz or npy file (the latter under the name ""); pickled objects are refused."""
    try:
        with path.open("rb") as file:
            if not file.read(6).startswith(_MAGIC):
                raise ValueError("it is neither an npz nor an npy file")
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)  # noqa: TID251 - the one place
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DataError(
            f"cannot read samples from {path}: {reason}", "write plain arrays with numpy.savez; objects are refused"
        ) from None


def read_samples(path: Path, contract: Contract, limit: int) -> list[Sample]:
    """At most `limit` samples, checked against the contract; DataError names the file and the array."""
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
    if not path.exists():
        raise DataError(f"{path} is not there", "name an .npz or .npy file, or a folder of them")
    if not files or files[0].suffix not in SUFFIXES:
        raise DataError(f"{path} holds no samples", f"available forms: {', '.join(SUFFIXES)}, or a folder of them")
    samples: list[Sample] = []
    for file in files:
        for sample in _split(read_npz(file), contract, file):
            if len(samples) == limit:
                return samples
            _check(sample, contract, file)
            samples.append(sample)
    if not samples:
        raise DataError(f"{path} holds no samples", "its arrays are empty")
    return samples


def _split(arrays: dict[str, npt.NDArray[Any]], contract: Contract, file: Path) -> Iterator[Sample]:
    """One sample, or, where every array has one axis more than its input, one sample per leading index."""
    if list(arrays) == [""] and len(contract.inputs) == 1:
        arrays = {contract.inputs[0].name: arrays[""]}
    specs = {spec.name: spec for spec in contract.inputs}
    extra = [array.ndim - len(specs[name].shape) for name, array in arrays.items() if name in specs]
    if extra and all(e == 1 for e in extra):
        counts = {len(array) for array in arrays.values()}
        if len(counts) > 1:
            raise DataError(f"{file}: arrays hold different numbers of samples: {sorted(counts)}")
        yield from ({name: array[i] for name, array in arrays.items()} for i in range(counts.pop()))
    else:
        yield arrays


def _check(sample: Sample, contract: Contract, file: Path) -> None:
    given: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for name, array in sample.items():
        dtype = DType.STRING if array.dtype.kind in "USO" else _FROM_NUMPY.get(array.dtype)
        if dtype is None:
            raise DataError(f"{file}: {name!r} has element type {array.dtype}, which no model input has")
        given[name] = dtype, array.shape
    try:
        contract.check_inputs(given)
    except ContractError as error:
        raise DataError(f"{file}: {error.message}", error.hint) from None


def random_samples(model: ir.Model, contract: Contract, corners: tuple[str, ...]) -> list[Sample]:
    """Seeded random samples, one for each corner (`min`, `opt`, `max`) of the dimension ranges.

    Floats are standard normal. Integers that index a table stay within it; all others are 0 or 1, as masks
    and flags are. Such data says whether a model runs, little about its accuracy.
    """
    limits = _index_limits(model)
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for corner in corners:
        sizes = sizes_at(contract.dims, corner)
        samples.append({spec.name: _random(rng, spec, sizes, limits.get(spec.name, 2)) for spec in contract.inputs})
    return samples


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


def _index_limits(model: ir.Model) -> dict[str, int]:
    """Rows of the smallest table that each integer input indexes, looking through shape changes and casts."""
    limits: dict[str, int] = {}
    for graph_input in model.graph.inputs:
        frontier, seen = [graph_input], {graph_input}
        while frontier:
            value = frontier.pop()
            for use in value.uses():
                if use.node.op_type == "Gather" and use.idx == 1:
                    table = use.node.inputs[0]
                    axis = use.node.attributes.get("axis")
                    rows = _size(table, 0 if axis is None else int(axis.value))
                    if rows:
                        name = graph_input.name or ""
                        limits[name] = min(limits.get(name, rows), rows)
                elif use.node.op_type in ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Flatten"):
                    fresh = [v for v in use.node.outputs if v not in seen]
                    seen.update(fresh)
                    frontier.extend(fresh)
    return limits


def _size(value: ir.Value | None, axis: int) -> int | None:
    dims = value.shape if value is not None else None
    return dims[axis] if dims is not None and isinstance(dims[axis], int) else None  # type: ignore[return-value]


def corners(dims: Mapping[str, DimRange]) -> tuple[str, ...]:
    """Corners worth a sample each: all three where something varies, else one."""
    return ("opt", "min", "max") if dims else ("opt",)
