"""What keeps the scripts from running is one clear line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(ROOT / script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_python_that_is_not_there() -> None:
    status, said = run("scripts/demo", PYTHON="no-such-python")
    assert status == 1
    assert said.startswith("scripts/demo: error: no-such-python is not installed (Python >= 3.10 is needed")
    assert said.count("\n") == 1


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    status, said = run("scripts/demo", PYTHON=str(old))
    assert status == 1
    assert said.startswith("scripts/demo: error: Python 3.9.2 is too old")
    assert said.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root installs what is missing")
def test_missing_packages_are_named(tmp_path: Path) -> None:
    for name, text in (("dpkg-query", "exit 1"), ("apt-get", "exit 1"), ("sudo", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    status, said = run("scripts/test", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert status == 1
    assert said.startswith("scripts/test: error: these packages are missing: sudo apt-get install ")
    assert "opencv-doc" in said
