"""Which weights stay in memory while the others are streamed. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

from compile.partition.cuts import Cuts, Loading, NoCutsError, Rates, Rules, best_cuts, bound_ns
from compile.partition.tables import Order

# Weights that are tried, one after the other; each costs a choice of cuts.
MOST_TRIES = 64


@dataclasses.dataclass(frozen=True)
class Pinning:
    """Weights that stay in memory, the cuts that go with them, and what no pinning and no cuts can go below (ns)."""

    pinned: frozenset[str]
    cuts: Cuts
    bound_ns: int


def pin(order: Order, rules: Rules, rates: Rates, most: int | None = None) -> Pinning:
    """Pin what lowers the cost, beside `rules.pinned`: first what is streamed most often, of equals the largest.

    Each is tried once and kept where the best cuts then cost less, so it is a descent; the bound tells its gap.
    Raises NoCutsError when there are no cuts with or without.
    """
    if rules.loading is Loading.KEPT or rules.budget is None:
        raise ValueError("pinning is for segments that are streamed under a budget")
    cuts: Cuts | None = None
    with contextlib.suppress(NoCutsError):
        cuts = best_cuts(order, rules, rates, most)
    pinned = rules.pinned
    for name in _tried(order, cuts, rules):
        try:
            found = best_cuts(order, dataclasses.replace(rules, pinned=pinned | {name}), rates, most)
        except NoCutsError:
            continue
        if cuts is None or found.cost_ns < cuts.cost_ns:
            pinned, cuts = pinned | {name}, found
    if cuts is None:
        raise NoCutsError
    return Pinning(pinned, cuts, bound_ns(order, rules, rates, max(sum(_sizes(order).values()) - rules.budget, 0)))


def _tried(order: Order, cuts: Cuts | None, rules: Rules) -> list[str]:
    sizes = _sizes(order)
    times = dict.fromkeys(sizes, 0)
    for start, end in itertools.pairwise((0, *(cuts.ends if cuts else range(1, len(order.positions) + 1)))):
        for name in {name for position in order.positions[start:end] for name, _ in position.weights}:
            times[name] += 1
    names = [name for name in sizes if name not in rules.pinned]
    return sorted(names, key=lambda name: (-times[name], -sizes[name], name))[:MOST_TRIES]


def _sizes(order: Order) -> dict[str, int]:
    return {name: nbytes for position in order.positions for name, nbytes in position.weights}
