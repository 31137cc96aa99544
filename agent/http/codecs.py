"""Open Inference Protocol v2 requests and responses: pure functions between bytes and tensors.

Sources: KServe open-inference-protocol `inference_rest.md`; Triton `extension_binary_data.md`. Wire forms are decided
by the Inference-Header-Content-Length header and by parameters, never by Content-Type, which clients do not send.
Everything a client can get wrong raises ContractError or RefusedError, which the HTTP layer answers with 400.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, UnsetType
from numpy.typing import NDArray

from agent.http.json_data import pack_json, unpack_json
from agent.strings import pack_strings, unpack_strings
from targets.errors import ContractError, did_you_mean
from targets.recipe import ENCODED, IMAGE
from targets.tensor import FROM_OIP, Contract, DType, TensorSpec, human

HEADER_LENGTH = "Inference-Header-Content-Length"

# Names are echoed in errors and compared with what is available: what is longer is no name.
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Parameters = dict[str, bool | int | float | str | None]
Payload = bytes | memoryview

# Parameters of protocol extensions that would change what the answer means; ignoring them would be a wrong answer.
_UNSUPPORTED = ("classification", "shared_memory_region")
# Escapes ("\u00e9") and pretty-printing make JSON this much longer than its elements, generously.
_JSON_BYTES_PER_ELEMENT = 64
_HEAD_BYTES = 64 << 10


class _Input(msgspec.Struct, frozen=True):
    name: Name
    datatype: Name
    shape: list[Annotated[int, Meta(ge=0, le=1 << 40)]]
    parameters: Parameters = {}
    data: Raw | UnsetType = UNSET


class _Output(msgspec.Struct, frozen=True):
    name: Name
    parameters: Parameters = {}


class _Head(msgspec.Struct, frozen=True):
    inputs: list[_Input]
    outputs: list[_Output] = []
    id: Annotated[str, Meta(max_length=4096)] | None = None
    parameters: Parameters = {}


_head_decoder = msgspec.json.Decoder(_Head)


@dataclass(frozen=True, slots=True)
class Wish:
    """An output the client wants: index into the contract's outputs, and whether as raw bytes."""

    index: int
    binary: bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A checked request. `shapes` and `payloads` (raw little-endian, BYTES length-prefixed) follow the contract, which
    is the one for images if `is_image`."""

    id: str | None
    shapes: tuple[tuple[int, ...], ...]
    payloads: tuple[Payload, ...]
    wishes: tuple[Wish, ...]
    timeout_s: float | None
    is_image: bool = False


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output to encode: its bytes as they stand in the slab."""

    spec: TensorSpec
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    binary: bool


def largest_body(contract: Contract) -> int:
    """No request that the contract accepts needs more bytes than this, in whichever form."""
    total = _HEAD_BYTES
    for spec in contract.inputs:
        itemsize = max(spec.dtype.bits // 8, 1)
        total += spec.max_nbytes // itemsize * _JSON_BYTES_PER_ELEMENT
    return total


# --- decoding


def decode_infer(
    body: bytes, header_length: str | None, contract: Contract, images: Contract | None = None
) -> InferRequest:
    """Check an infer request against the contract and give its tensors as raw bytes.

    `body` is already decompressed, `header_length` the text of the HTTP header or None. `images` is the contract for
    a single BYTES input `image`, where the model has a recipe.
    """
    view = memoryview(body)
    cut = _header_length(header_length, len(body))
    head, binary = view[:cut], view[cut:]
    parsed = _parse_head(head)
    given = {item.name: (_dtype(item), item.shape) for item in parsed.inputs}
    if len(given) != len(parsed.inputs):
        raise ContractError("two inputs have one name", "name each input once")
    is_image = images is not None and IMAGE in given and given[IMAGE][0] is DType.STRING
    contract = images if images is not None and is_image else contract
    contract.check_inputs(given)
    payloads: dict[str, Payload] = {}
    for item in parsed.inputs:
        spec = contract.input(item.name)
        payloads[item.name], binary = _payload(item, spec, binary)
    if len(binary):
        raise ContractError(
            f"{len(binary)} bytes follow the last tensor",
            "the sum of binary_data_size must be all that follows the JSON",
        )
    return InferRequest(
        parsed.id,
        tuple(tuple(given[spec.name][1]) for spec in contract.inputs),
        tuple(payloads[spec.name] for spec in contract.inputs),
        _wishes(parsed, contract),
        _timeout(parsed.parameters),
        is_image,
    )


def _header_length(text: str | None, available: int) -> int:
    if text is None:
        return available
    # isdecimal alone would let other scripts' digits through, and int() signs, spaces and underscores.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ContractError(f"{HEADER_LENGTH} is {text[:40]!r}", "it must be the number of bytes of the JSON part")
    length = int(text)
    if not 0 < length <= available:
        raise ContractError(f"{HEADER_LENGTH} is {length}, the body has {available} bytes", "the JSON part comes first")
    return length


def _parse_head(head: memoryview) -> _Head:
    try:
        parsed = _head_decoder.decode(head)
        _refuse_duplicate_keys(head, [item.data for item in parsed.inputs if isinstance(item.data, Raw)])
    except RecursionError:
        raise ContractError("the JSON is nested too deeply", "data needs one level per dimension") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ContractError(f"not a valid infer request: {error}") from None
    return parsed


def _refuse_duplicate_keys(head: memoryview, data: Sequence[Raw]) -> None:
    """A key given twice means two readers may see two requests. Data is cut out first: it holds no keys."""
    base = _address(head)
    kept: list[Payload] = []
    at = 0
    for start, length in sorted((_address(raw) - base, len(memoryview(raw))) for raw in data):
        kept += [head[at:start], b"0"]
        at = start + length
    kept.append(head[at:])
    _strict.decode(str(b"".join(kept), "utf-8"))


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is given twice in one object")
    return fields


_strict = json.JSONDecoder(object_pairs_hook=_unique)


def _dtype(item: _Input) -> DType:
    if item.datatype not in FROM_OIP:
        raise ContractError(
            f"input {item.name!r} has unknown datatype {item.datatype!r}", did_you_mean(item.datatype, FROM_OIP)
        )
    return FROM_OIP[item.datatype]


def _payload(item: _Input, spec: TensorSpec, binary: memoryview) -> tuple[Payload, memoryview]:
    """(raw bytes of one input, what is left of the binary part)."""
    _refuse_extensions(item.name, item.parameters)
    count = math.prod(item.shape)
    payload: Payload
    if "binary_data_size" not in item.parameters:
        if not isinstance(item.data, Raw):
            raise ContractError(f"input {spec.name!r} has no data", "give data, or binary_data_size and the bytes")
        payload = pack_json(item.data, spec, item.shape)
        if spec.layout == ENCODED:
            payload = _from_base64(payload, spec)
    else:
        size = item.parameters["binary_data_size"]
        if type(size) is not int or size < 0 or size > len(binary):
            raise ContractError(f"input {spec.name!r} has binary_data_size {size!r}, {len(binary)} bytes are left")
        if item.data is not UNSET:
            raise ContractError(f"input {spec.name!r} has both data and binary_data_size", "give one of them")
        payload, binary = binary[:size], binary[size:]
        _check_binary(payload, spec, item.shape, count)
    if len(payload) > spec.max_nbytes:
        raise ContractError(
            f"input {spec.name!r} has {human(len(payload))}", f"the bundle has room for {human(spec.max_nbytes)}"
        )
    return payload, binary


def _from_base64(payload: bytes, spec: TensorSpec) -> bytes:
    """JSON has no bytes: those of an encoded input come as base64 text."""
    try:
        return pack_strings(base64.b64decode(text, validate=True) for text in unpack_strings(memoryview(payload), 1))
    except (binascii.Error, ValueError) as error:
        raise ContractError(f"input {spec.name!r} is not base64: {error}", "or send it as binary data") from None


def _check_binary(payload: memoryview, spec: TensorSpec, shape: list[int], count: int) -> None:
    if spec.dtype is DType.STRING:
        for position, text in enumerate(unpack_strings(payload, count)):
            if spec.layout == ENCODED:
                continue
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                raise ContractError(
                    f"input {spec.name!r}: element {position} is not UTF-8", "encode text as UTF-8"
                ) from None
        return
    needed = count * spec.dtype.bits // 8
    if len(payload) != needed:
        raise ContractError(
            f"input {spec.name!r} has {len(payload)} bytes, {spec.dtype.oip}{shape} needs {needed}",
            "binary data is row-major and little-endian, without padding",
        )
    if spec.dtype is DType.BOOL and needed and int(np.frombuffer(payload, np.uint8).max()) > 1:
        raise ContractError(f"input {spec.name!r} has a BOOL byte that is neither 0 nor 1")


def _refuse_extensions(name: str, parameters: Parameters) -> None:
    for extension in _UNSUPPORTED:
        if extension in parameters:
            raise ContractError(f"{name!r} asks for {extension}, which this server does not have", "leave it out")


def _wishes(head: _Head, contract: Contract) -> tuple[Wish, ...]:
    default = _flag(head.parameters, "binary_data_output", False)
    names = {spec.name: index for index, spec in enumerate(contract.outputs)}
    if not head.outputs:
        return tuple(Wish(index, default) for index in names.values())
    wishes = []
    for item in head.outputs:
        if item.name not in names:
            raise ContractError(f"unknown output {item.name!r}", did_you_mean(item.name, names))
        _refuse_extensions(item.name, item.parameters)
        wishes.append(Wish(names[item.name], _flag(item.parameters, "binary_data", default)))
    if len({wish.index for wish in wishes}) != len(wishes):
        raise ContractError("an output is asked for twice", "name each output once")
    return tuple(wishes)


def _flag(parameters: Parameters, name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise ContractError(f"parameter {name} is {value!r}", "it must be true or false")
    return value


def _timeout(parameters: Parameters) -> float | None:
    """Parameter `timeout`, in microseconds as in Triton; 0 means none."""
    value = parameters.get("timeout", 0)
    if type(value) is not int or value < 0:
        raise ContractError(f"parameter timeout is {value!r}", "it must be a whole number of microseconds")
    return value / 1e6 if value else None


# --- encoding


def encode_infer(name: str, version: str, id: str | None, outputs: Sequence[OutputTensor]) -> tuple[bytes, int | None]:  # noqa: A002
    """(body, length of its JSON part); the length is None when all of it is JSON.

    The data is copied, so the slot may be released afterwards. Raises RefusedError(NOT_JSON) as `encode_parts` does.
    """
    text, raw = encode_parts(name, version, id, outputs)
    return (b"".join((text, *raw)), len(text)) if raw else (text, None)


def encode_parts(
    name: str,
    version: str,
    id: str | None,  # noqa: A002 - the protocol's word
    outputs: Sequence[OutputTensor],
) -> tuple[bytes, list[memoryview]]:
    """(JSON part, views of the binary tensors behind it, in order); the views are of the slot itself.

    Raises RefusedError(NOT_JSON) where an output cannot
    be said in JSON: NaN and infinity have no JSON form (null would be a silent change), BYTES must be UTF-8, and the
    protocol has no JSON form of FP16. The client succeeds by asking for binary data.
    """
    tensors: list[dict[str, Any]] = []
    raw: list[memoryview] = []
    for output in outputs:
        tensor: dict[str, Any] = {
            "name": output.spec.name,
            "datatype": output.spec.dtype.oip,
            "shape": output.shape,
        }
        if output.binary:
            tensor["parameters"] = {"binary_data_size": output.data.nbytes}
            raw.append(output.data.data)
        else:
            tensor["data"] = unpack_json(output.data, output.spec, output.shape)
        tensors.append(tensor)
    head: dict[str, Any] = {"model_name": name, "model_version": version}
    if id is not None:
        head["id"] = id
    return msgspec.json.encode({**head, "outputs": tensors}), raw
