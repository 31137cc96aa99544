"""Values that segments hand to one another while a model is verified block by block: on disk, under a limit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.errors import DataError
from targets.tensor import human

# Below this a file costs more than the memory it saves.
IN_MEMORY_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where one array is: in memory, or in a file of raw bytes."""

    array: npt.NDArray[Any] | None
    path: Path | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class ActivationCache:
    """Arrays by (model, name, sample). Large ones are files, read back by mapping; `drop` deletes them.

    Raises DataError before a file would take more than `limit` bytes in all.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._used = 0
        self._count = 0
        self._stored: dict[tuple[str, str, int], _Stored] = {}

    def put(self, model: str, name: str, sample: int, array: npt.NDArray[Any]) -> None:
        """Keep a copy of `array`, in the place of one that was put there before."""
        self.drop(model, name, sample)
        if array.dtype == object or array.nbytes < IN_MEMORY_BYTES:
            self._stored[model, name, sample] = _Stored(array.copy(), None, array.dtype, array.shape)
            return
        if self._used + array.nbytes > self._limit:
            raise DataError(
                f"the activations between segments need more than {human(self._limit)} of disk",
                "verify on fewer or smaller samples (--samples, --calib), or make room",
            )
        path = self._folder / f"{self._count:06}.bin"
        self._count += 1
        np.ascontiguousarray(array).tofile(path)
        self._used += array.nbytes
        self._stored[model, name, sample] = _Stored(None, path, array.dtype, array.shape)

    def get(self, model: str, name: str, sample: int) -> npt.NDArray[Any]:
        """The array that was put there, read-only."""
        stored = self._stored[model, name, sample]
        if stored.array is not None or stored.path is None:
            return np.asarray(stored.array)
        return np.memmap(stored.path, stored.dtype, "r", shape=stored.shape)

    def drop(self, model: str, name: str, sample: int) -> None:
        """Forget it; a second call does nothing."""
        stored = self._stored.pop((model, name, sample), None)
        if stored is not None and stored.path is not None:
            self._used -= math.prod(stored.shape) * stored.dtype.itemsize
            stored.path.unlink()
