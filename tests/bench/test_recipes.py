"""The shipped recipe of classifiers around a real one: pages of text that were turned."""

from __future__ import annotations

import cv2
import msgspec
import numpy as np

from bench.bundle_runner import runner_of, session_of
from bench.models import fetch
from bench.ocr_data import Line, encoded, printed_lines
from processing.answers import Postprocessor
from processing.preprocess import Preprocessor
from targets.recipe import load_recipe
from targets.tensor import Contract, DType, TensorSpec

PAGES, LINES = 6, 12
TURNS = {"0": None, "90": cv2.ROTATE_90_CLOCKWISE, "180": cv2.ROTATE_180, "270": cv2.ROTATE_90_COUNTERCLOCKWISE}


def pages() -> list[Line]:
    """White pages of 480 x 640 with printed lines below each other."""
    lines = [line.image for line in printed_lines(PAGES * LINES)]
    made = []
    for first in range(0, len(lines), LINES):
        page = np.full((640, 480, 3), 255, np.uint8)
        for row, image in enumerate(lines[first : first + LINES]):
            part = image[:50, :460]
            page[20 + 50 * row :, 10:][: part.shape[0], : part.shape[1]] = part
        made.append(Line("", page))
    return made


def test_imagenet_prepares_a_classifier_of_paddleclas() -> None:
    session = session_of(fetch("page-orientation"), 1)
    run = runner_of(session)
    data, scores = session.get_inputs()[0], session.get_outputs()[0]
    contract = Contract(
        (TensorSpec(data.name, DType.FLOAT32, (1, 3, 224, 224), 4 * 3 * 224 * 224),),
        (TensorSpec(scores.name, DType.FLOAT32, (1, len(TURNS)), 4 * len(TURNS)),),
        {},
    )
    shipped = load_recipe("imagenet")
    # The graph ends in a softmax of its own.
    recipe = msgspec.structs.replace(shipped, post=msgspec.structs.replace(shipped.post, activation="none", top_k=1))
    before, after = Preprocessor(recipe, contract), Postprocessor(recipe, contract, list(TURNS))
    answers = []
    for page in pages():
        for turn, code in TURNS.items():
            image = page.image if code is None else np.asarray(cv2.rotate(page.image, code), np.uint8)
            tensor, frame = before.tensor(encoded(Line("", image)))
            answer = after.answer(run({data.name: tensor}), frame)
            answers.append((turn, answer["label"][0].decode(), float(answer["score"][0])))
    assert [wanted for wanted, _, _ in answers] == [found for _, found, _ in answers]
    assert float(np.mean([score for _, _, score in answers])) > 0.8
