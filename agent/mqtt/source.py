"""Where the link takes its messages from, and says what became of them: the spool, or a list in a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Placed(Protocol):
    """A message with its place; all else is for whoever encodes it."""

    @property
    def position(self) -> int:
        """Rises with every message, and is never given twice."""


E_co = TypeVar("E_co", bound=Placed, covariant=True)


class Source(Protocol[E_co]):
    """Messages that may be sent, which are those that a crash no longer loses.

    `live` and `replay` give the same message until `delivered` or `rejected` was said of it; what is on its way is
    left out by `after`. Both are said in any order.
    """

    def connected(self) -> None:
        """A connection begins: all that is here now is history, and what comes from now on is live."""

    def live(self, most: int, after: int = -1) -> Sequence[E_co]:
        """What came since `connected`, in order, behind the position `after`."""

    def replay(self, most: int, after: int = -1) -> Sequence[E_co]:
        """What was there before, in order, behind the position `after`."""

    def delivered(self, position: int) -> None:
        """The broker has it."""

    def rejected(self, position: int, reason: str) -> None:
        """No broker will ever take it."""
