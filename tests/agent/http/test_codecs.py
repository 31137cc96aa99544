"""Requests and responses of the protocol, without a server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agent.errors import Reason, RefusedError
from agent.http.codecs import InferRequest, OutputTensor, decode_infer, encode_infer, largest_body
from agent.strings import pack_strings
from targets.errors import ContractError, TightfitError
from targets.tensor import Contract, DimRange, DType, TensorSpec
from tests.support.bundles import ONNX_TYPES, dense

NUMERIC = [dtype for dtype in ONNX_TYPES if dtype is not DType.STRING]
IN_JSON = [dtype for dtype in NUMERIC if dtype is not DType.FLOAT16]


def contract_of(dtype: DType = DType.FLOAT32, *shape: int | str) -> Contract:
    shape = shape or (1, 8)
    x, y = dense("x", dtype, *shape, largest=64), dense("y", dtype, *shape, largest=64)
    return Contract((x,), (y,), {d: DimRange(0, 1, 8) for d in shape if isinstance(d, str)})


def tensor(data: Any = None, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 8], **changes}
    return fields if data is None else {**fields, "data": data}


def body_of(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


def decode(body: bytes, contract: Contract | None = None, header: str | None = None) -> InferRequest:
    return decode_infer(body, header, contract or contract_of())


def binary(data: bytes, size: Any = None, **fields: Any) -> tuple[bytes, str]:
    size = len(data) if size is None else size
    head = body_of(tensor(parameters={"binary_data_size": size}), **fields)
    return head + data, str(len(head))


def arrays(dtype: DType) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=8)
    finite: dict[str, Any] = {"allow_nan": False, "allow_infinity": False} if dtype.value.startswith("float") else {}
    return hnp.arrays(np.dtype(dtype.numpy), shapes, elements=finite or None)


# --- what is sent is what is read, and what is answered is what was computed


@given(st.data())
def test_json_round_trip(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(IN_JSON))
    array = data.draw(arrays(dtype))
    contract = contract_of(dtype, "rows", "columns")
    nested = data.draw(st.booleans()) and array.size > 0
    values = array.tolist() if nested else array.ravel().tolist()
    request = decode(body_of(tensor(values, datatype=dtype.oip, shape=array.shape)), contract)
    assert request.payloads[0] == array.tobytes()
    output = OutputTensor(contract.outputs[0], array.shape, np.frombuffer(array.tobytes(), np.uint8), binary=False)
    body, length = encode_infer("m", "1", None, [output])
    answer = json.loads(body, parse_constant=pytest.fail)["outputs"][0]
    assert length is None
    assert answer["shape"] == list(array.shape)
    assert np.array(answer["data"], dtype.numpy).tobytes() == array.tobytes()


@given(st.data())
def test_binary_round_trip(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(NUMERIC))
    array = data.draw(hnp.arrays(np.dtype(dtype.numpy), hnp.array_shapes(min_dims=2, max_dims=2, max_side=8)))
    contract = contract_of(dtype, "rows", "columns")
    raw = array.tobytes()
    head = body_of(tensor(datatype=dtype.oip, shape=array.shape, parameters={"binary_data_size": len(raw)}))
    request = decode(head + raw, contract, str(len(head)))
    assert bytes(request.payloads[0]) == raw
    output = OutputTensor(contract.outputs[0], array.shape, np.frombuffer(raw, np.uint8), binary=True)
    body, length = encode_infer("m", "1", "id", [output])
    assert length is not None
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": len(raw)}
    assert body[length:] == raw


@given(st.lists(st.text(max_size=10), max_size=6))
def test_strings_round_trip(texts: list[str]) -> None:
    x = TensorSpec("x", DType.STRING, ("n",), 4096)
    contract = Contract((x,), (x,), {"n": DimRange(0, 1, 6)})
    items = [text.encode("utf-8") for text in texts]
    from_json = decode(body_of(tensor(texts, datatype="BYTES", shape=[len(texts)])), contract)
    assert from_json.payloads[0] == pack_strings(items)
    output = OutputTensor(x, (len(texts),), np.frombuffer(pack_strings(items), np.uint8), binary=False)
    assert json.loads(encode_infer("m", "1", None, [output])[0])["outputs"][0]["data"] == texts


@given(st.binary(max_size=200), st.none() | st.text(max_size=6) | st.integers(-3, 210).map(str))
def test_any_body_is_a_request_or_a_clear_error(body: bytes, header: str | None) -> None:
    with pytest.raises(TightfitError):
        decode(body, header=header)


@given(st.data())
def test_a_damaged_request_is_read_or_refused(data: st.DataObject) -> None:
    good, header = binary(np.arange(8, dtype=np.float32).tobytes(), id="7")
    position = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:position] + bytes([data.draw(st.integers(0, 255))]) + good[position + 1 :]
    try:
        request = decode(damaged, header=header)
    except TightfitError:
        return
    assert len(request.payloads[0]) == 32


# --- what a client can get wrong


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1e39", "null", "true", '"1"', "[1]"])
def test_what_is_no_number_of_that_type(number: str) -> None:
    with pytest.raises(ContractError):
        decode(b'{"inputs":[{"name":"x","shape":[1,8],"datatype":"FP32","data":[0,0,0,0,0,0,0,%b]}]}' % number.encode())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (DType.UINT8, 256), (DType.UINT8, -1), (DType.INT8, 128), (DType.INT32, 1 << 31), (DType.INT64, 1 << 63),
        (DType.UINT64, 1 << 64), (DType.UINT64, -1), (DType.INT32, 1.0), (DType.INT32, True), (DType.BOOL, 1),
        (DType.STRING, 1), (DType.STRING, None), (DType.INT64, 10**4000),
    ],
)  # fmt: skip
def test_values_outside_the_type(dtype: DType, value: Any) -> None:
    with pytest.raises(ContractError, match=r"input 'x'|not a valid infer request"):
        decode(body_of(tensor([value], datatype=dtype.oip, shape=[1])), contract_of(dtype, 1))


@pytest.mark.parametrize("value", [0, (1 << 64) - 1])
def test_the_ends_of_uint64(value: int) -> None:
    request = decode(body_of(tensor([value], datatype="UINT64", shape=[1])), contract_of(DType.UINT64, 1))
    assert int.from_bytes(request.payloads[0], "little") == value


@pytest.mark.parametrize(
    "data",
    [
        [0] * 7,
        [0] * 9,
        [[0] * 7],
        [[0] * 9],
        [[0] * 8, [0] * 8],
        [[0] * 4, [0] * 3],
        [[[0] * 8]],
        [[0] * 7 + [[0]]],
        5,
        "x",
        {},
    ],
)
def test_data_that_is_not_its_shape(data: Any) -> None:
    with pytest.raises(ContractError, match="input 'x'"):
        decode(body_of(tensor(data)))


def test_a_nested_shape_must_be_the_stated_one() -> None:
    contract = contract_of(DType.FLOAT32, "rows", "columns")
    with pytest.raises(ContractError, match=r"nested shape \[3, 2\], its shape needs nested shape \[2, 3\]"):
        decode(body_of(tensor([[1, 2], [3, 4], [5, 6]], shape=[2, 3])), contract)


@pytest.mark.parametrize("header", ["-1", "+5", "abc", "", "1.5", " 5", "1_0", "٣", "99999", "9" * 30])
def test_header_length_that_is_none(header: str) -> None:
    with pytest.raises(ContractError, match="Inference-Header-Content-Length"):
        decode(body_of(tensor([0] * 8)), header=header)


@pytest.mark.parametrize("size", [31, 33, 0, -1, 32.0, "32", True, None, 1 << 60])
def test_binary_size_that_does_not_agree(size: Any) -> None:
    body, header = binary(bytes(32), size=size if size is not None else "none")
    with pytest.raises(ContractError):
        decode(body, header=header)


def test_binary_data_and_its_limits() -> None:
    body, header = binary(bytes(32))
    assert decode(body, header=header).payloads[0] == bytes(32)
    with pytest.raises(ContractError, match="1 bytes follow the last tensor"):
        decode(body + b"\0", header=header)
    with pytest.raises(ContractError, match="not a valid infer request"):
        decode(body)
    head = body_of(tensor([0] * 8, parameters={"binary_data_size": 32}))
    with pytest.raises(ContractError, match="both data and binary_data_size"):
        decode(head + bytes(32), header=str(len(head)))


def test_fp16_is_binary_only() -> None:
    contract = contract_of(DType.FLOAT16)
    with pytest.raises(ContractError, match=r"FP16 cannot be given as JSON \(send it as binary data\)"):
        decode(body_of(tensor([0] * 8, datatype="FP16")), contract)


@pytest.mark.parametrize(
    "data", [b"\x05\0\0\0ab", b"\xff\xff\xff\xff", b"\0\0\0\0" * 3, b"\0\0\0\0", b"\x01\0\0\0\xff\0\0\0\0"]
)
def test_bytes_tensors_that_do_not_agree(data: bytes) -> None:
    x = TensorSpec("x", DType.STRING, (2,), 4096)
    head = body_of(tensor(datatype="BYTES", shape=[2], parameters={"binary_data_size": len(data)}))
    with pytest.raises(ContractError):
        decode(head + data, Contract((x,), (x,), {}), str(len(head)))


def test_strings_past_their_room() -> None:
    x = TensorSpec("x", DType.STRING, (1,), 16)
    with pytest.raises(ContractError, match=r"has 17 B.*room for 16 B"):
        decode(body_of(tensor(["a" * 13], datatype="BYTES", shape=[1])), Contract((x,), (x,), {}))


def test_bool_bytes_are_zero_or_one() -> None:
    head = body_of(tensor(datatype="BOOL", parameters={"binary_data_size": 8}))
    with pytest.raises(ContractError, match="neither 0 nor 1"):
        decode(head + bytes([2] * 8), contract_of(DType.BOOL), str(len(head)))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"null", b'{"inputs":{}}', b'{"inputs":[]}', b'{"inputs":[{}]}', b"[" * 20_000,
        b'{"inputs":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b',"inputs":[]}',
        b'{"inputs":[{"name":"x","shape":[1,8],"datatype":"FP32","data":' + b"[" * 20_000 + b"]" * 20_000 + b"}]}",
        b"\xef\xbb\xbf" + body_of(tensor([0] * 8)),
        body_of(tensor([0] * 8)).decode().encode("utf-16"),
        body_of(tensor([0] * 8)) + b"x",
        body_of(tensor([0] * 8), parameters={"a": [1]}),
        body_of(tensor([0] * 8), parameters={"a": 7}).replace(b"7", b"7" * 5000),
        body_of(tensor([0] * 8), id=5),
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(ContractError):
        decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[],"inputs":[%b]}',
        b'{"inputs":[%b],"id":"a","id":"b"}',
        b'{"inputs":[{"data":[9,9,9,9,9,9,9,9],"name":"x","shape":[1,8],"datatype":"FP32","data":[0,0,0,0,0,0,0,0]}]}',
        b'{"inputs":[%b],"parameters":{"a":1,"a":2}}',
        b'{"inputs":[%b],"parameters":{},"parameters":{}}',
        b'{"inputs":[%b],"id":null,"id":null}',
        b'{"inputs":[%b],"id":"a:b","i\\u0064":"c"}',
        b'{"inputs":[%b],"unknown":{"a":1,"a":2}}',
        b'{"inputs":[%b],"outputs":[{"name":"y","name":"y"}]}',
    ],
)
def test_a_key_given_twice_is_refused(body: bytes) -> None:
    with pytest.raises(ContractError, match="given twice"):
        decode(body.replace(b"%b", json.dumps(tensor([0] * 8)).encode()))


@given(st.text(max_size=3), st.lists(st.sampled_from(["id", "parameters", "outputs", "other"]), max_size=4))
def test_keys_are_told_apart_whatever_else_has_colons(text: str, keys: list[str]) -> None:
    values = {"id": text + ":", "parameters": {":": text}, "outputs": [{"name": "y"}], "other": {":": [text]}}
    pairs = ['"inputs":[' + json.dumps(tensor([0] * 8)) + "]"]
    pairs += [f"{json.dumps(key)}:{json.dumps(values[key])}" for key in keys]
    body = ("{" + ",".join(pairs) + "}").encode()
    if len(set(keys)) == len(keys):
        assert decode(body).id == (text + ":" if "id" in keys else None)
    else:
        with pytest.raises(ContractError, match="given twice"):
            decode(body)


def test_bytes_may_hold_what_looks_like_json() -> None:
    x = TensorSpec("x", DType.STRING, (2,), 4096)
    texts = ['{"a":1,"a":2}', '"inputs":[[[']
    request = decode(body_of(tensor(texts, datatype="BYTES", shape=[2])), Contract((x,), (x,), {}))
    assert request.payloads[0] == pack_strings(text.encode() for text in texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "z"}, "unknown input 'z'.*available: x"),
        ({"datatype": "FP31"}, "unknown datatype 'FP31'.*did you mean 'FP32'"),
        ({"datatype": "INT32"}, r"input 'x' is int32.*the model takes x float32\[1,8\]"),
        ({"shape": [8]}, "has 1 dimensions"),
        ({"shape": [1, 9]}, "has size 9 on axis 1"),
        ({"shape": [1, -8]}, "not a valid infer request"),
        ({"name": "x" * 2000}, "not a valid infer request"),
        ({"parameters": {"shared_memory_region": "r"}}, "shared_memory_region.*does not have"),
    ],
)
def test_tensors_the_contract_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        decode(body_of(tensor([0] * 8, **changes)))


def test_inputs_given_twice_or_not() -> None:
    with pytest.raises(ContractError, match="two inputs have one name"):
        decode(body_of(tensor([0] * 8), tensor([0] * 8)))
    with pytest.raises(ContractError, match="input 'x' is missing"):
        decode(body_of())


# --- parameters


@pytest.mark.parametrize(
    ("fields", "wishes"),
    [
        ({}, [(0, False), (1, False)]),
        ({"parameters": {"binary_data_output": True}}, [(0, True), (1, True)]),
        ({"outputs": [{"name": "b"}]}, [(1, False)]),
        (
            {
                "outputs": [{"name": "b", "parameters": {"binary_data": False}}, {"name": "a"}],
                "parameters": {"binary_data_output": True},
            },
            [(1, False), (0, True)],
        ),
    ],
)
def test_which_outputs_and_how(fields: dict[str, Any], wishes: list[tuple[int, bool]]) -> None:
    x = dense("x", DType.FLOAT32, 1, 8)
    contract = Contract((x,), (dense("a", DType.FLOAT32, 1), dense("b", DType.FLOAT32, 1)), {})
    request = decode(body_of(tensor([0] * 8), **fields), contract)
    assert [(wish.index, wish.binary) for wish in request.wishes] == wishes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outputs": [{"name": "z"}]}, "unknown output 'z'.*available: y"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "asked for twice"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "binary_data is 1"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "a"}}]}, "asks for shared_memory"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 0}}]}, "classification is 0.*1 to 1000"),
        ({"outputs": [{"name": "y", "parameters": {"classification": True}}]}, "classification is True"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 1001}}]}, "classification is 1001"),
        ({"parameters": {"sequence_start": True}}, "sequence_start is true without a sequence_id"),
        ({"parameters": {"sequence_id": 0, "sequence_end": True}}, "sequence_end is true without"),
        ({"parameters": {"sequence_id": -1}}, "sequence_id is -1"),
        ({"parameters": {"sequence_id": 7, "sequence_start": 1}}, "sequence_start is 1"),
        ({"parameters": {"timeout": -1}}, "timeout is -1"),
        ({"parameters": {"timeout": 1.5}}, "timeout is 1.5"),
    ],
)
def test_parameters_that_are_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        decode(body_of(tensor([0] * 8), **fields))


@pytest.mark.parametrize(("timeout", "seconds"), [(None, None), (0, None), (1_500_000, 1.5)])
def test_timeout_is_in_microseconds(timeout: int | None, seconds: float | None) -> None:
    parameters = {} if timeout is None else {"timeout": timeout}
    assert decode(body_of(tensor([0] * 8), parameters=parameters)).timeout_s == seconds


def test_id_is_echoed_only_when_given() -> None:
    assert decode(body_of(tensor([0] * 8), id="")).id == ""
    assert decode(body_of(tensor([0] * 8))).id is None
    assert "id" not in msgspec.json.decode(encode_infer("m", "1", None, [])[0])
    assert msgspec.json.decode(encode_infer("m", "1", "", [])[0])["id"] == ""


# --- outputs that JSON cannot say


@pytest.mark.parametrize(
    ("dtype", "raw", "why"),
    [
        (DType.FLOAT32, np.float32([np.nan]).tobytes(), "NaN or infinity"),
        (DType.FLOAT64, np.float64([-np.inf]).tobytes(), "NaN or infinity"),
        (DType.FLOAT16, np.float16([1]).tobytes(), "no JSON form"),
        (DType.STRING, pack_strings([b"\xff"]), "not UTF-8"),
    ],
)
def test_outputs_without_a_json_form(dtype: DType, raw: bytes, why: str) -> None:
    spec = TensorSpec("y", dtype, (1,), 64)
    data = np.frombuffer(raw, np.uint8)
    with pytest.raises(RefusedError, match=f"{why}.*binary_data = true") as caught:
        encode_infer("m", "1", None, [OutputTensor(spec, (1,), data, binary=False)])
    assert caught.value.reason is Reason.NOT_JSON
    body, length = encode_infer("m", "1", None, [OutputTensor(spec, (1,), data, binary=True)])
    assert body[length:] == raw


def test_mixed_outputs_keep_their_order() -> None:
    specs = [dense(name, DType.INT32, 1) for name in "abc"]
    outputs = [
        OutputTensor(spec, (1,), np.frombuffer(np.int32([value]).tobytes(), np.uint8), binary=value != 2)
        for value, spec in enumerate(specs, start=1)
    ]
    body, length = encode_infer("m", "1", None, outputs)
    head = json.loads(body[:length])
    assert [output["name"] for output in head["outputs"]] == ["a", "b", "c"]
    assert head["outputs"][1]["data"] == [2]
    assert body[length:] == np.int32([1, 3]).tobytes()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT64, DType.BOOL])
def test_long_data_is_read_and_written_in_pieces(dtype: DType) -> None:
    spec = dense("x", dtype, 50_000)
    contract = Contract((spec,), (spec,), {})
    values = np.random.default_rng(7).integers(-1000, 1000, 50_000).astype(dtype.numpy)
    body = json.dumps({"inputs": [tensor(values.tolist(), datatype=dtype.oip, shape=[50_000])]}, indent=2).encode()
    raw = decode(body, contract).payloads[0]
    assert raw == values.tobytes()
    output = OutputTensor(spec, (50_000,), np.frombuffer(raw, np.uint8), binary=False)
    assert json.loads(encode_infer("m", "1", None, [output])[0])["outputs"][0]["data"] == values.tolist()
    for count in (49_999, 50_001, 70_000):
        with pytest.raises(ContractError, match=f"data has {count} elements, its shape needs 50000 elements"):
            decode(body_of(tensor(values.tolist()[:1] * count, datatype=dtype.oip, shape=[50_000])), contract)


@pytest.mark.parametrize("element", ['"0,0"', "[0,0]", '{"a":0,"b":0}', "null", "0" + " " * 70_000, '",'])
def test_only_numbers_are_cut_at_commas(element: str) -> None:
    spec = dense("x", DType.FLOAT32, 40_000)
    text = "0," * 20_000 + element + ",0" * 19_999
    body = json.dumps({"inputs": [tensor(shape=[40_000])]}).replace("40000]", '40000],"data":[' + text + "]")
    with pytest.raises(ContractError):
        decode(body.encode(), Contract((spec,), (spec,), {}))


def test_largest_body_holds_what_the_contract_takes() -> None:
    contract = contract_of(DType.FLOAT64, 8, 8)
    values = [[-1.7976931348623157e308] * 8] * 8
    body = json.dumps({"inputs": [tensor(values, datatype="FP64", shape=[8, 8])]}, indent=8).encode()
    assert decode(body, contract).shapes == ((8, 8),)
    assert len(body) <= largest_body(contract)


# --- raw binary requests


def test_raw_bytes_are_the_only_input() -> None:
    values = np.arange(8, dtype=np.float32)
    request = decode(values.tobytes(), header="0")
    assert (request.shapes, bytes(request.payloads[0])) == (((1, 8),), values.tobytes())
    assert [wish.binary for wish in request.wishes] == [True]


@pytest.mark.parametrize(("nbytes", "shape"), [(0, (0, 2)), (16, (2, 2)), (64, (8, 2))])
def test_raw_bytes_tell_one_dimension(nbytes: int, shape: tuple[int, ...]) -> None:
    assert decode(bytes(nbytes), contract_of(DType.FLOAT32, "n", 2), "0").shapes == (shape,)


def test_raw_bytes_are_one_row_of_a_batch() -> None:
    x, y = dense("x", DType.INT16, "n", "t", largest=64), dense("y", DType.INT16, "n", "t", largest=64)
    contract = Contract((x,), (y,), {"n": DimRange(1, 1, 4), "t": DimRange(1, 8, 8)}, "n")
    assert decode(bytes(6), contract, "0").shapes == ((1, 3),)


def test_a_raw_text_is_one_element_without_its_length() -> None:
    request = decode(b"caf\xc3\xa9", contract_of(DType.STRING, 1), "0")
    assert (request.shapes, bytes(request.payloads[0])) == (((1,),), pack_strings([b"caf\xc3\xa9"]))


@pytest.mark.parametrize(
    ("contract", "nbytes", "message"),
    [
        (contract_of(), 31, r"31 bytes, FP32\[1, 8\] needs 32"),
        (contract_of(DType.FLOAT32, "n", 2), 12, r"12 bytes, FP32\[1, 2\] needs 8"),
        (contract_of(DType.FLOAT32, "n", 2), 80, "size 10 on axis 0"),
        (contract_of(DType.FLOAT32, "n", "m"), 16, "do not tell the shape of x"),
        (contract_of(DType.STRING, 2), 16, "do not tell the shape of x"),
    ],
)
def test_raw_bytes_that_say_nothing(contract: Contract, nbytes: int, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        decode(bytes(nbytes), contract, "0")


def test_raw_bytes_of_several_inputs() -> None:
    a, b = dense("a", DType.FLOAT32, 1), dense("b", DType.FLOAT32, 1)
    with pytest.raises(ContractError, match="Inference-Header-Content-Length is 0, and the inputs are a, b"):
        decode(bytes(8), Contract((a, b), (a,), {}), "0")


@pytest.mark.parametrize("dtype", [DType.BOOL, DType.STRING])
def test_types_without_best_classes(dtype: DType) -> None:
    body = body_of(
        tensor([], datatype=dtype.oip, shape=[0]), outputs=[{"name": "y", "parameters": {"classification": 1}}]
    )
    with pytest.raises(ContractError, match=f"output 'y' is {dtype.oip}, which has no best classes"):
        decode(body, contract_of(dtype, "n"))
