"""Segments of least cost, by dynamic programming over what every segment would hold. Pure.

Any prefix of the order is a legal segment's end, so a partition is an ascending list of ends. Its cost is a sum over
segments and, where one is loaded while the one in front of it runs, over neighbours, the last and the first too. Where
segments do not meet in memory the choice among m ends takes O(m^2); where they do, its state is the last two cuts, and
the first, and it takes O(m^4).
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.partition.greedy import cut
from compile.partition.tables import Order, Table, Tables, candidates, legal_ends, neediest, peak_bytes, tables

# More than any cost; twice as much is still an int64.
NEVER = 1 << 61


class Loading(enum.Enum):
    """When weights come into memory. `KEPT`: before the first run, for good. `ALONE`: each segment's when its turn
    comes. `AHEAD`: each segment's while the one in front of it runs, in a circle."""

    KEPT = "kept"
    ALONE = "alone"
    AHEAD = "ahead"


# Ends that are tried at most. Of an order of 20,000 nodes 512 take 22 MB and half a second, 128 of the others 8 MB and
# two seconds. Of SmolLM2's 1751 ends, 512 give cuts that cost as little as all do, or 1 % more.
MOST_ENDS = {Loading.KEPT: 512, Loading.ALONE: 512, Loading.AHEAD: 128}


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a partition must keep to.

    `budget`: bytes for weights and activations, after all that does not depend on cuts (runtime, workspace, state).
    `segment`: most weight bytes of one segment, wherever a legal cut can keep to it.
    `count`: exactly so many segments. `forced`: ends that must be.
    """

    loading: Loading = Loading.KEPT
    budget: int | None = None
    segment: int | None = None
    count: int | None = None
    forced: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a board takes: bytes a second from its storage and in its memory, and ns to start a segment."""

    storage: float
    memory: float
    launch_ns: int


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Ends of the chosen segments and their cost, beside those of the greedy baseline (None: it breaks a rule).

    `bound_ns`: no partition can cost less. `exact`: every legal cut was tried, so this one costs least.
    """

    ends: tuple[int, ...]
    cost_ns: int
    greedy_ends: tuple[int, ...]
    greedy_ns: int | None
    bound_ns: int
    exact: bool


class NoCutsError(Exception):
    """No partition keeps to the rules."""


def best_cuts(order: Order, rules: Rules, rates: Rates, most: int | None = None) -> Cuts:
    """The partition of least cost: exposed loading, copies of what crosses, starts of segments.

    Of more than `most` legal ends (MOST_ENDS) some are left out: then the result can cost more than the best, never
    more than the greedy one, and `bound_ns` says how much at most. Raises NoCutsError.
    """
    if not order.positions:
        return Cuts((0,), rates.launch_ns, (0,), rates.launch_ns, rates.launch_ns, exact=True)
    greedy = cut(order.positions, _greedy_limit(order, rules))
    legal = legal_ends(order.positions)
    ends = candidates(order.positions, rules.forced | {*greedy}, most or MOST_ENDS[rules.loading])
    problem = _Problem(tables(order, ends), legal, rules, rates)
    chosen = problem.solve(rules.budget)
    if chosen is None:
        raise NoCutsError
    return Cuts(
        tuple(problem.tables.bounds[index] for index in chosen[1:]),
        problem.cost(chosen),
        tuple(greedy),
        problem.judge([problem.tables.bounds.index(end) for end in (0, *greedy)]),
        bound_ns(order, rules, rates, 0 if rules.loading is Loading.KEPT else int(problem.tables.weights[0, -1])),
        exact=len(ends) == len(legal),
    )


def least_budget(order: Order, rules: Rules, rates: Rates, most: int | None = None) -> tuple[int, int] | None:
    """The budget from which on there are cuts, and the node at work, in those, when it is needed; by bisection.

    None where the other rules leave no cuts. As `best_cuts` it looks at no more than `most` legal ends.
    """
    ends = candidates(order.positions, rules.forced, most or MOST_ENDS[rules.loading])
    problem = _Problem(tables(order, ends), legal_ends(order.positions), rules, rates)
    return problem.least_budget(order)


def bound_ns(order: Order, rules: Rules, rates: Rates, streamed: int) -> int:
    """No cuts cost less where each pass must read `streamed` bytes: all work hides loading, and nothing is copied."""
    hidden = 0 if rules.loading is Loading.ALONE else sum(order.work_ns)
    fewest = max(rules.count or 1, len(rules.forced - {len(order.positions)}) + 1)
    return fewest * rates.launch_ns + max(math.floor(streamed / rates.storage * 1e9) - hidden, 0)


def _greedy_limit(order: Order, rules: Rules) -> int:
    """Weight bytes of a segment with which a first-fit keeps to the budget, if activations peak in every segment."""
    total = sum({name: nbytes for position in order.positions for name, nbytes in position.weights}.values())
    limits = [total, *([rules.segment] if rules.segment is not None else [])]
    if rules.budget is not None and rules.loading is not Loading.KEPT:
        room = rules.budget - peak_bytes(order)
        limits.append(room // 2 if rules.loading is Loading.AHEAD else room)
    return max(min(limits), 0)


class _Problem:
    """Tables, rules and rates made into costs, and which segments may be."""

    def __init__(self, made: Tables, legal: Sequence[int], rules: Rules, rates: Rates) -> None:
        self.tables, self._rules, self._rates = made, rules, rates
        self._own = rates.launch_ns + _ns(made.copied, rates.memory)
        kept = rules.loading is Loading.KEPT
        self._load = np.zeros_like(made.weights) if kept else _ns(made.weights, rates.storage)
        self._need = made.active + (made.weights[0, -1] if kept else made.weights)
        self._may = np.triu(np.ones(made.weights.shape, bool), 1) & ~_parted(made.bounds, sorted(rules.forced))
        if rules.segment is not None:
            self._may &= (made.weights <= rules.segment) | ~_parted(made.bounds, legal)

    def solve(self, budget: int | None) -> list[int] | None:
        """Indices of the best partition's boundaries, from 0 on; None where no partition keeps to the rules."""
        room = NEVER if budget is None else budget
        return self._ahead(room) if self._rules.loading is Loading.AHEAD else self._apart(room)

    def _apart(self, budget: int) -> list[int] | None:
        """best[k, b]: the least cost up to boundary b, with k segments where their number is given."""
        count, size = self._rules.count, len(self.tables.bounds)
        step = np.where(self._may & (self._need <= budget), self._own + self._load, NEVER)
        best = np.full(((count or 0) + 1, size), NEVER, np.int64)
        parent = np.zeros(best.shape, np.int32)
        best[0, 0] = 0
        for b in range(1, size):
            total = best[:, :b] + step[:b, b]
            before = total.argmin(1)
            cost = total[np.arange(len(total)), before]
            _enter(best[:, b], cost, count)
            _enter(parent[:, b], before, count)
        if best[-1, -1] >= NEVER:
            return None
        layer, chosen = len(best) - 1, [size - 1]
        while chosen[0]:
            chosen.insert(0, int(parent[layer, chosen[0]]))
            layer -= count is not None
        return chosen

    def _ahead(self, budget: int) -> list[int] | None:
        """The best of all first segments: whose loading hides under the last one depends on both."""
        end = len(self.tables.bounds) - 1
        least, chosen = NEVER, None
        if self._may[0, end] and self._need[0, end] <= budget and self._rules.count in (None, 1):
            # Nothing runs that its loading could hide under.
            least, chosen = int(self._own[0, end] + self._load[0, end]), [0, end]
        for first in range(1, end):
            if self._may[0, first] and self._need[0, first] <= budget:
                cost, found = self._from(first, budget)
                if cost < least:
                    least, chosen = cost, found
        return chosen

    def _from(self, first: int, budget: int) -> tuple[int, list[int]]:
        """best[k, a, b]: the least cost up to boundary b with [a, b) the last segment, without the first one's loading,
        which closes the circle."""
        count, size = self._rules.count, len(self.tables.bounds)
        streamed, load, work = self.tables.weights, self._load, self.tables.work_ns
        best = np.full(((count or 0) + 1, size, size), NEVER, np.int64)
        parent = np.zeros(best.shape, np.int32)
        best[0 if count is None else 1, 0, first] = self._own[0, first]
        for b in range(first, size - 1):
            (starts,) = np.nonzero((best[:, :b, b] < NEVER).any(0))
            if not len(starts):
                continue
            next_ends = slice(b + 1, size)
            fits = self._may[b, next_ends] & (self._need[starts, b][:, None] + streamed[b, next_ends] <= budget)
            exposed = np.maximum(load[b, next_ends] - work[starts, b][:, None], 0)
            total = best[:, starts, b][:, :, None] + np.where(fits, exposed, NEVER)
            before = total.argmin(1)
            cost = np.take_along_axis(total, before[:, None, :], 1)[:, 0] + self._own[b, next_ends]
            _enter(best[:, b, next_ends], cost, count)
            _enter(parent[:, b, next_ends], starts[before], count)
        fits = self._need[:, -1] + streamed[0, first] <= budget
        total = best[-1, :, -1] + np.where(fits, np.maximum(load[0, first] - work[:, -1], 0), NEVER)
        last = int(total.argmin())
        if total[last] >= NEVER:
            return NEVER, []
        layer, chosen = len(best) - 1, [last, size - 1]
        while chosen[0]:
            chosen.insert(0, int(parent[layer, chosen[0], chosen[1]]))
            layer -= count is not None
        return int(total[last]), chosen

    def cost(self, chosen: Sequence[int]) -> int:
        """Of a partition (ns), whether it keeps to the rules or not."""
        parts = list(itertools.pairwise(chosen))
        hidden = [0] * len(parts)
        if self._rules.loading is Loading.AHEAD and len(parts) > 1:
            hidden = [int(self.tables.work_ns[part]) for part in (parts[-1], *parts[:-1])]
        return sum(
            int(self._own[part]) + max(int(self._load[part]) - under, 0)
            for part, under in zip(parts, hidden, strict=True)
        )

    def needs(self, chosen: Sequence[int]) -> list[int]:
        """Bytes that each segment's turn takes."""
        parts = list(itertools.pairwise(chosen))
        ahead = [0] * len(parts)
        if self._rules.loading is Loading.AHEAD and len(parts) > 1:
            ahead = [int(self.tables.weights[part]) for part in (*parts[1:], parts[0])]
        return [int(self._need[part]) + more for part, more in zip(parts, ahead, strict=True)]

    def judge(self, chosen: Sequence[int]) -> int | None:
        """Cost of a partition (ns), None where it breaks a rule."""
        parts = list(itertools.pairwise(chosen))
        budget, count = self._rules.budget, self._rules.count
        keeps = all(self._may[part] for part in parts) and count in (None, len(parts))
        return self.cost(chosen) if keeps and (budget is None or max(self.needs(chosen)) <= budget) else None

    def least_budget(self, order: Order) -> tuple[int, int] | None:
        """See the function of that name."""
        low, high = -1, int(self._need.max() + self.tables.weights.max())
        chosen = self.solve(high)
        if chosen is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            found = self.solve(middle)
            low, high, chosen = (middle, high, chosen) if found is None else (low, middle, found)
        needs = self.needs(chosen)
        start, end = (self.tables.bounds[index] for index in chosen[needs.index(max(needs)) :][:2])
        return high, neediest(order, start, end)


def _parted(bounds: Sequence[int], ends: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which segments have one of `ends` (ascending) strictly inside."""
    before = np.array([bisect.bisect_left(ends, at) for at in bounds])
    upto = np.array([bisect.bisect_right(ends, at) for at in bounds])
    return before[None, :] > upto[:, None]


def _enter(layers: npt.NDArray[Any], found: npt.NDArray[Any], count: int | None) -> None:
    """Note what one more segment makes of every layer; where segments are counted, in the next one."""
    found = np.minimum(found, NEVER)
    if count is None:
        layers[:] = found
    else:
        layers[1:] = found[:-1]


def _ns(nbytes: Table, rate: float) -> Table:
    return np.ceil(nbytes / rate * 1e9).astype(np.int64)
