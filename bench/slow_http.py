"""Runs slowhttptest against the agent: `python -m bench.slow_http [--save]`.

https://github.com/shekyan/slowhttptest (Debian has it under that name) opens many connections that send a head, or a
body, little by little, or read an answer so. While it does, an infer request and the health are asked again and again,
each on a connection of its own: both must be answered, and slowhttptest must find the service available.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.machine import describe_machine, measured_on
from tests.support import bundles
from tests.support.agents import Agent, serving

RESULT = Path(__file__).parent / "results" / "slow_http.md"
MODES = {
    "heads, a line every 2 s": ("-H", "-i", "2"),
    "bodies, a piece every 2 s": ("-B", "-i", "2", "-s", "8192", "-t", "POST"),
    "answers, read 1 byte every 2 s": ("-X", "-w", "1", "-y", "8", "-n", "2", "-z", "1", "-k", "3"),
}
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}

CONNECTIONS = 200


class Result(NamedTuple):
    """What slowhttptest says at its end, and how often the agent answered others meanwhile."""

    available: bool
    closed: int
    asked: int
    answered: int
    slowest_s: float


def attack(agent: Agent, options: Sequence[str], seconds: int) -> Result:
    """Let it run for so long."""
    url = f"{agent.url}/v2/models/{agent.name}/infer"
    command = ["slowhttptest", "-c", str(CONNECTIONS), "-r", str(CONNECTIONS), "-l", str(seconds), "-p", "5", "-u", url]
    asked = answered = 0
    slowest_s = 0.0
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None:
            asked += 2
            began = time.monotonic()
            answered += agent.request("/v2/health/live")[0] == 200
            answered += agent.post(BODY)[0] == 200
            slowest_s = max(slowest_s, time.monotonic() - began)
            time.sleep(0.05)
        assert process.stdout is not None
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", process.stdout.read())
    states = re.findall(r"service available:\s*(\w+)", text)
    closed = re.findall(r"closed:\s*(\d+)", text)
    if not states:
        raise SystemExit(f"slowhttptest said something else: {text[-500:]}")
    return Result(set(states) == {"YES"}, int(closed[-1]) if closed else 0, asked, answered, slowest_s)


def main() -> int:
    """0 where the service was available throughout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20, help="of each way to be slow")
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    options = parser.parse_args()
    if shutil.which("slowhttptest") is None:
        parser.error("slowhttptest is not there: apt install slowhttptest")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(bundles.adding(folder / "adding.tfb", 8), folder / "log") as agent:
            results = {mode: attack(agent, how, options.seconds) for mode, how in MODES.items()}
            assert "Traceback" not in agent.log
    lines = [
        "# Slow clients",
        "",
        f"slowhttptest with {CONNECTIONS} connections for {options.seconds} s each, by `python -m bench.slow_http`; "
        "meanwhile another, of the same address, asked for the health and for an inference in turn. A body that does "
        "not come holds a slot until it is given up: of one address, others wait behind it.",
        "",
        "| what is slow | service available | closed by the agent | others asked | answered | slowest |",
        "|---|---|---|---|---|---|",
        *[
            f"| {mode} | {'yes' if each.available else '**no**'} | {each.closed} | {each.asked} | {each.answered} "
            f"| {each.slowest_s:.2f} s |"
            for mode, each in results.items()
        ],
    ]
    text = "\n".join((*lines, "", measured_on(describe_machine("aiohttp", "uvloop")), ""))
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text)
    return not all(each.available and each.asked == each.answered for each in results.values())


if __name__ == "__main__":
    sys.exit(main())
