"""What comes out of a stream, as docs/streams.md shows it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from agent.errors import TABLE, Reason, RefusedError
from agent.http.codecs import OutputTensor
from agent.http.framing.records import Lost, Record, Timing, answer, failure, overflow, to_json
from targets.errors import ContractError
from targets.tensor import DType
from tests.support.bundles import dense

DOCS = Path(__file__).parents[4] / "docs" / "streams.md"


def half(binary: bool, value: float = 0.5) -> OutputTensor:
    data = np.frombuffer(np.float32(value).tobytes(), np.uint8)
    return OutputTensor(dense("y", DType.FLOAT32, 1, 1), (1, 1), data, binary)


def test_records_as_documented() -> None:
    result, raw = answer(7, "left-17", "m", "1", [half(binary=False)], Timing(40, 910, 1003))
    refused = RefusedError(Reason.QUEUE_FULL, "64 requests wait, as many as may")
    records: list[Record] = [result, failure(8, None, refused), Lost(3, 9, 7), overflow(12)]
    block = re.search(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    assert b"\n".join(map(to_json, records)).decode() + "\n" == block[1]
    assert raw == []


def test_raw_tensors_stand_behind_the_record() -> None:
    result, raw = answer(1, None, "m", "1", [half(binary=True), half(binary=True, value=2.0)])
    assert [tensor["parameters"] for tensor in result.outputs] == [{"binary_data_size": 4}] * 2
    assert b"".join(raw) == np.float32([0.5, 2.0]).tobytes()


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(RefusedError, match="NaN or infinity"):
        answer(1, None, "m", "1", [half(binary=False, value=float("nan"))])


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.OK])
def test_errors_say_what_a_request_of_its_own_would_be_answered(reason: Reason) -> None:
    record = failure(3, "a", RefusedError(reason, "what", "why"))
    assert (record.seq, record.id, record.error) == (3, "a", "what (why)")
    assert (record.status, record.retry_after_s) == TABLE[reason][:2]
    assert record.reason == reason.value


def test_what_is_no_refusal_is_a_bad_request() -> None:
    assert failure(1, None, ContractError("no")).reason == "bad_request"
