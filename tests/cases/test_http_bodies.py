"""Infer requests that broke other servers by what their bodies hold: each is refused, with a reason,
and the connection
answers the next. What is asked where, and what is proven elsewhere:

| what | reported at | proven by |
|---|---|---|
| a body that is not the gzip it says, a gzip bomb | aiohttp#1710 | here; the decoder in tests/agent/http/test_bodies.py |
| NaN and infinity in a request, and in an output | triton#3870, triton#3711 | here, and tests/agent/test_serve.py |
| more or fewer elements than the shape has, ragged lists | triton#3158 | here |
| BYTES whose lengths, count or text is wrong | triton#4405, openvinotoolkit/model_server#1762, openvinotoolkit/model_server#2372 | here |
| an Inference-Header-Content-Length that cannot be | openvinotoolkit/model_server#2664, triton#5649, triton#2915, triton#4244 | here |
| binary sizes that do not agree, FP16 as JSON | triton#4244, triton#5960 | here, and tests/end_to_end/test_oip_tritonclient.py |
| deep nesting, huge integers, keys given twice, UTF-16, a byte-order mark | flop-labs/technocore-chat#130, MemPalace/mempalace#2556, influxdata/influxdb3_plugins#169 | here |

triton is triton-inference-server/server.
"""  # noqa: E501

from __future__ import annotations

import gzip
import json
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.peers import Answer, Peer
from tests.support.wire import LANES as HEADERS

LANES = {name: tuple(f"{key}: {value}" for key, value in headers.items()) for name, headers in HEADERS.items()}
both_lanes = pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
LENGTH = "Inference-Header-Content-Length"
MODELS: dict[str, tuple[DType, tuple[int, ...]]] = {
    "floats": (DType.FLOAT32, (1, 8)),
    "words": (DType.STRING, (2,)),
    "halves": (DType.FLOAT16, (1, 8)),
    "bytes": (DType.INT8, (1, 8)),
    "longs": (DType.INT64, (2, 2)),
}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """`y = x` of several types, and `log`."""
    folder = tmp_path_factory.mktemp("bodies")
    for name, (kind, shape) in MODELS.items():
        bundles.identity(folder / f"{name}.tfb", kind, shape)
    bundles.log_of(folder / "log.tfb")
    models = "".join(f'[[models]]\nbundle = "{folder / name}.tfb"\n' for name in (*MODELS, "log"))
    (folder / "agent.toml").write_text(models)
    with serving(None, folder / "log", "--config", str(folder / "agent.toml")) as agent:
        yield agent
        assert "Traceback" not in agent.log
        until(lambda: agent.metric("tightfit_in_flight") == 0)


def request(model: str, body: bytes, *fields: str) -> bytes:
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: ecu", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def document(model: str, data: str, **changes: Any) -> bytes:
    """A request as JSON, with the data as it stands."""
    kind, shape = MODELS.get(model, MODELS["floats"])
    tensor = {"name": "x", "datatype": kind.oip, "shape": list(shape), **changes}
    return json.dumps({"inputs": [tensor]})[:-3].encode() + b',"data":' + data.encode() + b"}]}"


def binary(model: str, raw: bytes, size: object = None, **changes: Any) -> tuple[bytes, int]:
    """(body, length of its JSON part) of a request with raw tensors."""
    kind, shape = MODELS[model]
    parameters = {"binary_data_size": len(raw) if size is None else size}
    tensor = {"name": "x", "datatype": kind.oip, "shape": list(shape), "parameters": parameters, **changes}
    text = json.dumps({"inputs": [tensor]}).encode()
    return text + raw, len(text)


GOOD = document("floats", "[1,2,3,4,5,6,7,8]")


def ask(agent: Agent, model: str, body: bytes, *fields: str) -> Answer:
    """The answer to it; behind it on the same connection a good request is answered twice, as the first may have been
    remembered."""
    with Peer(("127.0.0.1", agent.port)) as client:
        client.send(request(model, body, *fields))
        answer = client.answer()
        if not answer.closes:
            lane = [field for field in fields if field.startswith("TE")]
            for _ in range(2):
                client.send(request("floats", GOOD, *lane))
                assert client.answer().json["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6, 7, 8]
    return answer


def refused(answer: Answer, *words: str) -> None:
    assert answer.status == 400, answer
    error = answer.json["error"]
    assert error
    for word in words:
        assert word in error, error


# --- compressed bodies


@pytest.mark.parametrize(
    "body",
    [
        random.Random(0).randbytes(100),
        gzip.compress(GOOD)[:-1],
        gzip.compress(GOOD)[:-8] + bytes(8),
        gzip.compress(GOOD) + b"more",
        gzip.compress(GOOD)[:10],
        b"\x1f\x8b",
        b"",
        GOOD,
    ],
)
def test_bodies_that_are_not_gzip(agent: Agent, body: bytes) -> None:
    refused(ask(agent, "floats", body, "Content-Encoding: gzip"))


@pytest.mark.parametrize("nbytes", [1 << 20, 200 << 20])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bombs(agent: Agent, coding: str, nbytes: int) -> None:
    pack = zlib.compressobj(9, wbits=31 if coding == "gzip" else 15)
    body = b"".join([*[pack.compress(bytes(1 << 20)) for _ in range(nbytes >> 20)], pack.flush()])
    answer = ask(agent, "floats", body, f"Content-Encoding: {coding}")
    assert answer.status == 413


def test_what_is_rightly_compressed(agent: Agent) -> None:
    for coding, body in (("gzip", gzip.compress(GOOD)), ("deflate", zlib.compress(GOOD)), ("identity", GOOD)):
        assert ask(agent, "floats", body, f"Content-Encoding: {coding}").status == 200
    assert ask(agent, "floats", GOOD, "Content-Encoding: br").status == 415


# --- numbers


@both_lanes
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "1e400", "3.5e38"])
def test_numbers_that_are_not_finite(agent: Agent, lane: Sequence[str], number: str) -> None:
    for data in (f"[{number},2,3,4,5,6,7,8]", f"[[1,2,3,4,5,6,7,{number}]]"):
        refused(ask(agent, "floats", document("floats", data), *lane))


@both_lanes
@pytest.mark.parametrize(
    "number", ["128", "-129", "1.5", "1e2000", "9" * 5000, "-" + "9" * 5000, "1" * 20, "true", '"1"']
)
def test_numbers_that_the_type_does_not_hold(agent: Agent, lane: Sequence[str], number: str) -> None:
    refused(ask(agent, "bytes", document("bytes", f"[1,2,3,4,5,6,7,{number}]"), *lane))
    wide = number if len(number) >= 20 or not number.lstrip("-").isdigit() else "9223372036854775808"
    refused(ask(agent, "longs", document("longs", f"[1,2,3,{wide}]"), *lane))


@both_lanes
def test_outputs_that_json_cannot_say(agent: Agent, lane: Sequence[str]) -> None:
    """Refused as JSON, and given as raw bytes."""
    for data, value in (("[-1,1,1,1,1,1,1,1]", "nan"), ("[1,1,1,1,1,1,1,0]", "-inf")):
        answer = ask(agent, "log", document("floats", data), *lane)
        refused(answer, "binary_data")
        asked = document("floats", data)[:-1] + b',"parameters":{"binary_data_output":true}}'
        answer = ask(agent, "log", asked, *lane)
        assert answer.status == 200
        values = struct.unpack("<8f", answer.body[int(answer.headers[LENGTH.lower()]) :])
        assert value in map(str, values)


# --- shapes


@both_lanes
@pytest.mark.parametrize(
    "data",
    [
        "[1,2,3,4,5,6,7,8,9]", "[1,2,3,4,5,6,7]", "[]", "[[1,2,3,4,5,6,7]]", "[[1,2,3,4,5,6,7,8,9]]",
        "[[1,2],[3,4,5,6,7,8]]",
        "[[1,2,3,4],[5,6,7,8]]", "[[[1,2,3,4,5,6,7,8]]]", "[1,[2,3,4,5,6,7,8]]", "[[1,2,3,4,5,6,7,8],[]]", "1",
        "null", "{}",
        '"12345678"', "[[1,2,3,4,5,6,7,8]", "[1,2,3,4,5,6,7,8,]", "[1,2,3,4,5,6,7,8]]", "[,]", "[1 2 3 4 5 6 7 8]",
    ],
)  # fmt: skip
def test_data_that_is_not_as_its_shape(agent: Agent, lane: Sequence[str], data: str) -> None:
    refused(ask(agent, "floats", document("floats", data), *lane))


@both_lanes
@pytest.mark.parametrize(
    "shape", [[1, 7], [1, 9], [2, 8], [8], [1, 1, 8], [], [0], [-1, 8], [1, -8], [1 << 62, 1 << 62], [1 << 63, 8],
    [1.0, 8], "1,8"]
)  # fmt: skip
def test_shapes_that_are_not_the_model_s(agent: Agent, lane: Sequence[str], shape: object) -> None:
    refused(ask(agent, "floats", document("floats", "[1,2,3,4,5,6,7,8]", shape=shape), *lane))
    body, length = binary("floats", bytes(32), shape=shape)
    refused(ask(agent, "floats", body, f"{LENGTH}: {length}", *lane))


# --- BYTES


def words(*items: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


@both_lanes
@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<I", 5) + b"ab",
        b"\xff\xff\xff\xff",
        words(b"one", b"two", b"three"),
        words(b"one"),
        words(b"one", b"two") + b"\xff",
        words(b"one", b"two")[:-1],
        words(b"one") + b"\x00\x00",
        words(b"one") + struct.pack("<I", 1 << 31) + b"two",
        words(b"one") + struct.pack("<I", (1 << 32) - 1),
        b"",
    ],
)
def test_strings_whose_lengths_do_not_agree(agent: Agent, lane: Sequence[str], raw: bytes) -> None:
    body, length = binary("words", raw)
    refused(ask(agent, "words", body, f"{LENGTH}: {length}", *lane))


@both_lanes
@pytest.mark.parametrize("word", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_strings_that_are_not_utf_8(agent: Agent, lane: Sequence[str], word: bytes) -> None:
    """As text they are refused. As raw bytes nobody reads them; no answer says them as JSON."""
    refused(ask(agent, "words", document("words", '["a","?"]').replace(b"?", word), *lane))
    body, length = binary("words", words(b"a", word))
    refused(ask(agent, "words", body, f"{LENGTH}: {length}", *lane), "UTF-8")


# --- the JSON part and what follows it


@both_lanes
@pytest.mark.parametrize("value", ["-1", "x", "0", "5", "+96", "0x60", "1e2", "9" * 30, " ", "96.0", "96,96", "\xb2"])
def test_lengths_of_the_json_part_that_cannot_be(agent: Agent, lane: Sequence[str], value: str) -> None:
    body, _ = binary("floats", bytes(32))
    refused(ask(agent, "floats", body, f"{LENGTH}: {value}".encode("latin-1").decode("latin-1"), *lane))


@both_lanes
@pytest.mark.parametrize("by", [-1, 1, 33, 1 << 40])
def test_lengths_of_the_json_part_that_are_wrong(agent: Agent, lane: Sequence[str], by: int) -> None:
    body, length = binary("floats", bytes(32))
    refused(ask(agent, "floats", body, f"{LENGTH}: {length + by}", *lane))


@both_lanes
def test_no_length_of_the_json_part(agent: Agent, lane: Sequence[str]) -> None:
    body, _ = binary("floats", bytes(32))
    refused(ask(agent, "floats", body, *lane))


@both_lanes
@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(31, 31), (33, 33), (31, 32), (33, 32), (32, 31), (32, 33), (0, 32), (32, 0), (32, -1), (32, 1 << 40), (32,
    1 << 64),
     (32, 1.5), (32, "32"), (32, None), (64, 32), (32, [32]), (32, True)],
)  # fmt: skip
def test_sizes_that_do_not_agree(agent: Agent, lane: Sequence[str], nbytes: int, size: object) -> None:
    if size is None:
        body, length = binary("floats", bytes(nbytes), parameters={})
    else:
        body, length = binary("floats", bytes(nbytes), size)
    for _ in range(2):
        refused(ask(agent, "floats", body, f"{LENGTH}: {length}", *lane))


@both_lanes
def test_fp16_is_never_json(agent: Agent, lane: Sequence[str]) -> None:
    refused(ask(agent, "halves", document("halves", "[1,2,3,4,5,6,7,8]"), *lane), "FP16", "binary")
    body, length = binary("halves", bytes(16))
    refused(ask(agent, "halves", body, f"{LENGTH}: {length}", *lane), "FP16")


# --- JSON that is none, or that two readers read differently


@both_lanes
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b"[" * 20_000 + b"]" * 20_000,
        b'{"inputs":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        document("floats", "[" * 20_000 + "1" + "]" * 20_000),
        document("floats", "[1,2,3,4,5,6,7,8]", parameters={"x": "?"}).replace(b'"?"', b"[" * 5000 + b"]" * 5000),
        b"1" * 5000,
        b"-" + b"1" * 5000,
        GOOD.replace(b"[1,2", b"[" + b"1" * 5000 + b",2"),
        GOOD.replace(b'"shape": [1', b'"shape": [' + b"1" * 5000),
        GOOD.replace(b"{", b'{"id":' + b"1" * 5000 + b",", 1),
    ],
)
def test_depth_and_size(agent: Agent, lane: Sequence[str], body: bytes) -> None:
    assert ask(agent, "floats", body, *lane).status in (400, 413)


@both_lanes
@pytest.mark.parametrize(
    "body",
    [
        GOOD.decode().encode("utf-16"), GOOD.decode().encode("utf-16-le"), GOOD.decode().encode("utf-16-be"),
        GOOD.decode().encode("utf-32"), b"\xef\xbb\xbf" + GOOD, b"\x00" + GOOD, GOOD + b"\x00", GOOD + GOOD,
        GOOD + b"x",
        GOOD[:-1], b"", b" ", b"null", b"true", b"[]", b"{}", b'"x"', b"\xff", GOOD.replace(b'"', b"'"),
        b"// a\n" + GOOD,
        GOOD.replace(b'"x"', b'"\xff"'), GOOD.replace(b'"x"', b'"\\ud800"'), GOOD.replace(b'"x"', b'"\n"'),
    ],
)  # fmt: skip
def test_what_is_no_json(agent: Agent, lane: Sequence[str], body: bytes) -> None:
    refused(ask(agent, "floats", body, *lane))


@both_lanes
@pytest.mark.parametrize(
    "twice",
    [
        GOOD.replace(b"{", b'{"inputs":[],', 1),
        GOOD[:-1] + b',"inputs":[]}',
        GOOD.replace(b'"name": "x"', b'"name":"y","name":"x"'),
        GOOD.replace(b'"shape"', b'"shape":[2,4],"shape"'),
        GOOD.replace(b'"data"', b'"data":[1],"data"'),
        GOOD.replace(b'"data"', b'"data":[1,1,1,1,1,1,1,1],"data"'),
        GOOD.replace(b"{", b'{"id":"a","id":"b",', 1),
        GOOD.replace(b"{", b'{"parameters":{"priority":1,"priority":2},', 1),
        GOOD.replace(b"{", b'{"parameters":{"priority":1},"parameters":{"priority":2},', 1),
    ],
)
def test_keys_that_are_given_twice(agent: Agent, lane: Sequence[str], twice: bytes) -> None:
    """Which of them counts differs from reader to reader."""
    refused(ask(agent, "floats", twice, *lane), "twice")
