"""JSON that readers differ in is refused with one clear line, wherever JSON is read, and large JSON in short steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.http import codecs, json_data
from agent.http.codecs import read_head
from agent.http.json_data import cut_data, pack_json
from targets.errors import ContractError
from targets.tensor import Contract, DType, TensorSpec
from tests.support import bundles
from tests.support.agents import Agent, serving
from tests.support.wire import LANES

TENSOR = b'"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]'
GOOD = b'{"inputs":[{' + TENSOR + b"}]}"
INFER = {
    "NaN": (GOOD.replace(b"[1,2]}", b"[NaN,2]}"), "invalid"),
    "infinity": (GOOD.replace(b"[1,2]}", b"[Infinity,2]}"), "invalid"),
    "1e999": (GOOD.replace(b"[1,2]}", b"[1e999,2]}"), "out of range"),
    "1e999 as a parameter": (GOOD[:-1] + b',"parameters":{"timeout":1e999}}', "out of range"),
    "a key twice": (GOOD[:-1] + b',"id":"a","id":"b"}', "a key is given twice"),
    "inputs twice": (GOOD[:-1] + b"," + GOOD[1:], "a key is given twice"),
    "data twice": (GOOD.replace(b"}]}", b',"data":[3,4]}]}'), "a key is given twice"),
    "an escaped key twice": (GOOD[:-1] + b',"id":"a","\\u0069d":"b"}', "a key is given twice"),
    "a huge integer": (GOOD[:-1] + b',"parameters":{"timeout":1' + b"0" * 400 + b"}}", "64 bits"),
    "another huge integer": (GOOD[:-1] + b',"parameters":{"sequence_id":' + b"9" * 5000 + b"}}", "out of range"),
    "a huge integer that means nothing": (GOOD[:-1] + b',"x":' + b"9" * 5000 + b"}", "64 bits"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD, "byte order mark"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "UTF-16"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), "UTF-16"),
    "UTF-32": (GOOD.decode().encode("utf-32-be"), "UTF-16 or UTF-32"),
    "something behind it": (GOOD + b" {}", "trailing"),
    "no UTF-8": (GOOD[:-1] + b',"id":"\xff"}', "UTF-8"),
    "nested deeply": (b'{"x":' + b"[" * 50_000, "nested too deeply"),
    "nothing": (b"", "400"),
}
OTHERS = {
    "/v2/logging": b'{"log_info":true,"log_info":true}',
    "/v2/trace/setting": b"\xef\xbb\xbf{}",
    "/v2/repository/index": b'{"ready":true,"ready":false}',
    "/v2/repository/models/strict/load": b'{"parameters":{"bundle":1e999}}',
    "/v2/models/strict/generate": b'{"text_input":"a","text_input":"b"}',
}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("strict")
    bundle = bundles.identity(folder / "strict.tfb", DType.FLOAT32, (1, 2))
    with serving(bundle, folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("case", INFER)
def test_infer_refuses(agent: Agent, case: str, lane: str) -> None:
    body, says = INFER[case]
    status, answer, _ = agent.post(body, LANES[lane])
    assert status == 400
    error = json.loads(answer)["error"]
    assert says in error or says == "400"
    assert "\n" not in error
    assert len(error) < 300
    assert agent.post(GOOD, LANES[lane])[0] == 200


@pytest.mark.parametrize("path", OTHERS)
def test_so_does_everything_else_that_reads_json(agent: Agent, path: str) -> None:
    status, answer, _ = agent.request(path, OTHERS[path])
    assert (status, list(json.loads(answer))) == (400, ["error"])


def test_so_do_records_of_a_stream(agent: Agent) -> None:
    lines = b"".join(INFER[case][0] + b"\n" for case in ("a key twice", "NaN", "a byte order mark")) + GOOD + b"\n"
    _, answer, _ = agent.request("/v2/models/strict/stream", lines, {"Content-Type": "application/x-ndjson"})
    assert [json.loads(line)["status"] for line in answer.splitlines() if line.strip()] == [400, 400, 400, 200]


# --- in short steps


def spec(dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec("x", dtype, shape, 1 << 20)


blanks = st.sampled_from([b"", b"", b" ", b"\n\t", b"  "])
shapes = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@st.composite
def nested(draw: st.DrawFn) -> tuple[list[int], bytes]:
    """(shape, nested lists of it, with blanks wherever they may be)."""
    shape = draw(shapes)

    def text(sizes: list[int]) -> bytes:
        if not sizes:
            return draw(blanks) + draw(st.sampled_from([b"0", b"-1.5", b"2e3", b"7"])) + draw(blanks)
        return b"[" + b",".join(text(sizes[1:]) for _ in range(sizes[0])) + draw(blanks) + b"]"

    return shape, text(shape)


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLICED_BYTES", 1), ("_PIECE_BYTES", 24), ("_STEP_BYTES", 64), ("_SEAM_BYTES", 32)):
        monkeypatch.setattr(json_data, name, value)
    monkeypatch.setattr(codecs, "SLICED_BYTES", 1)


@pytest.mark.usefixtures("short_steps")
@given(nested(), st.data())
def test_nested_lists_are_read_as_json_has_them_and_nothing_else_is(case: tuple[list[int], bytes], data: Any) -> None:
    shape, text = case
    packed = pack_json(text, spec(DType.FLOAT32, tuple(shape)), shape)
    assert packed == np.array(json.loads(text), np.float32).tobytes()
    at = data.draw(st.integers(0, len(text) - 1))
    mutated = text[:at] + data.draw(st.sampled_from([b"", b"[", b"]", b",", b"1", b"[]", b"],["])) + text[at + 1 :]
    try:
        again = pack_json(mutated, spec(DType.FLOAT32, tuple(shape)), shape)
    except ContractError:
        return
    read = np.array(json.loads(mutated), np.float32)
    assert again == read.tobytes()
    assert list(read.shape) in (shape, [read.size])


CONTRACT = Contract(
    (spec(DType.FLOAT32, (2, 3)), TensorSpec("data", DType.INT32, (4,), 16)), (spec(DType.FLOAT32, (1,)),), {}
)
FIRST = b'{"name":"x","datatype":"FP32","shape":[2,3],"data":%b}'
SECOND = b'{"name":"data","datatype":"INT32","shape":[4],"data" :\n %b}'


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("lists", [(b"[[1,2,3],[4,5,6]]", b"[1,2,3,4]"), (b"[1, 2,3,4,5,6 ]", b"[ 1,2,3,4]")])
@pytest.mark.parametrize(
    "more", [b"", b',"id":"\\"data\\":[1]"', b',"x":{"data":[1,{"a":[]}]}', b',"parameters":{"a":1}']
)
def test_a_request_in_short_steps_is_the_same(lists: tuple[bytes, bytes], more: bytes) -> None:
    text = b'{"inputs":[' + FIRST % lists[0] + b"," + SECOND % lists[1] + b"]" + more + b"}"
    payloads = read_head(text, CONTRACT).request(memoryview(b"")).payloads
    assert [bytes(each) for each in payloads] == [
        np.arange(1, 7, dtype=np.float32).tobytes(), np.arange(1, 5, dtype=np.int32).tobytes()
    ]  # fmt: skip


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize(
    "lists",
    [
        (b"[[1,2,3],[4,5,6]", b"[1,2,3,4]"),
        (b"[[1,2,3],[4,5,6]]]", b"[1,2,3,4]"),
        (b'[[1,2,3],[4,5,"]]"]]', b"[1,2,3,4]"),
        (b"[1,2,3,4,5,6]", b'["1,2,3,4]'),
        (b"[1,2,3,4,5,6]", b'"0"'),
        (b"[1,2,3,4,5,6]", b"[1,2,3,4],,"),
        (b"[1,2,3,4,5,6]", b'[1,2,3,4],"data":[1,2,3,4]'),
    ],
)
def test_what_is_no_request_is_none_in_short_steps(lists: tuple[bytes, bytes]) -> None:
    text = b'{"inputs":[' + FIRST % lists[0] + b"," + SECOND % lists[1] + b"]}"
    with pytest.raises(ContractError):
        read_head(text, CONTRACT).request(memoryview(b""))


def test_a_list_that_does_not_end_is_not_cut() -> None:
    assert cut_data(b'{"data":[[1,2') is None


def test_much_beside_the_data_is_refused(tmp_path: Path) -> None:
    junk = b",".join(b'"k%d":%d' % (at, at) for at in range(100_000))
    text = b'{"inputs":[' + FIRST % b"[1,2,3,4,5,6]" + b"," + SECOND % b"[1,2,3,4]" + b"]," + junk + b"}"
    with pytest.raises(ContractError, match="beside its data"):
        read_head(text, CONTRACT)
