"""Bytes that one pass over a model takes from its storage, when not all weights stay in memory. Pure.

Passes repeat: frames of a video, steps of a decoder. A cache that drops what was used longest ago then drops exactly
what comes next, and reads everything in every pass as soon as anything does not fit. The best that any cache can do
keeps what is used again soonest (Belady 1966), and comes close to keeping a fixed set, which is what pinning does.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

Weights = Sequence[tuple[str, int]]
"""Uses of weights in the order of one pass: name and bytes."""


def segment_bytes(segments: Iterable[Mapping[str, int]], pinned: Collection[str] = ()) -> int:
    """Of a pass that loads each segment's distinct weights, but for those that are pinned."""
    return sum(nbytes for weights in segments for name, nbytes in weights.items() if name not in pinned)


def lru_bytes(uses: Weights, capacity: int) -> int:
    """Of every pass but the first, where what was used longest ago makes room.

    Each weight is in memory as a whole while it is used; one that is larger than `capacity` is never kept.
    """
    cache: collections.OrderedDict[str, int] = collections.OrderedDict()
    read = 0
    for _ in range(2):
        read = 0
        for name, nbytes in uses:
            if name not in cache:
                read += nbytes
            cache[name] = nbytes
            cache.move_to_end(name)
            while sum(cache.values()) > capacity:
                cache.popitem(last=False)
    return read


def belady_bytes(uses: Weights, capacity: int, passes: int) -> list[int]:
    """Of each pass, the first included, where what is used again last makes room; nothing is, behind the last pass.

    Single bytes can be dropped, as pages can, so that no cache which holds a weight while it is used reads fewer bytes
    in all.
    """
    length = len(uses)
    following = _next_uses(uses)
    resident: dict[str, int] = {}
    due: dict[str, float] = {}
    read = [0] * passes
    for turn in range(passes):
        for at, (name, nbytes) in enumerate(uses):
            held = resident.pop(name, 0)
            read[turn] += nbytes - held
            excess = sum(resident.values()) + nbytes - capacity
            for other in sorted(resident, key=lambda n: (-due[n], n)):
                dropped = min(max(excess, 0), resident[other])
                resident[other] -= dropped
                excess -= dropped
            resident[name] = min(nbytes, capacity)
            again = turn * length + at + following[at]
            due[name] = again if again < passes * length else math.inf
    return read


def _next_uses(uses: Weights) -> list[int]:
    """How many uses later each weight is used again, in passes that repeat."""
    length = len(uses)
    found = [0] * length
    coming: dict[str, int] = {}
    for at in reversed(range(2 * length)):
        name = uses[at % length][0]
        if at < length:
            found[at] = coming[name] - at
        coming[name] = at
    return found
