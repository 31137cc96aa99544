"""What was dropped and is not yet told, put together so that gaps need little room themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

# In the place of a name where several are put together, or where it is not known.
ANY = "*"


class Gap(msgspec.Struct, frozen=True):
    """Of the numbers `first` to `last` of a stream, `count` are gone for that reason; what arrived all the same is not.

    A reader that misses a number finds it in such a range. `stream` or `session` is `*` where the damage is such that
    nobody knows whose numbers they were; then `first` and `last` count the records of the kind.
    """

    kind: str
    stream: str
    session: str
    first: int
    last: int
    count: int
    reason: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kind, self.stream, self.session, self.reason


class Ledger:
    """Gaps that are still to be told: one for each stream, session and reason, and at most so many."""

    def __init__(self, most: int, gaps: Iterable[Gap] = ()) -> None:
        self._most = most
        self._gaps: dict[tuple[str, str, str, str], Gap] = {}
        for gap in gaps:
            self.add(gap)

    def __len__(self) -> int:
        return len(self._gaps)

    def all(self) -> list[Gap]:
        """Oldest first."""
        return list(self._gaps.values())

    def add(self, gap: Gap) -> None:
        """Something more was dropped."""
        if gap.key not in self._gaps and len(self._gaps) >= self._most:
            gap = msgspec.structs.replace(gap, stream=ANY)
            if gap.key not in self._gaps and len(self._gaps) >= self._most + self._most // 4:
                gap = msgspec.structs.replace(gap, session=ANY)
        known = self._gaps.get(gap.key)
        self._gaps[gap.key] = gap if known is None else join(known, gap)

    def told(self, gap: Gap) -> None:
        """That much of it has been told."""
        known = self._gaps.pop(gap.key, None)
        if known is None or known.count <= gap.count:
            return
        first = max(known.first, gap.last + 1) if gap.first <= known.first else known.first
        rest = msgspec.structs.replace(known, first=min(first, known.last), count=known.count - gap.count)
        self._gaps[gap.key] = rest


def join(one: Gap, other: Gap) -> Gap:
    """Both in one."""
    first, last = min(one.first, other.first), max(one.last, other.last)
    return msgspec.structs.replace(one, first=first, last=last, count=one.count + other.count)
