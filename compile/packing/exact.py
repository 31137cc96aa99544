"""Packing below a ceiling, by a complete search: either offsets, or the proof that there are none.

Theory of operation. Time is cut into *sections* (maximal sets of buffers that are live together), and each buffer takes
a contiguous range of them. The arena is filled upwards: of each section the search knows `top`, where its highest
placed buffer ends; of each buffer that is not placed `least`, the lowest offset that it can still have. Then the
`floor` of a section is the lowest `least` of its buffers, and `fill` is how high they reach when each is stacked as
early as it can be, which is the shortest schedule of one machine with release dates (Jackson 1955). A section that
fills past the ceiling ends a branch.

A node branches on one section whose lowest candidates rest on a flat floor: which of them comes to stand at the floor,
or none does (then the floor rises to the next height at which one can be supported). The section with the fewest
choices goes first. Only solutions are searched whose offsets have the least sum, so that

- every buffer stands on the ground or on another (the canonical solutions of MiniMalloc, Moffitt 2023, section 4), and
- no hole is left into which a buffer that is placed higher would fit (its dominance rule, section 5.3);
- a buffer that would fill a section past the ceiling if it were the lowest there stands on one of the others
  ("not first" of Carlier and Pinson 1989);
- parts of the arena between which no buffer is left are independent: what fails in one goes back to the last decision
  that touched it (the decomposition of MiniMalloc, as conflict-directed backjumping);
- a state that has failed is kept by its hash (64 bits beside its slot in the table) and fails at once where other
  decisions lead to it again.

Nothing here depends on time or on threads: the search ends after a counted number of nodes.

References: M. D. Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning",
ASPLOS 2023; J. Carlier and E. Pinson, "An algorithm for solving the job-shop problem", Management Science 35 (1989).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

FOUND, NONE, UNKNOWN = 1, 0, -1

MOST_FAILED = 1 << 20
"""Failed states that are kept: 8 MiB."""


class _State(NamedTuple):
    """Arrays over buffers (in order of preference), over sections, and the trail of what was overwritten."""

    begin: np.ndarray
    end: np.ndarray
    size: np.ndarray
    least: np.ndarray
    placed: np.ndarray
    by_least: np.ndarray
    top: np.ndarray
    floor: np.ndarray
    fill: np.ndarray
    total: np.ndarray
    waiting: np.ndarray
    across: np.ndarray
    choices: np.ndarray
    uneven: np.ndarray
    lowest_end: np.ndarray
    second_end: np.ndarray
    trail_at: np.ndarray
    trail_was: np.ndarray


@njit(cache=True)
def _mixed(x):
    x = np.uint64(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def _sort(state):
    """Insertion sort: little has moved since the last node."""
    order, least = state.by_least, state.least
    for i in range(order.size):
        buffer = order[i]
        j = i
        while j and least[order[j - 1]] > least[buffer]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = buffer


@njit(cache=True)
def _raise_least(state, buffer, offset, mark):
    state.trail_at[mark] = buffer
    state.trail_was[mark] = state.least[buffer]
    state.least[buffer] = offset
    return mark + 1


@njit(cache=True)
def _not_first(state, a, b, ceiling, mark):
    """Raise what cannot be the lowest of a section to the lowest end of another one there."""
    for section in range(a, b):
        state.lowest_end[section] = state.second_end[section] = ceiling + 1
        state.total[section] = 0
    for buffer in state.by_least:
        if state.placed[buffer] or state.begin[buffer] < a or state.end[buffer] > b:
            continue
        stop = state.least[buffer] + state.size[buffer]
        for section in range(state.begin[buffer], state.end[buffer]):
            state.total[section] += state.size[buffer]
            if stop < state.lowest_end[section]:
                state.second_end[section] = state.lowest_end[section]
                state.lowest_end[section] = stop
            elif stop < state.second_end[section]:
                state.second_end[section] = stop
    for buffer in state.by_least:
        if state.placed[buffer] or state.begin[buffer] < a or state.end[buffer] > b:
            continue
        least = state.least[buffer]
        stop = least + state.size[buffer]
        for section in range(state.begin[buffer], state.end[buffer]):
            if state.least[buffer] + state.total[section] > ceiling:
                other = state.second_end[section] if state.lowest_end[section] == stop else state.lowest_end[section]
                least = max(least, other)
        if least > state.least[buffer]:
            mark = _raise_least(state, buffer, least, mark)
    return mark


@njit(cache=True)
def _fills(state, a, b, ceiling):
    """Floor and fill of the sections [a, b); whether all stay below the ceiling."""
    state.floor[a:b] = -1
    state.fill[a:b] = 0
    for buffer in state.by_least:
        if state.placed[buffer] or state.begin[buffer] < a or state.end[buffer] > b:
            continue
        least, size = state.least[buffer], state.size[buffer]
        for section in range(state.begin[buffer], state.end[buffer]):
            if state.floor[section] < 0:
                state.floor[section] = least
            state.fill[section] = max(state.fill[section], least) + size
            if state.fill[section] > ceiling:
                return False
    return True


@njit(cache=True)
def _hash(state, a, b):
    """Of all that the rest of the search in [a, b) depends on."""
    mixed = np.uint64(0)
    for buffer in range(state.size.size):
        if not state.placed[buffer] and a <= state.begin[buffer] and state.end[buffer] <= b:
            mixed ^= _mixed(np.uint64(buffer + 1) * np.uint64(0x9E3779B97F4A7C15))
    for section in range(a, b):
        level = _mixed(np.uint64(state.floor[section])) ^ (np.uint64(state.top[section]) + np.uint64(1) << np.uint64(1))
        mixed ^= _mixed(level ^ _mixed(np.uint64(section + 1) * np.uint64(0xD1342543DE82EF95)))
    return mixed


@njit(cache=True)
def _choose(state, a, b, ceiling, rule, favour):
    """The section to branch on, -1 if a buffer fits into a hole below the floors."""
    state.choices[a:b] = 0
    state.uneven[a:b] = False
    for buffer in state.by_least:
        if state.placed[buffer] or state.begin[buffer] < a or state.end[buffer] > b:
            continue
        ground, roof = np.int64(0), ceiling
        for section in range(state.begin[buffer], state.end[buffer]):
            ground = max(ground, state.top[section])
            roof = min(roof, state.floor[section])
        if ground + state.size[buffer] <= roof:
            return -1
        least = state.least[buffer]
        for section in range(state.begin[buffer], state.end[buffer]):
            if state.floor[section] == least:
                if roof == least:
                    state.choices[section] += 1
                else:
                    state.uneven[section] = True
    best, least_key = -1, (np.int64(0), np.int64(0), np.int64(0))
    for section in range(a, b):
        if state.uneven[section]:
            continue
        slack = ceiling - state.fill[section]
        choices = 2 * state.choices[section] + (slack > 0)
        floor = state.floor[section]
        if rule == 0:
            key = (choices, slack, favour[section])
        elif rule == 1:
            key = (choices, floor, favour[section])
        elif rule == 2:
            key = (floor, choices, favour[section])
        else:
            key = (slack, choices, favour[section])
        if best < 0 or key < least_key:
            best, least_key = section, key
    return best


@njit(cache=True)
def _next_choice(state, section, floor, cursor):
    """The first buffer from `cursor` on that can stand at the floor of the section, or the number of buffers."""
    n = state.size.size
    for buffer in range(cursor, n):
        if not state.placed[buffer] and state.begin[buffer] <= section < state.end[buffer]:
            if state.least[buffer] == floor and not _has_twin(state, buffer):
                return buffer
    return n


@njit(cache=True)
def _has_twin(state, buffer):
    """Whether an equal buffer, preferred to this one, could stand here."""
    for other in range(buffer):
        if (
            not state.placed[other]
            and state.begin[other] == state.begin[buffer]
            and state.end[other] == state.end[buffer]
            and state.size[other] == state.size[buffer]
            and state.least[other] == state.least[buffer]
        ):
            return True
    return False


@njit(cache=True)
def _put(state, buffer, floor, mark):
    """Place the buffer: all that are live with it come to stand above it."""
    begin, end = state.begin[buffer], state.end[buffer]
    stop = floor + state.size[buffer]
    state.placed[buffer] = True
    for section in range(begin, end):
        state.waiting[section] -= 1
        state.across[section] -= section > begin
        state.trail_at[mark] = -1 - section
        state.trail_was[mark] = state.top[section]
        state.top[section] = stop
        mark += 1
    for other in range(state.size.size):
        if not state.placed[other] and state.begin[other] < end and begin < state.end[other]:
            if state.least[other] < stop:
                mark = _raise_least(state, other, stop, mark)
    return mark


@njit(cache=True)
def _leave(state, section, floor, ceiling, mark):
    """Nothing stands at the floor of the section: all its buffers rise to the next height that holds one of them."""
    begin, end, level = section, section + 1, ceiling + 1
    for buffer in range(state.size.size):
        if not state.placed[buffer] and state.begin[buffer] <= section < state.end[buffer]:
            if state.least[buffer] > floor:
                level = min(level, state.least[buffer])
            else:
                begin, end = min(begin, state.begin[buffer]), max(end, state.end[buffer])
    for buffer in range(state.size.size):
        if state.placed[buffer] or state.begin[buffer] <= section < state.end[buffer]:
            continue
        if state.begin[buffer] < end and begin < state.end[buffer]:
            level = min(level, state.least[buffer] + state.size[buffer])
    for buffer in range(state.size.size):
        if not state.placed[buffer] and state.begin[buffer] <= section < state.end[buffer]:
            if state.least[buffer] < level:
                mark = _raise_least(state, buffer, level, mark)
    return mark


@njit(cache=True)
def _undo(state, buffer, mark, now):
    """Take back one decision (`buffer`, or the number of buffers where none was placed) and all that followed."""
    if buffer < state.size.size:
        state.placed[buffer] = False
        for section in range(state.begin[buffer], state.end[buffer]):
            state.waiting[section] += 1
            state.across[section] += section > state.begin[buffer]
    for at in range(now - 1, mark - 1, -1):
        if state.trail_at[at] >= 0:
            state.least[state.trail_at[at]] = state.trail_was[at]
        else:
            state.top[-1 - state.trail_at[at]] = state.trail_was[at]


@njit(cache=True)
def _unfinished(state, begins, ends, depth):
    """The independent range of sections to go on with: the nearest to the last decisions. (0, 0) when all are done."""
    for at in range(depth - 1, -2, -1):
        begin, end = (begins[at], ends[at]) if at >= 0 else (0, state.top.size)
        for a in range(begin, end):
            if state.waiting[a]:
                b = a + 1
                while b < state.top.size and state.across[b]:
                    b += 1
                return a, b
    return 0, 0


@njit(cache=True, nogil=True)
def search(begin, end, size, sections, ceiling, rule, favour, nodes):
    """Offsets of at most `ceiling` for buffers with section ranges [begin, end).

    Buffers that stand first are tried first. `rule` and `favour` (a number of each section) choose where to branch.
    Returns FOUND, NONE (there are no such offsets) or UNKNOWN (more than `nodes` nodes
    would be needed), the offsets (-1 where not placed), and the number of nodes.
    """
    n = size.size
    depths = 4 * n + 2
    room = depths * 8
    for i in range(n):
        room += end[i] - begin[i]
        for j in range(n):
            room += begin[i] < end[j] and begin[j] < end[i]
    state = _State(
        begin,
        end,
        size,
        np.zeros(n, np.int64),
        np.zeros(n, np.bool_),
        np.arange(n),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.bool_),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(room, np.int32),
        np.zeros(room, np.int64),
    )
    for buffer in range(n):
        for section in range(begin[buffer], end[buffer]):
            state.waiting[section] += 1
            state.across[section] += section > begin[buffer]
    offsets = np.full(n, -1, np.int64)
    # Of the node at each depth: its range, its hash, where it branches, the decision it is at (-1 before the first, n
    # for leaving the floor empty), and the trail's length at its start and before the decision.
    begins, ends, hashes = np.zeros(depths, np.int64), np.zeros(depths, np.int64), np.zeros(depths, np.uint64)
    branches, decisions = np.zeros(depths, np.int64), np.zeros(depths, np.int64)
    starts, marks = np.zeros(depths, np.int64), np.zeros(depths, np.int64)
    entries = 1 << 10
    while entries < nodes and entries < MOST_FAILED:
        entries *= 2
    failed, slots = np.zeros(entries, np.uint64), np.uint64(entries - 1)
    depth, used, mark = 0, 0, np.int64(0)
    while True:
        a, b = _unfinished(state, begins, ends, depth)
        if a == b:
            return FOUND, offsets, used
        if used == nodes or depth + 1 == depths or mark + 2 * n + sections > room:
            return UNKNOWN, offsets, used
        used += 1
        begins[depth], ends[depth], starts[depth], decisions[depth] = a, b, mark, -1
        _sort(state)
        mark = _not_first(state, a, b, ceiling, mark)
        _sort(state)
        marks[depth] = mark
        alive = _fills(state, a, b, ceiling)
        if alive:
            hashes[depth] = _hash(state, a, b)
            alive = failed[hashes[depth] & slots] != hashes[depth]
        if alive:
            branches[depth] = _choose(state, a, b, ceiling, rule, favour)
            alive = branches[depth] >= 0
        while True:
            if alive and decisions[depth] < n:
                section = branches[depth]
                floor = _floor(state, section)
                choice = _next_choice(state, section, floor, decisions[depth] + 1)
                decisions[depth] = choice
                if choice < n:
                    offsets[choice] = floor
                    mark = _put(state, choice, floor, mark)
                else:
                    mark = _leave(state, section, floor, ceiling, mark)
                depth += 1
                break
            if alive:
                failed[hashes[depth] & slots] = hashes[depth]
            # Back to the last decision that had a part in this: the first that touched the range.
            a, b = begins[depth], ends[depth]
            _undo(state, n, starts[depth], mark)
            mark = starts[depth]
            touched = False
            while depth and not touched:
                depth -= 1
                choice = decisions[depth]
                _undo(state, choice, marks[depth], mark)
                if choice < n:
                    touched = state.begin[choice] < b and a < state.end[choice]
                else:
                    touched = a <= branches[depth] < b
                mark = marks[depth] if touched else starts[depth]
                if not touched:
                    _undo(state, n, starts[depth], marks[depth])
            if not touched:
                return NONE, offsets, used
            alive = True


@njit(cache=True)
def _floor(state, section):
    """The lowest offset that a buffer of the section can still have."""
    lowest = np.int64(-1)
    for buffer in range(state.size.size):
        if not state.placed[buffer] and state.begin[buffer] <= section < state.end[buffer]:
            if lowest < 0 or state.least[buffer] < lowest:
                lowest = state.least[buffer]
    return lowest
