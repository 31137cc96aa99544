"""What hears how far the compiler is; for people as bars on a terminal or plain lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from targets.tensor import human


class Progress:
    """Hears what the pipeline does; the default stays silent."""

    def phase(self, name: str, total: int = 0) -> None:
        """A phase begins; `total` is its size in bytes, 0 where that is not known."""

    def advance(self, nbytes: int) -> None:
        """So much of the phase is done."""

    def warn(self, text: str) -> None:
        """Something that the person should know."""


class TerminalProgress(Progress):
    """Bars where standard error is a terminal, one line per phase where it is not."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._done = 0
        self._since = time.monotonic()
        if self._console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description:20}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )

    def __enter__(self) -> TerminalProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._close_phase()
        if self._bars:
            self._bars.stop()

    def phase(self, name: str, total: int = 0) -> None:
        self._close_phase()
        self._phase, self._done, self._since = name, 0, time.monotonic()
        if self._bars:
            self._task = self._bars.add_task(name, total=total or None)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._bars and self._task is not None:
            self._bars.advance(self._task, nbytes)

    def warn(self, text: str) -> None:
        self._console.print(f"[yellow]warning:[/] {escape(text)}")

    def _close_phase(self) -> None:
        if not self._phase:
            return
        if self._bars and self._task is not None:
            self._bars.remove_task(self._task)
        seconds = time.monotonic() - self._since
        rate = f", {human(self._done)} at {human(self._done / seconds)}/s" if self._done and seconds > 0.01 else ""
        self._console.print(f"{self._phase}: {seconds:.1f} s{rate}", highlight=False)
        self._phase = ""


class JsonProgress(Progress):
    """Silent on standard output, which belongs to the JSON; warnings still reach standard error."""

    def __enter__(self) -> JsonProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def warn(self, text: str) -> None:
        sys.stderr.write(f"warning: {text}\n")
