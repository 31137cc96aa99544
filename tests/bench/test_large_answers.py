"""Answers of the agent beside those of the source model, on models small enough to be checked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from bench.big_model import Shape, generate
from bench.large_answers import ROWS, compare_answers, judge, questions, run_source
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board

HIDDEN = 128
HOST = 1 << 30


def model(folder: Path, dtype: str) -> Path:
    """Two blocks of 0.2 M parameters each."""
    source = folder / "big.onnx"
    generate(source, Shape(HIDDEN, 2, 2, dtype))
    return source


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 5e-3)])
def test_the_reference_is_what_the_runtime_says(
    tmp_path: Path, dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the host could hold 256 KiB of weights: a model of two blocks runs in several links.
    monkeypatch.setattr("bench.large_answers.segment_limit", lambda _: 256 << 10)
    source = model(tmp_path, dtype)
    asked = questions(HIDDEN, dtype)
    session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    assert [x.shape for x in asked] == [(1, rows, HIDDEN) for rows in ROWS]
    for x, answer in zip(asked, run_source(source, asked, HOST), strict=True):
        (expected,) = session.run(None, {"x": x})
        assert answer.dtype == expected.dtype
        error = np.linalg.norm((answer - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64))
        assert error < tolerance


@pytest.mark.slow
def test_what_is_served_is_near_what_the_source_model_says(tmp_path: Path) -> None:
    source, bundle = model(tmp_path, "float16"), tmp_path / "big.tfb"
    options = Options(scheme="int4", shapes=(parse_shape(f"x=1,1..{max(ROWS)},{HIDDEN}"),))
    compile_model(source, load_board("raspberry-pi-5-4gb"), bundle, options)
    found = compare_answers(source, bundle, HOST, max_error=0.5)
    assert [row["rows"] for row in found["inputs"]] == list(ROWS)
    # Blocks of four bits cost something, and not everything.
    assert all(0.01 < row["relative_l2"] < 0.5 for row in found["inputs"])
    assert found["verdict"] == "within"
    assert found["agent"]["kills"] == found["reference"]["kills"] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"big.onnx", "big.onnx.data", "big.tfb"}


def test_one_answer_over_the_tolerance_is_enough() -> None:
    expected = [np.array([[[3.0, 4.0]]]), np.array([[[0.0, 1.0], [1.0, 0.0]]])]
    answers = [expected[0], np.array([[[0.0, 1.0], [0.6, 0.8]]])]
    found = judge(expected, answers, max_error=0.6)
    assert found["verdict"] == "over"
    first, second = found["inputs"]
    assert (first["rows"], first["relative_l2"], first["max_abs"], first["equal_argmax"]) == (1, 0, 0, 1)
    assert second["relative_l2"] == pytest.approx(np.sqrt((0.4**2 + 0.8**2) / 2), rel=1e-5)
    assert (second["rows"], second["max_abs"], second["equal_argmax"]) == (2, 0.8, 0.5)
    assert judge(expected, answers, max_error=0.64)["verdict"] == "within"
