"""Online collectors: one tensor's values in, piece by piece, one quantization range out. Pure.

A collector keeps a histogram whose bins are a power of two wide and begin at a multiple of it. When a value falls
outside, neighbouring bins merge in pairs, so that counts are exact at every width: the result depends on the values
alone, neither on their order nor on how they were batched, and takes the same memory after any number of samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

# Bins on each side of zero. Between half and all of a side is in use: at least 1024 bins for the 256 codes.
SIDE_BINS = 2048
# Values of one piece are binned in parts, so that temporaries stay small beside the tensor.
PART_ELEMENTS = 1 << 20
LEVELS = 255
"""Steps of an unsigned 8-bit code."""

# Beyond this a value is no activation but a mask (-inf, -3.4e38), and no 8-bit scale can hold it beside others.
LARGEST = 1e30
# Where more of the values that are not zero would be coded as zero, 8 bits cannot hold the tensor.
MOST_LOST = 0.75


@dataclasses.dataclass(frozen=True)
class Range:
    """What the codes of a tensor must span; zero always lies within, so that it has a code of its own."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= 0 <= self.high):
            raise ValueError(f"{self.low} to {self.high} is no range around zero")


@dataclasses.dataclass(frozen=True)
class Unfit:
    """Why a tensor cannot be quantized; what reads or makes it stays float."""

    reason: str


class Collector:
    """Takes in values of one tensor; bounded in memory (32 KiB) whatever the number of samples."""

    def __init__(self) -> None:
        self.low = math.inf
        self.high = -math.inf
        self.nan = 0
        self.masks = 0
        self.count = 0
        self.zeros = 0
        self._exponent: int | None = None
        self._counts = np.zeros(2 * SIDE_BINS, np.int64)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Take in an array of any shape, empty ones too."""
        flat = np.asarray(values).reshape(-1)
        for start in range(0, flat.size, PART_ELEMENTS):
            self._add_part(flat[start : start + PART_ELEMENTS].astype(np.float32, copy=False))

    def _add_part(self, values: npt.NDArray[np.float32]) -> None:
        largest = max(-float(values.min()), float(values.max()))
        if not largest < LARGEST:
            # A NaN makes every comparison false, so this is also the way of arrays that hold one.
            nan = np.isnan(values)
            self.nan += int(nan.sum())
            usable = ~nan & (np.abs(values) < np.float32(LARGEST))
            self.masks += int(values.size - nan.sum() - usable.sum())
            values = values[usable]
            if not values.size:
                return
            largest = max(-float(values.min()), float(values.max()))
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        self.count += values.size
        zeros = values.size - int(np.count_nonzero(values))
        self.zeros += zeros
        exponent = _exponent(largest)
        if self._exponent is None:
            self._exponent = exponent
        while self._exponent < exponent:
            self._merge()
        # A power of two changes no digit, so float32 is exact here.
        bins = np.floor(values * np.float32(2.0**-self._exponent)).astype(np.int64)
        bins += SIDE_BINS
        self._counts += np.bincount(bins, minlength=2 * SIDE_BINS)
        self._counts[SIDE_BINS] -= zeros

    def _merge(self) -> None:
        """Bins of twice the width; the outer half of each side becomes free."""
        pairs = self._counts.reshape(-1, 2).sum(axis=1)
        self._counts[:] = 0
        self._counts[SIDE_BINS // 2 : -SIDE_BINS // 2] = pairs
        self._exponent = (self._exponent or 0) + 1

    def histogram(self) -> Histogram:
        """The counts so far, without the empty bins outside the smallest and the largest value."""
        used = np.flatnonzero(self._counts)
        first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (SIDE_BINS, SIDE_BINS + 1)
        first, last = min(first, SIDE_BINS), max(last, SIDE_BINS)
        return Histogram(2.0 ** (self._exponent or 0), first - SIDE_BINS, self._counts[first:last].copy(), self.zeros)


def _exponent(largest: float) -> int:
    """Exponent of the bin width at which values up to `largest` have a bin; its inverse is a float32 too."""
    return max(math.frexp(largest)[1] - SIDE_BINS.bit_length() + 1, -120) if largest else -120


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of bins `width` wide, the first of which begins at `first * width`; zero is an edge of one of them.

    Zeros themselves are counted apart: every range codes them exactly.
    """

    width: float
    first: int
    counts: npt.NDArray[np.int64]
    zeros: int

    @property
    def edges(self) -> Floats:
        return (self.first + np.arange(len(self.counts) + 1)) * self.width

    @property
    def centres(self) -> Floats:
        return (self.first + np.arange(len(self.counts)) + 0.5) * self.width


Method = Callable[[Histogram, Range], Range]
"""Chooses a range from a histogram and the exact extremes."""


def minmax(_histogram: Histogram, extremes: Range) -> Range:
    """Every value that was seen."""
    return extremes


def percentile(histogram: Histogram, extremes: Range, share: float = 0.9999) -> Range:
    """What is left when `1 - share` of all values is cut off at either end; zero stays within."""
    counts = histogram.counts.copy()
    counts[min(-histogram.first, len(counts) - 1)] += histogram.zeros
    below = np.cumsum(counts)
    cut = (1 - share) * below[-1]
    # The bins that the quantiles fall into stay whole.
    first = int(np.searchsorted(below, cut, "right"))
    last = int(np.searchsorted(below, below[-1] - cut, "left"))
    low, high = float(histogram.edges[first]), float(histogram.edges[last + 1])
    return Range(min(0.0, max(low, extremes.low)), max(0.0, min(high, extremes.high)))


def entropy(histogram: Histogram, extremes: Range) -> Range:
    """The range whose codes lose least information: smallest Kullback-Leibler divergence from the histogram.

    Szymon Migacz, 8-bit Inference with TensorRT (GTC 2017), for ranges that need not be symmetric.
    """
    return _search(histogram, extremes, _divergence)


def mse(histogram: Histogram, extremes: Range) -> Range:
    """The range whose codes have the smallest mean squared error over the histogram."""
    return _search(histogram, extremes, _squared_error)


METHODS: dict[str, Method] = {"minmax": minmax, "percentile": percentile, "entropy": entropy, "mse": mse}
DEFAULT_METHOD = "percentile"


def collect_range(collector: Collector, method: Method) -> Range | Unfit:
    """The range that the method chooses, or why the tensor must stay float."""
    seen = whole_range(collector)
    if isinstance(seen, Unfit):
        return seen
    if collector.low == collector.high:
        return Unfit("constant in calibration")
    histogram = collector.histogram()
    chosen = method(histogram, seen)
    lost = _lost(histogram, chosen)
    if lost > MOST_LOST:
        return Unfit("a few values so large that 8 bits hold no others")
    return chosen


def whole_range(collector: Collector) -> Range | Unfit:
    """Zero and all that was seen, or why that says nothing: what a floating-point type must hold."""
    if collector.nan:
        return Unfit("NaN in calibration")
    if collector.masks:
        return Unfit(f"infinite or beyond {LARGEST:g} in calibration, as masks are")
    if not collector.count:
        return Unfit("empty in every calibration sample")
    return Range(min(0.0, collector.low), max(0.0, collector.high))


def _lost(histogram: Histogram, chosen: Range) -> float:
    """Share of the values that are not zero which the zero code would stand for."""
    half = (chosen.high - chosen.low) / LEVELS / 2
    return float(histogram.counts[np.abs(histogram.centres) < half].sum() / max(histogram.counts.sum(), 1))


# Shares of either end that are tried; finer steps change the error by less than sampling does.
_SHARES = np.concatenate([np.linspace(1.0, 0.5, 51), np.geomspace(0.49, 0.01, 40)])


def _search(histogram: Histogram, extremes: Range, error: Callable[[Histogram, Range], float]) -> Range:
    """The best upper end, then the best lower end beside it."""
    best = extremes
    highs = [Range(extremes.low, extremes.high * float(share)) for share in _SHARES] if extremes.high else []
    best = min(highs or [best], key=lambda candidate: error(histogram, candidate))
    lows = [Range(extremes.low * float(share), best.high) for share in _SHARES] if extremes.low else []
    return min(lows or [best], key=lambda candidate: error(histogram, candidate))


def _squared_error(histogram: Histogram, candidate: Range) -> float:
    step = (candidate.high - candidate.low) / LEVELS
    if not step > 0:
        return math.inf
    zero = round(-candidate.low / step)
    codes = np.clip(np.rint(histogram.centres / step) + zero, 0, LEVELS)
    errors = (codes - zero) * step - histogram.centres
    return float((histogram.counts * errors**2).sum())


def _divergence(histogram: Histogram, candidate: Range) -> float:
    step = (candidate.high - candidate.low) / LEVELS
    if not step > 0:
        return math.inf
    counts = histogram.counts.astype(np.float64)
    # What the reference holds outside the range is counted at its ends.
    at = np.arange(len(counts))
    first = min(int(np.searchsorted(histogram.centres, candidate.low)), len(counts) - 1)
    last = max(int(np.searchsorted(histogram.centres, candidate.high)) - 1, first)
    reference = np.bincount(np.clip(at, first, last), counts, len(counts))
    inside = np.zeros_like(counts)
    inside[first : last + 1] = counts[first : last + 1]
    codes = np.clip(np.rint((histogram.centres - candidate.low) / step), 0, LEVELS).astype(np.int64)
    filled = inside > 0
    spread = np.bincount(codes, inside, LEVELS + 1) / np.maximum(np.bincount(codes, filled, LEVELS + 1), 1)
    model = np.where(filled, spread[codes], 0)
    p, q = reference / reference.sum(), model / max(model.sum(), 1)
    seen = p > 0
    # A code that stands for nothing the reference has would make the divergence infinite; it gets a small share.
    return float((p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-12))).sum())
