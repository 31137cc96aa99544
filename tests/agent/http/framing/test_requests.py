"""Messages of a stream become requests, and a JSON part that comes again is not read again."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import RefusedError
from agent.http.codecs import InferRequest, decode_infer
from agent.http.framing.decoder import Message
from agent.http.framing.frames import FrameDecoder, FrameEncoder, frame_head
from agent.http.framing.lines import LineEncoder
from agent.http.framing.requests import RequestReader
from agent.strings import unpack_strings
from targets.errors import ContractError, TightfitError
from targets.tensor import Contract, DimRange, DType, TensorSpec
from tests.support.bundles import dense

CONTRACT = Contract((dense("x", DType.FLOAT32, 1, 2),), (dense("y", DType.FLOAT32, 1, 2),), {})
IMAGES = Contract(
    (TensorSpec("image", DType.STRING, (1,), 1000, "encoded"),), (dense("score", DType.FLOAT32, "n", largest=8),),
    {"n": DimRange(0, 1, 2)},
)  # fmt: skip


def head_of(**fields: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    return json.dumps({"inputs": [tensor], **fields}).encode()


def frame(*values: float, head: bytes | None = None) -> Message:
    json_part = head_of() if head is None else head
    decoder = FrameDecoder(1000)
    decoder.feed(frame_head(json_part, 4 * len(values)) + struct.pack(f"<{len(values)}f", *values))
    message = decoder.next()
    assert message is not None
    return message


def reader(binary: bool = True, images: Contract | None = IMAGES) -> RequestReader:
    return RequestReader(CONTRACT, images, FrameEncoder() if binary else LineEncoder())


def payload(request: InferRequest) -> bytes:
    return bytes(request.payloads[0])


def test_each_frame_has_its_own_tensors() -> None:
    requests = reader()
    for value in (1.0, 2.0, 3.0):
        request = requests.read(frame(value, -value))
        assert payload(request) == struct.pack("<2f", value, -value)
        assert request.wishes[0].binary


def test_a_head_that_comes_again_does_not_save_its_tensors_from_being_checked() -> None:
    requests = reader()
    requests.read(frame(1.0, 2.0))
    for values in ((), (1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(ContractError):
            requests.read(frame(*values))
    assert payload(requests.read(frame(3.0, 4.0))) == struct.pack("<2f", 3.0, 4.0)


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 3), st.booleans()), max_size=12))
def test_what_a_stream_reads_is_what_requests_of_their_own_are(steps: list[tuple[str, int, bool]]) -> None:
    requests = reader()
    for name, count, binary in steps:
        message = frame(*[0.5] * count, head=head_of(id=name, parameters={"binary_data_output": binary}))
        found: list[Any] = []
        for read in (requests.read, lambda m: decode_infer(m.body, m.header_length, CONTRACT, IMAGES)):
            try:
                found.append(read(message))
            except TightfitError as error:
                found.append(str(error))
        assert found[0] == found[1]


def test_outputs_are_json_where_it_is_asked_for_or_the_record_is_json() -> None:
    assert not reader().read(frame(1.0, 2.0, head=head_of(parameters={"binary_data_output": False}))).wishes[0].binary
    line = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
    assert not reader().read(Message(line)).wishes[0].binary


def test_binary_outputs_need_a_framing_that_has_them() -> None:
    assert not reader(binary=False).read(frame(1.0, 2.0)).wishes[0].binary
    with pytest.raises(RefusedError, match="no place for binary outputs"):
        reader(binary=False).read(frame(1.0, 2.0, head=head_of(parameters={"binary_data_output": True})))


@pytest.mark.parametrize("kind", ["image/jpeg", "image/png", ""])
def test_images(kind: str) -> None:
    request = reader().read(Message(b"\xff\xd8 an image", None, kind, "left-17"))
    assert request.is_image
    assert request.id == "left-17"
    assert unpack_strings(memoryview(payload(request)), 1) == [b"\xff\xd8 an image"]


def test_what_is_neither_image_nor_tensors() -> None:
    with pytest.raises(ContractError, match="a part of text/plain"):
        reader().read(Message(b"hello", None, "text/plain"))
    with pytest.raises(ContractError, match="takes tensors, no images"):
        reader(images=None).read(Message(b"hello", None, "image/jpeg"))


def test_the_id_of_a_part_is_that_of_the_request_unless_its_json_has_one() -> None:
    message = frame(1.0, 2.0)
    assert reader().read(message._replace(id="p")).id == "p"
    assert reader().read(frame(1.0, 2.0, head=head_of(id="j"))._replace(id="p")).id == "j"
