"""The whole way on real tasks: fetch, compile with a recipe, serve, send image files, score on labelled lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from bench.bundle_runner import Asker, runner_of, session_of
from bench.models import fetch
from bench.ocr_data import Line, character_error_rate, encoded, handwritten_digits, printed_lines
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.recipe import load_recipe
from tests.support.agents import Agent, serving

LINES = 40


def compiled(source: Path, bundle: Path, scheme: str, shape: str, recipe: str, *assets: Path) -> Path:
    options = Options(scheme=scheme, shapes=(parse_shape(shape),), recipe=load_recipe(recipe), assets=assets)
    compile_model(source, load_board("raspberry-pi-5-4gb"), bundle, options)
    return bundle


def asking(agent: Agent, key: str) -> Callable[[Line], str]:
    def ask(line: Line) -> str:
        status, body, _ = agent.request(f"/v2/models/{agent.name}/image", encoded(line))
        assert status == 200, body
        (text,) = json.loads(body)[key]
        return str(text)

    return ask


@pytest.mark.slow
def test_int4_reads_as_well_as_the_source(tmp_path: Path) -> None:
    source = fetch("ppocr-v6-rec")
    bundle = compiled(source, tmp_path / "ocr.tfb", "int4", "x=1,3,48,320..640", "ppocr-rec")
    original, asker = runner_of(session_of(source, 2)), Asker(bundle)

    def by_source(line: Line) -> str:
        return str(asker.ask(encoded(line), original)["text"][0].decode())

    printed, handwritten = list(printed_lines(LINES)), list(handwritten_digits(LINES))
    with serving(bundle, tmp_path / "log") as agent:
        by_bundle = asking(agent, "text")
        assert character_error_rate([(line.text, by_bundle(line)) for line in printed]) == 0.0
        assert character_error_rate([(line.text, by_bundle(line)) for line in handwritten]) <= 0.03
        equal = sum(by_source(line) == by_bundle(line) for line in (*printed, *handwritten))
    assert equal >= 0.95 * 2 * LINES


def test_a_classifier_tells_which_way_up_a_line_is(tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("0\n180\n")
    source = fetch("ppocr-cls")
    bundle = compiled(source, tmp_path / "way.tfb", "fp32", "x=1,3,48,192", "ppocr-cls", labels)
    lines = list(printed_lines(LINES))
    turned = [Line(line.text, np.asarray(cv2.rotate(line.image, cv2.ROTATE_180), np.uint8)) for line in lines]
    with serving(bundle, tmp_path / "log") as agent:
        ask = asking(agent, "label")
        right = sum(ask(line) == "0" for line in lines) + sum(ask(line) == "180" for line in turned)
    assert right >= 0.95 * 2 * LINES
