"""Which operators do not fit alone, and into how many parts each is split. Pure: graphs and byte tables in, passes out.

Weights: a product whose matrix is larger than a segment may be is split by columns. Tables that Gather reads are not
split, however large: the runtime maps them and touches the rows it reads, and so does the compiler.

Activations: the bytes that live beside each node are followed through the graph at the largest shapes, as if nothing
were overwritten. Where they exceed the budget, of all regions around the place the one is taken that fits with the
fewest parts; of those, the one with the fewest nodes, since a halo is computed twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from compile.graph import ir
from compile.partition.graph import reads
from compile.passes.base import Pass
from compile.passes.split.columns import SplitColumns, matrix_of, panels
from compile.passes.split.rows import (
    POINTWISE,
    CannotSplit,
    SplitRows,
    backward,
    bands,
    extent,
    needed,
)
from targets.tensor import human

MOST_PARTS = 64
"""Beyond this, what an operator costs to call exceeds what it computes."""
NODE_BYTES = 6400
"""What a runtime keeps of a node beside its weights: onnxruntime 1.32 had 5.0 to 6.2 KiB. Every band has its own."""
# Nodes on each side of the place that a region may reach.
_REACH = 16
_PARTS = (2, 4, 8, 16, 32, 64)
# Kernels that may write over an operand, or rename it.
_ALONE = POINTWISE | {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}


@dataclasses.dataclass(frozen=True)
class Stuck:
    """An operator that cannot be split far enough: bytes that it takes alone, the least that it is part of a fitting
    whole with, and why."""

    operator: str
    nbytes: int
    least: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Splits:
    """Passes that make operators fit, what a person should know of each, and what fits in no way."""

    passes: tuple[Pass, ...] = ()
    notes: tuple[str, ...] = ()
    stuck: tuple[Stuck, ...] = ()


# -- weights -----------------------------------------------------------------------------------------------------------


def split_columns(model: ir.Model, stored: Mapping[str, int], limit: int) -> Splits:
    """Products whose matrix takes more than `limit` bytes; `stored` gives bytes of a node's weights as they will be
    written, by the name of its result (its weights' own size where it says nothing)."""
    passes: list[Pass] = []
    notes: list[str] = []
    stuck: list[Stuck] = []
    for node in model.graph:
        matrix = matrix_of(node)
        name = node.outputs[0].name or ""
        nbytes = stored.get(name, matrix.tensor.nbytes) if matrix is not None else 0
        if matrix is None or nbytes <= limit:
            continue
        widest = {parts: _widest(matrix.columns, parts) for parts in range(2, MOST_PARTS + 1)}
        parts = next((n for n, width in widest.items() if width * nbytes <= limit * matrix.columns), 0)
        if not parts:
            least = -(-nbytes * widest[MOST_PARTS] // matrix.columns)
            reason = f"{MOST_PARTS} panels of its {matrix.columns} columns are too large"
            stuck.append(Stuck(_named(node), nbytes, least, reason))
            continue
        passes.append(SplitColumns(name, parts))
        notes.append(
            f"{_named(node)} has {human(nbytes)} of weights, and a segment may have {human(limit)}: "
            f"split into {len(panels(matrix.columns, parts))} by columns"
        )
    return Splits(tuple(passes), tuple(notes), tuple(stuck))


def _widest(columns: int, parts: int) -> int:
    return max(stop - start for start, stop in panels(columns, parts))


def _named(node: ir.Node) -> str:
    return f"{node.op_type} node {node.name!r}"


# -- activations -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Step:
    """A node as memory sees it. `source`: the node of the graph that it stands for or is a band of, None for a join."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: ir.Node | None = None


def _steps(model: ir.Model) -> list[_Step]:
    return [
        _Step(
            tuple(dict.fromkeys(value.name or "" for value in reads(node))),
            tuple(value.name or "" for value in node.outputs if value.name),
            node,
        )
        for node in model.graph
    ]


def live_bytes(steps: Sequence[_Step], sizes: Mapping[str, int], kept: Iterable[str]) -> list[dict[str, int]]:
    """Values in memory while each step runs, with their bytes.

    `kept` live to the end. Values without a size, inputs and weights count nothing.
    """
    last = {name: at for at, step in enumerate(steps) for name in step.inputs}
    last |= dict.fromkeys(kept, len(steps))
    held: dict[str, int] = {}
    result: list[dict[str, int]] = []
    for at, step in enumerate(steps):
        held.update((name, sizes.get(name, 0)) for name in step.outputs)
        result.append(dict(held))
        for name in (*step.inputs, *step.outputs):
            if last.get(name, at) <= at:
                held.pop(name, None)
    return result


def peak_bytes(model: ir.Model, sizes: Mapping[str, int]) -> int:
    """The most that lives beside any node."""
    live = live_bytes(_steps(model), sizes, [value.name or "" for value in model.graph.outputs])
    return max((sum(held.values()) for held in live), default=0)


@dataclasses.dataclass(frozen=True)
class _Region:
    """Nodes that could be computed by rows, in order; the last one's result leaves."""

    nodes: tuple[ir.Node, ...]
    axis: int

    @property
    def result(self) -> str:
        return self.nodes[-1].outputs[0].name or ""

    @property
    def inside(self) -> set[str]:
        return {node.outputs[0].name or "" for node in self.nodes}


def split_rows(model: ir.Model, sizes: Mapping[str, int], budget: int, host: int) -> Splits:
    """Regions that bring what lives beside each node down to `budget` bytes.

    The model may have dynamic dimensions; `sizes` are bytes at the largest ones, by name. A region in which one value
    exceeds `host` is left: the model that the result is compared with could not run.
    """
    return _RowPlanner(model, sizes, budget, host).plan()


class _RowPlanner:
    def __init__(self, model: ir.Model, sizes: Mapping[str, int], budget: int, host: int) -> None:
        self.sizes, self.budget, self.host = sizes, budget, host
        self.nodes = list(model.graph)
        self.order = {node: at for at, node in enumerate(self.nodes)}
        self.kept = {value.name or "" for value in model.graph.outputs}
        # What is in memory, as the graph will be: `table` also knows bands.
        self.steps = _steps(model)
        self.table = dict(sizes)
        self.split: set[ir.Node] = set()

    def plan(self) -> Splits:
        passes: list[Pass] = []
        notes: list[str] = []
        stuck: list[Stuck] = []
        tried: set[ir.Node | None] = set()
        while True:
            live = live_bytes(self.steps, self.table, self.kept)
            over = [(sum(held.values()), -at) for at, held in enumerate(live) if self.steps[at].source not in tried]
            peak, at = max(over, default=(0, 0))
            if peak <= self.budget:
                return Splits(tuple(passes), tuple(notes), tuple(stuck))
            node = self.steps[-at].source
            tried.add(node)
            if node is None or node in self.split:
                continue
            least = peak
            for region, parts, needs in self._candidates(node, live):
                least = min(least, needs)
                if needs <= self.budget:
                    self._replace(region, parts)
                    passes.append(SplitRows(_names(region), region.axis, parts))
                    notes.append(
                        f"{_named(node)} needs {human(peak)} of activations, and {human(self.budget)} may be used: "
                        f"{_shown(region)} computed in {parts} bands of rows"
                    )
                    break
            else:
                stuck.append(Stuck(_named(node), self._own_bytes(node), least, self._why(node)))

    # -- regions -----------------------------------------------------------------------------------------------------

    def _candidates(self, node: ir.Node, live: Sequence[Mapping[str, int]]) -> Iterator[tuple[_Region, int, int]]:
        """(region around the node, parts, bytes that it then needs), fewest parts first, then fewest nodes."""
        at = {step.source: index for index, step in enumerate(self.steps) if step.source not in self.split}
        regions = [(region, self._around(region, live, at)) for region in self._regions(node)]
        # What enters, what leaves, and its copy when the bands are joined: no number of parts makes these smaller.
        fitting = [(region, around) for region, around in regions if max(around) <= self.budget]
        # Where none fits, some say what the least budget would be.
        regions = fitting or sorted(regions, key=lambda each: max(each[1]))[:_REACH]
        regions.sort(key=lambda each: len(each[0].nodes))
        for parts in _PARTS:
            for region, (during, joining) in regions:
                try:
                    band = self._band_bytes(region, parts)
                except CannotSplit:
                    continue
                yield region, parts, max(during + band, joining) + parts * len(region.nodes) * NODE_BYTES

    def _regions(self, node: ir.Node) -> Iterator[_Region]:
        """Every region with one result that holds the node and lies within reach."""
        here = self.order[node]
        rank = len(node.outputs[0].shape) if node.outputs[0].shape is not None else 0
        for axis in dict.fromkeys(axis for axis in (-2, 2 - rank) if -rank <= axis < 0):
            for end in range(here, min(here + _REACH, len(self.nodes))):
                inside: list[ir.Node] = []
                for at in range(end, max(here - _REACH, -1), -1):
                    if self._belongs(self.nodes[at], axis, inside):
                        inside.append(self.nodes[at])
                        if node in inside:
                            yield _Region(tuple(reversed(inside)), axis)
                    elif at == end:
                        break

    def _belongs(self, node: ir.Node, axis: int, inside: Sequence[ir.Node]) -> bool:
        """Whether the node can be computed by rows, and only nodes inside read its result, by rows; the first may be
        read by all."""
        if node in self.split or not node.outputs or self.sizes.get(node.outputs[0].name or "", 0) > self.host:
            return False
        try:
            if not any(rows is not None for rows in needed(node, axis, (0, 1))):
                return False
            if not inside:
                return True
            result = node.outputs[0]
            if result.is_graph_output() or not result.uses():
                return False
            return all(
                use.node in inside and needed(use.node, axis, (0, 1))[use.idx] is not None for use in result.uses()
            )
        except CannotSplit:
            return False

    def _around(
        self, region: _Region, live: Sequence[Mapping[str, int]], at: Mapping[ir.Node | None, int]
    ) -> tuple[int, int]:
        """(bytes beside a band, bytes while the bands are joined): what enters is there until the last band has read
        it, and bands that are done wait for the others."""
        inside, result = region.inside, self.sizes.get(region.result, 0)
        entering = {value.name or "" for node in region.nodes for value in node.inputs if value is not None} - inside
        places = [at[node] for node in region.nodes]
        # Slices without a halo are made at once, as the runtime's optimizer makes one Split of them.
        sliced = {} if _has_halo(region) else _sliced(region, self.sizes)
        others = max(sum(n for name, n in live[p].items() if name not in inside | entering) for p in places)
        enters = sum(self.sizes.get(name, 0) for name in entering) + sum(sliced.values())
        after = live[places[-1] + 1] if places[-1] + 1 < len(live) else {}
        stays = sum(n for name, n in after.items() if name not in inside)
        return others + enters + result, min(others + enters, stays) + 2 * result

    def _band_bytes(self, region: _Region, parts: int) -> int:
        """Most bytes that bands take inside. Raises CannotSplit where one of them cannot be made.

        Where sizes are known beforehand, onnxruntime gives a value the buffer of an earlier one of equal size, and
        holds it from its first use to its last: bands of one height share buffers, but all of a band's are there all
        the time. A band of another height has its own beside them.
        """
        size, at, others = extent(region.nodes[-1].outputs[0], region.axis), 0, False
        if isinstance(size, int):
            if size < parts:
                raise CannotSplit(f"{region.result!r} has {size} rows")
            ranges = bands(size, parts)
            for rows in ranges:
                backward(region.nodes, region.axis, rows)
            # Of the highest ones that in the middle: it has a halo on both sides.
            at = max(range(parts), key=lambda each: (ranges[each][1] - ranges[each][0], -abs(2 * each - parts)))
            others = _has_halo(region) or size % parts != 0
        table: dict[str, int] = {}
        steps = _band(region, parts, at, self.sizes, table)
        live = max(sum(held.values()) for held in live_bytes(steps, table, steps[-1].outputs))
        if not isinstance(size, int):
            return live
        # Elementwise kernels work in place, or are part of the kernel in front of them.
        shared = sum(
            table[name]
            for step in steps
            if step.source is None or step.source.op_type not in POINTWISE
            for name in step.outputs
        )
        return shared + live if others else max(shared, live)

    def _replace(self, region: _Region, parts: int) -> None:
        """The region's steps become those of its bands, at the place of its last."""
        new = [step for at in range(parts) for step in _band(region, parts, at, self.sizes, self.table)]
        new.append(_Step(tuple(f"{region.result}@{at}" for at in range(parts)), (region.result,)))
        steps: list[_Step] = []
        for step in self.steps:
            if step.source is region.nodes[-1]:
                steps += new
            elif step.source not in region.nodes:
                steps.append(step)
        self.steps = steps
        self.split.update(region.nodes)

    def _own_bytes(self, node: ir.Node) -> int:
        """What the node takes alone; nothing where the host could not compute it either."""
        read, made = (
            sum(self.sizes.get(value.name or "", 0) for value in values)
            for values in (dict.fromkeys(reads(node)), node.outputs)
        )
        alone = max(read, made) if node.op_type in _ALONE else read + made
        return alone if alone <= self.host else 0

    def _why(self, node: ir.Node) -> str:
        """Why no region helped."""
        if any(self._regions(node)):
            return f"with up to {MOST_PARTS} bands of rows, what enters and leaves them is still too large"
        try:
            needed(node, -2, (0, 1))
        except CannotSplit as reason:
            return str(reason)
        return "what reads its result needs it whole"


def _band(region: _Region, parts: int, at: int, sizes: Mapping[str, int], table: dict[str, int]) -> list[_Step]:
    """The steps of one band; bytes of what they make go into `table`."""
    axis, result = region.axis, region.nodes[-1].outputs[0]
    size = extent(result, axis)
    held = backward(region.nodes, axis, bands(size, parts)[at] if isinstance(size, int) else (0, 1))
    steps: list[_Step] = []
    cut: set[str] = set()
    for node in region.nodes:
        inputs: list[str] = []
        for value, rows in zip(node.inputs, needed(node, axis, held[node.outputs[0]]), strict=True):
            name = value.name if value is not None else None
            if value is None or name is None:
                continue
            if rows is not None:
                band = f"{name}@{at}" if held.get(value) in (rows, None) else f"{name}@{at}{rows}"
                if band not in cut and held.get(value) != rows:
                    cut.add(band)
                    table[band] = _rows_bytes(value, axis, rows, sizes, parts)
                    steps.append(_Step((f"{name}@{at}" if value in held else name,), (band,)))
                name = band
            inputs.append(name)
        made = node.outputs[0]
        table[f"{made.name}@{at}"] = _rows_bytes(made, axis, held[made], sizes, parts)
        steps.append(_Step(tuple(dict.fromkeys(inputs)), (f"{made.name}@{at}",), node))
    return steps


def _has_halo(region: _Region) -> bool:
    return any(node.op_type in ("Conv", "MaxPool", "AveragePool") for node in region.nodes)


def _sliced(region: _Region, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each value from outside that is read by rows."""
    found: dict[str, int] = {}
    for node in region.nodes:
        for value, rows in zip(node.inputs, needed(node, region.axis, (0, 1)), strict=True):
            if value is not None and rows is not None and value.name not in region.inside:
                found[value.name or ""] = sizes.get(value.name or "", 0)
    return found


def _rows_bytes(value: ir.Value, axis: int, rows: tuple[int, int], sizes: Mapping[str, int], parts: int) -> int:
    size = extent(value, axis)
    nbytes = sizes.get(value.name or "", 0)
    return -(-nbytes * (rows[1] - rows[0]) // size) if isinstance(size, int) else -(-nbytes // parts)


def _names(region: _Region) -> tuple[str, ...]:
    return tuple(node.outputs[0].name or "" for node in region.nodes)


def _shown(region: _Region) -> str:
    kinds: Collection[str] = dict.fromkeys(node.op_type for node in region.nodes)
    return f"{'it is' if len(region.nodes) == 1 else f'{len(region.nodes)} nodes ({chr(44).join(kinds)}) are'}"
