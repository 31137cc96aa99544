"""What happens to models and engines, for those who follow it: the newest of it is kept, in bounded memory."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable

import msgspec

from agent.feed import Feed
from agent.http.framing.records import Record
from agent.results import Results

# Some hundred happenings: of each a few names, and an error of at most so many characters.
_BYTES = 256 << 10
_ENTRIES = 256
_TEXT = 500


class Happening(Record, frozen=True, kw_only=True):
    """`seq` counts from 1 with every start of the agent; `at` is in UTC (RFC 3339)."""

    seq: int = 0
    at: str = ""


class Load(Happening, frozen=True, kw_only=True, tag="load"):
    """An engine has loaded a version, in so many seconds."""

    model: str
    version: str
    seconds: float


class Activate(Happening, frozen=True, kw_only=True, tag="activate"):
    """From now on requests go to that version; `before` is the one that had them."""

    model: str
    version: str
    before: str | None = None


class Unload(Happening, frozen=True, kw_only=True, tag="unload"):
    """A version's engine has ended, and its memory is free."""

    model: str
    version: str


class Failed(Happening, frozen=True, kw_only=True, tag="failed"):
    """A model could not be activated, and why."""

    model: str
    error: str


class EngineDown(Happening, frozen=True, kw_only=True, tag="engine_down"):
    """A version's engine died, and whether it is started again."""

    model: str
    version: str
    how: str
    starts_again: bool


class EngineUp(Happening, frozen=True, kw_only=True, tag="engine_up"):
    """A version's engine that died runs again; it is the `restarts`th one after the first."""

    model: str
    version: str
    restarts: int


class Breaker(Happening, frozen=True, kw_only=True, tag="breaker"):
    """A version failed too often in a row and is asked nothing (`open`), or can be asked again."""

    model: str
    version: str
    open: bool


class Degrade(Happening, frozen=True, kw_only=True, tag="degrade"):
    """The level of degradation changed (docs/overload.md)."""

    level: int
    before: int
    step: str
    cause: str


class Journal:
    """Notes what happens; `feed` is for who follows it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.feed: Feed[Happening] = Feed(Results(new_epoch(), _BYTES, _ENTRIES, patience_s=0.0), clock)

    def note(self, happening: Happening) -> None:
        """It happened now."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        texts = {
            name: text[:_TEXT]
            for name in happening.__struct_fields__
            if isinstance(text := getattr(happening, name), str)
        }
        happening = msgspec.structs.replace(happening, **{**texts, "at": now})
        self.feed.put(happening, sum(map(len, texts.values())))


def new_epoch() -> str:
    """What tells the numbers of this start of the agent from those of others."""
    return secrets.token_hex(4)
