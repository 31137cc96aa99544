"""Bundles of one model that differ in the number of their segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.big_model import Shape, generate
from bench.segment_counts import compared, holds, run
from compile.errors import VerificationError


@pytest.mark.slow
def test_the_number_of_segments_does_not_show(tmp_path: Path) -> None:
    source = tmp_path / "small.onnx"
    generate(source, Shape(hidden=128, layers=2, heads=4, dtype="float32"))
    figures = run(source, ["x=1,1..2..4,128"], "int4", (1, 2), 1 << 30, tmp_path)
    assert [row["segments"] for row in figures["rows"]] == [1, 2]
    assert holds(figures)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.onnx", "small.onnx.data"]


def test_one_bit_is_seen() -> None:
    one = np.ones((2, 3), np.float32)
    other = one.copy()
    other[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    same = {"equal_bits": True, "relative_l2": 0.0}
    assert compared([{"y": one}], [{"y": one.copy()}]) == same
    found = compared([{"y": one}, {"y": one}], [{"y": one}, {"y": other}])
    assert not found["equal_bits"]
    assert 0 < found["relative_l2"] < 1e-6
    assert holds({"tolerance": 1e-5, "rows": [{"bare": same, "served": found}]})
    assert not holds({"tolerance": 1e-9, "rows": [{"bare": same, "served": found}]})
    assert not holds({"tolerance": 1e-5, "rows": [{"bare": found, "served": same}]})
    with pytest.raises(VerificationError):
        compared([{"y": one}], [{"y": one * np.float32(np.nan)}])
