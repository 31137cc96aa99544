"""Of each boot, a moment at which the time was known: so that what was made before can still be dated when it is sent
after another boot. A small file beside the spool."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.mqtt.moment import Moment

# What waits is a week old at most; a board that boots more often than twice a week knows its last ones.
_MOST = 16
_FILE_BYTES = 64 << 10


class Boots:
    """Reads the file when made; `note` says whether `save` is worth a write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read(path)

    @property
    def known(self) -> Mapping[str, Moment]:
        """By boot."""
        return self._known

    def note(self, now: Moment) -> bool:
        """It is `now`; True where that is the first time that this boot knows it, or knows it better."""
        before = self._known.get(now.boot_id)
        if not now.quality.is_synced or (before is not None and before.quality == now.quality):
            return False
        self._known = {**{boot: each for boot, each in self._known.items() if boot != now.boot_id}, now.boot_id: now}
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        return True

    def save(self) -> None:
        """Write it. Raises OSError."""
        write_whole(self._path, msgspec.json.encode(self._known))


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` in the place of a small file: after a power cut it is the old one or the new one. Raises OSError."""
    made = path.with_name(path.name + ".new")
    with made.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_whole(path: Path) -> bytes:
    """A small file; empty where it is not there, or cannot be what was written."""
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES + 1)
    except OSError:
        return b""
    return b"" if len(data) > _FILE_BYTES else data


def _read(path: Path) -> dict[str, Moment]:
    try:
        return msgspec.json.decode(read_whole(path) or b"{}", type=dict[str, Moment])
    except msgspec.DecodeError:
        return {}
