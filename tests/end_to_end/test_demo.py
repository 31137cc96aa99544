"""`scripts/demo` from a folder of somebody's own, as the README promises it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.demo import EXPECTED

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(DEMO), *arguments], cwd=folder, capture_output=True, text=True, timeout=840, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first run prepares the environment and fetches the model
def test_the_demo_reads_the_image_and_ends_with_0(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(EXPECTED) == 3
    assert "budget" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("option", ["--target", "--scheme"])
def test_a_step_that_fails_is_one_line(tmp_path: Path, option: str) -> None:
    done = run(tmp_path, option, "nonsense")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("scripts/demo: error: ")
    assert "nonsense" in last
    assert "Traceback" not in done.stderr
