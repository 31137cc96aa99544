"""What a log never shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.agents import ROOT

FAILS = """
import sys
from agent import log
log.configure("info", sys.argv[1])
def fails():
    token = "".join(["not", "for", "anybody"])
    raise ValueError("a fault")
try:
    fails()
except ValueError:
    log.get("http").exception("it failed")
"""


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_traceback_shows_no_values(style: str) -> None:
    done = subprocess.run([sys.executable, "-c", FAILS, style], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "ValueError: a fault" in done.stderr
    assert "notforanybody" not in done.stderr
