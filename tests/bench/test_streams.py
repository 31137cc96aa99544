"""The benchmark of streams against a real agent."""

from __future__ import annotations

import struct

import numpy as np

from agent.load.samples import Form, infer_message
from bench.streams import FRAMES, LINES, measure, record_of, table
from targets.tensor import DType


def test_a_request_as_a_record() -> None:
    value = np.ones((1, 2), np.float32)
    binary, text = (infer_message(Form("/infer", raw, {}), [("x", DType.FLOAT32, value)]) for raw in (True, False))
    frame = record_of(binary, FRAMES)
    total, length = struct.unpack_from("<II", frame)
    assert (total, frame[8 + length :]) == (len(frame) - 4, value.tobytes())
    assert record_of(text, LINES).endswith(b"}\n")


def test_every_way_is_measured() -> None:
    figures = measure((1, 4), 0.1, 1)
    assert len(figures) == 8
    assert min(figures.values()) > 0
    assert table(figures).count("/s |") == 8
