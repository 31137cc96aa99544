"""Which segments a model is cut into: what a person asked for, the host's limit and the board's budget, in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from compile import memory
from compile.errors import OptionError
from compile.graph import ir
from compile.partition.cuts import Cuts, Loading, NoCutsError, Rates, Rules, best_cuts
from compile.partition.graph import order_of
from compile.partition.tables import Order, legal_ends
from compile.partition.work import work_ns
from targets.arena import Arena
from targets.board import Board
from targets.budget import budget_bytes
from targets.bundle import Residency
from targets.errors import BudgetError, did_you_mean
from targets.tensor import human

MOST_SEGMENTS = 99
"""A person can ask for: segment files are numbered in two digits, and the work of choosing grows with their number."""


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a person can ask of the cuts: exactly so many segments, most weight bytes of one, and cuts right behind the
    nodes that make these values."""

    segments: int | None = None
    max_segment: int | None = None
    cut_at: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.segments is not None and not 1 <= self.segments <= MOST_SEGMENTS:
            raise OptionError(f"--segments {self.segments} is no number of segments", f"give 1 to {MOST_SEGMENTS}")
        if self.max_segment is not None and self.max_segment < 1:
            raise OptionError(
                f"--max-segment {self.max_segment} leaves no room for a weight", "give a size like 200MiB"
            )

    def recorded(self) -> dict[str, str]:
        """What was asked for, as a manifest keeps it; nothing when nothing was."""
        told = {
            "segments": str(self.segments or ""),
            "max_segment": str(self.max_segment or ""),
            "cut_at": " ".join(self.cut_at),
        }
        return {name: value for name, value in told.items() if value}


def choose_cuts(
    model: ir.Model,
    crossing: Mapping[str, int],
    nbytes: Mapping[str, int],
    wishes: Wishes,
    limit: int,
    room: int | None,
    board: Board,
) -> Cuts:
    """The cuts of least cost on the board.

    `crossing` gives bytes of every value that may cross a cut, `nbytes` of all others that are known. A segment has at
    most `limit` bytes of weights wherever a cut can keep to it. `room`: bytes for weights and activations of segments
    that are streamed, None for segments that stay loaded. Raises OptionError, BudgetError.
    """
    nodes = list(model.graph)
    work = [work_ns(node, {**nbytes, **crossing}, board) for node in nodes]
    order = order_of(model, crossing, nbytes, work)
    forced = frozenset(_end_behind(name, nodes, order) for name in wishes.cut_at)
    if wishes.max_segment is not None:
        limit = min(limit, _checked(wishes.max_segment, nodes, order))
    loading = Loading.KEPT if room is None else Loading.AHEAD
    rules = Rules(loading, room, limit, wishes.segments, forced)
    rates = Rates(
        board.bandwidth.storage_read_mb_s * 1e6, board.bandwidth.dram_gb_s * 1e9, round(board.runtime.launch_us * 1e3)
    )
    try:
        return best_cuts(order, rules, rates)
    except NoCutsError as refused:
        if refused.least is None or room is None:
            raise _unkeepable(wishes, order, limit) from None
        budget = budget_bytes(board)
        raise BudgetError(
            f"no segments fit {board.name}: the budget is {human(budget)}, and about "
            f"{human(budget + refused.least - room)} would do, which {_described(nodes[refused.node])} needs",
            "quantize further (--scheme int4), use smaller shapes, or choose a larger board",
        ) from None


def streaming_room(
    board: Board, needs: memory.Footprint, active: int, raw: int, slots: int, requested: Residency | None, blocked: bool
) -> int | None:
    """What the board leaves for weights and activations of streamed segments, in bytes of the weights as they are
    stored (negative where that is less than nothing); None where all segments can stay loaded.

    `needs` is that of the model as one segment, `raw` the bytes of its weights, `active` the peak of its activations.
    """
    arena = Arena(active, active, memory.ALIGNMENT, ())
    residencies, plan = memory.choose(board, arena, needs, slots, requested, blocked)
    if Residency.STREAMED not in residencies:
        return None
    (whole,) = needs.weights
    by_cuts = ("mapped_weights", "activations")
    others = sum(term.nbytes for term in plan.phase("run").terms if term.name not in by_cuts)
    laid_out = whole.copies + whole.mapped - whole.unread
    return (plan.budget_bytes - others) * raw // max(laid_out, raw, 1)


def _end_behind(name: str, nodes: list[ir.Node], order: Order) -> int:
    at = next((at for at, node in enumerate(nodes) if any(value.name == name for value in node.outputs)), None)
    if at is None:
        inner = [value.name for node in nodes for value in node.outputs if value.name]
        raise OptionError(f"--cut-at: no value {name!r} is made by the compiled graph", did_you_mean(name, inner))
    if at + 1 not in legal_ends(order.positions):
        raise OptionError(
            f"--cut-at: no cut may be behind {name!r}: a value crosses there whose size is not known, or which the "
            "source model does not have",
            did_you_mean(name, [_made_by(nodes[end - 1]) for end in legal_ends(order.positions)[:-1]]),
        )
    return at + 1


def _checked(most: int, nodes: list[ir.Node], order: Order) -> int:
    """Whether cuts can keep to it at all: weights between two neighbouring legal cuts cannot be parted."""
    start = 0
    for end in legal_ends(order.positions):
        held = {name: size for position in order.positions[start:end] for name, size in position.weights}
        if sum(held.values()) > most:
            at = max(range(start, end), key=lambda node: sum(dict(order.positions[node].weights).values()))
            raise OptionError(
                f"--max-segment {human(most)}: {_described(nodes[at])}, with what no cut can part from it, has "
                f"{human(sum(held.values()))} of weights",
                f"say --max-segment {sum(held.values())} or more",
            )
        start = end
    return most


def _unkeepable(wishes: Wishes, order: Order, limit: int) -> OptionError:
    most = len(legal_ends(order.positions))
    asked = f"--segments {wishes.segments}" if wishes.segments is not None else "--cut-at"
    return OptionError(
        f"{asked}: there are no such cuts; the graph can have {most} segments at most, and each may have "
        f"{human(limit)} of weights",
        "ask for another number of segments, or raise --max-segment or --host-memory",
    )


def _described(node: ir.Node) -> str:
    return f"{node.op_type} node {node.name!r}"


def _made_by(node: ir.Node) -> str:
    return next((value.name for value in node.outputs if value.name), "")
