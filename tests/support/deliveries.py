"""Whether what was heard of a device is what it said: nothing missing without a reason, nothing twice, all in order.

It knows of messages what docs/mqtt.md says, and no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tests.support.operators import Heard


class Place(NamedTuple):
    """Of a numbered message."""

    stream: str
    session: str
    seq: int


def place_of(heard: Heard) -> Place | None:
    """None of what is not numbered."""
    if "seq" not in heard.user:
        return None
    return Place(
        heard.user.get("stream") or "/".join(heard.topic.split("/")[-3:]), heard.user["session"], int(heard.user["seq"])
    )


def faults_of(heard: Sequence[Heard]) -> list[str]:
    """What is wrong, a line each, of a device that has not booted meanwhile."""
    numbered = [(place, each) for each in heard if (place := place_of(each))]
    first: dict[Place, Heard] = {}
    faults = []
    for place, each in numbered:
        known = first.setdefault(place, each)
        if known.body != each.body:
            faults.append(f"{place} says two things")
    faults += _missing(first, [each for each in heard if each.user.get("schema") == "gap/1"])
    order = _sessions(first)
    for late in (False, True):
        found = [place for place, each in first.items() if ("hist" in each.user) is late]
        faults += _disorder(found, order, "history" if late else "live")
    return faults


def _sessions(first: Mapping[Place, Heard]) -> dict[str, int]:
    """Sessions in order, by the clock that nobody sets: that of a birth is not heard where none was connected."""
    began: dict[str, int] = {}
    for place, each in first.items():
        began[place.session] = min(each.json["mono"], began.get(place.session, 1 << 63))
    return {session: at for at, session in enumerate(sorted(began, key=lambda session: began[session]))}


def _missing(places: Iterable[Place], gaps: Sequence[Heard]) -> list[str]:
    """Numbers below the highest that came, and no gap says where they are."""
    by_stream: dict[tuple[str, str], set[int]] = defaultdict(set)
    for place in places:
        by_stream[place.stream, place.session].add(place.seq)
    faults = []
    for (stream, session), seqs in by_stream.items():
        missing = set(range(max(seqs))) - seqs
        told = {place_of(each): each.body for each in gaps}
        for body in told.values():
            if body["stream"] in (stream, "*") and body["session"] in (session, "*"):
                missing -= set(range(body["first"], body["last"] + 1))
        if missing:
            faults.append(f"{stream} of {session}: {sorted(missing)[:10]} are missing, of {max(seqs) + 1}")
    return faults


def _disorder(places: Iterable[Place], order: dict[str, int], what: str) -> list[str]:
    newest: dict[str, tuple[int, int]] = {}
    faults = []
    for place in places:
        at = order[place.session], place.seq
        if at < newest.get(place.stream, (-1, -1)):
            faults.append(f"{what}: {place} came behind {newest[place.stream]}")
        newest[place.stream] = max(at, newest.get(place.stream, at))
    return faults
