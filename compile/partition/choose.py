"""Which segments a model is cut into: what a person asked for, the host's limit and the board's budget, in one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from compile.errors import OptionError
from compile.graph import ir
from compile.partition.cuts import Cuts, Loading, NoCutsError, Rates, Rules, best_cuts, bound_ns, least_budget
from compile.partition.graph import order_of
from compile.partition.tables import Order, legal_ends, tables
from compile.partition.work import work_ns
from targets.board import Board
from targets.budget import RING, MemoryPlan, budget_bytes
from targets.errors import BudgetError, did_you_mean
from targets.tensor import human

# What is tried as the limit of a segment's weights for a board that streams: all weights divided by each of these.
DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the board makes of a partition: bytes by which its plan exceeds the budget (0: it fits), and of each segment
    the bytes that every pass reads (0: it stays in memory).

    `read` is empty where all segments stay. Else `room` are the bytes left for weights and activations, `whole` what
    a pass would read if nothing stayed.
    """

    excess: int
    read: tuple[int, ...] = ()
    room: int = 0
    whole: int = 0

    @classmethod
    def of(cls, plan: MemoryPlan) -> Outcome:
        """What a certificate says."""
        excess = max(max(phase.total_bytes for phase in plan.phases) - plan.budget_bytes, 0)
        if plan.sweep is None:
            return cls(excess)
        sizes, streamed = plan.sweep.segment_bytes, plan.sweep.streamed
        by_cuts = ("mapped_weights", RING, "activations")
        others = sum(term.nbytes for term in plan.phase("run").terms if term.name not in by_cuts)
        read = tuple(nbytes if at in streamed else 0 for at, nbytes in enumerate(sizes))
        return cls(excess, read, plan.budget_bytes - others, sum(sizes))


Judge = Callable[[Sequence[int]], Outcome]
"""The outcome of cutting at these ends."""


def choose_cuts(
    model: ir.Model,
    crossing: Mapping[str, int],
    nbytes: Mapping[str, int],
    wishes: Wishes,
    limit: int,
    board: Board,
    judge: Judge,
) -> Cuts:
    """The cuts of least cost on the board.

    `crossing` gives bytes of every value that may cross a cut, `nbytes` of all others that are known. A segment has at
    most `limit` bytes of weights wherever a cut can keep to it. Raises OptionError, BudgetError.
    """
    nodes = list(model.graph)
    order = order_of(model, crossing, nbytes, [work_ns(node, {**nbytes, **crossing}, board) for node in nodes])
    forced = frozenset(_end_behind(name, nodes, order) for name in wishes.cut_at)
    if wishes.max_segment is not None:
        limit = min(limit, _checked(wishes.max_segment, nodes, order))
    rules = Rules(segment=limit, count=wishes.segments, forced=forced)
    rates = Rates(
        board.bandwidth.storage_read_mb_s * 1e6, board.bandwidth.dram_gb_s * 1e9, round(board.runtime.launch_us * 1e3)
    )
    try:
        cuts = best_cuts(order, rules, rates)
    except NoCutsError:
        raise _unkeepable(wishes, order, limit) from None
    whole = judge([len(nodes)])
    if not whole.excess or not whole.read:
        return cuts
    found = _streamed(order, rules, rates, whole, judge)
    if found.excess:
        found, at = _leanest(order, rules, rates, judge, found)
        budget = budget_bytes(board)
        if found.excess:
            raise BudgetError(
                f"no segments fit {board.name}: the budget is {human(budget)}; {human(budget + found.excess)} would "
                f"do, for {_described(nodes[at])}",
                "quantize further (--scheme int4), use smaller shapes, or choose a larger board",
            )
    return found.cuts


@dataclasses.dataclass(frozen=True, order=True)
class _Streamed:
    """Cuts of a model that the board cannot hold as a whole; the lesser are the better."""

    excess: int
    cost_ns: int
    cuts: Cuts = dataclasses.field(compare=False)


def _streamed(order: Order, rules: Rules, rates: Rates, whole: Outcome, judge: Judge) -> _Streamed:
    """Of the best cuts that read ahead in the whole room, and of those under ever smaller limits, the ones that cost
    least with what the board then holds and streams.

    Small segments let it hold more and stream less; each of them costs a start and copies of what crosses.
    """
    total = _weight_bytes(order, 0, len(order.positions))
    limits = [min(rules.segment or total, total // divisor) for divisor in DIVISORS]
    tried = [Rules(Loading.AHEAD, whole.room, rules.segment, rules.count, rules.forced)]
    tried += [dataclasses.replace(rules, segment=limit) for limit in dict.fromkeys(limits)]
    found: dict[tuple[int, ...], _Streamed] = {}
    greedy: list[_Streamed] = []
    for each in tried:
        with contextlib.suppress(NoCutsError):
            cuts = best_cuts(order, each, rates)
            if cuts.ends not in found:
                found[cuts.ends] = _priced(order, cuts, cuts.ends, rates, judge)
            if rules.count is None and not rules.forced:
                greedy.append(found.get(cuts.greedy_ends) or _priced(order, cuts, cuts.greedy_ends, rates, judge))
    best, baseline = min(found.values()), min(greedy, default=None)
    if baseline is not None and baseline < best:
        best = baseline
    fits = baseline is not None and not baseline.excess
    cuts = Cuts(
        best.cuts.ends,
        best.cost_ns,
        baseline.cuts.ends if baseline else best.cuts.greedy_ends,
        baseline.cost_ns if baseline and fits else None,
        bound_ns(order, rules, rates, max(whole.whole - whole.room, 0)),
        exact=False,
    )
    return _Streamed(best.excess, best.cost_ns, cuts)


def _leanest(order: Order, rules: Rules, rates: Rates, judge: Judge, otherwise: _Streamed) -> tuple[_Streamed, int]:
    """The cuts that need the least memory of all, where that is less than the others do; and the node that needs it."""
    ahead = dataclasses.replace(rules, loading=Loading.AHEAD)
    least = least_budget(order, ahead, rates)
    if least is None:
        return otherwise, 0
    cuts = best_cuts(order, dataclasses.replace(ahead, budget=least[0]), rates)
    return min(otherwise, _priced(order, cuts, cuts.ends, rates, judge)), least[1]


def _priced(order: Order, cuts: Cuts, ends: tuple[int, ...], rates: Rates, judge: Judge) -> _Streamed:
    """Those ends with the loading that the board's plan leaves exposed: what is streamed is read while the segments run
    from the streamed one in front of it on."""
    outcome = judge(ends)
    made = tables(order, ends)
    parts = [(at, at + 1) for at in range(len(ends))]
    cost = sum(rates.launch_ns + math.ceil(int(made.copied[part]) / rates.memory * 1e9) for part in parts)
    streamed = [at for at, nbytes in enumerate(outcome.read) if nbytes]
    for before, at in zip((streamed[-1:] + streamed)[: len(streamed)], streamed, strict=True):
        under = range(before, at) if before < at else (*range(before, len(ends)), *range(at))
        hidden = sum(int(made.work_ns[parts[step]]) for step in under) if before != at else 0
        cost += max(math.ceil(outcome.read[at] / rates.storage * 1e9) - hidden, 0)
    return _Streamed(outcome.excess, cost, dataclasses.replace(cuts, ends=ends))


def _weight_bytes(order: Order, start: int, end: int) -> int:
    return sum({name: size for position in order.positions[start:end] for name, size in position.weights}.values())


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
        held = _weight_bytes(order, start, end)
        if held > most:
            at = max(range(start, end), key=lambda node: sum(dict(order.positions[node].weights).values()))
            raise OptionError(
                f"--max-segment {human(most)}: {_described(nodes[at])}, with what no cut can part from it, has "
                f"{human(held)} of weights",
                f"say --max-segment {held} or more",
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
