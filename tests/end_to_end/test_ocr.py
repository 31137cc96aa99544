"""The whole way on a real task: fetch, compile to INT4, run, score on labelled lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.bundle_runner import BundleRunner, session_of
from bench.models import fetch
from bench.ocr_data import (
    Line,
    alphabet_of,
    character_error_rate,
    decode,
    handwritten_digits,
    preprocess,
    printed_lines,
)
from compile.pipeline import Options, compile_model
from compile.shapes import parse_shape
from targets.board import load_board

LINES = 40


@pytest.mark.slow
def test_int4_reads_as_well_as_the_source(tmp_path: Path) -> None:
    source = fetch("ppocr-v6-rec")
    bundle = tmp_path / "ocr.tfb"
    board = load_board("raspberry-pi-5-4gb")
    compile_model(source, board, bundle, Options(scheme="int4", shapes=(parse_shape("x=1,3,48,320..640"),)))
    original, compiled = session_of(source, 2), BundleRunner(bundle, 2)
    alphabet = alphabet_of(original.get_modelmeta().custom_metadata_map["character"])
    output = compiled.manifest.contract.outputs[0].name

    def by_source(line: Line) -> str:
        return decode(original.run(None, {"x": preprocess(line.image)})[0][0], alphabet)

    def by_bundle(line: Line) -> str:
        return decode(compiled.run({"x": preprocess(line.image)})[output][0], alphabet)

    printed, handwritten = list(printed_lines(LINES)), list(handwritten_digits(LINES))
    assert character_error_rate([(line.text, by_bundle(line)) for line in printed]) == 0.0
    assert character_error_rate([(line.text, by_bundle(line)) for line in handwritten]) <= 0.03
    equal = sum(by_source(line) == by_bundle(line) for line in (*printed, *handwritten))
    assert equal >= 0.95 * 2 * LINES
