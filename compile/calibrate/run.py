"""Ranges of a model of any size: its segments one by one, with what crosses between them on disk."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from compile.activations import ActivationCache
from compile.backends.base import Backend, Model
from compile.bounded import BoundedModel
from compile.calibrate.collect import Samples, Stage, collect
from compile.calibrate.collectors import Collector, Range, Unfit
from compile.graph import ir
from compile.partition.graph import Cut, extract, positions, segments
from compile.partition.greedy import cut


def calibrate(
    model: ir.Model,
    names: Sequence[str],
    samples: Samples,
    choose: Callable[[Collector], Range | Unfit],
    runtime: Backend,
    folder: Path,
    sizes: Mapping[str, int],
    limit: int,
    scratch: Path,
) -> dict[str, Range | Unfit]:
    """A range for each of `names`, chosen from what was seen of it, or why there is none.

    `folder` holds the model's external data; `sizes` are bytes of its values at the largest shapes; a segment's weights
    and a group's values take up to `limit` bytes each. `scratch` is made, where a model has several segments, and
    removed.
    """
    cuts = segments(model, cut(positions(model, sizes), limit))
    made_at = {value.name: at for at, node in enumerate(model.graph) for value in node.outputs}
    stages = [_stage(model, each, names, made_at, sizes, runtime, folder, limit) for each in cuts]
    inputs = [name for name in names if name not in made_at]
    with _folder(scratch, len(stages) > 1) as where:
        cache = ActivationCache(where, shutil.disk_usage(where).free // 2)
        collectors = collect(stages, samples, inputs, cache, limit)
    return {name: choose(collectors[name]) for name in names}


def _stage(
    model: ir.Model,
    part: Cut,
    names: Collection[str],
    made_at: Mapping[str | None, int],
    sizes: Mapping[str, int],
    runtime: Backend,
    folder: Path,
    limit: int,
) -> Stage:
    last = part.end == len(model.graph)
    mine = {name: sizes.get(name) for name in names if part.start <= made_at.get(name, -1) < part.end}
    load = functools.partial(_load, model, part, runtime, folder, limit)
    return Stage(part.inputs, () if last else part.outputs, mine, load)


def _load(model: ir.Model, part: Cut, runtime: Backend, folder: Path, limit: int, outputs: Sequence[str]) -> Model:
    loaded = runtime.load_mapped(extract(model, Cut(part.start, part.end, part.inputs, tuple(outputs))), folder)
    return BoundedModel(loaded, 2 * limit)


@contextlib.contextmanager
def _folder(scratch: Path, needed: bool) -> Iterator[Path]:
    """An empty folder, which a killed run may have left; where none is needed, the one that it would stand in."""
    if not needed:
        yield scratch.absolute().parent
        return
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
