"""Ranges of a model's activations: every sample through it, link by link, the tensors of interest in groups.

What is in memory at a time is one link, one sample's values of one group, and 32 KiB for each tensor of interest:
never all activations, and never all samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.activations import ActivationCache
from compile.backends.base import Model
from compile.calibrate.collectors import Collector
from compile.calibrate.samples import Sample
from compile.errors import VerificationError
from compile.host import give_back

Samples = Callable[[], Iterable[Sample]]
"""Opens the samples anew, in the same order each time."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One link of the model: what it takes, what later links or nobody read of it, and the tensors to collect.

    `load(outputs)` gives the link as a model with just these outputs. `wanted` maps each tensor of interest to its
    bytes at the largest sizes, None where they follow from the data.
    """

    inputs: tuple[str, ...]
    crossing: tuple[str, ...]
    wanted: Mapping[str, int | None]
    load: Callable[[Sequence[str]], Model]


def collect(
    stages: Sequence[Stage], samples: Samples, inputs: Iterable[str], cache: ActivationCache, limit: int
) -> dict[str, Collector]:
    """Run all samples through the stages; returns a collector for each tensor of interest, by name.

    `inputs` are the model's inputs that are of interest themselves. A group's tensors take at most `limit` bytes, but
    for a single tensor that takes more.
    """
    collectors = {name: Collector() for name in inputs}
    for sample in samples():
        for name, collector in collectors.items():
            collector.add(sample[name])
    last = {name: at for at, stage in enumerate(stages) for name in stage.inputs}
    for at, stage in enumerate(stages):
        mine = {name: Collector() for name in stage.wanted}
        count = _run(stage, mine, samples, cache, limit)
        collectors |= mine
        for name in (*stage.inputs, *stage.crossing):
            if last.get(name, -1) <= at:
                for index in range(count):
                    cache.drop(_MODEL, name, index)
    return collectors


_MODEL = "calibration"


def _run(stage: Stage, mine: Mapping[str, Collector], samples: Samples, cache: ActivationCache, limit: int) -> int:
    count = 0
    for index, group in enumerate(groups(stage.wanted, limit) or [()]):
        kept = stage.crossing if index == 0 else ()
        outputs = tuple(dict.fromkeys((*group, *kept)))
        if not outputs:
            continue
        model = stage.load(outputs)
        for count, sample in enumerate(samples(), 1):
            made = model.run({n: sample[n] if n in sample else cache.get(_MODEL, n, count - 1) for n in stage.inputs})
            for name in outputs:
                if name not in made:
                    raise VerificationError(f"calibration asked for {name!r}, which the runtime does not give")
                if name in group:
                    mine[name].add(made[name])
                if name in kept:
                    cache.put(_MODEL, name, count - 1, np.asarray(made[name]))
        del model
        give_back()
    return count


def groups(wanted: Mapping[str, int | None], limit: int) -> list[tuple[str, ...]]:
    """Names in order, cut where their bytes would pass `limit`; what has no known size is a group of its own."""
    result: list[list[str]] = []
    filled = math.inf
    for name, nbytes in wanted.items():
        size = math.inf if nbytes is None else nbytes
        if filled + size > limit:
            result.append([])
            filled = 0
        result[-1].append(name)
        filled += size
    return [tuple(group) for group in result]


class HashedSamples:
    """Samples whose digest is made in the first pass over all of them.

    `sha256` is over names, types, shapes and values: ranges found on other samples are other ranges.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.sha256 = ""

    def __call__(self) -> Iterable[Sample]:
        return self._samples() if self.sha256 else self._hashed()

    def _hashed(self) -> Iterator[Sample]:
        total = hashlib.sha256()
        for sample in self._samples():
            for name, array in sorted(sample.items()):
                total.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
                total.update(_bytes(array))
            yield sample
        self.sha256 = total.hexdigest()


def _bytes(array: npt.NDArray[Any]) -> bytes | memoryview:
    if array.dtype.kind in "USO":
        return "\0".join(map(str, array.reshape(-1))).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
