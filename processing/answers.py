"""Model outputs to answers. Pure functions over numpy arrays; the outputs are only read, and never copied whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from processing.images import Frame
from targets.recipe import Classify, Ctc, NanoDet, Recipe, check_outputs, grid, output_names
from targets.tensor import Contract

Floats = NDArray[np.float32]
Answer = dict[str, NDArray[Any]]
"""Output name -> array; text is UTF-8 `bytes` in an object array."""


class Postprocessor:
    """Post-processing for one model. Its method may be called from any thread.

    `labels` is what `targets.recipe.read_labels` gave. Raises RecipeError when recipe and model do not go together.
    """

    def __init__(self, recipe: Recipe, contract: Contract, labels: Sequence[str]) -> None:
        check_outputs(recipe, contract)
        self.outputs = output_names(recipe.post, contract)
        self._post = recipe.post
        self._labels = labels
        self._height, self._width = (size.max for size in recipe.size(contract))

    def answer(self, values: Mapping[str, Floats], frame: Frame) -> Answer:
        """The answer out of the outputs that `self.outputs` names; `frame` says where the image stood in the input."""
        post, found = self._post, [values[name] for name in self.outputs]
        if isinstance(post, Classify):
            return classify(found[0], post, self._labels)
        if isinstance(post, Ctc):
            return ctc(found[0], post, self._labels)
        half = len(post.strides)
        return nanodet(found[:half], found[half:], post, self._labels, frame, self._height, self._width)


def classify(scores: Floats, post: Classify, labels: Sequence[str]) -> Answer:
    """`label` [n] and `score` [n] of [1, classes], best first."""
    values = activated(scores.reshape(-1), post.activation)
    best = np.argsort(-values, kind="stable")[: post.top_k]
    best = best[values[best] >= post.threshold]
    return {"label": _texts(labels[c] if labels else str(c) for c in best), "score": values[best]}


def ctc(scores: Floats, post: Ctc, alphabet: Sequence[str]) -> Answer:
    """`text` [1] and `score` [1] of [1, steps, classes]: repeats merged, blanks dropped, spaces at the ends cut."""
    steps = scores.reshape(-1, scores.shape[-1])
    best = steps.argmax(axis=1)
    kept = [i for i, c in enumerate(best) if c != post.blank and (i == 0 or c != best[i - 1])]
    text = "".join(alphabet[best[i]] for i in kept).strip()
    sure = [float(activated(steps[i], post.activation)[best[i]]) for i in kept]
    return {"text": _texts([text]), "score": np.array([np.mean(sure) if sure else 0.0], np.float32)}


def nanodet(
    scores: Sequence[Floats], distances: Sequence[Floats], post: NanoDet, labels: Sequence[str], frame: Frame,
    height: int, width: int,
) -> Answer:  # fmt: skip
    """`boxes` [n, 4], `label` [n], `score` [n], best first; boxes are in pixels of the image, and end at its edges.

    `scores` and `distances` have one array [1, cells, ...] per stride; `height` and `width` are the model's.
    """
    parts = [
        _candidates(values, bins, post, stride, height, width)
        for values, bins, stride in zip(scores, distances, post.strides, strict=True)
    ]
    boxes, sure, classes = (np.concatenate(part) for part in zip(*parts, strict=True))
    kept = suppress(boxes, sure, classes, post.iou, post.max_boxes)
    boxes, sure, classes = boxes[kept], sure[kept], classes[kept]
    offset = np.array([frame.left, frame.top] * 2, np.float32)
    scale = np.array([frame.scale_x, frame.scale_y] * 2, np.float32)
    edges = np.array([frame.width, frame.height] * 2, np.float32)
    boxes = np.clip((boxes - offset) / scale, 0, edges).astype(np.float32)
    return {"boxes": boxes, "label": _texts(labels[c] if labels else str(c) for c in classes), "score": sure}


# Of each stride so many of the best cells are looked at: suppression compares every pair.
MAX_CANDIDATES = 1000


def _candidates(
    scores: Floats, distances: Floats, post: NanoDet, stride: int, height: int, width: int
) -> tuple[Floats, Floats, NDArray[np.intp]]:
    """(boxes in the tensor's pixels, scores, classes) of the cells whose best class reaches the threshold."""
    cells = activated(scores.reshape(-1, scores.shape[-1]), post.activation)
    classes = cells.argmax(axis=1)
    sure = cells[np.arange(len(cells)), classes]
    chosen = np.flatnonzero(sure >= post.threshold)
    chosen = chosen[np.argsort(-sure[chosen], kind="stable")[:MAX_CANDIDATES]]
    bins = distances.reshape(len(cells), 4, -1)[chosen]
    reach = activated(bins, "softmax") @ np.arange(bins.shape[-1], dtype=np.float32) * stride
    _, columns = grid(stride, height, width)
    row, column = np.divmod(chosen, columns)
    centre = (np.stack([column, row], axis=1).astype(np.float32) + 0.5) * stride
    boxes = np.concatenate([centre - reach[:, :2], centre + reach[:, 2:]], axis=1)
    return boxes.astype(np.float32), sure[chosen], classes[chosen]


def suppress(boxes: Floats, scores: Floats, classes: NDArray[np.intp], iou: float, most: int) -> list[int]:
    """Greedy non-maximum suppression within each class: indices of what is kept, best first, at most `most`."""
    order = np.argsort(-scores, kind="stable")
    area = (boxes[:, 2] - boxes[:, 0]).clip(0) * (boxes[:, 3] - boxes[:, 1]).clip(0)
    kept: list[int] = []
    while len(order) and len(kept) < most:
        first, order = int(order[0]), order[1:]
        kept.append(first)
        low, high = np.maximum(boxes[first, :2], boxes[order, :2]), np.minimum(boxes[first, 2:], boxes[order, 2:])
        shared = (high - low).clip(0).prod(axis=1)
        whole = np.maximum(area[first] + area[order] - shared, np.finfo(np.float32).tiny)
        order = order[(shared / whole <= iou) | (classes[order] != classes[first])]
    return kept


def activated(values: Floats, activation: str) -> Floats:
    """Softmax over the last axis, sigmoid, or the values as they are."""
    if activation == "softmax":
        powers = np.exp(values - values.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)
    if activation == "sigmoid":
        # By tanh, which does not overflow.
        return np.asarray(0.5 * (np.tanh(0.5 * values) + 1), np.float32)
    return values


def _texts(texts: Iterable[str]) -> NDArray[Any]:
    items = [text.encode("utf-8") for text in texts]
    array = np.empty(len(items), object)
    array[:] = items
    return array
