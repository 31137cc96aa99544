"""What a log never shows."""

from __future__ import annotations

import re
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


OBEYED = r"""
import sys
from agent import log
log.configure("info", sys.argv[1])
log.get("http").info("what\x1b[2Jcame", path="/\x1b]0;x\x07\x9b2J\u202e\r\nforged", other="\u00e9")
"""


@pytest.mark.parametrize("style", ["json", "console"])
def test_no_value_moves_the_cursor_or_begins_a_line(style: str) -> None:
    run = [sys.executable, "-X", "utf8", "-c", OBEYED, style]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, check=True)
    text = done.stderr.decode("utf-8")
    # The console's own colours.
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert shown.removesuffix("\n").isprintable(), ascii(shown)
    assert "forged" in shown
    assert len(text.splitlines()) == 1
