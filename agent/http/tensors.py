"""Between outputs, as slots or arrays, and the bodies of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from agent.http.answers import SERVER
from agent.http.bodies import choose_encoding, compress
from agent.http.classification import classified
from agent.http.codecs import HEADER_LENGTH, InferRequest, OutputTensor, Wish, encode_infer
from agent.strings import pack_strings
from targets.tensor import Contract, DType, TensorSpec

Tensor = tuple[tuple[int, ...], NDArray[np.uint8]]
"""An output: its shape, and its bytes as they are on the wire."""
Labels = Mapping[str, Sequence[str]]
"""Names of the classes of an output, by its own."""
NO_LABELS: Labels = {}

# JSON past this is parsed and written by a thread, so that health checks are answered meanwhile. Raw tensors are only
# copied, at gigabytes per second, and a hop to a thread costs more than a copy of some megabytes.
OFF_LOOP_BYTES = 64 << 10
OFF_LOOP_RAW_BYTES = 4 << 20
# The JSON around an image.
_HEAD_BYTES = 64 << 10


def is_quick(contract: Contract, nbytes: int, encoding: str, header_length: str | None) -> bool:
    """Whether a body takes no time to decode: little JSON, and not too much to copy."""
    if encoding:
        return False
    strings = any(spec.dtype is DType.STRING for spec in contract.inputs)
    if header_length is None or not header_length.isdecimal() or strings:
        return nbytes < OFF_LOOP_BYTES
    return nbytes < OFF_LOOP_RAW_BYTES and int(header_length[:18]) < OFF_LOOP_BYTES


def base64_body(nbytes: int) -> int:
    """No request with an image of that size in base64 needs more."""
    return nbytes * 4 // 3 + _HEAD_BYTES


def encode(
    name: str, version: str, decoded: InferRequest, tensors: list[OutputTensor], accept: str | None
) -> web.Response:
    """Copy the outputs, in the form each was asked for."""
    body, headers = encoded(name, version, decoded, tensors, accept)
    return web.Response(body=body, headers=headers)


def encoded(
    name: str, version: str, decoded: InferRequest, tensors: list[OutputTensor], accept: str | None
) -> tuple[bytes, dict[str, str]]:
    """(body of the answer, headers that say what it is)."""
    body, json_length = encode_infer(name, version, decoded.id, tensors)
    kind = "application/json" if json_length is None else "application/octet-stream"
    headers = {"Content-Type": kind, **SERVER}
    if json_length is not None:
        headers[HEADER_LENGTH] = str(json_length)
    encoding = choose_encoding(accept, json_length is not None, len(body))
    if encoding:
        body = compress(body, encoding)
        headers["Content-Encoding"] = encoding
    return body, headers


def wished(
    contract: Contract, decoded: InferRequest, tensors: Iterable[Tensor], labels: Labels = NO_LABELS
) -> list[OutputTensor]:
    """Outputs to encode, one for each that is wished for, in their order."""
    return [
        output_of(contract, wish, tensor, contract.outputs[wish.index], labels)
        for wish, tensor in zip(decoded.wishes, tensors, strict=True)
    ]


def output_of(contract: Contract, wish: Wish, tensor: Tensor, spec: TensorSpec, labels: Labels) -> OutputTensor:
    """One of them, of the model with that contract; `spec` is what the client knows it by."""
    if wish.classes:
        names = labels.get(contract.outputs[wish.index].name, ())
        return OutputTensor(*classified(spec, *tensor, wish.classes, contract.batch is not None, names), wish.binary)
    return OutputTensor(spec, *tensor, wish.binary)


def answered(contract: Contract, decoded: InferRequest, answer: Mapping[str, NDArray[Any]]) -> list[OutputTensor]:
    """The same of the answer to an image, by name."""
    arrays = (answer[contract.outputs[index].name] for index in decoded.wanted)
    return wished(contract, decoded, ((array.shape, raw_of(array)) for array in arrays))


def all_of(contract: Contract, answer: Mapping[str, NDArray[Any]]) -> list[OutputTensor]:
    """Every output of the answer to an image."""
    return [OutputTensor(spec, answer[spec.name].shape, raw_of(answer[spec.name]), False) for spec in contract.outputs]


def raw_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """An output's bytes as they are on the wire."""
    if array.dtype == object:
        return np.frombuffer(pack_strings(array), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def listed(array: NDArray[Any]) -> list[Any]:
    """As JSON has it."""
    return [text.decode() for text in array] if array.dtype == object else array.tolist()


def describe(spec: TensorSpec) -> dict[str, Any]:
    """As metadata have it: sizes that a request chooses are -1."""
    shape = [dim if isinstance(dim, int) else -1 for dim in spec.shape]
    return {"name": spec.name, "datatype": spec.dtype.oip, "shape": shape}
