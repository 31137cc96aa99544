"""Which outputs can be put together of windows, and how far that is from the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compile.activations import ActivationCache
from compile.errors import OptionError, VerificationError
from compile.verify import Link
from compile.windows import SplitRequest, check_split, measure_split, parse_split, windows_notes
from targets.tensor import Contract, DimRange, DType, TensorSpec
from targets.windows import Join, Split

Array = npt.NDArray[Any]


class Computed:
    """A model of one output `y` that is a function of `x`."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.function = function

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": self.function(inputs["x"])}


def takes(*shape: int | str, dtype: DType = DType.FLOAT32, **dims: DimRange) -> Contract:
    return Contract((TensorSpec("x", dtype, shape, 1000),), (), dims)


def measured(folder: Path, function: Callable[[Array], Array], wanted: str, low: int = 1, high: int = 16) -> Split:
    """Of a model that takes x [2, t]."""
    return measure_split(
        [Link("source", ("x",), ("y",), lambda: Computed(function))],
        takes(2, "t", t=DimRange(low, high, high)),
        parse_split(wanted),
        lambda size: {"x": np.random.default_rng(0).standard_normal((2, size)).astype(np.float32)},
        ["y"],
        ActivationCache(folder, 1 << 20),
    )


def smoothed(x: Array, reach: int) -> Array:
    """A convolution along the last axis, zeros around it."""
    padded = np.pad(x, ((0, 0), (reach, reach)))
    return sum(padded[:, at : at + x.shape[1]] for at in range(2 * reach + 1))


EXACT: dict[str, tuple[Callable[[Array], Array], Join]] = {
    "each position": (np.tanh, Join(1)),
    "neighbours": (lambda x: smoothed(x, 4), Join(1)),
    "every second position": (lambda x: smoothed(x, 3)[:, ::2], Join(1, 1, 2)),
    "two for each": (lambda x: np.repeat(x, 2, 1), Join(1, 2, 1)),
    "on another axis": (lambda x: x.T, Join(0)),
    "a vector of all": (lambda x: np.ones((len(x), 3), np.float32), Join()),
}


@pytest.mark.parametrize("kind", EXACT)
def test_windows_that_give_what_the_whole_gives(tmp_path: Path, kind: str) -> None:
    function, join = EXACT[kind]
    split = measured(tmp_path, function, "t=100/8")
    (found,) = split.joins
    assert (found.axis, found.made, found.of) == (join.axis, join.made, join.of)
    assert (split.window, split.longest) == (16, 100)
    assert found.error is not None
    assert found.error < 1e-6
    assert windows_notes(split, ["y"]) == []


def test_what_windows_cannot_see_is_measured(tmp_path: Path) -> None:
    for function in (lambda x: smoothed(x, 6), lambda x: x - x.mean(1, keepdims=True)):
        split = measured(tmp_path, function, "t=100/8")
        error = split.joins[0].error
        assert error is not None
        assert error > 1e-3
        (note,) = windows_notes(split, ["y"])
        assert note.endswith(f"differ from those of the whole (relative L2): 'y' by {error:.3g}")


def test_a_source_that_takes_no_longer_sequence(tmp_path: Path) -> None:
    table = np.arange(16, dtype=np.float32)

    def positions(x: Array) -> Array:
        if x.shape[1] > 16:
            raise VerificationError("no position for that")
        return x + table[: x.shape[1]]

    split = measured(tmp_path, positions, "t=100/8")
    assert split.joins == (Join(1),)
    (note,) = windows_notes(split, ["y"])
    assert note.endswith("could not be compared with anything")


REFUSED: dict[str, tuple[Callable[[Array], Array], str, int, str]] = {
    "edges lost": (lambda x: x[:, 2:-2], "t=100/8", 1, r"has 12 positions for 16 of the sequence, and 4 for 8"),
    "two axes": (lambda x: x.T @ x, "t=100/8", 1, r"is \[16, 16\] for 16 positions and \[8, 8\] for 8"),
    "between two positions": (lambda x: x[:, ::4], "t=100/6", 1, r"one position for every 4 of the sequence"),
    "a last window too short": (lambda x: x[:, ::6], "t=100/0", 2, r"may have 1 positions, the range begins at 2"),
    "no more than so many": (lambda x: x[:, :20], "t=100/8", 1, r"is \[2, 20\] for 28 positions at once, \[2, 28\] in"),
    "a class": (lambda x: x.argmax(1), "t=100/8", 1, r"output 'y' is int64, and has no axis along the sequence"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_outputs_that_do_not_join(tmp_path: Path, kind: str) -> None:
    function, wanted, low, words = REFUSED[kind]
    with pytest.raises(OptionError, match=rf"^--split.*{words}"):
        measured(tmp_path, function, wanted, low)


@pytest.mark.parametrize("text", ["t", "t=", "=5", "t=5/", "t=5/6/7", "t=-1", "t=1..5", "t=٣"])
def test_what_is_no_split(text: str) -> None:
    with pytest.raises(OptionError, match=r"is not a split \(write DIMENSION=LONGEST/OVERLAP"):
        parse_split(text)


def test_a_split() -> None:
    assert parse_split("t=4096/32") == SplitRequest("t", 4096, 32)
    assert str(parse_split("t=4096")) == "t=4096/0"


T = DimRange(1, 16, 16)


@pytest.mark.parametrize(
    ("contract", "wanted", "words"),
    [
        (takes("t", t=T), "s=100/8", r"no dimension 's' has a range \(available: t\)"),
        (takes("t", t=T), "t=16/8", "already goes up to 16"),
        (takes("t", t=DimRange(9, 16, 16)), "t=100/8", r"range 9..16 is too narrow .* \(let it begin at 8 or below\)"),
        (takes("t", t=T), "t=100/16", "windows of 16 cannot share 16"),
        (takes("t", "t", t=T), "t=100/8", r"x float32\[t,t\] cannot be cut"),
        (takes("t", dtype=DType.STRING, t=T), "t=100/8", r"x string\[t\] cannot be cut"),
        (Contract((TensorSpec("x", DType.FLOAT32, ("t",), 9),), (), {"t": T}, "t"), "t=100/8", "'t' is the batch"),
    ],
)
def test_what_is_refused_before_the_model_runs(contract: Contract, wanted: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        check_split(contract, parse_split(wanted))
