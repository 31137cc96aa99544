"""Outputs to answers, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processing.answers import activated, classify, ctc, nanodet, suppress
from processing.images import Frame
from targets.recipe import Classify, Ctc, NanoDet

WHOLE = Frame(64, 64, 1, 1, 0, 0)


def texts(array: np.ndarray) -> list[str]:
    return [item.decode() for item in array]


def test_classify_best_first() -> None:
    scores = np.array([[0.1, 0.6, 0.3]], np.float32)
    answer = classify(scores, Classify(top_k=2), ("a", "b", "c"))
    assert texts(answer["label"]) == ["b", "c"]
    assert answer["score"].tolist() == pytest.approx([0.6, 0.3])
    assert texts(classify(scores, Classify(), ())["label"]) == ["1"]


def test_classify_activations() -> None:
    logits = np.array([[0, np.log(3), 200]], np.float32)
    assert classify(logits, Classify(activation="softmax", top_k=3), ())["score"][0] == 1
    several = classify(logits, Classify(activation="sigmoid", top_k=3, threshold=0.6), ("a", "b", "c"))
    assert texts(several["label"]) == ["c", "b"]
    assert several["score"].tolist() == pytest.approx([1, 0.75])
    none = classify(logits, Classify(activation="sigmoid", threshold=1.0), ("a", "b", "c"))
    assert texts(none["label"]) == ["c"]


def test_ctc_merges_repeats_and_drops_blanks() -> None:
    steps = np.eye(4, dtype=np.float32)[[1, 1, 0, 1, 3, 0, 2, 3]][None] * 0.5
    answer = ctc(steps, Ctc(alphabet="x"), ("", "a", "b", " "))
    assert texts(answer["text"]) == ["aa b"]
    assert answer["score"].tolist() == [0.5]
    last = ctc(steps, Ctc(alphabet="x", blank=3), ("a", "b", "c", ""))
    assert texts(last["text"]) == ["babac"]


def test_ctc_of_nothing_and_of_logits() -> None:
    nothing = ctc(np.eye(3, dtype=np.float32)[[0, 0]][None], Ctc(alphabet="x"), ("", "a", "b"))
    assert (texts(nothing["text"]), nothing["score"].tolist()) == ([""], [0])
    logits = np.array([[[0, np.log(3), -100]]], np.float32)
    assert ctc(logits, Ctc(alphabet="x", activation="softmax"), ("", "a", "b"))["score"][0] == pytest.approx(0.75)


def head(post: NanoDet, *found: tuple[int, int, int, float, tuple[int, int, int, int]]) -> tuple[list, list]:
    """Outputs of a model of 64 x 64 with 2 classes and 8 bins: (stride, cell, class, score, distances in strides)."""
    scores = [np.zeros((1, (64 // stride) ** 2, 2), np.float32) for stride in post.strides]
    distances = [np.zeros((1, (64 // stride) ** 2, 32), np.float32) for stride in post.strides]
    for stride, cell, number, score, reach in found:
        level = post.strides.index(stride)
        scores[level][0, cell, number] = score
        bins = np.full((4, 8), -50, np.float32)
        bins[np.arange(4), reach] = 50
        distances[level][0, cell] = bins.reshape(-1)
    return scores, distances


POST = NanoDet(("a", "b", "c"), ("d", "e", "f"), (8, 16, 32))


def test_nanodet_boxes_are_where_the_head_says() -> None:
    # Row 2, column 3 of stride 8: centre (28, 20). Row 0, column 1 of stride 32: centre (48, 16).
    scores, distances = head(
        POST, (8, 19, 0, 0.9, (1, 2, 3, 1)), (32, 1, 1, 0.5, (1, 0, 7, 1)), (16, 3, 1, 0.3, (1,) * 4)
    )
    answer = nanodet(scores, distances, POST, ("cat", "dog"), WHOLE, 64, 64)
    assert texts(answer["label"]) == ["cat", "dog"]
    assert answer["score"].tolist() == pytest.approx([0.9, 0.5])
    # The last would end at 272: boxes end at the image's edges.
    assert answer["boxes"].tolist() == [[20, 4, 52, 28], [16, 16, 64, 48]]


def test_nanodet_maps_boxes_back_to_the_image() -> None:
    scores, distances = head(POST, (8, 19, 0, 0.9, (1, 1, 1, 1)))
    # An image of 400 x 200 as 64 x 32 in the middle of 64 x 64.
    frame = Frame(400, 200, 0.16, 0.16, 0, 16)
    answer = nanodet(scores, distances, POST, ("cat", "dog"), frame, 64, 64)
    assert answer["boxes"][0].tolist() == pytest.approx([20 / 0.16, 0, 36 / 0.16, 12 / 0.16])


def test_a_distance_is_the_expectation_over_its_bins() -> None:
    scores, distances = head(POST, (16, 5, 0, 0.9, (1, 1, 1, 1)))
    distances[1][0, 5] = 0  # all bins alike: 3.5 strides
    answer = nanodet(scores, distances, POST, (), Frame(1000, 1000, 1, 1, -500, -500), 64, 64)
    assert np.diff(answer["boxes"][0].reshape(2, 2), axis=0).tolist() == [[112, 112]]


def test_nanodet_with_logits_and_nothing_found() -> None:
    scores, distances = head(POST)
    logits = [values - 5 for values in scores]
    post = NanoDet(POST.scores, POST.distances, POST.strides, activation="sigmoid", threshold=0.4)
    answer = nanodet(logits, distances, post, (), WHOLE, 64, 64)
    assert (answer["boxes"].shape, len(answer["label"]), len(answer["score"])) == ((0, 4), 0, 0)
    logits[0][0, 19, 1] = 0
    assert nanodet(logits, distances, post, (), WHOLE, 64, 64)["score"].tolist() == [0.5]


def test_suppression_is_within_a_class() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [0, 0, 10, 10], [20, 20, 30, 30]], np.float32)
    scores = np.array([0.8, 0.9, 0.7, 0.1], np.float32)
    assert suppress(boxes, scores, np.array([0, 0, 1, 0]), 0.5, 10) == [1, 2, 3]
    assert suppress(boxes, scores, np.array([0, 0, 1, 0]), 0.9, 10) == [1, 0, 2, 3]
    assert suppress(boxes, scores, np.array([0, 0, 0, 0]), 0.5, 1) == [1]


BOX = st.tuples(*[st.integers(0, 20)] * 2, *[st.integers(1, 20)] * 2)


@given(st.lists(st.tuples(BOX, st.integers(0, 2)), min_size=1, max_size=20), st.floats(0, 1))
def test_suppression_keeps_no_overlap_and_drops_nothing_else(found: list, iou: float) -> None:
    boxes = np.array([(x, y, x + w, y + h) for (x, y, w, h), _ in found], np.float32)
    classes = np.array([number for _, number in found])
    scores = np.random.default_rng(0).random(len(found)).astype(np.float32)
    kept = suppress(boxes, scores, classes, iou, len(found))

    def overlap(a: int, b: int) -> bool:
        low, high = np.maximum(boxes[a, :2], boxes[b, :2]), np.minimum(boxes[a, 2:], boxes[b, 2:])
        shared = np.clip(high - low, 0, None).prod()
        areas = sum(float(np.prod(boxes[i, 2:] - boxes[i, :2])) for i in (a, b))
        return bool(classes[a] == classes[b] and np.float32(shared) / np.float32(areas - shared) > iou)

    assert [scores[i] for i in kept] == sorted((scores[i] for i in kept), reverse=True)
    for i in range(len(found)):
        better = [k for k in kept if k != i and scores[k] >= scores[i]]
        assert (i in kept) == (not any(overlap(i, k) for k in better))


def test_activations_do_not_overflow() -> None:
    extreme = np.array([-1e30, 0, 1e30], np.float32)
    assert activated(extreme, "sigmoid").tolist() == [0, 0.5, 1]
    assert activated(extreme, "softmax").tolist() == [0, 0, 1]
