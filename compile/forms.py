"""The source model in the forms that it is compiled from, cut by, and compared in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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

NORMALIZE: tuple[Pass, ...] = (
    *SOURCE_FORM,
    FoldConstants(),
    LiftConstants(),
    RemoveDeadCode(),
    FixNames(),
    SortNodes(),
    # Shapes that were computed are constants now, and a few of their elements may ask for terabytes.
    InferShapes(),
    ScalarRanges(),
)


def source_form(source: Path, shapes: Sequence[ShapeRequest]) -> ir.Model:
    """The source model as exported, but for what cutting needs."""
    model = load_model(source)
    bind_shapes(model, shapes)
    run_passes(model, SOURCE_FORM)
    return model


def at_largest(source: Path, shapes: Sequence[ShapeRequest], passes: Sequence[Pass]) -> ir.Model:
    """The model after `passes`, with every dimension fixed at its maximum, so that value sizes can be read off."""
    model = load_model(source)
    fixed = [(name, tuple(DimRange(d.max, d.max, d.max) for d in dims)) for name, dims in shapes]
    bind_shapes(model, fixed)
    run_passes(model, passes)
    return model


def link_limit(limit: int, half: bool) -> int:
    """Most weight bytes of a link of the source, where one of the compiled model may have `limit`: of an FP16 model the
    runtime widens every weight before it computes with the first (seen with onnxruntime 1.32)."""
    return limit // 2 if half else limit


def source_chain(
    source: Path,
    shapes: Sequence[ShapeRequest],
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
        return [Link("source", parts[0].inputs, parts[0].outputs, lambda: _load_whole(source, shapes, runtime))]
    form = source_form(source, shapes)
    crossing = {name for part in parts for name in part.outputs}
    ends = cut(positions(form, static_sizes(at_largest(source, shapes, SOURCE_FORM)), crossing), limit)
    return [
        Link(str(index), each.inputs, each.outputs, functools.partial(_load_source, runtime, form, each, source.parent))
        for index, each in enumerate(segments(form, ends, crossing))
        if each.outputs  # a segment of nodes that nobody reads gives nothing
    ]


def _load_whole(source: Path, shapes: Sequence[ShapeRequest], runtime: Backend) -> Model:
    try:
        return runtime.load(source, {})
    except VerificationError as refused:
        try:
            return runtime.load_mapped(source_form(source, shapes), source.parent)
        except VerificationError:
            raise refused from None


def _load_source(runtime: Backend, form: ir.Model, part: Cut, folder: Path) -> Model:
    return runtime.load_mapped(extract(form, part), folder)
