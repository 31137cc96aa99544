"""A real process that is killed, again and again: nothing acknowledged is lost, and nothing is doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from agent.mqtt.spool.spool import Spool
from tests.agent.mqtt.spool import writer
from tests.support.spools import balanced, paged

# All of them when somebody asks for it; a few show the same.
KILLS = int(os.environ.get("TIGHTFIT_SPOOL_KILLS", "6"))
ROOT = Path(__file__).parents[4]


def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    moments = random.Random(9)
    acknowledged, delivered = set[str](), set[str]()
    for start in range(KILLS):
        for line in killed_after(moments.uniform(0.0, 0.5), tmp_path, f"s{start}").splitlines():
            word, message = line.split(" ", 1)
            (acknowledged if word == "ack" else delivered).add(message)
    spool = Spool.open(tmp_path, "last", writer.POLICIES, writer.GAPS, 0.0, "boot", writer.LIMITS)
    entries = list(paged(spool.replay, 0.0))
    waiting = [" ".join(entry.body.decode().split(" ")[:2]) for entry in entries]
    assert len(set(waiting)) == len(waiting)
    assert len({(each.session, each.stream, each.seq) for each in entries}) == len(entries)
    assert acknowledged - delivered - set(waiting) == set()
    assert acknowledged
    assert delivered
    assert balanced(spool)
    # What is in order in each kind is in order as a whole.
    assert [each.position for each in entries] == sorted(each.position for each in entries)
    assert sum(counts.queued for counts in spool.figures.by_kind.values()) == len(entries)
    assert not spool.gaps
    produced = sum(counts.produced for counts in spool.figures.by_kind.values())
    assert produced >= len(acknowledged | delivered | set(waiting))
    spool.close(0.0)


def killed_after(seconds: float, folder: Path, session: str) -> str:
    """What a writer said until it was killed so long after its first word."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/agent/mqtt/spool/writer.py"), str(folder), session]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        # The pipe is read on a thread of communicate(): the moment is random, not what comes of it.
        try:
            rest, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate()
    said = (first + rest).decode()
    return said[: said.rfind("\n") + 1]
