"""place(): buffers into the lowest arena that a bounded, deterministic effort finds."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np

from compile.packing.greedy import pack_greedily
from compile.packing.problem import Ints, Problem, sections_of
from targets.arena import Arena, Buffer, Placed, lower_bound

ALIGNMENT = 256
"""What onnxruntime's arena rounds every request to (kMinAllocationSize of its BFC arena)."""

EFFORT = 1_000_000_000
"""Buffers and sections that the complete search may look at: up to ten seconds' worth, where nothing ends it before."""


@dataclasses.dataclass
class Packing:
    """Offsets in units (int64 [buffers]), the height they need, and the height below which there is no arena.

    `nodes` is what the complete search took: 0 where greedy reached the bound.
    """

    offsets: Ints
    height: int
    bound: int
    nodes: int = 0

    @property
    def proven(self) -> bool:
        """Whether no arena can be lower."""
        return self.height == self.bound


def place(buffers: Sequence[Buffer], alignment: int = ALIGNMENT, effort: int = EFFORT) -> Arena:
    """Offsets, multiples of `alignment` bytes, for all buffers, in as low an arena as `effort` finds.

    Never higher than greedy by size. Equal input gives equal offsets, on any machine.
    """
    held = [buffer for buffer in buffers if buffer.nbytes]
    begin, end = sections_of([(buffer.lower, buffer.upper) for buffer in held])
    blocks = [-(-buffer.nbytes // alignment) for buffer in held]
    unit = math.gcd(*blocks) or 1
    packing = pack(Problem(begin, end, np.array(blocks, np.int64) // unit), effort)
    at = dict(zip(map(id, held), (packing.offsets * unit * alignment).tolist(), strict=True))
    placed = [Placed(b.name, b.lower, b.upper, b.nbytes, at.get(id(b), 0)) for b in buffers]
    height = max((p.offset + p.nbytes for p in placed), default=0)
    placed.sort(key=lambda p: (p.lower, p.offset, p.name))
    return Arena(height, lower_bound(tuple(buffers)), alignment, tuple(placed))


def pack(problem: Problem, effort: int = EFFORT, goal: int = 0) -> Packing:
    """Pack each independent part below the height of those before it, the highest first; stops at `goal` units.

    A part that greedy packs below the largest load of all costs no more than that.
    """
    bound = max(goal, int(problem.load().max(initial=0)))
    packed = Packing(np.zeros(len(problem.size), np.int64), 0, 0)
    parts = []
    for buffers in problem.parts():
        part = problem.part(buffers)
        offsets = pack_greedily(part, bound)
        parts.append((buffers, part, Packing(offsets, part.height(offsets), int(part.load().max(initial=0)))))
    parts.sort(key=lambda each: -each[2].height)
    for buffers, part, found in parts:
        bound = max(goal, packed.height)
        if found.height > max(bound, found.bound):
            found = improve(part, found, effort, bound)  # noqa: PLW2901
            effort -= found.nodes * cost(part)
        packed.offsets[buffers] = found.offsets
        packed.height, packed.bound = max(packed.height, found.height), max(packed.bound, found.bound)
        packed.nodes += found.nodes
    return packed


def cost(problem: Problem) -> int:
    """Buffers and sections that a node of the complete search looks at, at most."""
    return len(problem.size) + int((problem.end - problem.begin).sum())


def improve(problem: Problem, packing: Packing, effort: int, goal: int = 0) -> Packing:
    """Search below the packing's height, with restarts, until it is proven lowest, at most `goal`, or effort ends.

    Successful searches hardly go back, unsuccessful ones for ever (Gomes, Selman and Kautz 1998), so each attempt has
    its own order of buffers and few nodes. Every other attempt is at the bound; those between come down by halves, and
    raise the bound where they prove that there is nothing.
    """
    # Compiled when first imported: only models that greedy does not pack perfectly pay for it.
    from compile.packing.exact import FOUND, NONE, search  # noqa: PLC0415

    best = dataclasses.replace(packing)
    nodes_left = effort // cost(problem)
    halvings = 0
    attempt = 0
    while best.height > max(best.bound, goal) and nodes_left >= len(problem.size):
        lowest = max(best.bound, goal)
        ceiling = lowest
        if attempt % 2:
            halvings += 1
            ceiling = best.height - max(1, (best.height - lowest) >> halvings)
        order, rule, favour = _preferences(problem, attempt)
        nodes = min(nodes_left, 3 * len(order) * patience(attempt // 2 + 1))
        result, offsets, used = search(problem.part(order), ceiling, rule, favour, nodes)
        nodes_left -= used
        best.nodes += used
        attempt += 1
        if result == FOUND:
            best.offsets = offsets[np.argsort(order)]
            best.height = problem.height(best.offsets)
            halvings = 0
        elif result == NONE:
            best.bound = ceiling + 1
        elif ceiling == best.height - 1:
            halvings = 0
    return best


def _preferences(problem: Problem, attempt: int) -> tuple[Ints, int, Ints]:
    """Which buffers are tried first, the rule by which a section is chosen, and what decides between equal sections.

    Large and long-lived ones first, in a mixture that changes with the attempt. In whole numbers, which are the same on
    every machine.
    """
    rng = random.Random(attempt)  # noqa: S311 - not for secrets
    by_life, by_size, noise = rng.choice((0, 1, 1, 2)), rng.choice((0, 1, 2)), rng.choice((0, 0, 1, 4))
    weights = [
        life**by_life * size**by_size * (4096 + noise * rng.getrandbits(10))
        for life, size in zip((problem.end - problem.begin).tolist(), problem.size.tolist(), strict=True)
    ]
    order = np.array(sorted(range(len(weights)), key=lambda buffer: -weights[buffer]), np.int64)
    favour = np.array([rng.getrandbits(30) for _ in range(problem.sections)], np.int64)
    return order, rng.randrange(4), favour


def patience(turn: int) -> int:
    """1, but 8 at every eighth turn, 64 at every 64th, and so on, from turn 1 on: all lengths get equal shares.

    Luby, Sinclair and Zuckerman (1993) show that such a sequence is best where nothing is known, to within a factor.
    """
    return 1 if turn % 8 else 8 * patience(turn // 8)
