"""Requests made ahead of time, whole: from random values, arrays in files, or images."""

from __future__ import annotations

import itertools
import math
import random
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from agent.http.codecs import HEADER_LENGTH
from agent.strings import pack_strings
from targets.errors import ContractError, TightfitError, did_you_mean
from targets.recipe import IMAGE
from targets.tensor import FROM_OIP, DType, human

Array = NDArray[Any]
Parameters = dict[str, int]

# All requests stand in memory while they are sent over and over.
MAX_BYTES = 256 << 20
_RANDOM_SAMPLES = 16
_RANDOM_BYTES = 64 << 20
_MAX_FILES = 100_000
_IMAGES = (".jpg", ".jpeg", ".png")
_ARRAYS = (".npy", ".npz")
_WORDS = ("alpha", "beta", "gamma")
_DIM = re.compile(r"(\d{1,18})(?:\.\.(\d{1,18}))?", re.ASCII)


class Tensor(msgspec.Struct, frozen=True):
    """An input as the server's metadata has it; -1 is a size that a request may choose."""

    name: str
    datatype: str
    shape: list[int]

    @property
    def dtype(self) -> DType:
        """Raises ContractError for an element type that cannot be made here."""
        dtype = FROM_OIP.get(self.datatype)
        if dtype is None or dtype.numpy is None:
            raise ContractError(f"input {self.name!r} is {self.datatype}, which bench cannot make")
        return dtype

    def describe(self) -> str:
        return f"{self.name} {self.datatype}[{','.join(map(str, self.shape))}]"


class Metadata(msgspec.Struct, frozen=True):
    """GET /v2/models/NAME of the Open Inference Protocol; `image_path` and `image_input` are the agent's own."""

    name: str
    inputs: list[Tensor]
    versions: list[str] = []
    parameters: dict[str, Any] = {}

    @property
    def image_path(self) -> str | None:
        """Where images are taken as they are; None where they are not."""
        path = self.parameters.get("image_path")
        return path if isinstance(path, str) and path.startswith("/") else None


@dataclass(frozen=True)
class Message:
    """One request: path, body and headers."""

    path: str
    body: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class Kind:
    """Requests that are reported together, and their weight in the mix."""

    name: str
    weight: float
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Form:
    """How requests are written: path of infer, tensors as raw bytes or as JSON, parameters (timeout, priority); and
    whether images may go to a path of their own."""

    path: str
    binary: bool
    parameters: Parameters
    image_path: bool = True


# --- from arrays to requests


def infer_message(form: Form, tensors: Sequence[tuple[str, DType, Array]]) -> Message:
    """An infer request. Raises ContractError for FP16 in JSON, which the protocol has no form for."""
    inputs: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, dtype, array in tensors:
        tensor: dict[str, Any] = {"name": name, "datatype": dtype.oip, "shape": array.shape}
        if form.binary:
            raw.append(pack_strings(array.ravel()) if dtype is DType.STRING else array.tobytes())
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        elif dtype is DType.FLOAT16:
            raise ContractError(f"input {name!r} is FP16, which JSON has no form for", "send --tensors binary")
        else:
            values = array.ravel().tolist()
            tensor["data"] = [text.decode() for text in values] if dtype is DType.STRING else values
        inputs.append(tensor)
    parameters = {**form.parameters, **({"binary_data_output": True} if form.binary else {})}
    head = msgspec.json.encode({"inputs": inputs, **({"parameters": parameters} if parameters else {})})
    if not form.binary:
        return Message(form.path, head, {"Content-Type": "application/json"})
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return Message(form.path, b"".join((head, *raw)), headers)


def random_messages(
    metadata: Metadata, form: Form, shapes: Mapping[str, str], given: Mapping[str, Array], seed: int
) -> tuple[Message, ...]:
    """Up to 16 requests with seeded random values: floats standard normal, integers 0 or 1, words for BYTES.

    `shapes` says the sizes, `given` the values of inputs that are not random. Ranges that are written alike (a batch, a
    length) have one size in a request.
    """
    _check_names("--shape", shapes, metadata)
    draw = random.Random(seed)  # noqa: S311 - values, not secrets
    values = np.random.default_rng(seed)
    messages: list[Message] = []
    size = 0
    while len(messages) < _RANDOM_SAMPLES and size < _RANDOM_BYTES:
        sizes: dict[str, int] = {}
        tensors = []
        for tensor in metadata.inputs:
            array = given.get(tensor.name)
            if array is None:
                array = _random(values, tensor, _shape(tensor, shapes.get(tensor.name), sizes, draw))
            tensors.append((tensor.name, tensor.dtype, array))
        messages.append(infer_message(form, tensors))
        size += len(messages[-1].body)
    return tuple(messages)


def _shape(tensor: Tensor, text: str | None, sizes: dict[str, int], draw: random.Random) -> tuple[int, ...]:
    if text is None:
        if any(size < 0 for size in tensor.shape):
            spelled = ",".join("?" if size < 0 else str(size) for size in tensor.shape)
            raise ContractError(
                f"input {tensor.describe()} has sizes that a request chooses",
                f"say --shape {tensor.name}={spelled} (each ? a size or MIN..MAX), or give samples",
            )
        return tuple(tensor.shape)
    dims = [dim.strip() for dim in text.split(",")] if text else []
    if len(dims) != len(tensor.shape):
        raise ContractError(f"--shape {tensor.name}={text}: {len(dims)} sizes", f"the model takes {tensor.describe()}")
    return tuple(_size(tensor, dim, size, sizes, draw) for dim, size in zip(dims, tensor.shape, strict=True))


def _size(tensor: Tensor, dim: str, fixed: int, sizes: dict[str, int], draw: random.Random) -> int:
    match = _DIM.fullmatch(dim)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        raise ContractError(f"--shape {tensor.name}: {dim!r} is not a size", "write 48, or MIN..MAX")
    if fixed >= 0 and (low, high) != (fixed, fixed):
        raise ContractError(f"--shape {tensor.name}: {dim} where the model has {fixed}", tensor.describe())
    return sizes.setdefault(dim, draw.randint(low, high))


def _random(values: np.random.Generator, tensor: Tensor, shape: tuple[int, ...]) -> Array:
    dtype = tensor.dtype
    size = math.prod(shape) * max(dtype.bits // 8, 1)
    if size > MAX_BYTES:
        raise ContractError(f"input {tensor.name!r} {list(shape)} has {human(size)}", f"at most {human(MAX_BYTES)}")
    if dtype is DType.STRING:
        return values.choice(np.array([word.encode() for word in _WORDS], object), shape)
    kind = np.dtype(dtype.numpy)
    if kind.kind == "f":
        return values.standard_normal(shape).astype(kind)
    return values.integers(0, 2, shape).astype(kind)


# --- from files to requests


def file_messages(
    path: Path, metadata: Metadata, form: Form, given: Mapping[str, Array], seed: int, room: int
) -> tuple[tuple[Message, ...], int]:
    """(requests, files left out) of a file or of a folder's files: .jpg and .png as images, .npy and .npz as arrays.

    Where they take more than `room` bytes a seeded choice of them is taken. Raises TightfitError that names the file.
    """
    files = _files(path)
    random.Random(seed).shuffle(files)  # noqa: S311 - a choice of samples
    messages: list[Message] = []
    for file in files:
        if messages and file.stat().st_size > room:
            break
        messages.append(_message_of(file, metadata, form, given))
        room -= len(messages[-1].body)
        if room < 0:
            break
    return tuple(messages), len(files) - len(messages)


def _files(path: Path) -> list[Path]:
    kinds = (*_IMAGES, *_ARRAYS)
    try:
        if not path.is_dir():
            if not path.is_file():
                raise TightfitError(f"{path} is not there", f"a file or a folder of {', '.join(kinds)}")
            found = [path]
        else:
            found = sorted(file for file in itertools.islice(path.iterdir(), _MAX_FILES) if file.is_file())
    except OSError as error:
        raise TightfitError(f"cannot read {path}: {error.strerror or error}") from None
    files = [file for file in found if file.suffix.lower() in kinds]
    if not files:
        raise TightfitError(f"{path} has no samples", f"known are {', '.join(kinds)}")
    return files


def _message_of(file: Path, metadata: Metadata, form: Form, given: Mapping[str, Array]) -> Message:
    if file.suffix.lower() in _IMAGES:
        return _image_message(file, metadata, form)
    arrays = dict(given)
    for name, array in read_arrays(file):
        arrays[name or _only_input(file, metadata, given)] = array
    _check_names(str(file), arrays, metadata)
    missing = [tensor for tensor in metadata.inputs if tensor.name not in arrays]
    if missing:
        raise ContractError(f"{file} has no input {missing[0].name!r}", f"or give --input {missing[0].name}=FILE.npy")
    checked = ((t, fitting(str(file), t, arrays[t.name])) for t in metadata.inputs)
    return infer_message(form, [(tensor.name, tensor.dtype, array) for tensor, array in checked])


def _image_message(file: Path, metadata: Metadata, form: Form) -> Message:
    """To /image as it is. That path has no parameters: with some, or in a stream, the image goes as a BYTES input."""
    if metadata.image_path is None:
        raise TightfitError(f"{file}: {metadata.name} takes no images", "its bundle has no recipe; give arrays")
    data = _read(file)
    if form.image_path and not form.parameters:
        kind = "image/png" if file.suffix.lower() == ".png" else "image/jpeg"
        return Message(metadata.image_path, data, {"Content-Type": kind})
    name = metadata.parameters.get("image_input", IMAGE)
    image = np.empty(1, object)
    image[0] = data
    return infer_message(Form(form.path, True, form.parameters), [(str(name), DType.STRING, image)])


def _only_input(file: Path, metadata: Metadata, given: Mapping[str, Array]) -> str:
    left = [tensor.name for tensor in metadata.inputs if tensor.name not in given]
    if len(left) != 1:
        raise ContractError(f"{file} is one array, and the model takes {', '.join(left) or 'no more'}", "use .npz")
    return left[0]


def read_inputs(pairs: Mapping[str, str], metadata: Metadata) -> dict[str, Array]:
    """The arrays of `--input NAME=FILE.npy`."""
    _check_names("--input", pairs, metadata)
    given: dict[str, Array] = {}
    for tensor in metadata.inputs:
        if tensor.name in pairs:
            path = Path(pairs[tensor.name])
            if path.suffix.lower() != ".npy":
                raise TightfitError(f"--input {tensor.name}={path}: not an .npy file", "an .npz is for --samples")
            ((_, array),) = read_arrays(path)
            given[tensor.name] = fitting(str(path), tensor, array)
    return given


def read_arrays(path: Path) -> Iterator[tuple[str, Array]]:
    """(name, array) of an .npz file, or the one of an .npy file under the name ""; pickled objects are refused."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {human(MAX_BYTES)}")
        if path.suffix.lower() != ".npz":
            with path.open("rb") as file:
                yield "", _array(file)
            return
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    yield name.removesuffix(".npy"), _array(member)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise TightfitError(
            f"cannot read arrays from {path}: {reason}", "write them with numpy.save or savez"
        ) from None


def _array(file: IO[bytes]) -> Array:
    return npy.read_array(file, allow_pickle=False)


def fitting(where: str, tensor: Tensor, array: Array) -> Array:
    """The array as the input's element type has it in memory. Raises ContractError when it does not go with it."""
    dtype = tensor.dtype
    if dtype is DType.STRING and array.dtype.kind in "US":
        texts = np.empty(array.shape, object)
        texts.ravel()[:] = [text if isinstance(text, bytes) else text.encode() for text in array.ravel().tolist()]
        array = texts
    elif dtype is DType.STRING or array.dtype != np.dtype(dtype.numpy):
        raise ContractError(
            f"{where}: {tensor.name!r} is {array.dtype}", f"the model takes {tensor.describe()}; convert it first"
        )
    fits = len(array.shape) == len(tensor.shape)
    if not fits or any(want not in (-1, have) for want, have in zip(tensor.shape, array.shape, strict=True)):
        raise ContractError(f"{where}: {tensor.name!r} has shape {list(array.shape)}", tensor.describe())
    return array


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise TightfitError(f"{file} has more than {human(MAX_BYTES)}")
        return file.read_bytes()
    except OSError as error:
        raise TightfitError(f"cannot read {file}: {error.strerror or error}") from None


def _check_names(where: str, names: Mapping[str, Any], metadata: Metadata) -> None:
    known = [tensor.name for tensor in metadata.inputs]
    for name in names:
        if name not in known:
            raise ContractError(f"{where}: unknown input {name!r}", did_you_mean(name, known))
