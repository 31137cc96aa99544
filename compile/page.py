"""report.html: a bundle on one page that needs nothing else, no network and no scripts.

Equal manifests give equal bytes. The page is part of the bundle, so it cannot hold the version, which is a digest over
all of the bundle's files.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from compile import picture
from compile.partition.cuts import Cuts
from compile.picture import Column
from targets.arena import Arena
from targets.board import Board
from targets.budget import KINDS, MemoryPlan
from targets.bundle import Quantization, Segment, Verification
from targets.tensor import Contract, human

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("compile", ""),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters["human"] = human

# Units of the drawings; browsers scale them to the page.
WIDTH, HEIGHT = 1000, 320


def page(
    name: str,
    board: Board,
    options: Mapping[str, str],
    contract: Contract,
    segments: Sequence[Segment],
    quantization: Quantization,
    verification: Verification,
    plan: MemoryPlan,
    warnings: Sequence[str],
    cuts: Cuts | None = None,
) -> bytes:
    """The page, UTF-8; `cuts` says how segments were chosen, None where one was enough."""
    columns = picture.columns(plan, [f"{step:02d}" for step in range(len(segments))])
    text = _ENVIRONMENT.get_template("page.html.j2").render(
        name=name,
        board=board,
        options={key: value for key, value in sorted(options.items()) if value},
        contract=contract,
        segments=segments,
        q=quantization,
        v=verification,
        plan=plan,
        warnings=warnings,
        cuts=cuts,
        kinds=KINDS,
        columns=columns,
        worst=max(columns, key=lambda column: column.nbytes),
        bars=_bars(columns, plan.budget_bytes),
        arena=_arena(plan.arena),
        live=_live(plan.arena),
        width=WIDTH,
        height=HEIGHT,
    )
    return text.encode()


def _bars(columns: Sequence[Column], budget: int) -> dict[str, Any]:
    """Rectangles of the columns, and where the budget's line is; y grows downwards."""
    top = max(budget, *(column.nbytes for column in columns)) * 1.05
    pitch = WIDTH / len(columns)
    rectangles = []
    for at, column in enumerate(columns):
        upto = itertools.accumulate((part.nbytes for part in column.slices), initial=0)
        rectangles += [
            {
                "x": round(at * pitch + pitch * 0.06, 1),
                "y": round(HEIGHT * (1 - (below + part.nbytes) / top), 2),
                "width": round(pitch * 0.88, 1),
                "height": round(HEIGHT * part.nbytes / top, 2),
                "kind": part.kind,
                "title": f"{column.label}: {part.name}, {part.kind}, {human(part.nbytes)}",
            }
            for below, part in zip(upto, column.slices, strict=False)
        ]
    labels = [{"x": round((at + 0.5) * pitch, 1), "text": column.label} for at, column in enumerate(columns)]
    # Labels of twenty columns are the most that can be read.
    step = -(-len(labels) // 20)
    return {"rectangles": rectangles, "labels": labels[::step], "budget": round(HEIGHT * (1 - budget / top), 2)}


def _scales(arena: Arena) -> tuple[float, float]:
    steps = max((buffer.upper for buffer in arena.buffers), default=1)
    return WIDTH / steps, HEIGHT / max(arena.height, 1)


def _arena(arena: Arena) -> list[dict[str, Any]]:
    """A rectangle for each buffer: its lifetime from left to right, its place from bottom to top."""
    across, up = _scales(arena)
    return [
        {
            "x": round(buffer.lower * across, 2),
            "y": round(HEIGHT - (buffer.offset + buffer.nbytes) * up, 2),
            "width": round((buffer.upper - buffer.lower) * across, 2),
            "height": round(buffer.nbytes * up, 2),
            "title": f"{buffer.name}: {human(buffer.nbytes)} at {human(buffer.offset)}, "
            f"steps {buffer.lower} to {buffer.upper - 1}",
        }
        for buffer in picture.largest_buffers(arena)
    ]


def _live(arena: Arena) -> str:
    """The path of the bytes in use over a run, as SVG writes it."""
    across, up = _scales(arena)
    points = [f"M0 {HEIGHT}"]
    for each in picture.live(arena):
        points.append(f"V{round(HEIGHT - each.nbytes * up, 2)}H{round(each.end * across, 2)}")
    return "".join(points) + f"V{HEIGHT}Z"
