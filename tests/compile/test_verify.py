"""Errors of compiled against source: the figures by hand, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile import verify as verify_module
from compile.activations import ActivationCache
from compile.backends.base import Model
from compile.calibrate.samples import Sample
from compile.errors import VerificationError
from compile.verify import Comparison, Link, verify, verify_rows
from targets.bundle import OutputError
from tests.support.models import Array, normal


class Fixed:
    """A model that answers with what it was made of."""

    def __init__(self, **outputs: Any) -> None:
        self.outputs: dict[str, Any] = {name: np.asarray(array) for name, array in outputs.items()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:  # noqa: ARG002 - the Model protocol
        return self.outputs


def compare(
    folder: Path, source: Model, compiled: Model, samples: list[Sample], limit: float | None
) -> tuple[OutputError, ...]:
    """Two models of one output `y`, each whole."""
    chains = [[Link(name, (), ("y",), lambda m=m: m)] for name, m in (("source", source), ("00", compiled))]  # type: ignore[misc]
    outputs, (whole,) = verify(*chains, samples, ["y"], ActivationCache(folder, 1 << 20), limit)
    assert whole.isolated == whole.accumulated == outputs[0].relative_l2
    assert not list(folder.iterdir())
    return outputs


def test_the_figures_are_those_of_all_samples_together() -> None:
    a, b = normal(2, 6, seed=1), normal(2, 6, seed=2)
    comparison = Comparison("y")
    for row in range(2):
        comparison.add(a[row], b[row])
    found = comparison.result()
    assert found.max_abs == pytest.approx(np.abs(a - b).max(), rel=1e-5)
    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-5)
    assert found.cosine == pytest.approx((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-5)
    assert found.top1_agreement == pytest.approx((a.argmax(1) == b.argmax(1)).mean())


def test_a_large_output_is_compared_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(3, 7, seed=1), normal(3, 7, seed=2)
    whole, pieces = Comparison("y"), Comparison("y")
    whole.add(a, b)
    monkeypatch.setattr(verify_module, "_PIECE", 4)
    pieces.add(a, b)
    assert pieces.result() == whole.result()


def test_equal_models_differ_by_nothing(tmp_path: Path) -> None:
    special = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    (result,) = compare(tmp_path, Fixed(y=special), Fixed(y=special), [{}, {}], 0.0)
    assert (result.max_abs, result.relative_l2, result.cosine, result.top1_agreement) == (0, 0, 1, 1)


def test_a_source_of_zeros_gives_finite_figures(tmp_path: Path) -> None:
    (result,) = compare(tmp_path, Fixed(y=np.zeros(3)), Fixed(y=np.full(3, 0.5)), [{}], None)
    assert (result.relative_l2, result.cosine) == (0.5, 0)


def test_strings_and_flags_are_compared(tmp_path: Path) -> None:
    (result,) = compare(tmp_path, Fixed(y=np.array(["a"], object)), Fixed(y=np.array(["b"], object)), [{}], None)
    assert result.relative_l2 > 0
    (result,) = compare(tmp_path, Fixed(y=np.array([True, False])), Fixed(y=np.array([True, True])), [{}], None)
    assert result.max_abs == 1


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({"y": np.ones((2, 2), np.float32)}, r"is float32\[2, 2\] after compiling, float32\[4\] before"),
        ({"y": np.ones(4)}, r"is float64\[4\] after"),
        ({"y": np.array([1, 1, 1, np.nan], np.float32)}, "has NaN or infinity that the source model has not"),
        ({"z": np.ones(4)}, "output 'y' is missing"),
        ({"y": np.array([1, 1, 1, 2], np.float32)}, r"relative L2 0.5, limit 0.1 .*--max-error"),
    ],
)
def test_what_is_refused(tmp_path: Path, ours: dict[str, Any], words: str) -> None:
    with pytest.raises(VerificationError, match=words):
        compare(tmp_path, Fixed(y=np.ones(4, np.float32)), Fixed(**ours), [{}], 0.1)


class Unable:
    """A model that the runtime refuses to run."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:  # noqa: ARG002 - the Model protocol
        raise VerificationError("no kernel for that")


def test_what_only_the_source_can_is_a_fault_of_the_compiler(tmp_path: Path) -> None:
    with pytest.raises(
        VerificationError, match=r"segment 00 does not .*: no kernel for that \(if .* please report this\)"
    ):
        compare(tmp_path, Fixed(y=np.ones(4)), Unable(), [{}], None)
    with pytest.raises(VerificationError, match=r"^no kernel for that$"):
        compare(tmp_path, Unable(), Fixed(y=np.ones(4)), [{}], None)


# -- rows together and apart ---------------------------------------------------------------------------------------


class Computed:
    """A model of one output `y` that is a function of `x`."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.function = function

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": self.function(inputs["x"])}


def rows(folder: Path, function: Callable[[Array], Array], count: int = 2, limit: float = 1e-6) -> None:
    chain = [Link("source", ("x",), ("y",), lambda: Computed(function))]
    verify_rows(chain, {"x": normal(count, 5)}, ["y"], ActivationCache(folder, 1 << 20), limit)


APART: dict[str, Callable[[Array], Array]] = {
    "each value": np.tanh,
    "each row": lambda x: x - x.mean(1, keepdims=True),
    "a number a row": lambda x: x.sum(1),
    "other dimensions": lambda x: np.repeat(x[:, None], 3, 1),
    "infinities": lambda x: np.where(x > 0, np.inf, np.nan),
}
TOGETHER: dict[str, tuple[Callable[[Array], Array], str]] = {
    "a mean over rows": (lambda x: x - x.mean(0), r"together differs from that of rows apart: relative L2 \d"),
    "one scale": (lambda x: x / np.abs(x).max(), "together differs"),
    "rows in another order": (lambda x: x[::-1], "together differs"),
    "one row for all": (lambda x: x[:1], r"is \[1, 5\] for \d+ rows together, \[1, 5\]"),
    "one number": (lambda x: x.sum(), r"is \[\] for \d+ rows together, \[\] for \d+ of them"),
    "every two rows": (lambda x: x @ x.T, r"is \[\d+, \d+\] for \d+ rows together"),
    "rows on another axis": (lambda x: x.T, r"is \[5, \d+\] for \d+ rows together"),
}


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("kind", APART)
def test_rows_that_are_computed_apart(tmp_path: Path, kind: str, count: int) -> None:
    rows(tmp_path, APART[kind], count)


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("kind", TOGETHER)
def test_rows_that_depend_on_each_other(tmp_path: Path, kind: str, count: int) -> None:
    function, words = TOGETHER[kind]
    with pytest.raises(VerificationError, match=f"output 'y' .*{words}"):
        rows(tmp_path, function, count)


def test_an_output_that_is_a_sequence_is_named(tmp_path: Path) -> None:
    """Also one of ragged tensors, of which no array can be made."""
    ragged = Fixed()
    ragged.outputs = {"y": [np.ones(4), np.ones(2)]}
    with pytest.raises(VerificationError, match=r"output 'y' is not a tensor but a list of them"):
        compare(tmp_path, ragged, ragged, [{}], None)
