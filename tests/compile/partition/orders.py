"""Random orders of nodes, and a slow and plain reading of what every partition of one holds and costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from compile.partition.cuts import Loading, Rates, Rules
from compile.partition.greedy import Position
from compile.partition.tables import Activation, Order


@st.composite
def orders(draw: st.DrawFn, most: int = 10) -> Order:
    """Up to `most` nodes: weights that several use, values that jump, results, cuts that are not legal."""
    count = draw(st.integers(1, most))
    pool = [(f"w{index}", draw(st.integers(1, 100))) for index in range(draw(st.integers(0, most)))]
    activations = []
    for made in range(count):
        for _ in range(draw(st.integers(0, 2))):
            readers = draw(st.sets(st.integers(made + 1, count - 1), max_size=3)) if made + 1 < count else set()
            kept = draw(st.booleans()) and draw(st.booleans())
            activations.append(Activation(made, tuple(sorted(readers)), draw(st.integers(0, 60)), kept))
    positions = []
    for node in range(count):
        weights = draw(st.lists(st.sampled_from(pool), max_size=3, unique=True)) if pool else []
        crossing = sum(a.nbytes for a in activations if a.made <= node < a.last)
        positions.append(Position(tuple(weights), None if draw(st.integers(0, 5)) == 0 else crossing))
    return Order(positions, activations, [draw(st.integers(0, 40)) for _ in range(count)])


@st.composite
def problems(draw: st.DrawFn, loadings: Sequence[Loading], most: int = 10) -> tuple[Order, Rules, Rates]:
    """An order, rules that can be too tight, and rates at which nothing is negligible."""
    order = draw(orders(most))
    loading = draw(st.sampled_from(loadings))
    total = sum({n: b for position in order.positions for n, b in position.weights}.values())
    legal = [at + 1 for at, position in enumerate(order.positions[:-1]) if position.crossing is not None]
    rules = Rules(
        loading,
        budget=draw(st.none() | st.integers(0, 2 * total + 120)),
        segment=draw(st.none() | st.none() | st.integers(0, 200)),
        count=draw(st.none() | st.none() | st.integers(1, 4)),
        forced=frozenset(draw(st.sets(st.sampled_from(legal), max_size=2)) if legal and draw(st.booleans()) else ()),
    )
    return (
        order,
        rules,
        Rates(draw(st.sampled_from([1e9, 3e9])), draw(st.sampled_from([7e9, 1e9])), draw(st.integers(0, 9))),
    )


def partitions(order: Order) -> Iterator[tuple[int, ...]]:
    """Every list of ends at legal places."""
    count = len(order.positions)
    legal = [at + 1 for at, position in enumerate(order.positions[:-1]) if position.crossing is not None]
    for size in range(len(legal) + 1):
        for inner in itertools.combinations(legal, size):
            yield (*inner, count)


def weights_of(order: Order, start: int, end: int) -> dict[str, int]:
    return {name: nbytes for position in order.positions[start:end] for name, nbytes in position.weights}


def active_bytes(order: Order, start: int, end: int) -> int:
    """The most of activations in memory while a segment runs: an engine keeps its inputs until it ends."""
    most = 0
    for node in range(start, end):
        there = 0
        for value in order.activations:
            needed_until = len(order.positions) if value.kept else value.last
            if value.made < start:
                there += value.nbytes if needed_until >= start else 0
            elif value.made <= node <= needed_until:
                there += value.nbytes
        most = max(most, there)
    return most


def judge(order: Order, ends: Sequence[int], rules: Rules, rates: Rates) -> tuple[int | None, int]:
    """Cost of a partition in ns, None where it breaks a rule other than the budget; and the budget it needs."""
    count = len(order.positions)
    legal = {end for other in partitions(order) for end in other} if count <= 10 else None
    parts = list(itertools.pairwise((0, *ends)))
    assert ends[-1] == count
    assert all(start < end for start, end in parts)
    assert legal is None or legal >= set(ends)
    everything = weights_of(order, 0, count)
    streamed = [sum(weights_of(order, *part).values()) for part in parts]
    several = len(parts) > 1
    cost = needed = 0
    for index, (start, end) in enumerate(parts):
        there = active_bytes(order, start, end)
        if rules.loading is Loading.KEPT:
            there += sum(everything.values())
        else:
            there += streamed[index]
            loading = math.ceil(streamed[index] / rates.storage * 1e9)
            if rules.loading is Loading.AHEAD and several:
                there += streamed[(index + 1) % len(parts)]
                loading = max(loading - sum(order.work_ns[slice(*parts[index - 1])]), 0)
            cost += loading
        copied = 0
        for value in order.activations:
            if value.made < start:
                copied += value.nbytes if any(start <= reader < end for reader in value.readers) else 0
            elif value.made < end:
                copied += value.nbytes if any(reader >= end for reader in value.readers) else 0
        cost += rates.launch_ns + math.ceil(copied / rates.memory * 1e9)
        needed = max(needed, there)
    broken = rules.count not in (None, len(parts)) or not rules.forced <= set(ends)
    if rules.segment is not None:
        for start, end in parts:
            divisible = any(order.positions[at].crossing is not None for at in range(start, end - 1))
            broken |= divisible and sum(weights_of(order, start, end).values()) > rules.segment
    return None if broken else cost, needed
