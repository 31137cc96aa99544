"""`tightfit-compile` called in this process, as its entry point is, and what a refusal must look like."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compile.__main__ import main


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """What is on standard error beside warnings."""
        return [line for line in self.err.splitlines() if not line.startswith("warning:")]


Run = Callable[..., Outcome]


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the program with these arguments; returns its exit code and what it printed."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tightfit-compile", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return run


def refused(tightfit: Run, folder: Path, words: str, *arguments: str | Path) -> None:
    """Compile into `folder`/out/m.tfb; it must fail with one line and leave nothing."""
    out = folder / "out"
    out.mkdir()
    done = tightfit(*arguments, "--json", "-o", out / "m.tfb")
    assert done.code == 2
    assert done.out == ""
    assert len(done.complaints) == 1, done.err
    assert done.complaints[0].startswith("tightfit-compile: error: ")
    assert re.search(words, done.complaints[0]), done.complaints[0]
    assert not list(out.iterdir())
