"""Windows of a long sequence at work: arrays cut, and answers put together (`targets.windows`)."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from targets.windows import Join, Window


def cut(array: NDArray[Any], axis: int, window: Window) -> NDArray[Any]:
    """What one window sees of an input whose `axis` is the sequence: a view."""
    return array[(slice(None),) * axis + (slice(window.start, window.stop),)]


class Joined:
    """One output of a sequence of `length`, put together of what its windows give, in their order.

    There is one array of it, made when the first window is known, so that a long answer never stands in memory twice.
    """

    def __init__(self, join: Join, length: int) -> None:
        self._join = join
        self._length = length
        self._whole: NDArray[Any] | None = None
        self._size = 0
        self._dtype: np.dtype[Any] | None = None

    def add(self, window: Window, value: NDArray[Any]) -> None:
        """Take in what a window gave; what is needed of it is copied.

        Raises ValueError where it cannot be put beside the others.
        """
        if self._join.axis is None:
            weighted = np.multiply(value, window.end - window.keep, dtype=np.float64)
            self._whole = weighted if self._whole is None else np.add(self._whole, weighted, out=self._whole)
            self._dtype = value.dtype
        else:
            self._put(self._join.axis, window, value)

    def result(self) -> NDArray[Any]:
        """The output of the whole, when all windows were taken in."""
        if self._whole is None:
            raise ValueError("no window was taken in")
        if self._join.axis is None:
            return (self._whole / self._length).astype(self._dtype)
        return self._whole[(slice(None),) * self._join.axis + (slice(self._size),)]

    def _put(self, axis: int, window: Window, value: NDArray[Any]) -> None:
        """What a window answers. The last one's end is the output's own, whatever the model makes of an odd length."""
        made, of = self._join.made, self._join.of
        first, end = ((at - window.start) * made // of for at in (window.keep, window.end))
        if end > value.shape[axis]:
            raise ValueError(f"a window made {value.shape[axis]} positions on axis {axis}, {end} are needed")
        if window.end == self._length:
            end = value.shape[axis]
        before, behind = value.shape[:axis], value.shape[axis + 1 :]
        if self._whole is None:
            self._whole = _empty((*before, -(-self._length * made // of), *behind), value.dtype)
        start = window.keep * made // of
        self._size = start + end - first
        room = self._whole.shape
        if (before, behind) != (room[:axis], room[axis + 1 :]) or self._size > room[axis]:
            raise ValueError(f"a window made {list(value.shape)}, which does not go into {list(room)} from {start} on")
        np.moveaxis(self._whole, axis, 0)[start : self._size] = np.moveaxis(value, axis, 0)[first:end]


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in pages of its own, which are given back with it: the heap of the thread that works on it just now
    would keep them."""
    size = max(math.prod(shape) * dtype.itemsize, 1)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)
