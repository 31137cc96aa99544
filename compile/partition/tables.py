"""A graph in one order of its nodes, in bytes, and exact tables of what every segment of it would hold. Pure.

While a segment [i, j) runs there are in memory its distinct weights, and of activations

    arriving(i)  every value that was made before i and is still needed: what it takes, and what only passes by
    live(i, t)   what it has made up to node t and is still needed, results of the graph included; the most over t

For a given node all of these are vectors over the starts i, in which each use of a weight or a value changes one slice:
a weight that was last used by node q is new to all segments that begin behind q. So the tables of m candidate ends take
O(m) for each node and each use.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from compile.partition.greedy import Position

Table = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Activation:
    """A value that node `made` makes and the nodes `readers` read (ascending); `kept`: a result, there to the end."""

    made: int
    readers: tuple[int, ...]
    nbytes: int
    kept: bool = False

    @property
    def last(self) -> int:
        return self.readers[-1] if self.readers else self.made


@dataclasses.dataclass(frozen=True)
class Order:
    """Nodes in the order in which they run, what they make, and what each takes at least to compute (ns)."""

    positions: Sequence[Position]
    activations: Sequence[Activation]
    work_ns: Sequence[int]


def legal_ends(positions: Sequence[Position]) -> list[int]:
    """Where a segment may end: behind the last node, and wherever what crosses is known."""
    inner = [at + 1 for at, position in enumerate(positions[:-1]) if position.crossing is not None]
    return [*inner, len(positions)]


def candidates(positions: Sequence[Position], needed: Collection[int], most: int) -> list[int]:
    """At most about `most` legal ends, `needed` among them: of each stretch of equal weight that with the fewest bytes
    crossing, the latest of equals."""
    ends = legal_ends(positions)
    if len(ends) <= most:
        return ends
    seen: set[str] = set()
    filled, weights = 0, []
    for position in positions:
        new = {name: nbytes for name, nbytes in position.weights if name not in seen}
        seen.update(new)
        filled += sum(new.values())
        weights.append(filled)
    # Nodes count a little, so that a stretch without weights is not one candidate.
    share = max(filled // len(positions) // 4, 1)
    place = [weights[end - 1] + share * end for end in ends]
    stretch = max(place[-1] // max(most - len(needed), 1), 1)
    best: dict[int, int] = {}
    for end, at in zip(ends, place, strict=True):
        held = best.get(at // stretch)
        if held is None or (positions[end - 1].crossing or 0) <= (positions[held - 1].crossing or 0):
            best[at // stretch] = end
    return sorted({*best.values(), *({*needed} & {*ends}), len(positions)})


@dataclasses.dataclass(frozen=True)
class Tables:
    """What every segment [bounds[a], bounds[b]) would have: bytes, int64 [len(bounds), len(bounds)], upper triangle.

    `weights`: its distinct weights, `active`: the most of activations that are in memory at once, `copied`: taken from
    earlier segments and given to later ones, `work_ns`: its nodes' work, in ns.
    """

    bounds: list[int]
    weights: Table
    active: Table
    copied: Table
    work_ns: Table


def tables(order: Order, ends: Sequence[int]) -> Tables:
    """The tables for those ends."""
    at = [0, *ends]
    size = len(at)
    weights, active, copied = (np.zeros((size, size), np.int64) for _ in range(3))
    # Of each start, for the segment from it to the node that is looked at.
    held, taken, live, most, given = (np.zeros(size, np.int64) for _ in range(5))
    arriving = np.zeros(size, np.int64)
    made: list[list[Activation]] = [[] for _ in order.positions]
    read: list[list[tuple[Activation, int]]] = [[] for _ in order.positions]
    for value in order.activations:
        made[value.made].append(value)
        for before, reader in itertools.pairwise((value.made, *value.readers)):
            read[reader].append((value, before))
    last_use: dict[str, int] = {}
    column = 1
    for node, position in enumerate(order.positions):
        begun = bisect.bisect_right(at, node, hi=size - 1)
        for name, nbytes in position.weights:
            first = bisect.bisect_right(at, last_use.get(name, -1), hi=begun)
            last_use[name] = node
            held[first:begun] += nbytes
        for value, before in read[node]:
            taken[bisect.bisect_right(at, before, hi=begun) : begun] += value.nbytes
        for value in made[node]:
            live[:begun] += value.nbytes
            given[:begun] += value.nbytes if value.readers else 0
        np.maximum(most[:begun], live[:begun], out=most[:begun])
        for value in {id(v): v for v in (*made[node], *(v for v, _ in read[node]))}.values():
            if value.last == node:
                since = bisect.bisect_right(at, value.made, hi=begun)
                live[:since] -= 0 if value.kept else value.nbytes
                given[:since] -= value.nbytes if value.readers else 0
        if node + 1 == at[column]:
            rows = slice(0, column)
            weights[rows, column] = held[rows]
            active[rows, column] = arriving[rows] + most[rows]
            copied[rows, column] = taken[rows] + given[rows]
            arriving[column] = live[0]
            column += 1
    done = np.concatenate([[0], np.cumsum(np.array(order.work_ns, np.int64))])[at]
    work = np.maximum(done[None, :] - done[:, None], 0)
    return Tables(at, weights, active, copied, work)


def peak_bytes(order: Order) -> int:
    """The most of activations that are in memory at once in a run of the whole."""
    return int(tables(order, [len(order.positions)]).active[0, 1]) if order.positions else 0


def neediest(order: Order, start: int, end: int) -> int:
    """Of a segment's nodes the one whose weights and results take most."""
    made: dict[int, int] = {}
    for value in order.activations:
        made[value.made] = made.get(value.made, 0) + value.nbytes
    return max(
        range(start, end), key=lambda node: sum(dict(order.positions[node].weights).values()) + made.get(node, 0)
    )
