"""Scores against what follows from their definitions by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scores import (
    Detections,
    average_precision,
    f1,
    intersection_over_union,
    match,
    mean_average_precision,
    roc_area,
)

CAT, DOG = ("cat", (0, 0, 10, 10)), ("dog", (20, 0, 30, 10))


def test_intersection_over_union() -> None:
    assert intersection_over_union((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert intersection_over_union((0, 0, 10, 10), (10, 0, 20, 10)) == 0
    assert intersection_over_union((5, 5, 5, 5), (5, 5, 5, 5)) == 0


def test_a_box_is_found_once_and_by_the_surest() -> None:
    found = [("cat", 0.5, (0, 0, 10, 10)), ("cat", 0.9, (0, 0, 10, 9)), ("dog", 0.8, (0, 0, 10, 10))]
    judged = match(found, [CAT, DOG])
    assert judged.found == (("cat", 0.9, True), ("dog", 0.8, False), ("cat", 0.5, False))
    assert judged.wanted == {"cat": 1, "dog": 1}


def test_what_lies_in_an_ignored_region_does_not_count() -> None:
    found = [("cat", 0.9, (0, 0, 10, 10)), ("cat", 0.8, (1, 0, 9, 10)), ("dog", 0.7, (0, 20, 10, 30))]
    judged = match(found, [CAT, ("ignore", (0, 0, 15, 15))])
    assert judged == Detections((("cat", 0.9, True), ("dog", 0.7, False)), judged.wanted)
    assert judged.wanted == {"cat": 1}


def test_average_precision_takes_the_best_precision_at_each_recall() -> None:
    # Recall 0.5 at precision 1/2, recall 1 at 2/3: 2/3 holds for all recalls.
    assert average_precision([(0.9, False), (0.8, True), (0.7, True)], 2) == pytest.approx(2 / 3)
    # One of two found, first: precision 1 up to recall 0.5, which 51 of the 101 recalls reach.
    assert average_precision([(0.9, True), (0.1, False)], 2) == pytest.approx(51 / 101)
    assert average_precision([], 3) == 0


def test_mean_average_precision_is_over_the_labels_that_are_there() -> None:
    right = match([("cat", 0.9, CAT[1]), ("bird", 0.9, CAT[1])], [CAT])
    wrong = match([], [DOG])
    assert mean_average_precision([right]) == 1
    assert mean_average_precision([right, wrong]) == 0.5
    assert mean_average_precision([right, right]) == 1


def test_roc_area() -> None:
    positive = np.array([True, True, False, False])
    assert roc_area(np.array([0.9, 0.4, 0.5, 0.4]), positive) == (1 + 1 + 0 + 0.5) / 4


def test_f1_adds_counts_up() -> None:
    assert f1(np.array([[3, 1, 0], [1, 0, 1]])) == pytest.approx(8 / 10)
    assert f1(np.zeros((1, 3))) == 0
