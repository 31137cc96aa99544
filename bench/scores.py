"""Scores of answers with a known truth, out of records that can be resampled. Pure functions."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Box = Sequence[float]
"""x0, y0, x1, y1."""
IGNORE = "ignore"
"""Label of a region where whatever is found is neither right nor wrong."""


@dataclass(frozen=True, slots=True)
class Detections:
    """What was found in one image: (label, score, whether it is there), and how many of each label there are."""

    found: tuple[tuple[str, float, bool], ...]
    wanted: collections.Counter[str]


def match(found: Sequence[tuple[str, float, Box]], wanted: Sequence[tuple[str, Box]], iou: float = 0.5) -> Detections:
    """Hold what was found against what is there: best first, each to the free box of its label it overlaps most."""
    free = [(label, box) for label, box in wanted if label != IGNORE]
    ignored = [box for label, box in wanted if label == IGNORE]
    judged = []
    for label, score, box in sorted(found, key=lambda each: -each[1]):
        same = [other for other in free if other[0] == label]
        best = max(same, key=lambda other: intersection_over_union(box, other[1]), default=None)
        hit = best is not None and intersection_over_union(box, best[1]) >= iou
        if hit and best is not None:
            free.remove(best)
        elif any(intersection(box, region) > area(box) / 2 for region in ignored):
            continue
        judged.append((label, score, hit))
    return Detections(tuple(judged), collections.Counter(label for label, _ in wanted if label != IGNORE))


def mean_average_precision(images: Sequence[Detections]) -> float:
    """Mean over the labels that are there of the precision at 101 recalls, as COCO has it; at the IoU of `match`."""
    wanted = sum((image.wanted for image in images), collections.Counter[str]())
    found: dict[str, list[tuple[float, bool]]] = {label: [] for label in wanted}
    for image in images:
        for label, score, hit in image.found:
            if label in found:
                found[label].append((score, hit))
    return float(np.mean([average_precision(found[label], count) for label, count in wanted.items()]))


def average_precision(found: Sequence[tuple[float, bool]], wanted: int) -> float:
    """Of (score, whether it is there), where `wanted` are there."""
    if not found:
        return 0.0
    hits = np.cumsum([hit for _, hit in sorted(found, key=lambda each: -each[0])])
    precision = hits / np.arange(1, len(hits) + 1)
    # The best precision at that recall or above it.
    best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(best[np.searchsorted(hits / wanted, np.linspace(0, 1, 101))].mean())


def area(box: Box) -> float:
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


def intersection(a: Box, b: Box) -> float:
    return area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))


def intersection_over_union(a: Box, b: Box) -> float:
    shared = intersection(a, b)
    return shared / max(area(a) + area(b) - shared, 1e-12)


def roc_area(scores: NDArray[Any], positive: NDArray[np.bool_]) -> float:
    """How often a positive scores above a negative; ties count half."""
    yes, no = scores[positive][:, None], scores[~positive]
    return float((yes > no).mean() + (yes == no).mean() / 2)


def f1(counts: NDArray[Any]) -> float:
    """Of rows (true positives, false positives, false negatives), which are added up."""
    right, false, missed = counts.sum(axis=0)
    return float(2 * right / max(2 * right + false + missed, 1))
