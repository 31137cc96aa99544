"""The labelled lines and their score."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ocr_data import (
    FONTS,
    DataError,
    character_error_rate,
    edit_distance,
    encoded,
    font,
    handwritten_digits,
    printed_lines,
)

WORDS = st.text("abc", max_size=6)


def test_lines_are_the_same_every_time_and_differ_by_seed() -> None:
    first, again, other = (list(printed_lines(8, seed)) for seed in (0, 0, 1))
    assert [line.text for line in first] == [line.text for line in again]
    assert all(np.array_equal(a.image, b.image) for a, b in zip(first, again, strict=True))
    assert [line.text for line in first] != [line.text for line in other]
    assert first[0].text[3] == "-"


def test_handwritten_digits_are_five_a_line() -> None:
    lines = list(handwritten_digits(5))
    assert [line.text for line in lines] == [line.text for line in handwritten_digits(5)]
    assert all(len(line.text) == 5 and line.text.isdigit() for line in lines)
    assert lines[0].image.shape == (84, 324, 3)


def test_encoding_loses_nothing() -> None:
    line = next(printed_lines(1))
    assert np.array_equal(cv2.imdecode(np.frombuffer(encoded(line), np.uint8), cv2.IMREAD_COLOR), line.image)


@given(WORDS, WORDS, WORDS)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


def test_character_error_rate() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert character_error_rate([("abcd", "abxd"), ("ef", "ef")]) == pytest.approx(1 / 6)


def test_a_missing_font_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr("bench.ocr_data.FONT_FOLDERS", ())
    with pytest.raises(DataError, match="apt-get install fonts-dejavu-core"):
        font(FONTS[0], 20)
