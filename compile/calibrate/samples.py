"""Samples to calibrate and verify with: npz and npy files, or folders of them.

A sample is one array per model input. A file may hold several: then its arrays have one leading axis more.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.errors import DataError
from targets.errors import ContractError
from targets.tensor import Contract, DType

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
