"""Packing below a ceiling, by a complete search: either offsets, or the proof that there are none.

Theory of operation. Time is cut into *sections* (largest sets of buffers that are live together), and each buffer takes
a contiguous range of them. The arena is filled upwards: of each section the search knows `top`, where its highest
placed buffer ends; of each buffer that is not placed `least`, the lowest offset that it can still have. The `floor` of
a section is the lowest `least` of its buffers, and its `fill` how high they reach when each is stacked as early as it
can be: the shortest schedule of one machine with release dates. Where that is above the ceiling a branch ends.

A node branches on one section whose lowest candidates rest on a flat floor: which of them comes to stand at the floor,
or none does (then the floor rises to the next height at which one can be supported). The section with the fewest
choices goes first, in two of four rules (Haralick and Elliott 1980). What makes the tree small:

- Only arenas are searched whose offsets have the least sum. There every buffer stands on the ground or on another (the
  canonical solutions of MiniMalloc, Moffitt 2023), and no hole is left that a buffer above it would fit into (its
  dominance rule).
- A buffer that would fill a section past the ceiling if it were the lowest there stands on one of the others (the "not
  first" rule of disjunctive scheduling, Torres and Lopez 2000).
- Ranges of sections that no buffer crosses any more are independent (MiniMalloc's decomposition).
- Of every least offset the search knows the range of sections that are its reason, so it knows that of every failure,
  and goes back to the last decision that touched it (conflict-directed backjumping, Prosser 1993). Decisions in between
  are about other times.
- A state that has failed is kept by its hash, and fails at once where other decisions lead to it again. Two states of
  equal hash (64 bits) could hide a solution, and so make a proof wrong; they never make a wrong solution.

Nothing here depends on time or on threads: the search ends after a counted number of nodes.

M. D. Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023;
R. M. Haralick and G. L. Elliott, "Increasing tree search efficiency for constraint satisfaction problems", Artificial
Intelligence 14 (1980); P. Torres and P. Lopez, "On not-first/not-last conditions in disjunctive scheduling", European
Journal of Operational Research 127 (2000); P. Prosser, "Hybrid algorithms for the constraint satisfaction problem",
Computational Intelligence 9 (1993).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from compile.packing.problem import Ints, Problem

FOUND, NONE, UNKNOWN = 1, 0, -1

MOST_FAILED = 1 << 20
"""Failed states that are kept: 8 MiB."""

MOST_CHANGES = 1 << 22
"""Changes on the way to a node that can be taken back: 64 MiB."""


F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    return cast(F, njit(function))


def _kept(function: F) -> F:
    """Compiled, which takes seconds, and kept beside this file or in the user's cache, where one can be written."""
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:
        return _compiled(function)


class _State(NamedTuple):
    """What is known at a node: of buffers (begin to placed), of sections (top to uneven), and the trail.

    `live` is filled anew for each node; `twin` is the equal buffer before this one, or -1; `waiting` counts buffers of
    a section that are not placed, `across` those that are in the section before it too; `choices` counts candidates,
    `uneven` marks sections of which one does not rest flat; `total`, `lowest_end` and `second_end` are of the buffers
    that wait. The sections [`since`, `until`) are the reason for `least`, [`first_cause`, `last_cause`) for all of a
    section's buffers. The trail says which `least` (by buffer) or `top` (by -1 - section) was what.
    """

    begin: Ints
    end: Ints
    size: Ints
    offset: Ints
    least: Ints
    by_least: Ints
    live: Ints
    twin: Ints
    since: Ints
    until: Ints
    placed: NDArray[np.bool_]
    top: Ints
    floor: Ints
    fill: Ints
    total: Ints
    waiting: Ints
    across: Ints
    choices: Ints
    lowest_end: Ints
    second_end: Ints
    first_cause: Ints
    last_cause: Ints
    uneven: NDArray[np.bool_]
    trail_at: Ints
    trail_was: Ints
    trail_since: Ints
    trail_until: Ints


def _state(problem: Problem) -> _State:
    begin, end, size = (np.ascontiguousarray(each) for each in (problem.begin, problem.end, problem.size))
    n, sections = len(size), problem.sections
    (least, live, until), twin, offset = (
        np.zeros((3, n), np.int64),
        np.full(n, -1),
        np.full(n, -1),
    )
    since = np.full(n, sections)
    state = _State._make(
        [
            *(
                begin,
                end,
                size,
                offset,
                least,
                np.arange(n),
                live,
                twin,
                since,
                until,
                np.zeros(n, np.bool_),
            ),
            *np.zeros((11, sections), np.int64),
            np.zeros(sections, np.bool_),
            *np.empty((4, min((4 * n + 2) * (n + 8), MOST_CHANGES)), np.int64),
        ]
    )
    last: dict[tuple[int, int, int], int] = {}
    for buffer, same in enumerate(zip(begin.tolist(), end.tolist(), size.tolist(), strict=True)):
        state.waiting[same[0] : same[1]] += 1
        state.across[same[0] + 1 : same[1]] += 1
        twin[buffer] = last.get(same, -1)
        last[same] = buffer
    return state


class _Path(NamedTuple):
    """Of the node at each depth: the sections it is about, where it branches, at which floor, the decision it is at
    (-1 before the first, the number of buffers where nothing stands at the floor), the trail's length when it began
    and before the decision, and the hash of its state."""

    begin: Ints
    end: Ints
    branch: Ints
    floor: Ints
    decision: Ints
    start: Ints
    mark: Ints
    since: Ints
    until: Ints
    hash: NDArray[np.uint64]


def _path(depths: int) -> _Path:
    return _Path._make([*np.zeros((9, depths), np.int64), np.zeros(depths, np.uint64)])


@_compiled
def _mixed(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.uint64 = x ^ (x >> np.uint64(31))
    return mixed


@_compiled
def _sort(buffers: Ints, least: Ints) -> None:
    """Insertion sort by `least`, in place: little has moved since the last node."""
    for i in range(1, buffers.size):
        buffer = buffers[i]
        j = i
        while j and least[buffers[j - 1]] > least[buffer]:
            buffers[j] = buffers[j - 1]
            j -= 1
        buffers[j] = buffer


@_compiled
def _live(state: _State, a: int, b: int) -> Ints:
    """The buffers that are not placed and stand in the sections [a, b), by their least offset."""
    begin, end, placed, live, order = state.begin, state.end, state.placed, state.live, state.by_least
    _sort(order, state.least)
    count = 0
    for buffer in order:
        if not placed[buffer] and a <= begin[buffer] and end[buffer] <= b:
            live[count] = buffer
            count += 1
    return live[:count]


@_compiled
def _not_first(state: _State, live: Ints, a: int, b: int, ceiling: int, mark: int) -> int:
    """Raise what cannot be the lowest of a section to the lowest end of another one there."""
    begin, end, size, least, since, until = state.begin, state.end, state.size, state.least, state.since, state.until
    total, lowest, second = state.total, state.lowest_end, state.second_end
    first, last = state.first_cause, state.last_cause
    for section in range(a, b):
        total[section] = 0
        lowest[section] = second[section] = ceiling + 1
        first[section], last[section] = section, section + 1
    for buffer in live:
        stop = least[buffer] + size[buffer]
        for section in range(begin[buffer], end[buffer]):
            total[section] += size[buffer]
            first[section], last[section] = (
                min(first[section], since[buffer]),
                max(last[section], until[buffer]),
            )
            if stop < lowest[section]:
                second[section] = lowest[section]
                lowest[section] = stop
            elif stop < second[section]:
                second[section] = stop
    for buffer in live:
        stop = least[buffer] + size[buffer]
        raised, why = least[buffer], np.int64(0)
        for section in range(begin[buffer], end[buffer]):
            if least[buffer] + total[section] > ceiling:
                other = second[section] if lowest[section] == stop else lowest[section]
                if other > raised:
                    raised, why = other, section
        if raised > least[buffer]:
            mark = _raise(state, buffer, raised, first[why], last[why], mark)
    return mark


@_compiled
def _raise(state: _State, buffer: int, offset: int, since: int, until: int, mark: int) -> int:
    """A higher least offset, for reasons in the sections [since, until)."""
    state.trail_at[mark], state.trail_was[mark] = buffer, state.least[buffer]
    state.trail_since[mark], state.trail_until[mark] = state.since[buffer], state.until[buffer]
    state.least[buffer], state.since[buffer], state.until[buffer] = offset, since, until
    return mark + 1


@_compiled
def _fills(state: _State, live: Ints, a: int, b: int, ceiling: int) -> int:
    """Floor and fill of the sections [a, b); one that does not stay below the ceiling, or -1."""
    begin, end, size, least, floor, fill = state.begin, state.end, state.size, state.least, state.floor, state.fill
    for section in range(a, b):
        floor[section], fill[section] = -1, 0
    for buffer in live:
        for section in range(begin[buffer], end[buffer]):
            if floor[section] < 0:
                floor[section] = least[buffer]
            fill[section] = max(fill[section], least[buffer]) + size[buffer]
            if fill[section] > ceiling:
                return section
    return -1


@_compiled
def _hash(state: _State, live: Ints, a: int, b: int) -> np.uint64:
    """Of all that the rest of the search in [a, b) depends on."""
    top, floor = state.top, state.floor
    mixed: np.uint64 = np.uint64(0)
    for buffer in live:
        mixed ^= _mixed(np.uint64(buffer + 1) * np.uint64(0x9E3779B97F4A7C15))
    for section in range(a, b):
        here = _mixed(np.uint64(section + 1) * np.uint64(0xD1342543DE82EF95))
        mixed ^= _mixed(_mixed(here ^ np.uint64(floor[section])) ^ np.uint64(top[section]))
    return mixed


@_compiled
def _choose(state: _State, live: Ints, a: int, b: int, ceiling: int, rule: int, favour: Ints) -> int:
    """The section to branch on; -1 - buffer for a buffer that fits into a hole below the floors."""
    begin, end, size, least = state.begin, state.end, state.size, state.least
    top, floor, fill, choices, uneven = state.top, state.floor, state.fill, state.choices, state.uneven
    for section in range(a, b):
        choices[section], uneven[section] = 0, False
    for buffer in live:
        ground, roof = np.int64(0), ceiling
        for section in range(begin[buffer], end[buffer]):
            ground = max(ground, top[section])
            roof = min(roof, floor[section])
        if ground + size[buffer] <= roof:
            return -1 - int(buffer)
        for section in range(begin[buffer], end[buffer]):
            if floor[section] == least[buffer]:
                choices[section] += 1
                uneven[section] |= roof < least[buffer]
    best, lowest = -1, (np.int64(0), np.int64(0), np.int64(0))
    for section in range(a, b):
        slack = ceiling - fill[section]
        key = _urgency(
            rule,
            2 * choices[section] + (slack > 0),
            floor[section],
            slack,
            favour[section],
        )
        if not uneven[section] and (best < 0 or key < lowest):
            best, lowest = section, key
    return best


@_compiled
def _urgency(rule: int, choices: int, floor: int, slack: int, favour: int) -> tuple[int, int, int]:
    if rule == 0:
        return choices, slack, favour
    if rule == 1:
        return choices, floor, favour
    if rule == 2:
        return floor, choices, favour
    return slack, choices, favour


@_compiled
def _next_choice(state: _State, section: int, floor: int, cursor: int) -> int:
    """The first buffer from `cursor` on that can stand at the floor of the section, or the number of buffers.

    Of equal buffers that are not placed only the first is tried.
    """
    begin, end, least, placed, twin = state.begin, state.end, state.least, state.placed, state.twin
    for buffer in range(cursor, begin.size):
        here = not placed[buffer] and begin[buffer] <= section < end[buffer]
        if here and least[buffer] == floor and (twin[buffer] < 0 or placed[twin[buffer]]):
            return buffer
    return begin.size


@_compiled
def _put(state: _State, buffer: int, floor: int, mark: int) -> int:
    """Place the buffer: all that are live with it come to stand above it."""
    begin, end, least, placed, top = state.begin, state.end, state.least, state.placed, state.top
    waiting, across, trail_at, trail_was = state.waiting, state.across, state.trail_at, state.trail_was
    first, last, stop = begin[buffer], end[buffer], floor + state.size[buffer]
    placed[buffer] = True
    for section in range(first, last):
        waiting[section] -= 1
        across[section] -= section > first
        trail_at[mark], trail_was[mark] = -1 - section, top[section]
        top[section] = stop
        mark += 1
    for other in range(begin.size):
        if not placed[other] and begin[other] < last and first < end[other] and least[other] < stop:
            where = max(first, begin[other])
            mark = _raise(state, other, stop, where, where + 1, mark)
    return mark


@_compiled
def _leave(state: _State, section: int, floor: int, ceiling: int, mark: int) -> int:
    """Nothing stands at the floor of the section: all its buffers rise to the next height that holds one of them.

    That is where one of them stands already, or where one of another section ends that one of them may stand on.
    """
    begin, end, size, least, placed = state.begin, state.end, state.size, state.least, state.placed
    first, last, level = section, section + 1, ceiling + 1
    for buffer in range(begin.size):
        if not placed[buffer] and begin[buffer] <= section < end[buffer]:
            if least[buffer] > floor:
                level = min(level, least[buffer])
            else:
                first, last = min(first, begin[buffer]), max(last, end[buffer])
    since, until = _causes(state, first, last, first, last)
    for buffer in range(begin.size):
        elsewhere = end[buffer] <= section or section < begin[buffer]
        if not placed[buffer] and elsewhere and begin[buffer] < last and first < end[buffer]:
            level = min(level, least[buffer] + size[buffer])
    for buffer in range(begin.size):
        if not placed[buffer] and begin[buffer] <= section < end[buffer] and least[buffer] < level:
            mark = _raise(state, buffer, level, since, until, mark)
    return mark


@_compiled
def _causes(state: _State, first: int, last: int, since: int, until: int) -> tuple[int, int]:
    """[since, until), and all sections that say how low buffers in the sections [first, last) can be."""
    begin, end, placed, froms, tos = state.begin, state.end, state.placed, state.since, state.until
    for buffer in range(begin.size):
        if not placed[buffer] and begin[buffer] < last and first < end[buffer]:
            since, until = min(since, froms[buffer]), max(until, tos[buffer])
    return since, until


@_compiled
def _undo(state: _State, buffer: int, mark: int, now: int) -> None:
    """Take back one decision (`buffer`, or the number of buffers where none was placed) and all that followed."""
    least, top, trail_at, trail_was = state.least, state.top, state.trail_at, state.trail_was
    if buffer < state.size.size:
        state.placed[buffer] = False
        waiting, across, first = state.waiting, state.across, state.begin[buffer]
        for section in range(first, state.end[buffer]):
            waiting[section] += 1
            across[section] += section > first
    for at in range(now - 1, mark - 1, -1):
        if trail_at[at] >= 0:
            least[trail_at[at]] = trail_was[at]
            state.since[trail_at[at]], state.until[trail_at[at]] = state.trail_since[at], state.trail_until[at]
        else:
            top[-1 - trail_at[at]] = trail_was[at]


@_compiled
def _unfinished(state: _State, path: _Path, depth: int) -> tuple[int, int]:
    """The independent range of sections to go on with: the nearest to the last decisions. (0, 0) when all are done."""
    for at in range(depth - 1, -2, -1):
        begin, end = (path.begin[at], path.end[at]) if at >= 0 else (0, state.top.size)
        for a in range(begin, end):
            if state.waiting[a]:
                b = a + 1
                while b < state.top.size and state.across[b]:
                    b += 1
                return a, b
    return 0, 0


@_compiled
def _enter(
    state: _State, path: _Path, depth: int, mark: int, ceiling: int, rule: int, favour: Ints, failed: NDArray[np.uint64]
) -> tuple[bool, int]:
    """Begin a node: whether it may have a solution, and the trail's new length."""
    a, b = path.begin[depth], path.end[depth]
    live = _live(state, a, b)
    mark = _not_first(state, live, a, b, ceiling, mark)
    _sort(live, state.least)
    path.mark[depth] = mark
    path.since[depth], path.until[depth] = state.top.size, 0
    section = _fills(state, live, a, b, ceiling)
    if section >= 0:
        path.since[depth], path.until[depth] = _causes(state, section, section + 1, section, section + 1)
        return False, mark
    mixed = _hash(state, live, a, b)
    path.hash[depth] = mixed
    slot = mixed & np.uint64(failed.size - 1)
    if failed[slot] == mixed:
        path.since[depth], path.until[depth] = _causes(state, a, b, a, b)
        return False, mark
    section = _choose(state, live, a, b, ceiling, rule, favour)
    if section < 0:
        first, last = state.begin[-1 - section], state.end[-1 - section]
        path.since[depth], path.until[depth] = _causes(state, first, last, first, last)
        return False, mark
    path.branch[depth], path.floor[depth] = section, state.floor[section]
    return True, mark


@_compiled
def _back(state: _State, path: _Path, depth: int, mark: int) -> tuple[int, int]:
    """Leave a node that has failed for the last decision that is a reason for it; its depth (-1: there is none).

    What the decision rested on is a reason for the failure too.
    """
    nothing = state.size.size
    a, b = path.since[depth], path.until[depth]
    _undo(state, nothing, path.start[depth], mark)
    while depth:
        mark = path.start[depth]
        depth -= 1
        choice = path.decision[depth]
        _undo(state, choice, path.mark[depth], mark)
        begin, end = path.branch[depth], path.branch[depth] + 1
        if choice != nothing:
            begin, end = state.begin[choice], state.end[choice]
        if begin < b and a < end:
            if choice == nothing:
                begin, end = _hull(state, begin)
                a, b = min(a, begin), max(b, end)
            a, b = _causes(state, begin, end, a, b)
            path.since[depth], path.until[depth] = min(a, path.since[depth]), max(b, path.until[depth])
            return depth, path.mark[depth]
        _undo(state, nothing, path.start[depth], path.mark[depth])
    return -1, 0


@_compiled
def _hull(state: _State, section: int) -> tuple[int, int]:
    """All sections of the buffers that wait in this one."""
    begin, end, placed = state.begin, state.end, state.placed
    first, last = section, section + 1
    for buffer in range(begin.size):
        if not placed[buffer] and begin[buffer] <= section < end[buffer]:
            first, last = min(first, begin[buffer]), max(last, end[buffer])
    return first, last


@_kept
def _search(
    state: _State, path: _Path, ceiling: int, rule: int, favour: Ints, failed: NDArray[np.uint64], nodes: int
) -> tuple[int, int]:
    n, depths = state.size.size, path.begin.size
    depth, mark, used = np.int64(0), np.int64(0), np.int64(0)
    while True:
        a, b = _unfinished(state, path, depth)
        if a == b:
            return FOUND, used
        if used == nodes or depth + 1 == depths or mark + 2 * n + state.top.size > state.trail_at.size:
            return UNKNOWN, used
        used += 1
        path.begin[depth], path.end[depth], path.start[depth], path.decision[depth] = a, b, mark, -1
        alive, mark = _enter(state, path, depth, mark, ceiling, rule, favour, failed)
        while not alive or path.decision[depth] == n:
            if alive:
                section = path.branch[depth]
                since, until = _causes(state, section, section + 1, path.since[depth], path.until[depth])
                path.since[depth], path.until[depth] = min(since, section), max(until, section + 1)
                # A failure that has reasons outside the range is not one of the state that was hashed.
                if path.begin[depth] <= path.since[depth] and path.until[depth] <= path.end[depth]:
                    failed[path.hash[depth] & np.uint64(failed.size - 1)] = path.hash[depth]
            depth, mark = _back(state, path, depth, mark)
            if depth < 0:
                return NONE, used
            alive = True
        section, floor = path.branch[depth], path.floor[depth]
        choice = _next_choice(state, section, floor, path.decision[depth] + 1)
        path.decision[depth] = choice
        if choice < n:
            state.offset[choice] = floor
            mark = _put(state, choice, floor, mark)
        else:
            mark = _leave(state, section, floor, ceiling, mark)
        depth += 1


def search(problem: Problem, ceiling: int, rule: int, favour: Ints, nodes: int) -> tuple[int, Ints, int]:
    """Offsets with which no buffer ends above `ceiling`, the buffers that stand first being tried first.

    `rule` (0 to 3) and `favour` (a number for each section) choose where to branch. Returns FOUND, NONE (there are no
    such offsets) or UNKNOWN (it takes more than `nodes` nodes, or `MOST_CHANGES`), offsets (-1: not placed) in units,
    and the number of nodes.
    """
    state = _state(problem)
    failed = np.zeros(min(1 << max(nodes, 1024).bit_length(), MOST_FAILED), np.uint64)
    outcome, used = _search(state, _path(4 * len(problem.size) + 2), ceiling, rule, favour, failed, nodes)
    return outcome, state.offset, used
