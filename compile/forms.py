"""The source model in the forms that it is compiled from, cut by, and compared in."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from compile.backends.base import Backend, Model, Part
from compile.errors import VerificationError
from compile.graph import ir, load_model
from compile.partition.graph import Cut, extract, positions, segments, static_sizes
from compile.partition.greedy import cut
from compile.passes.base import Pass, run_passes
from compile.passes.fold import FoldConstants
from compile.passes.normalize import (
    AlignBroadcasts,
    FixNames,
    InferShapes,
    InlineFunctions,
    LiftConstants,
    LiftIrVersion,
    LiftOpset,
    RemoveDeadCode,
    SortNodes,
)
from compile.passes.scalars import ScalarRanges
from compile.passes.widen import WidenHalf
from compile.shapes import ShapeRequest, bind_shapes
from compile.verify import Link
from targets.tensor import DimRange

# The first opset that runtimes promise to know; before it, broadcasting was an attribute.
OLDEST_OPSET = 7

# What puts the source into a form that can be cut by names that also stand in the compiled graph.
SOURCE_FORM: tuple[Pass, ...] = (
    InlineFunctions(),
    LiftIrVersion(),
    LiftConstants(),
    AlignBroadcasts(),
    LiftOpset(OLDEST_OPSET),
    SortNodes(),
    FixNames(),
    WidenHalf(),
    SortNodes(),
    InferShapes(),
)

# What follows it in the model that is compiled.
SIMPLIFY: tuple[Pass, ...] = (
    ScalarRanges(),
    FoldConstants(),
    LiftConstants(),
    RemoveDeadCode(),
    FixNames(),
    SortNodes(),
    # Shapes that were computed are constants now, and a few of their elements may ask for terabytes.
    InferShapes(),
    ScalarRanges(),
)

NORMALIZE = SOURCE_FORM + SIMPLIFY


class SourceForms:
    """The source model in the forms that it is cut by and compared in, each made when it is first asked for, and once.

    `made` are the names of all values that the model makes in SOURCE_FORM; `sizes`, where no dimension has a range, the
    bytes of those that it makes after NORMALIZE.
    """

    def __init__(
        self, path: Path, shapes: Sequence[ShapeRequest], made: Collection[str], sizes: Mapping[str, int] | None
    ) -> None:
        self.path = path
        self.made = made
        self.splits: Sequence[Pass] = ()
        self._shapes = shapes
        self._sizes = sizes

    @functools.cached_property
    def form(self) -> ir.Model:
        """The model as exported, but for what cutting needs, and for `splits`: what no host could compute whole."""
        model = self._bound(self._shapes)
        run_passes(model, self.splits)
        return model

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each value after NORMALIZE at the largest shapes, where they do not follow from the data."""
        return self._largest[1] if self._sizes is None else self._sizes

    @property
    def form_sizes(self) -> Mapping[str, int]:
        """The same of the values in `form`."""
        return self._largest[0] if self._sizes is None else static_sizes(self.form)

    @functools.cached_property
    def _largest(self) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes read off the model with every dimension fixed at its maximum, in SOURCE_FORM and after NORMALIZE."""
        model = self._bound([(name, tuple(DimRange(d.max, d.max, d.max) for d in dims)) for name, dims in self._shapes])
        sizes = static_sizes(model)
        run_passes(model, SIMPLIFY)
        return sizes, static_sizes(model)

    def _bound(self, shapes: Sequence[ShapeRequest]) -> ir.Model:
        model = load_model(self.path)
        bind_shapes(model, shapes)
        run_passes(model, SOURCE_FORM)
        return model


def link_limit(limit: int, half: bool) -> int:
    """Most weight bytes of a link of the source, where one of the compiled model may have `limit`: of an FP16 model the
    runtime widens every weight before it computes with the first (seen with onnxruntime 1.32)."""
    return limit // 2 if half else limit


def source_chain(
    source: SourceForms,
    limit: int,
    runtime: Backend,
    source_bytes: int,
    half: bool,
    parts: Sequence[Part],
) -> list[Link]:
    """The source model as links that the host can hold, making every value that crosses between `parts`.

    A model that fits as a whole is the very file it came from, loaded as any user of the runtime would. What the
    runtime refuses to load so, for the sake of names or of an old opset, is loaded in the form that passes gave it.
    """
    limit = link_limit(limit, half)
    if len(parts) == 1 and source_bytes <= limit:
        return [Link("source", parts[0].inputs, parts[0].outputs, lambda: _load_whole(source, runtime))]
    crossing = {name for part in parts for name in part.outputs}
    ends = cut(positions(source.form, source.form_sizes, crossing), limit)
    return [
        Link(str(index), each.inputs, each.outputs, functools.partial(_load_cut, source, each, runtime))
        for index, each in enumerate(segments(source.form, ends, crossing))
        if each.outputs  # a segment of nodes that nobody reads gives nothing
    ]


def _load_whole(source: SourceForms, runtime: Backend) -> Model:
    try:
        return runtime.load(source.path, {})
    except VerificationError as refused:
        try:
            return runtime.load_mapped(source.form, source.path.parent)
        except VerificationError:
            raise refused from None


def _load_cut(source: SourceForms, part: Cut, runtime: Backend) -> Model:
    return runtime.load_mapped(extract(source.form, part), source.path.parent)
