"""Whether the agent grows while it serves: `python -m bench.soak --requests N | --minutes M [--save]`.

The real agent over HTTP, with everything that clients do: batches of 1 to 8 rows in JSON and binary, priorities,
deadlines that cannot be kept, runs that fail, bodies that are not JSON, models that are not there, connections that
end in the middle of a body and before an answer. After a minute, and 50,000 requests where the machine is slow, the
load pauses and memory, descriptors and threads of both processes are noted; at the end once more. It fails (exit 1)
where by then one has 1 % more resident memory, or more descriptors or threads, or where an answer was not one that was
to be expected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from agent.memory import pss_by_kind
from bench.machine import describe_machine, measured_on
from tests.support import bundles
from tests.support.agents import Agent, serving

RESULT = Path(__file__).parent / "results" / "soak.md"
WARM_S, WARM_REQUESTS = 60.0, 50_000
QUIET_S = 2.0
GROWTH = 0.01
CLIENTS, SLOTS = 24, 8
MIB = 1 << 20
GATEWAY, ENGINE = "gateway", "engine"


# --- what clients send


@dataclass(frozen=True)
class Sent:
    """A request as it goes out; `statuses` are those that may come back, none where the client leaves before."""

    kind: str
    data: bytes
    statuses: frozenset[int]


def head(path: str, length: int, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *lines, "", "")).encode()


def infer(rows: int, first: int, binary: bool, **parameters: int) -> bytes:
    """A request whose rows are picked from a table at `first` and after it; from 16 on there is nothing."""
    x, at = np.ones((rows, 8), np.float32), np.arange(first, first + rows, dtype=np.int64)
    inputs: list[dict[str, object]] = [
        {"name": "x", "datatype": "FP32", "shape": [rows, 8]},
        {"name": "at", "datatype": "INT64", "shape": [rows]},
    ]
    raw = b""
    values: tuple[np.ndarray[Any, Any], ...] = (x, at)
    for tensor, value in zip(inputs, values, strict=True):
        if binary:
            tensor["parameters"] = {"binary_data_size": value.nbytes}
            raw += value.tobytes()
        else:
            tensor["data"] = value.ravel().tolist()
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary, **parameters}}).encode()
    lines = (f"Inference-Header-Content-Length: {len(text)}",) if binary else ()
    return head("/v2/models/picking/infer", len(text) + len(raw), *lines) + text + raw


def traffic(random_: random.Random) -> list[tuple[int, Sent]]:
    """(weight, request) of everything that comes, made once: what is measured is the agent."""
    good = [
        (8, Sent("answered", infer(rows, random_.randrange(16 - rows), binary, **extra), frozenset({200})))
        for rows in range(1, 9)
        for binary in (False, True)
        for extra in ({}, {"priority": random_.randint(1, 255)})
    ]
    whole = infer(4, 0, True)
    return [
        *good,
        (20, Sent("run fails", infer(2, 15, False), frozenset({500}))),
        (10, Sent("too late", infer(1, 0, False, timeout=1), frozenset({504, 503}))),
        (10, Sent("short deadline", infer(8, 0, True, timeout=3000), frozenset({200, 503, 504}))),
        (10, Sent("not JSON", head("/v2/models/picking/infer", 9) + b"{not json", frozenset({400}))),
        (10, Sent("wrong shape", infer(9, 0, False), frozenset({400}))),
        (10, Sent("no such model", head("/v2/models/other/infer", 2) + b"{}", frozenset({404}))),
        (5, Sent("metrics", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", frozenset({200}))),
        (5, Sent("leaves in the body", whole[:-20], frozenset())),
        (5, Sent("leaves before the answer", whole, frozenset())),
    ]


class Client:
    """One connection at a time, opened again after it was left or closed."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._random = port, random.Random(seed)
        weights, self._sent = zip(*traffic(self._random), strict=True)
        self._weights = list(np.cumsum(weights))
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until told to stop; nothing is left open."""
        while not stop.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                while not stop.is_set() and await self._ask(reader, writer):
                    pass
            except (OSError, asyncio.IncompleteReadError) as error:
                self.wrong.append(f"the connection was lost: {error!r}")
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is still good."""
        (sent,) = self._random.choices(self._sent, cum_weights=self._weights)
        writer.write(sent.data)
        self.seen[sent.kind] += 1
        if not sent.statuses:
            await asyncio.sleep(0)
            return False
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(fields["content-length"]))
        status = int(lines[0].split()[1])
        if status not in sent.statuses:
            self.wrong.append(f"{sent.kind}: {status} {body[:200]!r}")
        return fields.get("connection") != "close"


# --- what is noted


@dataclass(frozen=True)
class Process:
    """Bytes, and numbers of descriptors and threads, of one process at one moment."""

    rss: int
    anonymous: int
    file: int
    shared: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Process:
        folder = Path(f"/proc/{pid}")
        rss = int((folder / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        kinds = pss_by_kind(pid)
        counts = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
        return cls(rss, kinds["anonymous"], kinds["file"], kinds["shared"], *counts)


@dataclass(frozen=True)
class Note:
    """Both processes at one moment, and how many requests were sent by then; `quiet`: while nobody asks."""

    at_s: float
    requests: int
    quiet: bool
    processes: dict[str, Process]


def note_of(agent: Agent, at_s: float, requests: int, quiet: bool) -> Note:
    """Now."""
    pids = {GATEWAY: agent.process.pid, ENGINE: agent.engine_pid}
    return Note(at_s, requests, quiet, {name: Process.of(pid) for name, pid in pids.items()})


def faults(notes: Sequence[Note], wrong: Sequence[str]) -> list[str]:
    """What is not as it should be: growth between the first quiet moment after warming up and the last."""
    quiet = [note for note in notes if note.quiet]
    found = [*dict.fromkeys(wrong)][:10]
    first, last = quiet[0].processes, quiet[-1].processes
    for name in first:
        growth = last[name].rss / first[name].rss - 1
        if growth >= GROWTH:
            found.append(f"the {name}'s resident memory grew by {growth:.2%}")
        for kind in ("descriptors", "threads"):
            before, after = getattr(first[name], kind), getattr(last[name], kind)
            if after > before:
                found.append(f"the {name} has {after} {kind}, {before} after warming up")
    return found


class Soak:
    """Clients against one agent, for a while."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._engine = agent.engine_pid
        self._clients = [Client(agent.port, seed) for seed in range(CLIENTS)]
        self._started = time.monotonic()
        self.notes: list[Note] = []

    @property
    def seen(self) -> Counter[str]:
        return sum((client.seen for client in self._clients), Counter())

    @property
    def wrong(self) -> list[str]:
        return [each for client in self._clients for each in client.wrong]

    async def run(self, seconds: float, requests: int, warm_s: float, warm_requests: int) -> None:
        """Warm up, then load until both `seconds` and `requests` have passed."""
        await self._load(warm_s, warm_requests)
        await self._load(max(seconds - warm_s, 0.0), requests)

    async def _load(self, seconds: float, requests: int) -> None:
        stop, end = asyncio.Event(), time.monotonic() + seconds
        tasks = [asyncio.ensure_future(client.run(stop)) for client in self._clients]
        pause_s = min(max(seconds / 20, 0.5), 10.0)
        while time.monotonic() < end or self.seen.total() < requests:
            await asyncio.wait(tasks, timeout=min(max(end - time.monotonic(), 0.1), pause_s))
            self._note(quiet=False)
        stop.set()
        await asyncio.gather(*tasks)
        await asyncio.sleep(QUIET_S)
        self._note(quiet=True)

    def _note(self, quiet: bool) -> None:
        if self._agent.engine_pid != self._engine:
            raise SystemExit("the engine was started again: " + self._agent.log[-2000:])
        self.notes.append(note_of(self._agent, time.monotonic() - self._started, self.seen.total(), quiet))


# --- the report


def report(notes: Sequence[Note], seen: Counter[str], found: Sequence[str], machine: str) -> str:
    """Markdown."""
    lines = [
        "# Serving for long",
        "",
        f"{seen.total():,} requests of {CLIENTS} clients in {notes[-1].at_s / 60:.1f} minutes, by "
        "`python -m bench.soak`: " + ", ".join(f"{kind} {number:,}" for kind, number in seen.most_common()) + ".",
        "",
        "Nothing grew and every answer was one to be expected." if not found else "**" + "; ".join(found) + "**",
        "",
        *table(notes, "requests"),
    ]
    return "\n".join((*lines, "", machine, ""))


def table(notes: Sequence[Note], counted: str) -> list[str]:
    """Of the notes some, and all quiet ones."""
    every = max(len(notes) // 20, 1)
    lines = [
        f"| minute | {counted} | process | RSS | PSS anonymous | file | shared | descriptors | threads |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for at, note in enumerate(notes):
        if not note.quiet and at % every:
            continue
        for name, process in note.processes.items():
            sizes = (process.rss, process.anonymous, process.file, process.shared)
            lines.append(
                f"| {note.at_s / 60:.1f}{' (quiet)' if note.quiet else ''} | {note.requests:,} | {name} | "
                + " | ".join(f"{size / MIB:.2f} MiB" for size in sizes)
                + f" | {process.descriptors} | {process.threads} |"
            )
    return lines


async def soak(
    agent: Agent, seconds: float, requests: int, warm_s: float = WARM_S, warm_requests: int = WARM_REQUESTS
) -> Soak:
    """Load the agent so long, and with so many requests at the least."""
    made = Soak(agent)
    await made.run(seconds, requests, warm_s, warm_requests)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--requests", type=int, default=0)
    length.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = bundles.picking(Path(folder) / "picking.tfb", SLOTS)
        with serving(bundle, Path(folder) / "log") as agent:
            made = uvloop.run(soak(agent, max(options.minutes * 60, WARM_S + 10), options.requests))
            code = agent.stop()
            found = faults(made.notes, made.wrong)
            found += ["there is a traceback in the log"] if "Traceback" in agent.log else []
            found += [f"the agent ended with exit code {code}"] if code else []
    text = report(made.notes, made.seen, found, measured_on(describe_machine("onnxruntime", "aiohttp", "uvloop")))
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
