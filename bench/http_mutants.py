"""Damaged requests through both lanes of the agent: `python -m bench.http_mutants`.

    python -m bench.http_mutants                        # 2000 mutants of this program's own
    python -m bench.http_mutants --garden FOLDER        # and 2000 by the mutations of http-garden, a checkout of it
    python -m bench.http_mutants --seed 7 --count 100   # others, and fewer

Each mutant of one or more infer requests is sent on two connections. On the first it is what the connection begins
with, so that the fast lane takes as much of it as it takes. On the second a GET comes first, which makes the connection
aiohttp's for good. What comes back must be the same bytes, but for the time of day; no status may be 5xx; and the agent
must be alive, with nothing in its log.

https://github.com/narfindustries/http-garden mutates requests to find servers that read them differently. Its
mutations (tools/mutations.py) need Python 3.12 or newer: one is looked for, and asked for mutants.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import bundles
from tests.support.agents import Agent, serving

PATH = b"/v2/models/adding/infer"
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,-2]}]}'
FIRST = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
# Ends a head that the mutant only begins, of which one lane may have its opinion before the other.
END = b"\r\n\r\n"
# How long nothing has to come before what came is taken for all: at first, and to judge a difference again.
QUIET_S, PATIENT_S = 0.02, 2.0
# What garden's mutations are asked for: a mutant a line, in hexadecimal.
GARDEN = """
import random, sys
from mutations import mutate
random.seed(int(sys.argv[1]))
seeds = [[bytes.fromhex(request) for request in seed.split(",")] for seed in sys.argv[3:]]
for _ in range(int(sys.argv[2])):
    mutant = random.choice(seeds)
    for _ in range(random.randint(1, 4)):
        mutant = mutate(mutant)
    print(b"".join(mutant).hex())
"""


def request(*fields: bytes, line: bytes = b"POST %b HTTP/1.1" % PATH, body: bytes = BODY) -> bytes:
    """An infer request."""
    length = () if any(field.startswith(b"Transfer") for field in fields) else (b"Content-Length: %d" % len(body),)
    return b"\r\n".join([line, b"Host: ecu", *length, *fields, b"", body])


CHUNKED = request(b"Transfer-Encoding: chunked", body=b"%x;a=b\r\n%b\r\n0\r\nT: r\r\n\r\n" % (len(BODY), BODY))
BINARY = BODY.replace(b'"data":[1,-2]', b'"parameters":{"binary_data_size":8}')
SEEDS: tuple[tuple[bytes, ...], ...] = (
    (request(),),
    (request(b"Connection: close"),),
    (request(), request(b"Connection: keep-alive"), request(b"Connection: close")),
    (CHUNKED, request()),
    (request(b"Inference-Header-Content-Length: %d" % len(BINARY), body=BINARY + bytes(8)), request()),
    (request(b"Content-Type: application/json", b"Priority: u=1", b"Request-Timeout-Ms: 9000"), FIRST, request()),
    (request(line=b"POST %b HTTP/1.0" % PATH), request()),
)
PIECES = (
    b"\r\n", b"\r", b"\n", b"\0", b":", b"\t", b" ", b"\x7f", b"\xff", b",", b";", b"+", b"0", b"0x", b"/", b"%2f",
    b"\r\n\r\n", b"Content-Length: 0\r\n", b"Content-Length: 71\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: b\r\n",
    b"Transfer-Encoding: identity\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\n", b"Upgrade: h2c\r\n",
    b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b" folded\r\n", b"X: \r\n", b": \r\n", b"\xe2\x80\x8b",
)  # fmt: skip


def mutants(seed: int, count: int) -> Iterator[bytes]:
    """Requests with bytes taken out, put in, replaced, repeated, or cut off."""
    rng = random.Random(seed)
    for _ in range(count):
        data = b"".join(rng.choice(SEEDS))
        for _ in range(rng.randint(1, 3)):
            # Most bytes are those of bodies, and most of what is interesting is in heads.
            end = len(data) if rng.random() < 0.3 else min(len(data), 160)
            at = rng.randrange(end + 1)
            size = rng.choice((0, 0, 1, 1, 2, rng.randrange(1, 40)))
            put = rng.choice((b"", rng.randbytes(1), rng.choice(PIECES), data[at : at + size] * 2))
            line = data.find(b"\n", at) + 1
            if rng.random() < 0.3 and line:
                at, size = line, 0  # a line of its own
            data = data[:at] + put + data[at + size :]
            if rng.random() < 0.05:
                data = data[: rng.randrange(len(data) + 1)]
        yield data


def garden_mutants(folder: Path, seed: int, count: int) -> list[bytes]:
    """The same by http-garden. Raises LookupError where there is no Python that can."""
    python = _newer_python()
    seeds = [",".join(each.hex() for each in streams) for streams in SEEDS]
    command = [python, "-c", GARDEN, str(seed), str(count), *seeds]
    done = subprocess.run(command, cwd=folder / "tools", capture_output=True, text=True, check=True)
    return [bytes.fromhex(line) for line in done.stdout.splitlines()]


def _newer_python() -> str:
    names = [sys.executable, os.environ.get("PYTHON", ""), *(f"python3.{minor}" for minor in range(12, 20))]
    for name in filter(None, names):
        check = [name, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]
        if shutil.which(name) and subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return name
    raise LookupError("http-garden needs Python 3.12 or newer: set PYTHON to one")


class Reply(NamedTuple):
    """What came back for a mutant, without what differs from moment to moment; and whether the agent then closed."""

    data: bytes
    closed: bool

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", self.data)]


def reply(port: int, mutant: bytes, first: bytes, quiet_s: float) -> Reply:
    """Send it on a connection of its own, behind `first`, and take what comes until nothing more does."""
    data, closed = b"", False
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 10) as client:
        if first:
            client.sendall(first)
            data = client.recv(4096)
            assert data.startswith(b"HTTP/1.1 200 "), data
            data = b""
        for sent in (mutant, END):
            with contextlib.suppress(TimeoutError):
                client.sendall(sent)
                client.settimeout(max(quiet_s, 0.1))
                while not closed:
                    came = client.recv(1 << 16)
                    data, closed = data + came, not came
                    client.settimeout(quiet_s)
    return Reply(re.sub(rb"Date: [^\r]*\r\n", b"", data), closed)


class Finding(NamedTuple):
    """A mutant on which the lanes differ, or at which the agent failed."""

    mutant: bytes
    fast: Reply
    aiohttp: Reply


def judge(port: int, mutant: bytes) -> tuple[Finding | None, Reply]:
    """What is wrong with it, if anything. Where the lanes differ they are asked again, and given more time."""
    for quiet_s in (QUIET_S, PATIENT_S, PATIENT_S):
        fast, other = (reply(port, mutant, first, quiet_s) for first in (b"", FIRST))
        failed = any(status >= 500 for status in (*fast.statuses, *other.statuses))
        if fast == other and not failed:
            return None, fast
    return Finding(mutant, fast, other), fast


def run(agent: Agent, cases: Sequence[bytes]) -> tuple[list[Finding], collections.Counter[str]]:
    """(what is wrong, how often which statuses were answered). Raises AssertionError when the agent is not well."""
    findings, statuses = [], collections.Counter[str]()
    for mutant in cases:
        finding, answered = judge(agent.port, mutant)
        findings += [finding] if finding else []
        statuses[" ".join(map(str, answered.statuses)) or "none"] += 1
    assert agent.request("/v2/health/live")[0] == 200
    assert agent.post(BODY)[0] == 200
    assert agent.metric("tightfit_in_flight") == 0
    assert "Traceback" not in agent.log, agent.log[-4000:]
    return findings, statuses


def main() -> int:
    """Print what was found; 0 if nothing was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--garden", type=Path, help="a checkout of http-garden")
    options = parser.parse_args()
    sources = {"own": list(mutants(options.seed, options.count))}
    if options.garden:
        sources["http-garden"] = garden_mutants(options.garden, options.seed, options.count)
    found = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(bundles.adding(folder / "adding.tfb"), folder / "log") as agent:
            for source, cases in sources.items():
                findings, statuses = run(agent, cases)
                print(f"{source}: {len(cases)} mutants, {len(findings)} findings")
                print("  answered " + ", ".join(f"{key} ({count})" for key, count in statuses.most_common(12)))
                for finding in findings:
                    print(f"  {finding.mutant!r}\n    fast lane {finding.fast}\n    aiohttp   {finding.aiohttp}")
                found += len(findings)
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
