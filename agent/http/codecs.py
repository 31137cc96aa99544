"""Open Inference Protocol v2 requests and responses: pure functions between bytes and tensors.

Sources: KServe open-inference-protocol `inference_rest.md`; Triton `extension_binary_data.md`. Wire forms are decided
by the Inference-Header-Content-Length header and by parameters, never by Content-Type, which clients do not send.
Everything a client can get wrong raises ContractError or RefusedError, which the HTTP layer answers with 400.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from agent.http.classification import check_classes
from agent.http.json_data import SLICED_BYTES, cut_data, pack_json, unpack_json
from agent.http.strict_json import check, check_integers, invalid
from agent.request import Part
from agent.strings import PREFIX_BYTES, pack_strings, unpack_strings
from targets.errors import ContractError, did_you_mean
from targets.recipe import ENCODED, IMAGE
from targets.tensor import FROM_OIP, Contract, Dim, DType, TensorSpec, human

HEADER_LENGTH = "Inference-Header-Content-Length"

# Names are echoed in errors and compared with what is available: what is longer is no name.
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Parameters = dict[str, bool | int | float | str | None]
Payload = bytes | memoryview

# A parameter of an extension that would change where tensors are; ignoring it would be a wrong answer.
_SHARED_MEMORY = "shared_memory_region"
# Escapes ("\u00e9") and pretty-printing make JSON this much longer than its elements, generously.
_JSON_BYTES_PER_ELEMENT = 64
_HEAD_BYTES = 64 << 10
# All that a request says beside its data, generously: to look for keys given twice takes a while.
_BESIDE_BYTES = 1 << 20


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
    """An output the client wants: index into the contract's outputs, whether as raw bytes, and if not 0 how many of its
    best classes instead of all of it."""

    index: int
    binary: bool
    classes: int = 0


# One of each is made for every request: see `agent.request`.


class InferRequest(msgspec.Struct, frozen=True):
    """A checked request. `shapes` and `payloads` (raw little-endian, BYTES length-prefixed) follow the contract, which
    is the one for images if `is_image`, and the one without state if it is `part` of a sequence. `priority` 0 stands
    for the model's default."""

    id: str | None
    shapes: tuple[tuple[int, ...], ...]
    payloads: tuple[Payload, ...]
    wishes: tuple[Wish, ...]
    timeout_s: float | None
    priority: int = 0
    is_image: bool = False
    part: Part | None = None

    @property
    def wanted(self) -> tuple[int, ...]:
        """Indices into the contract's outputs, in the order they were asked for."""
        return tuple(wish.index for wish in self.wishes)


class OutputTensor(msgspec.Struct, frozen=True):
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


@dataclass(frozen=True, slots=True)
class Head:
    """The JSON part of a request, checked against `contract`, which is the one for images if `is_image`. Requests that
    differ in nothing but their binary tensors have the same. `is_text`: the binary part is the only element of the only
    input as it is, without its length."""

    contract: Contract
    is_image: bool
    inputs: tuple[tuple[_Input, TensorSpec], ...]
    id: str | None
    shapes: tuple[tuple[int, ...], ...]
    wishes: tuple[Wish, ...]
    timeout_s: float | None
    priority: int
    is_text: bool = False
    part: Part | None = None

    def data_in(self, text: bytes) -> list[tuple[int, int]]:
        """(start, end) of the data of each input in the text that this was read from; none where one is binary."""
        found = [_span(text, item.data) for item, _ in self.inputs if isinstance(item.data, Raw)]
        return found if len(found) == len(self.inputs) else []

    def request(self, binary: memoryview) -> InferRequest:
        """The request with that binary part. Raises ContractError."""
        payloads: dict[str, Payload] = {}
        if self.is_text:
            binary = memoryview(pack_strings([bytes(binary)]))
        for item, spec in self.inputs:
            payloads[spec.name], binary = _payload(item, spec, binary)
        if len(binary):
            raise ContractError(
                f"{len(binary)} bytes follow the last tensor",
                "the sum of binary_data_size must be all that follows the JSON",
            )
        return InferRequest(
            self.id,
            self.shapes,
            tuple([payloads[spec.name] for spec in self.contract.inputs]),
            self.wishes,
            self.timeout_s,
            self.priority,
            self.is_image,
            self.part,
        )


def decode_infer(
    body: bytes, header_length: str | None, contract: Contract, images: Contract | None = None,
    kept: Contract | None = None,
) -> InferRequest:  # fmt: skip
    """Check an infer request against the contract and give its tensors as raw bytes.

    `body` is already decompressed, `header_length` the text of the HTTP header or None. `images` is the contract for
    a single BYTES input `image`, where the model has a recipe, and `kept` that for parts of a sequence, where its state
    is kept.
    """
    head, binary = split_body(body, header_length)
    return read_head(head, contract, images, nbytes=len(binary), kept=kept).request(binary)


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """(JSON part, binary part). Raises ContractError for a length that cannot be."""
    cut = _header_length(header_length, len(body))
    return body[:cut], memoryview(body)[cut:]


def read_head(
    head: bytes, contract: Contract, images: Contract | None = None, binary: bool = False, nbytes: int = 0,
    kept: Contract | None = None,
) -> Head:  # fmt: skip
    """Check the JSON part of a request as `decode_infer` does. `binary`: the form of outputs where it names none.

    Without a JSON part it is Triton's raw binary request: the `nbytes` that follow are the only input, and all outputs
    are answered as raw bytes.
    """
    # What is in a string may look like the end of data.
    whole = any(spec.dtype is DType.STRING for spec in contract.inputs)
    parsed = _parse_head(head, whole) if head else _raw_head(contract, nbytes)
    given = {item.name: (_dtype(item), item.shape) for item in parsed.inputs}
    if len(given) != len(parsed.inputs):
        raise ContractError("two inputs have one name", "name each input once")
    is_image = images is not None and IMAGE in given and given[IMAGE][0] is DType.STRING
    contract = images if images is not None and is_image else contract
    part = _part(parsed.parameters) if parsed.parameters else None
    if part is not None and kept is not None:
        contract = kept
    contract.check_inputs(given)
    return Head(
        contract,
        is_image,
        tuple([(item, contract.input(item.name)) for item in parsed.inputs]),
        parsed.id,
        tuple([tuple(given[spec.name][1]) for spec in contract.inputs]),
        _wishes(parsed, contract, binary),
        _timeout(parsed.parameters),
        _priority(parsed.parameters),
        is_text=not head and contract.inputs[0].dtype is DType.STRING,
        part=part if kept is not None else None,
    )


def _raw_head(contract: Contract, nbytes: int) -> _Head:
    """What a request without a JSON part says: one row of a batch, and of one dimension at most as many as there are
    bytes. Raises ContractError where that says nothing (Triton `extension_binary_data.md`, "Raw Binary Request")."""
    if len(contract.inputs) != 1:
        names = ", ".join(spec.name for spec in contract.inputs)
        raise ContractError(f"{HEADER_LENGTH} is 0, and the inputs are {names}", "say in JSON which bytes are whose")
    (spec,) = contract.inputs
    sizes = [1 if dim == contract.batch else _only_size(contract, dim) for dim in spec.shape]
    if spec.dtype is DType.STRING:
        free, nbytes = 1, nbytes + PREFIX_BYTES
        known = math.prod(size or 1 for size in sizes) == 1
    else:
        # What is left over is too much or too little, and is found to be so where the bytes are counted.
        free = nbytes // max(math.prod(size for size in sizes if size is not None) * spec.dtype.bits // 8, 1)
        known = sizes.count(None) <= 1
    if not known:
        raise ContractError(
            f"{HEADER_LENGTH} is 0, and bytes alone do not tell the shape of {spec.describe()}",
            "say in JSON which it has",
        )
    shape = [free if size is None else size for size in sizes]
    item = _Input(spec.name, str(spec.dtype.oip), shape, {"binary_data_size": nbytes})
    return _Head([item], parameters={"binary_data_output": True})


def _only_size(contract: Contract, dim: Dim) -> int | None:
    """The size of a dimension, where a request has no choice."""
    if isinstance(dim, int):
        return dim
    sizes = contract.dims[dim]
    return sizes.min if sizes.min == sizes.max else None


def _header_length(text: str | None, available: int) -> int:
    if text is None:
        return available
    # isdecimal alone would let other scripts' digits through, and int() signs, spaces and underscores.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ContractError(f"{HEADER_LENGTH} is {text[:40]!r}", "it must be the number of bytes of the JSON part")
    length = int(text)
    if length > available:
        raise ContractError(f"{HEADER_LENGTH} is {length}, the body has {available} bytes", "the JSON part comes first")
    return length


def _parse_head(head: bytes, whole: bool = True) -> _Head:
    """Read the JSON part; not as a `whole` where it is so large that this would keep everybody else waiting."""
    if whole or len(head) < SLICED_BYTES:
        return _parse(head)
    cut = cut_data(head)
    if cut is None or len(cut.text) > _HEAD_BYTES:
        return _parse(head)
    try:
        parsed = _parse(cut.text)
        items = [replace(item, data=cut.put_back(item.data)) for item in parsed.inputs]
    except (ContractError, KeyError):
        # Whatever it is, it is judged as it came.
        return _parse(head)
    # Data that is no input's was not looked at.
    return _parse(head) if cut.lists else replace(parsed, inputs=items)


def _parse(head: bytes) -> _Head:
    try:
        parsed = _head_decoder.decode(head)
        if head.count(b":") > _least_keys(parsed):
            _check_strictly(head, [item.data for item in parsed.inputs if isinstance(item.data, Raw)])
        if parsed.parameters:
            check_integers(parsed.parameters.values())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid("infer request", head, error) from None
    return parsed


def _least_keys(parsed: _Head) -> int:
    """How many keys there are if none was given twice, and none that means nothing. Each has a colon, so as many colons
    are as many keys: this saves most requests from being read once more."""
    inputs = sum([3 + (item.data is not UNSET) + _keys(item.parameters) for item in parsed.inputs])
    outputs = sum([1 + _keys(item.parameters) for item in parsed.outputs])
    return 1 + inputs + bool(outputs) + outputs + (parsed.id is not None) + _keys(parsed.parameters)


def _keys(parameters: Parameters) -> int:
    return 1 + len(parameters) if parameters else 0


def _check_strictly(head: bytes, data: Sequence[Raw]) -> None:
    """A key given twice means two readers may see two requests. Data is cut out first: it holds no keys."""
    kept: list[Payload] = []
    at = 0
    for start, end in sorted(_span(head, raw) for raw in data):
        kept += [head[at:start], b"0"]
        at = end
    kept.append(head[at:])
    text = b"".join(kept)
    if len(text) > _BESIDE_BYTES:
        raise ValueError(f"it has more than {human(_BESIDE_BYTES)} beside its data")
    check(text)


def _span(head: bytes, raw: Raw) -> tuple[int, int]:
    """Where it stands in the text that it was read from."""
    start = _address(raw) - _address(head)
    return start, start + len(memoryview(raw))


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _dtype(item: _Input) -> DType:
    if item.datatype not in FROM_OIP:
        raise ContractError(
            f"input {item.name!r} has unknown datatype {item.datatype!r}", did_you_mean(item.datatype, FROM_OIP)
        )
    return FROM_OIP[item.datatype]


def _payload(item: _Input, spec: TensorSpec, binary: memoryview) -> tuple[Payload, memoryview]:
    """(raw bytes of one input, what is left of the binary part)."""
    _refuse_shared_memory(item.name, item.parameters)
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


def _refuse_shared_memory(name: str, parameters: Parameters) -> None:
    if _SHARED_MEMORY in parameters:
        raise ContractError(f"{name!r} asks for {_SHARED_MEMORY}, which this server does not have", "leave it out")


def _wishes(head: _Head, contract: Contract, binary: bool) -> tuple[Wish, ...]:
    default = _flag(head.parameters, "binary_data_output", binary)
    names = {spec.name: index for index, spec in enumerate(contract.outputs)}
    if not head.outputs:
        return tuple(Wish(index, default) for index in names.values())
    wishes = []
    for item in head.outputs:
        if item.name not in names:
            raise ContractError(f"unknown output {item.name!r}", did_you_mean(item.name, names))
        _refuse_shared_memory(item.name, item.parameters)
        index, classes = names[item.name], 0
        if "classification" in item.parameters:
            classes = check_classes(contract.outputs[index], item.parameters["classification"])
        wishes.append(Wish(index, _flag(item.parameters, "binary_data", default), classes))
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
        raise ContractError(f"parameter timeout is {value!r}"[:200], "it must be a whole number of microseconds")
    return value / 1e6 if value else None


def _priority(parameters: Parameters) -> int:
    """Parameter `priority` as in Triton: 1 is the highest, 255 here the lowest, and 0 the default of the model."""
    value = parameters.get("priority", 0)
    if type(value) is not int or not 0 <= value <= 255:
        raise ContractError(f"parameter priority is {value!r}", "it must be 1 (the highest) to 255, or 0")
    return value


def _part(parameters: Parameters) -> Part | None:
    """Of which sequence it is; 0, and nothing, is none. What begins or ends one that it does not name is refused."""
    id_ = parameters.get("sequence_id", 0)
    if not (type(id_) is int and 0 <= id_ < 1 << 64) and not (isinstance(id_, str) and len(id_) <= 128):
        raise ContractError(f"parameter sequence_id is {id_!r}"[:200], "it must be a whole number or a short text")
    flags = {name: _flag(parameters, name, False) for name in ("sequence_start", "sequence_end")}
    for name, given in flags.items():
        if given and not id_:
            raise ContractError(f"parameter {name} is true without a sequence_id", "name the sequence")
    return Part(id_, *flags.values()) if id_ else None


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

    Raises RefusedError(NOT_JSON) as `tensors_of` does.
    """
    tensors, raw = tensors_of(outputs)
    head: dict[str, Any] = {"model_name": name, "model_version": version}
    if id is not None:
        head["id"] = id
    return msgspec.json.encode({**head, "outputs": tensors}), raw


def tensors_of(outputs: Sequence[OutputTensor]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """(outputs as the JSON part has them, views of the binary tensors in order).

    Raises RefusedError(NOT_JSON) where an output cannot be said in JSON: NaN and infinity have no JSON form (null would
    be a silent change), BYTES must be UTF-8, and the protocol has no JSON form of FP16. The client succeeds by asking
    for binary data.
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
    return tensors, raw
