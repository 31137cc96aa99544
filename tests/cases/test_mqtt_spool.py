"""What broke other clients of a broker that is away. Proven where the part is tested:

| what | reported at | proven by |
|---|---|---|
| messages made offline are lost, or kept without bound | paho#50, paho#857, paho#483, Opentrons/opentrons#19107 | here |
| a queue on disk that stops all when it is full | aws-greengrass-nucleus#825, telegraf#16981 | tests/agent/mqtt/spool/test_full_disk.py |
| what was queued is not there after a restart | paho#857, reef-pi#715 | tests/agent/mqtt/spool/test_kills.py, test_crashes.py |

paho is eclipse-paho/paho.mqtt.python.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MESSAGES = 50_000
OFFLINE = """
import json, sys
from pathlib import Path
from agent.mqtt.spool.policy import Limits, Policy
from agent.mqtt.spool.spool import Spool
from tests.support.spools import GAPS, POLICIES

def kilobytes(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])

policies = {**POLICIES, "m": Policy(16 << 20)}
spool = Spool.open(Path(sys.argv[1]), "s1", policies, GAPS, 0.0, "boot", Limits(free_floor_bytes=0))
before = kilobytes("VmRSS")
for number in range(int(sys.argv[2])):
    spool.append("m", "reader/m/result", b"%08d" % number + b"x" * 992, 0.0)
    if spool.due(0.0):
        spool.sync(0.0)
spool.close(0.0)
figures = spool.figures
print(json.dumps([kilobytes("VmHWM") - before, figures.by_kind["m"].dropped, figures.by_kind["m"].queued]))
"""


def test_messages_made_offline_are_bounded_on_disk_and_in_memory_and_the_newest_stay(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path), str(MESSAGES)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    grown_kb, dropped, queued = json.loads(said)
    assert dropped == {"oldest": MESSAGES - queued}
    on_disk = sum(path.stat().st_size for path in (tmp_path / "m").iterdir())
    assert 12 << 20 < on_disk <= 16 << 20
    # paho kept 88 MB of these.
    assert grown_kb < 12 << 10
    newest = max((tmp_path / "m").iterdir()).read_bytes()
    assert b"%08d" % (MESSAGES - 1) in newest
