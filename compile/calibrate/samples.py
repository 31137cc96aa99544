"""Samples to calibrate and verify with, read one by one: a sample is one array for each model input.

.npz, .npy    arrays by input name; with one leading axis more they are several samples
.bin, .raw    samples one after the other, in C order, of the one input's element type and shape
.jsonl        a sample a line: an object of nested lists by input name
.jpg, .png    with a recipe: the image as the agent would make it the input
a folder      its files of these kinds, in the order of their names
"""

from __future__ import annotations

import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.errors import DataError
from targets.errors import ContractError
from targets.recipe import Recipe
from targets.tensor import Contract, DType, TensorSpec

Sample = dict[str, npt.NDArray[Any]]
Reader = Callable[[Path, Contract], Iterator[Sample]]
"""Turns one file into samples that `iterate` then checks; raises DataError that names the file."""
Warn = Callable[[str], None]

_FROM_NUMPY = {np.dtype(dtype.numpy): dtype for dtype in DType if dtype.numpy}
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


def _read_arrays(path: Path, contract: Contract) -> Iterator[Sample]:
    """One sample, or, where every array has one axis more than its input, one sample per leading index."""
    arrays = read_npz(path)
    if list(arrays) == [""] and len(contract.inputs) == 1:
        arrays = {contract.inputs[0].name: arrays[""]}
    specs = {spec.name: spec for spec in contract.inputs}
    extra = [array.ndim - len(specs[name].shape) for name, array in arrays.items() if name in specs]
    if extra and all(e == 1 for e in extra):
        counts = {len(array) for array in arrays.values()}
        if len(counts) > 1:
            raise DataError(f"{path}: arrays hold different numbers of samples: {sorted(counts)}")
        yield from ({name: array[i] for name, array in arrays.items()} for i in range(counts.pop()))
    else:
        yield arrays


def _read_raw(path: Path, contract: Contract) -> Iterator[Sample]:
    """Samples back to back; a dimension with a range stands at its optimum. The file is mapped, not read."""
    if len(contract.inputs) != 1:
        names = ", ".join(spec.name for spec in contract.inputs)
        raise DataError(f"{path}: a raw file holds one input, the model takes {names}", "use .npz or .jsonl")
    (spec,) = contract.inputs
    shape = tuple(dim if isinstance(dim, int) else contract.dims[dim].opt for dim in spec.shape)
    dtype = _numpy_type(path, spec)
    size, step = path.stat().st_size, math.prod(shape) * dtype.itemsize
    if not step or not size or size % step:
        raise DataError(
            f"{path}: {spec.name!r} {dtype}{list(shape)} takes {step} bytes, the file has {size}",
            "it must hold whole samples of that shape; use .npy for other shapes",
        )
    mapped = np.memmap(path, dtype, "r", shape=(size // step, *shape))
    yield from ({spec.name: np.asarray(each)} for each in mapped)


def _read_jsonl(path: Path, contract: Contract) -> Iterator[Sample]:
    specs = {spec.name: spec for spec in contract.inputs}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _sample_of(f"{path}:{number}", line, specs)


def _sample_of(where: str, line: str, specs: Mapping[str, TensorSpec]) -> Sample:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}", "write one object a line") from None
    if not isinstance(found, dict):
        raise DataError(f"{where}: not an object", 'write {"input": [[...]], ...} on each line')
    sample: Sample = {}
    for name, nested in found.items():
        # What the model does not take is named when the sample is checked.
        dtype = _numpy_type(Path(where), specs[name]) if name in specs else None
        try:
            sample[name] = np.array(nested, dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{where}: {name!r}: {error}", "write nested lists of equal lengths") from None
    return sample


def _numpy_type(path: Path, spec: TensorSpec) -> np.dtype[Any]:
    if spec.dtype is DType.STRING:
        return np.dtype(object)
    if spec.dtype.numpy is None:
        raise DataError(f"{path}: input {spec.name!r} is {spec.dtype.value}, which numpy cannot hold")
    return np.dtype(spec.dtype.numpy)


READERS: dict[str, Reader] = {
    ".npz": _read_arrays,
    ".npy": _read_arrays,
    ".bin": _read_raw,
    ".raw": _read_raw,
    ".jsonl": _read_jsonl,
}
"""Suffix -> reader."""


def readers_of(recipe: Recipe | None) -> Mapping[str, Reader]:
    """READERS, and with a recipe those of images, which need the image library."""
    if recipe is None:
        return READERS
    from processing.preprocess import SUFFIXES, Preprocessor  # noqa: PLC0415

    def read_image(path: Path, contract: Contract) -> Iterator[Sample]:
        yield {contract.inputs[0].name: Preprocessor(recipe, contract).read(path)}

    return {**READERS, **dict.fromkeys(SUFFIXES, read_image)}


def iterate(
    path: Path,
    contract: Contract,
    warn: Warn | None = None,
    readers: Mapping[str, Reader] = READERS,
    allow_nan: bool = False,
) -> Iterator[Sample]:
    """The samples of a file or folder one by one, checked against the contract.

    Raises DataError that names the file and the array. float64 for a float32 input is cast, and `warn` told. NaN is
    refused unless `allow_nan`: no range can be found on it.
    """
    hint = f"available forms: {', '.join(readers)}, or a folder of them; images need a --recipe"
    if not path.exists():
        raise DataError(f"{path} is not there", hint)
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in readers) if path.is_dir() else [path]
    if not files or files[0].suffix.lower() not in readers:
        raise DataError(f"{path} holds no samples", hint)
    cast: set[str] = set()
    empty = True
    for file in files:
        for sample in readers[file.suffix.lower()](file, contract):
            empty = False
            checked = _checked(sample, contract, file, cast, warn)
            if not allow_nan:
                _check_nan(checked, file)
            yield checked
    if empty:
        raise DataError(f"{path} holds no samples", "its arrays are empty")


def read_samples(
    path: Path,
    contract: Contract,
    limit: int,
    warn: Warn | None = None,
    readers: Mapping[str, Reader] = READERS,
) -> list[Sample]:
    """At most `limit` samples to verify on, as `iterate` gives them; some models are about NaN."""
    return list(itertools.islice(iterate(path, contract, warn, readers, allow_nan=True), limit))


def _check_nan(sample: Sample, file: Path) -> None:
    for name, array in sample.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise DataError(f"{file}: {name!r} holds NaN", "remove that sample, or repair what made it")


def _checked(sample: Sample, contract: Contract, file: Path, cast: set[str], warn: Warn | None) -> Sample:
    wide = {spec.name for spec in contract.inputs if spec.dtype is DType.FLOAT32} & {
        name for name, array in sample.items() if array.dtype == np.float64
    }
    for name in sorted(wide - cast):
        cast.add(name)
        if warn is not None:
            warn(f"{file}: {name!r} is float64; it is taken as the float32 that the model takes")
    sample = {name: array.astype(np.float32) if name in wide else array for name, array in sample.items()}
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
    return sample
