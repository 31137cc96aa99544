"""Files with secrets: by path, or as a credential that systemd hands over (systemd.exec(5), CREDENTIALS)."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.errors import ConfigError

_CREDENTIAL = "credential:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
# A chain of certificates is some KiB, a revocation list some hundred.
MAX_BYTES = 4 << 20


def located(text: str) -> Path:
    """Where a file is that the configuration names: a path, or `credential:NAME`. Raises ConfigError."""
    if not text.startswith(_CREDENTIAL):
        return Path(text)
    name = text.removeprefix(_CREDENTIAL)
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{text!r} names no credential", "write credential:NAME, with the name after LoadCredential=")
    if not folder:
        raise ConfigError(
            f"{text}: systemd handed over no credentials",
            f"add LoadCredential={name}:/PATH to the unit, or name a path",
        )
    return Path(folder) / name


def read(path: Path, what: str) -> bytes:
    """All of it. Raises ConfigError, which says `what` it is."""
    try:
        if not path.is_file():
            problem = "is no file" if path.exists() else "is not there"
            raise ConfigError(f"{what} {path} {problem}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{what} {path} is larger than {MAX_BYTES} bytes")
    return data


def is_private(text: str) -> bool:
    """Whether nobody but its owner, and root, can read the file that the configuration names so. Of a credential the
    bits of the group say what its access control list has at most (acl(5)), which is how systemd lets a service read
    what is root's: it names the service's user alone."""
    others = 0o007 if text.startswith(_CREDENTIAL) else 0o077
    try:
        return not located(text).stat().st_mode & others
    except OSError:
        return False


class Watch:
    """Looks at files every so many seconds, and calls `changed` when one is another than before.

    Whoever replaces a certificate replaces its key too, one after the other: a change is told when the next look finds
    all as the last one did.
    """

    def __init__(self, paths: Sequence[Path], every_s: float, changed: Callable[[], object]) -> None:
        self._paths, self._every_s, self._changed = paths, every_s, changed
        self._told = self._seen = self._look()
        self._timer = asyncio.get_running_loop().call_later(every_s, self._tick)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)
        now, before = self._look(), self._seen
        self._seen = now
        if now == before and now != self._told:
            self._told = now
            self._changed()

    def _look(self) -> list[tuple[int, ...]]:
        return [_state_of(path) for path in self._paths]


def _state_of(path: Path) -> tuple[int, ...]:
    """What differs when the file does, or when its name stands for another."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
