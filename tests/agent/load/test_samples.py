"""Requests as they are made, read by the agent's own decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.http.codecs import HEADER_LENGTH, InferRequest, decode_infer
from agent.load.samples import (
    Form,
    Message,
    Metadata,
    Tensor,
    file_messages,
    fitting,
    infer_message,
    random_messages,
    read_inputs,
)
from targets.errors import TightfitError
from targets.tensor import Contract, DimRange, DType
from tests.support.bundles import ONNX_TYPES, dense

PATH = "/v2/models/m/infer"
BINARY, JSON = Form(PATH, True, {}), Form(PATH, False, {})
IN_JSON = [dtype for dtype in ONNX_TYPES if dtype is not DType.FLOAT16]


def metadata_of(*tensors: tuple[str, str, list[int]], **parameters: Any) -> Metadata:
    return Metadata("m", [Tensor(*tensor) for tensor in tensors], parameters=parameters)


def decoded(message: Message, contract: Contract) -> InferRequest:
    return decode_infer(message.body, message.headers.get(HEADER_LENGTH), contract)


def shapes_of(message: Message) -> list[list[int]]:
    head = message.body[: int(message.headers[HEADER_LENGTH])]
    return [tensor["shape"] for tensor in json.loads(head)["inputs"]]


X = ("x", "FP32", [-1, 8])


@pytest.mark.parametrize(
    ("dtype", "binary"), [*((dtype, True) for dtype in ONNX_TYPES), *((dtype, False) for dtype in IN_JSON)]
)
def test_every_type_is_understood(dtype: DType, binary: bool) -> None:
    x = dense("x", dtype, 2, 3)
    metadata = metadata_of(("x", dtype.oip or "", [2, 3]))
    messages = random_messages(metadata, BINARY if binary else JSON, {}, {}, 0)
    contract = Contract((x,), (dense("y", dtype, 2, 3),), {})
    read = [decoded(message, contract) for message in messages]
    assert all(request.shapes == ((2, 3),) and request.wishes[0].binary is binary for request in read)
    assert len({bytes(request.payloads[0]) for request in read}) > 1


def test_values_are_what_was_given() -> None:
    values = np.arange(16, dtype=np.float32).reshape(2, 8)
    contract = Contract((dense("x", DType.FLOAT32, 2, 8),), (dense("y", DType.FLOAT32, 2, 8),), {})
    for form in (BINARY, JSON):
        for array in (values, np.asfortranarray(values)):
            (payload,) = decoded(infer_message(form, [("x", DType.FLOAT32, array)]), contract).payloads
            assert bytes(payload) == values.tobytes()


def test_fp16_has_no_json() -> None:
    with pytest.raises(TightfitError, match="--tensors binary"):
        random_messages(metadata_of(("x", "FP16", [1])), JSON, {}, {}, 0)


def test_deadline_and_priority_are_parameters() -> None:
    form = Form(PATH, False, {"timeout": 50_000, "priority": 1})
    (message, *_) = random_messages(metadata_of(("x", "INT8", [1])), form, {}, {}, 0)
    assert json.loads(message.body)["parameters"] == {"timeout": 50_000, "priority": 1}


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 9))
def test_sizes_are_in_their_range_and_alike_where_written_alike(low: int, more: int, seed: int) -> None:
    metadata = metadata_of(("ids", "INT64", [-1, -1]), ("mask", "INT64", [-1, -1]))
    text = f"2,{low}..{low + more}"
    for message in random_messages(metadata, BINARY, {"ids": text, "mask": text}, {}, seed):
        ids, mask = shapes_of(message)
        assert ids == mask
        assert ids[0] == 2
        assert low <= ids[1] <= low + more


def test_seeds_repeat() -> None:
    def made(seed: int) -> list[bytes]:
        return [m.body for m in random_messages(metadata_of(X), BINARY, {"x": "1..4,8"}, {}, seed)]

    assert made(1) == made(1) != made(2)


def test_large_requests_are_few() -> None:
    messages = random_messages(metadata_of(("x", "UINT8", [24 << 20])), BINARY, {}, {}, 0)
    assert len(messages) == 3


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({}, r"say --shape x=\?,8"), ({"y": "1"}, "unknown input 'y'"), ({"x": "1"}, "takes x FP32"),
        ({"x": "1,9"}, "9 where the model has 8"), ({"x": "a,8"}, "'a' is not a size"),
        ({"x": "4..2,8"}, "'4..2' is not a size"), ({"x": "-1,8"}, "'-1' is not a size"),
        ({"x": "99999999999,8"}, "at most 256.0 MiB"),
    ],
)  # fmt: skip
def test_shapes_that_are_refused(shapes: dict[str, str], words: str) -> None:
    with pytest.raises(TightfitError, match=words):
        random_messages(metadata_of(X), BINARY, shapes, {}, 0)


def test_types_that_are_not_known() -> None:
    with pytest.raises(TightfitError, match="'x' is BF16"):
        random_messages(metadata_of(("x", "BF16", [1])), BINARY, {}, {}, 0)


# --- files


def messages_of(path: Path, metadata: Metadata, form: Form = BINARY, room: int = 1 << 20) -> tuple[Message, ...]:
    return file_messages(path, metadata, form, {}, 0, room)[0]


def test_arrays_from_files(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.full((number + 1, 8), number, np.float32))
    (tmp_path / "notes.txt").write_text("not a sample")
    contract = Contract((dense("x", DType.FLOAT32, "n", 8, largest=24),), (), {"n": DimRange(1, 1, 3)})
    requests = [decoded(message, contract) for message in messages_of(tmp_path, metadata_of(X))]
    assert sorted((r.shapes[0], bytes(r.payloads[0])[:4]) for r in requests) == [
        ((n + 1, 8), np.float32(n).tobytes()) for n in range(3)
    ]


def test_several_inputs_from_one_file(tmp_path: Path) -> None:
    texts = np.array(["a", "bc"])
    np.savez(tmp_path / "one.npz", x=np.zeros((2, 8), np.float32), texts=texts)
    metadata = metadata_of(("texts", "BYTES", [-1]), X)
    (message,) = messages_of(tmp_path / "one.npz", metadata)
    specs = (dense("texts", DType.STRING, 2), dense("x", DType.FLOAT32, 2, 8))
    assert bytes(decoded(message, Contract(specs, (), {})).payloads[0]) == b"\1\0\0\0a\2\0\0\0bc"


def test_an_input_given_apart_completes_the_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 8), np.float32))
    np.save(tmp_path / "turns.npy", np.array([7]))
    metadata = metadata_of(X, ("turns", "INT64", [1]))
    inputs = read_inputs({"turns": str(tmp_path / "turns.npy")}, metadata)
    ((message,), left_out) = file_messages(tmp_path / "x.npy", metadata, BINARY, inputs, 0, 1 << 20)
    assert (left_out, message.body[-8:]) == (0, np.int64(7).tobytes())
    (random, *_) = random_messages(metadata, BINARY, {"x": "1,8"}, inputs, 0)
    assert random.body[-8:] == np.int64(7).tobytes()


def test_samples_past_the_room_are_left_out(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.jpg").write_bytes(bytes([number]) * 1000)
    metadata = metadata_of(X, image_path="/v2/models/m/image")
    messages, left_out = file_messages(tmp_path, metadata, BINARY, {}, 0, 5500)
    assert (len(messages), left_out) == (5, 15)
    assert messages == file_messages(tmp_path, metadata, BINARY, {}, 0, 5500)[0]


def test_images_go_as_they_are_and_with_parameters_as_an_input(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    metadata = metadata_of(X, image_path="/v2/models/m/image", image_input="image")
    (message,) = messages_of(tmp_path, metadata)
    assert message == Message("/v2/models/m/image", b"pixels", {"Content-Type": "image/png"})
    (message,) = messages_of(tmp_path, metadata, Form(PATH, False, {"timeout": 1000}))
    assert message.path == PATH
    head = json.loads(message.body[: int(message.headers[HEADER_LENGTH])])
    assert (head["inputs"][0]["name"], head["parameters"]["timeout"]) == ("image", 1000)
    assert message.body.endswith(b"\6\0\0\0pixels")


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none", "is not there"),
        (lambda folder: folder, "has no samples"),
        (lambda folder: write(folder / "a.txt", b""), "has no samples"),
        (lambda folder: write(folder / "a.npy", b"junk"), "cannot read arrays from"),
        (lambda folder: write(folder / "a.npz", b"junk"), "cannot read arrays from"),
        (lambda folder: write(folder / "a.jpg", b""), "takes no images"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, make: Any, words: str) -> None:
    with pytest.raises(TightfitError, match=words):
        messages_of(make(tmp_path), metadata_of(X))


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "b.npz", x=np.array([{}], object))
    for name in ("a.npy", "b.npz"):
        with pytest.raises(TightfitError, match="cannot read arrays"):
            messages_of(tmp_path / name, metadata_of(X))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": np.zeros(1)}, "unknown input 'z'"), ({}, "has no input 'x'"),
        ({"x": np.zeros((1, 8))}, "is float64"), ({"x": np.zeros(8, np.float32)}, r"has shape \[8\]"),
        ({"x": np.zeros((1, 9), np.float32)}, r"has shape \[1, 9\]"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_go_with_the_model(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(TightfitError, match=words):
        messages_of(tmp_path, metadata_of(X))


def test_one_array_and_two_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 8), np.float32))
    with pytest.raises(TightfitError, match=r"use \.npz"):
        messages_of(tmp_path, metadata_of(X, ("y", "FP32", [1])))


def test_inputs_that_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 8), np.float32))
    for pairs, words in (({"y": "a.npy"}, "unknown input 'y'"), ({"x": str(tmp_path / "a.npz")}, "not an .npy file")):
        with pytest.raises(TightfitError, match=words):
            read_inputs(pairs, metadata_of(X))


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_texts_become_bytes(texts: list[str]) -> None:
    # numpy's own text arrays drop NUL at the end.
    texts = [text.rstrip("\0") for text in texts]
    array = fitting("here", Tensor("t", "BYTES", [-1]), np.array(texts))
    assert array.tolist() == [text.encode() for text in texts]
