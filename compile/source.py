"""The source model's identity: digests made while it is being compiled, and whether it changed meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile.errors import ModelError
from compile.graph import external_files, ir
from targets.bundle import Source, file_sha256

# How far hashing runs in front of the work: it reads sequentially, and what it read the work then finds in memory.
AHEAD_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class SourceStamp:
    """What the files looked like when the compilation began: size and time of each, by name."""

    file: Path
    weights: tuple[tuple[str, Path], ...]
    seen: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, file: Path, model: ir.Model) -> SourceStamp:
        """Look at the model file and the files of its external data."""
        weights = tuple(sorted(external_files(model).items()))
        return cls(file, weights, _look(file, weights))

    def described(self) -> dict[str, Any]:
        """What a resumed compilation compares: names, sizes and times, and the graph file's digest."""
        return {"sha256": file_sha256(self.file), "files": [list(entry) for entry in self.seen]}

    def check_unchanged(self) -> None:
        """Raise ModelError naming the file that is not as it was."""
        for seen, path in zip(self.seen, (self.file, *(path for _, path in self.weights)), strict=True):
            try:
                info = path.stat()
            except OSError:
                info = None
            if info is None or seen[1:] != (info.st_size, info.st_mtime_ns):
                raise ModelError(f"{path} changed while it was compiled", "compile it again")

    @contextlib.contextmanager
    def hashing(self) -> Iterator[Digests]:
        """Hash the files beside the work, in a thread: the pages that quantizing reads are then read once.

        Where the work fails and the files are not as they were, that is what is said.
        """
        digests = Digests(self)
        digests.start()
        try:
            yield digests
        except Exception:
            self.check_unchanged()
            raise
        finally:
            digests.stop()


class Digests:
    """The thread that hashes."""

    def __init__(self, stamp: SourceStamp) -> None:
        self._stamp = stamp
        self._thread = threading.Thread(target=self._hash, name="source digest", daemon=True)
        self._stopped = False
        self._model = ""
        self._weights = hashlib.sha256()
        self._error: OSError | None = None
        self._total = sum(size for _, size, _ in stamp.seen)
        self._hashed = 0
        self._turn = threading.Condition()
        self._limit = AHEAD_BYTES

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it, done or not."""
        with self._turn:
            self._stopped = True
            self._turn.notify()
        self._thread.join()

    def reached(self, fraction: float) -> None:
        """The work stands at this share of the source: hashing stays near it, where pages are in memory."""
        with self._turn:
            self._limit = int(fraction * self._total) + AHEAD_BYTES
            self._turn.notify()

    def _hash(self) -> None:
        try:
            self._model = file_sha256(self._stamp.file, self._go_on)
            for name, path in self._stamp.weights:
                self._weights.update(f"{name}\0{file_sha256(path, self._go_on)}\n".encode())
        except OSError as error:
            self._error = error
        except _StoppedError:
            return

    def _go_on(self, nbytes: int) -> None:
        self._hashed += nbytes
        with self._turn:
            self._turn.wait_for(lambda: self._stopped or self._hashed <= self._limit)
            if self._stopped:
                raise _StoppedError

    def source(self) -> Source:
        """The digests, once they are made; raises ModelError when the files are not as they were at the beginning."""
        self.reached(1.0)
        self._thread.join()
        if self._error is not None:
            raise ModelError(f"cannot read {self._error.filename}: {self._error.strerror}", "check the source model")
        self._stamp.check_unchanged()
        return Source(self._stamp.file.name, self._model, self._weights.hexdigest() if self._stamp.weights else "")


class _StoppedError(Exception):
    """The compilation ended before its source was hashed."""


def _look(file: Path, weights: tuple[tuple[str, Path], ...]) -> tuple[tuple[str, int, int], ...]:
    infos = [(file.name, file.stat()), *((name, path.stat()) for name, path in weights)]
    return tuple((name, info.st_size, info.st_mtime_ns) for name, info in infos)
