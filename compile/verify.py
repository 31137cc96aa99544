"""The compiled model against its source: what is emitted has been loaded, run and compared before it is called done."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.backends.base import Model
from compile.calibrate import Sample
from compile.errors import VerificationError
from targets.bundle import OutputError

# Without quantization only the order of float32 sums may differ.
FLOAT_LIMIT = 1e-4


@dataclasses.dataclass
class Comparison:
    """Online error figures of one output: nothing of a sample is kept."""

    output: str
    max_abs: float = 0.0
    square_error: float = 0.0
    square_reference: float = 0.0
    square_compiled: float = 0.0
    product: float = 0.0
    rows: int = 0
    rows_equal: int = 0

    def add(self, reference: npt.NDArray[Any], compiled: npt.NDArray[Any]) -> None:
        """Take in one pair; raises VerificationError when shape, type or finiteness differ."""
        if reference.shape != compiled.shape or reference.dtype != compiled.dtype:
            raise VerificationError(
                f"output {self.output!r} is {compiled.dtype}{list(compiled.shape)} after compiling, "
                f"{reference.dtype}{list(reference.shape)} before"
            )
        if reference.dtype.kind not in "fiub":
            different = int((reference != compiled).sum())
            reference, compiled = np.zeros(1), np.array([float(different > 0)])
        a, b = reference.astype(np.float64), compiled.astype(np.float64)
        same_special = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))
        if not (np.isfinite(b) | same_special).all():
            raise VerificationError(f"output {self.output!r} has NaN or infinity that the source model has not")
        if a.ndim and a.shape[-1] > 1 and a.size:
            self.rows += a[..., 0].size
            self.rows_equal += int((a.argmax(-1) == b.argmax(-1)).sum())
        a, b = np.where(np.isfinite(a), a, 0), np.where(np.isfinite(a), b, 0)
        self.max_abs = max(self.max_abs, float(np.abs(a - b).max(initial=0)))
        self.square_error += float(((a - b) ** 2).sum())
        self.square_reference += float((a * a).sum())
        self.square_compiled += float((b * b).sum())
        self.product += float((a * b).sum())

    def result(self) -> OutputError:
        """Max abs, relative L2, cosine, and the share of equal argmax along the last axis."""
        relative = math.sqrt(self.square_error / self.square_reference) if self.square_reference else self.max_abs
        norms = math.sqrt(self.square_reference * self.square_compiled)
        cosine = self.product / norms if norms else float(self.square_error == 0)
        agreement = self.rows_equal / self.rows if self.rows else None
        return OutputError(self.output, _six(self.max_abs), _six(relative), _six(cosine), _round(agreement))


def _six(value: float) -> float:
    """Six significant digits: what is left differs between machines and says nothing."""
    return float(f"{value:.6g}")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def compare(source: Model, compiled: Model, samples: Sequence[Sample], limit: float | None) -> tuple[OutputError, ...]:
    """Run every sample through both; raises VerificationError when an output's relative L2 exceeds `limit`."""
    comparisons: dict[str, Comparison] = {}
    for sample in samples:
        reference, ours = source.run(sample), compiled.run(sample)
        for name, value in reference.items():
            if name not in ours:
                raise VerificationError(f"output {name!r} is missing after compiling")
            comparisons.setdefault(name, Comparison(name)).add(np.asarray(value), np.asarray(ours[name]))
    results = tuple(comparison.result() for comparison in comparisons.values())
    for result in results:
        if limit is not None and result.relative_l2 > limit:
            raise VerificationError(
                f"output {result.output!r} differs from the source model: relative L2 {result.relative_l2:.3g}, "
                f"limit {limit:.3g}",
                "use a finer scheme (int8-weights, fp32), or raise the limit with --max-error",
            )
    return results
