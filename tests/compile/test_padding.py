"""Padding makes no difference where a mask says what counts, and elsewhere it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compile.activations import ActivationCache
from compile.errors import OptionError
from compile.padding import check_padding, unequal, verify_padding
from compile.verify import FLOAT_LIMIT, Link
from targets.tensor import Contract, DimRange, DType, Padding, TensorSpec

Array = npt.NDArray[Any]
Model = Callable[[Array, Array], Array]


class Computed:
    """A model of one output `y` that is a function of `x` [n, t, 4] and `mask` [n, t]."""

    def __init__(self, function: Model) -> None:
        self.function = function

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": self.function(inputs["x"], inputs["mask"])}


INPUTS = Contract(
    (TensorSpec("x", DType.FLOAT32, ("n", "t", 4), 9999), TensorSpec("mask", DType.INT64, ("n", "t"), 9999)),
    (),
    {"n": DimRange(1, 1, 4), "t": DimRange(1, 16, 16, (4, 5, 16))},
    "n",
)


def padded(folder: Path, function: Model) -> Padding:
    def sample(size: int) -> dict[str, Array]:
        x = np.random.default_rng(0).standard_normal((1, size, 4)).astype(np.float32)
        return {"x": x, "mask": np.ones((1, size), np.int64)}

    chain = [Link("source", ("x", "mask"), ("y",), lambda: Computed(function))]
    cache = ActivationCache(folder, 1 << 20)
    return verify_padding(chain, INPUTS, "t", sample, ["y"], cache, FLOAT_LIMIT)


def attention(x: Array, mask: Array) -> Array:
    scores = np.exp(x @ x.transpose(0, 2, 1)) * mask[:, None, :]
    return scores / scores.sum(-1, keepdims=True) @ x


def masked_mean(x: Array, mask: Array) -> Array:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)


def convolution(x: Array, mask: Array) -> Array:
    """Two layers: of what lies beyond the end the second sees the first one's bias, which zeros are not."""
    for _ in range(2):
        x = np.pad(x, ((0, 0), (1, 1), (0, 0)))
        x = x[:, :-2] + x[:, 2:] + 1
    return x


@pytest.mark.parametrize(
    ("function", "axis"), [(attention, 1), (masked_mean, None), (lambda x, _: x.transpose(0, 2, 1), 2)]
)
def test_what_a_mask_keeps_apart(tmp_path: Path, function: Model, axis: int | None) -> None:
    assert padded(tmp_path, function) == Padding("t", (axis,))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, _: x.mean(1), r"1 positions along 't' .* up to 4: output 'y' differs by a relative L2 of"),
        (lambda x, _: x - x.mean(1, keepdims=True), "output 'y' differs"),
        (convolution, "output 'y' differs"),
        (lambda x, _: x @ x.transpose(0, 2, 1), r"output 'y' is float32\[1, 4, 4\].* float32\[1, 1, 1\]"),
        (lambda x, _: x[:, ::-1], "output 'y' differs"),
    ],
    ids=["mean", "centred", "convolution", "every two", "from the end"],
)
def test_what_padding_changes(tmp_path: Path, function: Model, words: str) -> None:
    with pytest.raises(OptionError, match=f"^--pad: .*{words}"):
        padded(tmp_path, function)


def test_every_bucket_with_more_than_one_size_is_tried() -> None:
    assert unequal(INPUTS, "t") == [(1, 4), (6, 16)]


@pytest.mark.parametrize(
    ("contract", "dim", "words"),
    [
        (INPUTS, "s", r"no dimension 's' has a range \(available: n, t\)"),
        (INPUTS, "n", "along another dimension, the batch"),
        (Contract(INPUTS.inputs, (), INPUTS.dims), "t", "along another dimension, the batch"),
        (Contract(INPUTS.inputs, (), {**INPUTS.dims, "t": DimRange(4, 5, 5, (4, 5))}, "n"), "t", "no two sizes"),
        (Contract((TensorSpec("x", DType.STRING, ("n", "t"), 9),), (), INPUTS.dims, "n"), "t", "cannot be padded"),
        (Contract((TensorSpec("x", DType.INT8, ("n", "t", "t"), 9),), (), INPUTS.dims, "n"), "t", "cannot be padded"),
    ],
)
def test_what_is_refused_before_the_model_runs(contract: Contract, dim: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        check_padding(contract, dim)
