"""A sequence that is longer than what the model runs at once: windows, and how their answers become one. Pure.

Theory of operation. Windows have one size; neighbours share `overlap` positions, the last two more, so that the last
window is a whole one and ends where the sequence ends. Of what two windows both saw each answers its half: nearest to
the middle of a window is furthest from its edges, where the model saw nothing of what lies beyond.

    sequence   0.........................................................L
    window 0   [------------------------]
    window 1                    [------------------------]
    window 2                            shared  [------------------------]
    kept       [-------------------][---------------][-------------------]

An output whose axis runs along the sequence is put together of what is kept; one that has no such axis (a pooled
vector, scores of the whole) is the mean over the windows, weighted by how much each keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the windows' values of one output become one value.

    Along `axis`, of which `made` positions are made of `of` positions of the sequence; None: mean. `error` is the
    relative L2 between what windows gave and what the source model gave for the whole, as the compiler measured it;
    None where the source takes no longer sequence.
    """

    axis: int | None = None
    made: int = 1
    of: int = 1
    error: float | None = None

    def __post_init__(self) -> None:
        if (
            self.made < 1
            or self.of < 1
            or math.gcd(self.made, self.of) != 1
            or (self.axis is not None and self.axis < 0)
        ):
            raise ValueError(f"not an axis, or not a reduced ratio: {self.axis}, {self.made}:{self.of}")


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sequences along dimension `dim` may have up to `longest` positions; more than `window` are run in windows, of
    which neighbours share `overlap`. `joins` has one entry an output.
    """

    dim: str
    window: int
    overlap: int
    longest: int
    joins: tuple[Join, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.window <= self.longest:
            raise ValueError(f"not windows: {self.window} of {self.longest}, sharing {self.overlap}")
        if self.window % self.grain or self.overlap % self.grain:
            raise ValueError(
                f"windows of {self.window} that share {self.overlap} do not join: outputs have one position for every "
                f"{self.grain} of the sequence, and both must be multiples of that"
            )

    @property
    def grain(self) -> int:
        """Windows begin, and answers are cut, at multiples of this: where every output has a position of its own."""
        return math.lcm(*(join.of for join in self.joins))

    @property
    def shortest(self) -> int:
        """The least size that a window has: that of the last, which begins at a multiple of the grain."""
        return self.window - self.grain + 1


@dataclass(frozen=True, slots=True)
class Window:
    """Positions start..stop of the sequence are run, keep..end of them are answered by this window; half-open."""

    start: int
    stop: int
    keep: int
    end: int


def windows(split: Split, length: int) -> tuple[Window, ...]:
    """The windows of a sequence; one, which is all of it, where it is no longer than a window.

    Raises ValueError for a sequence longer than the longest.
    """
    if length > split.longest:
        raise ValueError(f"{length} positions are more than {split.longest}")
    if length <= split.window:
        return (Window(0, length, 0, length),)
    grain, stride = split.grain, split.window - split.overlap
    last = -(-(length - split.window) // grain) * grain
    starts = [*range(0, last, stride), last]
    stops = [min(start + split.window, length) for start in starts]
    # Where a window's part begins: in the middle of what it shares with the one before it.
    keeps = [0, *(b + (stop - b) // (2 * grain) * grain for b, stop in zip(starts[1:], stops[:-1], strict=True))]
    return tuple(map(Window, starts, stops, keeps, [*keeps[1:], length]))
