"""Tensor data as JSON: pure functions between a list, flat or nested in row-major order, and raw bytes."""

from __future__ import annotations

import functools
import math
import re
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, UnsetType
from numpy.typing import NDArray

from agent.errors import Reason, RefusedError
from agent.strings import pack_strings, unpack_strings
from targets.errors import ContractError
from targets.tensor import DType, TensorSpec

_STRUCT_CODES = {
    DType.BOOL: "?",
    DType.INT8: "b",
    DType.UINT8: "B",
    DType.INT16: "h",
    DType.UINT16: "H",
    DType.INT32: "i",
    DType.UINT32: "I",
    DType.INT64: "q",
    DType.UINT64: "Q",
    DType.FLOAT32: "f",
    DType.FLOAT64: "d",
}
# JSON numbers are read and written in pieces that take about a millisecond.
_PIECE_BYTES = 64 << 10
_PIECE_ELEMENTS = 8 << 10
SLICED_BYTES = 1 << 20
"""JSON past this is nowhere read in one call: as long as that takes, no other thread has its turn."""
# Searched at once, and by how much two searches overlap: what they look for is shorter, or is not found.
_STEP_BYTES, _SEAM_BYTES = 256 << 10, 4096
_MOST_DEPTH = 64
_DATA = re.compile(rb'"data"[ \t\r\n]{0,256}:[ \t\r\n]{0,256}\[')
# Of numbers, true and false.
_BLANKS, _VALUES = b" \t\r\n", b"0123456789+-.eEtrufals"
_ZEROS = bytes.maketrans(_VALUES, b"0" * len(_VALUES))
_UNBRACKETED = bytes.maketrans(b"[]", b"  ")


def pack_json(data: Raw | bytes, spec: TensorSpec, shape: list[int]) -> bytes:
    """Raw little-endian bytes (BYTES length-prefixed) of JSON data, flat or nested; raises ContractError."""
    if spec.dtype is DType.FLOAT16:
        raise ContractError(f"input {spec.name!r}: FP16 cannot be given as JSON", "send it as binary data")
    depth = _nesting(memoryview(data), limit=max(len(shape), 1) + 1)
    if depth not in (1, len(shape)):
        raise ContractError(
            f"input {spec.name!r} has data nested {depth} deep", f"it must be flat or nested as its shape {shape}"
        )
    try:
        if depth == 1 and spec.dtype is not DType.STRING:
            return _pack_numbers(memoryview(data), spec, math.prod(shape))
        if len(memoryview(data)) > SLICED_BYTES and spec.dtype is not DType.STRING:
            return _pack_nested(memoryview(data), spec, shape)
        values = _data_decoder(spec.dtype, depth).decode(data)
        return _pack(values, spec, shape if depth > 1 else [math.prod(shape)])
    except RecursionError:
        raise ContractError(f"input {spec.name!r}: data is nested too deeply") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise ContractError(f"input {spec.name!r}: {error}") from None


def _pack_numbers(data: memoryview, spec: TensorSpec, count: int) -> bytes:
    """Raw bytes of a flat list, decoded piece by piece: a float in a Python list is eight times its FP32, and one long
    call would keep every other thread waiting. Numbers hold no comma, so anything else fails in its piece."""
    decoder = _data_decoder(spec.dtype, 1)
    code = _STRUCT_CODES[spec.dtype]
    packed: list[bytes] = []
    at, end, found = 1, len(data) - 1, 0
    while at < end:
        piece = bytes(data[at : min(at + _PIECE_BYTES, end)])
        if at + len(piece) < end:
            cut = piece.rfind(b",")
            if cut < 0:
                raise ValueError("a number is longer than any number needs to be")
            piece = piece[:cut]
        values = decoder.decode(b"[" + piece + b"]")
        found += len(values)
        at += len(piece) + 1
        # What is too much is only counted, for the message.
        if found <= count:
            packed.append(_pack_piece(values, code, spec))
    if found != count:
        raise ValueError(f"data has {_elements([found])}, its shape needs {_elements([count])}")
    return b"".join(packed)


def _pack_nested(data: memoryview, spec: TensorSpec, shape: Sequence[int]) -> bytes:
    """The same of nested lists. Without its values a piece must be the next part of what brackets and commas of that
    shape are, and without brackets it must be a flat list; and no bracket may touch a value from its wrong side."""
    decoder, code = _data_decoder(spec.dtype, 1), _STRUCT_CODES[spec.dtype]
    brackets = _brackets(shape)
    packed: list[bytes] = []
    at, seen = 0, 0
    while at < len(data):
        piece = bytes(data[at : at + _PIECE_BYTES])
        last = at + len(piece) == len(data)
        if not last:
            cut = piece.rfind(b",")
            if cut < 0:
                raise ValueError("a number is longer than any number needs to be")
            piece = piece[: cut + 1]
        zeros = piece.translate(_ZEROS, _BLANKS)
        skeleton = zeros.translate(None, b"0")
        if not brackets.startswith(skeleton, seen) or b"0[" in zeros or b"]0" in zeros:
            raise ValueError(f"data is not nested as its shape {list(shape)} needs")
        flat = piece.translate(_UNBRACKETED)
        packed.append(_pack_piece(decoder.decode(b"[" + (flat if last else flat[:-1]) + b"]"), code, spec))
        at, seen = at + len(piece), seen + len(skeleton)
    if seen != len(brackets):
        raise ValueError(f"data is not nested as its shape {list(shape)} needs")
    return b"".join(packed)


def _brackets(shape: Sequence[int]) -> bytes:
    """Brackets and commas of nested lists of that shape."""
    *outer, inner = shape
    text = b"[" + b"," * (inner - 1) + b"]"
    for size in reversed(outer):
        text = b"[" + b",".join([text] * size) + b"]"
    return text


@dataclass
class Cut:
    """A request in JSON without its data: in `text` stands a string for each of `lists`, which no client can know."""

    text: bytes
    lists: dict[bytes, memoryview]

    def put_back(self, data: Raw | UnsetType) -> Raw | UnsetType:
        """The list that this stands for, once. Raises KeyError where it is none of them."""
        return Raw(self.lists.pop(bytes(data))) if isinstance(data, Raw) else data


def cut_data(text: bytes) -> Cut | None:
    """Cut every list out that is given as `data`, in short steps; None where one has no end that can be seen. What is
    cut out is not looked at, and is as long as a list of numbers would be."""
    kept: list[bytes] = []
    lists: dict[bytes, memoryview] = {}
    mark, at = secrets.token_hex(8).encode("ascii"), 0
    for start in _starts(text):
        if start < at:
            continue
        depth = _nesting(memoryview(text)[start:], limit=_MOST_DEPTH)
        end = _end(text, start, depth)
        if end < 0:
            return None
        name = b'"%b%d"' % (mark, len(lists))
        kept += [text[at:start], name]
        lists[name] = memoryview(text)[start:end]
        at = end
    kept.append(text[at:])
    return Cut(b"".join(kept), lists)


def _starts(text: bytes) -> Iterator[int]:
    """Where the lists begin."""
    at = 0
    while at < len(text):
        found = _DATA.search(text, at, at + _STEP_BYTES)
        if found is None:
            at += _STEP_BYTES - _SEAM_BYTES
            continue
        yield found.end() - 1
        at = found.end()


def _end(text: bytes, start: int, depth: int) -> int:
    """Behind the list that begins there with so many brackets; -1 where that cannot be seen."""
    if depth == 1:
        return text.find(b"]", start) + 1 or -1
    closing = _closing(depth)
    for at in range(start, len(text), _STEP_BYTES - _SEAM_BYTES):
        if found := closing.search(text, at, at + _STEP_BYTES):
            return found.end()
    return -1


@functools.lru_cache(maxsize=_MOST_DEPTH)
def _closing(depth: int) -> re.Pattern[bytes]:
    return re.compile(rb"\](?:[ \t\r\n]*\]){%d}" % (depth - 1))


def _pack_piece(values: list[Any], code: str, spec: TensorSpec) -> bytes:
    """`struct` refuses what its type cannot hold, and takes a fifth of the time that numpy does for a short list."""
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError):
        raise ValueError(f"a number is too large for {spec.dtype.oip}") from None


def _check_finite(array: NDArray[Any], spec: TensorSpec) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"a number is too large for {spec.dtype.oip}")


def _pack(values: list[Any], spec: TensorSpec, shape: list[int]) -> bytes:
    """Raw bytes of decoded JSON data that must have this shape."""
    if spec.dtype is DType.STRING:
        array = np.array(values, dtype=object)
    else:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=spec.dtype.numpy)
    if list(array.shape) != shape:
        raise ValueError(f"data has {_elements(array.shape)}, its shape needs {_elements(shape)}")
    if spec.dtype is DType.STRING:
        return pack_strings(text.encode("utf-8") for text in array.ravel())
    _check_finite(array, spec)
    return array.tobytes()


def _elements(shape: Sequence[int]) -> str:
    return f"{shape[0]} elements" if len(shape) == 1 else f"nested shape {list(shape)}"


def _nesting(data: memoryview, limit: int) -> int:
    """Number of `[` that the data begins with, at most `limit`."""
    depth = 0
    for byte in data:
        if byte == 0x5B:
            depth += 1
        elif byte not in b" \t\r\n":
            break
        if depth >= limit:
            break
    return depth


@functools.lru_cache(maxsize=256)
def _data_decoder(dtype: DType, depth: int) -> msgspec.json.Decoder[Any]:
    kind: Any = _element_type(dtype)
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _element_type(dtype: DType) -> Any:
    if dtype is DType.BOOL:
        return bool
    if dtype is DType.STRING:
        return str
    if dtype in (DType.FLOAT32, DType.FLOAT64):
        return float
    info = np.iinfo(np.dtype(dtype.numpy))
    # msgspec takes bounds within int64 only; numpy refuses what is past them in 64-bit types.
    most = None if info.bits == 64 else int(info.max)
    return Annotated[int, Meta(ge=int(info.min)), Meta(le=most)]


def unpack_json(data: NDArray[np.uint8], spec: TensorSpec, shape: Sequence[int]) -> list[str] | Raw:
    """Values in row-major order; numbers already as JSON, made piece by piece as they are read.

    Raises RefusedError(NOT_JSON) for what JSON cannot say.
    """
    if spec.dtype is DType.STRING:
        try:
            return [item.decode("utf-8") for item in unpack_strings(data.data, math.prod(shape))]
        except UnicodeDecodeError:
            raise _not_json(spec, "has bytes that are not UTF-8") from None
    if spec.dtype is DType.FLOAT16:
        raise _not_json(spec, "is FP16, which has no JSON form")
    values = data.view(np.dtype(spec.dtype.numpy))
    pieces = [values[at : at + _PIECE_ELEMENTS] for at in range(0, values.size, _PIECE_ELEMENTS)]
    text = b",".join([msgspec.json.encode(piece.tolist())[1:-1] for piece in pieces])
    # msgspec writes NaN and infinity as null.
    if b"n" in text:
        raise _not_json(spec, "has NaN or infinity, which JSON cannot say")
    return Raw(b"[%b]" % text)


def _not_json(spec: TensorSpec, why: str) -> RefusedError:
    return RefusedError(
        Reason.NOT_JSON, f"output {spec.name!r} {why}", "ask for it with the output parameter binary_data = true"
    )
